//! Clean content becomes durable by the epoch: all that was fetched or flushed since the last one is synced at once. Where
//! that fails, what the device does not have is given up, and the pool is read again.

use std::collections::HashMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_backends::{Error, ErrorKind, Result, Side};

use super::{Inner, Ino};
use crate::catalog::{ContentId, InodeRecord};
use crate::content::{CHUNK_BYTES, Content};
use crate::node::Node;

impl Inner {
    /// Syncs the fast pool, and closes the epoch that is open. What comes in meanwhile is of the next one. Blocks.
    ///
    /// # Errors
    /// Those of the devices; the epoch is still open then.
    pub(super) fn close_epoch(&self) -> Result<u64> {
        let epoch = self.catalog.next_epoch()?;
        self.sync_store()?;
        if self.in_doubt.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Busy,
                Side::Cache,
                "what a device may have lost is still to be looked at",
            ));
        }
        self.catalog.close_epoch(epoch)?;
        Ok(epoch)
    }

    /// Syncs the fast pool. The kernel tells of a failure once, and not of which file.
    pub(super) fn sync_store(&self) -> Result<()> {
        let synced = self.store.sync_all();
        if synced.is_err() {
            self.in_doubt.store(true, Ordering::Release);
        }
        if self.in_doubt.load(Ordering::Acquire) && self.look_at_unsynced()? {
            self.in_doubt.store(false, Ordering::Release);
        }
        synced
    }

    /// Gives up the clean content of epochs that are not closed where it is not on the device. Whether all was looked at.
    fn look_at_unsynced(&self) -> Result<bool> {
        let mut unsynced = Vec::new();
        self.catalog.contents(|id, record| {
            if !self.catalog.is_closed(record.epoch)? {
                unsynced.push((id, record.ino));
            }
            Ok(true)
        })?;
        let mut all = true;
        for (id, ino) in unsynced {
            match self.look_at(id, ino) {
                Ok(looked_at) => all &= looked_at,
                // Removed since.
                Err(e) if e.is(ErrorKind::Stale) => {}
                Err(error) => {
                    all = false;
                    tracing::error!(%error, %ino, "whether its content is on the device is not known");
                }
            }
        }
        Ok(all)
    }

    fn look_at(&self, id: ContentId, ino: Ino) -> Result<bool> {
        let Some(node) = self.node_unless_gone(ino)? else { return Ok(true) };
        let (content, record) = {
            let mut state = node.state.lock();
            if state.record.file.content() != Some(id) {
                return Ok(true);
            }
            (self.content(ino, &mut state), state.record.clone())
        };
        let lost = match &content {
            Ok(content) => self.catalog.check_written_back(content).is_err(),
            Err(_) => true,
        };
        if record.file.is_dirty() {
            return Ok(true);
        }
        if let (false, Ok(content)) = (lost, &content)
            && self.is_on_device(content, id, &record)?
        {
            return Ok(true);
        }
        let may_go = {
            let state = node.state.lock();
            if !state.flights.is_empty() {
                return Ok(false);
            }
            let same = (state.record.file, &state.record.version) == (record.file, &record.version);
            same && state.record.in_pool() && !state.superseded
        };
        if may_go {
            self.give_up_unwritten(&node)?;
        }
        Ok(true)
    }

    /// Of clean content that the pool has, and the device does not.
    pub(super) fn give_up_unwritten(&self, node: &Arc<Node>) -> Result<()> {
        tracing::warn!(path = self.display(node.ino), "its content did not reach the device; it is fetched again");
        self.discard_clean(node)
    }

    /// Whether the device has every byte that was fetched. Not known, so `false`, of what was written here.
    fn is_on_device(&self, content: &Arc<Content>, id: ContentId, record: &InodeRecord) -> Result<bool> {
        let Some(residency) = self.catalog.content(id)? else { return Ok(false) };
        let checksums: HashMap<u32, u32> = self.catalog.checksums(id, &residency)?.into_iter().collect();
        let whole = record.file.is_whole();
        let meta = content.file.metadata().map_err(|e| Error::io(e, Side::Cache, "stat of a content file"))?;
        if whole && (meta.size() != record.size || checksums.len() as u64 != record.size.div_ceil(CHUNK_BYTES)) {
            return Ok(false);
        }
        // What is read from now on comes from the device.
        rustix::fs::fadvise(&content.file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| Error::os(e.raw_os_error(), Side::Cache, "drop the pages of a content file"))?;
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        Ok(checksums.iter().all(|(chunk, checksum)| {
            let start = u64::from(*chunk) * CHUNK_BYTES;
            let bytes = &mut buffer[..CHUNK_BYTES.min(record.size.saturating_sub(start)) as usize];
            content.file.read_exact_at(bytes, start).is_ok() && crc32c::crc32c(bytes) == *checksum
        }))
    }
}
