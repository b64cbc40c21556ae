//! The root of a directory pool: resolves paths beneath it, and notices when it is no longer there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use crate::{Error, ErrorKind, PoolPath, Result, Side, Stat, Version};

use super::ROOT_DEVICE;
use super::stat::{stat_at, stat_fd, stat_fd_cached};

/// The kernel asks for another try where a rename ran into the walk.
const RESOLVE_ATTEMPTS: u32 = 16;
/// What the kernel takes as one path, its end included (`PATH_MAX`).
const PATH_BYTES: usize = libc::PATH_MAX as usize;

/// The directory that a pool is.
#[derive(Debug)]
pub(super) struct Root {
    fd: OwnedFd,
    path: PathBuf,
    /// What the root was when it was opened.
    stat: Stat,
    pub(super) has_openat2: bool,
}

/// A directory that one call works in.
#[derive(Debug)]
pub(super) enum Dir<'a> {
    Root(BorrowedFd<'a>),
    Opened(OwnedFd),
}

impl AsFd for Dir<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Root(fd) => *fd,
            Self::Opened(fd) => fd.as_fd(),
        }
    }
}

impl Dir<'_> {
    /// A handle that outlives the borrow of the root.
    pub(super) fn into_owned(self) -> rustix::io::Result<OwnedFd> {
        match self {
            Self::Root(fd) => rustix::io::fcntl_dupfd_cloexec(fd, 0),
            Self::Opened(fd) => Ok(fd),
        }
    }
}

impl Root {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let fail = |errno: Errno, remedy: &str| {
            let what = format!("open the pool directory {}: {remedy}", path.display());
            Error::os(errno.raw_os_error(), Side::Pool, what)
        };
        let absolute = std::path::absolute(path).map_err(|error| {
            Error::io(error, Side::Pool, format!("make the pool directory {} absolute", path.display()))
        })?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(CWD, &absolute, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => fail(errno, "it does not exist; create it, or mount the file system that holds it"),
            Errno::NOTDIR => fail(errno, "it is not a directory; name the directory that holds the files"),
            Errno::ACCESS => fail(errno, "it may not be searched; grant this user the x permission on it"),
            _ => fail(errno, "check that its file system is mounted and its server answers"),
        })?;
        let stat = stat_fd(&fd).map_err(|errno| fail(errno, "it cannot be examined"))?;
        let probe = openat2(&fd, c".", flags, Mode::empty(), beneath());
        let has_openat2 = !matches!(probe, Err(Errno::NOSYS | Errno::PERM));
        Ok(Self { fd, path: absolute, stat, has_openat2 })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The kernel's number of the file system that the root is in, as of now.
    pub(super) fn device(&self) -> u64 {
        match self.stat.version {
            Version::Inode { dev, .. } => dev,
            Version::Tag { .. } => 0,
        }
    }

    /// A handle to a directory by which names in it are reached.
    pub(super) fn directory(&self, path: &PoolPath) -> rustix::io::Result<Dir<'_>> {
        if path.is_root() {
            return Ok(Dir::Root(self.fd()));
        }
        let dir = self.resolve(path, OFlags::PATH | OFlags::DIRECTORY)?;
        self.check(path, &dir)?;
        Ok(Dir::Opened(dir))
    }

    /// `NOENT` where what was opened is another object than the one that is meant: that one is not there.
    pub(super) fn check(&self, path: &PoolPath, opened: &OwnedFd) -> rustix::io::Result<()> {
        let Some(meant) = path.object() else { return Ok(()) };
        // What it is does not change while it is open: no server needs to be asked.
        let Some(mut found) = stat_fd_cached(opened)?.version.identity() else { return Ok(()) };
        if found.dev == self.device() && meant.dev == ROOT_DEVICE {
            found.dev = ROOT_DEVICE;
        }
        if found.is_same(meant) { Ok(()) } else { Err(Errno::NOENT) }
    }

    /// The directory that holds `path`, and its last name. `BUSY` for the root, as the kernel has it.
    pub(super) fn slot<'a>(&'a self, path: &'a PoolPath) -> rustix::io::Result<(Dir<'a>, &'a [u8])> {
        let (Some(parent), Some(name)) = (path.parent(), path.name()) else {
            return Err(Errno::BUSY);
        };
        Ok((self.directory(&parent)?, name))
    }

    /// A handle to whatever `path` names, a symlink itself among it, good for attributes but not for content.
    pub(super) fn object(&self, path: &PoolPath) -> rustix::io::Result<OwnedFd> {
        if path.is_root() {
            return rustix::io::fcntl_dupfd_cloexec(self.fd(), 0);
        }
        let (dir, name) = self.slot(path)?;
        let object = openat(&dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        self.check(path, &object)?;
        Ok(object)
    }

    /// A directory opened for reading its entries or syncing it; its access time is left alone where allowed.
    pub(super) fn open_directory(&self, path: &PoolPath) -> rustix::io::Result<OwnedFd> {
        let dir = self.directory(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat(&dir, c".", flags | OFlags::NOATIME, Mode::empty()) {
            Err(Errno::PERM) => openat(&dir, c".", flags, Mode::empty()),
            other => other,
        }
    }

    fn resolve(&self, path: &PoolPath, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        // A path longer than the kernel takes at once is walked.
        if !self.has_openat2 || path.as_bytes().len() >= PATH_BYTES {
            return self.walk(path, flags);
        }
        for _ in 0..RESOLVE_ATTEMPTS {
            match openat2(&self.fd, path.as_bytes(), flags, Mode::empty(), beneath()) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                // A symlink where a directory is needed: the pool's paths do not go through symlinks.
                Err(Errno::LOOP | Errno::XDEV) => return Err(Errno::NOTDIR),
                other => return other,
            }
        }
        self.walk(path, flags)
    }

    /// The same, name by name, for kernels and sandboxes without `openat2`.
    fn walk(&self, path: &PoolPath, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let mut dir = self.directory(&PoolPath::root())?;
        let mut names = path.components().peekable();
        while let Some(name) = names.next() {
            let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let flags = if names.peek().is_some() { step } else { flags };
            dir = Dir::Opened(openat(&dir, name, flags | OFlags::NOFOLLOW, Mode::empty())?);
        }
        dir.into_owned()
    }

    /// Names the call that errors are told about.
    pub(super) fn call<'a>(&'a self, what: &'static str, path: &'a PoolPath) -> Call<'a> {
        Call { root: self, what, path }
    }

    /// `Unavailable` where the root is gone, unmounted, or something else is mounted in its place: then
    /// nothing that is missing beneath it may be taken for deleted.
    pub(super) fn verify(&self) -> Result<()> {
        let gone = |why: String| {
            let path = self.path.display();
            Err(Error::new(
                ErrorKind::Unavailable,
                Side::Pool,
                format!("the pool directory {path} {why}; mount it again and check its server"),
            ))
        };
        match stat_fd(&self.fd) {
            Err(errno) => return gone(format!("does not answer ({errno})")),
            // Some FUSE file systems report no links at all, from the start.
            Ok(now) if now.nlink == 0 && self.stat.nlink > 0 => return gone("was removed".to_owned()),
            Ok(_) => {}
        }
        match stat_at(CWD, &self.path, AtFlags::empty()) {
            Err(errno) => gone(format!("is not found any more ({errno})")),
            Ok(now) if !now.version.same_object(&self.stat.version) => {
                gone("is another directory than the one that was opened; it was unmounted or replaced".to_owned())
            }
            Ok(_) => Ok(()),
        }
    }
}

fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

/// One call on one path, for its errors.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    root: &'a Root,
    what: &'static str,
    pub(super) path: &'a PoolPath,
}

impl Call<'_> {
    fn context(&self) -> String {
        format!("{} {} in {}", self.what, self.path, self.root.path.display())
    }

    /// An error of this pool's own judgement.
    pub(super) fn error(&self, kind: ErrorKind, why: &str) -> Error {
        let context = if why.is_empty() { self.context() } else { format!("{}: {why}", self.context()) };
        Error::new(kind, Side::Pool, context)
    }

    /// The error for an errno. What could come from a root that is gone is told as `Unavailable`.
    pub(super) fn failed(&self, errno: Errno) -> Error {
        let suspicious = matches!(
            errno,
            Errno::NOENT
                | Errno::STALE
                | Errno::NOTCONN
                | Errno::IO
                | Errno::NODEV
                | Errno::HOSTDOWN
                | Errno::SHUTDOWN
                | Errno::REMOTEIO
        );
        if suspicious && let Err(gone) = self.root.verify() {
            return gone.context(self.context());
        }
        Error::os(errno.raw_os_error(), Side::Pool, self.context())
    }

    /// Refuses names that belong to pools themselves.
    pub(super) fn check_names(&self) -> Result<()> {
        if self.path.is_reserved() {
            return Err(self.error(ErrorKind::InvalidInput, "names that start with .forebay~ are reserved"));
        }
        Ok(())
    }
}
