//! Goes through the trees of views, whatever their depth, with few descriptors. No other task changes them.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Stat};

use crate::scratch::{kind_of, names_of, open_below, stat_of};

/// Calls `file` for each regular file below a directory.
pub fn files(base: &OwnedFd, mut file: impl FnMut(&Stat)) -> io::Result<()> {
    let mut left = vec![b".".to_vec()];
    while let Some(path) = left.pop() {
        let dir = open_below(base, &path)?;
        for name in names_of(&dir)? {
            let stat = stat_of(&dir, &name)?;
            match kind_of(&stat) {
                FileType::Directory => left.push([path.as_slice(), b"/", &name].concat()),
                FileType::RegularFile => file(&stat),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Removes a tree. `link` removes a regular file.
pub fn remove(base: &OwnedFd, top: &[u8], link: impl Fn(&OwnedFd, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut dirs = vec![top.to_vec()];
    let mut next = 0;
    while let Some(path) = dirs.get(next).cloned() {
        next += 1;
        let dir = open_below(base, &path)?;
        for name in names_of(&dir)? {
            match kind_of(&stat_of(&dir, &name)?) {
                FileType::Directory => dirs.push([path.as_slice(), b"/", &name].concat()),
                FileType::RegularFile => link(&dir, &name)?,
                _ => rustix::fs::unlinkat(&dir, name.as_slice(), AtFlags::empty())?,
            }
        }
    }
    for path in dirs.iter().rev() {
        rustix::fs::unlinkat(base, path.as_slice(), AtFlags::REMOVEDIR)?;
    }
    Ok(())
}
