//! Content files: opened when they are needed, kept open for a while, and their bytes counted.

use std::collections::HashSet;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, Result, Side, Time};
use forebay_cache::content_io::{self, ContentIo};
use forebay_cache::{Content, ContentId, Reservation, SpaceReservation};
use forebay_catalog::ContentRecord;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::inode_change::InodeChange;
use crate::node::{Node, NodeState};
use crate::quotas::{FileOwner, SpaceHolder};
use crate::{Inner, Ino};

/// Content files that the daemon keeps open while no program uses them, at most.
const IDLE_OPEN_CONTENTS_MAX: usize = 16 << 10;
/// How many of them one more open may examine to close them.
const TRIM_TRIES: usize = 4;
/// Syncs of content files that are under way at the same time.
const SYNCS: usize = 48;

/// What is known of content files beside the catalog.
pub(crate) struct ContentFiles {
    /// Content files from this number on were created since the start. If no record names such a file, its record is
    /// about to be written.
    pub first_new: u64,
    pub io: Arc<dyn ContentIo>,
    /// Why it is not the I/O that was asked for.
    pub io_fallback: Option<String>,
    /// Permits to sync content files to the fast pool's devices: each sync takes a thread.
    pub syncs: Semaphore,
    /// How many content files may stay open although no program uses them.
    pub open_max: usize,
    /// Inodes whose content file is open in the daemon, least recently used first.
    open: Mutex<lru::LruCache<Ino, ()>>,
    /// Inodes whose byte count is not in the catalog yet, although their last writer is gone.
    pub uncounted: Mutex<HashSet<Ino>>,
}

impl ContentFiles {
    pub fn new(first_new: u64, open_max: usize, (io, io_fallback): (Arc<dyn ContentIo>, Option<String>)) -> Self {
        Self {
            first_new,
            io,
            io_fallback,
            syncs: Semaphore::new(SYNCS),
            open_max,
            open: Mutex::new(lru::LruCache::unbounded()),
            uncounted: Mutex::default(),
        }
    }
}

impl Inner {
    /// Returns how many content files may stay open while no program uses them.
    fn idle_open_contents(&self) -> usize {
        self.contents.open_max.min(IDLE_OPEN_CONTENTS_MAX)
    }

    /// Notes that the daemon has a content file open, and closes the least recently used ones above the limit.
    pub fn keep_open(&self, ino: Ino) {
        let mut open = self.contents.open.lock();
        open.put(ino, ());
        for _ in 0..TRIM_TRIES {
            if open.len() <= self.idle_open_contents() {
                return;
            }
            let Some((victim, ())) = open.pop_lru() else { return };
            let Some(node) = self.table.peek(victim) else {
                self.release_content(victim);
                continue;
            };
            // The caller may hold the lock of a node, even of this one.
            match node.state.try_lock() {
                // After a close, a later descriptor may not be told of a failed write-back.
                Some(state) if state.record.file.is_dirty() && open.len() < self.contents.open_max => {
                    open.put(victim, ());
                }
                Some(mut state) if !state.opens.any() => {
                    state.content = None;
                    self.release_content(victim);
                }
                _ => _ = open.put(victim, ()),
            }
        }
    }

    /// Notes that the daemon has closed a content file.
    pub fn note_content_closed(&self, ino: Ino) {
        self.contents.open.lock().pop(&ino);
    }

    /// Whether more content files are open than may stay open while idle.
    pub fn has_many_open(&self) -> bool {
        self.contents.open.lock().len() > self.idle_open_contents()
    }

    /// Returns which ranges of a content file are valid; read from the catalog when first needed.
    pub fn residency<'s>(&self, state: &'s mut NodeState) -> Result<&'s mut ContentRecord> {
        state.residency(&self.catalog)
    }

    /// Returns the bytes that the budget counts for an inode's content. They are given back when the content goes.
    pub fn counted_bytes(&self, state: &mut NodeState) -> u64 {
        self.residency(state).map_or(0, |r| r.bytes)
    }

    /// Counts the bytes that an inode's content occupies now.
    pub fn count(&self, state: &mut NodeState, occupied: u64) -> Result<()> {
        self.count_reserved(state, occupied, None)
    }

    /// The same. `space`: what was reserved for the growth.
    pub fn count_reserved(&self, state: &mut NodeState, occupied: u64, space: Option<Reservation>) -> Result<()> {
        let residency = self.residency(state)?;
        let before = std::mem::replace(&mut residency.bytes, occupied);
        let ino = residency.ino;
        match state.record.file.content() {
            Some(id) => {
                let space = space.map(SpaceReservation::from).unwrap_or_default();
                self.store.account_reserved(id, before, occupied, space);
            }
            None => self.store.budget.account_reserved(before, occupied, space),
        }
        self.charge_bytes(ino, state, occupied);
        state.count_unsaved |= before != occupied;
        Ok(())
    }

    /// Saves the count in the catalog, before the inode may leave memory.
    pub fn save_count(&self, ino: Ino, state: &mut NodeState) -> Result<()> {
        if !state.count_unsaved {
            return Ok(());
        }
        let mut change = InodeChange::begin(&self.catalog, ino, state);
        change.save_count()?;
        change.commit()
    }

    /// Returns the content file of an inode, and opens it if needed.
    pub fn content(&self, ino: Ino, state: &mut NodeState) -> Result<Arc<Content>> {
        if let Some(content) = &state.content {
            return Ok(content.clone());
        }
        let id =
            state.record.file.content().ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, Side::Cache, format!("inode {ino} has no content file"))
            })?;
        let content = self.store.open_content(id).map_err(|e| match e.kind() {
            ErrorKind::NotFound if state.record.file.is_dirty() => gone(ino, id),
            _ => e,
        })?;
        state.content = Some(content.clone());
        self.keep_open(ino);
        Ok(content)
    }

    /// Returns the content file of a partial file, if its valid bytes are there and more can be added to it.
    ///
    /// # Errors
    /// `EIO` if its device is bypassed. `Corrupt` if it is missing, or shorter than its valid ranges: more bytes after them
    /// would make a hole of those that are missing.
    pub fn partial_content(&self, ino: Ino, state: &mut NodeState) -> Result<(Arc<Content>, ContentId)> {
        if let Some(id) = state.record.file.content() {
            self.check_used(id)?;
        }
        let content = self.content(ino, state).map_err(|e| missing(ino, e))?;
        let valid_end = self.residency(state)?.extents().end();
        let have = content.file.metadata().map_err(failed)?.size();
        if have < valid_end {
            return Err(too_short(&content, have));
        }
        let id = ContentId(content.id);
        Ok((content, id))
    }

    /// # Errors
    /// `EIO` if the device of clean content is bypassed.
    pub fn check_used(&self, id: ContentId) -> Result<()> {
        match self.store.is_used(id) {
            true => Ok(()),
            false => {
                let what = format!("content file {:x} is on a device that is bypassed", id.0);
                Err(Error::os(libc::EIO, Side::Cache, what))
            }
        }
    }

    /// Charges an inode's dirty bytes to its owner, as they are now.
    pub(crate) fn charge(&self, ino: Ino, state: &mut NodeState) {
        let is_counted = self.quotas.count() || self.shares.has_share(state.record.uid);
        let bytes = if is_counted && state.record.file.is_dirty() { self.counted_bytes(state) } else { 0 };
        self.charge_bytes(ino, state, bytes);
    }

    /// The same for a file whose bytes are known.
    pub(crate) fn charge_bytes(&self, ino: Ino, state: &NodeState, bytes: u64) {
        let is_dirty = state.record.file.is_dirty() && !state.is_deleted();
        let owner = FileOwner::of(&state.record);
        self.shares.charge(ino, is_dirty.then_some((owner.uid, bytes)));
        self.quotas.charge(&SpaceHolder::File(ino), is_dirty.then_some((owner, bytes)));
    }

    /// Returns how many bytes of a file of `size` bytes are resident.
    pub(crate) fn resident_bytes(&self, node: &Node, size: u64) -> Result<u64> {
        let mut state = node.state.lock();
        Ok(match state.record.file {
            file if file.is_whole() => size,
            file if file.is_spilled() => match file.content() {
                Some(id) => size.saturating_sub(self.catalog.spilled(id)?.bytes()),
                None => 0,
            },
            file if file.is_partial() => self.residency(&mut state)?.extents().bytes(),
            _ => 0,
        })
    }

    /// Returns how many bytes of a range are not resident.
    pub(crate) fn missing_bytes(&self, node: &Node, range: Range<u64>) -> Result<u64> {
        let mut state = node.state.lock();
        Ok(match state.record.file {
            file if file.is_whole() || file.is_dirty() => 0,
            file if file.is_partial() => {
                let missing = self.residency(&mut state)?.extents().missing(range);
                missing.iter().map(|gap| gap.end - gap.start).sum()
            }
            _ => range.end - range.start,
        })
    }

    /// Reads from a content file: immediately if the page cache has the data, else through the content I/O.
    pub async fn read_content(&self, content: &Arc<Content>, offset: u64, len: usize) -> Result<Bytes> {
        match content_io::read_now(&content.file, offset, len) {
            Some(data) => Ok(data),
            None => self.contents.io.read_at(content.file.clone(), offset, len).await,
        }
    }

    /// Reads up to `len` bytes of content that is valid up to `valid_end`.
    ///
    /// # Errors
    /// `Corrupt` if the content file is missing or ends before; errors of the device.
    pub async fn read_valid(
        &self,
        ino: Ino,
        content: Result<Arc<Content>>,
        (offset, len): (u64, usize),
        valid_end: u64,
    ) -> Result<Bytes> {
        let content = content.map_err(|e| missing(ino, e))?;
        let bytes = self.read_content(&content, offset, len).await?;
        let end = offset.saturating_add(bytes.len() as u64);
        if end < valid_end.min(offset.saturating_add(len as u64)) {
            return Err(too_short(&content, end));
        }
        Ok(bytes)
    }

    /// Notes that the catalog lacks the byte count of a file. The next sync saves it.
    pub(super) fn note_uncounted(&self, ino: Ino) {
        self.contents.uncounted.lock().insert(ino);
        self.catalog.announce_change();
    }

    /// Returns whether a view shows the present content of a file.
    pub(crate) fn is_in_view(&self, id: ContentId) -> bool {
        self.store.has_views() && self.store.stat(id).is_ok_and(|meta| meta.nlink() > 1)
    }

    /// Returns the least recently used idle dirty content files, if more content files are open than may stay open.
    pub fn idle_dirty(&self) -> Vec<(Ino, Arc<Content>)> {
        let least: Vec<Ino> = {
            let open = self.contents.open.lock();
            if open.len() <= self.idle_open_contents() {
                return Vec::new();
            }
            let over = open.len() - self.idle_open_contents() / 4 * 3;
            open.iter().rev().take(over).map(|(ino, ())| *ino).collect()
        };
        let content = |ino: Ino| {
            let node = self.table.peek(ino)?;
            let state = node.state.try_lock()?;
            // A mapped file stays open: its bytes are counted, and its writers may have to be stopped.
            let idle = state.record.file.is_dirty() && !state.opens.any() && state.bypass.is_none();
            state.content.clone().filter(|_| idle).map(|content| (ino, content))
        };
        least.into_iter().filter_map(content).collect()
    }
}

/// Not "no such file", because the name exists.
fn gone(ino: Ino, id: ContentId) -> Error {
    let what = format!(
        "content file {:x} of inode {ino} is missing, and the pool does not have its bytes: remove the file or write \
         it anew",
        id.0
    );
    Error::new(ErrorKind::Corrupt, Side::Cache, what)
}

/// Not "no such file", because the name exists.
fn missing(ino: Ino, error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => {
            Error::new(ErrorKind::Corrupt, Side::Cache, format!("the content file of inode {ino} is missing"))
        }
        _ => error,
    }
}

fn too_short(content: &Content, have: u64) -> Error {
    let what = format!("content file {:x} ends at byte {have}, before its valid bytes", content.id);
    Error::new(ErrorKind::Corrupt, Side::Cache, what)
}

/// Sets the times of a content file to those of the overlay: while content is dirty, the times of its content file are
/// the truth.
pub(super) fn set_mtime(file: &std::fs::File, atime: Time, mtime: Time) -> Result<()> {
    set_times(file, Some(atime), Some(mtime))
}

/// Sets times of a content file; `None`: one stays as it is.
pub(super) fn set_times(file: &std::fs::File, atime: Option<Time>, mtime: Option<Time>) -> Result<()> {
    let omitted = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let spec =
        |t: Option<Time>| t.map_or(omitted, |t| rustix::fs::Timespec { tv_sec: t.secs, tv_nsec: t.nanos.into() });
    let times = rustix::fs::Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
    rustix::fs::futimens(file, &times).map_err(|e| failed(e.into()))
}

pub(super) fn failed(error: std::io::Error) -> Error {
    Error::io(error, Side::Cache, "content file")
}
