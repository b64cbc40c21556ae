//! Before a file is changed in place, it leaves the views that show it: it gets a content file of its own.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{ContentId, Stamp};
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
                let stamp = Stamp::of(&content.file)?;
                let copy = inner.preallocated.take()?;
                let copy_id = ContentId(copy.id);
                inner.store.copy_content(id, &copy.file, || true)?;
                if let Err(error) = inner.catalog.check_written_back(&content) {
                    // What was copied may not be what was written.
                    inner.give_up_unwritten(&node, id)?;
                    return Err(error);
                }
                // The content may be the only copy.
                copy.file.sync_data().map_err(failed)?;
                let occupied = copy.file.metadata().map_err(failed)?.blocks() * 512;
                let mut txn = Txn::begin(&inner);
                let state = txn.state(node.ino)?;
                let same = state.record.file.content() == Some(id) && Stamp::of(&content.file)? == stamp;
                if !same || state.opens.any() || state.is_deleted() {
                    return Ok(false);
                }
                let record = txn.record(node.ino)?;
                record.file = record.file.moved(ContentId(copy.id))?;
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
                let mut residency = ContentRecord::empty(node.ino, inner.catalog.epoch());
                residency.bytes = occupied;
                txn.put_content(node.ino, copy, residency)?;
                txn.discard(id, bytes);
                txn.commit()?;
                inner.store.account_reserved(copy_id, 0, occupied, space.into());
                inner.keep_open(node.ino);
                inner.tell_kernel_inode(node.ino, true);
                Ok(true)
            })
            .await?;
            if left {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::Busy, Side::Cache, format!("{}: changes all the time", self.display(node.ino))))
    }
}
