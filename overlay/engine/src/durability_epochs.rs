//! Clean content becomes durable by the epoch: everything that was fetched or flushed since the last epoch is synced at
//! once. If that fails, content that the device does not have is given up, and the pool is read again.
//!
//! Fetched bytes are not synced one by one: each content record names the epoch of its last bytes. Closing an epoch
//! syncs the fast pool and then records that in the catalog. After a boot with another boot id, content of an epoch
//! that was not closed counts as absent. This is checked when an inode is loaded, so no scan is needed.
//!
//! When the sync fails, the kernel does not say which file lost pages. A descriptor that has been open since its
//! content file was created reports every failure, so it is checked. All other content of the open epoch is read again
//! from the device and compared with its checksums. Content that the device lost is given up if the pool has it; leased
//! content is fetched again at once. The catalog records that this check is due.
//!
//! Clean content of an open epoch is synced before it is changed, because dirty content is trusted after a power cut.
//! If its descriptor is younger than its bytes, the whole fast pool is synced.

mod state;

use std::collections::HashMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{CHUNK_BYTES, Content, ContentId};
use forebay_catalog::InodeRecord;
use forebay_system::clock::unix_now;
use futures::FutureExt;

pub(crate) use self::state::EpochState;
use super::{Inner, Ino, Txn};
use crate::fetch::FetchPriority;
use crate::node::Node;

/// The most files that replaced others and are not synced yet: a part of the descriptors for content files, and a number
/// that a busy disk syncs within about a second.
const REPLACED_SHARE: usize = 16;
const REPLACED_MAX: usize = 256;
/// Set in the catalog as long as content that a device may have lost is unchecked.
const IN_DOUBT: &str = "in_doubt";

impl Inner {
    /// Syncs the fast pool, and closes the open epoch. Content that is fetched meanwhile belongs to the next epoch.
    /// Blocks.
    ///
    /// # Errors
    /// Errors of the devices; the epoch then stays open.
    pub(super) fn close_epoch(self: &Arc<Self>) -> Result<u64> {
        let epoch = self.catalog.next_epoch()?;
        if self.sync_store().is_err() {
            // The first call checked the content. If the second one fails, too, its error is returned.
            self.sync_store()?;
        }
        self.check_left()?;
        self.catalog.close_epoch(epoch)?;
        Ok(epoch)
    }

    /// Syncs all content that was fetched so far, and remembers that as long as the daemon lives.
    pub(super) fn sync_content_so_far(self: &Arc<Self>) -> Result<()> {
        let epoch = self.catalog.next_epoch()?;
        self.sync_store()?;
        self.check_left()?;
        self.epochs.synced.fetch_max(epoch, Ordering::AcqRel);
        Ok(())
    }

    /// Syncs the fast pool. The kernel reports a failure once, and without the file, so all unsynced content is
    /// checked.
    pub(super) fn sync_store(self: &Arc<Self>) -> Result<()> {
        // Another caller must not take the fast pool for synced before this one has recorded that it is in doubt.
        let _alone = self.epochs.syncing_store.lock();
        let synced = self.store.sync_all();
        if synced.is_err() {
            self.catalog.set_meta(IN_DOUBT, &true)?;
        }
        if self.catalog.meta(IN_DOUBT)?.unwrap_or(false) {
            self.look_at_unsynced()?;
            self.catalog.set_meta(IN_DOUBT, &false)?;
        }
        synced
    }

    /// Gives up the clean content of open epochs that is not on the device.
    fn look_at_unsynced(self: &Arc<Self>) -> Result<()> {
        let mut unsynced = Vec::new();
        self.catalog.contents(|id, record| {
            if !self.catalog.is_closed(record.epoch)? {
                unsynced.push((id, record.ino));
            }
            Ok(true)
        })?;
        let mut looked = Ok(());
        for (id, ino) in unsynced {
            match self.look_at(id, ino) {
                // Removed since.
                Err(e) if e.is(ErrorKind::Stale) => {}
                result => looked = looked.and(result),
            }
        }
        looked
    }

    fn look_at(self: &Arc<Self>, id: ContentId, ino: Ino) -> Result<()> {
        let Some(node) = self.node_unless_gone(ino)? else { return Ok(()) };
        let (content, record) = {
            let mut state = node.state.lock();
            if state.record.file.content() != Some(id) {
                return Ok(());
            }
            if !state.flights.is_empty() {
                let what = format!("inode {ino} is just being fetched");
                return Err(Error::new(ErrorKind::Busy, Side::Cache, what));
            }
            (self.content(ino, &mut state), state.record.clone())
        };
        let on_device = match content {
            // Its descriptor has reported a failed write-back. Dirty content is kept in any case, by
            // `give_up_unwritten`.
            Ok(content) if self.catalog.check_written_back(&content).is_err() => false,
            Ok(content) => content.since_made || self.is_on_device(&content, id, &record)?,
            // The next open reports the error.
            Err(_) if record.file.is_dirty() => return Ok(()),
            Err(e) if e.is(ErrorKind::NotFound) => false,
            Err(e) => return Err(e),
        };
        if !on_device {
            self.give_up_unwritten(&node, id)?;
        }
        Ok(())
    }

    /// Gives up content that the device does not have, if it is clean and the pool has it. Returns whether it did.
    pub(super) fn give_up_unwritten(self: &Arc<Self>, node: &Arc<Node>, id: ContentId) -> Result<bool> {
        let ino = node.ino;
        let mut txn = Txn::begin(self);
        let state = txn.state(ino)?;
        let file = state.record.file;
        let changes = file.content() != Some(id) || !state.flights.is_empty();
        if changes || file.is_dirty() || !state.record.in_pool() || state.is_superseded() {
            return Ok(false);
        }
        let (is_leased, size) = (state.leases.hold(unix_now()), state.record.size);
        txn.give_up(ino)?;
        // Programs may have read it meanwhile.
        txn.on_commit(ino, |state| state.kernel.pages_go_stale())?;
        txn.commit()?;
        self.advisor().evicted(ino);
        // The kernel holds the content file by its passthrough registration, and with it the space.
        self.tell_kernel_inode(ino, true);
        tracing::warn!(path = self.display(ino), "its content did not reach the device; it is fetched again");
        if let (true, Ok(runtime)) = (is_leased, tokio::runtime::Handle::try_current()) {
            let (inner, node) = (self.clone(), node.clone());
            let task = async move {
                if let Err(error) = inner.ensure(&node, 0..size, FetchPriority::Demand).await {
                    tracing::warn!(%error, %ino, "leased content is not resident any more");
                }
            };
            runtime.spawn(task.boxed());
        }
        Ok(true)
    }

    /// Returns whether the device has every byte that was fetched. `false` for content written in the mount: it is not
    /// known.
    fn is_on_device(&self, content: &Arc<Content>, id: ContentId, record: &InodeRecord) -> Result<bool> {
        let Some(residency) = self.catalog.content(id)? else { return Ok(false) };
        let checksums: HashMap<u32, u32> = self.catalog.checksums(id, &residency)?.into_iter().collect();
        let whole = record.file.is_whole();
        let meta = content.file.metadata().map_err(|e| Error::io(e, Side::Cache, "stat of a content file"))?;
        if whole && (meta.size() != record.size || checksums.len() as u64 != record.size.div_ceil(CHUNK_BYTES)) {
            return Ok(false);
        }
        // From now on, reads come from the device.
        rustix::fs::fadvise(&content.file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| Error::os(e.raw_os_error(), Side::Cache, "drop the pages of a content file"))?;
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        Ok(checksums.iter().all(|(chunk, checksum)| {
            let start = u64::from(*chunk) * CHUNK_BYTES;
            let bytes = &mut buffer[..CHUNK_BYTES.min(record.size.saturating_sub(start)) as usize];
            content.file.read_exact_at(bytes, start).is_ok() && crc32c::crc32c(bytes) == *checksum
        }))
    }

    /// Fails as long as content of a bypassed device is in doubt: an epoch that is closed then would cover it.
    pub(crate) fn check_left(&self) -> Result<()> {
        let left = self.epochs.left_devices.lock();
        match self.store.bypassed().find(|number| !left.contains(number)) {
            None => Ok(()),
            Some(number) => {
                self.store.announce_health();
                let what = format!("fast-pool device {number} has just been bypassed");
                Err(Error::new(ErrorKind::Busy, Side::Cache, what))
            }
        }
    }

    /// Waits while too many files that replaced others are not synced: each of them has an open descriptor, even if it
    /// was replaced itself since. Programs would replace files faster than a busy disk syncs them.
    pub(super) async fn sync_many_replaced(self: &Arc<Self>) {
        let are_many = || self.catalog.to_sync_first() >= self.replaced_max();
        if !are_many() {
            return;
        }
        let _turn = self.epochs.syncing_replaced.lock().await;
        if !are_many() {
            return;
        }
        let inner = self.clone();
        if let Err(error) = crate::blocking(move || inner.catalog.sync_changes()).await {
            // The sync of each second reports it.
            tracing::debug!(%error, "files that replaced others cannot be synced");
        }
    }

    /// Starts the write-back of a dirty file that is about to replace another one, as ext4 does. The sync of the catalog
    /// waits for the end of the write-back.
    pub(super) async fn start_write_back(&self, ino: Ino) {
        let content = self.node(ino).ok().and_then(|node| {
            let mut state = node.state.lock();
            let is_dirty = state.record.file.is_dirty();
            is_dirty.then(|| self.content(ino, &mut state).ok()).flatten()
        });
        let Some(content) = content else { return };
        // The device may block the thread for long. Without a limit, renames would use up the threads.
        let _turn = self.contents.syncs.acquire().await;
        let started = crate::blocking(move || {
            content.start_write_back();
            Ok(())
        });
        if let Err(error) = started.await {
            tracing::debug!(%error, %ino, "its write-back was not started");
        }
    }

    fn replaced_max(&self) -> usize {
        (self.contents.open_max / REPLACED_SHARE).clamp(1, REPLACED_MAX)
    }
}
