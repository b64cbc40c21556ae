//! Extended attributes and ACLs.
//!
//! The extended attributes of an inode are known as a whole or not at all. Changes that are not flushed yet are kept
//! beside them with their values. So when another client changes attributes, the engine reads all of them again and
//! applies the unflushed changes on top.

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side, XATTRS_MAX_BYTES};
use forebay_catalog::InodeRecord;
use forebay_policy::DIRECTORY_POLICY_XATTR;
use forebay_system::clock::stamp_now;

use super::{Caller, Inner, Ino, Overlay, Txn};
use crate::acl::{self, Acl};

/// The largest value that Linux accepts, in bytes.
const VALUE_MAX: usize = 65_536;
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
            inner.check_directory_policy(ino, Some(value), caller)?;
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

    pub async fn remove_xattr(&self, ino: Ino, name: &[u8], caller: Caller) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable()?;
        inner.check_xattrs(name)?;
        let is_policy = name == DIRECTORY_POLICY_XATTR.as_bytes();
        if is_policy {
            inner.check_directory_policy(ino, None, caller)?;
        }
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
        if is_policy {
            inner.rules_may_differ();
        }
        Ok(())
    }
}

impl Inner {
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
