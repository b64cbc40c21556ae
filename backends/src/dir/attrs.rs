//! Attributes and extended attributes of objects.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags, chmod, chownat, fchmod, fchown,
    fgetxattr, flistxattr, fremovexattr, fsetxattr, fsync, futimens, getxattr, listxattr, open, removexattr, setxattr,
    utimensat,
};
use rustix::io::Errno;

use crate::{Attrs, Error, FileKind, SetAttrs, Time, XATTRS_MAX_BYTES};

use super::root::PathCall;
use super::stat::stat_fd;
use super::trial::refused;

/// The kernel's limit for a list of names and for a value.
const XATTR_BUFFER_BYTES: usize = 64 * 1024;

/// Attributes that a file system keeps for its own use; they mean nothing on another object and are not copied.
const INTERNAL_XATTRS: [&[u8]; 12] = [
    b"lustre.",
    b"trusted.lov",
    b"trusted.lma",
    b"trusted.link",
    b"trusted.fid",
    b"trusted.som",
    b"trusted.hsm",
    b"trusted.lmv",
    b"trusted.dmv",
    b"trusted.version",
    b"trusted.overlay.",
    b"user.fhgfs",
];

/// Why the attributes of an object could not be set.
#[derive(Debug)]
pub(super) struct Undressed {
    errno: Errno,
    /// The extended attribute that was refused.
    attribute: Option<Vec<u8>>,
}

impl From<Errno> for Undressed {
    fn from(errno: Errno) -> Self {
        Self { errno, attribute: None }
    }
}

impl Undressed {
    pub(super) fn of(self, call: PathCall<'_>) -> Error {
        let error = call.failed(self.errno).context("set the attributes");
        match self.attribute {
            Some(name) => refused(error, &name),
            None => error,
        }
    }
}

/// An object by a handle. A handle without access to the content (`O_PATH`) is used through `/proc/self/fd`, which
/// names the object itself, even a symlink.
pub(super) struct AttributeTarget<'a> {
    fd: BorrowedFd<'a>,
    by_proc: Option<String>,
    kind: FileKind,
}

impl<'a> AttributeTarget<'a> {
    pub(super) fn opened(fd: BorrowedFd<'a>, kind: FileKind) -> Self {
        Self { fd, by_proc: None, kind }
    }

    pub(super) fn handle(fd: BorrowedFd<'a>, kind: FileKind) -> Self {
        Self { fd, by_proc: Some(format!("/proc/self/fd/{}", fd.as_raw_fd())), kind }
    }

    /// Sets the attributes of a new object. The owner comes before extended attributes (a change of owner drops
    /// `security.capability`), these before the mode (ACLs change it) and the times last.
    pub(super) fn apply(&self, attrs: &Attrs, may_chown: bool) -> Result<(), Undressed> {
        self.chown(Some(attrs.uid), Some(attrs.gid), may_chown)?;
        if self.kind != FileKind::Symlink {
            self.remove_inherited_acls(&attrs.xattrs)?;
        }
        for (name, value) in &attrs.xattrs {
            self.set_xattr(name, value).map_err(|errno| Undressed { errno, attribute: Some(name.clone()) })?;
        }
        if self.kind != FileKind::Symlink {
            self.chmod(attrs.mode)?;
        }
        Ok(self.set_times(Some(attrs.atime), Some(attrs.mtime))?)
    }

    /// Changes everything but the size.
    pub(super) fn change(&self, changes: &SetAttrs, may_chown: bool) -> rustix::io::Result<()> {
        if changes.mode.is_some() && self.kind == FileKind::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            if let Some(mode) = changes.mode {
                // The new owner and group have no rights meanwhile that only the old ones had.
                let old = stat_fd(self.fd)?.mode;
                if old & mode & 0o777 != old & 0o777 {
                    self.chmod(old & mode & 0o777)?;
                }
            }
            self.chown(changes.uid, changes.gid, may_chown)?;
        }
        if let Some(mode) = changes.mode {
            self.chmod(mode)?;
        }
        if changes.atime.is_some() || changes.mtime.is_some() {
            self.set_times(changes.atime, changes.mtime)?;
        }
        Ok(())
    }

    fn chown(&self, uid: Option<u32>, gid: Option<u32>, may_chown: bool) -> rustix::io::Result<()> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        let done = match &self.by_proc {
            None => fchown(self.fd, uid, gid),
            Some(_) => chownat(self.fd, c"", uid, gid, AtFlags::EMPTY_PATH),
        };
        match done {
            Err(Errno::PERM) if !may_chown => Ok(()),
            other => other,
        }
    }

    pub(super) fn chmod(&self, mode: u32) -> rustix::io::Result<()> {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        match &self.by_proc {
            None => fchmod(self.fd, mode),
            Some(path) => chmod(path, mode),
        }
    }

    pub(super) fn set_times(&self, atime: Option<Time>, mtime: Option<Time>) -> rustix::io::Result<()> {
        let times = Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) };
        match &self.by_proc {
            None => futimens(self.fd, &times),
            Some(path) => utimensat(CWD, path, &times, AtFlags::empty()),
        }
    }

    /// Makes changed attributes durable. Symlinks and special files cannot be synced alone; the sync of their
    /// directory includes them.
    pub(super) fn sync(&self) -> rustix::io::Result<()> {
        let Some(path) = &self.by_proc else { return fsync(self.fd) };
        if !matches!(self.kind, FileKind::File | FileKind::Directory) {
            return Ok(());
        }
        match open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()) {
            Ok(opened) => fsync(opened).or_else(|errno| if errno == Errno::INVAL { Ok(()) } else { Err(errno) }),
            // The right to change attributes does not include the right to read.
            Err(Errno::ACCESS) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn set_xattr(&self, name: &[u8], value: &[u8]) -> rustix::io::Result<()> {
        match &self.by_proc {
            None => fsetxattr(self.fd, name, value, XattrFlags::empty()),
            Some(path) => setxattr(path, name, value, XattrFlags::empty()),
        }
    }

    pub(super) fn remove_xattr(&self, name: &[u8]) -> rustix::io::Result<()> {
        match &self.by_proc {
            None => fremovexattr(self.fd, name),
            Some(path) => removexattr(path, name),
        }
    }

    /// All extended attributes except those that the file system keeps for its own use.
    pub(super) fn xattrs(&self) -> rustix::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut buffer = Vec::with_capacity(XATTR_BUFFER_BYTES);
        match &self.by_proc {
            None => flistxattr(self.fd, spare_capacity(&mut buffer))?,
            Some(path) => listxattr(path, spare_capacity(&mut buffer))?,
        };
        let names: Vec<Vec<u8>> = buffer.split(|b| *b == 0).map(<[u8]>::to_vec).collect();
        let (mut xattrs, mut bytes) = (Vec::new(), 0);
        for name in names {
            if name.is_empty() || INTERNAL_XATTRS.iter().any(|internal| name.starts_with(internal)) {
                continue;
            }
            buffer.clear();
            let got = match &self.by_proc {
                None => fgetxattr(self.fd, &name[..], spare_capacity(&mut buffer)),
                Some(path) => getxattr(path, &name[..], spare_capacity(&mut buffer)),
            };
            match got {
                Ok(_) => {
                    bytes += name.len() + buffer.len();
                    if bytes > XATTRS_MAX_BYTES {
                        return Err(Errno::TOOBIG);
                    }
                    xattrs.push((name, buffer.clone()));
                }
                // Removed since it was listed, or listed but hidden from this process.
                Err(Errno::NODATA) => {}
                Err(Errno::PERM | Errno::ACCESS) if !name.starts_with(b"user.") => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(xattrs)
    }

    /// Removes the ACLs that the file system derived from the directory's default ACL and that `keep` lacks.
    /// Inheritance was decided when the object was first created.
    fn remove_inherited_acls(&self, keep: &[(Vec<u8>, Vec<u8>)]) -> rustix::io::Result<()> {
        let present = match self.xattrs() {
            Err(Errno::OPNOTSUPP) => return Ok(()),
            other => other?,
        };
        let inherited =
            |name: &[u8]| name.starts_with(b"system.posix_acl_") && !keep.iter().any(|(kept, _)| *kept == name);
        for (name, _) in present.iter().filter(|(name, _)| inherited(name)) {
            match self.remove_xattr(name) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Removes the extended attributes that `keep` lacks, as the replacement of the object would have done.
    pub(super) fn remove_other_xattrs(&self, keep: &[(Vec<u8>, Vec<u8>)]) -> rustix::io::Result<()> {
        let present = match self.xattrs() {
            Err(Errno::OPNOTSUPP) => return Ok(()),
            other => other?,
        };
        for (name, _) in present {
            if keep.iter().any(|(kept, _)| *kept == name) || name == b"security.selinux" {
                continue;
            }
            match self.remove_xattr(&name) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

fn timespec(time: Option<Time>) -> Timespec {
    match time {
        Some(time) => Timespec { tv_sec: time.secs, tv_nsec: i64::from(time.nanos) },
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    }
}

/// Applies attributes to a new object; the caller must have created the object behind `fd`.
pub(super) fn dress<Fd: AsFd>(fd: Fd, kind: FileKind, attrs: &Attrs, may_chown: bool) -> Result<(), Undressed> {
    let target = AttributeTarget::handle(fd.as_fd(), kind);
    target.apply(attrs, may_chown)?;
    Ok(target.sync()?)
}
