//! Removes a tree that its user may still be changing, whatever its size and depth.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::limit::set_immutable;
use super::tree::{kind_of, open_below, stat_of};
use super::walk::{WalkStep, walk};

/// How often the tree is gone through, at most: its user may go on to make entries.
const ROUNDS: usize = 1_000;

/// What is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prune {
    Everything,
    /// Not files that have one name, and not what holds them.
    SparesFiles,
}

/// Removes an entry of a directory, with everything below it. Returns whether it is gone.
///
/// # Errors
/// The directory cannot be read.
pub fn prune(base: &OwnedFd, name: &[u8], what: Prune) -> io::Result<bool> {
    for round in 0..ROUNDS {
        let is_dir = match stat_of(base, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(e) => return Err(e),
            Ok(stat) => kind_of(&stat) == FileType::Directory,
        };
        if !is_dir {
            return Ok(remove_file(base, name, what));
        }
        if !prune_once(base, name, what, round) {
            return Ok(stat_of(base, name).is_err());
        }
    }
    Ok(false)
}

/// Goes through a tree once. Returns whether another round may find more to remove.
fn prune_once(base: &OwnedFd, top: &[u8], what: Prune, round: usize) -> bool {
    let Ok(dir) = open_below(base, top) else { return false };
    let (mut moved, mut is_torn) = (0, false);
    let walked = walk(dir, |step| {
        match step {
            WalkStep::Entry { dir, name, stat } if kind_of(stat) != FileType::Directory => {
                remove_file(dir, name, what);
            }
            WalkStep::TooDeep { dir, name } if what == Prune::Everything => {
                // It goes on at the top.
                let up = [top, format!("/deep-{round}-{moved}").as_bytes()].concat();
                moved += usize::from(rustix::fs::renameat(dir, name, base, up.as_slice()).is_ok());
            }
            WalkStep::Left { dir, name } => _ = rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR),
            // Its user has moved a directory away that the walk was in.
            WalkStep::Unread(error) => is_torn |= error.kind() == io::ErrorKind::ResourceBusy,
            WalkStep::Entry { .. } | WalkStep::TooDeep { .. } => {}
        }
        Ok(())
    });
    let _ = rustix::fs::unlinkat(base, top, AtFlags::REMOVEDIR);
    walked.is_ok() && (moved > 0 || is_torn)
}

fn remove_file(dir: impl AsFd, name: &[u8], what: Prune) -> bool {
    let dir = dir.as_fd();
    let is_spared =
        || stat_of(dir, name).is_ok_and(|stat| kind_of(&stat) == FileType::RegularFile && stat.st_nlink < 2);
    if what == Prune::SparesFiles && is_spared() {
        return false;
    }
    let remove = || rustix::fs::unlinkat(dir, name, AtFlags::empty());
    let removed = match remove() {
        Err(Errno::PERM) => {
            set_immutable(dir, name, false);
            remove()
        }
        other => other,
    };
    matches!(removed, Ok(()) | Err(Errno::NOENT))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn a_tree_of_any_depth_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let base = OwnedFd::from(File::open(root.path()).unwrap());
        fs::create_dir(root.path().join("t")).unwrap();
        let mut dir = OwnedFd::from(File::open(root.path().join("t")).unwrap());
        for level in 0..10_500 {
            rustix::fs::mkdirat(&dir, "directory", 0o700.into()).unwrap();
            rustix::fs::mkdirat(&dir, format!("beside-{level}"), 0o700.into()).unwrap();
            dir = open_below(&dir, b"directory").unwrap();
        }
        std::os::unix::fs::symlink("/", root.path().join("t/link")).unwrap();
        assert!(prune(&base, b"t", Prune::Everything).unwrap());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        assert!(prune(&base, b"t", Prune::Everything).unwrap(), "nothing is there any more");
    }

    #[test]
    fn a_file_with_one_name_may_be_spared() {
        let root = tempfile::tempdir().unwrap();
        let base = OwnedFd::from(File::open(root.path()).unwrap());
        let tree = root.path().join("t");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir_all(tree.join("c")).unwrap();
        fs::write(tree.join("a/b/only"), "x").unwrap();
        fs::write(root.path().join("other"), "y").unwrap();
        fs::hard_link(root.path().join("other"), tree.join("c/linked")).unwrap();
        assert!(!prune(&base, b"t", Prune::SparesFiles).unwrap());
        assert!(tree.join("a/b/only").exists() && !tree.join("c").exists());
        assert_eq!(fs::read(root.path().join("other")).unwrap(), b"y");
    }
}
