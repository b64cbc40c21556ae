//! Extended attributes that the pool has, read when they are first needed.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side, UNFINISHED_XATTR, Version, XATTRS_MAX_BYTES};
use forebay_catalog::{InodeRecord, Xattrs};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};

use super::PAUSE;
use crate::acl::{self, Acl};
use crate::pool_calls::{OWN_CHANGES, QueryStamp};
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
        let node = self.node(ino)?;
        for left in (0..OWN_CHANGES).rev() {
            let known = self.known(&node);
            if let Some(xattrs) = &node.state.lock().record.xattrs {
                return Ok(xattrs.clone());
            }
            // They were removed with the pool's copy, or the pool has none.
            let Some(pooled) = self.pooled_xattrs(ino).await? else { break };
            {
                let mut txn = Txn::begin(self);
                let counts = txn.has_xattrs_as_known(ino, &known)?;
                let xattrs = txn.learn_xattrs(ino, pooled)?;
                if counts {
                    txn.commit()?;
                }
                if counts || left == 0 {
                    return Ok(xattrs);
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(Xattrs::new())
    }

    /// Reads the extended attributes of inodes from the pool, as far as they are not known, and records all by one
    /// change, but none that change while the pool answers.
    ///
    /// # Errors
    /// The last one of those that asking led to. What the pool told is recorded all the same. If it does not answer, the
    /// other inodes are not asked for.
    pub(crate) async fn learn_xattrs(self: &Arc<Self>, mut inos: Vec<Ino>) -> Result<()> {
        for attempt in 0..OWN_CHANGES {
            let unknown = |ino: Ino| {
                let node = self.node(ino).ok()?;
                let known = self.known(&node);
                node.state.lock().record.xattrs.is_none().then_some((ino, known))
            };
            let unknown: Vec<_> = inos.into_iter().filter_map(unknown).collect();
            if unknown.is_empty() {
                return Ok(());
            }
            if attempt > 0 {
                tokio::time::sleep(PAUSE).await;
            }
            let asking = stream::iter(unknown)
                .map(|(ino, known)| async move { self.pooled_xattrs(ino).await.map(|pooled| (ino, known, pooled)) });
            let mut asking = asking.buffer_unordered(ASKED_AT_ONCE);
            let (mut asked, mut failed) = (Vec::new(), None);
            while let Some(answer) = asking.next().await {
                match answer {
                    Ok(answer) => asked.push(answer),
                    Err(error) => {
                        let is_unreachable = error.is_unreachable();
                        failed = Some(error);
                        if is_unreachable {
                            break;
                        }
                    }
                }
            }
            drop(asking);
            let mut txn = Txn::begin(self);
            inos = Vec::new();
            for (ino, known, pooled) in asked {
                let Some(pooled) = pooled else { continue };
                match txn.has_xattrs_as_known(ino, &known)? {
                    true => _ = txn.learn_xattrs(ino, pooled)?,
                    false => inos.push(ino),
                }
            }
            txn.commit()?;
            if let Some(error) = failed {
                return Err(error);
            }
        }
        Ok(())
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
    /// Returns whether extended attributes that the pool was asked for after `known` may be recorded. If the inode has
    /// another version by now, they may be older than that version.
    fn has_xattrs_as_known(&mut self, ino: Ino, known: &(QueryStamp, Option<Version>)) -> Result<bool> {
        let (asked, version) = known;
        let inner = self.inner();
        // Own calls that change names in a directory say nothing of its attributes. One that changes these makes another
        // version.
        let is_dir = self.record(ino)?.kind == FileKind::Directory;
        let holds = is_dir || inner.still_holds_of_object(*asked, self.state(ino)?);
        Ok(holds && self.record(ino)?.version == *version)
    }

    /// Records the extended attributes that the pool has. Returns those of the inode, with its unflushed changes: a mode
    /// that was set in the mount is in the ACL, too.
    fn learn_xattrs(&mut self, ino: Ino, pooled: Xattrs) -> Result<Xattrs> {
        let record = self.record(ino)?;
        Ok(match &record.xattrs {
            Some(known) => known.clone(),
            None => {
                record.learn_xattrs(pooled);
                if record.dirty.mode {
                    chmod_acl(record)?;
                }
                record.xattrs.clone().unwrap_or_default()
            }
        })
    }
}

/// Shows the mode of an inode in its access ACL, as `chmod` does. If the ACL was set in the mount, the flush sends it. An ACL
/// of the pool is not sent: another client may have changed it, and the mode that is sent changes it there.
pub(crate) fn chmod_acl(record: &mut InodeRecord) -> Result<()> {
    let mut access = record.xattrs.iter().flatten().filter(|(name, _)| **name == *acl::ACCESS);
    let Some(acl) = access.next().map(|(_, value)| Acl::parse(value)).transpose()?.flatten() else { return Ok(()) };
    record.change_xattr(acl::ACCESS, &acl.chmod(record.mode).encode());
    Ok(())
}
