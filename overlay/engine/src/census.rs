//! What is dirty and leased, counted now and then.
//!
//! A count reads the record of every dirty file, so its cost grows with their number. `status` counts when it is asked.
//! Metrics, the page and `top` are asked all the time: they get the last count of [`Overlay::refresh_census`], whose counts
//! take a fixed share of one core at most, and which counts nothing if nothing has changed.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_api::operator::{Difference, DirtyFile};
use forebay_backends::{FileKind, Result};
use forebay_catalog::Intent;
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::paths::typed;
use crate::{Inner, Ino, Overlay};

/// Failed flushes that are named.
const NAMED_ERRORS: usize = 20;
/// Dirty files that are listed: the oldest.
const LISTED: usize = 100;
/// The shortest pause between two counts.
const PAUSE: Duration = Duration::from_secs(2);
/// A pause is so many times as long as the count before it.
const PAUSE_FACTOR: u32 = 50;
/// Leases end with time, without a change of the catalog: they are counted again after this time.
const LEASES_AGAIN: Duration = Duration::from_secs(60);

/// What was dirty and leased at one moment.
#[derive(Debug, Clone, Default)]
pub struct Census {
    /// Seconds since 1970; 0 before the first count.
    pub counted_unix: u64,
    pub dirty_files: u64,
    pub dirty_bytes: u64,
    /// Dirty files whose last flush failed, or whose device fails.
    pub failing_files: u64,
    /// Seconds since 1970 at which the oldest difference between mount and pool arose.
    pub oldest_dirty_unix: Option<u64>,
    /// The oldest dirty files, the oldest first.
    pub oldest: Vec<DirtyFile>,
    pub(crate) flush_errors: Vec<String>,
    pub leased_files: u64,
    pub leased_bytes: u64,
}

impl Overlay {
    /// Returns a counter that grows as long as any call of [`Overlay::status`] or [`Overlay::dirty`] makes progress.
    pub fn scanned(&self) -> u64 {
        self.inner.census.scans.seen.load(Ordering::Relaxed)
    }

    /// Returns the last count. Costs nothing.
    pub fn last_census(&self) -> Arc<Census> {
        self.inner.census.last.lock().clone()
    }

    /// Counts until the engine stops: at once, and after changes.
    pub async fn keep_census(&self) {
        let stop = self.inner.stop.clone();
        loop {
            self.refresh_census().await;
            if stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_none() {
                return;
            }
        }
    }

    /// Counts, unless nothing has changed since the last count, or that count was a short time ago.
    pub async fn refresh_census(&self) {
        let inner = &self.inner;
        let mut last = inner.census.turn.lock().await;
        if last.as_ref().is_some_and(|last| last.ended.elapsed() < last.pause) {
            return;
        }
        // The kernel may write files by itself, which the catalog does not see.
        let is_written = !inner.space.writing.lock().is_empty();
        let change = inner.catalog.last_change();
        let leases_end = inner.census.last.lock().leased_files > 0;
        let is_valid = last
            .as_ref()
            .is_some_and(|last| last.change == change && !(leases_end && last.ended.elapsed() > LEASES_AGAIN));
        if is_valid && !is_written {
            return;
        }
        let begun = Instant::now();
        if let Ok(census) = self.scan(|inner| Ok(inner.take_census())).await {
            *inner.census.last.lock() = Arc::new(census);
            let pause = PAUSE.max(begun.elapsed() * PAUSE_FACTOR);
            *last = Some(LastCount { change, ended: Instant::now(), pause });
        }
    }

    pub(crate) async fn scan<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.inner.census.scans.turn.clone().acquire_owned().await;
        let inner = self.inner.clone();
        super::blocking(move || {
            let _turn = turn;
            work(&inner)
        })
        .await
    }
}

/// The counts of a mount.
#[derive(Debug, Default)]
pub(crate) struct CensusState {
    scans: Scans,
    last: Mutex<Arc<Census>>,
    turn: tokio::sync::Mutex<Option<LastCount>>,
}

/// Scans of everything that is dirty. They run one at a time, since each takes memory for every file that it finds. A
/// scan goes on to its end even if its caller is gone.
#[derive(Debug)]
pub(crate) struct Scans {
    turn: Arc<Semaphore>,
    /// Intents scanned since the start.
    seen: AtomicU64,
}

impl Default for Scans {
    fn default() -> Self {
        Self { turn: Arc::new(Semaphore::new(1)), seen: AtomicU64::new(0) }
    }
}

/// When the last count was made.
#[derive(Debug)]
struct LastCount {
    /// The last change of the catalog before it.
    change: u64,
    ended: Instant,
    /// The time until the next one.
    pause: Duration,
}

impl Inner {
    /// Counts. What cannot be read counts as nothing. Blocks.
    pub(crate) fn take_census(&self) -> Census {
        let mut dirty = self.dirty_files().unwrap_or_default();
        let (leased_files, leased_bytes) = self.leased().unwrap_or_default();
        let named = |file: &DirtyFile| file.error.as_ref().map(|error| format!("{}: {error}", file.path));
        let mut census = Census {
            counted_unix: unix_now(),
            dirty_files: dirty.len() as u64,
            dirty_bytes: dirty.iter().map(|file| file.bytes).fold(0, u64::saturating_add),
            failing_files: dirty.iter().filter(|file| file.error.is_some()).count() as u64,
            oldest_dirty_unix: dirty.iter().map(|file| file.since_unix).min(),
            oldest: Vec::new(),
            flush_errors: dirty.iter().filter_map(named).take(NAMED_ERRORS).collect(),
            leased_files,
            leased_bytes,
        };
        if dirty.len() > LISTED {
            dirty.select_nth_unstable_by_key(LISTED, rank);
            dirty.truncate(LISTED);
        }
        dirty.sort_by_key(rank);
        census.oldest = dirty;
        census
    }

    pub(super) fn dirty_files(&self) -> Result<Vec<DirtyFile>> {
        Ok(self.dirty_objects()?.into_iter().map(|(_, dirty)| dirty).collect())
    }

    /// Returns what differs, each path once, with its inode. A name that was removed has none.
    pub(super) fn dirty_objects(&self) -> Result<Vec<(Option<Ino>, DirtyFile)>> {
        let mut intents = Vec::new();
        let seen = || self.census.scans.seen.fetch_add(1, Ordering::Relaxed);
        self.catalog.intents(|intent, since| {
            seen();
            intents.push((intent, since));
            Ok(true)
        })?;
        let mut found: std::collections::BTreeMap<String, (Option<Ino>, DirtyFile)> = Default::default();
        for (intent, since_unix) in intents {
            seen();
            let Some((ino, dirty)) = self.dirty_file(&intent, since_unix)? else { continue };
            if !self.still_differs(&intent) {
                continue;
            }
            let (of, slot) = found.entry(dirty.path.clone()).or_insert_with(|| (ino, dirty.clone()));
            *of = of.or(ino);
            slot.since_unix = slot.since_unix.min(dirty.since_unix);
            slot.bytes = slot.bytes.max(dirty.bytes);
            slot.what = slot.what.max(dirty.what);
            slot.error = slot.error.take().or(dirty.error);
        }
        Ok(found.into_values().collect())
    }

    fn dirty_file(&self, intent: &Intent, since_unix: u64) -> Result<Option<(Option<Ino>, DirtyFile)>> {
        let (path, ino, mut what) = match intent {
            Intent::Inode(ino) => (self.typed_path(*ino), Some(*ino), Difference::Attributes),
            Intent::Name(parent, name) => {
                let record = self.catalog.name(*parent, name)?;
                let dir = self.overlay_path(*parent).or_else(|| self.pool_path(*parent).ok()).unwrap_or_default();
                let what = if record.here.is_some() { Difference::Name } else { Difference::Removed };
                (typed(&dir.join(name)), record.here_ino(), what)
            }
        };
        let mut dirty = DirtyFile { path, bytes: 0, since_unix, what, error: None, why: self.flush_reason(intent) };
        if let Some(node) = ino.and_then(|ino| self.node(ino).ok()) {
            let (is_data, is_uploaded) = {
                let state = node.state.lock();
                (state.record.file.is_dirty(), state.is_uploaded())
            };
            if is_data && !is_uploaded {
                what = Difference::Data;
                dirty.bytes = self.attr_of(&node).map_or(0, |a| a.size);
            }
            let state = node.state.lock();
            let lost = state.record.file.content().and_then(|id| self.catalog.check_kept(id).err());
            let unhealthy = || state.record.file.content().and_then(|id| self.store.unhealthy(id));
            let failed = lost.map(|error| error.to_string()).or_else(|| self.flusher.errors.of(node.ino));
            dirty.error = failed.or_else(unhealthy);
            if matches!(intent, Intent::Inode(ino) if state.is_unlinked(*ino)) {
                return Ok(None);
            }
            // A directory's own times follow what is flushed into it.
            let record = &state.record;
            let has_attributes = record.dirty.any() || !record.dirty_xattrs.is_empty();
            if matches!(intent, Intent::Inode(_)) && is_uploaded && !has_attributes {
                // It counts as dirty only because a program may still write it.
                return Ok(None);
            }
            let only_times =
                record.dirty.times && !record.dirty.mode && !record.dirty.owner && record.dirty_xattrs.is_empty();
            if matches!(intent, Intent::Inode(_)) && state.record.kind == FileKind::Directory && only_times {
                what = Difference::Times;
            }
        }
        dirty.what = what;
        Ok(Some((ino, dirty)))
    }
}

/// The order in which dirty files are listed: by age, and the large ones first among those of one second.
fn rank(file: &DirtyFile) -> (u64, Reverse<u64>) {
    (file.since_unix, Reverse(file.bytes))
}
