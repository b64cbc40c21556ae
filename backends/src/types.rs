//! The types in the calls and answers of pools.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

impl FileKind {
    /// The `S_IFMT` bits of the kind.
    pub fn mode_bits(self) -> u32 {
        match self {
            Self::File => libc::S_IFREG,
            Self::Directory => libc::S_IFDIR,
            Self::Symlink => libc::S_IFLNK,
            Self::Fifo => libc::S_IFIFO,
            Self::Socket => libc::S_IFSOCK,
            Self::CharDevice => libc::S_IFCHR,
            Self::BlockDevice => libc::S_IFBLK,
        }
    }

    /// The kind in an `st_mode`; `None` for a kind outside of POSIX.
    pub fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & libc::S_IFMT {
            libc::S_IFREG => Self::File,
            libc::S_IFDIR => Self::Directory,
            libc::S_IFLNK => Self::Symlink,
            libc::S_IFIFO => Self::Fifo,
            libc::S_IFSOCK => Self::Socket,
            libc::S_IFCHR => Self::CharDevice,
            libc::S_IFBLK => Self::BlockDevice,
            _ => return None,
        })
    }
}

/// A moment, as POSIX counts it: seconds since 1970 (may be negative) and nanoseconds below 10^9.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Time {
    pub secs: i64,
    pub nanos: u32,
}

impl Time {
    pub fn now() -> Self {
        SystemTime::now().into()
    }
}

impl From<SystemTime> for Time {
    fn from(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(d) => Self { secs: d.as_secs() as i64, nanos: d.subsec_nanos() },
            Err(before) => {
                let d = before.duration();
                // The earliest time is 2^63 seconds before 1970, which no i64 holds without its sign.
                let secs = 0_i64.saturating_sub_unsigned(d.as_secs());
                match d.subsec_nanos() {
                    0 => Self { secs, nanos: 0 },
                    n => Self { secs: secs.saturating_sub(1), nanos: 1_000_000_000 - n },
                }
            }
        }
    }
}

impl From<Time> for SystemTime {
    fn from(time: Time) -> Self {
        let whole = Duration::from_secs(time.secs.unsigned_abs());
        let seconds = if time.secs >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
        // Each time whose nanoseconds are less than a second can be represented.
        let at = seconds.and_then(|at| at.checked_add(Duration::from_nanos(u64::from(time.nanos))));
        at.unwrap_or(UNIX_EPOCH)
    }
}

/// Identifies an object of a file system, independent of its names, content and attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    pub dev: u64,
    pub ino: u64,
    /// When the object was created; 0 if the file system does not tell.
    pub born: Time,
}

impl Identity {
    /// Whether both are the same object. If the file system tells creation times, an object that was created later
    /// under the inode number of a removed one is a different object.
    pub fn is_same(self, other: Self) -> bool {
        let told = |identity: Self| identity.born != Time::default();
        (self.dev, self.ino) == (other.dev, other.ino) && (self.born == other.born || !told(self) || !told(other))
    }
}

/// Identifies one state of one object in a pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Version {
    /// Of a file system: every change of content or attributes changes at least `ctime`. `born` is when the object
    /// was created, and 0 if the file system does not tell; it matters because inode numbers are reused.
    Inode { dev: u64, ino: u64, born: Time, mtime: Time, ctime: Time, size: u64 },
    /// Of an object store. The seconds of `mtime` are the store's, which may have no finer times; its nanoseconds are
    /// the mark of the object's writer, if the writer stored a time. `etag` is empty if the store has none, `id` if
    /// it keeps no versions.
    Tag { etag: String, id: String, size: u64, mtime: Time },
}

impl Version {
    pub fn size(&self) -> u64 {
        match self {
            Self::Inode { size, .. } | Self::Tag { size, .. } => *size,
        }
    }

    /// The object's identity; `None` in an object store, which knows objects only by their names.
    pub fn identity(&self) -> Option<Identity> {
        match self {
            Self::Inode { dev, ino, born, .. } => Some(Identity { dev: *dev, ino: *ino, born: *born }),
            Self::Tag { .. } => None,
        }
    }

    /// Whether both are the same object with the same content. Changes of names or attributes alone move only
    /// `ctime`.
    pub fn same_content(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Inode { mtime, size, .. }, Self::Inode { mtime: mtime2, size: size2, .. }) => {
                self.same_object(other) && (mtime, size) == (mtime2, size2)
            }
            // The mark of the same writer at another time: the content was changed without a new mark.
            (Self::Tag { mtime, .. }, Self::Tag { mtime: mtime2, .. }) => {
                self.same_object(other) && (mtime.nanos != mtime2.nanos || mtime == mtime2)
            }
            _ => false,
        }
    }

    /// Whether both are the same object by identity, whatever its content is now.
    pub fn same_object(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Inode { .. }, Self::Inode { .. }) => match (self.identity(), other.identity()) {
                (Some(ours), Some(theirs)) => ours.is_same(theirs),
                _ => false,
            },
            // An object store replaces whole objects: other content is another object.
            (Self::Tag { etag, id, size, mtime }, Self::Tag { etag: etag2, id: id2, size: size2, mtime: mtime2 }) => {
                // A store may tell `id` only sometimes: a missing one is no difference.
                let ids = id == id2 || id.is_empty() || id2.is_empty();
                ids && (etag, size) == (etag2, size2) && (!etag.is_empty() || mtime == mtime2)
            }
            _ => false,
        }
    }
}

/// The attributes of an object in a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    pub kind: FileKind,
    /// Permission bits, set-id bits and the sticky bit: at most 0o7777.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    /// Device number of a device file, in `dev_t` encoding; 0 for the rest.
    pub rdev: u64,
    pub size: u64,
    /// Bytes that the content occupies in the pool: fewer than `size` if it has holes. `None`: the pool does not
    /// tell.
    pub occupied: Option<u64>,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub version: Version,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    pub name: Vec<u8>,
    pub stat: Stat,
    /// All bytes of that version of a file, if the listing included them.
    pub content: Option<Bytes>,
}

impl DirEntry {
    pub fn new(name: Vec<u8>, stat: Stat) -> Self {
        Self { name, stat, content: None }
    }
}

/// The attributes of a new object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attrs {
    /// At most 0o7777.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub atime: Time,
    pub mtime: Time,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Changes of attributes; `None` leaves an attribute unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SetAttrs {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
    /// The object is changed only if it still has the content of this version. Changed times would hide from the caller
    /// that another client wrote it. Except in the pool in memory, the test is made right before the change.
    pub only_if: Option<Version>,
}

impl SetAttrs {
    /// Returns whether an object that has this version now may be changed.
    pub fn applies_to(&self, now: &Version) -> bool {
        self.only_if.as_ref().is_none_or(|expected| expected.same_content(now))
    }
}

/// The state of its target that a conditional change expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    Absent,
    /// An object of this version. A `put` gives it new content, which all its names show.
    Version(Version),
    /// Like `Version`, but a `put` makes a new object, which takes the name; other names of the old object keep its
    /// content.
    Name(Version),
    Anything,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces the target, atomically if the pool can.
    Replace,
    /// Fails with `Exists` if the target exists.
    NoReplace,
    /// Both exist and are exchanged.
    Exchange,
}

/// How strictly a pool enforces [`Expected`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConditionalPut {
    /// Test and change are one step: of several concurrent writers, one succeeds.
    Atomic,
    /// The test is made right before the change; a write in between goes unnoticed.
    Checked,
}

/// What a pool can store and do. A missing ability is a value that callers can check in advance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Metadata calls are answered by this machine, without a network, and may be made inline.
    pub local: bool,
    pub read_only: bool,
    pub objects: Objects,
    pub renames: Renames,
    pub listings: ListingSupport,
    /// A listing can include small files at the cost of their attributes alone.
    pub listed_contents: bool,
    pub versions: Versions,
    /// Bytes of a long range are passed on as they arrive: it takes no more memory than a short one.
    pub streams: bool,
    pub ranged_write: bool,
    /// Content can be sent ahead of its object, in parts of at least so many bytes (`Pool::send_part`); the last part of
    /// an object may be shorter.
    pub parts_ahead: Option<u64>,
    pub conditional_put: ConditionalPut,
    /// The pool may tell the [`Layout`] of objects.
    pub layouts: bool,
    /// Nanoseconds between distinguishable timestamps.
    pub time_granularity_ns: u32,
    /// Longest name in bytes.
    pub name_max: u32,
    /// Longest path from the root in bytes, if that is less than Linux's limit. `Pool::check_path` must then be
    /// called before an object gets a new name.
    pub path_max: Option<u32>,
}

/// Which objects and attributes a pool can hold beyond files and directories.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Objects {
    pub symlinks: bool,
    /// Symlinks keep the times that are set on them.
    pub symlink_times: bool,
    pub hard_links: bool,
    pub special_files: bool,
    pub xattrs: bool,
    /// Owner, group and mode can be set by this process.
    pub owners: bool,
    /// Holes of files take no space.
    pub sparse: bool,
}

/// How a pool gives an object another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Renames {
    Unable,
    /// Renames and changes of attributes copy the objects: they take time, and other clients can see an intermediate
    /// state.
    ByCopies,
    /// In one step.
    Atomic {
        /// Two objects can exchange their names.
        exchange: bool,
    },
}

/// How a pool tells the names in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListingSupport {
    /// Not at all: a program must know the path of an object.
    Unable,
    /// With one request for each name, and some names may be missing: a page for people may hide them, or a page of
    /// their own may stand in place of it.
    MayOmit,
    /// With one request for each name. A name is missing while the server refuses that request.
    HideRefused,
    /// With one request for each name: it pays off only for a caller that needs many of them.
    AskEach,
    /// All names with their attributes in few requests.
    Whole,
}

/// How a pool tells whether an object has changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// A read fails if the version is no longer the current one. Without this, a read may still return old content.
    pub confirmed_by_reads: bool,
    /// A request that is cheaper than `stat` tells whether a file is still of a known version.
    pub alone: bool,
    /// A directory's version changes when a name in it is made or removed.
    pub of_directories: bool,
    /// An object has the same [`Identity`] after the pool was mounted or attached again.
    #[serde(default)]
    pub outlive_mounts: bool,
}

impl Renames {
    pub fn exist(self) -> bool {
        self != Self::Unable
    }

    pub fn copy(self) -> bool {
        self == Self::ByCopies
    }

    pub fn exchange(self) -> bool {
        self == Self::Atomic { exchange: true }
    }
}

impl ListingSupport {
    pub fn exist(self) -> bool {
        self != Self::Unable
    }

    /// Whether a name that is not in a listing is absent, unless it was known before.
    pub fn show_all(self) -> bool {
        self != Self::MayOmit
    }

    /// Whether a name that was known before, and is not in a listing, may still be there.
    pub fn may_omit_known(self) -> bool {
        matches!(self, Self::MayOmit | Self::HideRefused)
    }

    /// Whether a listing costs at least one request for each name.
    pub fn ask_each(self) -> bool {
        self != Self::Whole
    }
}

impl Capabilities {
    /// The capabilities in words, for people and pages.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let word = |able: bool| if able { "yes" } else { "no" }.to_owned();
        let conditional = match self.conditional_put {
            ConditionalPut::Atomic => "atomic",
            ConditionalPut::Checked => "checked",
        };
        vec![
            ("changes", word(!self.read_only)),
            ("names are listed", word(self.listings.exist())),
            ("symlinks", word(self.objects.symlinks)),
            ("symlinks keep times", word(self.objects.symlink_times)),
            ("hard links", word(self.objects.hard_links)),
            ("special files", word(self.objects.special_files)),
            ("extended attributes", word(self.objects.xattrs)),
            ("owners", word(self.objects.owners)),
            ("renames", if self.renames.copy() { "by copies".to_owned() } else { word(self.renames.exist()) }),
            ("exchange of names", word(self.renames.exchange())),
            ("reads are streams", word(self.streams)),
            ("versions are checked without stat", word(self.versions.alone)),
            ("listings need a request for each name", word(self.listings.ask_each())),
            ("listings include small files", word(self.listed_contents)),
            ("ranged writes", word(self.ranged_write)),
            ("parts ahead of the object", word(self.parts_ahead.is_some())),
            ("conditional changes", conditional.to_owned()),
            ("directories have versions", word(self.versions.of_directories)),
            ("stripes and storage pools", word(self.layouts)),
            ("longest name in bytes", self.name_max.to_string()),
            ("longest path in bytes", self.path_max.map_or_else(|| "any".to_owned(), |max| max.to_string())),
        ]
    }
}

/// The progress of work that takes many requests, for people who wait for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkProgress {
    /// The operation, and the unit of its steps.
    pub what: String,
    /// Completed steps.
    pub done: u64,
    /// All steps; `None` while the number is unknown.
    pub of: Option<u64>,
}

/// Sizes of the store behind a pool, in bytes and files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub available_bytes: u64,
    pub total_files: u64,
    pub free_files: u64,
}

/// Where a pool keeps content, as far as it tells. For a directory: where the content of new files in it is placed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    pub stripe: Option<Stripe>,
    /// The part of the pool that holds the content: BeeGFS' storage pool, by number, or Lustre's pool of targets, by
    /// name.
    pub storage_pool: Option<String>,
    /// The pool failed to tell the storage pool, and has one.
    pub is_storage_pool_untold: bool,
}

/// Content in chunks that are spread round-robin over several targets, which can be read and written at the same
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Not 0, and a multiple of 64 KiB.
    pub chunk_bytes: u64,
    /// At least 1.
    pub targets: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_and_the_latest_time_go_there_and_back() {
        for secs in [i64::MIN, i64::MIN + 1, -2, -1, 0, 1, i64::MAX - 1, i64::MAX] {
            for nanos in [0, 1, 999_999_999] {
                let time = Time { secs, nanos };
                assert_eq!(Time::from(SystemTime::from(time)), time);
            }
        }
        let garbled = Time { secs: i64::MAX, nanos: u32::MAX };
        assert_eq!(SystemTime::from(garbled), UNIX_EPOCH);
    }
}
