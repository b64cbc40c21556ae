//! What the write-back knows beside the catalog.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_backends::Result;
use forebay_catalog::{Catalog, Intent};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::errors::FlushErrors;
use super::{large_uploads, notices, rate, refused, rounds, sweep};
use crate::{Inner, Ino};

/// State of the flusher that is not in the catalog.
#[derive(Debug, Default)]
pub(crate) struct Flusher {
    /// Notified when something may have to be flushed.
    pub bell: Notify,
    /// What operators are told of conflicts.
    pub conflicts: Mutex<Vec<String>>,
    pub(super) calls: Mutex<notices::QueueNotices>,
    /// Counts changes of facts after which the policy may decide otherwise.
    facts: AtomicU64,
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

/// Stands for the facts that the policy decided by. Later facts have another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FactsNumber(u64);

impl Flusher {
    /// Returns the number of the present facts. Read before a decision, and after it took effect.
    pub(super) fn facts(&self) -> FactsNumber {
        FactsNumber(self.facts.load(Ordering::SeqCst))
    }

    /// Tells the queue of new facts. A decision that did not know them finds another number when it has taken effect, or takes
    /// effect before the queue follows this notice.
    pub(super) fn tell(&self, notice: impl FnOnce(&mut notices::QueueNotices)) {
        self.facts.fetch_add(1, Ordering::SeqCst);
        notice(&mut self.calls.lock());
        self.bell.notify_one();
    }
}

impl Inner {
    /// Notes that other rules of the policy may hold for files, since names moved or directories have other settings: the
    /// policy may flush what was not flushed before.
    pub(crate) fn rules_may_differ(&self) {
        if self.policy().uniform().is_none() {
            self.flusher.tell(|calls| calls.moved = true);
        }
    }

    /// Notes that other rules of the policy may hold for a file: its owner, its size or its jobs are other ones.
    pub(crate) fn rules_of_file_may_differ(&self, ino: Ino) {
        if self.policy().uniform().is_none() {
            self.flusher.tell(|calls| calls.doubt(Intent::Inode(ino)));
        }
    }
}
