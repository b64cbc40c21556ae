//! Uploads content to the pool as one consistent snapshot.
//!
//! The stream of the data ends with an error if the content file was written meanwhile, so the pool never gets a part
//! of a write. A file that is written all the time is sent from a reflink, where the file system has them. Before the
//! upload, the content is synced: after a power cut, it is not older than the pool's copy. For a file that a program may
//! write or has mapped, that is part of the snapshot: the kernel notes a store through a mapping in the file's times only
//! if the page was clean.
//!
//! The file becomes clean if stamp (size, mtime, ctime) and generation are those of the snapshot, and no writer and no
//! mapping is left. Else it stays dirty, based on the version that the pool has now.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, Expected, Piece, Pieces, PoolPath, Result, Side, Stat, Time};
use forebay_cache::{CHUNK_BYTES, Content, ContentId, Stamp, is_open_elsewhere};
use forebay_catalog::{InodeRecord, Link, PendingChange, XattrChanges, Xattrs};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};

use super::super::{Inner, Ino, MEMORY_UNIT_BYTES, Txn, blocking};
use super::create::{attrs_of, settle_attrs, still_to_tell};

/// How often an upload starts again because a program writes the file meanwhile.
const ATTEMPTS: u32 = 4;

/// An upload that the pool has accepted.
pub(super) struct Uploaded {
    stat: Stat,
    /// The record as it was sent.
    sent: InodeRecord,
    /// The record's mtime when it was sent. The content file had the true one.
    recorded_mtime: Time,
    stamp: Stamp,
    generation: u64,
    /// Every change since the stamp shows in another stamp.
    settled: bool,
    /// The same for changes by a program that opened the file after the stamp.
    apart: bool,
    /// What was sent is durable on the fast pool, too.
    synced: bool,
    /// The extended attributes of an object that another client created.
    theirs: Option<Xattrs>,
    /// Extended attributes that the pool refused.
    refused: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A file as it is to be sent.
struct Snapshot {
    content: Arc<Content>,
    record: InodeRecord,
    generation: u64,
    stamp: Stamp,
    /// A program may change it without the daemon.
    held: bool,
    settled: bool,
    apart: bool,
    /// What is read instead of the content file, which is written all the time.
    frozen: Option<Arc<File>>,
}

impl Inner {
    /// Uploads the content of a file to a path of the pool, which is the path of the name `at`. Returns `None` if the
    /// name belongs to another inode by now, or the file is clean and its content was given up.
    ///
    /// # Errors
    /// `Conflict` if the pool has something else there than expected; `Busy` if the file is written so often that no
    /// snapshot is consistent.
    pub(super) fn upload<'a>(
        self: &'a Arc<Self>,
        ino: Ino,
        at: &'a Link,
        path: &'a PoolPath,
        expected: &'a Expected,
    ) -> BoxFuture<'a, Result<Option<Uploaded>>> {
        async move {
            let _noted = self.note_upload(at.0)?;
            let mut attempts = 0..ATTEMPTS;
            while attempts.next().is_some() {
                let Some(snapshot) = self.snapshot(ino).await? else { return Ok(None) };
                let is_last = attempts.is_empty();
                let snapshot = if is_last && snapshot.held { self.freeze(snapshot).await? } else { snapshot };
                let Snapshot { content, record: mut sent, generation, stamp, held, settled, apart, frozen } = snapshot;
                let recorded_mtime = sent.mtime;
                (sent.size, sent.mtime) = (stamp.size, stamp.mtime);
                let pieces = self.pieces(content.clone(), frozen, stamp);
                let (attrs, refused) = self.flusher.refused.split(ino, attrs_of(&sent));
                let (size, mtime) = (sent.size, sent.mtime);
                let what = PendingChange::Content { size, mtime };
                // At the same time: both syncs commit the same journal.
                let (announced, kept) =
                    futures::join!(self.about_to_send(at, ino, what), self.keep_what_is_sent(&content, held));
                if !announced? {
                    return Ok(None);
                }
                let is_kept = kept?;
                let is_spilled = sent.file.is_spilled();
                let put = match is_spilled {
                    true => self.pool.put_parts(
                        path,
                        self.parts_of(&*self.node(ino)?, &content, stamp.size)?,
                        &attrs,
                        expected,
                    ),
                    false => self.pool.put(path, stamp.size, pieces, &attrs, expected),
                };
                match self.ask(put).await {
                    Ok(stat) => {
                        let is_held =
                            self.node(ino)?.state.lock().opens.has_writer() || is_open_elsewhere(&content.file);
                        let is_synced = is_kept && settled && (held || apart);
                        if is_held && !is_synced {
                            // What was sent may be newer than what was synced. It stays dirty, based on what the pool has
                            // now.
                            self.sync_content(&content).await?;
                        }
                        self.counters.flushed_files.fetch_add(1, Ordering::Relaxed);
                        return Ok(Some(Uploaded {
                            stat,
                            sent,
                            recorded_mtime,
                            stamp,
                            generation,
                            settled,
                            apart,
                            synced: is_held || is_synced,
                            theirs: None,
                            refused,
                        }));
                    }
                    Err(e) if e.is(ErrorKind::Busy) || (is_spilled && self.has_other_content(ino, &content)) => {
                        tracing::debug!(%path, "written while it was uploaded; again")
                    }
                    // Each attribute is refused only once, so the attempts end.
                    Err(e) if self.flusher.refused.note(ino, &e) => {
                        tracing::warn!(%path, error = %e, "the content is uploaded without an attribute");
                        attempts = 0..ATTEMPTS;
                    }
                    Err(e) => {
                        if e.is_unreachable() {
                            self.node(ino)?.state.lock().late_uploads.note(size, mtime);
                        }
                        return Err(e.context(path));
                    }
                }
            }
            Err(Error::new(
                ErrorKind::Busy,
                Side::Application,
                format!("{path}: it is being written all the time; it is flushed when the writer pauses or closes it"),
            ))
        }
        .boxed()
    }

    /// Syncs content before it is sent: the content on the device is never older than the pool's copy. Until the commit of
    /// the upload is synced, a power cut makes the file dirty again, based on the version that the upload gave it, and the
    /// next flush sends what is left on the device. `held`: the snapshot has synced it. Returns whether it is durable: a
    /// bypassed device is not synced, and what can be read from it is better sent than kept.
    pub(crate) async fn keep_what_is_sent(&self, content: &Arc<Content>, held: bool) -> Result<bool> {
        if held {
            return Ok(true);
        }
        let _turn = self.contents.syncs.acquire().await;
        let id = ContentId(content.id);
        // It may have been bypassed since: a sync that fails there would make intact content count as lost.
        if !self.store.is_used(id) {
            return Ok(false);
        }
        let known = self.catalog.lost(id);
        let (catalog, content) = (self.catalog.clone(), content.clone());
        // With the times: the pool gets them, too.
        match blocking(move || catalog.sync_sent(&content)).await {
            Ok(None) => Ok(true),
            Ok(Some(error)) => {
                self.store.note_error(id, &error);
                Ok(false)
            }
            Err(error) => {
                let failed = Err(error);
                self.note_sync(id, known.as_ref(), &failed);
                failed.map(|()| false)
            }
        }
    }

    /// Whether a file was emptied, and has another content file since.
    fn has_other_content(&self, ino: Ino, content: &Content) -> bool {
        let id = ContentId(content.id);
        self.node(ino).is_ok_and(|node| node.state.lock().record.file.content() != Some(id))
    }

    /// Makes later stores through a mapping show in the times of the content file: the kernel notes a store to a page
    /// only if the page was written back before.
    pub(super) async fn write_back_mapped(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let content = {
            let mut state = node.state.lock();
            let content = self.content(ino, &mut state)?;
            if !state.opens.has_writer() && !is_open_elsewhere(&content.file) {
                return Ok(());
            }
            content
        };
        self.sync_content(&content).await
    }

    /// Syncs content, and counts a failure against the device.
    pub(crate) async fn sync_content(&self, content: &Arc<Content>) -> Result<()> {
        let _turn = self.contents.syncs.acquire().await;
        let id = ContentId(content.id);
        let known = self.catalog.lost(id);
        let (catalog, content) = (self.catalog.clone(), content.clone());
        let synced = blocking(move || catalog.sync_content(&content, true)).await;
        self.note_sync(id, known.as_ref(), &synced);
        synced
    }

    /// Returns a file as it is to be sent; `None`: it is clean, and the content that the pool has by now was given up.
    async fn snapshot(self: &Arc<Self>, ino: Ino) -> Result<Option<Snapshot>> {
        let node = self.node(ino)?;
        self.take_set_id(&node)?;
        let lacks = {
            let record = &node.state.lock().record;
            let lacks = !record.file.is_whole() && !record.file.is_dirty();
            lacks.then(|| record.in_pool())
        };
        match lacks {
            Some(true) => return Ok(None),
            // The path is found by locking the inode, so its lock is not held here.
            Some(false) => {
                let what = format!("{}: the fast pool does not have its whole content", self.display(ino));
                return Err(Error::new(ErrorKind::Corrupt, Side::Cache, what));
            }
            None => {}
        }
        let (before, content) = {
            let mut state = node.state.lock();
            if !state.record.file.is_whole() && !state.record.file.is_dirty() {
                // It was given up since.
                return Ok(None);
            }
            let content = self.content(ino, &mut state)?;
            self.catalog.check_kept(ContentId(content.id))?;
            let stamp = Stamp::of(&content.file)?;
            if !state.opens.has_writer() && !is_open_elsewhere(&content.file) {
                // No program can open it while its state is locked: every write from now on begins after the stamp.
                let apart = self.store.tells_times_apart(&stamp);
                let (record, generation) = (state.record.clone(), state.generation);
                return Ok(Some(Snapshot {
                    content,
                    record,
                    generation,
                    stamp,
                    held: false,
                    settled: true,
                    apart,
                    frozen: None,
                }));
            }
            (stamp, content)
        };
        let file = content.file.clone();
        blocking(move || await_writes(&file)).await?;
        let wait = self.store.until_times_are_apart(&before);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        // The kernel notes a store through a mapping in the times only if its page was written back before.
        self.sync_content(&content).await?;
        self.take_set_id(&node)?;
        let state = node.state.lock();
        let stamp = Stamp::of(&content.file)?;
        let apart = self.store.tells_times_apart(&stamp);
        // A store between the two stamps would hide later stores to the same page.
        // Direct I/O through the daemon counts as a change while it is under way.
        let direct = state.opens.writes_direct() && !state.bypass.is_none();
        let settled = before == stamp && !direct && apart;
        let (record, generation) = (state.record.clone(), state.generation);
        drop(state);
        Ok(Some(Snapshot { content, record, generation, stamp, held: true, settled, apart, frozen: None }))
    }

    /// Makes a snapshot one of a moment, if the fast pool's file system has reflinks. It has the stamp from before that
    /// moment, so whatever is written after the stamp is sent again.
    async fn freeze(self: &Arc<Self>, snapshot: Snapshot) -> Result<Snapshot> {
        let (inner, content) = (self.clone(), snapshot.content.clone());
        let frozen = blocking(move || Ok(inner.store.snapshot(&content))).await?.map(Arc::new);
        let size = match &frozen {
            Some(file) => file.metadata().map_err(|e| Error::io(e, Side::Cache, "stat of a reflink"))?.size(),
            None => snapshot.stamp.size,
        };
        let stamp = Stamp { size, ..snapshot.stamp };
        let settled = snapshot.settled && frozen.is_none();
        Ok(Snapshot { stamp, settled, frozen, ..snapshot })
    }

    /// Returns the data of a content file, without its holes; ends with `Busy` if the file was written meanwhile. If it
    /// is `frozen`, the data are those of that copy.
    fn pieces(self: &Arc<Self>, content: Arc<Content>, frozen: Option<Arc<File>>, stamp: Stamp) -> Pieces<'static> {
        let inner = self.clone();
        let is_frozen = frozen.is_some();
        let file = frozen.unwrap_or_else(|| content.file.clone());
        stream::try_unfold((0u64, false), move |(at, ended)| {
            let (inner, content, file) = (inner.clone(), content.clone(), file.clone());
            async move {
                if ended {
                    return Ok(None);
                }
                let Some((start, end)) = next_data(&file, at, stamp.size)? else {
                    if !is_frozen && Stamp::of(&content.file)? != stamp {
                        return Err(written_meanwhile());
                    }
                    // All bytes were read. If no failed write-back is reported by now, no byte was lost before it was
                    // read.
                    blocking(move || inner.catalog.check_written_back(&content)).await?;
                    return Ok(None);
                };
                let len = (end - start).min(CHUNK_BYTES);
                let data = inner.read_for_pool(ContentId(content.id), &file, start, len).await?;
                Ok(Some((Piece { offset: start, data }, (start + len, false))))
            }
        })
        .boxed()
    }

    /// Reads `len` bytes of a content file, or of a copy of it, that are sent to the pool next.
    ///
    /// # Errors
    /// `Busy` if the file is shorter by now.
    pub(crate) async fn read_for_pool(&self, id: ContentId, file: &Arc<File>, at: u64, len: u64) -> Result<Bytes> {
        self.may_send(len).await;
        let units = len.div_ceil(MEMORY_UNIT_BYTES) as u32;
        let _memory = self.memory.acquire_many(units).await.map_err(|_| written_meanwhile())?;
        let data = self.contents.io.read_at(file.clone(), at, len as usize).await;
        let data = data.inspect_err(|error| _ = self.store.note_error(id, error))?;
        if data.len() as u64 != len {
            return Err(written_meanwhile());
        }
        self.counters.pool_written_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(data)
    }

    /// Commits an upload: the file is clean, unless a program wrote it since. `names` adds changes of names to the same
    /// batch.
    pub(super) async fn commit_uploaded(
        &self,
        ino: Ino,
        mut uploaded: Uploaded,
        names: &(dyn Fn(&mut Txn<'_>) -> Result<()> + Sync),
    ) -> Result<()> {
        while let Some(unsynced) = self.try_commit_uploaded(ino, &uploaded, names)? {
            // No lock is held during the sync.
            self.sync_content(&unsynced).await?;
            uploaded.synced = true;
        }
        Ok(())
    }

    /// The same. If the content file must be synced first, changes nothing and returns it.
    fn try_commit_uploaded(
        &self,
        ino: Ino,
        uploaded: &Uploaded,
        names: &(dyn Fn(&mut Txn<'_>) -> Result<()> + Sync),
    ) -> Result<Option<Arc<Content>>> {
        let mut txn = Txn::begin(self);
        // Without a descriptor of its own, the daemon would see neither a mapping nor the present stamp. It may have closed
        // the content file of a dirty file during the upload.
        let content = match txn.record(ino)?.file.is_dirty() {
            true => Some(txn.content(ino)?),
            false => txn.state(ino)?.content.clone(),
        };
        let state = txn.state(ino)?;
        // Check for holders before the stamp: whatever a holder stored before this check shows in the times.
        let held = state.opens.has_writer() || content.as_ref().is_some_and(|content| is_open_elsewhere(&content.file));
        let unchanged = match &content {
            Some(content) => Stamp::of(&content.file)? == uploaded.stamp,
            None => true,
        };
        let same = state.generation == uploaded.generation && unchanged && uploaded.settled;
        let quiet = same && !held;
        if let (false, false, Some(content)) = (quiet, uploaded.synced, &content) {
            // As in `upload`: a program opened it meanwhile.
            return Ok(Some(content.clone()));
        }
        let kept = content.as_ref().is_none_or(|content| {
            let is_used = self.store.is_used(ContentId(content.id));
            is_used && self.catalog.glance_written_back(content).is_ok()
        });
        names(&mut txn)?;
        let written = !txn.state(ino)?.dirty_content.is_unwritten(uploaded.stamp);
        let equal = (same && held && uploaded.apart).then_some(uploaded.stamp);
        txn.on_commit(ino, move |state| {
            state.dirty_content.uploaded(equal);
            state.validated = Some(std::time::Instant::now());
        })?;
        txn.pool_still_has(ino)?;
        let record = txn.record(ino)?;
        record.version = Some(uploaded.stat.version.clone());
        record.occupied_in_pool = uploaded.stat.occupied;
        record.count_links(&uploaded.stat);
        // While the file was dirty, its content file had the true mtime, which the record takes now. If the time was
        // set meanwhile, the record has it already.
        if record.mtime == uploaded.recorded_mtime {
            record.mtime = uploaded.stamp.mtime;
            if written {
                record.ctime = record.ctime.max(uploaded.stamp.ctime);
            }
        }
        settle_attrs(record, &uploaded.sent);
        if let Some(theirs) = &uploaded.theirs {
            record.dirty_xattrs = differing(record.xattrs.as_ref().unwrap_or(theirs), theirs);
        }
        still_to_tell(record, &uploaded.refused);
        let mut given_up = false;
        if quiet && record.file.is_spilled() {
            record.size = uploaded.stamp.size;
            txn.give_up_spilled(ino)?;
            given_up = true;
        } else if quiet && record.file.is_dirty() {
            record.file = record.file.flushed()?;
            record.size = uploaded.stamp.size;
            if !kept {
                // The content did not reach the device, but the pool has it.
                txn.give_up(ino)?;
                given_up = true;
            }
        }
        let record = txn.record(ino)?;
        let clean = !record.file.is_dirty() && record.file.is_whole();
        let id = record.file.content();
        if let (true, Some(id)) = (clean, id) {
            // From now on the record's count is used. Until now it may be the count of a killed daemon, because the
            // look after the start counts only dirty files.
            let meta = match &content {
                Some(content) => {
                    content.file.metadata().map_err(|e| Error::io(e, Side::Cache, "stat of a content file"))?
                }
                None => self.store.stat(id)?,
            };
            txn.count(ino, meta.blocks() * 512)?;
            if quiet {
                self.end_bypass(ino, txn.state_at_once(ino)?);
                txn.on_commit(ino, |state| state.dirty_content.forget_pool_copy())?;
            }
            txn.put_clean_content(ino, id)?;
        }
        txn.commit()?;
        if given_up {
            self.tell_kernel_inode(ino, true);
        }
        Ok(None)
    }

    /// Compares the pool's object with our bytes. Returns an upload if they are equal: then there is no conflict,
    /// whichever client wrote them.
    pub(super) fn same_bytes<'a>(
        self: &'a Arc<Self>,
        ino: Ino,
        path: &'a PoolPath,
        stat: &'a Stat,
    ) -> BoxFuture<'a, Result<Option<Uploaded>>> {
        async move {
            let snapshot = self.snapshot(ino).await?.ok_or_else(given_up_meanwhile)?;
            let Snapshot { content, record: mut sent, generation, stamp, held, settled, apart, .. } = snapshot;
            if sent.file.is_spilled() {
                return Ok(None);
            }
            if stat.kind != sent.kind
                || stat.size != stamp.size
                || self.known_as(stat)?.is_some_and(|known| known != ino)
            {
                return Ok(None);
            }
            let mut at = 0;
            while at < stat.size {
                let end = stat.size.min(at + CHUNK_BYTES);
                let theirs: Bytes = self.ask(self.pool.read(path, &stat.version, at..end)).await?;
                let ours = self.contents.io.read_at(content.file.clone(), at, (end - at) as usize).await?;
                if theirs != ours {
                    return Ok(None);
                }
                at = end;
            }
            let (catalog, read) = (self.catalog.clone(), content.clone());
            blocking(move || catalog.check_written_back(&read)).await?;
            let recorded_mtime = sent.mtime;
            (sent.size, sent.mtime) = (stamp.size, stat.mtime);
            // If the pool's attributes are another client's, ours are still to be sent.
            (sent.mode, sent.uid, sent.gid) = (stat.mode, stat.uid, stat.gid);
            let theirs = match self.pool.capabilities().objects.xattrs {
                true => self.ask(self.pool.xattrs(path)).await.map_err(|e| e.context(path))?,
                false => Vec::new(),
            };
            let theirs = theirs.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
            let stat = stat.clone();
            let (theirs, synced) = (Some(theirs), held && settled);
            Ok(Some(Uploaded {
                stat,
                sent,
                recorded_mtime,
                stamp,
                generation,
                settled,
                apart,
                synced,
                theirs,
                refused: Vec::new(),
            }))
        }
        .boxed()
    }
}

/// Waits until every `write(2)` in progress has ended: it set the times when it began. Only asynchronous direct I/O may
/// still go on.
fn await_writes(file: &File) -> Result<()> {
    use rustix::io::Errno;
    // Takes the lock that writes hold. Changes nothing, not even the times.
    match rustix::fs::fremovexattr(file, "user.forebay.none") {
        // There is no such attribute, or the writer was stopped at the limit and the file is immutable.
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
        Err(e) => Err(Error::os(e.raw_os_error(), Side::Cache, "wait for writes to a content file")),
    }
}

/// Returns the next range from `at` on that is not a hole.
pub(crate) fn next_data(file: &File, at: u64, size: u64) -> Result<Option<(u64, u64)>> {
    use rustix::fs::SeekFrom;
    if at >= size {
        return Ok(None);
    }
    let failed = |e: rustix::io::Errno| Error::os(e.raw_os_error(), Side::Cache, "seek in a content file");
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < size => start,
        Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start)).map_err(failed)?;
    Ok(Some((start, end.min(size))))
}

/// Returns the changes that make their attributes ours.
fn differing(ours: &Xattrs, theirs: &Xattrs) -> XattrChanges {
    let set = ours.iter().filter(|attribute| !theirs.contains(attribute));
    let removed = theirs.iter().filter(|(name, _)| ours.iter().all(|(n, _)| n != name));
    let set = set.map(|(name, value)| (name.clone(), Some(value.clone())));
    set.chain(removed.map(|(name, _)| (name.clone(), None))).collect()
}

/// The flush looks at the file again.
fn given_up_meanwhile() -> Error {
    Error::new(ErrorKind::Busy, Side::Pool, "the pool has the content, which was given up")
}

pub(crate) fn written_meanwhile() -> Error {
    Error::new(ErrorKind::Busy, Side::Application, "the file is being written")
}

#[cfg(test)]
mod tests;
