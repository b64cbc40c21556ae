//! Files that a front end writes once and then reads while they are resident. A reverse proxy keeps responses this way.
//! Their pool has no content, so what is evicted is gone.

use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, Bytes};
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, RenameMode, Result, Side};
use futures::FutureExt;

use super::namespace::Ask;
use super::{Caller, Dirent, Inner, Ino, Lookup, Overlay};
use crate::permission::UserGroups;
use crate::served::ServedFile;

/// Owner of the files: only the daemon reads them.
const OWNER: Caller = Caller { uid: 0, gid: 0, pid: 0 };
const FILE_MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;
const NEW: i32 = libc::O_RDWR;
/// How often a file is made again in a directory that was removed.
const MAKE_ATTEMPTS: u32 = 3;

/// A new file, open for reading and writing. It has a temporary name until it is published; if it is dropped before, it is
/// removed.
pub struct NewFile {
    overlay: Overlay,
    ino: Ino,
    parent: Ino,
    temporary: Vec<u8>,
    published: AtomicBool,
}

impl Overlay {
    /// Opens a file if all of it is resident.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn open_resident(&self, path: &PoolPath) -> Result<Option<ServedFile>> {
        let ino = match self.resolve(path).await {
            Ok(ino) => ino,
            Err(e) if is_absent(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        let node = self.inner.node(ino)?;
        {
            let state = node.state.lock();
            if state.record.kind != FileKind::File || !state.record.file.is_whole() {
                return Ok(None);
            }
        }
        match self.open_served(ino, &UserGroups { uid: OWNER.uid, groups: Vec::new() }).await {
            Ok(file) => Ok(file.resident().is_some().then_some(file)),
            // Evicted meanwhile: the pool has no content.
            Err(e) if e.is(ErrorKind::Unsupported) || is_absent(&e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Makes a file in a directory, with the directories above it.
    ///
    /// # Errors
    /// `NoSpace`, `NameTooLong`, `NotDirectory` if a name on the way is that of a file.
    pub async fn make_file(&self, dir: &PoolPath, temporary: &[u8]) -> Result<NewFile> {
        let mut left = MAKE_ATTEMPTS;
        let (parent, entry) = loop {
            let parent = self.make_dirs(dir).await?;
            match self.create(parent, temporary, FILE_MODE, 0, NEW, OWNER).await {
                Ok((entry, _)) => break (parent, entry),
                // The directory was empty, and was removed meanwhile.
                Err(e) if is_absent(&e) && left > 0 => left -= 1,
                Err(e) => return Err(e),
            }
        };
        Ok(NewFile {
            overlay: self.clone(),
            ino: entry.attr.ino,
            parent,
            temporary: temporary.to_vec(),
            published: AtomicBool::new(false),
        })
    }

    async fn make_dirs(&self, dir: &PoolPath) -> Result<Ino> {
        let mut at = Ino::ROOT;
        for name in dir.components() {
            let found = match self.lookup(at, name).await? {
                Lookup::Found(entry) => entry,
                Lookup::Negative { .. } => match self.mkdir(at, name, DIR_MODE, 0, OWNER).await {
                    Ok(entry) => entry,
                    // Another request made it.
                    Err(e) if e.is(ErrorKind::Exists) => match self.lookup(at, name).await? {
                        Lookup::Found(entry) => entry,
                        Lookup::Negative { .. } => return Err(e),
                    },
                    Err(e) => return Err(e),
                },
            };
            at = found.attr.ino;
            self.forget(at, 1);
        }
        Ok(at)
    }

    /// Removes a file by its path. Returns whether it was there.
    ///
    /// # Errors
    /// Those of [`Self::unlink`].
    pub async fn remove_file(&self, path: &PoolPath) -> Result<bool> {
        let (Some(dir), Some(name)) = (path.parent(), path.name()) else { return Ok(false) };
        let removed = match self.resolve(&dir).await {
            Ok(dir) => self.unlink(dir, name).await,
            Err(e) => Err(e),
        };
        match removed {
            Ok(()) => Ok(true),
            Err(e) if is_absent(&e) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Removes all files below a path whose names `is_one` accepts, and directories that are empty then. Returns the number
    /// of files.
    ///
    /// # Errors
    /// Those of the catalog. What cannot be removed stays.
    pub async fn remove_below(&self, path: &PoolPath, is_one: impl Fn(&[u8]) -> bool) -> Result<u64> {
        self.remove_some(path, |_, _, name| is_one(name)).await
    }

    /// Removes the files of one directory whose names `is_one` accepts. Returns their number.
    ///
    /// # Errors
    /// Those of the catalog. What cannot be removed stays.
    pub async fn remove_in(&self, path: &PoolPath, is_one: impl Fn(&[u8]) -> bool) -> Result<u64> {
        match self.resolve(path).await {
            Ok(dir) => self.remove_entries(dir, &|entry| entry.kind == FileKind::File && is_one(&entry.name)).await,
            Err(e) if is_absent(&e) => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// Removes all files that are not resident any more, and directories that are empty then. Returns the number of files.
    ///
    /// # Errors
    /// Those of the catalog. What cannot be removed stays.
    pub async fn remove_evicted(&self) -> Result<u64> {
        self.remove_some(&PoolPath::root(), |inner, ino, _| {
            inner.node(ino).is_ok_and(|node| {
                let state = node.state.lock();
                !state.opens.any() && !state.record.file.is_dirty() && !state.record.file.is_whole()
            })
        })
        .await
    }

    /// Writes all of `data`: a write may end early where the space or the device does.
    async fn write_all(&self, ino: Ino, mut offset: u64, mut data: Bytes) -> Result<()> {
        while !data.is_empty() {
            let written = self.write(ino, offset, data.clone()).await?;
            if written == 0 {
                return Err(Error::new(ErrorKind::NoSpace, Side::Cache, "nothing more could be written"));
            }
            offset += u64::from(written);
            data.advance((written as usize).min(data.len()));
        }
        Ok(())
    }

    async fn remove_some(&self, path: &PoolPath, goes: impl Fn(&Inner, Ino, &[u8]) -> bool) -> Result<u64> {
        let inner = &self.inner;
        let root = match self.resolve(path).await {
            Ok(ino) => ino,
            Err(e) if is_absent(&e) => return Ok(0),
            Err(e) => return Err(e),
        };
        let mut removed = 0;
        // Directories come before their entries.
        for (dir, kind) in inner.tree(root, Ask::Nothing).await?.into_iter().rev() {
            if kind != FileKind::Directory {
                continue;
            }
            let goes = |entry: &Dirent| entry.kind == FileKind::Directory || goes(inner, entry.ino, &entry.name);
            removed += self.remove_entries(dir, &goes).await?;
        }
        Ok(removed)
    }

    /// Removes entries of a directory: files, and directories that are empty. Returns the number of files.
    async fn remove_entries(&self, dir: Ino, goes: &impl Fn(&Dirent) -> bool) -> Result<u64> {
        let mut removed = 0;
        for entry in self.inner.entries(dir)?.iter().filter(|entry| goes(entry)) {
            let gone = match entry.kind {
                FileKind::Directory => self.rmdir(dir, &entry.name).await.map(|()| 0),
                _ => self.unlink(dir, &entry.name).await.map(|()| 1),
            };
            match gone {
                Ok(files) => removed += files,
                Err(e) if is_absent(&e) || e.is(ErrorKind::NotEmpty) => {}
                Err(e) => tracing::warn!("{}: not removed: {e}", entry.name.escape_ascii()),
            }
        }
        Ok(removed)
    }
}

fn is_absent(error: &Error) -> bool {
    [ErrorKind::NotFound, ErrorKind::NotDirectory, ErrorKind::Stale].iter().any(|kind| error.is(*kind))
}

impl NewFile {
    /// Writes all of `data`.
    ///
    /// # Errors
    /// `NoSpace`, errors of the device.
    pub async fn write(&self, offset: u64, data: Bytes) -> Result<()> {
        self.overlay.write_all(self.ino, offset, data).await
    }

    /// Reads up to `len` bytes; fewer only at the end of what was written.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn read(&self, offset: u64, len: u32) -> Result<Bytes> {
        self.overlay.read(self.ino, offset, len).await
    }

    /// Opens the file for reading, whatever name it has by now.
    ///
    /// # Errors
    /// `Stale` if it is gone; errors of the device.
    pub async fn reopen(&self) -> Result<ServedFile> {
        self.overlay.open_served(self.ino, &UserGroups { uid: OWNER.uid, groups: Vec::new() }).await
    }

    /// Gives the file its name, in place of any file of that name.
    ///
    /// # Errors
    /// Those of [`Overlay::rename`]. Then it keeps its temporary name.
    pub async fn publish(&self, name: &[u8]) -> Result<()> {
        self.overlay.rename(self.parent, &self.temporary, self.parent, name, RenameMode::Replace).await?;
        self.published.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let (overlay, ino) = (self.overlay.clone(), self.ino);
        let temporary = (!*self.published.get_mut()).then(|| (self.parent, std::mem::take(&mut self.temporary)));
        let end = async move {
            if let Some((parent, name)) = temporary
                && let Err(e) = overlay.unlink(parent, &name).await
                && !is_absent(&e)
            {
                tracing::warn!("an unfinished file is removed at the next start: {e}");
            }
            overlay.release(ino, NEW);
            overlay.forget(ino, 1);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(end.boxed())),
            Err(_) => self.overlay.release(ino, NEW),
        }
    }
}

impl ServedFile {
    /// Overwrites bytes of the file, or appends to it. Bytes that clients may read at this moment must not be among them.
    ///
    /// # Errors
    /// `Stale` if another file has this name by now; `NoSpace`, errors of the device.
    pub async fn rewrite(&self, offset: u64, data: Bytes) -> Result<()> {
        let flags = libc::O_WRONLY;
        self.overlay.open_file(self.ino, flags).await?;
        let written = self.overlay.write_all(self.ino, offset, data).await;
        self.overlay.release(self.ino, flags);
        written
    }
}
