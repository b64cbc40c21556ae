//! Removal of names.
//!
//! If the kernel still knows an inode that lost its last name, the inode and its content stay until the kernel forgets
//! it: an open by the old name may be on its way.

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_system::clock::stamp_now;

use super::super::{Inner, Ino, Overlay, Txn};
use super::not_found;

impl Overlay {
    /// Removes a name of anything but a directory. Programs that have the inode open keep it.
    pub async fn unlink(&self, parent: Ino, name: &[u8]) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable()?;
        let ino = inner.find(parent, name).await?.ok_or_else(|| not_found(name))?;
        let mut txn = Txn::begin(inner);
        if txn.record(ino)?.kind == FileKind::Directory {
            return Err(Error::new(ErrorKind::IsDirectory, Side::Application, name.escape_ascii().to_string()));
        }
        inner.take_name(&mut txn, parent, name, ino)?;
        txn.touch_dir(parent, 0)?;
        let has_other_names = !txn.record(ino)?.links.is_empty();
        txn.commit()?;
        if has_other_names {
            // Another name decides now which rules hold for it.
            inner.rules_of_file_may_differ(ino);
        }
        inner.flusher.bell.notify_one();
        Ok(())
    }

    /// Removes an empty directory.
    pub async fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable()?;
        let ino = inner.find(parent, name).await?.ok_or_else(|| not_found(name))?;
        inner.check_dir_can_go(ino).await?;
        let mut txn = Txn::begin(inner);
        if !inner.is_empty_dir(ino)? {
            return Err(not_empty(name));
        }
        inner.take_name(&mut txn, parent, name, ino)?;
        txn.touch_dir(parent, -1)?;
        txn.commit()?;
        inner.flusher.bell.notify_one();
        Ok(())
    }
}

impl Inner {
    /// Checks that a directory may be removed or replaced. Its names are listed first, to know that it is empty.
    pub(crate) async fn check_dir_can_go(&self, ino: Ino) -> Result<()> {
        self.ensure_listed(ino).await?;
        if !self.is_empty_dir(ino)? {
            return Err(not_empty(self.display(ino).as_bytes()));
        }
        Ok(())
    }

    /// Removes a name from the inode that it stands for now.
    pub(crate) fn take_name(&self, txn: &mut Txn<'_>, parent: Ino, name: &[u8], ino: Ino) -> Result<()> {
        txn.live_dir(parent)?;
        let was = txn.name(parent, name)?;
        if was.here_ino() != Some(ino) {
            return Err(not_found(name));
        }
        txn.record(ino)?.ctime = stamp_now();
        txn.set_name(parent, name, was.showing(None))?;
        txn.unlink(ino, parent, name)
    }
}

pub(super) fn not_empty(name: &[u8]) -> Error {
    Error::new(ErrorKind::NotEmpty, Side::Application, name.escape_ascii().to_string())
}
