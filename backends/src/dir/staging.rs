//! The temporary file that receives a new object's content before the object takes its name.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, fsync, ftruncate, openat, unlinkat};
use rustix::io::{Errno, pwrite};

use crate::unfinished::unique_name;
use crate::{Attrs, FileKind, Piece, Result, Stat};

use super::attrs::AttributeTarget;
use super::root::{PathCall, RootDirectory};
use super::stat::{stat_fd, stat_name};

const NAME_ATTEMPTS: u32 = 1_000;

/// Writes all of `data`; continues after a short write.
pub(super) fn write_all<Fd: AsFd>(file: Fd, mut data: &[u8], mut offset: u64) -> rustix::io::Result<()> {
    while !data.is_empty() {
        match pwrite(&file, data, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                data = &data[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The byte that is locked while the file may be taken back; no program locks just this one.
fn claim_of(kind: libc::c_int) -> libc::flock {
    // SAFETY: the structure consists of numbers, for which zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    (lock.l_start, lock.l_len) = (libc::off_t::MAX - 1, 1);
    lock
}

/// Takes or releases the claim. It belongs to the open file description (`fcntl(2)`, `F_OFD_SETLK`), so that it also
/// works between pools of one process.
fn set_claim(file: &OwnedFd, kind: libc::c_int) -> rustix::io::Result<()> {
    let lock = claim_of(kind);
    // SAFETY: the call takes a structure that outlives it.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if rc < 0 { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)) } else { Ok(()) }
}

fn is_claimed(file: &OwnedFd) -> bool {
    let mut lock = claim_of(libc::F_RDLCK);
    // SAFETY: the call takes a structure that outlives it, and writes only to that structure.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    let ours = claim_of(libc::F_WRLCK);
    rc == 0 && (lock.l_type, lock.l_start, lock.l_len) == (ours.l_type, ours.l_start, ours.l_len)
}

/// A file without a public name. It is removed when this is dropped, unless its content was published.
#[derive(Debug)]
pub(super) struct TempFile {
    pub(super) file: OwnedFd,
    pub(super) dir: OwnedFd,
    pub(super) temp: Vec<u8>,
    /// The temporary name refers to our own file, which we may remove.
    pub(super) owned: bool,
    /// Closing the file and removing a name may wait for a server, and is then done on a blocking thread.
    remote: bool,
    /// It may have got its public name, even if the call that gave it failed.
    may_be_public: AtomicBool,
}

/// A file that cannot be removed now is left to [`DirPool::sweep`](super::DirPool::sweep).
fn discard(dir: &OwnedFd, temp: &[u8]) {
    let _ = unlinkat(dir, temp, AtFlags::empty());
}

/// A second handle to a directory. Closing it asks no server.
fn again(dir: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(dir, 0)
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let runtime = tokio::runtime::Handle::try_current().ok().filter(|_| self.remote);
        match (runtime, again(&self.dir), again(&self.dir)) {
            (Some(runtime), Ok(dir), Ok(other)) => {
                let temp = std::mem::take(&mut self.temp);
                let file = std::mem::replace(&mut self.file, other);
                let is_ours = !*self.may_be_public.get_mut();
                runtime.spawn_blocking(move || {
                    if is_ours {
                        // Closing it would send what is not written back yet.
                        let _ = ftruncate(&file, 0);
                    }
                    drop(file);
                    discard(&dir, &temp);
                });
            }
            _ => discard(&self.dir, &self.temp),
        }
    }
}

impl TempFile {
    /// Creates an empty temporary file in the directory that will hold `call`'s path.
    pub(super) fn create(root: &RootDirectory, call: PathCall<'_>, remote: bool) -> Result<Self> {
        let opened = root.slot(call.path).and_then(|(dir, name)| {
            // Checked before the content is written, not after.
            if name.len() > 255 {
                return Err(Errno::NAMETOOLONG);
            }
            dir.into_owned()
        });
        let dir = opened.map_err(|errno| call.failed(if errno == Errno::BUSY { Errno::ISDIR } else { errno }))?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        for _ in 0..NAME_ATTEMPTS {
            let temp = unique_name();
            match openat(&dir, &temp[..], flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => {
                    return Ok(Self { file, dir, temp, owned: true, remote, may_be_public: AtomicBool::new(false) });
                }
                // A process with our number left it, before a restart or in another container.
                Err(Errno::EXIST | Errno::INTR) => {}
                Err(errno) => return Err(call.failed(errno)),
            }
        }
        Err(call.failed(Errno::EXIST))
    }

    pub(super) fn write(&self, call: PathCall<'_>, pieces: &[Piece]) -> Result<()> {
        for piece in pieces {
            write_all(&self.file, &piece.data, piece.offset).map_err(|errno| {
                call.failed(errno).context(format!("write {} bytes at {}", piece.data.len(), piece.offset))
            })?;
        }
        Ok(())
    }

    /// Sets size and attributes and makes the content durable. Afterwards only the name is missing.
    pub(super) fn finish(&self, call: PathCall<'_>, size: u64, attrs: &Attrs, may_chown: bool) -> Result<()> {
        self.may_be_public.store(true, Ordering::Relaxed);
        ftruncate(&self.file, size).map_err(|errno| call.failed(errno))?;
        let target = AttributeTarget::opened(self.file.as_fd(), FileKind::File);
        target.apply(attrs, may_chown).map_err(|why| why.of(call))?;
        fsync(&self.file).map_err(|errno| call.failed(errno).context("make the content durable"))
    }

    /// Until [`Self::confirm`], or the end of the process, shows other writers that the file may be taken back. On a
    /// file system without locks they do not see it.
    pub(super) fn claim(&self) {
        let _ = set_claim(&self.file, libc::F_WRLCK);
    }

    pub(super) fn confirm(&self) {
        let _ = set_claim(&self.file, libc::F_UNLCK);
    }

    /// Whether another writer has claimed the file at the temporary name.
    pub(super) fn temp_is_claimed(&self) -> bool {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        openat(&self.dir, &self.temp[..], flags, Mode::empty()).is_ok_and(|file| is_claimed(&file))
    }

    /// The attributes of the file at the temporary name.
    pub(super) fn stat_temp(&self) -> rustix::io::Result<Stat> {
        stat_name(&self.dir, &self.temp)
    }

    /// The attributes of the staged file itself, whatever its names.
    pub(super) fn stat(&self) -> rustix::io::Result<Stat> {
        stat_fd(&self.file)
    }

    pub(super) fn unlink_temp(&mut self) -> rustix::io::Result<()> {
        self.owned = false;
        match unlinkat(&self.dir, &self.temp[..], AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }
}
