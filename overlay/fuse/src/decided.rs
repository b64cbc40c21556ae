//! Requests that the kernel permitted by rights in its cache. If the pool has other rights by now, they fail with
//! `Stale`, and the kernel decides again: see `engine/rights.rs`.

use std::time::Duration;

use forebay_backends::{Error, ErrorKind, Result};
use forebay_engine::{Attr, CachedPages, Ino, Lookup, Opened};

use super::session::MountSession;

impl MountSession {
    /// Looks a name up, if the present rights of the directory decided the request of `thread`.
    pub async fn lookup_for(&self, thread: u32, parent: Ino, name: &[u8]) -> Result<Lookup> {
        let found = match name {
            // The kernel looks up `.` and `..` of an inode that it knows by number alone.
            b"." => return self.overlay.itself(parent).await,
            b".." => return self.overlay.parent(parent).await,
            name => self.overlay.lookup(parent, name).await?,
        };
        if let Err(error) = self.overlay.check_rights(parent, thread).await {
            if let Lookup::Found(entry) = found {
                self.overlay.forget(entry.attr.ino, 1);
            }
            return Err(error);
        }
        if let Lookup::Found(entry) = &found {
            self.overlay.note_told(&entry.attr, thread);
        }
        Ok(found)
    }

    pub async fn getattr_for(&self, thread: u32, ino: Ino) -> Result<(Attr, Duration)> {
        let (attr, ttl) = self.overlay.getattr(ino).await?;
        self.overlay.note_told(&attr, thread);
        Ok((attr, ttl))
    }

    /// Opens a file, if its present rights decided the request of `thread`.
    pub async fn open_for(&self, thread: u32, ino: Ino, flags: i32) -> Result<Opened> {
        match self.overlay.open_file_for(ino, flags, Some(thread)).await {
            // The inode is gone, not necessarily the name. On `Stale` the kernel looks the name up again.
            Err(error) if error.is(ErrorKind::NotFound) => {
                Err(Error::new(ErrorKind::Stale, error.side(), error.to_string()))
            }
            opened => opened,
        }
    }

    /// Opens a directory, if its present rights decided the request of `thread`. Returns whether the kernel may
    /// keep the listing that it has cached.
    pub async fn open_dir_for(&self, thread: u32, ino: Ino) -> Result<CachedPages> {
        let pages = self.overlay.open_dir(ino).await?;
        self.overlay.check_rights(ino, thread).await?;
        Ok(pages)
    }

    pub async fn get_xattr_for(&self, thread: u32, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let value = self.overlay.get_xattr(ino, name).await?;
        // The kernel reads other attributes while it checks permissions, or shows them to all users.
        if name.starts_with(b"user.") {
            self.overlay.check_rights(ino, thread).await?;
        }
        Ok(value)
    }
}
