//! Views: trees of directories, symbolic links, and hard links to content files, which programs read without the daemon.
//!
//! A view lies in `content/views` of a device, because the observer watches what is below `content`. Only the daemon's
//! user reaches it there; programs reach it through a bind mount.
//!
//! A content file of a view may outlive its record: its last name is then a name of the view. The bytes of such files are
//! counted as used until this name is removed ([`ViewLinks`]).

mod entry;
mod remove;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_backends::{Error, Result, Side};
use parking_lot::Mutex;

use crate::ContentStore;
use crate::scratch::{names_of, open_below};
pub use entry::{EntryLook, LaidFile, finish_directory, lay_other};

/// Below a device.
const VIEWS: &str = "content/views";
/// Below `VIEWS`: what is being removed.
const REMOVED: &str = "removed";
/// The name of the tree in the directory of its view.
pub const TOP: &str = "top";

/// What is known of names that views give to content files.
#[derive(Debug, Default)]
pub(crate) struct ViewLinks {
    /// Whether there may be views.
    any: AtomicBool,
    /// The bytes of files that have no name but those in views.
    outlived_bytes: AtomicU64,
    /// Held while a name of a content file is removed, so that the last one is known as the last.
    removing: Mutex<()>,
}

impl ContentStore {
    /// Returns the directory of a view.
    ///
    /// # Errors
    /// `Corrupt` if there is no such device.
    pub fn view_path(&self, device: usize, id: &str) -> Result<PathBuf> {
        Ok(self.numbered_device(device)?.path.join(VIEWS).join(id))
    }

    /// Makes the directory of a view, and opens it.
    pub fn make_view(&self, device: usize, id: &str) -> Result<OwnedFd> {
        self.view_links.any.store(true, Ordering::Release);
        let path = self.view_path(device, id)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(|e| failed(&path, e))?;
        Ok(File::open(&path).map_err(|e| failed(&path, e))?.into())
    }

    /// Returns whether views may have names of content files.
    pub fn has_views(&self) -> bool {
        self.view_links.any.load(Ordering::Acquire)
    }

    /// Returns the bytes of files that only views have names for.
    pub fn outlived_bytes(&self) -> u64 {
        self.view_links.outlived_bytes.load(Ordering::Acquire)
    }

    /// Counts the bytes of a file that was copied into a view on a device.
    pub fn count_copy(&self, device: usize, bytes: u64) {
        self.view_links.outlived_bytes.fetch_add(bytes, Ordering::AcqRel);
        self.account_on(device, 0, bytes);
    }

    /// Removes a content file whose record is gone, and counts its space as free. `bytes`: what is counted for it. If a
    /// view has a name for the file, it goes on being counted.
    pub(crate) fn remove_content(&self, id: crate::ContentId, bytes: u64) -> Result<()> {
        if !self.has_views() {
            return self.remove(id).inspect(|()| self.account(id, bytes, 0));
        }
        let _alone = self.view_links.removing.lock();
        let outlived = self.stat(id).map_or(0, |meta| if meta.nlink() > 1 { meta.blocks() * 512 } else { 0 });
        self.remove(id)?;
        self.view_links.outlived_bytes.fetch_add(outlived, Ordering::AcqRel);
        self.account(id, bytes, outlived);
        Ok(())
    }

    /// Returns the names of all views, with their devices, that a daemon left.
    pub fn views(&self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for device in self.devices() {
            let dir = device.path.join(VIEWS);
            let Ok(dirs) = fs::read_dir(&dir) else { continue };
            let names = dirs.flatten().filter_map(|dir| dir.file_name().into_string().ok());
            found.extend(names.filter(|name| name != REMOVED).map(|name| (device.number, name)));
            // What is being removed has names of content files, too.
            let is_left = fs::read_dir(dir.join(REMOVED)).is_ok_and(|mut left| left.next().is_some());
            self.view_links.any.fetch_or(is_left, Ordering::AcqRel);
        }
        self.view_links.any.fetch_or(!found.is_empty(), Ordering::AcqRel);
        found
    }

    /// Takes a view away from everybody. [`Self::remove_discarded_views`] removes it. A missing one is no error.
    pub fn discard_view(&self, device: usize, id: &str, number: u64) -> Result<()> {
        let removed = self.numbered_device(device)?.path.join(VIEWS).join(REMOVED);
        DirBuilder::new().recursive(true).mode(0o700).create(&removed).map_err(|e| failed(&removed, e))?;
        let from = self.view_path(device, id)?;
        match fs::rename(&from, removed.join(number.to_string())) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(&from, e)),
            _ => Ok(()),
        }
    }

    /// Removes all views that were discarded. Blocks.
    ///
    /// # Errors
    /// The first that cannot be removed. The others are removed all the same.
    pub fn remove_discarded_views(&self) -> Result<()> {
        let mut result = Ok(());
        for device in self.devices() {
            let dir = device.path.join(VIEWS).join(REMOVED);
            let Ok(base) = File::open(&dir).map(OwnedFd::from) else { continue };
            for name in names_of(&base).unwrap_or_default() {
                let removed = remove::remove(&base, &name, |dir, name| self.remove_link(device.number, dir, name));
                result = result.and(removed.map_err(|e| failed(&dir.join("N"), e)));
            }
        }
        result
    }

    /// Removes a name that a view on a device gave to a file.
    fn remove_link(&self, device: usize, dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
        let _alone = self.view_links.removing.lock();
        let freed = entry::remove_link(dir, name)?;
        // What was not counted, because of an error at the start, is not given back either.
        let rest = |counted: u64| Some(counted.saturating_sub(freed));
        let counted = self.view_links.outlived_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, rest);
        let counted = counted.unwrap_or_else(|counted| counted);
        self.account_on(device, counted.min(freed), 0);
        Ok(())
    }

    /// Counts the files that only views have names for, also those that are being removed: once, at the start, before any
    /// file is removed. Blocks.
    ///
    /// # Errors
    /// A device whose views cannot be read. Those of the others are counted.
    pub fn count_outlived(&self) -> Result<()> {
        let mut several = Vec::new();
        let mut result = Ok(());
        for device in self.devices() {
            let mut bytes = 0;
            let dir = device.path.join(VIEWS);
            let Ok(base) = File::open(&dir).map(OwnedFd::from) else { continue };
            let counted = remove::files(&base, |stat| match stat.st_nlink {
                1 => bytes += stat.st_blocks as u64 * 512,
                links => several.push((stat.st_dev, stat.st_ino, links, stat.st_blocks as u64 * 512, device.number)),
            });
            result = result.and(counted.map_err(|e| failed(&dir, e)));
            self.count_copy(device.number, bytes);
        }
        several.sort_unstable();
        for same in several.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            if same[0].2 == same.len() as u64 {
                self.count_copy(same[0].4, same[0].3);
            }
        }
        result
    }
}

/// Opens a directory of a view by its path from the directory of the view.
pub fn open_in_view(view: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    open_below(view, path).map_err(|e| failed(Path::new("a directory of a view"), e))
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::io(error, Side::Cache, path.display().to_string())
}

#[cfg(test)]
mod tests;
