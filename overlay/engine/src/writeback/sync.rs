//! Names that a flush changes in the pool are made durable there before the catalog says that the pool has them.
//!
//! Else a pool that loses power could forget a name whose file is clean in the catalog. Until then the record of what
//! was sent stays. So after a power cut of this machine, too, the flush looks for it and sends it again.

use forebay_backends::{ErrorKind, Result};
use forebay_cache::group_commit::{GroupCommit, ServedTurns};

use super::super::{Inner, Ino};

/// Syncs of one directory. One sync serves all callers that wait at the same time.
#[derive(Debug, Default)]
pub(crate) struct NamesSync {
    commits: GroupCommit,
    served: tokio::sync::Mutex<ServedTurns>,
}

impl Inner {
    /// Makes the changed names of a directory durable in the pool. The caller holds the path of the directory.
    pub(super) async fn sync_names(&self, dir: Ino) -> Result<()> {
        // Another client removed the directory with everything in it. Or the directory's owner may write to it, but not
        // read it, and so not sync it.
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
        let turn = sync.commits.ask();
        let mut served = sync.served.lock().await;
        let Some(waiting) = sync.commits.begin(turn, &served) else { return Ok(()) };
        self.ask(self.pool.sync_dir(&path)).await.map_err(|e| e.context(path))?;
        served.serve(waiting);
        Ok(())
    }
}
