//! The entries of a tree that its user may still be changing: found from open directories, without following links.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use forebay_backends::Time;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};

use crate::ContentId;

/// Extended attributes: name and value.
pub(crate) type TreeXattrs = Vec<(Box<[u8]>, Box<[u8]>)>;

/// An entry of a tree.
#[derive(Debug, Clone)]
pub struct TreeEntry {
    /// The place of its directory in the list; `None` for the top of the tree. A directory comes before its entries.
    pub parent: Option<usize>,
    pub name: Vec<u8>,
    pub kind: TreeKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub atime: Time,
    pub mtime: Time,
    /// `user.*` attributes and ACLs.
    pub xattrs: TreeXattrs,
    /// Device and inode.
    pub(super) identity: (u64, u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeKind {
    Directory,
    /// A regular file. The bytes that it occupies are known after [`super::DetachedTree::move_into_store`].
    File {
        content: ContentId,
        occupied_bytes: u64,
    },
    /// Another name of the file at this place in the list.
    HardLink {
        of: usize,
    },
    Symlink {
        target: Vec<u8>,
    },
    /// A FIFO, a socket or a device.
    Special {
        kind: FileType,
        rdev: u64,
    },
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) fn open_dir(at: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(at, path, DIRECTORY, Mode::empty())?)
}

/// Opens a directory below another one. No part of the path may be a symbolic link, or lie on another file system.
pub(crate) fn open_below(at: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    let resolve =
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    Ok(rustix::fs::openat2(at, path, DIRECTORY, Mode::empty(), resolve)?)
}

pub(crate) fn names_of(dir: &OwnedFd) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

pub(crate) fn stat_of(dir: impl AsFd, name: &[u8]) -> io::Result<Stat> {
    Ok(rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

pub(crate) fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(super) fn entry_of(dir: &OwnedFd, name: &[u8], parent: Option<usize>) -> io::Result<TreeEntry> {
    let stat = stat_of(dir, name)?;
    let kind = match kind_of(&stat) {
        FileType::Directory => TreeKind::Directory,
        FileType::RegularFile => TreeKind::File { content: ContentId(0), occupied_bytes: 0 },
        FileType::Symlink => TreeKind::Symlink { target: rustix::fs::readlinkat(dir, name, Vec::new())?.into_bytes() },
        kind => TreeKind::Special { kind, rdev: stat.st_rdev },
    };
    let xattrs = match kind {
        TreeKind::Symlink { .. } => Vec::new(),
        _ => xattrs_of(dir, name)?,
    };
    let time = |secs: i64, nanos: u64| Time { secs, nanos: nanos as u32 };
    Ok(TreeEntry {
        parent,
        name: name.to_vec(),
        kind,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        xattrs,
        identity: (stat.st_dev, stat.st_ino),
    })
}

/// Returns the names of the attributes of a file that users set. None if the file system has none, or the file is gone.
pub(crate) fn xattr_names(path: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    use rustix::io::Errno;
    let mut listed = Vec::new();
    // Most files have few.
    for size in [1024, 65_536] {
        let mut names = vec![0u8; size];
        match rustix::fs::llistxattr(path, &mut names) {
            Ok(length) => {
                names.truncate(length);
                listed = names;
                break;
            }
            Err(Errno::RANGE) => {}
            Err(Errno::OPNOTSUPP | Errno::NOENT) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
    }
    let is_of_user = |name: &&[u8]| name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_");
    Ok(listed.split(|b| *b == 0).filter(is_of_user).map(<[u8]>::to_vec).collect())
}

/// Returns the attributes that users set. None if the file system has none.
fn xattrs_of(dir: &OwnedFd, name: &[u8]) -> io::Result<TreeXattrs> {
    use rustix::io::Errno;
    // No system call takes a directory and a name.
    let path = [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name].concat();
    let mut all = Vec::new();
    for name in xattr_names(&path)? {
        let mut value = vec![0u8; 65_536];
        match rustix::fs::lgetxattr(path.as_slice(), name.as_slice(), &mut value) {
            Ok(length) => all.push((name.into(), value[..length].into())),
            Err(Errno::NODATA | Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}
