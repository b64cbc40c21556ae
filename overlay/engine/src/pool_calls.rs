//! Calls to the pool: whether it answers, and which of its answers count.

mod change;
mod moves;
mod own_changes;
mod watch;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, PoolPath, Result, Side};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::Inner;
use crate::node::Node;
pub(crate) use change::{PoolChange, look_again};
pub(crate) use own_changes::{OWN_CHANGES, QueryStamp};
pub(crate) use watch::{NameQuery, Watches};

/// How long the pool may take to confirm cached state. After that, the state is shown unconfirmed.
pub(crate) const CONFIRM_WITHIN: Duration = Duration::from_secs(1);

/// What is known of calls to the pool.
#[derive(Debug, Default)]
pub(crate) struct PoolCalls {
    pub health: Health,
    pub watches: Watches,
    /// Steps that use paths, and steps that move directories.
    paths: moves::PathUses,
    /// How many calls that move directories have begun, and have ended.
    dir_moves: (AtomicU64, AtomicU64),
    pub invalidations: InvalidationCounters,
}

/// How often it was said that cached state may not hold any more.
#[derive(Debug, Default)]
pub(crate) struct InvalidationCounters {
    pub purges: AtomicU64,
    /// By other nodes that have changed the pool.
    pub announcements: AtomicU64,
}

impl InvalidationCounters {
    pub fn counts(&self) -> Invalidations {
        let get = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        Invalidations { purges: get(&self.purges), announcements: get(&self.announcements) }
    }
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalidations {
    purges: u64,
    announcements: u64,
}

impl Invalidations {
    /// Returns whether a file that was opened at an earlier moment may still be served. For a file that does not change,
    /// only a purge counts.
    pub fn allow(self, opened: Self, is_immutable: bool) -> bool {
        self.purges == opened.purges && (is_immutable || self.announcements == opened.announcements)
    }
}

impl PoolCalls {
    /// Reads the ended moves first, so that a move that begins in between counts as under way.
    fn dir_moves(&self) -> (u64, u64) {
        let ended = self.dir_moves.1.load(Ordering::SeqCst);
        (self.dir_moves.0.load(Ordering::SeqCst), ended)
    }
}

/// Whether the pool answers. While it does not, calls fail at once instead of waiting for their deadlines, and one
/// background task finds out when the pool answers again.
#[derive(Debug, Default)]
pub(crate) struct Health {
    down: Mutex<Option<String>>,
    /// Notified when the pool stops answering.
    fell: Notify,
    /// When the pool last took too long to confirm something.
    slow: Mutex<Option<Instant>>,
}

impl Health {
    /// Returns why the pool counts as not answering.
    pub fn why_down(&self) -> Option<String> {
        self.down.lock().clone()
    }

    /// Waits until the pool counts as not answering. For one task.
    pub async fn until_down(&self) {
        while self.why_down().is_none() {
            self.fell.notified().await;
        }
    }

    /// Returns whether the pool was just too slow to confirm something. Cached state is then shown without asking
    /// again.
    pub fn is_slow(&self) -> bool {
        self.slow.lock().is_some_and(|at| at.elapsed() < CONFIRM_WITHIN)
    }

    pub fn note_slow(&self) {
        *self.slow.lock() = Some(Instant::now());
    }

    pub fn note<T>(&self, result: &Result<T>) {
        match result {
            Err(e) if e.is_unreachable() => {
                let mut down = self.down.lock();
                if down.is_none() {
                    tracing::warn!(error = %e, "the pool does not answer; resident files are still served");
                    *down = Some(e.reason().to_owned());
                    self.fell.notify_one();
                }
            }
            _ => {
                if self.down.lock().take().is_some() {
                    tracing::info!("the pool answers again");
                }
            }
        }
    }
}

impl Inner {
    /// Makes a call to the pool, unless the pool is known not to answer.
    pub async fn ask<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        // With a `pool_retry` of zero, every call is made.
        if let Some(why) = self.pool_calls.health.why_down().filter(|_| !self.policy().pool_retry.is_zero()) {
            return Err(Error::new(ErrorKind::Unavailable, Side::Pool, why));
        }
        let result = call.await;
        self.pool_calls.health.note(&result);
        result
    }

    /// Asks a pool that does not answer once more, for a request of a user: it may have come back since the last question.
    /// Waits only as long as a pool that is back takes to answer.
    pub async fn ask_if_back(&self) {
        let health = &self.pool_calls.health;
        if health.why_down().is_some()
            && let Ok(answer) = timeout(CONFIRM_WITHIN, self.pool.stat(&PoolPath::root())).await
        {
            health.note(&answer);
        }
    }

    /// Turns `NotFound` of the pool into `Stale`: bytes that were never fetched are gone with the pool's copy. A
    /// program that has the file open must not get "no such file". Nor must one that opens it by a name that may refer
    /// to another file by now: with `Stale`, the name is looked up again.
    pub(super) fn no_longer_there(&self, node: &Node, error: Error) -> Error {
        if error.side() != Side::Pool || !error.is(ErrorKind::NotFound) {
            return error;
        }
        let what = format!("{}: removed or replaced in the pool", self.display(node.ino));
        Error::new(ErrorKind::Stale, Side::Pool, what).with_source(error)
    }
}
