//! Goes through the trees of views, whatever their size and depth. No other task changes them.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

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
    loop {
        let has_removed = remove_once(base, top, &link)?;
        match rustix::fs::unlinkat(base, top, AtFlags::REMOVEDIR) {
            // A directory that is opened again may pass over entries, because others of it were removed: on tmpfs before
            // Linux 6.6.
            Err(Errno::NOTEMPTY) if has_removed => {}
            removed => return Ok(removed?),
        }
    }
}

/// Goes through a tree once. Returns whether it removed anything.
fn remove_once(base: &OwnedFd, top: &[u8], link: impl Fn(BorrowedFd<'_>, &[u8]) -> io::Result<()>) -> io::Result<bool> {
    let mut has_removed = false;
    walk(open_below(base, top)?, |step| {
        match step {
            WalkStep::Entry { stat, .. } if kind_of(stat) == FileType::Directory => {}
            WalkStep::Entry { dir, name, stat } => {
                match kind_of(stat) {
                    FileType::RegularFile => link(dir, name)?,
                    _ => rustix::fs::unlinkat(dir, name, AtFlags::empty())?,
                }
                has_removed = true;
            }
            WalkStep::Left { dir, name } => match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY) => {}
                removed => {
                    removed?;
                    has_removed = true;
                }
            },
            WalkStep::TooDeep { .. } => return Err(too_deep()),
            WalkStep::Unread(error) => return Err(error),
        }
        Ok(())
    })?;
    Ok(has_removed)
}

/// The mount has no directories that are so deep.
fn too_deep() -> io::Error {
    io::Error::other("too many directories below each other")
}
