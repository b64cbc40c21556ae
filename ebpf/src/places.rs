//! The watched places.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file system, or a directory of one, whose files are watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchedPlace {
    /// In the format of the kernel's superblock: major in the upper 12 bits, minor in the lower 20.
    pub device: u32,
    /// The inode of the directory below which files are watched; `None`: all of the file system.
    pub root: Option<u64>,
    /// Touches that belong to no job are recorded too, under [`crate::NO_JOB`].
    pub everybody: bool,
}

impl WatchedPlace {
    /// Everything below a directory.
    ///
    /// # Errors
    /// The directory cannot be examined, or its file system is not among the mounts.
    pub fn below(directory: &Path, everybody: bool) -> io::Result<Self> {
        let meta = std::fs::metadata(directory)?;
        Ok(Self { device: superblock(meta.dev()), root: Some(meta.ino()), everybody })
    }

    /// The whole file system with the number `dev`, in the format of `stat` and mountinfo.
    pub fn file_system(dev: u64, everybody: bool) -> Self {
        Self { device: superblock(dev), root: None, everybody }
    }
}

/// A device number in the kernel's internal format.
fn superblock(dev: u64) -> u32 {
    let (major, minor) = ((dev >> 8 & 0xfff) | (dev >> 32 & !0xfff), (dev & 0xff) | (dev >> 12 & 0xfff00));
    (major as u32) << 20 | minor as u32
}
