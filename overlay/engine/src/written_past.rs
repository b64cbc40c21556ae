//! Set-id bits of files that programs write past the daemon.
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

use super::attributes::drop_set_id;
use super::{Inner, Txn};
use crate::node::{Node, NodeState};

/// Returns whether content was written since the file got set-id bits.
pub(super) fn is_written_since(state: &NodeState) -> Result<bool> {
    let since = state.written_past.and_then(|past| past.set_id_since);
    let (Some(since), Some(content)) = (since, &state.content) else { return Ok(false) };
    Ok(written(&content.file)? != since)
}

/// Returns what each write changes. Not the ctime: it also moves when a writer is stopped because the fast pool is
/// full.
fn written(file: &File) -> Result<(u64, Time)> {
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
        if let Some(past) = &mut txn.state(node.ino)?.written_past {
            past.set_id_since = None;
        }
        let record = txn.record(node.ino)?;
        drop_set_id(&mut record.mode);
        record.dirty.mode = true;
        record.ctime = stamp_now();
        txn.commit()?;
        self.tell_kernel_inode(node.ino, false);
        Ok(())
    }
}

/// Remembers the content of a file that has set-id bits and may be written past the daemon. Called after its mode or
/// times were set.
pub(super) fn note_set_id(state: &mut NodeState, kind: FileKind, mode: u32) -> Result<()> {
    let Some(past) = &mut state.written_past else { return Ok(()) };
    let has_bits = kind == FileKind::File && mode & 0o6000 != 0;
    past.set_id_since = match &state.content {
        Some(content) if has_bits => Some(written(&content.file)?),
        _ => None,
    };
    Ok(())
}
