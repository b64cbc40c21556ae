//! The trait that every pool implements.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, stream};

use crate::Version;
use crate::{
    Attrs, Capabilities, DirEntry, Expected, FileKind, Layout, PoolPath, RenameMode, Result, SetAttrs, Space, Stat,
    Time, UnderWay,
};

/// A piece of an object's content. Between pieces are holes, which read as zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Offset in bytes from the start of the object.
    pub offset: u64,
    pub data: Bytes,
}

/// The content of an object: pieces in ascending order that do not overlap.
pub type Pieces<'a> = BoxStream<'a, Result<Piece>>;

/// A range of an object's content, in order, in pieces of any length but none.
pub type Content = BoxStream<'static, Result<Bytes>>;

/// The entries of a directory, in pages, in no particular order.
pub type Listing = BoxStream<'static, Result<Vec<DirEntry>>>;

/// Names that a pool uses for its own unfinished work start with this; listings never show them, and
/// [`Pool`] callers may not use them.
pub const RESERVED_PREFIX: &[u8] = b".forebay~";

/// The largest file whose content comes along with a listing: so many bytes take no longer on their way than an answer
/// without any.
pub const LISTED_CONTENT_BYTES: u64 = 16 << 10;

/// Names and values of the extended attributes of one object together, in bytes: whoever asks for them has all in memory.
/// Room for one value of the largest size and for those that systems set.
pub const XATTRS_MAX_BYTES: usize = 128 << 10;

/// Marks a file with several names that is being written in place, and whose bytes are not all those of one version. The
/// value says what it is to become: [`unfinished_mark`]. It goes when all is written.
pub const UNFINISHED_XATTR: &[u8] = b"user.forebay.unfinished";

/// The value of [`UNFINISHED_XATTR`] while content of `size` bytes, modified at `mtime`, is written.
pub fn unfinished_mark(size: u64, mtime: Time) -> Vec<u8> {
    format!("{size} {} {}", mtime.secs, mtime.nanos).into_bytes()
}

/// Bulk storage: big, shared, slow, and changed by others at any time.
///
/// Every call is cancel-safe in the sense that dropping its future leaves the pool as it was or as the call
/// would have left it. A call that changes something is durable when it returns, except where said; names
/// become durable at [`Pool::sync_dir`] of the directory that holds them.
#[async_trait]
pub trait Pool: Send + Sync + 'static {
    fn capabilities(&self) -> &Capabilities;

    /// How a person would name it: its URL, without secrets.
    fn url(&self) -> String;

    /// Requests that were sent again because the server or the way there failed, since the pool was opened.
    fn retried_requests(&self) -> u64 {
        0
    }

    /// What takes long just now; without a call to the store.
    fn under_way(&self) -> Vec<UnderWay> {
        Vec::new()
    }

    /// Whether something new can be made at a path: `NameTooLong` or `InvalidInput` where not. Without a call to the store,
    /// and only where the capability `path_max` is not `None`.
    fn check_path(&self, _path: &PoolPath) -> Result<()> {
        Ok(())
    }

    /// The attributes of what `path` names; a symlink is not followed.
    async fn stat(&self, path: &PoolPath) -> Result<Stat>;

    /// Whether a file that is known there is still of that version, by less than `stat` asks where the pool can
    /// (capability `versions_alone`). `false`: it may be so all the same.
    async fn still_has(&self, _path: &PoolPath, _version: &Version) -> Result<bool> {
        Ok(false)
    }

    /// The entries of a directory, each with its attributes. An entry that vanishes meanwhile is left out.
    async fn list(&self, path: &PoolPath) -> Result<Listing>;

    /// The same, with the contents of small files, at most `bytes` of them in all, where the pool can (capability
    /// `listed_contents`).
    async fn list_with_contents(&self, path: &PoolPath, _bytes: u64) -> Result<Listing> {
        self.list(path).await
    }

    /// Reads a range of one version: `Stale` where the object is, or becomes while it is read, another one.
    /// Shorter than asked for only at the end of the object.
    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes>;

    /// The same as [`Pool::read`], handed on as it comes where the pool can (capability `streams`). Before the end the
    /// stream may fail as `read` does.
    async fn stream(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Content> {
        let data = self.read(path, version, range).await?;
        Ok(stream::iter((!data.is_empty()).then_some(Ok(data))).boxed())
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>>;

    /// Replaces or creates a whole object of `size` bytes in one step that no reader sees the middle of, and
    /// makes its content durable. `Conflict` and no change where the target is not as `expected`. Where an extended
    /// attribute is refused, nothing is changed and the error names it.
    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat>;

    /// Overwrites a range in place (capability `ranged_write`); grows the object where the range ends behind
    /// its end.
    async fn write_at(&self, path: &PoolPath, offset: u64, data: Bytes) -> Result<Stat>;

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat>;

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat>;

    /// Makes an empty file, a fifo, a socket or a device file.
    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat>;

    /// Gives the object at `existing` another name. `Exists` where `new` exists.
    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat>;

    /// Removes anything but a directory. `Conflict` and no change where it is not as `expected`.
    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()>;

    /// Removes an empty directory.
    async fn remove_dir(&self, path: &PoolPath) -> Result<()>;

    /// Gives an object another name and returns its attributes under it.
    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat>;

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat>;

    /// All extended attributes with their values, those that ACLs are kept in among them: `E2BIG` where they are more
    /// than [`XATTRS_MAX_BYTES`].
    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>>;

    async fn set_xattr(&self, path: &PoolPath, name: &[u8], value: &[u8]) -> Result<()>;

    /// Whether something new of this kind can have all these extended attributes: the error names the one that cannot be
    /// had (`Error::attribute`). Says yes where that is not known beforehand.
    async fn check_xattrs(&self, _kind: FileKind, _xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        Ok(())
    }

    async fn remove_xattr(&self, path: &PoolPath, name: &[u8]) -> Result<()>;

    /// Makes the names in a directory durable.
    async fn sync_dir(&self, path: &PoolPath) -> Result<()>;

    /// Removes from one directory what these writers left unfinished there (`this_writer`), and returns how many files it
    /// was. They must have ended.
    async fn sweep_unfinished(&self, _dir: &PoolPath, _writers: &[String]) -> Result<u64> {
        Ok(0)
    }

    /// Unfinished files in one directory whose writers, on whatever node, ended more than a day ago: how many there are, or,
    /// with `remove`, were.
    async fn abandoned(&self, _dir: &PoolPath, _remove: bool) -> Result<u64> {
        Ok(0)
    }

    async fn space(&self) -> Result<Space>;

    /// Where the content of a file is kept, or goes that is made in a directory; `None` where the pool does not tell.
    async fn layout(&self, _path: &PoolPath) -> Result<Option<Layout>> {
        Ok(None)
    }
}
