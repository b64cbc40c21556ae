//! What a user may do in a directory, and whether it may read a file. The kernel checks each request that comes through the
//! mount. This is for requests of the control socket and of HTTP clients, which act for a user.

use std::sync::Arc;

pub use forebay_api::operator::UserGroups;
use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};

use super::{Inner, Ino};
use crate::acl::{self, Acl};
use crate::coherence::Age;

/// To read a file, or the names of a directory.
pub(crate) const READ: u32 = 4;
/// To look up names in a directory.
pub(crate) const SEARCH: u32 = 1;
/// To read the names of a directory and what they name.
pub(crate) const LIST: u32 = READ | SEARCH;
/// To make and remove names in a directory.
pub(crate) const CHANGE: u32 = 2 | SEARCH;

/// Inodes whose ACLs are asked for at the same time.
const ACLS_AT_ONCE: usize = 4096;

/// The kernel's `acl_permission_check` of an inode with this mode, owner and access ACL. Root may do all
/// of this.
pub(crate) fn allows(mode: u32, (owner, group): (u32, u32), acl: Option<&Acl>, user: &UserGroups, wanted: u32) -> bool {
    let bits = match acl {
        _ if user.uid == 0 => return true,
        _ if user.uid == owner => mode >> 6,
        Some(acl) if mode & 0o070 != 0 => return acl.grants(group, user, wanted),
        _ if user.groups.contains(&group) => mode >> 3,
        _ => mode,
    };
    bits & wanted == wanted
}

/// Whether an ACL would count for a user. If not, the pool need not be asked for one.
fn acl_counts(mode: u32, (owner, _): (u32, u32), user: &UserGroups) -> bool {
    user.uid != 0 && user.uid != owner && mode & 0o070 != 0
}

impl Inner {
    /// Asks the pool for the ACLs that are needed to judge what a user may do with these inodes, as far as they are not
    /// known: with one change of the catalog for many of them.
    ///
    /// # Errors
    /// The pool does not answer.
    pub(crate) async fn learn_acls(self: &Arc<Self>, mut inos: Vec<Ino>, user: &UserGroups) -> Result<()> {
        inos.retain(|ino| self.mode_and_owner(*ino).is_ok_and(|(mode, owner)| acl_counts(mode, owner, user)));
        for some in inos.chunks(ACLS_AT_ONCE) {
            match self.learn_xattrs(some.to_vec()).await {
                Err(error) if error.is_unreachable() => return Err(error),
                // The check of the inode asks again, and tells.
                Err(_) | Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Checks that a user has these permissions in a directory, or on a file.
    ///
    /// # Errors
    /// `PermissionDenied`.
    pub(crate) async fn check_allowed(&self, ino: Ino, user: &UserGroups, wanted: u32) -> Result<()> {
        self.revalidate(ino, Age::Metadata).await?;
        let (mut mode, mut owner) = self.mode_and_owner(ino)?;
        let mut acl = None;
        if acl_counts(mode, owner, user) {
            if let Some(value) = self.xattr(ino, acl::ACCESS).await? {
                acl = Acl::parse(&value)?;
            }
            (mode, owner) = self.mode_and_owner(ino)?;
        }
        if allows(mode, owner, acl.as_ref(), user, wanted) {
            return Ok(());
        }
        let verb = match wanted {
            SEARCH => "search this directory",
            READ | LIST => "read this",
            _ => "write to this directory",
        };
        let what = format!("{}: user {} may not {verb}", self.display(ino), user.uid);
        Err(Error::new(ErrorKind::PermissionDenied, Side::Application, what))
    }

    /// Checks that a user may read a file, or everything that has a name in a directory. Of anything else, there is nothing
    /// to read.
    ///
    /// # Errors
    /// `PermissionDenied`.
    pub(crate) async fn check_readable(&self, ino: Ino, kind: FileKind, user: &UserGroups) -> Result<()> {
        match kind {
            FileKind::File => self.check_allowed(ino, user, READ).await,
            FileKind::Directory => self.check_allowed(ino, user, LIST).await,
            _ => Ok(()),
        }
    }

    /// Checks that a user may replace a name of an inode in a directory that it may change. In a sticky directory, only
    /// the owners of the two may.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub(crate) fn check_replaceable_by(&self, dir: Ino, target: Ino, user: &UserGroups) -> Result<()> {
        let (mode, (owner, _)) = self.mode_and_owner(dir)?;
        if mode & libc::S_ISVTX == 0 || user.uid == 0 || user.uid == owner {
            return Ok(());
        }
        let (_, (owner, _)) = self.mode_and_owner(target)?;
        if owner == user.uid {
            return Ok(());
        }
        let what = format!(
            "{}: it belongs to user {owner}, and user {} may not replace it: its directory is sticky",
            self.display(target),
            user.uid
        );
        Err(Error::new(ErrorKind::NotPermitted, Side::Application, what))
    }

    fn mode_and_owner(&self, ino: Ino) -> Result<(u32, (u32, u32))> {
        let node = self.node(ino)?;
        let record = &node.state.lock().record;
        Ok((record.mode, (record.uid, record.gid)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{DirBuilder, Permissions, set_permissions};
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};

    use forebay_system::identity;

    use super::*;

    /// The kernel judges the same directories, as far as this process may act for other users.
    #[test]
    fn permissions_are_those_of_the_kernel() {
        let dir = tempfile::tempdir().unwrap();
        set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let at = dir.path().join("d");
        DirBuilder::new().mode(0o700).create(&at).unwrap();
        let open = std::fs::File::open(&at).unwrap();
        let is_root = rustix::process::geteuid().is_root();
        for owner in [(5001, 5001), (6001, 5001), (6001, 6001), (0, 0)] {
            for mode in [0o700, 0o070, 0o007, 0o755, 0o775, 0o705, 0o730, 0o1777, 0] {
                for uid in [5001, 0] {
                    let user = UserGroups { uid, groups: vec![uid] };
                    let allowed = allows(mode, owner, None, &user, CHANGE);
                    if is_root {
                        chown(&at, Some(owner.0), Some(owner.1)).unwrap();
                        set_permissions(&at, Permissions::from_mode(mode)).unwrap();
                        let judged = identity::as_user(uid, || identity::check_may_change(&open)).is_ok();
                        assert_eq!(allowed, judged, "{mode:o} {owner:?} {uid}");
                    }
                    assert!(uid != 0 || allowed);
                }
            }
        }
    }
}
