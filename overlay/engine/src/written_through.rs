//! The pool's copy of a file that is written through: its version, whether it is durable, and the end of it.

use std::sync::Arc;
use std::time::Instant;

use forebay_backends::{Error, ErrorKind, Result, Side, Stat, Time, Version};
use futures::FutureExt;

use crate::node::{Node, PoolSync};
use crate::pool_calls::CONFIRM_WITHIN;
use crate::{Inner, Txn};

impl Inner {
    /// Records the version of the pool's copy, which no other call of this daemon changes meanwhile. `written`: when this
    /// daemon wrote it. As with all files, its mtime is by the clock of this node, and not by that of the pool.
    pub(crate) fn take_pool_copy(&self, node: &Node, stat: &Stat, written: Option<Time>) -> Result<()> {
        let mut txn = Txn::begin(self);
        let record = txn.record(node.ino)?;
        record.version = Some(stat.version.clone());
        record.occupied_in_pool = stat.occupied;
        record.count_links(stat);
        // It may have been emptied meanwhile: then the pool's copy is older.
        if record.file.is_written_through() {
            record.take_size(stat);
            if let Some(now) = written {
                (record.mtime, record.ctime) = (now, now);
                record.dirty.times = true;
            } else if !record.dirty.times {
                record.mtime = stat.mtime;
            }
        }
        txn.on_commit(node.ino, |state| {
            state.changed();
            state.validated = Some(Instant::now());
        })?;
        txn.note_object(node.ino, stat);
        txn.commit()
    }

    /// Records the version that the pool's copy has now: an answer was lost, or another client changed it. The caller
    /// holds the flush lock.
    pub(crate) async fn look_at_pool_copy(&self, node: &Node) -> Result<()> {
        let object = node.state.lock().record.version.as_ref().and_then(Version::identity);
        let path = self.pool_path(node.ino)?.of_object(object);
        let stat = self.ask(self.pool.stat(&path)).await?;
        let is_known = {
            let record = &node.state.lock().record;
            let same_object = record.version.as_ref().is_some_and(|known| known.same_object(&stat.version));
            !record.file.is_written_through() || !same_object
        };
        if is_known {
            return Ok(());
        }
        self.take_pool_copy(node, &stat, None)?;
        // Its pages in the kernel may be those of the version before.
        self.tell_kernel_inode(node.ino, true);
        Ok(())
    }

    /// Makes durable what was written through to the pool, if anything was.
    ///
    /// # Errors
    /// Those of the pool. If bytes were lost there, each later call fails, too.
    pub(crate) async fn sync_through(&self, node: &Node) -> Result<()> {
        if node.state.lock().pool_sync == PoolSync::Synced {
            return Ok(());
        }
        let _locks = self.hold_path(node).await;
        self.sync_pool_copy(node).await
    }

    /// The same for a caller that holds the flush lock.
    pub(crate) async fn sync_pool_copy(&self, node: &Node) -> Result<()> {
        let (before, object) = {
            let state = node.state.lock();
            (state.pool_sync, state.record.version.as_ref().and_then(Version::identity))
        };
        if before == PoolSync::Lost {
            let what = format!("{}: the pool lost what was written through to it", self.display(node.ino));
            return Err(Error::os(libc::EIO, Side::Pool, what));
        }
        let Ok(path) = self.pool_path(node.ino) else {
            // It was removed: nothing is left to keep.
            node.state.lock().pool_sync.synced(before);
            return Ok(());
        };
        match self.ask(self.pool.sync_file(&path.of_object(object))).await {
            Ok(()) => {
                node.state.lock().pool_sync.synced(before);
                Ok(())
            }
            Err(e) if e.is(ErrorKind::NotFound) => {
                node.state.lock().pool_sync.synced(before);
                Err(self.no_longer_there(node, e.context(self.display(node.ino))))
            }
            Err(e) => {
                if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Quota | ErrorKind::Os(libc::EIO)) {
                    node.state.lock().pool_sync.lost();
                }
                Err(e.context(self.display(node.ino)))
            }
        }
    }

    /// Ends that a file is written through although no program has it open for writing: the daemon was killed. Its last
    /// write may have reached the pool without an answer. So the version is looked up first; otherwise the daemon would
    /// take its own write for that of another client, and programs that have the file open would get `ESTALE`.
    ///
    /// # Errors
    /// Those of the pool: then the file stays as it is.
    pub(crate) async fn end_abandoned_write_through(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        if !node.is_written_through() || node.state.lock().opens.has_writer() {
            return Ok(());
        }
        {
            let _locks = self.hold_path(node).await;
            self.look_at_pool_copy(node).await?;
        }
        self.end_write_through(node)
    }

    /// The same. If the pool does not answer now, the file stays as it is.
    pub(crate) async fn try_end_abandoned_write_through(self: &Arc<Self>, node: &Arc<Node>) {
        let _ = tokio::time::timeout(CONFIRM_WITHIN, self.end_abandoned_write_through(node)).await;
    }

    /// Ends that a file is written through, unless a program has it open for writing.
    pub(crate) fn end_write_through(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        if !node.is_written_through() {
            return Ok(());
        }
        let mut txn = Txn::begin(self);
        if txn.state(node.ino)?.opens.has_writer() {
            return Ok(());
        }
        let record = txn.record(node.ino)?;
        if !record.file.is_written_through() {
            return Ok(());
        }
        record.file = record.file.end_write_through()?;
        txn.commit()?;
        self.announce_object(node.ino);
        // A program that must know that its bytes are durable has called fsync before.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (inner, node) = (self.clone(), node.clone());
            let task = async move {
                if let Err(error) = inner.sync_through(&node).await {
                    tracing::error!(%error, "what was written through to the pool may be lost there");
                }
                let ino = node.ino;
                drop(node);
                inner.table.drop_idle(ino);
            };
            runtime.spawn(task.boxed());
        }
        Ok(())
    }
}
