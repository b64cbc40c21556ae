//! Goes through a tree of any size and depth with bounded memory and few descriptors: depth first, with one stream of names
//! for each level. Links are not followed, and no path is put together.
//!
//! The user of the tree may still be changing it. So a directory to which the walk goes back through `..` has to be the one
//! that it came from.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Dir, FileType, Stat, fstat};

use super::tree::{kind_of, open_below, open_dir, stat_of};

/// The most levels of which the walk holds a record: a name and some 40 bytes each.
const LEVELS_MAX: usize = 10_000;
/// The most levels that are open. Each has a descriptor, and a buffer of up to 24 KiB.
const OPEN_MAX: usize = 64;

/// What a walk has reached.
pub(crate) enum WalkStep<'a> {
    /// An entry. If it is a directory, what is in it comes next.
    Entry { dir: BorrowedFd<'a>, name: &'a [u8], stat: &'a Stat },
    /// A directory that the walk does not enter, because it is below too many others.
    TooDeep { dir: BorrowedFd<'a>, name: &'a [u8] },
    /// The walk has left a directory. `dir` holds its name.
    Left { dir: BorrowedFd<'a>, name: &'a [u8] },
    /// A directory or an entry that cannot be read. The walk goes on with the next entry.
    Unread(io::Error),
}

/// A directory on the way from the top to where the walk is.
struct WalkLevel {
    /// `None` while too many directories below it are open.
    stream: Option<Dir>,
    /// In the directory above; empty for the top.
    name: Box<[u8]>,
    /// Device and inode.
    identity: (u64, u64),
    /// Where its stream goes on.
    offset: i64,
}

impl WalkLevel {
    fn new(dir: OwnedFd, name: &[u8]) -> io::Result<Self> {
        let stat = fstat(&dir)?;
        Ok(Self { stream: Some(Dir::new(dir)?), name: name.into(), identity: (stat.st_dev, stat.st_ino), offset: 0 })
    }

    /// Opens this directory again, from one that was in it.
    fn open_again(&mut self, below: BorrowedFd<'_>) -> io::Result<()> {
        let dir = open_dir(below, b"..")?;
        let stat = fstat(&dir)?;
        if (stat.st_dev, stat.st_ino) != self.identity {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "a directory was moved meanwhile"));
        }
        let mut stream = Dir::new(dir)?;
        stream.seek(self.offset)?;
        self.stream = Some(stream);
        Ok(())
    }
}

/// Goes through everything below a directory.
///
/// # Errors
/// The directory itself cannot be read; what `visit` returns, which ends the walk.
pub(crate) fn walk(top: OwnedFd, mut visit: impl FnMut(WalkStep<'_>) -> io::Result<()>) -> io::Result<()> {
    walk_within(top, LEVELS_MAX, OPEN_MAX, &mut visit)
}

fn walk_within(
    top: OwnedFd,
    levels_max: usize,
    open_max: usize,
    visit: &mut dyn FnMut(WalkStep<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let mut levels = vec![WalkLevel::new(top, b"")?];
    loop {
        let depth = levels.len();
        let Some(level) = levels.last_mut() else { break };
        let Some(stream) = &mut level.stream else { break };
        let entry = match stream.read() {
            Some(Ok(entry)) => entry,
            ended => {
                if let Some(Err(error)) = ended {
                    visit(WalkStep::Unread(error.into()))?;
                }
                leave(&mut levels, visit)?;
                continue;
            }
        };
        level.offset = entry.offset();
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let dir = stream.fd()?;
        let stat = match stat_of(dir, name) {
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                visit(WalkStep::Unread(error))?;
                continue;
            }
            Ok(stat) => stat,
        };
        visit(WalkStep::Entry { dir, name, stat: &stat })?;
        if kind_of(&stat) != FileType::Directory {
            continue;
        }
        if depth == levels_max {
            visit(WalkStep::TooDeep { dir, name })?;
            continue;
        }
        match open_below(dir, name).and_then(|below| WalkLevel::new(below, name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => visit(WalkStep::Unread(error))?,
            Ok(below) => {
                levels.push(below);
                // The top stays open: the walk goes on there if what is between was moved.
                let closed = levels.len().checked_sub(open_max + 1).filter(|closed| *closed > 0);
                if let Some(level) = closed.and_then(|closed| levels.get_mut(closed)) {
                    level.stream = None;
                }
            }
        }
    }
    Ok(())
}

/// Goes from the last level to the one above it.
fn leave(levels: &mut Vec<WalkLevel>, visit: &mut dyn FnMut(WalkStep<'_>) -> io::Result<()>) -> io::Result<()> {
    let Some(left) = levels.pop() else { return Ok(()) };
    let Some(above) = levels.last_mut() else { return Ok(()) };
    let opened = match &left.stream {
        Some(stream) if above.stream.is_none() => above.open_again(stream.fd()?),
        _ => Ok(()),
    };
    if let Err(error) = opened {
        // The directories between are passed over.
        levels.truncate(1);
        return visit(WalkStep::Unread(error));
    }
    // Its descriptor would keep a removed directory on the device.
    let name = left.name;
    drop(left.stream);
    match &above.stream {
        Some(stream) => visit(WalkStep::Left { dir: stream.fd()?, name: &name }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use super::*;
    use crate::scratch::prune::{Prune, prune};

    fn open(dir: &Path) -> OwnedFd {
        File::open(dir).unwrap().into()
    }

    /// Makes a chain of directories, of any depth. Returns the last one.
    fn chain(top: &Path, name: &str, levels: usize) -> OwnedFd {
        let mut dir = open(top);
        for _ in 0..levels {
            rustix::fs::mkdirat(&dir, name, 0o700.into()).unwrap();
            dir = open_below(&dir, name.as_bytes()).unwrap();
        }
        dir
    }

    #[test]
    fn each_entry_is_reached_once_with_few_directories_open() {
        let root = tempfile::tempdir().unwrap();
        let mut all = BTreeSet::new();
        for a in 0..4 {
            for b in 0..4 {
                let dir = root.path().join(format!("a{a}/b{a}{b}/c{a}{b}/d{a}{b}"));
                fs::create_dir_all(&dir).unwrap();
                let file = format!("f{a}{b}");
                fs::write(dir.join(&file), "").unwrap();
                fs::write(dir.join(format!("../../g{a}{b}")), "").unwrap();
                all.extend([format!("a{a}"), format!("b{a}{b}"), format!("c{a}{b}"), format!("d{a}{b}")]);
                all.extend([file, format!("g{a}{b}")]);
            }
        }
        let (mut reached, mut left) = (Vec::new(), 0);
        walk_within(open(root.path()), 100, 1, &mut |step| {
            match step {
                WalkStep::Entry { name, .. } => reached.push(String::from_utf8(name.to_vec()).unwrap()),
                WalkStep::Left { .. } => left += 1,
                WalkStep::TooDeep { .. } => panic!("too deep"),
                WalkStep::Unread(error) => panic!("{error}"),
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(left, 4 + 3 * 16);
        assert_eq!(reached.len(), all.len());
        assert_eq!(reached.into_iter().collect::<BTreeSet<_>>(), all);
    }

    #[test]
    fn a_path_longer_than_the_kernel_takes_is_gone_through() {
        let root = tempfile::tempdir().unwrap();
        let name = "d".repeat(250);
        rustix::fs::mkdirat(chain(root.path(), &name, 100), "last", 0o700.into()).unwrap();
        let mut seen = 0;
        walk_within(open(root.path()), 1_000, 8, &mut |step| {
            seen += usize::from(matches!(step, WalkStep::Entry { name: b"last", .. }));
            Ok(())
        })
        .unwrap();
        let mut too_deep = 0;
        walk_within(open(root.path()), 50, 8, &mut |step| {
            too_deep += usize::from(matches!(step, WalkStep::TooDeep { .. }));
            Ok(())
        })
        .unwrap();
        assert_eq!((seen, too_deep), (1, 1));
        assert!(prune(&open(root.path()), name.as_bytes(), Prune::Everything, |_| ()).unwrap());
    }

    /// Its user may move a directory while it is gone through.
    #[test]
    fn a_walk_does_not_leave_its_tree_by_a_directory_that_was_moved_out() {
        let root = tempfile::tempdir().unwrap();
        let (tree, outside) = (root.path().join("tree"), root.path().join("outside"));
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("foreign"), "").unwrap();
        fs::create_dir_all(tree.join("a/b/c")).unwrap();
        fs::write(tree.join("a/b/c/f"), "").unwrap();
        let mut is_moved = false;
        let mut unread = 0;
        walk_within(open(&tree), 100, 1, &mut |step| {
            match step {
                WalkStep::Entry { name: b"f", .. } => {
                    fs::rename(tree.join("a/b/c"), outside.join("c")).unwrap();
                    is_moved = true;
                }
                WalkStep::Entry { name, .. } => assert_ne!(std::ffi::OsStr::from_bytes(name), "foreign"),
                WalkStep::Unread(_) => unread += 1,
                WalkStep::Left { .. } | WalkStep::TooDeep { .. } => {}
            }
            Ok(())
        })
        .unwrap();
        assert!(is_moved && unread == 1);
    }
}
