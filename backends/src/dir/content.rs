//! Reading a version of a file, and writing into one in place.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::MutexGuard;
use rustix::buffer::spare_capacity;
use rustix::fs::{Mode, OFlags, fdatasync, openat};
use rustix::io::{Errno, pread};

use crate::{ErrorKind, FileKind, PoolPath, Result, Stat, Version};

use super::Shared;
use super::fds::{OpenFiles, OpenWriter, OpenWriters};
use super::root::{PathCall, RootDirectory};
use super::staging::write_all;
use super::stat::{stat_fd, stat_fd_cached, stat_name};

/// Opens a regular file. Any other kind is refused before it is opened, because opening a device acts on it.
pub(super) fn open_file(root: &RootDirectory, call: PathCall<'_>, flags: OFlags) -> Result<(OwnedFd, Stat)> {
    let slot = root.slot(call.path);
    let (dir, name) = slot.map_err(|errno| call.failed(if errno == Errno::BUSY { Errno::ISDIR } else { errno }))?;
    check_kind(call, &stat_name(&dir, name).map_err(|errno| call.failed(errno))?)?;
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = match openat(&dir, name, flags, Mode::empty()) {
        Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => {
            openat(&dir, name, flags - OFlags::NOATIME, Mode::empty())
        }
        other => other,
    };
    let file = opened.map_err(|errno| call.failed(errno))?;
    let stat = stat_fd(&file).map_err(|errno| call.failed(errno))?;
    check_kind(call, &stat)?;
    root.check(call.path, &file).map_err(|errno| call.failed(errno))?;
    Ok((file, stat))
}

fn check_kind(call: PathCall<'_>, stat: &Stat) -> Result<()> {
    match stat.kind {
        FileKind::File => Ok(()),
        FileKind::Directory => Err(call.failed(Errno::ISDIR)),
        _ => Err(call.error(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Whether an open file still is `version`. The file may have lost its last name, which moves `ctime`. No process can
/// open it any more then, so equal times and size mean equal content.
fn is_still(stat: &Stat, version: &Version) -> bool {
    stat.version == *version || (stat.nlink == 0 && stat.version.same_content(version))
}

/// Reads `range` of `version`, through a file that an earlier read kept open if there is one. If this call opened the
/// file, it returns the file for keeping.
pub(super) fn read(
    root: &RootDirectory,
    files: &OpenFiles,
    call: PathCall<'_>,
    version: &Version,
    range: Range<u64>,
) -> Result<(Bytes, Option<Arc<OwnedFd>>)> {
    if range.start > range.end {
        return Err(call.error(ErrorKind::InvalidInput, "the range ends before it starts"));
    }
    if let Some(file) = files.get(version) {
        if stat_fd_cached(&*file).is_ok_and(|stat| is_still(&stat, version)) {
            return read_open(call, &file, version, range).map(|data| (data, None));
        }
        files.forget(version);
    }
    let (file, stat) = open_file(root, call, OFlags::RDONLY | OFlags::NOATIME)?;
    if stat.version != *version {
        return Err(call.error(ErrorKind::Stale, "it was changed by another writer"));
    }
    let file = Arc::new(file);
    let data = read_open(call, &file, version, range)?;
    Ok((data, Some(file)))
}

fn read_open(call: PathCall<'_>, file: &OwnedFd, version: &Version, range: Range<u64>) -> Result<Bytes> {
    let length = range.end.min(version.size()).saturating_sub(range.start);
    let length = usize::try_from(length).map_err(|_| call.error(ErrorKind::TooLarge, "the range is too long"))?;
    let mut buffer = Vec::new();
    if buffer.try_reserve_exact(length).is_err() {
        return Err(call.error(ErrorKind::Os(libc::ENOMEM), "there is no memory for the range"));
    }
    while buffer.len() < length {
        let at = range.start + buffer.len() as u64;
        let missing = length - buffer.len();
        // The vector may have more capacity than requested.
        let got = if buffer.capacity() - buffer.len() == missing {
            pread(file, spare_capacity(&mut buffer), at)
        } else {
            read_exactly_missing(file, &mut buffer, missing, at)
        };
        match got {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(call.failed(errno)),
        }
    }
    let after = stat_fd_cached(file).map_err(|errno| call.failed(errno))?;
    if !is_still(&after, version) || buffer.len() < length {
        return Err(call.error(ErrorKind::Stale, "it was changed by another writer"));
    }
    Ok(buffer.into())
}

fn read_exactly_missing(file: &OwnedFd, buffer: &mut Vec<u8>, missing: usize, at: u64) -> rustix::io::Result<usize> {
    let filled = buffer.len();
    buffer.resize(filled + missing, 0);
    let got = pread(file, &mut buffer[filled..], at);
    buffer.truncate(filled + *got.as_ref().unwrap_or(&0));
    got
}

impl Shared {
    /// Takes the lock of the writers of `path` in this process. A call that its caller has given up keeps it to its end.
    pub(super) fn turn(&self, path: &PoolPath) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        path.hash(&mut hasher);
        self.publishing[hasher.finish() as usize % self.publishing.len()].lock()
    }

    /// Closes an object that was removed or replaced, so that it no longer takes space.
    pub(super) fn forget_object(&self, version: &Version) {
        self.files.forget_object(version);
        if let Some(object) = self.outward_version(version).identity() {
            self.writers.forget(object);
        }
    }
}

/// Overwrites a range in place, through a file that an earlier write kept open if there is one. If no file can be kept
/// for [`sync`], the bytes are made durable at once.
pub(super) fn write_at(
    root: &RootDirectory,
    writers: &OpenWriters,
    call: PathCall<'_>,
    offset: u64,
    data: &[u8],
) -> Result<Stat> {
    if offset.checked_add(data.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
        return Err(call.error(ErrorKind::TooLarge, "no file reaches that far"));
    }
    let object = call.path.object();
    let (file, keeps) = match object.and_then(|object| writers.get(object)) {
        Some(OpenWriter { file, .. }) => {
            // Another client may have given the name to another object.
            root.object(call.path).map_err(|errno| call.failed(errno))?;
            (file, true)
        }
        None => {
            let file = Arc::new(open_file(root, call, OFlags::WRONLY)?.0);
            let keeps = object.is_some_and(|object| writers.keep(object, &file));
            (file, keeps)
        }
    };
    let written = write_all(&file, data, offset).and_then(|()| if keeps { Ok(()) } else { fdatasync(&file) });
    written.and_then(|()| stat_fd(&file)).map_err(|errno| call.failed(errno))
}

/// Makes durable what was written to an object, by this process or one before it. After a failure, each later call for
/// the object fails, until it is emptied.
pub(super) fn sync(root: &RootDirectory, writers: &OpenWriters, call: PathCall<'_>) -> Result<()> {
    let object = call.path.object();
    let file = match object.and_then(|object| writers.get(object)) {
        Some(OpenWriter { failed: Some(why), .. }) => return Err(call.failed(why)),
        Some(OpenWriter { file, .. }) => file,
        None => Arc::new(open_any(root, call)?),
    };
    let synced = fdatasync(&file);
    match (synced, object) {
        (Ok(()), Some(object)) => writers.forget(object),
        (Err(why), Some(object)) => writers.note_failed(object, file, why),
        _ => {}
    }
    synced.map_err(|errno| call.failed(errno))
}

/// Opens a file for reading, or else for writing: either will do for a sync.
fn open_any(root: &RootDirectory, call: PathCall<'_>) -> Result<OwnedFd> {
    match open_file(root, call, OFlags::RDONLY | OFlags::NOATIME) {
        Err(e) if e.is(ErrorKind::PermissionDenied) => open_file(root, call, OFlags::WRONLY),
        opened => opened,
    }
    .map(|(file, _)| file)
}
