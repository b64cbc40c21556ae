//! What a change has collected for one inode, and what its commit does to the inode's state.

use std::sync::Arc;

use forebay_cache::Content;
use forebay_catalog::{ContentRecord, InodeRecord};

use super::Guard;
use crate::node::{Node, NodeState};
use crate::{Inner, Ino};

/// An inode that a change touches, with its lock.
pub(super) struct Edit<'a> {
    pub guard: Guard<NodeState>,
    pub node: Arc<Node>,
    pub record: InodeRecord,
    /// The commit deletes the record.
    pub gone: bool,
    pub collected: CollectedState<'a>,
}

/// A change of an inode's state that waits for the commit.
type Change<'a> = Box<dyn FnOnce(&mut NodeState) + 'a>;

/// What the commit changes in an inode's state beside its record. Until the batch is written, the state keeps what it
/// has: a write fails when the device is full.
#[derive(Default)]
pub(super) struct CollectedState<'a> {
    /// The content file and the record of its valid bytes; `None` inside: it has none any more.
    pub content: Option<Option<(Arc<Content>, ContentRecord)>>,
    /// The record of the valid bytes of the content file that it has.
    pub residency: Option<ContentRecord>,
    /// The batch has the byte count of the content.
    pub count_saved: bool,
    /// The bytes that can be evicted, or that there are none any more. `None` beside dropped content: the eviction policy
    /// chose it, and knows.
    pub evictable: Option<Option<u64>>,
    /// The other changes, in their order.
    pub changes: Vec<Change<'a>>,
}

impl CollectedState<'_> {
    pub fn drop_content(&mut self) {
        (self.content, self.residency) = (Some(None), None);
        self.count_saved = true;
        self.evictable = Some(None);
    }

    pub fn apply(self, ino: Ino, state: &mut NodeState, inner: &Inner) {
        let is_dropped = matches!(self.content, Some(None));
        if let Some(content) = self.content {
            (state.content, state.residency) = content.unzip();
        }
        if let Some(residency) = self.residency {
            state.residency = Some(residency);
        }
        state.count_unsaved &= !self.count_saved;
        for change in self.changes {
            change(state);
        }
        match self.evictable {
            Some(Some(bytes)) => inner.note_clean(ino, state.record.file.content(), bytes),
            Some(None) => inner.note_not_clean(ino),
            None if is_dropped => inner.note_evicted(ino),
            None => {}
        }
    }
}

impl Edit<'_> {
    /// Returns whether no name leads to the inode any more, so that its leases are of no use.
    pub fn ends_leases(&self, ino: Ino) -> bool {
        self.gone || (ino != Ino::ROOT && !self.record.has_names() && !self.guard.leases.is_empty())
    }
}
