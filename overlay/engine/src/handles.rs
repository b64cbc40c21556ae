//! Open files: opens, and the reads and writes that go through the daemon.

mod close;
mod inherited;
mod modify;
mod open;
mod spill;
mod through;

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::{CHUNK_BYTES, Content, ContentId, Reservation};
use forebay_policy::{FlushPolicy, Read};
use futures::FutureExt;
use rustix::io::Errno;

use super::{Inner, Ino, Overlay, Seek, blocking};
use crate::contents::failed;
use crate::counters::ReadSource;
use crate::fetch::FetchPriority;
use crate::node::{Node, NodeState, Readahead};
use crate::space::owner_room::OwnerRoom;
use crate::space::space_for_write;
use crate::tiers::device_health::is_of_device;
pub(crate) use close::Writing;
pub(crate) use open::is_given_up;
pub(crate) use spill::PartsUnderWay;

/// The longest readahead window of a sequential reader, in requests to the pool.
const READAHEAD_REQUESTS: u64 = 8;
/// A read is sequential if its offset is no further than this from the end of the reads before it.
const READAHEAD_GAP_BYTES: u64 = 2 << 20;

/// How often a read begins again because the file changed meanwhile.
const READ_ATTEMPTS: u32 = 10;

/// The unit in which file systems on local devices allocate space.
const BLOCK_BYTES: u64 = 4096;

/// How long a writer tries to write a file through while other programs change it.
const WRITE_THROUGH_WAIT: Duration = Duration::from_secs(30);

/// Logs an error of a file, unless the file is deleted or has lost its last name: then nothing is left to settle.
fn tell_unless_gone(node: &Node, error: &Error, when: &str) {
    let state = node.state.lock();
    if !state.is_deleted() && !state.is_unlinked(node.ino) {
        tracing::error!(%error, ino = %node.ino, "{when}");
    }
}

impl Overlay {
    /// Reads up to `len` bytes; fewer only at the end of the file.
    pub async fn read(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes> {
        let inner = &self.inner;
        let node = inner.node(ino)?;
        let served = |source, read: Result<Bytes>| inner.counters.count_read(source, read);
        let mut source = ReadSource::Fast;
        for _ in 0..READ_ATTEMPTS {
            let whole = {
                let mut state = node.state.lock();
                let id = state.record.file.content().filter(|_| state.record.file.is_whole());
                let clean_bytes = (!state.record.file.is_dirty()).then_some(state.record.size);
                id.map(|id| (id, inner.content(ino, &mut state), clean_bytes, state.spills))
            };
            if let Some((id, content, clean_bytes, spills)) = whole {
                inner.counters.read_hits.fetch_add(1, Ordering::Relaxed);
                // Only a program's own change makes a dirty file shorter.
                let is_changed = || clean_bytes.is_some() && node.state.lock().record.file.is_dirty();
                match inner.read_valid(ino, content, (offset, len as usize), clean_bytes.unwrap_or(0)).await {
                    // Ranges of it may have been spilled while it was read.
                    Ok(_) if node.state.lock().spills != spills => continue,
                    Err(e) if inner.content_failed(&node, id, &e) || is_changed() => continue,
                    read => return served(source, read),
                }
            }
            if node.is_spilled() {
                inner.counters.read_misses.fetch_add(1, Ordering::Relaxed);
                match inner.read_spilled(&node, offset, len.into()).await.transpose() {
                    Some(read) => return served(ReadSource::Direct, read),
                    None => continue,
                }
            }
            let size = {
                let state = node.state.lock();
                if state.record.file.is_dirty() {
                    // The last of its spilled ranges came back meanwhile.
                    continue;
                }
                state.record.size
            };
            let end = size.min(offset.saturating_add(u64::from(len)));
            if offset >= end {
                return Ok(Bytes::new());
            }
            let ready = inner.has_range(&mut node.state.lock(), offset..end)?;
            if node.is_written_through() {
                inner.counters.read_misses.fetch_add(1, Ordering::Relaxed);
                return served(ReadSource::Direct, inner.read_through(&node, offset..end).await);
            }
            if !ready && inner.policy_of(&node).read == Read::Bypass {
                inner.counters.read_misses.fetch_add(1, Ordering::Relaxed);
                return served(ReadSource::Direct, inner.read_uncached(&node, offset..end).await);
            }
            inner.read_ahead(&node, offset, end);
            if !ready {
                inner.counters.read_misses.fetch_add(1, Ordering::Relaxed);
                source = ReadSource::Fetched;
                match inner.ensure_for_program(&node, offset..end).await? {
                    Ensured::Resident => {}
                    Ensured::Uncached => {
                        return served(ReadSource::Direct, inner.read_uncached(&node, offset..end).await);
                    }
                    Ensured::Changed => continue,
                }
            }
            let valid = {
                let mut state = node.state.lock();
                match state.record.file.content() {
                    Some(id) if !state.record.file.is_dirty() && inner.has_range(&mut state, offset..end)? => {
                        Some((id, inner.content(ino, &mut state), state.spills))
                    }
                    _ => None,
                }
            };
            if let Some((id, content, spills)) = valid {
                match inner.read_valid(ino, content, (offset, (end - offset) as usize), end).await {
                    Ok(_) if node.state.lock().spills != spills => continue,
                    Err(e) if is_of_device(&e) && !inner.content_failed(&node, id, &e) => {
                        return served(ReadSource::Direct, inner.read_uncached(&node, offset..end).await);
                    }
                    Err(e) if is_of_device(&e) => continue,
                    read => return served(source, read),
                }
            }
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: changes while it is read", inner.display(ino))))
    }

    /// Writes all of `data`. A file that does not fit into the fast pool is written through to the pool.
    pub async fn write(&self, ino: Ino, offset: u64, data: Bytes) -> Result<u32> {
        let inner = &self.inner;
        let node = inner.node(ino)?;
        inner.pace_writer(&node, offset, data.len() as u64).await;
        let mut disturbed = None;
        loop {
            let full = {
                let _writing = inner.begin_writing(&node);
                if node.is_written_through() {
                    match inner.write_through(&node, offset, data.clone()).await? {
                        Some(written) => return Ok(written),
                        None => continue,
                    }
                }
                let written = match node.is_spilled() {
                    true => match inner.write_spilled(&node, offset, &data).await.transpose() {
                        Some(written) => written,
                        None => continue,
                    },
                    false => inner.write_resident(&node, offset, &data).await,
                };
                match written {
                    Err(e) if through::is_full(&e) => e,
                    other => return other,
                }
            };
            // No longer counted as a change: the content leaves the fast pool only while there is none.
            let range = offset..offset.saturating_add(data.len() as u64);
            if inner.leave_fast_pool(&node, &full, range).await? {
                continue;
            }
            let since = *disturbed.get_or_insert_with(Instant::now);
            if since.elapsed() > WRITE_THROUGH_WAIT {
                return Err(full);
            }
        }
    }

    /// Flushes a file that was open for writing, if its policy says `on-close`: `close` waits for the flush.
    pub async fn close(&self, ino: Ino, writable: bool) -> Result<()> {
        if !writable {
            return Ok(());
        }
        let node = self.inner.node(ino)?;
        self.inner.learn_policy_facts(&node).await;
        self.inner.sync_through(&node).await?;
        if self.inner.policy_of(&node).flush() != FlushPolicy::OnClose {
            return Ok(());
        }
        // An owner may keep it from the pool. Once the pool has told the settings, it is flushed in the background.
        let is_changed = {
            let state = node.state.lock();
            state.record.is_dirty() || !state.record.in_pool()
        };
        if is_changed && !self.inner.knows_flush_settings(&node) {
            let what = format!("{}: the settings of a directory above it are not known", self.inner.display(ino));
            return Err(Error::new(ErrorKind::Busy, Side::Pool, what));
        }
        self.inner.flush_inode_now(ino).await
    }

    /// Makes content and names durable: both survive a power cut when this returns.
    ///
    /// # Errors
    /// `EIO` if part of the content was lost on its way to the device, now or earlier.
    pub async fn fsync(&self, ino: Ino, data_only: bool) -> Result<()> {
        let node = self.inner.node(ino)?;
        self.inner.sync_through(&node).await?;
        if node.state.lock().record.file.is_dirty() {
            self.inner.leave_memory(&node).await?;
        }
        let content = {
            let mut state = node.state.lock();
            match state.record.file.is_dirty() {
                true => Some(self.inner.content(ino, &mut state)?),
                false => None,
            }
        };
        let inner = self.inner.clone();
        let _turn = self.inner.contents.syncs.acquire().await;
        blocking(move || {
            let kept = content.map_or(Ok(()), |content| {
                let id = ContentId(content.id);
                let known = inner.catalog.lost(id);
                let synced = inner.catalog.sync_content(&content, data_only);
                inner.note_sync(id, known.as_ref(), &synced);
                synced
            });
            // The catalog is synced even if content was lost: the record of the loss must survive a power cut, too.
            inner.catalog.sync().and(kept)
        })
        .await
        .map_err(|e| e.context(self.inner.display(ino)))
    }

    pub async fn fsync_dir(&self, _ino: Ino) -> Result<()> {
        let inner = self.inner.clone();
        blocking(move || inner.catalog.sync()).await
    }

    /// `SEEK_DATA` and `SEEK_HOLE`. If the pool's copy has holes, the whole file is fetched to find them. A file that
    /// is not resident, or that is clean and whose content file is missing, counts as data.
    pub async fn seek(&self, ino: Ino, offset: u64, whence: Seek) -> Result<u64> {
        let inner = &self.inner;
        let node = inner.node(ino)?;
        let sparse = {
            let state = node.state.lock();
            let record = &state.record;
            let asked = offset < record.size && !record.file.is_whole() && !record.file.is_dirty();
            (asked && record.clean_bytes() < record.size).then_some(record.size)
        };
        if let Some(size) = sparse {
            // If the fetch fails, the whole file counts as data, which is never wrong.
            let _ = inner.ensure(&node, 0..size, FetchPriority::Demand).await;
        }
        let (content, size) = {
            let mut state = node.state.lock();
            let content = state.record.file.is_whole().then(|| inner.content(ino, &mut state));
            match content {
                Some(Ok(content)) => (Some(content), 0),
                Some(Err(e)) if state.record.file.is_dirty() => return Err(e),
                _ => (None, state.record.size),
            }
        };
        let is_dirty = node.state.lock().record.file.is_dirty();
        let size = if is_dirty { inner.attr_of(&node)?.size } else { size };
        let beyond = || Error::os(libc::ENXIO, Side::Application, "seek beyond the end");
        let Some(content) = content else {
            return match whence {
                _ if offset >= size => Err(beyond()),
                Seek::Data => Ok(offset),
                Seek::Hole => Ok(size),
            };
        };
        let to = match whence {
            Seek::Data => rustix::fs::SeekFrom::Data(offset),
            Seek::Hole => rustix::fs::SeekFrom::Hole(offset),
        };
        let found = rustix::fs::seek(&*content.file, to);
        if node.is_spilled() {
            // Its content file has holes where the content has none.
            let size = inner.attr_of(&node)?.size;
            return match whence {
                _ if offset >= size => Err(beyond()),
                Seek::Data => Ok(offset),
                Seek::Hole => Ok(size),
            };
        }
        found.map_err(|e| Error::os(e.raw_os_error(), Side::Application, "seek"))
    }

    /// `copy_file_range(2)`: by reference if the fast pool's file system can do that. May copy fewer bytes.
    pub async fn copy_range(&self, from: Ino, from_offset: u64, to: Ino, to_offset: u64, len: u64) -> Result<u64> {
        let inner = &self.inner;
        let (source, target) = (inner.node(from)?, inner.node(to)?);
        let size = inner.attr_of(&source)?.size;
        let len = len.min(size.saturating_sub(from_offset));
        if len == 0 {
            return Ok(0);
        }
        let is_resident = |node: &Node| !node.is_written_through() && !node.is_spilled();
        if is_resident(&source) && is_resident(&target) {
            match inner.copy_resident((&source, from_offset), (&target, to_offset), len).await {
                Err(e) if through::is_full(&e) => {}
                other => return other,
            }
        }
        let data = self.read(from, from_offset, len.min(CHUNK_BYTES) as u32).await?;
        self.write(to, to_offset, data).await.map(u64::from)
    }
}

/// What became of bytes that a program needs.
enum Ensured {
    Resident,
    /// The fast pool does not take them, or its device fails: the program gets them from the pool.
    Uncached,
    /// The file has other content by now, or none: the caller looks again.
    Changed,
}

impl Inner {
    /// Makes a range of a file resident for a program, if that can be.
    ///
    /// # Errors
    /// Those of [`Inner::ensure`], except for those that say that the fast pool does not take the bytes: it has no room, the
    /// daemon has reached a quota of its file system, the file is larger than its file system allows, its device fails.
    async fn ensure_for_program(self: &Arc<Self>, node: &Arc<Node>, range: Range<u64>) -> Result<Ensured> {
        match self.ensure(node, range, FetchPriority::Demand).await {
            Ok(()) => Ok(Ensured::Resident),
            Err(e) if through::is_full(&e) || is_too_large(&e) => Ok(Ensured::Uncached),
            Err(e) if is_of_device(&e) => {
                Ok(if self.fetch_failed(node, &e) { Ensured::Changed } else { Ensured::Uncached })
            }
            Err(e) => Err(e),
        }
    }

    /// Returns whether the content file has all bytes of a range.
    fn has_range(&self, state: &mut NodeState, range: Range<u64>) -> Result<bool> {
        let file = state.record.file;
        Ok(file.is_whole() || (file.is_partial() && self.residency(state)?.extents().contains(range)))
    }

    /// Writes into the content file.
    async fn write_resident(self: &Arc<Self>, node: &Arc<Node>, offset: u64, data: &Bytes) -> Result<u32> {
        self.change_with_room(node, || async {
            let content = self.writable_content(node).await?;
            let reserve = || self.reserve_for_write(node, &content, offset, data.len() as u64);
            let (_share, space) = self.with_room(reserve).await?;
            self.write_into(node, &content, offset, data, space)
        })
        .await
    }

    /// Writes into a content file, in space that was reserved.
    fn write_into(
        &self,
        node: &Arc<Node>,
        content: &Content,
        offset: u64,
        data: &Bytes,
        space: Reservation,
    ) -> Result<u32> {
        let mut done = 0;
        while done < data.len() {
            match rustix::io::pwrite(&*content.file, &data[done..], offset + done as u64) {
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(e) if done == 0 => {
                    let error = failed(e.into());
                    self.store.note_error(ContentId(content.id), &error);
                    return Err(error);
                }
                Err(_) => break,
            }
        }
        node.state.lock().changed();
        self.account_reserved(node, content, Some(space))?;
        Ok(done as u32)
    }

    /// Makes content writable, as soon as there is room for it.
    async fn writable_content(self: &Arc<Self>, node: &Arc<Node>) -> Result<Arc<Content>> {
        let content = self.changeable_content(node).await?;
        self.resume_for_daemon(node, &content)?;
        Ok(content)
    }

    /// The same for changes that take no room: writers that the kernel serves may be stopped.
    async fn changeable_content(self: &Arc<Self>, node: &Arc<Node>) -> Result<Arc<Content>> {
        if self.exceeds_fast_pool(node) {
            let what = format!("{}: larger than the fast pool", self.display(node.ino));
            return Err(Error::new(ErrorKind::NoSpace, Side::Cache, what));
        }
        self.check_quota_holds(node)?;
        self.with_room(|| self.make_writable(node)).await
    }

    /// Copies from one content file to another.
    ///
    /// # Errors
    /// `NoSpace` also if the source is not resident any more, or not as far as its record says: then the caller reads and
    /// writes instead.
    async fn copy_resident(
        self: &Arc<Self>,
        (source, from_offset): (&Arc<Node>, u64),
        (target, to_offset): (&Arc<Node>, u64),
        len: u64,
    ) -> Result<u64> {
        let range = from_offset..from_offset.saturating_add(len);
        if !source.state.lock().record.file.is_whole() {
            self.ensure_for_program(source, range.clone()).await?;
        }
        let not_resident = |node: &Node| {
            let what = format!("{}: it is not in the fast pool", self.display(node.ino));
            Error::new(ErrorKind::NoSpace, Side::Cache, what)
        };
        if !self.has_range(&mut source.state.lock(), range.clone())? {
            return Err(not_resident(source));
        }
        // A writer that is slowed pays for one chunk, and copies no more.
        let len = match self.pace_writer(target, to_offset, len.min(CHUNK_BYTES)).await {
            true => len.min(CHUNK_BYTES),
            false => len,
        };
        let range = from_offset..from_offset.saturating_add(len);
        let resident = {
            let mut state = source.state.lock();
            // Under the same lock: it may have been evicted since.
            match self.has_range(&mut state, range)? {
                true => Some((self.content(source.ino, &mut state)?, state.spills)),
                false => None,
            }
        };
        let (source_content, spills) = resident.ok_or_else(|| not_resident(source))?;
        let _writing = self.begin_writing(target);
        // From now on, no range of the target begins to be spilled.
        if target.is_spilled() {
            return Err(not_resident(target));
        }
        let content = self.writable_content(target).await?;
        let (_share, space) = self.with_room(|| self.reserve_for_write(target, &content, to_offset, len)).await?;
        let (input, output) = (source_content.file.clone(), content.file.clone());
        let copied = blocking(move || {
            let (mut input_at, mut output_at) = (from_offset, to_offset);
            rustix::fs::copy_file_range(&*input, Some(&mut input_at), &*output, Some(&mut output_at), len as usize)
                .map_err(|e| Error::os(e.raw_os_error(), Side::Cache, "copy_file_range"))
        })
        .await;
        let copied = match copied {
            // Its writers were stopped meanwhile. The caller writes, which knows what to do then.
            Err(e) if e.is(ErrorKind::NotPermitted) => return Err(not_resident(target)),
            copied => copied?,
        };
        target.state.lock().changed();
        self.account_reserved(target, &content, Some(space))?;
        // What was copied may be a hole, or the content file ends too early. The caller copies it again.
        if source.state.lock().spills != spills || copied == 0 {
            return Err(not_resident(source));
        }
        Ok(copied as u64)
    }

    /// Fetches what a sequential reader of a partial file will probably read next.
    fn read_ahead(self: &Arc<Self>, node: &Arc<Node>, offset: u64, end: u64) {
        let most = READAHEAD_REQUESTS * self.request_bytes();
        // Readahead must not empty a small fast pool for bytes that may never be read.
        let most = most.min(self.store.budget.limit() / 16).max(CHUNK_BYTES);
        let most = self.policy_of(node).readahead_bytes.map_or(most, |bytes| most.min(bytes));
        if most == 0 {
            return;
        }
        let ahead = {
            let mut state = node.state.lock();
            let size = state.record.size;
            let ahead = &mut state.readahead;
            // Requests of the kernel's own readahead arrive out of order.
            if offset.abs_diff(ahead.end) > READAHEAD_GAP_BYTES {
                *ahead = Readahead { end, ..Readahead::default() };
                return;
            }
            ahead.end = ahead.end.max(end);
            if ahead.until >= ahead.end + ahead.window_bytes / 2 && ahead.until > ahead.end {
                return;
            }
            ahead.window_bytes = (ahead.window_bytes * 2).max(CHUNK_BYTES).min(most);
            let from = ahead.until.max(ahead.end.next_multiple_of(CHUNK_BYTES));
            let to = (ahead.end + ahead.window_bytes).next_multiple_of(CHUNK_BYTES).min(size);
            if from >= to {
                return;
            }
            ahead.until = to;
            from..to
        };
        let (inner, node) = (self.clone(), node.clone());
        let task = async move {
            // The reader gets the same error when it reads this range.
            let _ = inner.ensure(&node, ahead, FetchPriority::Demand).await;
        };
        tokio::spawn(task.boxed());
    }

    /// Counts the bytes that a content file occupies now.
    pub fn account(&self, node: &Arc<Node>, content: &Content) -> Result<()> {
        self.account_reserved(node, content, None)
    }

    /// The same. `space`: what was reserved for its growth.
    fn account_reserved(&self, node: &Arc<Node>, content: &Content, space: Option<Reservation>) -> Result<()> {
        let mut state = node.state.lock();
        if state.record.file.content().is_some_and(|now| now != ContentId(content.id)) {
            // It was replaced meanwhile.
            return Ok(());
        }
        let occupied = content.file.metadata().map_err(failed)?.blocks() * 512;
        self.count_reserved(&mut state, occupied, space)?;
        // The count of an open file is saved at the last close.
        if state.opens.any() { Ok(()) } else { self.save_count(node.ino, &mut state) }
    }

    /// Reserves the space that a write may need: none if it only overwrites bytes that have space.
    async fn reserve_for_write(
        self: &Arc<Self>,
        node: &Node,
        content: &Content,
        offset: u64,
        len: u64,
    ) -> Result<(OwnerRoom, Reservation)> {
        let bytes = space_for_write(content, offset, len)?;
        Ok((self.room_for_file(node, in_blocks(offset, bytes)).await?, self.reserve(bytes).await?))
    }

    /// The same without a wait for the flush.
    async fn reserve_for_write_now(
        self: &Arc<Self>,
        node: &Node,
        content: &Content,
        offset: u64,
        len: u64,
    ) -> Result<(OwnerRoom, Reservation)> {
        let bytes = space_for_write(content, offset, len)?;
        Ok((self.room_for_file_now(node, in_blocks(offset, bytes))?, self.reserve(bytes).await?))
    }

    /// Returns the node of a regular file.
    pub fn file_node(&self, ino: Ino) -> Result<Arc<Node>> {
        let node = self.node(ino)?;
        let kind = node.state.lock().record.kind;
        match kind {
            FileKind::File => Ok(node),
            FileKind::Directory => Err(Error::new(ErrorKind::IsDirectory, Side::Application, self.display(ino))),
            _ => Err(Error::new(ErrorKind::InvalidInput, Side::Application, self.display(ino))),
        }
    }
}

/// Whether a file is larger than the fast pool's file system or the catalog allows.
fn is_too_large(error: &Error) -> bool {
    error.is(ErrorKind::TooLarge) && error.side() == Side::Cache
}

/// Returns the bytes of the blocks that a range of `bytes` touches: users are charged for blocks.
fn in_blocks(offset: u64, bytes: u64) -> u64 {
    let begin = offset / BLOCK_BYTES * BLOCK_BYTES;
    if bytes == 0 { 0 } else { offset.saturating_add(bytes).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES) - begin }
}
