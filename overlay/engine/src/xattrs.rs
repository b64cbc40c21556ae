//! Extended attributes and ACLs.
//!
//! The extended attributes of an inode are known as a whole or not at all. Changes that are not flushed yet are kept
//! beside them with their values. So when another client changes attributes, the engine reads all of them again and
//! applies the unflushed changes on top.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side, UNFINISHED_XATTR, XATTRS_MAX_BYTES};
use forebay_catalog::{InodeRecord, Xattrs};
use forebay_policy::DIRECTORY_POLICY_XATTR;
use forebay_system::clock::stamp_now;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};

use super::{Caller, Inner, Ino, Overlay, Txn};
use crate::acl::{self, Acl};

/// The largest value that Linux accepts, in bytes.
const VALUE_MAX: usize = 65_536;
/// Inodes whose attributes are requested from the pool at the same time.
const ASKED_AT_ONCE: usize = 16;
/// Limits the bytes of removed names that the pool may still have.
const REMOVED_MAX: usize = 64 << 10;

impl Overlay {
    /// # Errors
    /// `NoAttribute` if there is no attribute of this name.
    pub async fn get_xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        match self.inner.xattr(ino, name).await? {
            Some(value) => Ok(value.into()),
            None => Err(no_attribute(name)),
        }
    }

    pub async fn list_xattrs(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        Ok(self.inner.known_xattrs(ino).await?.into_iter().map(|(name, _)| name.into()).collect())
    }

    /// `flags`: `XATTR_CREATE`, `XATTR_REPLACE` or 0.
    pub async fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], flags: i32, caller: Caller) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable()?;
        inner.check_xattrs(name)?;
        if value.len() > VALUE_MAX {
            return Err(Error::new(ErrorKind::OutOfRange, Side::Application, "an attribute value above 64 KiB"));
        }
        let is_policy = name == DIRECTORY_POLICY_XATTR.as_bytes();
        if is_policy {
            inner.check_directory_policy(ino, value, caller)?;
        }
        let known = inner.xattr(ino, name).await?.is_some();
        if known && flags & libc::XATTR_CREATE != 0 {
            return Err(Error::new(ErrorKind::Exists, Side::Application, name.escape_ascii().to_string()));
        }
        if !known && flags & libc::XATTR_REPLACE != 0 {
            return Err(no_attribute(name));
        }
        inner.check_pool_takes(ino, name, value).await?;
        let mut txn = Txn::begin(inner);
        let record = txn.record(ino)?;
        let mut kept = Some(value);
        if name == acl::ACCESS {
            let (mode, stored) = acl::set_access(record.mode, Acl::parse(value)?);
            if record.kind == FileKind::Symlink {
                return Err(Error::new(ErrorKind::Unsupported, Side::Application, "an ACL of a symlink"));
            }
            record.mode = mode;
            if caller.uid != 0 && caller.gid != record.gid {
                record.mode &= !libc::S_ISGID;
            }
            record.dirty.mode = true;
            if stored.is_none() {
                kept = None;
            }
        } else if name == acl::DEFAULT && record.kind != FileKind::Directory {
            return Err(Error::new(ErrorKind::PermissionDenied, Side::Application, "a default ACL of a file"));
        }
        record.set_xattr(name, kept);
        check_room(record, true)?;
        record.ctime = stamp_now();
        txn.commit()?;
        inner.flusher.refused.take_back(ino, name);
        if is_policy {
            inner.rules_may_differ();
        }
        Ok(())
    }

    pub async fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable()?;
        inner.check_xattrs(name)?;
        if inner.xattr(ino, name).await?.is_none() {
            return Err(no_attribute(name));
        }
        let mut txn = Txn::begin(inner);
        let record = txn.record(ino)?;
        record.set_xattr(name, None);
        check_room(record, false)?;
        record.ctime = stamp_now();
        txn.commit()?;
        inner.flusher.refused.take_back(ino, name);
        if name == DIRECTORY_POLICY_XATTR.as_bytes() {
            inner.rules_may_differ();
        }
        Ok(())
    }
}

impl Inner {
    pub(super) async fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Option<Box<[u8]>>> {
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
    pub(super) async fn known_xattrs(&self, ino: Ino) -> Result<Xattrs> {
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
    pub(super) async fn learn_xattrs(self: &Arc<Self>, inos: Vec<Ino>) -> Result<()> {
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

    /// Refuses now what the pool would refuse later. While the pool does not answer, the flush finds out.
    async fn check_pool_takes(&self, ino: Ino, name: &[u8], value: &[u8]) -> Result<()> {
        let kind = self.node(ino)?.state.lock().record.kind;
        let mut all: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for (other, value) in self.known_xattrs(ino).await? {
            if *other != *name {
                all.push((other.into(), value.into()));
            }
        }
        all.push((name.to_vec(), value.to_vec()));
        match self.ask(self.pool.check_xattrs(kind, &all)).await {
            Err(e) if e.attribute().is_some() => Err(e),
            _ => Ok(()),
        }
    }

    fn check_xattrs(&self, name: &[u8]) -> Result<()> {
        if !self.pool.capabilities().objects.xattrs {
            return Err(Error::new(ErrorKind::Unsupported, Side::Pool, "the pool cannot hold extended attributes"));
        }
        if name.len() > 255 {
            return Err(Error::new(ErrorKind::OutOfRange, Side::Application, "an attribute name above 255 bytes"));
        }
        Ok(())
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

/// Checks a change before the commit, so that a refused change has no effect.
fn check_room(record: &InodeRecord, added: bool) -> Result<()> {
    let all: usize = record.xattrs.iter().flatten().map(|(name, value)| name.len() + value.len()).sum();
    let removed = record.dirty_xattrs.iter().filter(|(_, value)| value.is_none());
    let removed: usize = removed.map(|(name, _)| name.len()).sum();
    if added && all > XATTRS_MAX_BYTES || !added && removed > REMOVED_MAX {
        let what = "extended attributes of one file above 128 KiB, or many that were removed and not flushed yet";
        return Err(Error::new(ErrorKind::NoSpace, Side::Application, what));
    }
    Ok(())
}

fn no_attribute(name: &[u8]) -> Error {
    Error::new(ErrorKind::NoAttribute, Side::Application, name.escape_ascii().to_string())
}
