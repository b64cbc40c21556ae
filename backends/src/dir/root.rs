//! The root of a directory pool: resolves paths beneath it, and notices when the root is gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use crate::{Error, ErrorKind, PoolPath, Result, Side, Stat, Version};

use super::ROOT_DEVICE;
use super::stat::{stat_at, stat_fd, stat_fd_cached};

/// The kernel requests a retry if a rename raced with the walk.
const RESOLVE_ATTEMPTS: u32 = 16;
/// The longest path that the kernel takes in one call, including the terminator (`PATH_MAX`).
const PATH_BYTES: usize = libc::PATH_MAX as usize;

/// The directory of a pool.
#[derive(Debug)]
pub(super) struct RootDirectory {
    fd: OwnedFd,
    path: PathBuf,
    /// The root's attributes when it was opened.
    stat: Stat,
    pub(super) has_openat2: bool,
}

/// The directory in which one call works.
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

impl RootDirectory {
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

    /// The kernel's current device number of the root's file system.
    pub(super) fn device(&self) -> u64 {
        match self.stat.version {
            Version::Inode { dev, .. } => dev,
            Version::Tag { .. } => 0,
        }
    }

    /// A handle to a directory through which names in it are reached.
    pub(super) fn directory(&self, path: &PoolPath) -> rustix::io::Result<Dir<'_>> {
        if path.is_root() {
            return Ok(Dir::Root(self.fd()));
        }
        let dir = self.resolve(path, OFlags::PATH | OFlags::DIRECTORY)?;
        self.check(path, &dir)?;
        Ok(Dir::Opened(dir))
    }

    /// Fails with `NOENT` if the opened object is not the one that the path must name: the required object is gone.
    pub(super) fn check(&self, path: &PoolPath, opened: &OwnedFd) -> rustix::io::Result<()> {
        let Some(meant) = path.object() else { return Ok(()) };
        // The identity of an open object does not change, so no server is asked.
        let Some(mut found) = stat_fd_cached(opened)?.version.identity() else { return Ok(()) };
        if found.dev == self.device() && meant.dev == ROOT_DEVICE {
            found.dev = ROOT_DEVICE;
        }
        if found.is_same(meant) { Ok(()) } else { Err(Errno::NOENT) }
    }

    /// The directory that holds `path`, and its last name. `BUSY` for the root, as in the kernel.
    pub(super) fn slot<'a>(&'a self, path: &'a PoolPath) -> rustix::io::Result<(Dir<'a>, &'a [u8])> {
        let (Some(parent), Some(name)) = (path.parent(), path.name()) else {
            return Err(Errno::BUSY);
        };
        Ok((self.directory(&parent)?, name))
    }

    /// A handle to the object at `path`, or to a symlink itself; it gives access to attributes but not to content.
    pub(super) fn object(&self, path: &PoolPath) -> rustix::io::Result<OwnedFd> {
        if path.is_root() {
            return rustix::io::fcntl_dupfd_cloexec(self.fd(), 0);
        }
        let (dir, name) = self.slot(path)?;
        let object = openat(&dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        self.check(path, &object)?;
        Ok(object)
    }

    /// Opens a directory to read its entries or to sync it. Leaves its access time unchanged if allowed.
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
        // A path too long for one call is walked.
        if !self.has_openat2 || path.as_bytes().len() >= PATH_BYTES {
            return self.walk(path, flags);
        }
        for _ in 0..RESOLVE_ATTEMPTS {
            match openat2(&self.fd, path.as_bytes(), flags, Mode::empty(), beneath()) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                // A symlink in place of a directory: the pool's paths do not go through symlinks.
                Err(Errno::LOOP | Errno::XDEV) => return Err(Errno::NOTDIR),
                other => return other,
            }
        }
        self.walk(path, flags)
    }

    /// Like `openat2`, name by name, for kernels and sandboxes without it.
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

    /// The call that errors name.
    pub(super) fn call<'a>(&'a self, what: &'static str, path: &'a PoolPath) -> PathCall<'a> {
        PathCall { root: self, what, path }
    }

    /// Fails with `Unavailable` if the root is gone, unmounted, or covered by another mount. A name missing beneath
    /// it must not count as deleted then.
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
            // Some FUSE file systems always report a link count of 0.
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

/// One call on one path, as the context of its errors.
#[derive(Clone, Copy)]
pub(super) struct PathCall<'a> {
    root: &'a RootDirectory,
    what: &'static str,
    pub(super) path: &'a PoolPath,
}

impl PathCall<'_> {
    fn context(&self) -> String {
        format!("{} {} in {}", self.what, self.path, self.root.path.display())
    }

    /// An error that the pool itself decided on.
    pub(super) fn error(&self, kind: ErrorKind, why: &str) -> Error {
        let context = if why.is_empty() { self.context() } else { format!("{}: {why}", self.context()) };
        Error::new(kind, Side::Pool, context)
    }

    /// The error for an errno. An errno that a vanished root can cause becomes `Unavailable` if the root is gone.
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

    /// Refuses names that are reserved for pools.
    pub(super) fn check_names(&self) -> Result<()> {
        if self.path.is_reserved() {
            return Err(self.error(ErrorKind::InvalidInput, "names that start with .forebay~ are reserved"));
        }
        Ok(())
    }
}
