//! Conversion of attributes between the protocol and the pool.

use nfs3_client::nfs3_types::nfs3::{
    Nfs3Option, fattr3, ftype3, nfs_fh3, nfstime3, sattr3, set_atime, set_mtime, specdata3,
};

use crate::{Attrs, FileKind, SetAttrs, Stat, Time, Version};

/// Stands for the file system of the pool's root in versions. A server may renumber its file systems when it
/// restarts, and versions are kept for longer than that.
const ROOT_DEVICE: u64 = 0;

/// An object that the server has returned.
#[derive(Debug, Clone)]
pub(super) struct FoundObject {
    pub(super) handle: nfs_fh3,
    pub(super) stat: Stat,
}

pub(super) fn option<T: nfs3_client::nfs3_types::xdr_codec::Pack + nfs3_client::nfs3_types::xdr_codec::Unpack>(
    given: Nfs3Option<T>,
) -> Option<T> {
    match given {
        Nfs3Option::Some(value) => Some(value),
        Nfs3Option::None => None,
    }
}

/// `root_fsid` is the number of the file system that contains the pool's root.
pub(super) fn stat_of(raw: &fattr3, root_fsid: u64) -> Stat {
    let kind = match raw.type_ {
        ftype3::NF3REG => FileKind::File,
        ftype3::NF3DIR => FileKind::Directory,
        ftype3::NF3LNK => FileKind::Symlink,
        ftype3::NF3FIFO => FileKind::Fifo,
        ftype3::NF3SOCK => FileKind::Socket,
        ftype3::NF3CHR => FileKind::CharDevice,
        ftype3::NF3BLK => FileKind::BlockDevice,
    };
    let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
    let dev = if raw.fsid == root_fsid { ROOT_DEVICE } else { raw.fsid };
    let (mtime, ctime) = (time_of(raw.mtime), time_of(raw.ctime));
    let size = length_of(raw.size);
    Stat {
        kind,
        mode: raw.mode & 0o7777,
        uid: raw.uid,
        gid: raw.gid,
        nlink: raw.nlink,
        rdev: if device { libc::makedev(raw.rdev.specdata1, raw.rdev.specdata2) } else { 0 },
        size,
        occupied: Some(length_of(raw.used)),
        atime: time_of(raw.atime),
        mtime,
        ctime,
        version: Version::Inode { dev, ino: raw.fileid, born: Time::default(), mtime, ctime, size },
    }
}

pub(super) fn specdata(rdev: u64) -> specdata3 {
    specdata3 { specdata1: libc::major(rdev), specdata2: libc::minor(rdev) }
}

/// Limits a length to the range of this system's offsets, whatever a server says: sums of lengths must not overflow.
pub(super) fn length_of(raw: u64) -> u64 {
    raw.min(i64::MAX as u64)
}

fn time_of(raw: nfstime3) -> Time {
    // A server that sends more than a second of nanoseconds is wrong; its time must not make ours invalid.
    Time { secs: i64::from(raw.seconds), nanos: raw.nseconds.min(999_999_999) }
}

/// The nearest time that the protocol can represent: from 1970 to 2106.
fn nearest(time: Time) -> Time {
    match u32::try_from(time.secs) {
        Ok(_) => time,
        Err(_) if time.secs < 0 => Time { secs: 0, nanos: 0 },
        Err(_) => Time { secs: i64::from(u32::MAX), nanos: 999_999_999 },
    }
}

fn raw_time(time: Time) -> nfstime3 {
    nfstime3 { seconds: u32::try_from(time.secs).unwrap_or(0), nseconds: time.nanos }
}

/// The attributes that an object must get; `None` leaves an attribute unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct AttributeChange {
    mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) size: Option<u64>,
    atime: Option<Time>,
    mtime: Option<Time>,
}

impl AttributeChange {
    /// For a new object: an owner only if it can be set, a mode for all but symlinks, which have none.
    pub(super) fn of_new(attrs: &Attrs, kind: FileKind, owners: bool) -> Self {
        Self {
            mode: (kind != FileKind::Symlink).then_some(attrs.mode & 0o7777),
            uid: owners.then_some(attrs.uid),
            gid: owners.then_some(attrs.gid),
            size: None,
            atime: Some(nearest(attrs.atime)),
            mtime: Some(nearest(attrs.mtime)),
        }
    }

    pub(super) fn of_mode(mode: u32) -> Self {
        Self { mode: Some(mode), ..Self::default() }
    }

    pub(super) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn without_owner(self) -> Self {
        Self { uid: None, gid: None, ..self }
    }

    pub(super) fn without_times(self) -> Self {
        Self { atime: None, mtime: None, ..self }
    }

    /// The attributes that `stat` does not show yet. The size is left out: it is set once.
    pub(super) fn missing_in(&self, stat: &Stat) -> Self {
        let differs = |wanted: Option<u32>, is: u32| wanted.filter(|wanted| *wanted != is);
        Self {
            mode: differs(self.mode, stat.mode),
            uid: differs(self.uid, stat.uid),
            gid: differs(self.gid, stat.gid),
            size: None,
            atime: self.atime.filter(|atime| *atime != stat.atime),
            mtime: self.mtime.filter(|mtime| *mtime != stat.mtime),
        }
    }

    pub(super) fn raw(&self) -> sattr3 {
        fn given<T: nfs3_client::nfs3_types::xdr_codec::Pack + nfs3_client::nfs3_types::xdr_codec::Unpack>(
            value: Option<T>,
        ) -> Nfs3Option<T> {
            value.map_or(Nfs3Option::None, Nfs3Option::Some)
        }
        sattr3 {
            mode: given(self.mode),
            uid: given(self.uid),
            gid: given(self.gid),
            size: given(self.size),
            atime: self.atime.map_or(set_atime::DONT_CHANGE, |t| set_atime::SET_TO_CLIENT_TIME(raw_time(t))),
            mtime: self.mtime.map_or(set_mtime::DONT_CHANGE, |t| set_mtime::SET_TO_CLIENT_TIME(raw_time(t))),
        }
    }
}

impl From<&SetAttrs> for AttributeChange {
    fn from(changes: &SetAttrs) -> Self {
        Self {
            mode: changes.mode.map(|mode| mode & 0o7777),
            uid: changes.uid,
            gid: changes.gid,
            size: changes.size,
            atime: changes.atime.map(nearest),
            mtime: changes.mtime.map(nearest),
        }
    }
}
