//! Release: what is settled when a program closes a file.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Instant;

use forebay_backends::Result;
use forebay_cache::{Stamp, is_open_elsewhere};

use super::super::{Inner, Ino, Overlay, Txn, is_writable};
use super::tell_unless_gone;
use crate::node::{FileOpens, Node};

impl Overlay {
    /// Ends an open with the same flags. An open that this daemon does not know belonged to an earlier daemon and is
    /// ignored.
    pub fn release(&self, ino: Ino, flags: i32) {
        self.inner.end_open(ino, is_writable(flags));
    }
}

/// A change of a file's content is in progress: while this lives, no flush marks the file clean.
pub(crate) struct Writing<'a> {
    inner: &'a Arc<Inner>,
    ino: Ino,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.inner.end_change(self.ino);
    }
}

impl Inner {
    /// Begins a change of content that may come without an open: by path, or through an open of a daemon that died.
    pub(crate) fn begin_writing<'a>(self: &'a Arc<Self>, node: &Node) -> Writing<'a> {
        node.state.lock().opens.begin_change();
        self.begin_counting(node.ino);
        Writing { inner: self, ino: node.ino }
    }

    fn end_change(self: &Arc<Self>, ino: Ino) {
        self.end_use(ino, |opens| {
            opens.end_change();
            true
        });
    }

    fn end_open(self: &Arc<Self>, ino: Ino, write: bool) {
        self.end_use(ino, |opens| {
            opens.remove(write, &self.table.opens);
            write
        });
    }

    /// `end` ends a use of a file, and returns whether it was a writer.
    fn end_use(self: &Arc<Self>, ino: Ino, end: impl FnOnce(&mut FileOpens) -> bool) {
        let inner = self;
        let Ok(node) = inner.node(ino) else { return };
        let (last_writer, unlinked, idle) = {
            let mut state = node.state.lock();
            let wrote = end(&mut state.opens);
            (wrote && !state.opens.has_writer(), state.is_unlinked(ino), !state.opens.any())
        };
        let result = (|| {
            if unlinked && idle {
                inner.space.writing.lock().remove(&ino);
                let mut txn = Txn::begin(inner);
                txn.reap(ino)?;
                return txn.commit();
            }
            if last_writer {
                inner.room_may_come();
                inner.end_write_through(&node)?;
                inner.settle(&node)?;
                inner.drop_written_around(&node)?;
            }
            Ok(())
        })();
        if let Err(error) = result {
            tell_unless_gone(&node, &error, "after the last close");
        }
        drop(node);
        inner.table.drop_idle(ino);
        if idle {
            inner.note_closed(ino);
        }
    }

    /// Called after the last writer closed: counts the space, and finds out whether anything was written. A file that
    /// is still mapped continues to count as written.
    fn settle(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        self.take_set_id(node)?;
        let unchanged = {
            let mut state = node.state.lock();
            if state.opens.has_writer() {
                return Ok(());
            }
            if !state.record.file.is_dirty() {
                self.end_bypass(node.ino, &mut state);
                return Ok(());
            }
            let content = self.content(node.ino, &mut state)?;
            let held = !state.bypass.is_none() && is_open_elsewhere(&content.file);
            if !held && !self.end_bypass(node.ino, &mut state) {
                // It is still immutable, and is settled once it is not.
                return Ok(());
            }
            state.generation += 1;
            state.quiescence.closed_at = Some(Instant::now());
            if std::mem::take(&mut state.quiescence.postponed) {
                self.hasten(node.ino);
            }
            // Beside a passthrough open, the kernel's page cache may hold the bytes from before.
            state.kernel.pages_go_stale();
            let meta = content.file.metadata().map_err(crate::contents::failed)?;
            let occupied = meta.blocks() * 512;
            if std::mem::take(&mut state.emptied) {
                self.catalog.sync_with(content.clone());
            }
            self.count(&mut state, occupied)?;
            // The count is saved later, together with other counts. Until then the inode stays in memory; after a kill
            // the file is counted again.
            if state.count_unsaved {
                self.note_uncounted(node.ino);
            }
            match state.dirty_content.pool_stamp() {
                Some(stamp) if Stamp::of(&content.file)? == stamp => Some(stamp),
                _ => None,
            }
        };
        if let Some(stamp) = unchanged
            && self.unmark_dirty(node, stamp)?
        {
            return Ok(());
        }
        let needed = self.policy().needed();
        if needed.content || needed.jobs {
            // It has another size, and jobs use it that its creation did not know.
            self.rules_of_file_may_differ(node.ino);
        }
        self.flusher.bell.notify_one();
        if self.store.budget.above(self.policy().space.high_watermark) > 0 {
            self.flusher.bell.notify_one();
        }
        Ok(())
    }

    /// Settles files that were still mapped when they were closed, and no longer are.
    pub fn settle_unmapped(self: &Arc<Self>) {
        let writing: Vec<Ino> = self.space.writing.lock().iter().copied().collect();
        for ino in writing {
            let Ok(node) = self.node(ino) else {
                self.space.writing.lock().remove(&ino);
                continue;
            };
            let unmapped = {
                let mut state = node.state.lock();
                if state.is_deleted() {
                    self.space.writing.lock().remove(&ino);
                    continue;
                }
                // Without a descriptor of its own, the daemon would not see the mapping.
                let content = match state.record.file.is_dirty() && !state.opens.has_writer() {
                    true => self.content(ino, &mut state).ok(),
                    false => state.content.clone(),
                };
                let held = || content.is_some_and(|content| is_open_elsewhere(&content.file));
                !state.opens.has_writer() && !held()
            };
            if unmapped && let Err(error) = self.settle(&node).and_then(|()| self.drop_written_around(&node)) {
                // A damaged file must not keep the other files from being counted and stopped.
                self.space.writing.lock().remove(&ino);
                tell_unless_gone(&node, &error, "after the last mapping");
            }
        }
    }
}
