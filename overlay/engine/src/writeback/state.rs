//! What the write-back knows beside the catalog.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_backends::Result;
use forebay_catalog::Catalog;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::errors::FlushErrors;
use super::{large_uploads, rate, refused, rounds, sweep};

/// State of the flusher that is not in the catalog.
#[derive(Debug, Default)]
pub(crate) struct Flusher {
    /// Notified when something may have to be flushed.
    pub bell: Notify,
    /// What operators are told of conflicts.
    pub conflicts: Mutex<Vec<String>>,
    pub(super) calls: Mutex<rounds::QueueNotices>,
    pub(super) stuck: Mutex<rounds::Stuck>,
    pub(super) rates: rate::SendRates,
    pub errors: FlushErrors,
    pub refused: refused::RefusedNames,
    pub(super) uploading: sweep::Uploading,
    pub(super) large: large_uploads::LargeUploads,
    pub activity: FlushActivity,
}

/// What the flush by policy does, as of its last look at the queue.
#[derive(Debug, Default)]
pub(crate) struct FlushActivity {
    /// Users whose changes are being sent.
    users: Mutex<HashSet<u32>>,
    lag_us: AtomicU64,
}

impl FlushActivity {
    pub(super) fn note(&self, users: HashSet<u32>, lag_us: u64) {
        *self.users.lock() = users;
        self.lag_us.store(lag_us, Ordering::Relaxed);
    }

    pub fn is_sending(&self) -> bool {
        !self.users.lock().is_empty()
    }

    pub fn sends_of(&self, user: u32) -> bool {
        self.users.lock().contains(&user)
    }

    /// Returns how long the oldest change has been due that is not in the pool yet.
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.lag_us.load(Ordering::Relaxed))
    }
}

impl Flusher {
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let conflicts = catalog.meta("conflicts")?.unwrap_or_default();
        Ok(Self { conflicts: Mutex::new(conflicts), ..Self::default() })
    }
}
