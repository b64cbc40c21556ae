//! Requests that the kernel decided by rights that it has cached: see `engine/rights.rs`.

use std::time::Duration;

use forebay_backends::{Error, ErrorKind, Result};
use forebay_engine::{Attr, Ino, Lookup, Opened};

use super::front::Front;

impl Front {
    /// Looks a name up for a thread that may search the directory.
    pub async fn lookup_for(&self, thread: u32, parent: Ino, name: &[u8]) -> Result<Lookup> {
        let found = match name {
            // Of an inode that the kernel has by its number alone.
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

    /// Opens a file for a thread that may.
    pub async fn open_for(&self, thread: u32, ino: Ino, flags: i32) -> Result<Opened> {
        match self.overlay.open_file_for(ino, flags, Some(thread)).await {
            // Not the name: what it stood for is gone. The kernel looks it up again.
            Err(error) if error.is(ErrorKind::NotFound) => {
                Err(Error::new(ErrorKind::Stale, error.side(), error.to_string()))
            }
            opened => opened,
        }
    }

    /// Opens a directory for a thread that may read it. `true`: what the kernel has cached of the listing still holds.
    pub async fn open_dir_for(&self, thread: u32, ino: Ino) -> Result<bool> {
        let keep_cache = self.overlay.open_dir(ino).await?;
        self.overlay.check_rights(ino, thread).await?;
        Ok(keep_cache)
    }

    pub async fn get_xattr_for(&self, thread: u32, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let value = self.overlay.get_xattr(ino, name).await?;
        // Others the kernel asks for while it decides, or shows to all.
        if name.starts_with(b"user.") {
            self.overlay.check_rights(ino, thread).await?;
        }
        Ok(value)
    }
}
