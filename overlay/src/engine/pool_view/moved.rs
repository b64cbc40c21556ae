//! What the mount shows elsewhere than the pool had it, and the pool has there no longer: either a flush that
//! was cut off moved it unknown to the catalog, or somebody removed it.

use forebay_backends::{Error, ErrorKind, Result, Side, Stat};

use super::super::{Inner, Ino, Txn};
use super::Asked;
use crate::catalog::{InodeRecord, Link};

impl Inner {
    /// The pool does not have an inode where we know it.
    ///
    /// # Errors
    /// `Stale` where it is gone with its name.
    pub(in crate::engine) async fn missing(&self, ino: Ino, asked: Asked) -> Result<()> {
        let record = self.node(ino)?.state.lock().record.clone();
        let Some((here, there)) = ways(&record) else { return self.vanished(ino, asked) };
        let found = match self.pool_path_of(here.0, &here.1) {
            Ok(path) => self.ask(self.pool.stat(&path)).await,
            Err(e) => Err(e),
        };
        match found {
            Ok(stat) if is_object(&record, &stat) => return self.take_moved(ino, &here, &there, &stat, asked),
            Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => return Ok(()),
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => return Err(e),
            _ => {}
        }
        if !self.holds(ino, asked)? {
            return Ok(());
        }
        match self.pool_path(there.0) {
            Ok(_) => self.parked_or_lost(ino, &there).await?,
            Err(_) => self.source_lost(ino, &there)?,
        }
        match self.node(ino)?.state.lock().record.links.is_empty() {
            true => Err(Error::new(
                ErrorKind::Stale,
                Side::Pool,
                format!("{}: removed in the pool", there.1.escape_ascii()),
            )),
            false => Ok(()),
        }
    }

    fn take_moved(&self, ino: Ino, here: &Link, there: &Link, stat: &Stat, asked: Asked) -> Result<()> {
        if !self.holds(ino, asked)? {
            return Ok(());
        }
        let occupant = self.catalog.name(here.0, &here.1)?.pool;
        self.commit_moved(here.0, &here.1, there, ino, occupant, stat)
    }

    fn holds(&self, ino: Ino, asked: Asked) -> Result<bool> {
        Ok(asked.holds(&self.node(ino)?.state.lock()))
    }

    /// Whether a listing shows under a name of ours just what we have there, though the catalog does not know
    /// that the pool has it.
    pub(super) fn is_moved(&self, txn: &mut Txn<'_>, ino: Ino, stat: &Stat) -> Result<bool> {
        let record = txn.record(ino)?;
        Ok(ways(record).is_some() && is_object(record, stat))
    }

    /// Tells the catalog of what [`Self::is_moved`] found.
    pub(super) fn settle_moved(&self, dir: Ino, name: &[u8], ino: Ino, stat: &Stat) -> Result<()> {
        let node = self.node(ino)?;
        let (record, asked) = {
            let state = node.state.lock();
            (state.record.clone(), Asked::of(&state))
        };
        match ways(&record) {
            Some((_, there)) => self.take_moved(ino, &(dir, name.into()), &there, stat, asked),
            None => Ok(()),
        }
    }
}

/// Where the mount shows an inode and where alone the pool had it, if these differ.
fn ways(record: &InodeRecord) -> Option<(Link, Link)> {
    let (here, there) = (record.links.first()?, record.pool_links.first()?);
    (record.pool_links.len() == 1 && !record.links.contains(there)).then(|| (here.clone(), there.clone()))
}

fn is_object(record: &InodeRecord, stat: &Stat) -> bool {
    record.kind == stat.kind && record.version.as_ref().is_some_and(|v| v.same_object(&stat.version))
}
