//! Content becomes clean again: the pool has it.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use forebay_backends::Result;
use forebay_cache::{ContentId, Stamp, is_open_elsewhere};

use crate::contents::failed;
use crate::node::{FileOpens, Node};
use crate::{Inner, Txn};

impl Inner {
    /// Marks content clean if it is as it was at `stamp`, when the pool's copy equalled it, and if no program can still
    /// write it. Returns whether it is clean.
    pub fn unmark_dirty(&self, node: &Arc<Node>, stamp: Stamp) -> Result<bool> {
        self.unmark_dirty_unless(node, stamp, FileOpens::has_writer)
    }

    /// The same. `may_change`: whether the file counts as one that a program can still write.
    pub fn unmark_dirty_unless(
        &self,
        node: &Arc<Node>,
        stamp: Stamp,
        may_change: impl Fn(&FileOpens) -> bool,
    ) -> Result<bool> {
        let mut txn = Txn::begin(self);
        let state = txn.state(node.ino)?;
        let Some(content) = state.content.clone() else { return Ok(false) };
        // Check for holders before the stamp: whatever a holder stored before this check shows in the times.
        if may_change(&state.opens) || is_open_elsewhere(&content.file) || Stamp::of(&content.file)? != stamp {
            return Ok(false);
        }
        if !txn.record(node.ino)?.in_pool() {
            // Another client removed the pool's copy meanwhile: this is the only copy.
            return Ok(false);
        }
        let record = txn.record(node.ino)?;
        if !record.file.is_dirty() {
            // The last close and a flush did this at the same time.
            return Ok(true);
        }
        record.size = stamp.size;
        if record.file.is_spilled() {
            txn.give_up_spilled(node.ino)?;
            txn.commit()?;
            self.tell_kernel_inode(node.ino, true);
            return Ok(true);
        }
        record.file = record.file.flushed()?;
        self.end_bypass(node.ino, txn.state_at_once(node.ino)?);
        txn.on_commit(node.ino, |state| state.dirty_content.forget_pool_copy())?;
        if self.catalog.glance_written_back(&content).is_err() || !self.store.is_used(ContentId(content.id)) {
            // The content did not reach the device, but the pool has it.
            txn.give_up(node.ino)?;
            txn.commit()?;
            self.tell_kernel_inode(node.ino, true);
            return Ok(true);
        }
        let occupied = content.file.metadata().map_err(failed)?.blocks() * 512;
        txn.count(node.ino, occupied)?;
        txn.put_clean_content(node.ino, ContentId(content.id))?;
        txn.commit()?;
        Ok(true)
    }
}
