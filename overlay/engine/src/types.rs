//! What the engine is asked and what it answers.

use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{FileKind, Time};
use tokio::sync::oneshot;

pub use forebay_cache::Content;
pub use forebay_catalog::Ino;

/// What `stat` shows.
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

/// A name that was found. The caller owns one lookup of `attr.ino` and gives it back by `Overlay::forget`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub attr: Attr,
    /// How long the kernel may keep the name and the attributes without asking.
    pub ttl: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    Found(Entry),
    /// The name does not exist; the kernel may remember that for `ttl`.
    Negative {
        ttl: Duration,
    },
}

/// On whose behalf an operation is done: owner of what it creates, and judge of set-id bits.
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

/// Changes of attributes; `None` leaves one as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

/// An open file. Every `Opened` is given back by one `Overlay::release` with the same flags.
#[derive(Debug, Clone)]
pub struct Opened {
    /// The content file, where all of it is valid now and stays so while the file is open: the kernel may use
    /// it directly. `None`: reads and writes go through the engine.
    pub resident: Option<Arc<Content>>,
    /// The page cache still holds what this version says: the kernel may keep it.
    pub keep_cache: bool,
    /// `close` has nothing to wait for.
    pub no_flush: bool,
    /// Not all of it was here when it was asked for, and it is opened to be read.
    pub missed: bool,
    /// Bytes that the pool was asked for so that it could be opened.
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

/// What the kernel remembers of the mount and must be told to forget. Calls may block and are never made
/// while the engine holds a lock, unless they say so.
pub trait KernelCache: Send + Sync {
    /// Attributes, and the cached bytes too where `data`.
    fn invalidate_inode(&self, ino: Ino, data: bool);
    /// Attributes, and the cached bytes from `offset` on. The receiver is told, or dropped, when the kernel has forgotten
    /// them.
    fn invalidate_from(&self, ino: Ino, offset: u64) -> oneshot::Receiver<()>;
    fn invalidate_name(&self, parent: Ino, name: &[u8]);
    /// Attributes, forgotten before this returns. Only of an inode that is being opened: the kernel waits for nothing
    /// of ours then but the answer.
    fn invalidate_attributes_now(&self, ino: Ino);
    /// The daemon wants to close the content file of an inode, which it keeps open also for the next open. Takes only
    /// locks under which nothing of the engine is called, so the engine may hold locks.
    fn release_content(&self, ino: Ino);
}
