//! Inodes in memory: a bounded cache of the catalog, plus what only matters while the daemon lives.
//!
//! Locking: the namespace lock (held by a [`crate::Txn`]) comes before inode locks; without it at most
//! one inode is locked at a time; no lock is held across an await or a call to the pool.
//!
//! The kernel's lookup counts are kept beside the nodes. So an inode that the kernel knows, but that is not in use,
//! needs memory for its count alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dashmap::mapref::entry::Entry as Slot;
use dashmap::{DashMap, DashSet};
use forebay_backends::{FileKind, Result, Time, Version};
use forebay_cache::{Content, Stamp};
use forebay_catalog::{Catalog, ContentRecord, InodeRecord, Leases};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::Growth;
use crate::Ino;
use crate::rights::RightsNews;
use crate::staging::leases::Stagings;
use crate::{NamesState, NamesSync};

/// Inodes kept in memory beyond those in use: some 18 MiB, at 1.5 KiB for each inode with all that belongs to it.
const IDLE_INODES: usize = 12_000;
/// A map gives memory back only if it has room for at least this many more entries than it needs.
const CROWD: usize = 10_000;
/// Names of one directory that are remembered as absent from the pool.
const NEGATIVE_NAMES: usize = 256;

/// How a fetch ended, for all callers that wait for it: each of them gets the error.
pub(crate) type Flight = watch::Receiver<Option<Result<(), Arc<forebay_backends::Error>>>>;

#[derive(Debug)]
pub(crate) struct Node {
    pub ino: Ino,
    pub state: Arc<Mutex<NodeState>>,
    /// Serialises the pool calls that change the pool's copy.
    pub flush: tokio::sync::Mutex<()>,
    /// Held while bytes that another client appended to the file are fetched.
    pub growth: tokio::sync::Mutex<()>,
    /// Held while a directory is listed.
    pub listing: tokio::sync::Mutex<()>,
    /// Of a directory: the syncs that make its names durable in the pool.
    pub names_sync: NamesSync,
    /// Of a directory: which names it shows.
    pub names_state: NamesState,
}

/// The state of one inode. `record` is the catalog's record; the rest is forgotten when the daemon ends.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub record: InodeRecord,
    /// The record in the catalog is dirty, so the index of intents has it.
    pub indexed_dirty: bool,
    /// The inode's record has been deleted from the catalog.
    pub deleted: bool,
    pub readers: u32,
    pub writers: u32,
    pub content: Option<Arc<Content>>,
    /// Read from the catalog when first needed.
    pub residency: Option<ContentRecord>,
    pub leases: Leases,
    pub stagings: Vec<Stagings>,
    /// Chunks that are being fetched.
    pub flights: HashMap<u64, Flight>,
    /// When the pool last confirmed the record.
    pub validated: Option<Instant>,
    /// Counts the changes of the content that the daemon sees. A flush of an older generation does not make the file
    /// clean.
    pub generation: u64,
    /// Pool calls that change the pool's copy or, for a directory, its names: how many began and how many ended. If
    /// such a call runs while the pool is asked, the pool's answer does not count.
    pub pool_calls: (u64, u64),
    /// Of a directory: counts names that a flush changed in the pool. Each such change moved the directory's times
    /// there.
    pub names_flushed: u64,
    /// The version before one of the daemon's own steps on one of the inode's names. The step changes the version in
    /// the pool, and the new version is unknown if an answer is lost. Void once the record has another version.
    pub version_behind: Option<Version>,
    /// Of a directory: single names that were looked up in the pool since the last listing.
    pub single_lookups: u32,
    /// When all names of the directory were last read from the pool.
    pub listed_at: Option<Instant>,
    pub negative: HashMap<Box<[u8]>, Instant>,
    pub written_past: Option<WrittenPast>,
    /// Another client removed or replaced its last name in the pool while it was open. A write would be lost at close.
    pub superseded: bool,
    /// Its content was replaced by an empty content file, and the last writer has not closed it since.
    pub emptied: bool,
    /// The content file is immutable until there is room.
    pub throttled: bool,
    /// The catalog does not have the byte count of the content yet.
    pub count_unsaved: bool,
    /// The record that the content is dirty is not synced yet.
    pub mark_unsynced: bool,
    /// The stamp of the content when it was marked dirty. If the stamp is still the same, nothing was written.
    pub clean_stamp: Option<Stamp>,
    /// The stamp of the content at its last upload while writers had it open. If it is still the same, nothing was
    /// written.
    pub uploaded: Option<Stamp>,
    /// A program has it open for direct I/O. Such a write may still be under way when the file's times no longer
    /// change.
    pub written_direct: bool,
    /// The kernel's page cache may hold another version.
    pub page_cache_stale: bool,
    pub growth: Growth,
    pub rights: RightsNews,
    /// Requests for its attributes whose answer is not complete yet.
    pub answering: u32,
    /// A notification to the kernel was withheld, because those answers make it unnecessary.
    pub news_withheld: bool,
    pub readahead: Readahead,
    /// When the last writer closed the file; `None`: not since the node was loaded.
    pub quiet_since: Option<Instant>,
    /// The stamp of the content, which programs may write, and when the flusher first saw this stamp.
    pub seen: Option<(Stamp, Instant)>,
    /// The flusher postponed the file until its last close.
    pub held_off: bool,
}

/// A program may write the content file without the daemon.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WrittenPast {
    /// Size and mtime of the content when the file got set-id bits. Once either differs, the bits are removed.
    pub set_id_since: Option<(u64, Time)>,
}

/// The readahead for a sequential reader.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Readahead {
    /// Where the last read through the daemon ended.
    pub end: u64,
    /// The end of the range that was requested ahead.
    pub until: u64,
    /// How far ahead, in bytes.
    pub window_bytes: u64,
}

impl NodeState {
    /// Of a directory: records that the pool does not have a name.
    pub fn note_absent(&mut self, name: &[u8]) {
        if self.negative.len() >= NEGATIVE_NAMES {
            self.negative.clear();
        }
        self.negative.insert(name.into(), Instant::now());
    }

    fn new(record: InodeRecord, leases: Leases) -> Self {
        Self {
            indexed_dirty: record.is_dirty(),
            record,
            deleted: false,
            readers: 0,
            writers: 0,
            content: None,
            residency: None,
            leases,
            stagings: Vec::new(),
            flights: HashMap::new(),
            validated: None,
            generation: 0,
            pool_calls: (0, 0),
            names_flushed: 0,
            version_behind: None,
            single_lookups: 0,
            listed_at: None,
            negative: HashMap::new(),
            written_past: None,
            written_direct: false,
            superseded: false,
            emptied: false,
            throttled: false,
            count_unsaved: false,
            mark_unsynced: false,
            clean_stamp: None,
            uploaded: None,
            page_cache_stale: false,
            growth: Growth::default(),
            rights: RightsNews::default(),
            answering: 0,
            news_withheld: false,
            readahead: Readahead::default(),
            quiet_since: None,
            seen: None,
            held_off: false,
        }
    }

    /// Records that a program opened the file for writing; `past`: it writes without the daemon.
    pub fn may_be_written_past(&mut self, past: bool) {
        if past {
            self.written_past.get_or_insert_default();
        }
    }

    /// Records that the daemon changes the content: a flush that is under way sends an older state.
    pub fn changed(&mut self) {
        self.generation += 1;
        self.uploaded = None;
    }

    /// Returns whether the pool has everything that was written to a file that stays dirty because a program may still
    /// write it.
    pub fn is_uploaded(&self) -> bool {
        match (&self.uploaded, &self.content) {
            (Some(stamp), Some(content)) if self.record.in_pool() => {
                Stamp::of(&content.file).is_ok_and(|now| now == *stamp)
            }
            _ => false,
        }
    }

    pub fn is_open(&self) -> bool {
        self.readers + self.writers > 0
    }

    /// Returns whether no name leads to the inode any more.
    pub fn is_unlinked(&self, ino: Ino) -> bool {
        !self.record.has_names() && ino != Ino::ROOT
    }

    /// Returns whether the catalog has everything that matters of the inode.
    fn is_idle(&self) -> bool {
        !self.is_open()
            && self.flights.is_empty()
            && self.stagings.is_empty()
            && !self.count_unsaved
            && self.uploaded.is_none()
            && self.pool_calls.0 == self.pool_calls.1
            && !self.throttled
            && self.written_past.is_none()
            && !self.mark_unsynced
            && !self.deleted
            // The descriptor of the only copy stays open: a later one may not report that a write-back failed.
            && !(self.content.is_some() && self.record.file.is_dirty())
    }
}

/// The inodes in memory.
#[derive(Debug, Default)]
pub(crate) struct Table {
    nodes: DashMap<Ino, Arc<Node>>,
    /// The kernel's lookup count of each inode. Locked after a shard of `nodes`.
    lookups: DashMap<Ino, u64>,
    /// Inodes without names that stay until the kernel forgets them.
    nameless: DashSet<Ino>,
}

impl Table {
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
                node.state.lock().page_cache_stale = self.lookups.contains_key(&ino);
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

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Drops a node that neither the daemon nor the kernel needs.
    pub fn drop_idle(&self, ino: Ino) {
        self.nodes.remove_if(&ino, |_, node| !self.lookups.contains_key(&ino) && Self::idle(node));
    }

    fn idle(node: &Arc<Node>) -> bool {
        Arc::strong_count(node) == 1 && node.state.try_lock().is_some_and(|s| s.is_idle())
    }

    /// Drops a deleted inode that is not open and that the kernel does not know any more.
    pub fn drop_deleted(&self, ino: Ino) {
        self.nodes.remove_if(&ino, |_, node| {
            !self.lookups.contains_key(&ino) && node.state.try_lock().is_some_and(|s| s.deleted && !s.is_open())
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
                if !Self::idle(node) || is_dir && self.lookups.contains_key(ino) {
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

    /// Gives memory back after many inodes were forgotten: a map keeps room for the most entries that it ever had.
    pub fn give_back(&self) {
        // Right after a map shrank, it may have room for twice its entries.
        let worth = |capacity: usize, len: usize| capacity > 2 * (len + CROWD);
        if worth(self.nodes.capacity(), self.nodes.len()) {
            self.nodes.shrink_to_fit();
        }
        if worth(self.lookups.capacity(), self.lookups.len()) {
            self.lookups.shrink_to_fit();
        }
    }

    pub fn for_each(&self, mut each: impl FnMut(&Arc<Node>)) {
        for node in self.nodes.iter() {
            each(node.value());
        }
    }
}

impl Node {
    fn new(ino: Ino, record: InodeRecord, leases: Leases) -> Arc<Self> {
        Arc::new(Self {
            ino,
            state: Arc::new(Mutex::new(NodeState::new(record, leases))),
            flush: tokio::sync::Mutex::new(()),
            growth: tokio::sync::Mutex::new(()),
            listing: tokio::sync::Mutex::new(()),
            names_sync: NamesSync::default(),
            names_state: NamesState::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use forebay_backends::{Stat, Time, Version};

    use super::*;
    use forebay_catalog::Durability;

    fn file() -> InodeRecord {
        let time = Time { secs: 1, nanos: 0 };
        InodeRecord::from_pool(
            &Stat {
                kind: FileKind::File,
                mode: 0o644,
                uid: 0,
                gid: 0,
                nlink: 1,
                rdev: 0,
                size: 0,
                occupied: None,
                atime: time,
                mtime: time,
                ctime: time,
                version: Version::Tag { etag: String::new(), id: String::new(), size: 0, mtime: time },
            },
            None,
        )
    }

    #[test]
    fn inodes_that_only_the_kernel_knows_leave_the_memory_and_keep_their_count() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(dir.path(), Durability::Process).unwrap();
        let table = Table::default();
        let get = |ino| table.get(&catalog, ino, |_| Ok(())).unwrap().unwrap();
        let all = (1000..1000 + 4 * IDLE_INODES as u64).map(Ino);
        for ino in all.clone() {
            let mut batch = catalog.batch();
            batch.put_inode(ino, &file(), false);
            catalog.write(batch).unwrap();
            get(ino);
            table.count_lookup(ino);
            table.count_lookup(ino);
        }
        assert!((IDLE_INODES / 2 - 1..=IDLE_INODES).contains(&table.len()), "{}", table.len());
        let first = all.clone().find(|ino| table.peek(*ino).is_none()).unwrap();
        assert!(get(first).state.lock().page_cache_stale, "what the kernel cached is not trusted");
        table.forget(first, 1);
        assert!(table.peek(first).is_some(), "the kernel knows it still");
        table.forget(first, 1);
        assert!(table.peek(first).is_none());
    }
}
