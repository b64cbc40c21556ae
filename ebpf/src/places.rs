//! What is watched.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file system, or a directory of one, whose files are watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// As the kernel's superblock has it: major in the upper 12 bits, minor in the lower 20.
    pub device: u32,
    /// The inode of the directory below which files are watched; `None`: all of the file system.
    pub root: Option<u64>,
    /// Touches that belong to no job are recorded too, as of [`crate::NO_JOB`].
    pub everybody: bool,
}

impl Place {
    /// All that lies below a directory.
    ///
    /// # Errors
    /// It cannot be looked at, or its file system is not among the mounts.
    pub fn below(directory: &Path, everybody: bool) -> io::Result<Self> {
        let meta = std::fs::metadata(directory)?;
        Ok(Self { device: superblock(meta.dev()), root: Some(meta.ino()), everybody })
    }

    /// The whole file system that has the number `dev`, as `stat` and mountinfo tell it.
    pub fn file_system(dev: u64, everybody: bool) -> Self {
        Self { device: superblock(dev), root: None, everybody }
    }
}

/// A device's number as the kernel has it inside.
fn superblock(dev: u64) -> u32 {
    let (major, minor) = ((dev >> 8 & 0xfff) | (dev >> 32 & !0xfff), (dev & 0xff) | (dev >> 12 & 0xfff00));
    (major as u32) << 20 | minor as u32
}
