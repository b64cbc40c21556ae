//! Holds a scratch directory to its size on file systems without project quotas: its files are counted and, when it is
//! full, those that were written last become immutable, until there is room again.
//!
//! The kernel refuses a write to an immutable file with `EPERM`. Nothing else stops a process that has the file open.
//! Such a file cannot be removed either, so only as many as needed are taken: those written since the last count.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{FileType, IFlags, Mode, OFlags, ioctl_getflags, ioctl_setflags};

use super::tree::{kind_of, open_dir};
use super::walk::{WalkStep, walk};

/// Files that were changed in this time before the last count may be being written now. Users cannot set this time.
const RECENT: Duration = Duration::from_secs(10);
/// The most files of several names that a count remembers, some 20 bytes each. Beyond, each name counts.
const LINKED_MAX: usize = 1_000_000;

/// What is to be done with the files while they are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seal {
    /// They stay as they are.
    Keep,
    /// Those that are being written become immutable.
    Set,
    /// No file is immutable any more.
    Clear,
}

/// Returns the bytes that a directory occupies with everything below it. A file of several names counts once, as long as
/// there are at most [`LINKED_MAX`] such files. What is removed meanwhile, and what is below very many directories, is
/// passed over.
///
/// # Errors
/// The directory itself cannot be read.
pub fn count(dir: &Path, seal: Seal) -> io::Result<u64> {
    count_within(dir, seal, LINKED_MAX)
}

fn count_within(dir: &Path, seal: Seal, linked_max: usize) -> io::Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    let root = open_dir(rustix::fs::CWD, dir.as_os_str().as_bytes())?;
    let mut bytes = 0;
    let mut linked = HashSet::new();
    walk(root, |step| {
        let WalkStep::Entry { dir, name, stat } = step else { return Ok(()) };
        let kind = kind_of(stat);
        let id = (stat.st_dev, stat.st_ino);
        let mut is_first = || !linked.contains(&id) && (linked.len() >= linked_max || linked.insert(id));
        // What occupies nothing is not remembered: any number of such files fits.
        if stat.st_blocks > 0 && (stat.st_nlink == 1 || kind == FileType::Directory || is_first()) {
            bytes += stat.st_blocks as u64 * 512;
        }
        if kind == FileType::RegularFile && (seal == Seal::Clear || (seal == Seal::Set && is_recent(stat.st_ctime))) {
            set_immutable(dir, name, seal == Seal::Set);
        }
        Ok(())
    })?;
    Ok(bytes)
}

fn is_recent(ctime_secs: i64) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    ctime_secs as u64 + RECENT.as_secs() >= now.as_secs()
}

/// Sets or clears the immutable flag. A file system without it, or a daemon without the privilege, leaves it as it is.
pub(super) fn set_immutable(dir: impl AsFd, name: &[u8], on: bool) {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(dir, name, flags, Mode::empty()) else { return };
    let Ok(have) = ioctl_getflags(&file) else { return };
    let wanted = if on { have | IFlags::IMMUTABLE } else { have - IFlags::IMMUTABLE };
    if wanted != have {
        let _ = ioctl_setflags(&file, wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::OwnedFd;

    #[test]
    fn what_is_below_a_directory_is_counted_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (counted, other) = (dir.path().join("a"), dir.path().join("b"));
        fs::create_dir_all(counted.join("x/y")).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(other.join("large"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink(&other, counted.join("x/link")).unwrap();
        let empty = count(&counted, Seal::Keep).unwrap();
        fs::write(counted.join("x/y/f"), vec![1; 1 << 18]).unwrap();
        let grown = count(&counted, Seal::Keep).unwrap() - empty;
        assert!((1 << 18..(1 << 18) + 8192).contains(&grown), "{grown}");
        for number in 0..100 {
            fs::hard_link(counted.join("x/y/f"), counted.join(format!("x/{number}"))).unwrap();
        }
        let linked = count(&counted, Seal::Keep).unwrap() - empty;
        assert!(linked < (1 << 18) + 32_768, "a file with 101 names counts {linked} bytes");
    }

    #[test]
    fn a_file_that_is_remembered_counts_once_when_no_other_is_remembered_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let empty = count(dir.path(), Seal::Keep).unwrap();
        fs::write(dir.path().join("f"), vec![1; 1 << 18]).unwrap();
        for number in 0..10 {
            fs::hard_link(dir.path().join("f"), dir.path().join(format!("{number}"))).unwrap();
        }
        let counted = count_within(dir.path(), Seal::Keep, 1).unwrap() - empty;
        assert!(counted < (1 << 18) + 32_768, "{counted}");
    }

    #[test]
    fn what_is_too_deep_for_one_path_is_counted() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = OwnedFd::from(fs::File::open(root.path()).unwrap());
        let name = "d".repeat(250);
        for _ in 0..20 {
            rustix::fs::mkdirat(&dir, &*name, 0o700.into()).unwrap();
            dir = open_dir(&dir, name.as_bytes()).unwrap();
        }
        let empty = count(root.path(), Seal::Keep).unwrap();
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let mut file = fs::File::from(rustix::fs::openat(&dir, "f", flags, 0o600.into()).unwrap());
        io::Write::write_all(&mut file, &vec![1; 1 << 18]).unwrap();
        let grown = count(root.path(), Seal::Keep).unwrap() - empty;
        assert!(grown >= 1 << 18, "{grown}");
    }
}
