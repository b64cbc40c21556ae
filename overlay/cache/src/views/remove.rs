//! Goes through the trees of views, whatever their size and depth. No other task changes them.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Stat};

use crate::scratch::{WalkStep, kind_of, open_below, walk};

/// Calls `file` for each regular file below a directory.
pub fn files(base: &OwnedFd, mut file: impl FnMut(&Stat)) -> io::Result<()> {
    walk(open_below(base, b".")?, |step| {
        match step {
            WalkStep::Entry { stat, .. } if kind_of(stat) == FileType::RegularFile => file(stat),
            WalkStep::Entry { .. } | WalkStep::Left { .. } => {}
            WalkStep::TooDeep { .. } => return Err(too_deep()),
            WalkStep::Unread(error) => return Err(error),
        }
        Ok(())
    })
}

/// Removes a tree. `link` removes a regular file.
pub fn remove(base: &OwnedFd, top: &[u8], link: impl Fn(BorrowedFd<'_>, &[u8]) -> io::Result<()>) -> io::Result<()> {
    walk(open_below(base, top)?, |step| {
        match step {
            WalkStep::Entry { dir, name, stat } => match kind_of(stat) {
                FileType::Directory => {}
                FileType::RegularFile => link(dir, name)?,
                _ => rustix::fs::unlinkat(dir, name, AtFlags::empty())?,
            },
            WalkStep::Left { dir, name } => rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?,
            WalkStep::TooDeep { .. } => return Err(too_deep()),
            WalkStep::Unread(error) => return Err(error),
        }
        Ok(())
    })?;
    Ok(rustix::fs::unlinkat(base, top, AtFlags::REMOVEDIR)?)
}

/// The mount has no directories that are so deep.
fn too_deep() -> io::Error {
    io::Error::other("too many directories below each other")
}
