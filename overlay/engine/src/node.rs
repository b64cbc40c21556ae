//! An inode in memory: the catalog's record, plus what only matters while the daemon lives.
//!
//! Locking: the namespace lock (held by a [`crate::Txn`]) comes before inode locks; without it at most
//! one inode is locked at a time; no lock is held across an await or a call to the pool.

mod bypass;
mod dirty_content;
mod late_uploads;
mod load;
mod opens;
mod parsed_policy;
mod pool_sync;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use forebay_backends::{Error, ErrorKind, Result, Side, Stat, Version};
use forebay_cache::{Content, Stamp};
use forebay_catalog::{Catalog, ContentRecord, InodeRecord, Leases};
use parking_lot::Mutex;
use tokio::sync::watch;

pub(crate) use self::bypass::{Bypass, Written};
pub(crate) use self::dirty_content::DirtyContent;
pub(crate) use self::late_uploads::LateUploads;
pub(crate) use self::opens::FileOpens;
use self::parsed_policy::ParsedPolicy;
pub(crate) use self::parsed_policy::settings_in;
pub(crate) use self::pool_sync::PoolSync;
pub(crate) use self::table::NodeTable;
use crate::rights::RightsNews;
use crate::staging::leases::Stagings;
use crate::{CachedPages, Growth, Ino, NamesState, NamesSync};

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
    pub attachment: Attachment,
    pub opens: FileOpens,
    pub content: Option<Arc<Content>>,
    /// Read from the catalog when first needed.
    pub residency: Option<ContentRecord>,
    /// The catalog does not have the byte count of the content yet.
    pub count_unsaved: bool,
    pub leases: Leases,
    pub stagings: Vec<Stagings>,
    /// Chunks that are being fetched.
    pub flights: HashMap<u64, Flight>,
    /// When the pool was asked about what it last confirmed of the record.
    pub validated: Option<Instant>,
    /// The same, without the daemon's own calls, and kept when the record has to be confirmed again.
    answered: Option<Instant>,
    /// The version before one of the daemon's own steps on one of the inode's names. The step changes the version in
    /// the pool, and the new version is unknown if an answer is lost. Void once the record has another version.
    pub version_behind: Option<Version>,
    /// Counts the changes of the content that the daemon sees. A flush of an older generation does not make the file
    /// clean.
    pub generation: u64,
    /// Counts the changes of which ranges of the content are spilled.
    pub spills: u64,
    /// Pool calls that change the pool's copy or, for a directory, its names: how many began and how many ended. If
    /// such a call runs while the pool is asked, the pool's answer does not count.
    pub pool_calls: (u64, u64),
    pub bypass: Bypass,
    pub dirty_content: DirtyContent,
    pub late_uploads: LateUploads,
    pub pool_sync: PoolSync,
    /// Its content was replaced by an empty content file, and the last writer has not closed it since.
    pub emptied: bool,
    pub quiescence: Quiescence,
    pub growth: Growth,
    pub readahead: Readahead,
    pub rights: RightsNews,
    pub kernel: KernelView,
    pub names: KnownNames,
    parsed_policy: ParsedPolicy,
}

/// What an inode belongs to. It only moves down this list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Attachment {
    /// The catalog has its record.
    #[default]
    Catalog,
    /// Another client removed or replaced its last name in the pool while it was open. A write would be lost at close.
    Superseded,
    /// Its record has been deleted from the catalog.
    Deleted,
}

/// Since when a dirty file is as it is, for the decision to flush it.
#[derive(Debug, Default)]
pub(crate) struct Quiescence {
    /// When the last writer closed the file; `None`: not since the node was loaded.
    pub closed_at: Option<Instant>,
    /// The stamp of the content, which programs may write, and when the flusher first saw this stamp.
    pub seen: Option<(Stamp, Instant)>,
    /// The flusher postponed the file until its last close.
    pub postponed: bool,
}

/// What the kernel may have cached of an inode.
#[derive(Debug, Default)]
pub(crate) struct KernelView {
    /// Counts the changes after which cached pages are those of another version.
    changes: u64,
    /// As many of these changes were made before the kernel last dropped all pages.
    dropped_after: u64,
    /// Requests for its attributes whose answer is not complete yet.
    pub answering: u32,
    /// A notification to the kernel was withheld, because those answers make it unnecessary.
    pub news_withheld: bool,
}

/// Of a directory: what is known of its names in the pool.
#[derive(Debug, Default)]
pub(crate) struct KnownNames {
    /// Counts names that a flush changed in the pool. Each such change moved the directory's times there.
    pub flushed: u64,
    /// Single names that were looked up in the pool since the last listing.
    pub single_lookups: u32,
    /// When all names of the directory were last read from the pool.
    pub listed_at: Option<Instant>,
    /// Names that the pool did not have, and when.
    pub negative: HashMap<Box<[u8]>, Instant>,
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

impl KernelView {
    /// The kernel's page cache may hold another version from now on.
    pub fn pages_go_stale(&mut self) {
        self.changes += 1;
    }

    /// Returns what an open may tell the kernel of its page cache.
    pub fn pages(&self) -> CachedPages {
        CachedPages { valid: self.dropped_after == self.changes, changes: self.changes }
    }

    /// The kernel drops all pages that it cached before `pages` was returned.
    pub fn pages_dropped(&mut self, pages: CachedPages) {
        self.dropped_after = self.dropped_after.max(pages.changes);
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

    /// Returns whether ranges of the dirty content are in parts in the pool.
    pub fn is_spilled(&self) -> bool {
        self.state.lock().record.file.is_spilled()
    }

    /// Returns whether programs write to the pool's copy: the file does not fit into the fast pool.
    pub fn is_written_through(&self) -> bool {
        self.state.lock().record.file.is_written_through()
    }
}

impl NodeState {
    fn new(record: InodeRecord, leases: Leases) -> Self {
        let mut pool_sync = PoolSync::default();
        if record.file.is_written_through() {
            // A daemon that was killed may have written.
            pool_sync.wrote(0);
        }
        Self {
            indexed_dirty: record.is_dirty(),
            record,
            attachment: Attachment::default(),
            opens: FileOpens::default(),
            content: None,
            residency: None,
            count_unsaved: false,
            leases,
            stagings: Vec::new(),
            flights: HashMap::new(),
            validated: None,
            answered: None,
            version_behind: None,
            generation: 0,
            spills: 0,
            pool_calls: (0, 0),
            bypass: Bypass::default(),
            dirty_content: DirtyContent::default(),
            late_uploads: LateUploads::default(),
            pool_sync,
            emptied: false,
            quiescence: Quiescence::default(),
            growth: Growth::default(),
            readahead: Readahead::default(),
            rights: RightsNews::default(),
            kernel: KernelView::default(),
            names: KnownNames::default(),
            parsed_policy: ParsedPolicy::default(),
        }
    }

    /// Records that the record is what the pool answered to a question of that moment.
    pub fn take_answer_of(&mut self, asked: Instant) {
        self.validated = self.validated.max(Some(asked));
        self.answered = self.answered.max(Some(asked));
    }

    /// Returns whether the record is the answer to a later question than that of the moment `asked`. Then the answer to the
    /// earlier question, `there`, does not count, because it may be older. Nothing is lost: the record is of a moment after
    /// the earlier question, as its caller requires. If only the earlier answer has a change, the change is one since the
    /// later question, and the next question finds it, because the record counts as confirmed at the later question.
    ///
    /// `there`: `None` if the pool had nothing. If an object has several names, the later question may have been about
    /// another name than the earlier one, so only the answers on the object itself are compared.
    pub fn is_overtaken(&self, asked: Instant, there: Option<&Stat>) -> bool {
        let is_about_it = there.is_some_and(|stat| self.record.is_object(stat)) || self.record.pool_links.len() < 2;
        is_about_it && self.answered.is_some_and(|answered| answered > asked)
    }

    /// Records that the daemon changes the content: a flush that is under way sends an older state.
    pub fn changed(&mut self) {
        self.generation += 1;
        self.dirty_content.forget_pool_copy();
    }

    /// Other ranges of the content are spilled from now on.
    pub fn spilled(&mut self) {
        self.spills += 1;
        self.changed();
    }

    /// Records that the content is given up, with what programs may have read of it: it cannot be compared any more.
    pub fn content_goes(&mut self) {
        self.growth.read_unkept |= self.opens.any();
    }

    /// Returns whether the pool has everything that was written to a file that stays dirty because a program may still
    /// write it.
    pub fn is_uploaded(&self) -> bool {
        match (self.dirty_content.uploaded_stamp(), &self.content) {
            (Some(stamp), Some(content)) if self.record.in_pool() => {
                Stamp::of(&content.file).is_ok_and(|now| now == stamp)
            }
            _ => false,
        }
    }

    /// Returns which ranges of the content file are valid; read from the catalog when first needed.
    pub fn residency(&mut self, catalog: &Catalog) -> Result<&mut ContentRecord> {
        if self.residency.is_none() {
            let id = self.record.file.content();
            let (size, partial) = (self.record.size, self.record.file.is_partial());
            let read = |id| if partial { catalog.partial_content(id, size) } else { catalog.content(id) };
            self.residency = id.map(read).transpose()?.flatten();
        }
        self.residency.as_mut().ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, Side::Cache, "a content file has no record: run `forebay fsck --repair`")
        })
    }

    /// Returns whether a program may write the content: it has the file open for writing, or mapped.
    pub fn may_be_written(&self) -> bool {
        self.opens.has_writer() || !self.bypass.is_none()
    }

    /// Returns whether the inode's record has been deleted from the catalog.
    pub fn is_deleted(&self) -> bool {
        self.attachment == Attachment::Deleted
    }

    /// Returns whether another client removed or replaced the last name while the file was open.
    pub fn is_superseded(&self) -> bool {
        self.attachment == Attachment::Superseded
    }

    /// Returns whether no name leads to the inode any more.
    pub fn is_unlinked(&self, ino: Ino) -> bool {
        !self.record.has_names() && ino != Ino::ROOT
    }

    /// Returns whether the catalog has everything that matters of the inode.
    fn is_idle(&self) -> bool {
        let in_use = self.opens.any() || !self.flights.is_empty() || !self.stagings.is_empty();
        let asks_pool = self.pool_calls.0 != self.pool_calls.1;
        // The descriptor of the only copy stays open: a later one may not report that a write-back failed.
        let only_copy = self.content.is_some() && self.record.file.is_dirty();
        let known_here = self.count_unsaved
            || !self.bypass.is_none()
            || (self.record.file.is_dirty() && !self.dirty_content.is_durable())
            || self.dirty_content.uploaded_stamp().is_some()
            || self.pool_sync != PoolSync::Synced;
        self.attachment == Attachment::Catalog && !(in_use || asks_pool || only_copy || known_here)
    }
}

impl Attachment {
    /// Another client removed or replaced the last name.
    pub fn supersede(&mut self) {
        *self = (*self).max(Self::Superseded);
    }
}

impl KnownNames {
    /// Records that the pool does not have a name.
    pub fn note_absent(&mut self, name: &[u8]) {
        if self.negative.len() >= NEGATIVE_NAMES {
            self.negative.clear();
        }
        self.negative.insert(name.into(), Instant::now());
    }
}
