//! Set-id bits of files that programs write without the daemon.
//!
//! When a program writes to a passed-through file, the kernel does not remove the file's set-id bits: it writes to the
//! content file, which has none. So if a file gets the bits while such a writer has it open, size and mtime of the
//! content are remembered. If they differ later, the bits are removed: before attributes are shown or sent to the pool,
//! before content is sent, and at the last close.

use std::fs::File;
use std::sync::Arc;

use forebay_backends::{FileKind, Result, Time};
use forebay_cache::Stamp;
use forebay_system::clock::stamp_now;

use super::{Inner, Txn};
use crate::node::{Node, NodeState, Written};

/// A state of the content that is not known. No content has this size, so the content counts as written since.
pub(super) const UNKNOWN: Written = (u64::MAX, Time { secs: 0, nanos: 0 });

/// Returns whether content was written since the file got set-id bits.
pub(super) fn is_written_since(state: &NodeState) -> Result<bool> {
    let (Some(since), Some(content)) = (state.bypass.set_id_since(), &state.content) else { return Ok(false) };
    Ok(written(&content.file)? != since)
}

/// Returns what each write of the content changes; `None` if the daemon does not have the content open.
pub(super) fn content_now(state: &NodeState) -> Result<Option<Written>> {
    state.content.as_ref().map(|content| written(&content.file)).transpose()
}

fn written(file: &File) -> Result<Written> {
    Stamp::of(file).map(|stamp| (stamp.size, stamp.mtime))
}

impl Inner {
    /// Removes the set-id bits of a file that was written since it got them.
    pub(super) fn take_set_id(&self, node: &Arc<Node>) -> Result<()> {
        if !is_written_since(&node.state.lock())? {
            return Ok(());
        }
        let mut txn = Txn::begin(self);
        if !is_written_since(txn.state(node.ino)?)? {
            return Ok(());
        }
        txn.on_commit(node.ino, |state| state.bypass.note_set_id(None))?;
        let record = txn.record(node.ino)?;
        drop_set_id(&mut record.mode);
        record.dirty.mode = true;
        record.ctime = stamp_now();
        let committed = txn.commit();
        // The bits are not shown any more, whether or not that could be recorded.
        self.tell_kernel_inode(node.ino, false);
        committed
    }
}

/// Remembers the content of a file that has set-id bits and may be written past the daemon. `content`: what it was after
/// its mode or times were set; `None`: not known.
pub(super) fn note_set_id(state: &mut NodeState, kind: FileKind, mode: u32, content: Option<Written>) {
    let has_bits = kind == FileKind::File && mode & 0o6000 != 0 && state.content.is_some();
    if !state.bypass.is_none() {
        state.bypass.note_set_id(has_bits.then(|| content.unwrap_or(UNKNOWN)));
    }
}

/// Removes the set-user-id bit, and the set-group-id bit unless it is a mark for mandatory locking.
pub(super) fn drop_set_id(mode: &mut u32) {
    *mode &= !libc::S_ISUID;
    if *mode & libc::S_IXGRP != 0 {
        *mode &= !libc::S_ISGID;
    }
}
