//! Content, sent to the pool as one consistent snapshot.
//!
//! The stream of the data ends with an error if the content file was written meanwhile, so the pool never gets the
//! middle of a write. Before the upload of a file that a program may write or has mapped, its pages are written back:
//! the kernel notes a store through a mapping in the file's times only if the page was clean.
//!
//! The file becomes clean if stamp (size, mtime, ctime) and generation are those of the snapshot, and no writer and no
//! mapping is left. Else it stays dirty, on the base of the version that the pool has now.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, Expected, Piece, Pieces, PoolPath, Result, Side, Stat, Time};
use forebay_cache::Content;
use forebay_cache::{CHUNK_BYTES, ContentId, Stamp, is_held};
use forebay_catalog::{InodeRecord, Link, SentWhat, XattrChanges, Xattrs};
use futures::StreamExt;
use futures::stream;

use super::super::{Inner, Ino, MEMORY_UNIT_BYTES, Txn, blocking};
use super::create::{attrs_of, settle_attrs, still_to_tell};

/// How often an upload begins anew because somebody writes the file meanwhile.
const ATTEMPTS: u32 = 4;

/// What the pool has been given.
pub(super) struct Uploaded {
    stat: Stat,
    /// The record as it was sent.
    sent: InodeRecord,
    /// What the record said when it was sent; the content file knew better.
    recorded_mtime: Time,
    stamp: Stamp,
    generation: u64,
    bytes: u64,
    /// Whatever was changed since the stamp shows in another one.
    settled: bool,
    /// The same of what was changed by who opened it after the stamp.
    apart: bool,
    /// What was sent is on the disk here, too.
    synced: bool,
    /// The extended attributes of an object that others made.
    theirs: Option<Xattrs>,
    /// Extended attributes that the pool did not take.
    refused: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A file as it is to be sent.
struct Snapshot {
    content: Arc<Content>,
    record: InodeRecord,
    generation: u64,
    stamp: Stamp,
    /// Somebody may change it without the daemon.
    held: bool,
    settled: bool,
    apart: bool,
}

impl Inner {
    /// Puts the content of a file under a path of the pool, which is the one of a name. `None`: the name is another
    /// one's by now.
    ///
    /// # Errors
    /// `Conflict` where the pool has something else there than expected; `Busy` where the file is written so
    /// often that no snapshot is consistent.
    pub(super) async fn upload(
        self: &Arc<Self>,
        ino: Ino,
        at: &Link,
        path: &PoolPath,
        expected: &Expected,
    ) -> Result<Option<Uploaded>> {
        let _noted = self.note_upload(at.0)?;
        let mut attempts = 0..ATTEMPTS;
        while attempts.next().is_some() {
            let Snapshot { content, record: mut sent, generation, stamp, held, settled, apart } =
                self.snapshot(ino).await?;
            let recorded_mtime = sent.mtime;
            (sent.size, sent.mtime) = (stamp.size, stamp.mtime);
            let pieces = self.pieces(content.clone(), stamp);
            let (attrs, refused) = self.flusher.refused.split(ino, attrs_of(&sent));
            let what = SentWhat::Content { size: sent.size, mtime: sent.mtime };
            if !self.about_to_send(at, ino, what).await? {
                return Ok(None);
            }
            let put = self.pool.put(path, stamp.size, pieces, &attrs, expected);
            match self.ask(put).await {
                Ok(stat) => {
                    let is_held = self.node(ino)?.state.lock().writers > 0 || is_held(&content.file);
                    if is_held && !(held && settled) {
                        // It stays dirty, on the base of what the pool has now: after a power cut it must not be older.
                        self.sync_content(&content).await?;
                    }
                    self.counters.flushed_files.fetch_add(1, Ordering::Relaxed);
                    return Ok(Some(Uploaded {
                        stat,
                        sent,
                        recorded_mtime,
                        stamp,
                        generation,
                        bytes: stamp.size,
                        settled,
                        apart,
                        synced: is_held || (held && settled),
                        theirs: None,
                        refused,
                    }));
                }
                Err(e) if e.is(ErrorKind::Busy) => tracing::debug!(%path, "written while it was uploaded; again"),
                // Each of them is refused once.
                Err(e) if self.flusher.refused.note(ino, &e) => {
                    tracing::warn!(%path, error = %e, "the content goes to the pool without an attribute");
                    attempts = 0..ATTEMPTS;
                }
                Err(e) => return Err(e.context(path)),
            }
        }
        Err(Error::new(
            ErrorKind::Busy,
            Side::Application,
            format!("{path}: it is being written all the time; it is flushed when the writer pauses or closes it"),
        ))
    }

    /// What is stored through a mapping from now on shows in the times of the content file: the kernel notes a store to
    /// a page only where it was written back before.
    pub(super) async fn write_back_mapped(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let content = {
            let mut state = node.state.lock();
            let content = self.content(ino, &mut state)?;
            if state.writers == 0 && !is_held(&content.file) {
                return Ok(());
            }
            content
        };
        self.sync_content(&content).await
    }

    async fn sync_content(&self, content: &Arc<Content>) -> Result<()> {
        let (catalog, content) = (self.catalog.clone(), content.clone());
        let _turn = self.syncs.acquire().await;
        blocking(move || catalog.sync_content(&content, true)).await
    }

    async fn snapshot(self: &Arc<Self>, ino: Ino) -> Result<Snapshot> {
        let node = self.node(ino)?;
        self.take_set_id(&node)?;
        let (before, content) = {
            let mut state = node.state.lock();
            let content = self.content(ino, &mut state)?;
            self.catalog.check_kept(ContentId(content.id))?;
            let stamp = Stamp::of(&content.file)?;
            if state.writers == 0 && !is_held(&content.file) {
                // Nobody opens it while it is locked here: what is written from now on begins after the stamp.
                let apart = self.store.tells_times_apart(&stamp);
                let (record, generation) = (state.record.clone(), state.generation);
                return Ok(Snapshot { content, record, generation, stamp, held: false, settled: true, apart });
            }
            (stamp, content)
        };
        let file = content.file.clone();
        blocking(move || await_writes(&file)).await?;
        let wait = self.store.until_times_are_apart(&before);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        // A store through a mapping is noted in the times only where its page was written back before.
        self.sync_content(&content).await?;
        self.take_set_id(&node)?;
        let state = node.state.lock();
        let stamp = Stamp::of(&content.file)?;
        let apart = self.store.tells_times_apart(&stamp);
        // What was stored between the two would hide what is stored to the same page from now on.
        let settled = before == stamp && !state.written_direct && apart;
        let (record, generation) = (state.record.clone(), state.generation);
        drop(state);
        Ok(Snapshot { content, record, generation, stamp, held: true, settled, apart })
    }

    /// The data of a content file, without its holes; ends with `Busy` if the file was written meanwhile.
    fn pieces(self: &Arc<Self>, content: Arc<Content>, stamp: Stamp) -> Pieces<'static> {
        let inner = self.clone();
        stream::try_unfold((0u64, false), move |(at, ended)| {
            let (inner, content) = (inner.clone(), content.clone());
            async move {
                if ended {
                    return Ok(None);
                }
                let Some((start, end)) = next_data(&content.file, at, stamp.size)? else {
                    if Stamp::of(&content.file)? != stamp {
                        return Err(written_meanwhile());
                    }
                    // All was read: what was not told by now was not lost before.
                    blocking(move || inner.catalog.check_written_back(&content)).await?;
                    return Ok(None);
                };
                let len = (end - start).min(CHUNK_BYTES);
                let units = len.div_ceil(MEMORY_UNIT_BYTES) as u32;
                let _memory = inner.memory.acquire_many(units).await.map_err(|_| written_meanwhile())?;
                let data = inner.io.read_at(content.file.clone(), start, len as usize).await?;
                if data.len() as u64 != len {
                    return Err(written_meanwhile());
                }
                inner.counters.pool_written_bytes.fetch_add(len, Ordering::Relaxed);
                Ok(Some((Piece { offset: start, data }, (start + len, false))))
            }
        })
        .boxed()
    }

    /// The file is in the pool as it was sent: clean, unless somebody wrote it since. `names` adds to the same change what
    /// became of names.
    pub(super) async fn commit_uploaded(
        &self,
        ino: Ino,
        mut uploaded: Uploaded,
        names: &(dyn Fn(&mut Txn<'_>) -> Result<()> + Sync),
    ) -> Result<()> {
        while let Some(unsynced) = self.try_commit_uploaded(ino, &uploaded, names)? {
            // No lock is held for as long as a disk takes.
            self.sync_content(&unsynced).await?;
            uploaded.synced = true;
        }
        Ok(())
    }

    /// The same. Changes nothing where the content file must be synced before; returns it then.
    fn try_commit_uploaded(
        &self,
        ino: Ino,
        uploaded: &Uploaded,
        names: &(dyn Fn(&mut Txn<'_>) -> Result<()> + Sync),
    ) -> Result<Option<Arc<Content>>> {
        let mut txn = Txn::begin(self);
        let state = txn.state(ino)?;
        let content = state.content.clone();
        // Who holds it is asked first: what is stored until then shows in the times.
        let held = state.writers > 0 || content.as_ref().is_some_and(|content| is_held(&content.file));
        let unchanged = match &content {
            Some(content) => Stamp::of(&content.file)? == uploaded.stamp,
            None => true,
        };
        let same = state.generation == uploaded.generation && unchanged && uploaded.settled;
        let quiet = same && !held;
        if let (false, false, Some(content)) = (quiet, uploaded.synced, &content) {
            // As in `upload`: somebody opened it meanwhile.
            return Ok(Some(content.clone()));
        }
        let kept = content.as_ref().is_none_or(|content| self.catalog.glance_written_back(content).is_ok());
        names(&mut txn)?;
        let state = txn.state(ino)?;
        state.uploaded = (same && held && uploaded.apart).then_some(uploaded.stamp);
        state.validated = Some(std::time::Instant::now());
        let written = state.clean_stamp.take() != Some(uploaded.stamp);
        let occupied = state.residency.as_ref().map_or(uploaded.bytes, |r| r.bytes);
        for (parent, name) in txn.record(ino)?.pool_links.clone() {
            if !txn.name(parent, &name)?.sent.is_empty() {
                txn.pool_has(parent, &name, Some(ino))?;
            }
        }
        let record = txn.record(ino)?;
        record.version = Some(uploaded.stat.version.clone());
        record.occupied_in_pool = uploaded.stat.occupied;
        record.count_links(&uploaded.stat);
        // While it was dirty the content file knew when it was modified; it still knows better where the time was set
        // meanwhile, which both know.
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
        if quiet && record.file.is_dirty() {
            record.file = record.file.flushed()?;
            record.size = uploaded.stamp.size;
            if !kept {
                // The device does not have it, and the pool does.
                txn.give_up(ino)?;
                given_up = true;
            }
        }
        let record = txn.record(ino)?;
        let clean = !record.file.is_dirty() && record.file.is_whole();
        let id = record.file.content();
        let state = txn.state(ino)?;
        if let (true, Some(id)) = (clean, id) {
            // From here on the record is what it is counted with. Until now it may be what a daemon that was killed has
            // counted, and the look after the start counts what is dirty alone.
            let meta = match &content {
                Some(content) => {
                    content.file.metadata().map_err(|e| Error::io(e, Side::Cache, "stat of a content file"))?
                }
                None => self.store.stat(id)?,
            };
            self.count(state, meta.blocks() * 512)?;
            state.count_unsaved = false;
            if quiet {
                state.written_past = None;
            }
            // What was written is not on the disk for sure: as what was fetched just now.
            let mut residency = self.residency(state)?.clone();
            residency.epoch = self.catalog.epoch();
            txn.batch.put_unproven_content(id, &mut residency);
            txn.state(ino)?.residency = Some(residency);
            self.fetched_epoch.store(self.catalog.epoch(), Ordering::Relaxed);
        }
        txn.commit()?;
        if given_up {
            self.tell_kernel_inode(ino, true);
        }
        if clean {
            self.evictor.lock().insert(ino.0, occupied);
        }
        Ok(None)
    }

    /// Whether the pool's object has just the bytes that we have: then there is no conflict, whoever wrote it.
    pub(super) async fn same_bytes(
        self: &Arc<Self>,
        ino: Ino,
        path: &PoolPath,
        stat: &Stat,
    ) -> Result<Option<Uploaded>> {
        let Snapshot { content, record: mut sent, generation, stamp, held, settled, apart } =
            self.snapshot(ino).await?;
        if stat.kind != sent.kind || stat.size != stamp.size || self.known_as(stat)?.is_some_and(|known| known != ino) {
            return Ok(None);
        }
        let mut at = 0;
        while at < stat.size {
            let end = stat.size.min(at + CHUNK_BYTES);
            let theirs: Bytes = self.ask(self.pool.read(path, &stat.version, at..end)).await?;
            let ours = self.io.read_at(content.file.clone(), at, (end - at) as usize).await?;
            if theirs != ours {
                return Ok(None);
            }
            at = end;
        }
        let (catalog, read) = (self.catalog.clone(), content.clone());
        blocking(move || catalog.check_written_back(&read)).await?;
        let recorded_mtime = sent.mtime;
        (sent.size, sent.mtime) = (stamp.size, stat.mtime);
        // Where the attributes are somebody else's, ours are still to be told.
        (sent.mode, sent.uid, sent.gid) = (stat.mode, stat.uid, stat.gid);
        let theirs = match self.pool.capabilities().xattrs {
            true => self.ask(self.pool.xattrs(path)).await.map_err(|e| e.context(path))?,
            false => Vec::new(),
        };
        let theirs = theirs.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let (stat, bytes) = (stat.clone(), stamp.size);
        let (theirs, synced) = (Some(theirs), held && settled);
        Ok(Some(Uploaded {
            stat,
            sent,
            recorded_mtime,
            stamp,
            generation,
            bytes,
            settled,
            apart,
            synced,
            theirs,
            refused: Vec::new(),
        }))
    }
}

/// Returns when every `write(2)` that was under way has ended: it set the times when it began. Only direct I/O that
/// is waited for later goes on.
fn await_writes(file: &File) -> Result<()> {
    use rustix::io::Errno;
    // Takes the lock that writes hold, and changes nothing, not even the times.
    match rustix::fs::fremovexattr(file, "user.forebay.none") {
        // Without any, or stopped at the limit.
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
        Err(e) => Err(Error::os(e.raw_os_error(), Side::Cache, "wait for writes to a content file")),
    }
}

/// The next range that is not a hole, from `at` on.
fn next_data(file: &File, at: u64, size: u64) -> Result<Option<(u64, u64)>> {
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

/// What makes theirs ours.
fn differing(ours: &Xattrs, theirs: &Xattrs) -> XattrChanges {
    let set = ours.iter().filter(|attribute| !theirs.contains(attribute));
    let removed = theirs.iter().filter(|(name, _)| ours.iter().all(|(n, _)| n != name));
    let set = set.map(|(name, value)| (name.clone(), Some(value.clone())));
    set.chain(removed.map(|(name, _)| (name.clone(), None))).collect()
}

fn written_meanwhile() -> Error {
    Error::new(ErrorKind::Busy, Side::Application, "the file is being written")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_write_that_is_under_way_is_waited_for() {
        const LEN: usize = 128 << 20;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![b'a'; LEN], 0).unwrap();
        let byte_at = |at: usize| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at as u64).unwrap();
            byte[0]
        };
        std::thread::scope(|scope| {
            scope.spawn(|| file.write_at(&vec![b'b'; LEN], 0).unwrap());
            while byte_at(0) == b'a' {
                std::thread::yield_now();
            }
            let before = Stamp::of(&file).unwrap();
            await_writes(&file).unwrap();
            assert_eq!(byte_at(LEN - 1), b'b');
            assert_eq!(Stamp::of(&file).unwrap(), before, "the write set the times when it began, and we set none");
        });
    }
}
