//! The inodes in memory: a bounded cache of the catalog.
//!
//! The kernel's lookup counts are kept beside the nodes. So an inode that the kernel knows, but that is not in use,
//! needs memory for its count alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dashmap::mapref::entry::Entry as Slot;
use dashmap::{DashMap, DashSet};
use forebay_backends::{FileKind, Result};
use forebay_catalog::{Catalog, InodeRecord, Leases};

use super::{Ino, Node};

/// Inodes kept in memory beyond those in use: some 18 MiB, at 1.5 KiB for each inode with all that belongs to it.
const IDLE_INODES: usize = 12_000;
/// A map gives memory back only if it has room for at least this many more entries than it needs.
const CROWD: usize = 10_000;

/// The inodes in memory.
#[derive(Debug, Default)]
pub(crate) struct NodeTable {
    nodes: DashMap<Ino, Arc<Node>>,
    /// The kernel's lookup count of each inode. Locked after a shard of `nodes`.
    lookups: DashMap<Ino, u64>,
    /// Inodes without names that stay until the kernel forgets them.
    nameless: DashSet<Ino>,
    /// Inodes that the kernel forgot since [`Self::has_forgotten_many`] returned `true`.
    forgotten: AtomicUsize,
    /// How many times programs have files open.
    pub opens: AtomicU64,
    /// The kernel may have pages that it got from a daemon that died. What that daemon was about to tell the kernel is
    /// lost.
    reattached: bool,
}

impl NodeTable {
    /// `reattached`: the mount was taken over from a daemon that died.
    pub fn new(reattached: bool) -> Self {
        Self { reattached, ..Self::default() }
    }

    /// Returns the node of an inode, from memory or from the catalog, or `None` if there is no such inode.
    ///
    /// `distrust` gets each record that was read from the catalog. It may give up content that a power cut may have
    /// damaged.
    pub fn get(
        &self,
        catalog: &Catalog,
        ino: Ino,
        distrust: impl FnOnce(&mut InodeRecord) -> Result<()>,
    ) -> Result<Option<Arc<Node>>> {
        if let Some(node) = self.nodes.get(&ino) {
            return Ok(Some(node.clone()));
        }
        // The slot is locked while the catalog is read, so that a node is never made twice.
        let node = match self.nodes.entry(ino) {
            Slot::Occupied(slot) => slot.get().clone(),
            Slot::Vacant(slot) => {
                let Some(mut record) = catalog.inode(ino)? else { return Ok(None) };
                distrust(&mut record)?;
                let leases = catalog.leases_of(ino)?;
                let node = Node::new(ino, record, leases);
                // The kernel's caches may be older than the state that the inode had when its node left the memory.
                if self.reattached || self.lookups.contains_key(&ino) {
                    node.state.lock().kernel.pages_go_stale();
                }
                slot.insert(node).clone()
            }
        };
        self.trim();
        Ok(Some(node))
    }

    /// Adds an inode that was just created.
    pub fn insert(&self, ino: Ino, record: InodeRecord) {
        // Another request may have found the name in the catalog already, and made the node first.
        self.nodes.entry(ino).or_insert_with(|| Node::new(ino, record, Leases::default()));
        self.trim();
    }

    /// Counts another lookup of an inode by the kernel.
    pub fn count_lookup(&self, ino: Ino) {
        *self.lookups.entry(ino).or_default() += 1;
    }

    /// Subtracts `count` lookups that the kernel has forgotten. If none is left, the inode leaves the memory, unless it
    /// is in use. Returns whether the inode had no names and stayed only for the kernel.
    pub fn forget(&self, ino: Ino, count: u64) -> bool {
        if let Slot::Occupied(mut slot) = self.lookups.entry(ino) {
            *slot.get_mut() = slot.get().saturating_sub(count);
            if *slot.get() > 0 {
                return false;
            }
            slot.remove();
            self.forgotten.fetch_add(1, Ordering::Relaxed);
        }
        self.drop_deleted(ino);
        self.drop_idle(ino);
        self.nameless.remove(&ino).is_some()
    }

    /// Notes that an inode without names stays until the kernel forgets it.
    pub fn stays_until_forgotten(&self, ino: Ino) {
        self.nameless.insert(ino);
    }

    /// Returns whether the kernel knows an inode that has no names any more. If it does, [`Self::forget`] returns
    /// `true` once the kernel forgets the inode. The inode is noted before the lookups are checked: if the kernel
    /// forgets the inode at the same moment, one of the two functions finds it.
    pub fn outlives_names(&self, ino: Ino) -> bool {
        self.nameless.insert(ino);
        let known = self.lookups.contains_key(&ino);
        if !known {
            self.nameless.remove(&ino);
        }
        known
    }

    pub fn is_known_to_kernel(&self, ino: Ino) -> bool {
        self.lookups.contains_key(&ino)
    }

    pub fn peek(&self, ino: Ino) -> Option<Arc<Node>> {
        self.nodes.get(&ino).map(|n| n.clone())
    }

    /// Returns how many inodes the kernel knows.
    pub fn known_to_kernel(&self) -> usize {
        self.lookups.len()
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Drops a node that neither the daemon nor the kernel needs.
    pub fn drop_idle(&self, ino: Ino) {
        self.nodes.remove_if(&ino, |_, node| !self.is_kept_for_kernel(ino) && Self::idle(node));
    }

    /// Returns whether an inode that is not in use stays. The kernel never looks up the root, and never forgets it.
    fn is_kept_for_kernel(&self, ino: Ino) -> bool {
        ino == Ino::ROOT || self.lookups.contains_key(&ino)
    }

    fn idle(node: &Arc<Node>) -> bool {
        Arc::strong_count(node) == 1 && node.state.try_lock().is_some_and(|s| s.is_idle())
    }

    /// Drops a deleted inode that is not open and that the kernel does not know any more.
    pub fn drop_deleted(&self, ino: Ino) {
        self.nodes.remove_if(&ino, |_, node| {
            !self.lookups.contains_key(&ino) && node.state.try_lock().is_some_and(|s| s.is_deleted() && !s.opens.any())
        });
    }

    /// Keeps the table bounded: drops every second inode that is not in use. A program that loops over more inodes than
    /// fit still finds a part of them. Directories that the kernel knows stay: they are few, and only their nodes
    /// remember what the pool answered about their names.
    fn trim(&self) {
        static NEXT: AtomicUsize = AtomicUsize::new(IDLE_INODES);
        let len = self.nodes.len();
        if len > NEXT.load(Ordering::Relaxed) {
            let (mut idle, mut in_use) = (0, 0);
            self.nodes.retain(|ino, node| {
                let is_dir = node.state.try_lock().is_none_or(|s| s.record.kind == FileKind::Directory);
                if !Self::idle(node) || is_dir && self.is_kept_for_kernel(*ino) {
                    in_use += 1;
                    return true;
                }
                idle += 1;
                idle % 2 == 0
            });
            self.nodes.shrink_to_fit();
            NEXT.store(in_use * 2 + IDLE_INODES, Ordering::Relaxed);
        }
    }

    /// Returns `true` once after every so many inodes that the kernel forgot: then there may be memory to give back.
    pub fn has_forgotten_many(&self) -> bool {
        self.forgotten.load(Ordering::Relaxed) >= CROWD && self.forgotten.swap(0, Ordering::Relaxed) >= CROWD
    }

    /// Returns whether [`Self::give_back`] would give memory back.
    pub fn holds_spare_memory(&self) -> bool {
        is_spacious(self.nodes.capacity(), self.nodes.len()) || is_spacious(self.lookups.capacity(), self.lookups.len())
    }

    /// Gives memory back after many inodes were forgotten: a map keeps room for the most entries that it ever had.
    pub fn give_back(&self) {
        if is_spacious(self.nodes.capacity(), self.nodes.len()) {
            self.nodes.shrink_to_fit();
        }
        if is_spacious(self.lookups.capacity(), self.lookups.len()) {
            self.lookups.shrink_to_fit();
        }
    }
}

/// Right after a map shrank, it may have room for twice its entries.
fn is_spacious(capacity: usize, len: usize) -> bool {
    capacity > 2 * (len + CROWD)
}

#[cfg(test)]
mod tests {
    use forebay_catalog::Durability;

    use super::*;
    use crate::node::tests::file_of_pool;

    #[test]
    fn the_memory_of_forgotten_inodes_is_given_back() {
        let table = NodeTable::default();
        let all = (1..=10 * CROWD as u64).map(Ino);
        all.clone().for_each(|ino| table.count_lookup(ino));
        assert!(!table.has_forgotten_many() && !table.holds_spare_memory());
        all.for_each(|ino| _ = table.forget(ino, 1));
        assert!(table.has_forgotten_many() && !table.has_forgotten_many());
        assert!(table.holds_spare_memory());
        table.give_back();
        assert!(!table.holds_spare_memory());
    }

    #[test]
    fn inodes_that_only_the_kernel_knows_leave_the_memory_and_keep_their_count() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let table = NodeTable::default();
        let get = |ino| table.get(&catalog, ino, |_| Ok(())).unwrap().unwrap();
        let all = (1000..1000 + 4 * IDLE_INODES as u64).map(Ino);
        for ino in all.clone() {
            let mut batch = catalog.batch();
            batch.put_inode(ino, &file_of_pool(0), false);
            catalog.write(batch).unwrap();
            get(ino);
            table.count_lookup(ino);
            table.count_lookup(ino);
        }
        assert!((IDLE_INODES / 2 - 1..=IDLE_INODES).contains(&table.len()), "{}", table.len());
        let first = all.clone().find(|ino| table.peek(*ino).is_none()).unwrap();
        assert!(!get(first).state.lock().kernel.pages().valid, "what the kernel cached is not trusted");
        table.forget(first, 1);
        assert!(table.peek(first).is_some(), "the kernel knows it still");
        table.forget(first, 1);
        assert!(table.peek(first).is_none());
    }
}
