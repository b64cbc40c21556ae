//! Content files that lost data on the way to the device: their content is not what was written, even if the kernel
//! reports success from then on.
//!
//! All users of a content file share the daemon's descriptor, and the kernel reports a failed write-back once for each
//! descriptor. So the first caller that gets the error records the loss. `fsync` checks the record, and so does the
//! flush, after it read the last byte and before the file counts as clean. Lost content stays dirty on the fast pool
//! until the file is emptied, replaced or removed. The descriptor of the only copy is not closed before the content is
//! known to be on the device, since a later open may not get the error any more.
//!
//! Not covered: the kernel drops the pages, the daemon is killed before it got the error, and the kernel drops the
//! inode before the next daemon opens it.

use std::io;

use dashmap::DashMap;
use forebay_backends::{Error, ErrorKind, Result, Side};
use parking_lot::Mutex;
use rocksdb::{DB, WriteBatch};
use serde::{Deserialize, Serialize};

use super::records::{decode, encode};
use super::{Batch, Catalog, cf, corrupt, failed, id_of};
use forebay_cache::{Content, ContentId};
use forebay_system::clock::unix_now;

/// The record of a loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The errno of the last failure.
    errno: i32,
    /// The time at which it was reported: seconds since 1970.
    at: u64,
    /// The number of failures.
    times: u64,
}

/// All recorded losses: nearly always none. Each open asks for one, so readers have no common lock.
#[derive(Debug, Default)]
pub(super) struct LostContents {
    known: DashMap<ContentId, Lost>,
    /// Held while a loss is recorded or forgotten, here and in the database: a loss that comes meanwhile is kept.
    changing: Mutex<()>,
}

/// A loss to forget with a batch.
pub(super) struct Forgotten {
    id: ContentId,
    /// The loss at the time of the decision; `None`: the content is gone, and with it all losses.
    was: Option<Lost>,
}

impl LostContents {
    /// Reads all losses. Those of content that has gone are deleted: they were reported after its removal.
    pub fn load(db: &DB) -> Result<Self> {
        let family = |name| db.cf_handle(name).ok_or_else(|| corrupt(name));
        let (losses, contents) = (family(cf::LOST)?, family(cf::RESIDENCY)?);
        let known = DashMap::new();
        for item in db.iterator_cf(losses, rocksdb::IteratorMode::Start) {
            let (key, value) = item.map_err(|e| failed("read the catalog", e))?;
            if db.get_pinned_cf(contents, &key).map_err(|e| failed("read the catalog", e))?.is_none() {
                db.delete_cf(losses, &key).map_err(|e| failed("write the catalog", e))?;
                continue;
            }
            let lost = decode(&value).map_err(|e| corrupt(cf::LOST).with_source(e))?;
            known.insert(ContentId(id_of(&key)?), lost);
        }
        Ok(Self { known, changing: Mutex::default() })
    }
}

impl Lost {
    /// Returns the errno of the last failure.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    fn error(&self) -> Error {
        let ago = unix_now().saturating_sub(self.at);
        Error::new(
            ErrorKind::Os(libc::EIO),
            Side::Cache,
            format!(
                "some written bytes did not reach the fast pool's device ({}, {ago} s ago). The rest is kept and is \
                 not flushed: write the file again, or copy the rest and replace the file by the copy",
                io::Error::from_raw_os_error(self.errno),
            ),
        )
    }
}

impl Catalog {
    /// Writes a batch that forgets losses. A loss that was recorded since the decision stays.
    pub(super) fn write_forgetting(
        &self,
        forgotten: Vec<Forgotten>,
        mut batch: WriteBatch,
        write: impl FnOnce(WriteBatch) -> Result<()>,
    ) -> Result<()> {
        if forgotten.is_empty() {
            return write(batch);
        }
        let _changing = self.lost.changing.lock();
        let (same, newer): (Vec<_>, Vec<_>) =
            forgotten.into_iter().partition(|f| f.was.is_none() || self.lost(f.id) == f.was);
        let family = self.family(cf::LOST)?;
        for Forgotten { id, .. } in newer {
            if let Some(lost) = self.lost(id) {
                // After the deletion in the same batch.
                batch.put_cf(family, id.0.to_be_bytes(), encode(&lost));
            }
        }
        write(batch)?;
        same.iter().for_each(|Forgotten { id, .. }| _ = self.lost.known.remove(id));
        Ok(())
    }

    /// Makes what was written to a content file durable. Blocks on the disk.
    ///
    /// # Errors
    /// `EIO` if data of it was lost, now or before: in that case [`Self::lost`] returns the loss from then on.
    pub fn sync_content(&self, content: &Content, data_only: bool) -> Result<()> {
        let id = ContentId(content.id);
        let synced = content.sync(data_only, |error| self.note_lost(id, error));
        self.check_kept(id)?;
        synced.map_err(|e| Error::io(e, Side::Cache, "sync of a content file"))
    }

    /// Makes content that is about to be sent durable. Returns the error of the file system if only what is not of this file
    /// may be missing on the device. Blocks on the disk.
    ///
    /// # Errors
    /// As [`Self::sync_content`].
    pub fn sync_sent(&self, content: &Content) -> Result<Option<Error>> {
        let id = ContentId(content.id);
        let failed = |e| Error::io(e, Side::Cache, "sync of a content file");
        let synced = content.sync_apart(|error| self.note_lost(id, error));
        self.check_kept(id)?;
        Ok(synced.map_err(failed)?.map(failed))
    }

    /// Checks for errors of the kernel's own write-back, without writing anything. Waits for a sync that is running.
    pub fn check_written_back(&self, content: &Content) -> Result<()> {
        self.checked(content, content.check_written_back(|error| self.note_lost(ContentId(content.id), error)))
    }

    /// Like [`Self::check_written_back`], but does not wait: the result misses an error that another caller is just
    /// getting.
    pub fn glance_written_back(&self, content: &Content) -> Result<()> {
        self.checked(content, content.glance_written_back(|error| self.note_lost(ContentId(content.id), error)))
    }

    fn checked(&self, content: &Content, checked: io::Result<()>) -> Result<()> {
        self.check_kept(ContentId(content.id))?;
        checked.map_err(|e| Error::io(e, Side::Cache, "look at a content file"))
    }

    /// Fails if data of the content file was lost.
    ///
    /// # Errors
    /// `EIO` if it was.
    pub fn check_kept(&self, id: ContentId) -> Result<()> {
        match self.lost.known.get(&id) {
            Some(lost) => Err(lost.error()),
            None => Ok(()),
        }
    }

    pub fn lost(&self, id: ContentId) -> Option<Lost> {
        self.lost.known.get(&id).map(|lost| lost.clone())
    }

    fn note_lost(&self, id: ContentId, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // These are errors of the call itself. Any other may be the device's error for a page (`blk_errors` in Linux's
        // block/blk-core.c).
        if matches!(errno, libc::EINTR | libc::EBADF | libc::ENOSYS | libc::EPERM) {
            return;
        }
        let _changing = self.lost.changing.lock();
        let times = self.lost(id).map_or(0, |lost| lost.times) + 1;
        let lost = Lost { errno, at: unix_now(), times };
        self.lost.known.insert(id, lost.clone());
        let ino = self.content(id).ok().flatten().map_or(0, |record| record.ino.0);
        tracing::error!(%error, ino, content = format!("{:x}", id.0), "what was written did not reach the device");
        let mut batch = self.batch();
        batch.put_raw(cf::LOST, &id.0.to_be_bytes(), &encode(&lost));
        if let Err(error) = self.write(batch) {
            // The loss is known in memory until this daemon ends.
            tracing::error!(%error, "that something was lost cannot be written down");
        }
    }
}

impl Catalog {
    /// Forgets a loss after the content was emptied. A loss that was recorded since `was` is kept.
    pub fn forget_lost(&self, id: ContentId, was: &Lost) -> Result<()> {
        let mut batch = self.batch();
        batch.forget_lost(id, was);
        self.write(batch)
    }
}

impl Batch<'_> {
    /// Forgets a loss after the content was given up. A loss that was recorded since `was` is kept.
    pub fn forget_lost(&mut self, id: ContentId, was: &Lost) {
        if self.catalog.lost(id).as_ref() == Some(was) {
            self.delete_raw(cf::LOST, &id.0.to_be_bytes());
            self.forgotten.push(Forgotten { id, was: Some(was.clone()) });
        }
    }

    /// Forgets the losses of content that goes with this batch.
    pub(super) fn forget_losses_of(&mut self, id: ContentId) {
        if self.catalog.lost(id).is_some() {
            self.delete_raw(cf::LOST, &id.0.to_be_bytes());
            self.forgotten.push(Forgotten { id, was: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ContentRecord, Durability};
    use super::*;
    use crate::Ino;

    fn eio() -> io::Error {
        io::Error::from_raw_os_error(libc::EIO)
    }

    #[test]
    fn a_loss_is_known_until_its_content_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog");
        let catalog = Catalog::open(&path, Durability::Process).unwrap();
        let (id, other) = (ContentId(7), ContentId(8));
        for id in [id, other] {
            let mut batch = catalog.batch();
            batch.put_content(id, &ContentRecord::empty(Ino(3), 1));
            catalog.write(batch).unwrap();
        }
        catalog.note_lost(id, &io::Error::from_raw_os_error(libc::EINTR));
        catalog.check_kept(id).unwrap();
        catalog.note_lost(id, &eio());
        catalog.note_lost(other, &io::Error::from_raw_os_error(libc::ENOSPC));
        let removed = ContentId(9);
        catalog.note_lost(removed, &eio());
        assert_eq!(catalog.check_kept(id).unwrap_err().errno(), libc::EIO);
        drop(catalog);
        let catalog = Catalog::open(&path, Durability::Process).unwrap();
        assert!(catalog.check_kept(other).unwrap_err().to_string().contains("No space left"));
        assert!(catalog.check_kept(removed).is_ok(), "there is nothing that could be lost");
        let was = catalog.lost(id).unwrap();
        catalog.note_lost(id, &eio());
        let mut batch = catalog.batch();
        batch.forget_lost(id, &was);
        batch.delete_content(other);
        catalog.write(batch).unwrap();
        catalog.check_kept(id).expect_err("it was lost again since");
        catalog.check_kept(other).unwrap();
        let mut batch = catalog.batch();
        batch.forget_lost(id, &catalog.lost(id).unwrap());
        drop(batch);
        catalog.check_kept(id).expect_err("that batch was not written");
        let mut batch = catalog.batch();
        batch.forget_lost(id, &catalog.lost(id).unwrap());
        catalog.write(batch).unwrap();
        catalog.check_kept(id).unwrap();
        drop(catalog);
        let catalog = Catalog::open(&path, Durability::Process).unwrap();
        assert_eq!((catalog.lost(id), catalog.lost(other)), (None, None));
    }

    /// Registered content only promises an order: a caller that syncs another file does not get the error of this one.
    #[test]
    fn a_loss_in_a_file_that_is_synced_first_does_not_stop_other_syncs() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let good = std::sync::Arc::new(Content::new(1, tempfile::tempfile().unwrap(), true));
        // `fdatasync` of it fails with EBADF, which is no loss, so the sync is repeated.
        let path = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let never = std::sync::Arc::new(Content::new(2, path.into(), true));
        catalog.sync_with(never.clone());
        catalog.sync_with(good.clone());
        catalog.sync().unwrap_err();
        assert_eq!(std::sync::Arc::strong_count(&good), 1, "the one after it was synced");
        assert_eq!(std::sync::Arc::strong_count(&never), 2, "it is still to be synced");
        catalog.note_lost(ContentId(2), &eio());
        catalog.sync().expect("its loss is known");
        assert_eq!(std::sync::Arc::strong_count(&never), 1);
    }
}
