//! Files that another client appended to while programs have them open.
//!
//! Such a file keeps its inode and its content file, so that open descriptors and mappings show the new bytes. Neither
//! the identity of the object nor its times prove that the old bytes are unchanged, so the resident bytes are compared
//! with the new version. If they differ, or cannot be compared, the new version becomes another inode (`import`).
//!
//! Bytes are appended to the content file before the record has them: programs read whole content past the daemon, and
//! must not see a size beyond its bytes. So a content file may be longer than its record says: while bytes are appended
//! ([`Growth::under_way`]), and after a daemon was killed meanwhile. Such bytes are cut off before the content is used.
//!
//! New bytes of a whole file are appended in order and under the inode's lock. One batch then writes version, size and
//! residency. Programs read the content file past the daemon, so it never has a hole. In a partial file the new bytes
//! stay missing, and the chunk that the old end cut off is fetched again.
//!
//! The kernel caches the last page with zeros behind the old end. So programs see the new size only after the kernel
//! has forgotten that page.

use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side, Stat, Version};
use forebay_cache::{CHUNK_BYTES, Content, ContentId, ExtentSet, Reservation};
use forebay_catalog::{FileState, Link};
use futures::{FutureExt, TryStreamExt};

use super::super::{Inner, MEMORY_UNIT_BYTES, Txn};
use super::Age;
use crate::contents::{failed, set_mtime};
use crate::node::{Node, NodeState};
use crate::pool_calls::QueryStamp;

/// Limits the bytes that are compared: each time the file has grown, all its resident bytes are read from the pool
/// again.
const COMPARED_BYTES_MAX: u64 = 64 << 20;
/// Limits the bytes that are appended to whole content before the file is shown longer.
const APPENDED_BYTES_MAX: u64 = 64 << 20;
/// How often the comparison starts again because the file changed meanwhile.
const ATTEMPTS: u32 = 8;
/// Time limit for all steps together.
const GROW_WITHIN: Duration = Duration::from_secs(5);
/// How long the kernel may take to forget the page in which a file ended.
const FORGET_WITHIN: Duration = Duration::from_secs(1);

/// The state of a file's growth in the pool that exists only in memory.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    /// The content file may be longer than the record says: bytes are being appended behind the recorded end. Changed
    /// by [`Appending`], and ended by `Txn::modify`.
    pub under_way: bool,
    /// The size that programs see, while the kernel may have cached zeros behind it.
    pub shown_bytes: Option<u64>,
    /// Programs may have read bytes that are not in the content file, so that they cannot be compared.
    pub read_unkept: bool,
}

/// The outcome for a file that may have grown.
enum GrowthOutcome {
    /// The inode has the new version.
    Taken,
    /// The pool cannot confirm the growth at the moment: the known state stays.
    Unconfirmed,
    /// By this answer of the pool, the file did not grow by an append, or this cannot be found out.
    Other(Box<Stat>, QueryStamp),
}

/// The resident part of a file, and its version.
struct ResidentPart {
    version: Version,
    file: FileState,
    size: u64,
    /// Of a partial file.
    extents: ExtentSet,
    content: Option<Arc<Content>>,
}

impl ResidentPart {
    fn ranges(&self) -> Vec<Range<u64>> {
        let whole = self.file.is_whole() && self.size > 0;
        if whole { std::iter::once(0..self.size).collect() } else { self.extents.ranges().collect() }
    }

    /// Returns whether nothing changed since.
    fn holds(&self, state: &NodeState) -> bool {
        let record = &state.record;
        let extents = || state.residency.as_ref().is_some_and(|r| *r.extents() == self.extents);
        record.version.as_ref() == Some(&self.version)
            && (record.file, record.size) == (self.file, self.size)
            && (!self.file.is_partial() || extents())
            && state.flights.is_empty()
            && may_be_shared(state)
    }
}

/// Returns whether the content may get bytes of another version: no program in the mount changes it or is about to.
fn may_be_shared(state: &NodeState) -> bool {
    let record = &state.record;
    let regular = record.kind == FileKind::File && record.mode & 0o6000 == 0;
    let clean = !record.file.is_dirty() && record.pending_at.is_empty() && !state.opens.has_writer();
    let lasting = record.in_pool() && !state.is_superseded() && !state.is_deleted();
    regular && clean && lasting && !state.growth.read_unkept
}

/// Returns whether an object may be the known one, with bytes appended. An object store replaces whole objects: until
/// the bytes are compared, only the same name, owner and mode indicate that it is the same file.
fn may_be_grown(state: &NodeState, stat: &Stat) -> bool {
    let record = &state.record;
    let Some(version) = &record.version else { return false };
    let nameless = version.identity().is_none() && stat.version.identity().is_none();
    let rights = (record.mode, record.uid, record.gid) == (stat.mode, stat.uid, stat.gid);
    let same_object = version.same_object(&stat.version) || (nameless && rights && record.pool_links.len() == 1);
    same_object && stat.kind == FileKind::File && stat.size > record.size && may_be_shared(state)
}

/// Bytes that are being appended to a content file. A drop cuts off the bytes that are not in the record.
struct Appending<'a> {
    node: &'a Node,
    content: Arc<Content>,
    size: u64,
    _space: Reservation,
}

impl Drop for Appending<'_> {
    fn drop(&mut self) {
        let mut state = self.node.state.lock();
        if !std::mem::take(&mut state.growth.under_way) {
            return;
        }
        let record = &state.record;
        let same = record.file.content() == Some(ContentId(self.content.id)) && !record.file.is_dirty();
        if same
            && record.size == self.size
            && let Err(error) = self.content.cut(self.size)
        {
            tracing::warn!(%error, ino = %self.node.ino, "it is cut off at the next open");
        }
    }
}

impl Inner {
    /// Handles a new version of an inode in the pool, seen under `link`. `false`: the answer came too late to count.
    ///
    /// # Errors
    /// `Stale` if the name now stands for another inode.
    pub(super) async fn take_change(
        &self,
        node: &Arc<Node>,
        link: Option<&Link>,
        stat: &Stat,
        asked: QueryStamp,
    ) -> Result<bool> {
        if !self.is_candidate(node, stat) {
            return self.changed(node.ino, link, stat, asked);
        }
        let version = node.state.lock().record.version.clone();
        let _one_at_a_time = node.growth.lock().await;
        // The known version may be newer than this answer by now.
        let waited = node.state.lock().record.version != version;
        let grow = self.grow(node, stat.clone(), asked, waited);
        let news = match tokio::time::timeout(GROW_WITHIN, grow).await {
            Ok(news) => news?,
            Err(_) if node.state.lock().record.version != version => GrowthOutcome::Taken,
            Err(_) => GrowthOutcome::Other(Box::new(stat.clone()), asked),
        };
        match news {
            GrowthOutcome::Taken => Ok(true),
            GrowthOutcome::Unconfirmed => Ok(false),
            GrowthOutcome::Other(stat, asked) => self.changed(node.ino, link, &stat, asked),
        }
    }

    /// Handles another name of a known, open object: if the object has grown, the inode gets the new version before the
    /// name is added.
    pub(super) async fn grow_object(&self, stat: &Stat) -> Result<()> {
        if stat.nlink < 2 {
            return Ok(());
        }
        let Some(known) = self.known_as(stat)? else { return Ok(()) };
        let node = self.node(known)?;
        if self.is_candidate(&node, stat) {
            match self.revalidate(known, Age::Now).await {
                Err(e) if e.is(ErrorKind::Stale) => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn is_candidate(&self, node: &Node, stat: &Stat) -> bool {
        let state = node.state.lock();
        may_be_grown(&state, stat) && (state.opens.any() || self.mount.inherited.lock().contains(&node.ino))
    }

    /// Takes over the appended bytes. `again`: the pool must be asked anew first.
    async fn grow(&self, node: &Arc<Node>, stat: Stat, asked: QueryStamp, again: bool) -> Result<GrowthOutcome> {
        let (mut stat, mut asked, mut again) = (stat, asked, again);
        for _ in 0..ATTEMPTS {
            let path = self.pool_path(node.ino)?.of_object(None);
            if std::mem::replace(&mut again, true) {
                asked = self.asked(&node.state.lock());
                stat = match self.ask(self.pool.stat(&path)).await {
                    Ok(stat) => stat,
                    // The next question finds out whether the object is gone.
                    Err(_) => return Ok(GrowthOutcome::Unconfirmed),
                };
            }
            let part = {
                let mut state = node.state.lock();
                if state.record.version.as_ref() == Some(&stat.version) {
                    state.take_answer_of(asked.at());
                    return Ok(GrowthOutcome::Taken);
                }
                if state.is_overtaken(asked.at(), Some(&stat)) {
                    return Ok(GrowthOutcome::Taken);
                }
                if state.growth.shown_bytes.is_some() || !self.still_holds(asked, &state) {
                    return Ok(GrowthOutcome::Unconfirmed);
                }
                if !may_be_grown(&state, &stat) {
                    return Ok(GrowthOutcome::Other(Box::new(stat), asked));
                }
                self.part_of(node, &mut state)
            };
            let Ok(part) = part else { return Ok(GrowthOutcome::Other(Box::new(stat), asked)) };
            let appended = if part.file.is_whole() { stat.size - part.size } else { 0 };
            let compared: u64 = part.ranges().iter().map(|range| range.end - range.start).sum();
            if compared > COMPARED_BYTES_MAX || appended > APPENDED_BYTES_MAX {
                return Ok(GrowthOutcome::Other(Box::new(stat), asked));
            }
            if self.land(node).await {
                continue;
            }
            // Memory for one piece of the pool's bytes and one of the content file. Taken after `land`, because the
            // awaited chunks take memory, too.
            let _memory = self.memory.acquire_many((2 * CHUNK_BYTES / MEMORY_UNIT_BYTES) as u32).await;
            match self.grow_to(node, &path, &part, &stat, asked).await {
                Ok(Some(true)) => return Ok(GrowthOutcome::Taken),
                Ok(Some(false)) => return Ok(GrowthOutcome::Other(Box::new(stat), asked)),
                Ok(None) => {}
                Err(e) if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound) => {}
                Err(e) if e.is_unreachable() => {
                    return Ok(GrowthOutcome::Unconfirmed);
                }
                Err(error) => {
                    tracing::debug!(%path, %error, "the file with the appended bytes is shown as another file");
                    return Ok(GrowthOutcome::Other(Box::new(stat), asked));
                }
            }
        }
        Ok(GrowthOutcome::Other(Box::new(stat), asked))
    }

    fn part_of(&self, node: &Node, state: &mut NodeState) -> Result<ResidentPart> {
        let file = state.record.file;
        let Some(version) = state.record.version.clone() else {
            return Err(Error::new(ErrorKind::Corrupt, Side::Cache, format!("{}: no version", node.ino)));
        };
        let content = if file.is_absent() { None } else { Some(self.content(node.ino, state)?) };
        if file.content().is_some_and(|id| self.is_in_view(id)) {
            let what = format!("{}: a view shows its content as it is", node.ino);
            return Err(Error::new(ErrorKind::Busy, Side::Cache, what));
        }
        let extents = if file.is_partial() { self.residency(state)?.extents().clone() } else { ExtentSet::default() };
        Ok(ResidentPart { version, file, size: state.record.size, extents, content })
    }

    /// Waits for fetches of chunks of the old version. Returns whether there were any.
    async fn land(&self, node: &Node) -> bool {
        let flights: Vec<_> = node.state.lock().flights.values().cloned().collect();
        let any = !flights.is_empty();
        for mut flight in flights {
            let _ = flight.wait_for(Option::is_some).await;
        }
        any
    }

    /// Brings the file to one version. `Some(false)`: it is not the old version with bytes appended; `None`: something
    /// changed meanwhile.
    async fn grow_to(
        &self,
        node: &Arc<Node>,
        path: &PoolPath,
        part: &ResidentPart,
        stat: &Stat,
        asked: QueryStamp,
    ) -> Result<Option<bool>> {
        if let Some(content) = &part.content
            && !self.has_same_bytes(path, &stat.version, content, part.ranges()).await?
        {
            return Ok(Some(false));
        }
        let appending = match (&part.content, part.file.is_whole()) {
            (Some(content), true) => match self.append(node, path, part, content, stat).await? {
                Some(appending) => Some(appending),
                None => return Ok(None),
            },
            _ => None,
        };
        let taken = self.take_growth(node, part, stat, asked)?;
        drop(appending);
        if taken {
            self.tell_kernel_grown(node, part).await;
        }
        Ok(taken.then_some(true))
    }

    /// Returns whether these ranges of a content file have the same bytes in a version of the pool's copy.
    async fn has_same_bytes(
        &self,
        path: &PoolPath,
        version: &Version,
        content: &Arc<Content>,
        ranges: Vec<Range<u64>>,
    ) -> Result<bool> {
        for range in ranges {
            let mut source = Pieces::new(self, path, version, range);
            while let Some((at, theirs)) = source.next().await? {
                let ours = self.contents.io.read_at(content.file.clone(), at, theirs.len()).await?;
                if ours != theirs {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Appends the bytes that the pool has behind the end of whole content. `None`: something changed meanwhile.
    async fn append<'n>(
        &self,
        node: &'n Node,
        path: &PoolPath,
        part: &ResidentPart,
        content: &Arc<Content>,
        stat: &Stat,
    ) -> Result<Option<Appending<'n>>> {
        let space = self.room_for(stat.size - part.size)?;
        let appending = Appending { node, content: content.clone(), size: part.size, _space: space };
        {
            let mut state = node.state.lock();
            if !part.holds(&state) {
                return Ok(None);
            }
            content.cut(part.size)?;
            state.growth.under_way = true;
        }
        let mut source = Pieces::new(self, path, &stat.version, part.size..stat.size);
        while let Some((at, piece)) = source.next().await? {
            let state = node.state.lock();
            // Checked under the lock, so that nothing is appended to content that was marked dirty.
            let have = content.file.metadata().map_err(failed)?.size();
            if !part.holds(&state) || !state.growth.under_way || have != at {
                return Ok(None);
            }
            // Zeros are left as a hole.
            let written = match piece.iter().all(|byte| *byte == 0) {
                true => content.file.set_len(at + piece.len() as u64),
                false => content.file.write_all_at(&piece, at),
            };
            written.map_err(failed)?;
            self.counters.pool_read_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        Ok(Some(appending))
    }

    fn room_for(&self, bytes: u64) -> Result<Reservation> {
        let reserve = || self.store.budget.reserve(bytes).filter(|_| self.store.free_bytes() >= bytes);
        if let Some(space) = reserve() {
            return Ok(space);
        }
        self.make_room(bytes)?;
        reserve().ok_or_else(|| Error::new(ErrorKind::NoSpace, Side::Cache, "no room for the appended bytes"))
    }

    /// Commits the size and version of `stat` to the record. Returns whether it did.
    fn take_growth(&self, node: &Node, part: &ResidentPart, stat: &Stat, asked: QueryStamp) -> Result<bool> {
        let ino = node.ino;
        let mut txn = Txn::begin(self);
        if !part.holds(txn.state(ino)?) || !txn.believes(ino, asked)? {
            return Ok(false);
        }
        let record = txn.record(ino)?;
        record.changed_since_removal |= record.has_removed_names();
        txn.take_attrs(ino, stat)?;
        let record = txn.record(ino)?;
        record.version = Some(stat.version.clone());
        record.xattrs = None;
        let (atime, mtime) = (record.atime, record.mtime);
        txn.note_object(ino, stat);
        if let (Some(content), Some(id)) = (&part.content, part.file.content()) {
            if part.file.is_whole() {
                let bytes = content.file.metadata().map_err(failed)?.blocks() * 512;
                txn.count(ino, bytes)?;
                txn.put_clean_content(ino, id)?;
                set_mtime(&content.file, atime, mtime)?;
            } else {
                txn.forget_short_chunk(ino, id, part.size)?;
            }
        }
        let shown_bytes = self.mount.kernel().map(|_| part.size);
        txn.on_commit(ino, move |state| {
            state.take_answer_of(asked.at());
            state.growth.shown_bytes = shown_bytes;
        })?;
        txn.commit()?;
        Ok(true)
    }

    /// Makes the kernel forget the page in which the file ended, because it is filled up with zeros. Only then is the
    /// file shown longer. If the content is not whole, the kernel forgets all pages.
    async fn tell_kernel_grown(&self, node: &Arc<Node>, part: &ResidentPart) {
        let Some(kernel) = self.mount.kernel() else { return };
        let from = if part.file.is_whole() { part.size } else { 0 };
        let told = kernel.invalidate_from(node.ino, from);
        let node = node.clone();
        let task = async move {
            let _ = told.await;
            node.state.lock().growth.shown_bytes = None;
        };
        let shown = tokio::spawn(task.boxed());
        let _ = tokio::time::timeout(FORGET_WITHIN, shown).await;
    }
}

/// A range of one version of a file in the pool, piece by piece.
struct Pieces<'a> {
    inner: &'a Inner,
    path: &'a PoolPath,
    version: &'a Version,
    left: Range<u64>,
    /// The end of the range that was requested.
    until: u64,
    stream: Option<forebay_backends::Content>,
}

impl<'a> Pieces<'a> {
    fn new(inner: &'a Inner, path: &'a PoolPath, version: &'a Version, range: Range<u64>) -> Self {
        Self { inner, path, version, until: range.start, left: range, stream: None }
    }

    /// Returns the next piece and its offset.
    ///
    /// # Errors
    /// `Stale` if the pool's copy has another version, or is shorter.
    async fn next(&mut self) -> Result<Option<(u64, bytes::Bytes)>> {
        let (inner, at) = (self.inner, self.left.start);
        if self.left.is_empty() {
            return Ok(None);
        }
        if at == self.until {
            // A pool without streams returns a range as a whole, so a range is limited to a chunk.
            let most = if inner.pool.capabilities().streams { u64::MAX } else { CHUNK_BYTES };
            self.until = self.left.end.min(at.saturating_add(most));
            self.stream = None;
        }
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => {
                let range = at..self.until;
                self.stream.insert(inner.ask(inner.pool.stream(self.path, self.version, range)).await?)
            }
        };
        let piece = stream.try_next().await;
        inner.pool_calls.health.note(&piece);
        match piece? {
            Some(piece) if piece.len() as u64 <= self.until - at => {
                self.left.start += piece.len() as u64;
                Ok(Some((at, piece)))
            }
            _ => {
                let why = format!("{}: another size than it had", self.path);
                Err(Error::new(ErrorKind::Stale, Side::Pool, why))
            }
        }
    }
}
