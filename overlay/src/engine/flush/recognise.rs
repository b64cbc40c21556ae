//! Uploads that were cut off between the pool's change and our commit: what they left is ours, and no conflict.

use std::sync::Arc;

use forebay_backends::{ErrorKind, Expected, FileKind, PoolPath, Result, Stat};

use super::super::{Inner, Ino, Txn};
use crate::catalog::{Link, NameRecord};

impl Inner {
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
