//! Extended attributes that the pool has, read when they are first needed.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side, UNFINISHED_XATTR, XATTRS_MAX_BYTES};
use forebay_catalog::Xattrs;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};

use crate::{Inner, Ino, Txn};

/// Inodes whose attributes are requested from the pool at the same time.
const ASKED_AT_ONCE: usize = 16;

impl Inner {
    pub(crate) async fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Option<Box<[u8]>>> {
        {
            // The common case, without a copy of the other attributes.
            let node = self.node(ino)?;
            let state = node.state.lock();
            if let Some(xattrs) = &state.record.xattrs {
                return Ok(xattrs.iter().find(|(n, _)| **n == *name).map(|(_, v)| v.clone()));
            }
        }
        Ok(self.known_xattrs(ino).await?.into_iter().find(|(n, _)| **n == *name).map(|(_, v)| v))
    }

    /// Returns all extended attributes. The first call reads them from the pool.
    pub(crate) async fn known_xattrs(&self, ino: Ino) -> Result<Xattrs> {
        if let Some(xattrs) = &self.node(ino)?.state.lock().record.xattrs {
            return Ok(xattrs.clone());
        }
        match self.pooled_xattrs(ino).await? {
            // They were removed with the pool's copy, or the pool has none.
            None => Ok(Xattrs::new()),
            Some(pooled) => {
                let mut txn = Txn::begin(self);
                let xattrs = txn.learn_xattrs(ino, pooled)?;
                txn.commit()?;
                Ok(xattrs)
            }
        }
    }

    /// Reads the extended attributes of inodes from the pool, as far as they are not known, and records all by one
    /// change.
    pub(crate) async fn learn_xattrs(self: &Arc<Self>, inos: Vec<Ino>) -> Result<()> {
        let is_unknown = |ino: &Ino| self.node(*ino).is_ok_and(|node| node.state.lock().record.xattrs.is_none());
        let unknown: Vec<Ino> = inos.into_iter().filter(is_unknown).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let asked =
            stream::iter(unknown).map(|ino| async move { Ok::<_, Error>((ino, self.pooled_xattrs(ino).await?)) });
        let asked: Vec<(Ino, Option<Xattrs>)> = asked.buffer_unordered(ASKED_AT_ONCE).try_collect().await?;
        let mut txn = Txn::begin(self);
        for (ino, pooled) in asked {
            if let Some(pooled) = pooled {
                txn.learn_xattrs(ino, pooled)?;
            }
        }
        txn.commit()
    }

    /// Asks the pool for the extended attributes of an inode. Returns `None` if the pool cannot have any.
    fn pooled_xattrs(&self, ino: Ino) -> BoxFuture<'_, Result<Option<Xattrs>>> {
        async move {
            let node = self.node(ino)?;
            let in_pool = || ino == Ino::ROOT || node.state.lock().record.in_pool();
            if !self.pool.capabilities().objects.xattrs || !in_pool() {
                return Ok(None);
            }
            let read = match self.ask_of(ino, |path| async move { self.pool.xattrs(&path).await }).await {
                Err(e) if e.is(ErrorKind::NotFound) && !node.state.lock().record.in_pool() => return Ok(None),
                read => read?,
            };
            // The inode's record holds all of them, and is in memory while the inode is in use.
            if read.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > XATTRS_MAX_BYTES {
                return Err(Error::os(libc::E2BIG, Side::Pool, "extended attributes of more than 128 KiB"));
            }
            // The pool's own mark of an unfinished file is hidden.
            let read = read.into_iter().filter(|(name, _)| name != UNFINISHED_XATTR);
            Ok(Some(read.map(|(n, v)| (n.into(), v.into())).collect()))
        }
        .boxed()
    }
}

impl Txn<'_> {
    /// Records the extended attributes that the pool has. Returns those of the inode, with its unflushed changes.
    fn learn_xattrs(&mut self, ino: Ino, pooled: Xattrs) -> Result<Xattrs> {
        let record = self.record(ino)?;
        Ok(match &record.xattrs {
            Some(known) => known.clone(),
            None => record.learn_xattrs(pooled).clone(),
        })
    }
}
