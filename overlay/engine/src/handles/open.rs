//! Open: what an open returns.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{Content, ContentId, Stamp};
use forebay_policy::{PathPolicy, Read};

use super::super::coherence::Age;
use super::super::{CachedPages, Inner, Ino, Opened, Overlay, Txn, blocking, is_writable};
use super::Ensured;
use super::through::is_full;
use crate::node::{Attachment, Node, NodeState};
use crate::quotas::FileOwner;
use crate::tiers::device_health::is_of_device;

/// How often an open starts again because the file changed meanwhile.
const ATTEMPTS: u32 = 5;

/// Whether an open will fetch the whole file from a pool whose reads fail if the version has changed. Then the version
/// need not be confirmed before. A fetch that is already in flight does not count, because its answer may be older.
fn is_fetched_whole(inner: &Inner, node: &Node, policy: &PathPolicy) -> bool {
    // A peer does not confirm that the pool still has the version.
    if inner.peers.get().is_some() || !inner.pool.capabilities().versions.confirmed_by_reads {
        return false;
    }
    let state = node.state.lock();
    let fits = (1..=policy.whole_file_bytes).contains(&state.record.size) && policy.read != Read::Bypass;
    fits && state.record.file.is_absent() && !state.record.file.is_written_through() && state.flights.is_empty()
}

/// Refuses an inode whose last name was removed or replaced after the kernel looked it up: by a caller of the mount, if
/// the content went with it, or by another client in the pool. A program that has such a file open may open it again.
fn check_has_names(node: &Node, state: &NodeState) -> Result<()> {
    if state.is_deleted() || (state.is_superseded() && !state.opens.any()) {
        let what = format!("inode {} has no name any more", node.ino);
        return Err(Error::new(ErrorKind::Stale, Side::Application, what));
    }
    Ok(())
}

/// An open is under way: while this lives, the content that is fetched for it is not evicted.
struct Opening<'a>(&'a Node);

impl<'a> Opening<'a> {
    fn begin(node: &'a Node) -> Self {
        node.state.lock().opens.begin_opening();
        Self(node)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.state.lock().opens.end_opening();
    }
}

impl Overlay {
    /// Opens a regular file by the access mode and `O_TRUNC` of `flags`.
    ///
    /// # Errors
    /// `Stale` if the name refers to another file by now: the caller looks it up again.
    pub async fn open_file(&self, ino: Ino, flags: i32) -> Result<Opened> {
        self.open_file_for(ino, flags, None).await
    }

    /// The same for a thread. The kernel allowed its open by cached rights.
    ///
    /// # Errors
    /// `Stale`, too, if another client changed those rights.
    pub async fn open_file_for(&self, ino: Ino, flags: i32, thread: Option<u32>) -> Result<Opened> {
        let inner = &self.inner;
        let write = is_writable(flags);
        let truncates = flags & libc::O_TRUNC != 0;
        if write || truncates {
            inner.check_writable()?;
        }
        let node = inner.file_node(ino)?;
        inner.learn_policy_facts(&node).await;
        let policy = inner.policy_of(&node);
        if truncates || !is_fetched_whole(inner, &node, &policy) {
            inner.revalidate(ino, Age::Open).await?;
        }
        check_has_names(&node, &node.state.lock())?;
        if truncates {
            if let Some(thread) = thread {
                inner.check_rights(ino, thread).await?;
            }
            inner.truncate_to_zero(&node).await?;
        } else {
            inner.try_end_abandoned_write_through(&node).await;
        }
        let is_for_whole = |size| size <= policy.whole_file_bytes && (write || policy.read != Read::Bypass);
        let _opening = Opening::begin(&node);
        let (mut missed, mut fetched_bytes) = (false, 0);
        for _ in 0..ATTEMPTS {
            let (whole, size) = {
                let state = node.state.lock();
                (state.record.file.is_whole(), state.record.size)
            };
            missed |= !whole && !write && !truncates;
            let count = if whole { &inner.counters.opens_resident } else { &inner.counters.opens_absent };
            count.fetch_add(1, Ordering::Relaxed);
            if node.is_written_through() || node.is_spilled() {
                // It does not fit into the fast pool: what is not there is read and written in the pool.
            } else if !whole && (size == 0 || is_for_whole(size)) {
                let missing = inner.missing_bytes(&node, 0..size)?;
                match inner.ensure_for_program(&node, 0..size).await {
                    Ok(Ensured::Resident) => fetched_bytes += missing,
                    Ok(Ensured::Uncached) => inner.revalidate(ino, Age::Open).await?,
                    Ok(Ensured::Changed) => continue,
                    Err(e) if e.is(ErrorKind::Stale) => {
                        inner.revalidate(ino, Age::Now).await?;
                        continue;
                    }
                    Err(e) => return Err(e),
                }
            }
            if write {
                inner.leave_memory(&node).await?;
                inner.leave_views(&node).await?;
            }
            if let Some(opened) = inner.register_open(&node, flags, &policy)? {
                // Attributes that the kernel has cached would not follow writes that bypass the daemon.
                let bypasses = write && opened.resident.is_some();
                if let (true, Some(kernel)) = (bypasses || !opened.pages.valid, inner.mount.kernel()) {
                    kernel.invalidate_attributes_now(ino);
                }
                if write
                    && node.state.lock().record.file.is_whole()
                    && let Err(e) = inner.mark_dirty(&node).await
                {
                    let goes_through = match is_full(&e) && opened.resident.is_none() {
                        true => inner.leave_fast_pool(&node, &e, 0..0).await,
                        false => Err(e),
                    };
                    match goes_through {
                        // It is written through from now on.
                        Ok(true) => {}
                        Ok(false) => {
                            self.release(ino, flags);
                            continue;
                        }
                        Err(e) => {
                            self.release(ino, flags);
                            if is_given_up(&node, &e) {
                                continue;
                            }
                            return Err(e);
                        }
                    }
                }
                if let Some(content) = &opened.resident {
                    let file = node.state.lock().record.file;
                    // If the content was given up meanwhile, what is written to its file would be lost.
                    let changed = file.content() != Some(ContentId(content.id)) || (write && !file.is_dirty());
                    if changed || (!file.is_dirty() && !inner.is_kept(content).await) {
                        self.release(ino, flags);
                        continue;
                    }
                }
                if let Some(thread) = thread
                    && let Err(e) = inner.check_rights(ino, thread).await
                {
                    self.release(ino, flags);
                    return Err(e);
                }
                return Ok(Opened { missed, fetched_bytes, ..opened });
            }
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: changes while it is opened", inner.display(ino))))
    }
}

impl Overlay {
    /// Notes that the kernel drops the pages that it has of an inode: the answer to the open that returned `pages` does
    /// not let it keep them. Called before that answer is sent, while the open keeps the inode in memory.
    pub fn pages_dropped(&self, ino: Ino, pages: CachedPages) {
        if let Some(node) = self.inner.table.peek(ino) {
            node.state.lock().kernel.pages_dropped(pages);
        }
    }
}

impl Inner {
    /// Counts an open by a program. `bypasses`: it may write without the daemon.
    pub fn count_open(&self, ino: Ino, state: &mut NodeState, flags: i32, bypasses: bool) {
        let write = is_writable(flags);
        state.opens.add(write, flags & libc::O_DIRECT != 0, &self.table.opens);
        if write {
            if bypasses {
                state.bypass.open();
                state.opens.note_bypass();
            }
            self.begin_counting(ino);
        }
    }

    /// Counts an open. Returns `None` if the content was evicted meanwhile and must be fetched again.
    fn register_open(self: &Arc<Self>, node: &Arc<Node>, flags: i32, policy: &PathPolicy) -> Result<Option<Opened>> {
        let write = is_writable(flags);
        let no_flush = !(write || flags & libc::O_TRUNC != 0) || !self.policy().may_flush_on_close();
        // What a program writes past the daemon cannot be written through when the fast pool is full.
        let stays = !policy.goes_through();
        let mut state = node.state.lock();
        check_has_names(node, &state)?;
        let resident = match state.record.file.is_whole() {
            true => match self.content(node.ino, &mut state) {
                Ok(content) => Some(content),
                Err(e) if !state.record.file.is_dirty() && (e.is(ErrorKind::NotFound) || is_of_device(&e)) => {
                    let id = state.record.file.content();
                    drop(state);
                    if let Some(id) = id {
                        self.store.note_error(id, &e);
                    }
                    tracing::warn!(error = %e, "a content file is missing; it will be fetched again");
                    self.discard_clean(node)?;
                    return Ok(None);
                }
                Err(e) => return Err(e),
            },
            false => None,
        };
        let may_be_written = |id| !self.is_in_view(id) && (!self.store.is_volatile(id) || state.record.file.is_dirty());
        if write && resident.as_ref().is_some_and(|content| !may_be_written(ContentId(content.id))) {
            // The view was laid since the file left others, or it was promoted meanwhile.
            return Ok(None);
        }
        if let Some(content) = resident.as_ref().or(state.content.as_ref())
            && !state.record.file.is_dirty()
            && (self.catalog.glance_written_back(content).is_err() || !self.store.is_used(ContentId(content.id)))
        {
            let id = ContentId(content.id);
            drop(state);
            if self.give_up_unwritten(node, id)? {
                return Ok(None);
            }
            state = node.state.lock();
            if state.record.file.content() != Some(id) {
                return Ok(None);
            }
        }
        if let Some(content) = &resident {
            // A content file must not be shorter than its record says: the missing bytes would be read as zeros.
            let have = content.file.metadata().map_err(crate::contents::failed)?.size();
            let size = state.record.size;
            let clean = !state.record.file.is_dirty();
            // Bytes that a killed daemon appended but did not record are cut off.
            let cut = clean && have > size && (state.growth.under_way || content.cut(size).is_ok());
            if clean && have != size && !cut {
                drop(state);
                tracing::error!(ino = %node.ino, have, size, "content file has a wrong size; it will be fetched again");
                self.discard_clean(node)?;
                return Ok(None);
            }
        }
        let pages = state.kernel.pages();
        let clean = !state.record.file.is_dirty();
        let bypasses = write && stays && resident.is_some() && self.may_bypass(FileOwner::of(&state.record));
        self.count_open(node.ino, &mut state, flags, bypasses);
        let used = resident.as_ref().filter(|_| clean && (bypasses || !write)).map(|content| ContentId(content.id));
        let passes = |content: &Arc<Content>| self.may_pass_through(ContentId(content.id));
        let resident = resident.filter(|content| (bypasses || !write) && passes(content));
        if resident.is_some() {
            state.opens.note_passthrough();
        }
        drop(state);
        if let Some(id) = used {
            self.note_open(node.ino, id);
        }
        Ok(Some(Opened { resident, pages, no_flush, missed: false, fetched_bytes: 0 }))
    }

    /// Returns whether no write-back error is known for clean content. `register_open` polled without blocking. If
    /// another caller was consuming the error at that moment, wait for its result.
    async fn is_kept(&self, content: &Arc<Content>) -> bool {
        if !content.is_asked() {
            return self.catalog.check_kept(ContentId(content.id)).is_ok();
        }
        let (catalog, content) = (self.catalog.clone(), content.clone());
        blocking(move || catalog.check_written_back(&content)).await.is_ok()
    }

    /// Durably marks whole content as newer than the pool's copy, before a program can change it. The caller counts as
    /// a writer, so no flush takes the mark back meanwhile.
    pub(crate) async fn mark_dirty(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        {
            let state = node.state.lock();
            if state.record.file.is_dirty() && state.dirty_content.is_durable() {
                return Ok(());
            }
        }
        let _room = self.room_for_mark(node).await?;
        let (inner, node) = (self.clone(), node.clone());
        blocking(move || {
            let sync = || {
                inner.catalog.sync()?;
                node.state.lock().dirty_content.synced();
                Ok(())
            };
            if node.state.lock().record.file.is_dirty() {
                // The mark of another caller is not synced yet, or its sync failed.
                return sync();
            }
            inner.settle_content(&node)?;
            let mut txn = Txn::begin(&inner);
            check_current(txn.state(node.ino)?)?;
            let record = txn.record(node.ino)?;
            if !record.file.is_dirty() && record.file.content().is_some_and(|id| inner.store.is_volatile(id)) {
                let what = "content was promoted while it was to be changed";
                return Err(Error::new(ErrorKind::Busy, Side::Cache, what));
            }
            if record.file.is_dirty() {
                // Another caller marked it first and may have written since: the content is no longer clean.
                drop(txn);
                return sync();
            }
            let (atime, mtime) = (record.atime, record.mtime);
            txn.modify(node.ino)?;
            let content = txn.content(node.ino)?;
            // From now on the times of the content file are the truth. The record's times may have been set since the
            // fetch.
            crate::contents::set_mtime(&content.file, atime, mtime)?;
            let stamp = Stamp::of(&content.file)?;
            txn.on_commit(node.ino, move |state| {
                state.changed();
                state.dirty_content.marked(stamp);
                state.kernel.pages_go_stale();
            })?;
            txn.put_dirty_content(node.ino, ContentId(content.id))?;
            txn.commit()?;
            sync()
        })
        .await
    }

    /// Syncs clean content that is about to become the only copy. After a power cut dirty content is trusted, so bytes
    /// that no program wrote must still be those of the pool.
    fn settle_content(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        let content = {
            let mut state = node.state.lock();
            let epoch = self.residency(&mut state)?.epoch;
            if epoch <= self.epochs.synced.load(Ordering::Acquire) || self.catalog.is_closed(epoch)? {
                return Ok(());
            }
            self.content(node.ino, &mut state)?
        };
        let id = ContentId(content.id);
        let known = self.catalog.lost(id);
        let synced = self.catalog.sync_content(&content, true);
        self.note_sync(id, known.as_ref(), &synced);
        let synced = match synced {
            // A descriptor that was opened after the bytes were written may miss their write-back error. A sync of the
            // whole fast pool does not.
            Ok(()) if !content.since_made => self.sync_content_so_far(),
            Err(error) => self.give_up_unwritten(node, id).and(Err(error)),
            Ok(()) => Ok(()),
        };
        let Err(error) = synced else { return Ok(()) };
        let file = node.state.lock().record.file;
        match file.content() == Some(id) {
            true if file.is_dirty() => Ok(()),
            true => Err(error),
            false => Err(Error::new(ErrorKind::Busy, Side::Cache, "content was given up that was not on the device")),
        }
    }
}

/// Whether the content that was to be marked dirty is gone: then the caller fetches it again.
pub(crate) fn is_given_up(node: &Node, error: &Error) -> bool {
    error.is(ErrorKind::Busy) || error.is(ErrorKind::Corrupt) && !node.state.lock().record.file.is_whole()
}

/// # Errors
/// `Stale` for a file that another client removed or replaced while it was open: what is written to it would be lost at
/// close.
pub(super) fn check_current(state: &NodeState) -> Result<()> {
    match state.attachment {
        Attachment::Catalog => Ok(()),
        _ => Err(Error::new(
            ErrorKind::Stale,
            Side::Pool,
            "another client removed or replaced the file while it was open",
        )),
    }
}
