//! `statx` results as the pool's own types.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Statx, StatxFlags, StatxTimestamp, makedev, statx};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::{FileKind, Stat, Time, Version};

/// The creation time is part of an object's identity.
const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// The attributes of a name; asks the server, not an attribute cache.
pub(super) fn stat_at<Fd: AsFd, P: Arg>(dir: Fd, name: P, flags: AtFlags) -> rustix::io::Result<Stat> {
    let flags = flags | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_FORCE_SYNC;
    convert(&statx(dir, name, flags, WANTED)?)
}

/// Like [`stat_at`], for a name in a directory; a symlink is not followed.
pub(super) fn stat_name<Fd: AsFd>(dir: Fd, name: &[u8]) -> rustix::io::Result<Stat> {
    stat_at(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Like [`stat_name`], but may use cached attributes of a network file system: for listings, which fetch attributes
/// anyway.
pub(super) fn stat_name_cached<Fd: AsFd>(dir: Fd, name: &[u8]) -> rustix::io::Result<Stat> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    convert(&statx(dir, name, flags, WANTED)?)
}

/// The attributes of an open file or handle; asks the server.
pub(super) fn stat_fd<Fd: AsFd>(fd: Fd) -> rustix::io::Result<Stat> {
    stat_at(fd, c"", AtFlags::EMPTY_PATH)
}

/// Like [`stat_fd`], but may use cached attributes: a network file system refreshes them with each reply to a read.
pub(super) fn stat_fd_cached<Fd: AsFd>(fd: Fd) -> rustix::io::Result<Stat> {
    convert(&statx(fd, c"", AtFlags::EMPTY_PATH, WANTED)?)
}

fn convert(raw: &Statx) -> rustix::io::Result<Stat> {
    let mode = u32::from(raw.stx_mode);
    let kind = FileKind::from_mode(mode).ok_or(Errno::OPNOTSUPP)?;
    let mtime = time(&raw.stx_mtime);
    let ctime = time(&raw.stx_ctime);
    // A field that the file system does not fill in may contain anything.
    let tells_birth = raw.stx_mask & StatxFlags::BTIME.bits() != 0;
    let born = if tells_birth { time(&raw.stx_btime) } else { Time::default() };
    let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
    Ok(Stat {
        kind,
        mode: mode & 0o7777,
        uid: raw.stx_uid,
        gid: raw.stx_gid,
        nlink: raw.stx_nlink,
        rdev: if device { makedev(raw.stx_rdev_major, raw.stx_rdev_minor) } else { 0 },
        size: raw.stx_size,
        occupied: Some(raw.stx_blocks.saturating_mul(512)),
        atime: time(&raw.stx_atime),
        mtime,
        ctime,
        version: Version::Inode {
            dev: makedev(raw.stx_dev_major, raw.stx_dev_minor),
            ino: raw.stx_ino,
            born,
            mtime,
            ctime,
            size: raw.stx_size,
        },
    })
}

fn time(raw: &StatxTimestamp) -> Time {
    Time { secs: raw.tv_sec, nanos: raw.tv_nsec }
}
