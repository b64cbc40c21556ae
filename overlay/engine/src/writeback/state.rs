//! What the write-back knows beside the catalog.

use std::sync::atomic::{AtomicU64, Ordering};

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
