//! What is known of the durability of fetched content beside the catalog.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use crate::Ino;

/// Which fetched content is durable.
#[derive(Debug, Default)]
pub(crate) struct EpochState {
    /// The epoch in which something was fetched last.
    pub fetched: AtomicU64,
    /// The last epoch whose content is on the device, closed or not.
    pub synced: AtomicU64,
    /// The numbers of bypassed devices whose unsynced clean content was given up.
    pub left_devices: Mutex<BTreeSet<usize>>,
    /// Files that became the only copy since the last sync of the catalog, each with the generation of its mark.
    pub unsynced_marks: Mutex<Vec<(Ino, u64)>>,
    /// Held during a sync of the fast pool: the kernel reports a failure to one caller only.
    pub(super) syncing_store: Mutex<()>,
    /// Held by the caller that syncs files which replaced others, for all that wait for it.
    pub(super) syncing_replaced: tokio::sync::Mutex<()>,
}
