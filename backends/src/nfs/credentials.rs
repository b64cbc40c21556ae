//! The identity of calls: AUTH_SYS, which the server trusts.
//!
//! This process calls as itself. If it is root, it may also call as the owner of the object in question: a server
//! with root squash maps root to the user `nobody`, and the user of the pool has already checked the program's rights.

use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use rustix::process::{getegid, geteuid};

use crate::{Attrs, Stat};

/// The limit of AUTH_SYS.
const MAX_GROUPS: usize = 16;

/// The owner of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl From<&Stat> for Owner {
    fn from(stat: &Stat) -> Self {
        Self { uid: stat.uid, gid: stat.gid }
    }
}

impl From<&Attrs> for Owner {
    fn from(attrs: &Attrs) -> Self {
        Self { uid: attrs.uid, gid: attrs.gid }
    }
}

#[derive(Debug)]
pub(super) struct Credentials {
    machine: Vec<u8>,
    myself: opaque_auth<'static>,
    is_root: bool,
}

impl Credentials {
    /// The identity of this process.
    pub(super) fn of_process() -> Self {
        let machine = rustix::system::uname().nodename().to_bytes().to_vec();
        let (uid, gid) = (geteuid(), getegid());
        let mut groups = rustix::process::getgroups().unwrap_or_default();
        groups.retain(|group| *group != gid);
        groups.truncate(MAX_GROUPS);
        let gids = groups.into_iter().map(|group| group.as_raw()).collect();
        let myself = auth_sys(&machine, uid.as_raw(), gid.as_raw(), gids);
        Self { machine, myself, is_root: uid.is_root() }
    }

    pub(super) fn is_root(&self) -> bool {
        self.is_root
    }

    pub(super) fn myself(&self) -> &opaque_auth<'static> {
        &self.myself
    }

    /// The identities with which to try a call about objects of these owners, in this order.
    pub(super) fn in_turn(&self, owners: &[Owner], owners_first: bool) -> Vec<opaque_auth<'static>> {
        let mut turns = Vec::with_capacity(1 + owners.len());
        if !owners_first {
            turns.push(self.myself.clone());
        }
        for (n, owner) in owners.iter().enumerate() {
            if self.is_root && owner.uid != 0 && !owners[..n].contains(owner) {
                turns.push(auth_sys(&self.machine, owner.uid, owner.gid, Vec::new()));
            }
        }
        if owners_first {
            turns.push(self.myself.clone());
        }
        turns
    }
}

fn auth_sys(machine: &[u8], uid: u32, gid: u32, gids: Vec<u32>) -> opaque_auth<'static> {
    opaque_auth::auth_unix(&auth_unix { stamp: 0, machinename: Opaque::owned(machine.to_vec()), uid, gid, gids })
}
