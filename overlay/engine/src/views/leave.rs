//! Before a file is changed in place, it leaves the views that show it: it gets a content file of its own.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{Content, ContentId, Reservation, Stamp};
use forebay_catalog::ContentRecord;

use crate::contents::failed;
use crate::node::Node;
use crate::{Inner, Txn, blocking};

/// How often it is tried again because the file changed meanwhile.
const ATTEMPTS: u32 = 5;

impl Inner {
    pub(crate) fn in_use_by_view(&self, node: &Node) -> Error {
        let what = format!("{}: it is open, and a view shows it: end the view first", self.display(node.ino));
        Error::new(ErrorKind::Os(libc::ETXTBSY), Side::Application, what)
    }

    /// Gives a file that is about to be changed a content file that no view shows. The present one stays in the views.
    ///
    /// # Errors
    /// `ETXTBSY` if programs have the file open through the mount: they would go on reading the old content file.
    pub(crate) async fn leave_views(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let (id, content, is_open, bytes) = {
                let mut state = node.state.lock();
                let Some(id) = state.record.file.content().filter(|id| self.is_in_view(*id)) else { return Ok(()) };
                if !state.record.file.is_whole() {
                    return Ok(());
                }
                (id, self.content(node.ino, &mut state)?, state.opens.any(), self.counted_bytes(&mut state))
            };
            if is_open {
                return Err(self.in_use_by_view(node));
            }
            let space = self.reserve(bytes).await?;
            let (inner, node) = (self.clone(), node.clone());
            let left = blocking(move || {
                let copy = inner.preallocated.take()?;
                let copy_id = ContentId(copy.id);
                let left = inner.move_to_copy(&node, (id, &content, bytes), copy, space);
                if !matches!(left, Ok(true)) {
                    inner.trash.discard(copy_id, 0);
                }
                left
            })
            .await?;
            if left {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::Busy, Side::Cache, format!("{}: changes all the time", self.display(node.ino))))
    }

    /// Copies what views show, and makes the copy the content of the file. Returns `false` if the file is in use, or was
    /// changed meanwhile: then nothing has changed. Blocks.
    fn move_to_copy(
        self: &Arc<Self>,
        node: &Arc<Node>,
        (id, content, bytes): (ContentId, &Arc<Content>, u64),
        copy: Arc<Content>,
        space: Reservation,
    ) -> Result<bool> {
        let stamp = Stamp::of(&content.file)?;
        let copy_id = ContentId(copy.id);
        self.store.copy_content(id, &copy.file, || true)?;
        if let Err(error) = self.catalog.check_written_back(content) {
            // What was copied may not be what was written.
            self.give_up_unwritten(node, id)?;
            return Err(error);
        }
        // The content may be the only copy.
        copy.file.sync_data().map_err(failed)?;
        let occupied = copy.file.metadata().map_err(failed)?.blocks() * 512;
        let mut txn = Txn::begin(self);
        let state = txn.state(node.ino)?;
        let same = state.record.file.content() == Some(id) && Stamp::of(&content.file)? == stamp;
        if !same || state.opens.any() || state.is_deleted() {
            return Ok(false);
        }
        let record = txn.record(node.ino)?;
        record.file = record.file.moved(copy_id)?;
        let (atime, mtime) = (record.atime, record.mtime);
        if record.file.is_dirty() {
            // The times of the content file are the truth.
            let meta = content.file.metadata().map_err(failed)?;
            let times = std::fs::FileTimes::new()
                .set_modified(meta.modified().map_err(failed)?)
                .set_accessed(meta.accessed().map_err(failed)?);
            copy.file.set_times(times).map_err(failed)?;
        } else {
            crate::contents::set_mtime(&copy.file, atime, mtime)?;
        }
        let mut residency = ContentRecord::empty(node.ino, self.catalog.epoch());
        residency.bytes = occupied;
        txn.put_content(node.ino, copy, residency)?;
        txn.discard(id, bytes);
        txn.commit()?;
        self.store.account_reserved(copy_id, 0, occupied, space.into());
        self.keep_open(node.ino);
        self.tell_kernel_inode(node.ino, true);
        Ok(true)
    }
}
