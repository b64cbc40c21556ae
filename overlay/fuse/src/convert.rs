//! Converts between the types of the engine and those of FUSE.

use std::time::SystemTime;

use forebay_backends::{Error, FileKind, Time};
use forebay_engine::{Attr, Caller, Ino, SetTime};
use fuser::{Errno, FileAttr, FileType, INodeNo, Request, TimeOrNow};

/// The value of `st_blksize`: the size with which programs like `cp` read and write. One fetch of the fast path is
/// never smaller, and 128 KiB keeps `stdio` buffers modest.
const BLOCK_SIZE_BYTES: u32 = 128 << 10;

/// Returns the errno with which a request that failed with `error` is answered.
///
/// Never ENOSYS: the kernel would take it to mean that the whole mount lacks the operation, and never send it again.
pub fn errno(error: &Error) -> Errno {
    match error.errno() {
        libc::ENOSYS => Errno::EOPNOTSUPP,
        errno => Errno::from_i32(errno),
    }
}

pub fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

pub fn attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.into(),
        mtime: attr.mtime.into(),
        ctime: attr.ctime.into(),
        crtime: SystemTime::UNIX_EPOCH,
        kind: file_type(attr.kind),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: rdev_to_kernel(attr.rdev),
        blksize: BLOCK_SIZE_BYTES,
        flags: 0,
    }
}

/// Attributes for a negative lookup reply: inode 0.
pub fn nothing() -> FileAttr {
    FileAttr { kind: FileType::RegularFile, ..directory(Ino(0)) }
}

/// Attributes of a directory whose inode number alone matters.
pub fn directory(ino: Ino) -> FileAttr {
    let epoch = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(ino.0),
        size: 0,
        blocks: 0,
        atime: epoch,
        mtime: epoch,
        ctime: epoch,
        crtime: epoch,
        kind: FileType::Directory,
        perm: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_SIZE_BYTES,
        flags: 0,
    }
}

pub fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid() }
}

pub fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(time_from_fuser(time)),
    }
}

/// Returns the time that the kernel sent. For a time before 1970, fuser subtracts the nanoseconds from the seconds
/// where it must add them. This function recovers both numbers and adds them. Times that fuser sends to the kernel need
/// no correction.
fn time_from_fuser(time: SystemTime) -> Time {
    match SystemTime::UNIX_EPOCH.duration_since(time) {
        Ok(before) if !before.is_zero() => {
            Time { secs: 0_i64.saturating_sub_unsigned(before.as_secs()), nanos: before.subsec_nanos() }
        }
        _ => Time::from(time),
    }
}

/// Converts a device number from the C library's encoding (64 bits) to the kernel's wire encoding (12 bits of major, 20
/// bits of minor).
pub fn rdev_to_kernel(rdev: u64) -> u32 {
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xfff00) << 12)
}

/// The inverse of [`rdev_to_kernel`].
pub fn rdev_from_kernel(rdev: u32) -> u64 {
    libc::makedev((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xfff00))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_the_round_trip() {
        for (major, minor) in [(0, 0), (1, 3), (8, 255), (8, 256), (259, 0xfffff), (4095, 70_000)] {
            let rdev = libc::makedev(major, minor);
            assert_eq!(rdev_from_kernel(rdev_to_kernel(rdev)), rdev, "{major}:{minor}");
        }
    }

    #[test]
    fn times_before_1970_are_those_that_the_kernel_sent() {
        use std::time::Duration;
        // Computes a time from seconds and nanoseconds as fuser does.
        let sent = |secs: i64, nanos: u32| match u64::try_from(secs) {
            Ok(secs) => SystemTime::UNIX_EPOCH + Duration::new(secs, nanos),
            Err(_) => SystemTime::UNIX_EPOCH - Duration::new(secs.unsigned_abs(), nanos),
        };
        let far = [(i64::MIN, 0), (i64::MIN + 1, 0), (i64::MIN + 1, 999_999_999), (i64::MAX, 999_999_999)];
        let near = [(-3, 250_000_000), (-1, 999_999_999), (-1, 0), (-86_400, 1), (0, 0), (0, 5), (7, 9)];
        for (secs, nanos) in far.into_iter().chain(near) {
            assert_eq!(time_from_fuser(sent(secs, nanos)), Time { secs, nanos });
        }
    }

    #[test]
    fn no_error_disables_an_operation_for_the_whole_mount() {
        let error = Error::os(libc::ENOSYS, forebay_backends::Side::Pool, "anything");
        assert_ne!(i32::from(errno(&error)), libc::ENOSYS);
    }
}
