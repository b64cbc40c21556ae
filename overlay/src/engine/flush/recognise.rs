//! Steps that were cut off between the pool's change and our commit: what they left is ours, and no conflict.

use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{ErrorKind, Expected, FileKind, PoolPath, Result, Stat, Time};

use super::super::{Inner, Ino, Txn};
use crate::catalog::{Link, NameRecord};

/// How long the start waits for the pool.
const RESUME: Duration = Duration::from_secs(5);

impl Inner {
    /// After a kill: ends what was under way, so that nobody takes a name back of which only the pool knows. A pool
    /// that does not answer is not waited for.
    pub async fn resume_cut_off(self: &Arc<Self>) -> Result<()> {
        self.claim_sent()?;
        let resumed = async {
            for ((parent, name), sent) in self.catalog.all_sent()? {
                let Ok(path) = self.pool_path_of(parent, &name) else { continue };
                self.recognise(parent, &name, &path).await?;
                // New content is left to the flusher: it may be long.
                if sent.iter().all(|s| s.mtime == Time::default()) {
                    self.place(parent, &name).await?;
                    let mut batch = self.catalog.batch();
                    batch.delete_sent(parent, &name);
                    self.catalog.write(batch)?;
                }
            }
            Ok(())
        };
        let outcome: Result<()> = tokio::time::timeout(RESUME, resumed).await.unwrap_or(Ok(()));
        if let Err(error) = outcome {
            tracing::warn!(%error, "what was under way when the daemon was killed is looked at later");
        }
        Ok(())
    }

    /// An inode whose upload was cut off counts as being in the pool, of a version that nobody knows,
    /// so that removing or moving it here does so there. Asks the pool nothing.
    fn claim_sent(&self) -> Result<()> {
        for ((parent, name), sent) in self.catalog.all_sent()? {
            let was = self.catalog.name(parent, &name)?;
            let of_file = |ino: &Ino| self.node(*ino).is_ok_and(|n| n.state.lock().record.kind == FileKind::File);
            let Some(ino) = sent.iter().rev().map(|s| s.ino).find(of_file) else { continue };
            let mut txn = Txn::begin(self);
            if was.pool.is_some() || txn.record(ino)?.in_pool() {
                continue;
            }
            txn.set_name(parent, &name, &was, &NameRecord { here: was.here, pool: Some(ino) });
            txn.record(ino)?.pool_links.push((parent, name));
            txn.commit()?;
        }
        Ok(())
    }

    /// Where the pool has under a name what an earlier upload of ours put there unknown to the catalog, the
    /// catalog is told. Asks the pool only where an upload was cut off.
    pub(super) async fn recognise(self: &Arc<Self>, parent: Ino, name: &[u8], path: &PoolPath) -> Result<()> {
        let sent = self.catalog.sent(parent, name)?;
        if sent.is_empty() {
            return Ok(());
        }
        let was = self.catalog.name(parent, name)?;
        let stat = match self.ask(self.pool.stat(path)).await {
            Ok(stat) => stat,
            Err(e) if e.is(ErrorKind::NotFound) => return Ok(()),
            Err(e) => return Err(e.context(path)),
        };
        let granularity = self.pool.capabilities().time_granularity_ns;
        if !sent.iter().any(|s| s.made(&stat, granularity)) {
            return Ok(());
        }
        tracing::info!(%path, "an upload that was cut off had reached the pool");
        if self.take_sent(parent, name, &was, &stat)? {
            return Ok(());
        }
        // It belongs to nothing that is here any more.
        match self.ask(self.pool.remove(path, &Expected::Version(stat.version))).await {
            Ok(()) => Ok(()),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Conflict) => Ok(()),
            Err(e) => Err(e.context(path)),
        }
    }

    /// Records the object as what the pool has under the name. False where it has to go first.
    fn take_sent(&self, parent: Ino, name: &[u8], was: &NameRecord, stat: &Stat) -> Result<bool> {
        let mut txn = Txn::begin(self);
        if txn.name(parent, name)? != *was {
            return Ok(true);
        }
        let link: Link = (parent, name.into());
        match (was.pool, was.here) {
            (Some(occupant), _) => {
                let record = txn.record(occupant)?;
                let same = record.version.as_ref().is_some_and(|v| v.same_object(&stat.version));
                let alone = record.pool_links.iter().all(|l| *l == link);
                if record.kind == FileKind::File && (same || alone) {
                    record.version = Some(stat.version.clone());
                } else {
                    record.pool_links.retain(|l| *l != link);
                    txn.set_name(parent, name, was, &NameRecord { here: was.here, pool: None });
                    txn.commit()?;
                    return Ok(false);
                }
            }
            (None, Some((ino, FileKind::File))) if !txn.record(ino)?.in_pool() && txn.record(ino)?.file.is_dirty() => {
                txn.set_name(parent, name, was, &NameRecord { here: was.here, pool: Some(ino) });
                let record = txn.record(ino)?;
                record.pool_links.push(link);
                record.version = Some(stat.version.clone());
            }
            (None, _) => return Ok(false),
        }
        txn.commit()?;
        Ok(true)
    }
}
