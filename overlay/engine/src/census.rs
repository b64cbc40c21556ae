//! What is dirty and leased, counted now and then.
//!
//! A count reads the record of every dirty file, so its cost grows with their number. `status` counts when it is asked.
//! Metrics, the page and `top` are asked all the time: they get the last count of [`Overlay::refresh_census`], whose counts
//! take a fixed share of one core at most, and which counts nothing if nothing has changed.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::operator::{DirtyFile, Overview, Status};
use forebay_backends::Result;
use forebay_system::clock::unix_now;

use crate::{Inner, Overlay, blocking};

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
    /// Returns the last count. Costs nothing.
    pub fn last_census(&self) -> Arc<Census> {
        self.inner.last_census.lock().clone()
    }

    /// Returns the state of the mount with what the last count found. Its cost does not depend on the number of files.
    /// Blocks while a device of the fast pool is asked for its space.
    pub fn status_at_last_census(&self) -> Status {
        self.inner.status_at(&self.last_census())
    }

    /// Returns the state of the mount as of the last count, after a new one if it is time for that.
    ///
    /// # Errors
    /// The engine stops.
    pub async fn overview(&self) -> Result<Overview> {
        self.refresh_census().await;
        let census = self.last_census();
        let inner = self.inner.clone();
        // It asks the devices for their space.
        blocking(move || Ok(Overview { status: inner.status_at(&census), oldest_dirty: census.oldest.clone() })).await
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
        let mut last = inner.census_turn.lock().await;
        if last.as_ref().is_some_and(|last| last.ended.elapsed() < last.pause) {
            return;
        }
        // The kernel may write files by itself, which the catalog does not see.
        let is_written = !inner.writing.lock().is_empty();
        let change = inner.catalog.last_change();
        let leases_end = inner.last_census.lock().leased_files > 0;
        let is_valid = last
            .as_ref()
            .is_some_and(|last| last.change == change && !(leases_end && last.ended.elapsed() > LEASES_AGAIN));
        if is_valid && !is_written {
            return;
        }
        let begun = Instant::now();
        if let Ok(census) = self.look(|inner| Ok(inner.take_census())).await {
            *inner.last_census.lock() = Arc::new(census);
            let pause = PAUSE.max(begun.elapsed() * PAUSE_FACTOR);
            *last = Some(LastCount { change, ended: Instant::now(), pause });
        }
    }
}

/// When the last count was made.
#[derive(Debug)]
pub(crate) struct LastCount {
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
            dirty_bytes: dirty.iter().map(|file| file.bytes).sum(),
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
}

/// The order in which dirty files are listed: by age, and the large ones first among those of one second.
fn rank(file: &DirtyFile) -> (u64, Reverse<u64>) {
    (file.since_unix, Reverse(file.bytes))
}
