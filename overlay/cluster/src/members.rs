//! The members of the cluster.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::identity::{Member, NodeId, Role};

/// What says that a node is a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MemberSource {
    /// The list in the settings of the mount.
    Static,
    /// A key with a lease: the node leaves when its lease has expired.
    Etcd,
}

impl MemberSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Etcd => "etcd",
        }
    }
}

/// The members, and which sources name them. A node belongs to the cluster as long as one source names it.
///
/// A member that fails does not leave by that: it is passed over (see `Suspicions`), and what it owns stays its own. If
/// ownership followed what each node sees for itself, two nodes would seldom agree on an owner.
#[derive(Debug, Clone, Default)]
pub struct MemberList {
    /// What each source says of a member. The first source is believed where they differ.
    known: BTreeMap<NodeId, BTreeMap<MemberSource, Member>>,
}

impl MemberList {
    /// Returns whether this changed the list.
    pub fn join(&mut self, source: MemberSource, member: Member) -> bool {
        let of_sources = self.known.entry(member.id.clone()).or_default();
        of_sources.insert(source, member.clone()).as_ref() != Some(&member)
    }

    /// Returns whether this changed the list.
    pub fn leave(&mut self, source: MemberSource, id: &NodeId) -> bool {
        let Some(of_sources) = self.known.get_mut(id) else { return false };
        let named = of_sources.remove(&source).is_some();
        if of_sources.is_empty() {
            self.known.remove(id);
        }
        named
    }

    /// Takes what a source says now for all that it says. Returns whether this changed the list.
    pub fn replace(&mut self, source: MemberSource, members: Vec<Member>) -> bool {
        let staying: HashSet<&NodeId> = members.iter().map(|member| &member.id).collect();
        let gone: Vec<NodeId> = self.known.keys().filter(|id| !staying.contains(id)).cloned().collect();
        let mut changed = false;
        for id in gone {
            changed |= self.leave(source, &id);
        }
        for member in members {
            changed |= self.join(source, member);
        }
        changed
    }

    /// Returns the members with the sources that name each.
    pub fn iter(&self) -> impl Iterator<Item = (&Member, Vec<MemberSource>)> {
        self.known.values().filter_map(|of| Some((of.values().next()?, of.keys().copied().collect())))
    }

    pub fn roster(&self) -> Roster {
        Roster::of(self.known.values().filter_map(|of| of.values().next()).cloned().collect())
    }
}

/// The place of a member in one roster.
pub type Seat = u32;

/// The members at one moment, ordered by identity.
#[derive(Debug, Clone, Default)]
pub struct Roster {
    members: Vec<Member>,
    hashes: Vec<u64>,
    fingerprint: u64,
}

impl Roster {
    fn of(members: Vec<Member>) -> Self {
        let hashes: Vec<u64> = members.iter().map(|member| member.id.stable_hash()).collect();
        let mut text = Vec::new();
        for member in &members {
            text.extend(member.id.as_str().as_bytes());
            text.push(if member.role == Role::Cache { 1 } else { 0 });
        }
        Self { members, hashes, fingerprint: XxHash3_64::oneshot(&text) }
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub fn members(&self) -> &[Member] {
        &self.members
    }

    pub fn member(&self, seat: Seat) -> &Member {
        &self.members[seat as usize]
    }

    pub fn get(&self, id: &NodeId) -> Option<&Member> {
        self.seat(id).map(|seat| self.member(seat))
    }

    pub fn seat(&self, id: &NodeId) -> Option<Seat> {
        self.members.binary_search_by(|member| member.id.cmp(id)).ok().map(|at| at as Seat)
    }

    /// Two nodes whose rosters have the same fingerprint agree on all owners.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(crate) fn hash_of(&self, seat: Seat) -> u64 {
        self.hashes[seat as usize]
    }
}
