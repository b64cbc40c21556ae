//! What the write-back knows beside the catalog.

use forebay_backends::Result;
use forebay_catalog::Catalog;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::errors::FlushErrors;
use super::{large_uploads, rate, refused, rounds, sweep};
use crate::Inner;

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
}

impl Flusher {
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let conflicts = catalog.meta("conflicts")?.unwrap_or_default();
        Ok(Self { conflicts: Mutex::new(conflicts), ..Self::default() })
    }
}

impl Inner {
    /// Notes that other rules of the policy may hold for files, since names moved or directories have other settings: the
    /// policy may flush what was not flushed before.
    pub(crate) fn rules_may_differ(&self) {
        if self.policy().uniform().is_none() {
            self.flusher.calls.lock().moved = true;
            self.flusher.bell.notify_one();
        }
    }
}
