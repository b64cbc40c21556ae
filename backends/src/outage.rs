//! How long a pool's calls wait for a server that cannot be reached.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time for which calls are retried while the server cannot be reached. It can be set while calls run; those keep the
/// time that they began with.
#[derive(Debug)]
pub(crate) struct OutageLimit {
    milliseconds: AtomicU64,
}

/// As long as a server takes to restart.
const DEFAULT: Duration = Duration::from_secs(10);

impl Default for OutageLimit {
    fn default() -> Self {
        Self { milliseconds: AtomicU64::new(DEFAULT.as_millis() as u64) }
    }
}

impl OutageLimit {
    pub(crate) fn get(&self) -> Duration {
        Duration::from_millis(self.milliseconds.load(Ordering::Relaxed))
    }

    /// Derives the time from the deadline of calls. It is a fifth shorter, so that the caller learns why the server cannot
    /// be reached, and not only that there was no answer.
    pub(crate) fn set_for(&self, deadline: Duration) {
        let milliseconds = u64::try_from((deadline / 5 * 4).as_millis()).unwrap_or(u64::MAX);
        self.milliseconds.store(milliseconds, Ordering::Relaxed);
    }
}
