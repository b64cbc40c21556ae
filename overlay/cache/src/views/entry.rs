//! The entries of a view, and how they look.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side, Time};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags, chmodat, chownat, linkat,
    lremovexattr, lsetxattr, mkdirat, mknodat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use crate::scratch::{TreeXattrs, stat_of, xattr_names};
use crate::{ContentId, ContentStore, CopyEnd};

/// What an entry is, and what programs see of it beside its content.
#[derive(Debug, Clone)]
pub struct EntryLook {
    pub kind: FileKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub rdev: u64,
    pub target: Option<Box<[u8]>>,
    pub atime: Time,
    pub mtime: Time,
    /// Extended attributes and ACLs: name and value.
    pub xattrs: TreeXattrs,
}

/// What became of a file that was to be laid into a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaidFile {
    Linked,
    /// It lies on another device, or has too many names. The copy occupies these bytes, with its attributes.
    Copied(u64),
}

impl ContentStore {
    /// Gives a content file a name in a view on a device.
    ///
    /// # Errors
    /// `CrossDevice` if it cannot have one there, and copies are not allowed; `Corrupt` if it has another size than its
    /// record.
    pub fn lay_file(
        &self,
        content: ContentId,
        device: usize,
        (dir, name): (&OwnedFd, &[u8]),
        look: &EntryLook,
        allow_copy: bool,
    ) -> Result<LaidFile> {
        let path = self.path(content)?;
        // Tiers count their files, also if they lie on one file system.
        let is_in_other_tier = self.has_tiers() && self.device_of(content) != device;
        let linked = match is_in_other_tier {
            true => Err(Errno::XDEV),
            false => linkat(CWD, &path, dir, name, AtFlags::empty()),
        };
        let laid = match linked {
            Ok(()) => LaidFile::Linked,
            Err(Errno::XDEV | Errno::MLINK | Errno::OPNOTSUPP | Errno::PERM) if allow_copy => {
                self.copy_into_view(content, dir, name)?;
                // The bytes are known when it has its attributes.
                LaidFile::Copied(0)
            }
            Err(Errno::XDEV) => return Err(not_linked(name, "its content lies on another device")),
            Err(Errno::MLINK) => return Err(not_linked(name, "it has the most hard links that its device allows")),
            Err(Errno::OPNOTSUPP | Errno::PERM) => return Err(not_linked(name, "its device has no hard links")),
            Err(e) => return Err(failed(name, e.into())),
        };
        let shown = show_file(dir, name, look);
        if laid == LaidFile::Linked {
            return shown.map(|()| laid);
        }
        let counted = shown.and_then(|()| stat_of(dir, name).map_err(|e| failed(name, e)));
        if counted.is_err() {
            // Nothing counts it.
            let _ = unlinkat(dir, name, AtFlags::empty());
        }
        counted.map(|stat| LaidFile::Copied(stat.st_blocks as u64 * 512))
    }

    /// Copies a content file into a view.
    fn copy_into_view(&self, content: ContentId, dir: &OwnedFd, name: &[u8]) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600));
        let to = File::from(made.map_err(|e| failed(name, e.into()))?);
        let copied = match self.copy_content(content, &to, || true) {
            Ok(CopyEnd::Whole(_)) => return Ok(()),
            Ok(CopyEnd::Stopped) => Err(failed(name, io::ErrorKind::Interrupted.into())),
            Err(error) => Err(error),
        };
        // Nothing counts it.
        let _ = unlinkat(dir, name, AtFlags::empty());
        copied
    }
}

/// Gives the name of a content file the rights, times and attributes that it has in the view.
fn show_file(dir: &OwnedFd, name: &[u8], look: &EntryLook) -> Result<()> {
    let stat = stat_of(dir, name).map_err(|e| failed(name, e))?;
    if stat.st_size as u64 != look.size {
        let what = format!(
            "{}: its content file has {} bytes instead of {}: evict it, and stage it again",
            name.escape_ascii(),
            stat.st_size,
            look.size
        );
        return Err(Error::new(ErrorKind::Corrupt, Side::Cache, what));
    }
    remove_other_xattrs(dir, name, look).and_then(|()| set_look(dir, name, look, &stat)).map_err(|e| failed(name, e))
}

/// Removes the attributes that an earlier view, or a scratch directory, left on a content file.
fn remove_other_xattrs(dir: &OwnedFd, name: &[u8], look: &EntryLook) -> io::Result<()> {
    let path = proc_path(dir, name);
    for found in xattr_names(&path)? {
        if look.xattrs.iter().all(|(known, _)| **known != *found) {
            match lremovexattr(&*path, &*found) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Makes an entry without content. A directory is open to the daemon alone until [`finish_directory`].
pub fn lay_other(dir: &OwnedFd, name: &[u8], look: &EntryLook) -> Result<()> {
    let made = || -> io::Result<()> {
        match look.kind {
            FileKind::Directory => return Ok(mkdirat(dir, name, Mode::from_raw_mode(0o700))?),
            FileKind::Symlink => symlinkat(look.target.as_deref().unwrap_or_default(), dir, name)?,
            kind => mknodat(dir, name, file_type(kind), Mode::empty(), look.rdev)?,
        }
        set_look(dir, name, look, &stat_of(dir, name)?)
    };
    made().map_err(|e| failed(name, e))
}

/// Gives a directory its rights and times, after its entries are there.
pub fn finish_directory(view: &OwnedFd, path: &[u8], look: &EntryLook) -> Result<()> {
    stat_of(view, path).and_then(|stat| set_look(view, path, look, &stat)).map_err(|e| failed(path, e))
}

/// Removes a name that a view gave to a file. Returns the bytes that are free now. A content file that keeps another name
/// keeps the rights that the view gave it: only the daemon's user reaches it there.
pub(super) fn remove_link(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<u64> {
    let stat = stat_of(dir, name)?;
    unlinkat(dir, name, AtFlags::empty())?;
    Ok(if stat.st_nlink == 1 { stat.st_blocks as u64 * 512 } else { 0 })
}

fn set_look(dir: &OwnedFd, name: &[u8], look: &EntryLook, have: &Stat) -> io::Result<()> {
    if (have.st_uid, have.st_gid) != (look.uid, look.gid) {
        let (uid, gid) = (Uid::from_raw(look.uid), Gid::from_raw(look.gid));
        chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    if look.kind != FileKind::Symlink {
        // After the owner: a change of the owner clears set-id bits.
        chmodat(dir, name, Mode::from_raw_mode(look.mode & 0o7777), AtFlags::empty())?;
        for (attribute, value) in &look.xattrs {
            lsetxattr(&*proc_path(dir, name), &**attribute, value, XattrFlags::empty())?;
        }
    }
    let spec = |time: Time| Timespec { tv_sec: time.secs, tv_nsec: i64::from(time.nanos) };
    let times = Timestamps { last_access: spec(look.atime), last_modification: spec(look.mtime) };
    Ok(utimensat(dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// The path of an entry for the system calls that take no directory.
fn proc_path(dir: &OwnedFd, name: &[u8]) -> Vec<u8> {
    [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name].concat()
}

fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharacterDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Directory => FileType::Directory,
        FileKind::File => FileType::RegularFile,
    }
}

fn not_linked(name: &[u8], why: &str) -> Error {
    let what = format!("{}: {why}: --allow-copy copies such files into the view", name.escape_ascii());
    Error::new(ErrorKind::CrossDevice, Side::Cache, what)
}

fn failed(name: &[u8], error: io::Error) -> Error {
    Error::io(error, Side::Cache, name.escape_ascii().to_string())
}
