//! Clean content that the pool does not have any more: it becomes dirty, and with that the only copy.

use std::sync::atomic::Ordering;

use forebay_backends::{ErrorKind, Result};
use forebay_cache::ContentId;

use super::Txn;
use crate::Ino;

impl Txn<'_> {
    /// Marks whole content dirty, because the pool has no copy any more under a name that the mount shows: the flush sends
    /// it. Nothing changes if it is dirty already.
    ///
    /// From now on, the times of the content file are the truth, and after a power cut its bytes are. So it gets the times of
    /// the record, and is synced before this change, unless it is known to be durable.
    pub(crate) fn keep_as_only_copy(&mut self, ino: Ino) -> Result<()> {
        let inner = self.inner;
        if self.record(ino)?.file.is_dirty() {
            return Ok(());
        }
        self.modify(ino)?;
        let record = self.record(ino)?;
        let (atime, mtime, id) = (record.atime, record.mtime, record.file.content());
        let content = match self.content(ino) {
            Ok(content) => content,
            // If the content file is missing, its next use reports that.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => return Ok(()),
            // The same on a device that is not used. The names of other files must not depend on it.
            Err(_) if id.is_some_and(|id| !inner.store.is_used(id)) => return Ok(()),
            Err(e) => return Err(e),
        };
        crate::contents::set_mtime(&content.file, atime, mtime)?;
        let epoch = self.residency(ino)?.epoch;
        self.put_dirty_content(ino, ContentId(content.id))?;
        self.on_commit(ino, move |state| {
            state.changed();
            state.dirty_content.became_only_copy();
            state.kernel.pages_go_stale();
            inner.epochs.unsynced_marks.lock().push((ino, state.generation));
        })?;
        // A bypassed device is not synced: that would fail, and make intact content count as lost.
        let is_used = inner.store.is_used(ContentId(content.id));
        if is_used && epoch > inner.epochs.synced.load(Ordering::Acquire) && !inner.catalog.is_closed(epoch)? {
            self.sync_first.push(content);
        }
        Ok(())
    }
}
