//! A pool for files whose content is on the fast pool alone: a directory that holds names, attributes and sizes, and no
//! content. What is evicted from the fast pool is gone.

use std::ops::Range;
use std::path::Path;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};

use crate::dir::DirPool;
use crate::{
    Attrs, Capabilities, Error, ErrorKind, Expected, FileKind, Listing, Pieces, Pool, PoolPath, RenameMode, Result,
    SetAttrs, Side, Space, Stat, Version,
};

/// Names without content.
#[derive(Debug)]
pub struct HollowPool {
    names: DirPool,
    capabilities: Capabilities,
}

impl HollowPool {
    /// Opens the directory, and makes it if it is missing. May block.
    ///
    /// # Errors
    /// Those of [`DirPool::open`], and of making the directory.
    pub fn open(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            Error::os(errno, Side::Pool, format!("cannot create {}", dir.display()))
        })?;
        let names = DirPool::open(dir)?;
        let capabilities = Capabilities {
            listed_contents: false,
            streams: false,
            ranged_write: false,
            parts_ahead: None,
            layouts: false,
            ..names.capabilities().clone()
        };
        Ok(Self { names, capabilities })
    }
}

fn no_content() -> Error {
    Error::new(ErrorKind::Unsupported, Side::Pool, "this content was on the fast pool alone")
}

#[async_trait]
impl Pool for HollowPool {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn url(&self) -> String {
        self.names.url()
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        self.names.stat(path).await
    }

    async fn still_has(&self, path: &PoolPath, version: &Version) -> Result<bool> {
        self.names.still_has(path, version).await
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        self.names.list(path).await
    }

    async fn read(&self, _path: &PoolPath, _version: &Version, _range: Range<u64>) -> Result<Bytes> {
        Err(no_content())
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        self.names.readlink(path).await
    }

    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        _content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        // One hole.
        self.names.put(path, size, stream::empty().boxed(), attrs, expected).await
    }

    async fn write_at(&self, _path: &PoolPath, _offset: u64, _data: Bytes) -> Result<Stat> {
        Err(no_content())
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat> {
        self.names.mkdir(path, attrs).await
    }

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat> {
        self.names.symlink(path, target, attrs).await
    }

    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat> {
        self.names.mknod(path, kind, rdev, attrs).await
    }

    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        self.names.link(existing, new).await
    }

    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        self.names.remove(path, expected).await
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        self.names.remove_dir(path).await
    }

    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        self.names.rename(from, to, mode).await
    }

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        self.names.set_attrs(path, changes).await
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        self.names.xattrs(path).await
    }

    async fn set_xattr(&self, path: &PoolPath, name: &[u8], value: &[u8]) -> Result<()> {
        self.names.set_xattr(path, name, value).await
    }

    async fn check_xattrs(&self, kind: FileKind, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.names.check_xattrs(kind, xattrs).await
    }

    async fn remove_xattr(&self, path: &PoolPath, name: &[u8]) -> Result<()> {
        self.names.remove_xattr(path, name).await
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        self.names.sync_dir(path).await
    }

    async fn sweep_unfinished(&self, dir: &PoolPath, writers: &[String]) -> Result<u64> {
        self.names.sweep_unfinished(dir, writers).await
    }

    async fn abandoned(&self, dir: &PoolPath, remove: bool) -> Result<u64> {
        self.names.abandoned(dir, remove).await
    }

    async fn space(&self) -> Result<Space> {
        self.names.space().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Piece, Time};

    #[tokio::test]
    async fn names_and_sizes_stay_and_content_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let pool = HollowPool::open(&dir.path().join("names")).unwrap();
        let path = PoolPath::parse(b"a").unwrap();
        let now = Time { secs: 1_700_000_000, nanos: 0 };
        let attrs = Attrs { mode: 0o600, uid: 0, gid: 0, atime: now, mtime: now, xattrs: Vec::new() };
        let content = stream::iter([Ok(Piece { offset: 0, data: Bytes::from_static(b"secret") })]).boxed();
        let put = pool.put(&path, 6, content, &attrs, &Expected::Absent).await.unwrap();
        assert_eq!(pool.stat(&path).await.unwrap().version, put.version);
        assert_eq!(std::fs::read(dir.path().join("names/a")).unwrap(), [0; 6]);
        let refused = pool.read(&path, &put.version, 0..6).await.unwrap_err();
        assert!(refused.is(ErrorKind::Unsupported), "{refused}");
    }
}
