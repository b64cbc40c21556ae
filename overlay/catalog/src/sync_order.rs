//! What becomes durable when: content that replaced other content, and then the catalog, which says so.
//!
//! ```text
//!   rename:  start write-back of the content ──► register the content ──► write the batch
//!   sync:    sync registered content ──► refuse registrations ──► sync the rest ──► sync the log ──► allow them
//! ```
//!
//! A batch is in the log as soon as it is written, and a sync of the log covers all that it has by then. So a batch that
//! needs content must not be written while the log is being synced, unless that content is durable already:
//! [`Catalog::try_sync_first`] refuses, and the caller syncs the content itself.
//!
//! RocksDB also makes batches durable by itself, when its memory for new records is full. The caller has started the
//! write-back of the content by then ([`Content::start_write_back`]). ext4 does not do more before it renames a file over
//! another one (`auto_da_alloc`).

use std::sync::Arc;

use forebay_backends::Result;
use forebay_cache::{Content, ContentId};
use parking_lot::{Condvar, Mutex};

use super::{Catalog, failed};

/// How often registered content is synced before registrations are refused.
const UNREFUSED_PASSES: u32 = 4;

/// Content to sync before the write-ahead log.
#[derive(Default)]
pub(super) struct SyncOrder {
    first: Mutex<RegisteredContents>,
    /// Notified when a sync of the log ends.
    log_synced: Condvar,
    /// Held until content is synced, so that no other caller syncs the log before it.
    syncing: Mutex<()>,
}

#[derive(Default)]
struct RegisteredContents {
    /// Content stays here until it is synced. New content comes to the end.
    contents: Vec<Arc<Content>>,
    /// The numbers of the syncs of the log that are under way.
    log_syncs: Vec<u64>,
    last: u64,
}

/// The log is being synced: while this lives, no content is registered for a batch.
struct LogSync<'a> {
    order: &'a SyncOrder,
    number: u64,
}

impl<'a> LogSync<'a> {
    fn begin(order: &'a SyncOrder) -> Self {
        let mut first = order.first.lock();
        first.last += 1;
        let number = first.last;
        first.log_syncs.push(number);
        Self { order, number }
    }
}

impl Drop for LogSync<'_> {
    fn drop(&mut self) {
        self.order.first.lock().log_syncs.retain(|number| *number != self.number);
        self.order.log_synced.notify_all();
    }
}

impl Catalog {
    /// Registers content to be synced before the catalog. The batch that needs it is written next. Returns `false` if the
    /// log is being synced: then nothing is registered, and the caller syncs the content before it writes the batch.
    #[must_use]
    pub fn try_sync_first(&self, content: Arc<Content>) -> bool {
        let mut first = self.sync_order.first.lock();
        let is_free = first.log_syncs.is_empty();
        if is_free {
            first.contents.push(content);
        }
        is_free
    }

    /// The same for a caller that can neither sync it nor try again: waits for the syncs of the log that are under way.
    /// Blocks on the disk, once for all contents of a batch.
    pub fn sync_first(&self, contents: Vec<Arc<Content>>) {
        if contents.is_empty() {
            return;
        }
        let mut first = self.sync_order.first.lock();
        first.contents.extend(contents);
        // Syncs that begin from now on sync it first.
        let last = first.last;
        while first.log_syncs.iter().any(|number| *number <= last) {
            self.sync_order.log_synced.wait(&mut first);
        }
    }

    /// Registers content that replaced other content by a batch that was written before: the next sync of the catalog
    /// syncs it, too.
    pub fn sync_with(&self, content: Arc<Content>) {
        self.sync_order.first.lock().contents.push(content);
    }

    /// Returns how many content files are registered. Each has an open descriptor.
    pub fn to_sync_first(&self) -> usize {
        self.sync_order.first.lock().contents.len()
    }

    /// Makes everything that was written before survive a power cut. Blocks on the disk.
    pub fn sync(&self) -> Result<()> {
        // At first without refusing registrations: this may take long. What is registered meanwhile is synced before
        // they are refused, too, but not without end.
        for _ in 0..UNREFUSED_PASSES {
            self.sync_registered()?;
            if self.to_sync_first() == 0 {
                break;
            }
        }
        let _log_sync = LogSync::begin(&self.sync_order);
        self.sync_registered()?;
        self.db.flush_wal(true).map_err(|e| failed("sync the catalog", e))
    }

    fn sync_registered(&self) -> Result<()> {
        let _alone = self.sync_order.syncing.lock();
        let contents = self.sync_order.first.lock().contents.clone();
        let registered = contents.len();
        let (mut left, mut failed) = (Vec::new(), None);
        for content in contents {
            let synced = self.sync_content(&content, true);
            // A recorded loss is final: such content is not synced again before the catalog.
            if let (Err(error), None) = (synced, self.lost(ContentId(content.id))) {
                left.push(content);
                failed = Some(error);
            }
        }
        self.sync_order.first.lock().contents.splice(..registered, left);
        failed.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;

    /// Returns content that no sync makes durable. That is no loss, so the catalog is not synced, either.
    fn never_synced(id: u64) -> Arc<Content> {
        let path = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        Arc::new(Content::new(id, path.into(), true))
    }

    #[test]
    fn a_batch_does_not_become_durable_before_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let (path, after_power_cut) = (dir.path().join("catalog"), dir.path().join("after/catalog"));
        let catalog = Catalog::open(&path, Durability::SyncedOnly).unwrap();
        catalog.set_meta("before", &1u32).unwrap();
        {
            // The content is registered while another caller is syncing, and the batch is not written yet.
            let log_sync = LogSync::begin(&catalog.sync_order);
            assert!(!catalog.try_sync_first(never_synced(1)));
            assert_eq!(catalog.to_sync_first(), 0);
            catalog.db.flush_wal(true).unwrap();
            drop(log_sync);
        }
        assert!(catalog.try_sync_first(never_synced(1)));
        catalog.set_meta("after", &1u32).unwrap();
        catalog.sync().unwrap_err();
        std::fs::create_dir_all(&after_power_cut).unwrap();
        for file in std::fs::read_dir(&path).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), after_power_cut.join(file.file_name())).unwrap();
        }
        let catalog = Catalog::open(&after_power_cut, Durability::SyncedOnly).unwrap();
        assert_eq!(catalog.meta::<u32>("before").unwrap(), Some(1));
        assert_eq!(catalog.meta::<u32>("after").unwrap(), None, "its content is not durable");
    }

    #[test]
    fn content_that_is_registered_during_a_sync_of_the_log_is_registered_for_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let log_sync = LogSync::begin(&catalog.sync_order);
        std::thread::scope(|scope| {
            let (sent, returned) = std::sync::mpsc::channel();
            let again = &catalog;
            scope.spawn(move || {
                again.sync_first(vec![never_synced(1), never_synced(2)]);
                sent.send(()).unwrap();
            });
            while catalog.to_sync_first() == 0 {
                std::thread::yield_now();
            }
            assert!(returned.try_recv().is_err(), "the log may be synced without it");
            drop(log_sync);
            returned.recv().unwrap();
        });
        // One that begins afterwards does not delay it.
        catalog.sync().unwrap_err();
        catalog.sync_first(vec![never_synced(3)]);
        assert_eq!(catalog.to_sync_first(), 3);
    }
}
