//! Names that a flush changes in the pool are on the pool's disks before the catalog says that the pool has them.
//!
//! Else a pool that loses power forgets a name of which the catalog takes the file for clean. Until then what was sent
//! is written down, so that after a power cut of this machine, too, it is looked for and sent again.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{ErrorKind, Result};

use super::super::{Inner, Ino};

/// Syncs of one directory: of several that wait at the same time one serves all.
#[derive(Debug, Default)]
pub(crate) struct NamesSync {
    asked: AtomicU64,
    /// How many of those that asked were served.
    done: tokio::sync::Mutex<u64>,
}

impl Inner {
    /// Makes the names of a directory that were changed before durable in the pool. The caller holds `moves`.
    pub(super) async fn sync_names(&self, dir: Ino) -> Result<()> {
        // Others removed it with all that was in it, or its owner may write there, but not read, and so not sync.
        let cannot_be = |kind| {
            use ErrorKind::{NotDirectory, NotFound, NotPermitted, PermissionDenied, Stale};
            matches!(kind, NotFound | NotDirectory | PermissionDenied | NotPermitted | Stale)
        };
        match self.sync_names_of(dir).await {
            Err(e) if cannot_be(e.kind()) => Ok(()),
            other => other,
        }
    }

    async fn sync_names_of(&self, dir: Ino) -> Result<()> {
        let (node, path) = (self.node(dir)?, self.pool_path(dir)?);
        let sync = &node.names_sync;
        let mine = sync.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut done = sync.done.lock().await;
        if *done >= mine {
            return Ok(());
        }
        let covers = sync.asked.load(Ordering::SeqCst);
        self.ask(self.pool.sync_dir(&path)).await.map_err(|e| e.context(path))?;
        *done = covers;
        Ok(())
    }
}
