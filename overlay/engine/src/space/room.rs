//! If the fast pool is full only because the flush is behind, writers wait until the flush has made room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{ErrorKind, Result, Side};
use forebay_catalog::Intent;
use forebay_policy::{FlushPolicy, QuotaSubject};
use parking_lot::Mutex;

use super::super::{Inner, Ino, blocking};
use crate::node::Node;

/// How long a writer waits in all.
const WAIT_MAX: Duration = Duration::from_secs(600);
/// How long a writer waits while nothing gets to the pool.
const STALLED_MAX: Duration = Duration::from_secs(30);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// How long the answer whether the flush can make room is used again: many writers may need it.
const KNOWN_FOR: Duration = Duration::from_millis(500);
/// How many files of a user or a group are looked at for one that the flush may send. If there are more, the queue of the
/// flush is looked at.
const FILES_LOOKED_AT: usize = 256;

/// The writers that wait for room.
#[derive(Debug, Default)]
pub(crate) struct WaitingWriters {
    writers: AtomicU64,
    /// When it was last checked whether the flush can make room, and the result.
    coming: Mutex<Option<(Instant, bool)>>,
}

/// A writer that waits.
pub(crate) struct WriterWait<'a> {
    room: &'a WaitingWriters,
    began: Instant,
    progress: (u64, u64),
    progressed: Instant,
}

impl Drop for WriterWait<'_> {
    fn drop(&mut self) {
        self.room.writers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    /// Repeats an attempt that does not fit into the fast pool, as long as flushing can make room.
    ///
    /// # Errors
    /// `NoSpace` with the numbers, if flushing cannot make room, or does not within the bounds.
    pub(crate) async fn with_room<T, F>(self: &Arc<Self>, attempt: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut waiting = None;
        loop {
            let before = self.progress();
            let error = match attempt().await {
                Err(e) if e.is(ErrorKind::NoSpace) && e.side() == Side::Cache => e,
                other => return other,
            };
            let waiting = waiting.get_or_insert_with(|| self.wait_for_room());
            let now = self.progress();
            if now != waiting.progress {
                (waiting.progress, waiting.progressed) = (now, Instant::now());
            }
            let coming = self.is_room_coming().await?;
            // Files that were flushed during the attempt may be evicted now.
            let hopeless = !coming && before == self.progress();
            if hopeless || waiting.progressed.elapsed() > STALLED_MAX || waiting.began.elapsed() > WAIT_MAX {
                return Err(error);
            }
            self.flusher.bell.notify_one();
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Called when a file may have become one that the flush can send.
    pub(crate) fn room_may_come(&self) {
        self.quotas.room_may_come();
        let mut coming = self.space.room.coming.lock();
        if coming.is_some_and(|(_, coming)| !coming) {
            *coming = None;
        }
    }

    /// Returns the number of writers that wait for room.
    pub(crate) fn waiting_for_room(&self) -> u64 {
        self.space.room.writers.load(Ordering::Relaxed)
    }

    pub(crate) fn wait_for_room(&self) -> WriterWait<'_> {
        self.space.room.writers.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        WriterWait { room: &self.space.room, began: now, progress: self.progress(), progressed: now }
    }

    /// Returns what the flush has sent: bytes and files.
    pub(super) fn progress(&self) -> (u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&self.counters.pool_written_bytes), get(&self.counters.flushed_files))
    }

    async fn is_room_coming(self: &Arc<Self>) -> Result<bool> {
        if let Some((at, coming)) = *self.space.room.coming.lock()
            && at.elapsed() < KNOWN_FOR
        {
            return Ok(coming);
        }
        let inner = self.clone();
        blocking(move || {
            let mut coming = false;
            let is_up = inner.pool_calls.health.why_down().is_none();
            inner.catalog.intents(|intent, _| {
                coming = is_up && matches!(intent, Intent::Inode(ino) if inner.frees_room(ino));
                Ok(is_up && !coming)
            })?;
            *inner.space.room.coming.lock() = Some((Instant::now(), coming));
            Ok(coming)
        })
        .await
    }

    /// Whether the background flush is expected to send so many bytes soon, so that they may be evicted then. Blocks.
    pub(super) fn has_to_send(&self, least: u64) -> Result<bool> {
        let mut bytes = 0;
        self.catalog.intents(|intent, _| {
            if let Intent::Inode(ino) = intent
                && self.may_be_flushed(ino)
                && !self.waits_for_job(ino)
            {
                bytes += self.node(ino).and_then(|node| self.attr_of(&node)).map_or(0, |attr| attr.blocks * 512);
            }
            Ok(bytes < least && !self.stop.is_cancelled())
        })?;
        Ok(bytes >= least)
    }

    /// Whether the background flush may send a file of a user or a group soon.
    pub(crate) async fn may_be_flushed_of(self: &Arc<Self>, subject: QuotaSubject) -> Result<bool> {
        if self.pool_calls.health.why_down().is_some() {
            return Ok(false);
        }
        if let Some(is_hoped) = self.quotas.known_hope(subject) {
            return Ok(is_hoped);
        }
        let inner = self.clone();
        blocking(move || {
            let closes = inner.quotas.closes();
            let files = inner.quotas.dirty_files_of(subject, FILES_LOOKED_AT + 1);
            let may_go =
                |ino: Ino| (inner.may_be_flushed(ino) && !inner.waits_for_job(ino)) || inner.is_about_to_go(ino);
            let is_hoped = match files.len() > FILES_LOOKED_AT {
                true => inner.has_queued_of(subject)?,
                false => files.into_iter().any(may_go),
            };
            inner.quotas.note_hope(subject, closes, is_hoped);
            Ok(is_hoped)
        })
        .await
    }

    /// Whether a file is flushed when a job ends that uses it.
    fn waits_for_job(&self, ino: Ino) -> bool {
        let waits = |node: &Node| self.policy_of(node).flush() == FlushPolicy::JobEnd;
        self.node(ino).is_ok_and(|node| waits(&node)) && !self.advisor().jobs_of(ino).is_empty()
    }

    /// Whether anything of a user or a group waits for the flush.
    fn has_queued_of(&self, subject: QuotaSubject) -> Result<bool> {
        for user in self.quotas.users_of_subject(subject) {
            if self.catalog.has_queued(user)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a file was removed, and stays only until the kernel says that it forgets it.
    fn is_about_to_go(&self, ino: Ino) -> bool {
        let Some(node) = self.table.peek(ino) else { return false };
        let state = node.state.lock();
        state.is_unlinked(ino) && !state.opens.any()
    }

    /// Whether the background flush is expected to send a file, so that it may be evicted then.
    fn frees_room(&self, ino: Ino) -> bool {
        let has_blocks = |node: &Node| self.attr_of(node).is_ok_and(|attr| attr.blocks > 0);
        self.may_be_flushed(ino) && self.node(ino).is_ok_and(|node| has_blocks(&node))
    }

    /// Whether the background flush is expected to send a file.
    fn may_be_flushed(&self, ino: Ino) -> bool {
        let Ok(node) = self.node(ino) else { return false };
        if !self.knows_flush_settings(&node)
            || self.policy_of(&node).flush() == FlushPolicy::Manual
            || self.flusher.errors.holds_back(ino)
        {
            return false;
        }
        let state = node.state.lock();
        state.record.file.is_dirty() && !state.is_unlinked(ino) && !state.may_be_written()
    }
}
