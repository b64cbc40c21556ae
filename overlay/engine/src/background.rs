//! Work that no request starts: flushing by policy, the bound on how long a change stays unsynced, space, and the scan
//! after a start.
//!
//! A task waits for the event that gives it work, and counts time only after that: the flush waits for an entry in the
//! queue, the sync for a change of the catalog, the count of growing files for a writer, the probe for a pool that
//! stops answering, the prediction of opens for an open. So a mount without use wakes the processor less than once a
//! second (`tests/tests/idle.rs` allows twice as much).

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{ErrorKind, PoolPath, Result};
use forebay_cache::{ContentId, Stamp};
use futures::FutureExt;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{Inner, Ino, Txn, tiers};

/// How long a change may stay unsynced if no program syncs it.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// How often an epoch is closed. After a power cut, fetched content counts only if its epoch was closed.
const EPOCH_EVERY: Duration = Duration::from_secs(30);
/// The first pause between two attempts to remove what no name leads to. It doubles after each attempt.
const SWEEP_AGAIN: Duration = Duration::from_secs(1);
/// The longest such pause.
const SWEEP_AGAIN_MAX: Duration = Duration::from_secs(600);
/// Counts that are saved in one change.
const COUNTS: usize = 256;
/// Files that replaced others are synced one by one if there are no more than these; else after all of the fast pool.
const SYNCED_EACH: usize = 64;

/// The input of the scan after a start.
struct Start {
    /// The bytes with which the budget began: the last daemon's count.
    counted_bytes: u64,
    /// Notified once it is fixed which records existed at the start.
    begun: oneshot::Sender<()>,
}

pub(super) async fn start(inner: &Arc<Inner>) -> Result<()> {
    let again = inner.clone();
    let stop = inner.stop.clone();
    let (begun, has_begun) = oneshot::channel();
    // Runs before anything else: from now on, each change of content counts itself.
    let start = Start { counted_bytes: inner.content_bytes(), begun };
    let scan = move || again.look_around(start, &stop);
    let sweeper = inner.clone();
    let scanned = async move {
        if let Err(error) = super::tasks::on_thread("forebay-scan", scan).await {
            tracing::error!(%error, "the scan of the fast pool after the start");
        }
        sweeper.sweep_after_start().await;
    };
    tokio::spawn(scanned.boxed());
    // If the scan ended without the notification, it has logged the reason.
    let _ = has_begun.await;
    if inner.quotas.count() {
        inner.begin_counting_quotas(inner.quotas.generation());
    }
    let spawn = |name: &'static str, work: futures::future::BoxFuture<'static, ()>| {
        let stop = inner.stop.clone();
        let task = async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = work => tracing::error!(name, "a background task ended"),
            }
        };
        tokio::spawn(task.boxed());
    };
    spawn("flush", Box::pin(super::writeback::rounds::flush_loop(inner.clone())));
    spawn("sweep", Box::pin(inner.clone().sweep_pool(inner.left_uploads()?)));
    spawn("parts", Box::pin(inner.clone().part_loop()));
    spawn("sync", Box::pin(sync_loop(inner.clone())));
    spawn("scratch", Box::pin(inner.clone().scratch_loop()));
    spawn("views", Box::pin(inner.clone().view_loop()));
    spawn("count", Box::pin(count_loop(inner.clone())));
    spawn("tiers", Box::pin(tiers::rounds::tier_loop(inner.clone())));
    spawn("devices", Box::pin(tiers::device_health::health_loop(inner.clone())));
    if inner.pool.capabilities().layouts {
        spawn("layouts", Box::pin(super::layout::layout_loop(inner.clone())));
    }
    if !inner.policy().pool_retry.is_zero() {
        spawn("probe", Box::pin(probe_loop(inner.clone())));
    }
    Ok(())
}

/// Asks a pool that does not answer, so that no request has to wait for it.
async fn probe_loop(inner: Arc<Inner>) {
    loop {
        inner.pool_calls.health.until_down().await;
        tokio::time::sleep(inner.policy().pool_retry).await;
        if inner.pool_calls.health.why_down().is_some() {
            let answer = inner.pool.stat(&PoolPath::root()).await;
            inner.pool_calls.health.note(&answer);
        }
    }
}

async fn sync_loop(inner: Arc<Inner>) {
    let mut closed = Instant::now();
    let mut closed_epoch = 0;
    loop {
        let has_open_epoch = inner.epochs.fetched.load(Ordering::Relaxed) > closed_epoch;
        tokio::select! {
            () = inner.until_unsynced() => {}
            () = tokio::time::sleep_until((closed + EPOCH_EVERY).into()), if has_open_epoch => {}
        }
        tokio::time::sleep(SYNC_EVERY).await;
        let again = inner.clone();
        let close = closed.elapsed() >= EPOCH_EVERY && inner.epochs.fetched.load(Ordering::Relaxed) > closed_epoch;
        let result = super::blocking(move || again.sync_now(close)).await;
        match result {
            Ok(Some(epoch)) => (closed, closed_epoch) = (Instant::now(), epoch),
            Ok(None) => {}
            Err(error) => {
                if close {
                    closed = Instant::now();
                }
                tracing::error!(%error, "the fast pool cannot be synced");
            }
        }
    }
}

async fn count_loop(inner: Arc<Inner>) {
    loop {
        inner.until_counting().await;
        tokio::time::sleep(inner.count_again_in()).await;
        let again = inner.clone();
        let result = super::blocking(move || {
            again.count_writers();
            again.settle_unmapped();
            again.throttle_writers()?;
            match again.store.budget.above(again.policy().space.high_watermark) {
                0 => Ok(()),
                _ => again.make_room(0).map(drop),
            }
        })
        .await;
        if let Err(error) = result {
            tracing::error!(%error, "making room in the fast pool");
        }
    }
}

impl Inner {
    /// Waits until there is something for `sync_now` to do. For one task.
    async fn until_unsynced(&self) {
        let has_work = || {
            !self.catalog.is_synced()
                || !self.contents.uncounted.lock().is_empty()
                || !self.epochs.unsynced_marks.lock().is_empty()
                || self.has_many_open()
                || self.table.holds_spare_memory()
        };
        while !has_work() {
            self.catalog.changed().await;
        }
    }

    pub(super) fn sync_now(self: &Arc<Self>, close_epoch: bool) -> Result<Option<u64>> {
        let closed = match close_epoch {
            true => self.close_epoch().map(Some),
            false => self.close_idle_dirty().map(|()| None),
        };
        self.save_counts()?;
        self.forget_uploads()?;
        self.quotas.save(&self.catalog)?;
        self.table.give_back();
        self.catalog.set_used_bytes(self.content_bytes())?;
        self.catalog.reserve_numbers()?;
        self.sync_marks()?;
        closed
    }

    /// Syncs the catalog. Files that became the only copy before are durably dirty then: they can leave memory, and can be
    /// spilled.
    fn sync_marks(self: &Arc<Self>) -> Result<()> {
        // A mark comes to the list after its batch.
        let marks = std::mem::take(&mut *self.epochs.unsynced_marks.lock());
        let synced = self.sync_catalog();
        if synced.is_err() {
            self.epochs.unsynced_marks.lock().extend(marks);
            return synced;
        }
        for (ino, generation) in marks {
            if let Some(node) = self.table.peek(ino) {
                let mut state = node.state.lock();
                // A later mark may not be durable.
                if state.generation == generation {
                    state.dirty_content.synced();
                }
            }
            self.table.drop_idle(ino);
        }
        Ok(())
    }

    fn sync_catalog(self: &Arc<Self>) -> Result<()> {
        // After this, none of the syncs of content files takes long.
        let stored = if self.catalog.to_sync_first() > SYNCED_EACH { self.sync_store() } else { Ok(()) };
        self.catalog.sync_changes()?;
        stored
    }

    /// Counts the space of files that passthrough writers write.
    fn count_writers(&self) {
        let writing: Vec<Ino> = self.space.writing.lock().iter().copied().collect();
        for ino in writing {
            let Some(node) = self.table.peek(ino) else { continue };
            let mut state = node.state.lock();
            let Some(content) = state.content.clone() else { continue };
            let Ok(meta) = content.file.metadata() else { continue };
            let _ = self.count(&mut state, meta.blocks() * 512);
        }
    }

    /// Scans the fast pool after a start, beside other work: reports its content to the eviction policy, counts it, and
    /// removes content files and inodes without names.
    ///
    /// The count is the sum of the records as they were at the start. Each later change counts its difference to its
    /// record itself.
    fn look_around(&self, start: Start, stop: &CancellationToken) -> Result<()> {
        let (mut sum, mut sums) = (0, vec![0; self.store.tiers().len()]);
        let begun = || _ = start.begun.send(());
        self.catalog.contents_as_of(begun, |id, record| {
            match self.store.tier_of(id) {
                Some(tier) => sums[tier] += record.bytes,
                None => sum += record.bytes,
            }
            // A record that cannot be read or written must not keep the other ones from being counted.
            if let Err(error) = self.look_at_content(record.ino, id) {
                tracing::warn!(%error, ino = %record.ino, "its content is not counted after the start");
            }
            Ok(!stop.is_cancelled())
        })?;
        if !stop.is_cancelled() {
            self.store.account_at_start(start.counted_bytes, sum, &sums);
        }
        Ok(())
    }

    /// Reports clean content to the eviction policy, and counts dirty content.
    fn look_at_content(&self, ino: Ino, id: ContentId) -> Result<()> {
        match self.catalog.inode(ino)? {
            Some(inode) if !inode.file.is_dirty() => {
                // The record may have changed since the start.
                if let Some(now) = self.catalog.content(id)? {
                    self.note_clean(ino, Some(id), now.bytes);
                }
                Ok(())
            }
            Some(_) => self.recount(ino, id),
            None => Ok(()),
        }
    }

    /// Removes content files and inodes without names. Tries again until it succeeds, or the engine stops: the catalog cannot
    /// be written while its device is full.
    async fn sweep_after_start(self: &Arc<Self>) {
        let are_contents_swept = Arc::new(AtomicBool::new(false));
        let mut pause = SWEEP_AGAIN;
        while !self.stop.is_cancelled() {
            let (again, are_swept) = (self.clone(), are_contents_swept.clone());
            let sweep = move || {
                // Once: the removal of each one was begun.
                if !are_swept.load(Ordering::Relaxed) {
                    again.sweep_contents()?;
                    are_swept.store(true, Ordering::Relaxed);
                }
                again.sweep_inodes(&again.stop)
            };
            let Err(error) = super::tasks::on_thread("forebay-scan", sweep).await else { return };
            if pause == SWEEP_AGAIN {
                tracing::error!(%error, "what no name leads to is not removed; it is tried again");
            }
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(SWEEP_AGAIN_MAX);
        }
    }

    /// Counts bytes that were written to a dirty file after its record, under a daemon that has died since.
    fn recount(&self, ino: Ino, id: ContentId) -> Result<()> {
        let node = match self.node(ino) {
            // Removed since.
            Err(e) if e.is(ErrorKind::Stale) => return Ok(()),
            node => node?,
        };
        let mut state = node.state.lock();
        if state.is_deleted() || state.record.file.content() != Some(id) || !state.record.file.is_dirty() {
            return Ok(());
        }
        // The last daemon may have ended before it moved it.
        self.note_modified(ino, &state);
        let Ok(meta) = self.store.stat(id) else { return Ok(()) };
        self.count(&mut state, meta.blocks() * 512)?;
        if let Err(error) = self.save_count(ino, &mut state) {
            tracing::debug!(%error, %ino, "its count is saved with the next sync");
            self.note_uncounted(ino);
        }
        Ok(())
    }

    /// Removes content files that no record names, except those that were created since the start. Removes none if it
    /// fails: each one is discarded once.
    pub(super) fn sweep_contents(&self) -> Result<u64> {
        let mut orphans = Vec::new();
        self.store.walk(|id, _| {
            let number = id.0 & !(0xff << 56);
            if number < self.contents.first_new {
                match self.catalog.content(id) {
                    Ok(None) => orphans.push(id),
                    Ok(Some(_)) => {}
                    Err(error) if error.is(ErrorKind::Corrupt) => {
                        tracing::error!(%error, content = format!("{:x}", id.0), "it is kept");
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })?;
        orphans.iter().for_each(|id| self.trash.discard(*id, 0));
        Ok(orphans.len() as u64)
    }

    /// Removes inodes that were unlinked while programs had them open, if those programs ended with the machine. If the
    /// mount was taken over from another daemon, they are removed when the kernel forgets them.
    fn sweep_inodes(&self, stop: &CancellationToken) -> Result<()> {
        let mut orphans = Vec::new();
        self.catalog.readable_inodes(|ino, record| {
            if ino != Ino::ROOT && record.links.is_empty() && record.pool_links.is_empty() {
                orphans.push(ino);
            }
            Ok(!stop.is_cancelled())
        })?;
        let mut removed = Ok(());
        for ino in orphans {
            if stop.is_cancelled() {
                break;
            }
            if self.mount.reattached {
                // The kernel may have it open, or be about to open it: the inode is removed when the kernel forgets it.
                self.table.stays_until_forgotten(ino);
                continue;
            }
            let mut txn = Txn::begin(self);
            let one = match txn.reap(ino) {
                // Removed since.
                Err(e) if e.is(ErrorKind::Stale) => Ok(()),
                Err(error) if error.is(ErrorKind::Corrupt) => {
                    tracing::error!(%error, %ino, "no name leads to it, and it is kept");
                    Ok(())
                }
                reaped => reaped.and_then(|()| txn.commit()),
            };
            removed = removed.and(one);
        }
        removed
    }

    /// Syncs and closes idle dirty content files, if too many are open. Blocks.
    pub fn close_idle_dirty(self: &Arc<Self>) -> Result<()> {
        let idle = self.idle_dirty();
        if idle.is_empty() {
            return Ok(());
        }
        // After this, none of the syncs below takes long.
        self.sync_store()?;
        for (ino, content) in idle {
            let was = Stamp::of(&content.file)?;
            let id = ContentId(content.id);
            let known = self.catalog.lost(id);
            let synced = self.catalog.sync_content(&content, true);
            self.note_sync(id, known.as_ref(), &synced);
            if synced.is_err() && self.catalog.lost(id).is_none() {
                continue;
            }
            let Some(node) = self.table.peek(ino) else { continue };
            let mut state = node.state.lock();
            let same = state.content.as_ref().is_some_and(|now| Arc::ptr_eq(now, &content));
            if !same || state.opens.any() || !state.bypass.is_none() || Stamp::of(&content.file)? != was {
                continue;
            }
            state.content = None;
            self.release_content(ino);
            drop(state);
            self.note_content_closed(ino);
            drop(node);
            self.table.drop_idle(ino);
        }
        Ok(())
    }

    /// Saves the byte counts of files that were written and closed.
    pub(super) fn save_counts(&self) -> Result<()> {
        let inos: Vec<Ino> = self.contents.uncounted.lock().drain().collect();
        let saved = inos.chunks(COUNTS).try_for_each(|some| {
            let mut txn = Txn::begin(self);
            for ino in some {
                if self.table.peek(*ino).is_some() {
                    txn.save_count(*ino)?;
                }
            }
            txn.commit()
        });
        if saved.is_err() {
            self.contents.uncounted.lock().extend(inos);
            return saved;
        }
        for ino in inos {
            self.table.drop_idle(ino);
        }
        Ok(())
    }
}
