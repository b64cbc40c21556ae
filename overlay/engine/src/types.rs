//! Arguments and results of the engine.

use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{FileKind, Time};
use tokio::sync::oneshot;

pub use forebay_cache::Content;
pub use forebay_catalog::Ino;

/// The attributes that `stat` shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attr {
    pub ino: Ino,
    pub kind: FileKind,
    /// At most 0o7777.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u64,
    pub size: u64,
    /// In units of 512 bytes.
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
}

/// An existing name. The caller owns one lookup of `attr.ino` and gives it back by `Overlay::forget`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub attr: Attr,
    /// How long the kernel may cache the name and the attributes.
    pub ttl: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    Found(Entry),
    /// The name does not exist; the kernel may cache that for `ttl`.
    Negative {
        ttl: Duration,
    },
}

/// The user and process for which an operation is done: the owner of what it creates. Set-id bits depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    Now,
    At(Time),
}

/// Changes of attributes; `None` leaves an attribute as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

/// What the kernel's page cache of an inode is at the moment of an open. If the answer to that open lets the kernel drop
/// its pages, [`Overlay::pages_dropped`](crate::Overlay::pages_dropped) is called with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CachedPages {
    /// All cached pages are of the present version: the kernel may keep them.
    pub valid: bool,
    /// How many changes had made pages stale by then.
    pub(crate) changes: u64,
}

/// An open file. Each `Opened` is given back by one `Overlay::release` with the same flags.
#[derive(Debug, Clone)]
pub struct Opened {
    /// The content file, if all of it is valid now and stays valid while the file is open: the kernel may use it
    /// directly. `None`: reads and writes go through the engine.
    pub resident: Option<Arc<Content>>,
    /// Whether the kernel may keep its page cache.
    pub pages: CachedPages,
    /// No setting of the policy can make `close` wait for a flush of this open.
    pub no_flush: bool,
    /// The file was opened for reading, and was not wholly resident at that time.
    pub missed: bool,
    /// Bytes that were requested from the pool so that the file could be opened.
    pub fetched_bytes: u64,
}

/// One entry of a directory, in the order in which a snapshot shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dirent {
    pub name: Box<[u8]>,
    pub ino: Ino,
    pub kind: FileKind,
}

/// The entries of a directory at one moment, sorted by name, without `.` and `..`.
#[derive(Debug, Clone)]
pub struct DirSnapshot {
    pub parent: Ino,
    pub entries: Arc<Vec<Dirent>>,
}

/// What `statfs` shows, in bytes and files.
pub use forebay_backends::Space;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    Data,
    Hole,
}

/// The kernel's caches of the mount, which the engine invalidates. Calls may block. Unless a method says otherwise, the
/// engine holds no lock when it calls the method.
pub trait KernelCache: Send + Sync {
    /// Makes the kernel forget the attributes and, if `data`, the cached bytes.
    fn invalidate_inode(&self, ino: Ino, data: bool);
    /// Makes the kernel forget the attributes, and the cached bytes from `offset` on. The receiver is notified, or its
    /// sender is dropped, after the kernel has forgotten them.
    fn invalidate_from(&self, ino: Ino, offset: u64) -> oneshot::Receiver<()>;
    fn invalidate_name(&self, parent: Ino, name: &[u8]);
    /// As [`Self::invalidate_name`]. The receiver is notified, or its sender is dropped, after the kernel has forgotten
    /// the name.
    fn invalidate_name_and_tell(&self, parent: Ino, name: &[u8]) -> oneshot::Receiver<()>;
    /// Makes the kernel look a name up again when it needs it next; what is mounted there stays. The receiver is notified,
    /// or its sender is dropped, afterwards.
    fn expire_name(&self, parent: Ino, name: &[u8]) -> oneshot::Receiver<()>;
    /// Whether single names must stay: then the kernel is never told to forget all names at once.
    fn keep_names(&self, keep: bool);
    /// Makes the kernel forget the attributes before this returns. Only for an inode that is being opened: then the
    /// kernel waits for nothing of the daemon except the answer.
    fn invalidate_attributes_now(&self, ino: Ino);
    /// Gives up the open content file that is kept for the next open of an inode, because the daemon wants to close it.
    /// Takes only locks under which no method of the engine is called, so the engine may hold locks.
    fn release_content(&self, ino: Ino);
}

/// Whether an open with these flags is for writing. `O_TRUNC` does not count: the truncation ends with the open, and the
/// kernel leaves the flag out of the release.
pub fn is_writable(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}
