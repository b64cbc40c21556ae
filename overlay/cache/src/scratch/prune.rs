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

/// Removes an entry of a directory, with everything below it. Returns whether it is gone. Tells the bytes that each removed
/// file occupied, if it had no other name.
///
/// # Errors
/// The directory cannot be read.
pub fn prune(base: &OwnedFd, name: &[u8], what: Prune, mut freed: impl FnMut(u64)) -> io::Result<bool> {
    for round in 0..ROUNDS {
        let is_dir = match stat_of(base, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(e) => return Err(e),
            Ok(stat) => kind_of(&stat) == FileType::Directory,
        };
        if !is_dir {
            return Ok(remove_file(base, name, what));
        }
        if !prune_once(base, name, what, round, &mut freed) {
            return Ok(stat_of(base, name).is_err());
        }
    }
    Ok(false)
}

/// Goes through a tree once. Returns whether another round may find more to remove.
fn prune_once(base: &OwnedFd, top: &[u8], what: Prune, round: usize, freed: &mut dyn FnMut(u64)) -> bool {
    let Ok(dir) = open_below(base, top) else { return false };
    // A directory that is opened again may pass over entries, because others of it were removed: on tmpfs before Linux 6.6.
    let (mut moved, mut is_torn, mut has_removed) = (0, false, false);
    let walked = walk(dir, |step| {
        match step {
            WalkStep::Entry { dir, name, stat } if kind_of(stat) != FileType::Directory => {
                let is_removed = remove_file(dir, name, what);
                has_removed |= is_removed;
                if is_removed && stat.st_nlink == 1 {
                    freed(stat.st_blocks as u64 * 512);
                }
            }
            WalkStep::TooDeep { dir, name } if what == Prune::Everything => {
                // It goes on at the top.
                let up = [top, format!("/deep-{round}-{moved}").as_bytes()].concat();
                moved += usize::from(rustix::fs::renameat(dir, name, base, up.as_slice()).is_ok());
            }
            WalkStep::Left { dir, name } => {
                has_removed |= rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR).is_ok();
            }
            // Its user has moved a directory away that the walk was in.
            WalkStep::Unread(error) => is_torn |= error.kind() == io::ErrorKind::ResourceBusy,
            WalkStep::Entry { .. } | WalkStep::TooDeep { .. } => {}
        }
        Ok(())
    });
    let _ = rustix::fs::unlinkat(base, top, AtFlags::REMOVEDIR);
    walked.is_ok() && (moved > 0 || is_torn || has_removed)
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
        assert!(prune(&base, b"t", Prune::Everything, |_| ()).unwrap());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        assert!(prune(&base, b"t", Prune::Everything, |_| ()).unwrap(), "nothing is there any more");
    }

    #[test]
    fn what_each_file_occupied_is_told_unless_it_has_another_name() {
        let root = tempfile::tempdir().unwrap();
        let base = OwnedFd::from(File::open(root.path()).unwrap());
        let tree = root.path().join("t");
        fs::create_dir_all(tree.join("a")).unwrap();
        fs::write(tree.join("a/twice"), vec![1; 1 << 16]).unwrap();
        fs::hard_link(tree.join("a/twice"), tree.join("a/again")).unwrap();
        fs::write(tree.join("kept"), vec![1; 1 << 17]).unwrap();
        fs::hard_link(tree.join("kept"), root.path().join("kept")).unwrap();
        let mut told = 0;
        assert!(prune(&base, b"t", Prune::Everything, |bytes| told += bytes).unwrap());
        assert!((1 << 16..1 << 17).contains(&told), "{told}");
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
        assert!(!prune(&base, b"t", Prune::SparesFiles, |_| ()).unwrap());
        assert!(tree.join("a/b/only").exists() && !tree.join("c").exists());
        assert_eq!(fs::read(root.path().join("other")).unwrap(), b"y");
    }
}
