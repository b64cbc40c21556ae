//! The trait that every pool implements.

use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, stream};
use serde::{Deserialize, Serialize};

use crate::Version;
use crate::{
    Attrs, Capabilities, DirEntry, Error, ErrorKind, Expected, FileKind, Layout, NAME_MAX_BYTES, PoolPath, RenameMode,
    Result, SetAttrs, Side, Space, Stat, Time, WorkProgress,
};

/// A piece of an object's content. The gaps between pieces are holes, which read as zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Offset in bytes from the start of the object.
    pub offset: u64,
    pub data: Bytes,
}

/// The content of an object: pieces in ascending order that do not overlap.
pub type Pieces<'a> = BoxStream<'a, Result<Piece>>;

/// A range of content that the pool holds before the object exists: see [`Pool::send_part`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentPart {
    /// The name that the caller gave it.
    pub name: String,
    /// Length in bytes.
    pub len: u64,
    /// The pool's mark of this content, by which a replaced part is recognised.
    pub tag: String,
}

/// A range of the content of a [`Pool::put_parts`].
pub enum Part<'a> {
    /// It was sent before.
    Sent(SentPart),
    /// It is sent now: `len` bytes. The offsets of the pieces count from the start of the part.
    Here { len: u64, content: Pieces<'a> },
}

/// Whether a part that is sent ahead can have the name.
pub(crate) fn is_part_name(name: &str) -> bool {
    (1..=NAME_MAX_BYTES).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// The length of all parts; `None` if one that is not the last has less than `least` bytes, or the sum is too large.
pub(crate) fn parts_len(parts: &[Part<'_>], least: u64) -> Option<u64> {
    let all_but_last = &parts[..parts.len().saturating_sub(1)];
    if all_but_last.iter().any(|part| part.len() < least) {
        return None;
    }
    parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.len()))
}

impl Part<'_> {
    pub fn len(&self) -> u64 {
        match self {
            Self::Sent(part) => part.len,
            Self::Here { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A range of an object's content, in order, in non-empty pieces of any length.
pub type Content = BoxStream<'static, Result<Bytes>>;

/// The entries of a directory, in pages, in no particular order.
pub type Listing = BoxStream<'static, Result<Vec<DirEntry>>>;

/// The prefix of names that a pool uses for its own unfinished work. Listings never show them, and callers of
/// [`Pool`] may not use them.
pub const RESERVED_PREFIX: &[u8] = b".forebay~";

/// The largest file whose content a listing includes: so few bytes take no longer to transfer than an answer without
/// content.
pub const LISTED_CONTENT_BYTES: u64 = 16 << 10;

/// The limit for the names and values of one object's extended attributes together, in bytes, because a caller holds
/// all of them in memory. It leaves room for one value of the largest size and for those that systems set.
pub const XATTRS_MAX_BYTES: usize = 128 << 10;

/// Marks a file with several names while it is rewritten in place, when its bytes are not all of one version. The
/// value describes the version being written: [`unfinished_mark`]. The mark is removed once everything is written.
pub const UNFINISHED_XATTR: &[u8] = b"user.forebay.unfinished";

/// The value of [`UNFINISHED_XATTR`] while content of `size` bytes, modified at `mtime`, is written.
pub fn unfinished_mark(size: u64, mtime: Time) -> Vec<u8> {
    format!("{size} {} {}", mtime.secs, mtime.nanos).into_bytes()
}

/// Bulk storage: big, shared, slow, and changed by other clients at any time.
///
/// Every call is cancel-safe in this sense: dropping its future leaves the pool either unchanged or as the completed
/// call would have left it. A change is durable when its call returns, except where stated; names become durable at
/// [`Pool::sync_dir`] of the directory that holds them.
#[async_trait]
pub trait Pool: Send + Sync + 'static {
    fn capabilities(&self) -> &Capabilities;

    /// The name for people: the pool's URL, without secrets.
    fn url(&self) -> String;

    /// Requests that were retried because the server or the network failed, since the pool was opened.
    fn retried_requests(&self) -> u64 {
        0
    }

    /// Long operations in progress. Makes no call to the store.
    fn under_way(&self) -> Vec<WorkProgress> {
        Vec::new()
    }

    /// Checks whether a new object can be made at a path: fails with `NameTooLong` or `InvalidInput` if not. Makes no
    /// call to the store; checks only if the capability `path_max` is not `None`.
    fn check_path(&self, _path: &PoolPath) -> Result<()> {
        Ok(())
    }

    /// The attributes of the object at `path`; a symlink is not followed.
    async fn stat(&self, path: &PoolPath) -> Result<Stat>;

    /// Whether the file at `path` is still of a known version, by a cheaper request than `stat` if the pool can
    /// (capability `versions.alone`). `false` does not mean that the file changed.
    async fn still_has(&self, _path: &PoolPath, _version: &Version) -> Result<bool> {
        Ok(false)
    }

    /// The entries of a directory, each with its attributes. An entry that vanishes during the listing is left out.
    async fn list(&self, path: &PoolPath) -> Result<Listing>;

    /// Like [`Pool::list`], with the contents of small files, at most `bytes` of them in all, if the pool can
    /// (capability `listed_contents`).
    async fn list_with_contents(&self, path: &PoolPath, _bytes: u64) -> Result<Listing> {
        self.list(path).await
    }

    /// Reads a range of one version: fails with `Stale` if the object is, or becomes during the read, another
    /// version. Returns fewer bytes than requested only at the end of the object.
    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes>;

    /// Like [`Pool::read`], but returns the bytes as they arrive if the pool can (capability `streams`). The stream
    /// may fail before its end as `read` does.
    async fn stream(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Content> {
        let data = self.read(path, version, range).await?;
        Ok(stream::iter((!data.is_empty()).then_some(Ok(data))).boxed())
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>>;

    /// Replaces or creates a whole object of `size` bytes in one step, so that no reader sees an intermediate state,
    /// and makes its content durable. Fails with `Conflict`, without a change, if the target is not as `expected`. If
    /// an extended attribute is refused, nothing is changed and the error names it.
    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat>;

    /// Overwrites a range in place (capability `ranged_write`); grows the object if the range ends beyond its end. The
    /// bytes are durable when [`Pool::sync_file`] of the same object has returned.
    async fn write_at(&self, path: &PoolPath, offset: u64, data: Bytes) -> Result<Stat>;

    /// Makes durable what [`Pool::write_at`] wrote to a file, also before this pool was opened. By default there is
    /// nothing to do: for pools that write durably.
    ///
    /// # Errors
    /// Those of the pool: bytes that were written may be lost, and a later call may not tell that again.
    async fn sync_file(&self, _path: &PoolPath) -> Result<()> {
        Ok(())
    }

    /// Sends `len` bytes of content before the object that will have them (capability `parts_ahead`). They are durable
    /// when this returns, and stay until [`Pool::remove_part`]. No listing shows them. `name`: letters, digits and
    /// hyphens, unique in the pool; a part that has the name is replaced. The offsets of the pieces count from the start
    /// of the part.
    async fn send_part(&self, _name: &str, _len: u64, _content: Pieces<'_>) -> Result<SentPart> {
        Err(Error::new(ErrorKind::Unsupported, Side::Pool, "parts ahead of the object"))
    }

    /// Reads a range of a part that was sent. Fails with `NotFound` if it was removed, and with `Stale` if it was
    /// replaced. Returns fewer bytes than requested only at the end of the part.
    async fn read_part(&self, _part: &SentPart, _range: Range<u64>) -> Result<Bytes> {
        Err(Error::new(ErrorKind::Unsupported, Side::Pool, "parts ahead of the object"))
    }

    /// Removes a part. Succeeds if there is none of the name.
    async fn remove_part(&self, _name: &str) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, Side::Pool, "parts ahead of the object"))
    }

    /// Like [`Pool::put`], of content in consecutive parts. All but the last have at least as many bytes as the
    /// capability `parts_ahead` says. The parts that were sent before stay. Fails with `NotFound` or `Stale`, without a
    /// change, if one of them is gone or was replaced.
    async fn put_parts(
        &self,
        path: &PoolPath,
        _parts: Vec<Part<'_>>,
        _attrs: &Attrs,
        _expected: &Expected,
    ) -> Result<Stat> {
        Err(Error::new(ErrorKind::Unsupported, Side::Pool, format!("{path}: parts ahead of the object")))
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat>;

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat>;

    /// Makes an empty file, a fifo, a socket or a device file.
    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat>;

    /// Gives the object at `existing` another name. `Exists` if `new` exists.
    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat>;

    /// Removes anything but a directory. Fails with `Conflict`, without a change, if the object is not as `expected`.
    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()>;

    /// Removes an empty directory.
    async fn remove_dir(&self, path: &PoolPath) -> Result<()>;

    /// Gives an object another name and returns its attributes under it.
    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat>;

    /// Changes attributes. Fails with `Busy`, without a change, if the object is not as [`SetAttrs::only_if`] says.
    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat>;

    /// All extended attributes with their values, including those that hold ACLs. `E2BIG` if they exceed
    /// [`XATTRS_MAX_BYTES`].
    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>>;

    async fn set_xattr(&self, path: &PoolPath, name: &[u8], value: &[u8]) -> Result<()>;

    /// Checks whether a new object of this kind can have all these extended attributes. The error names the first
    /// that it cannot have (`Error::attribute`). Succeeds if the pool cannot know in advance.
    async fn check_xattrs(&self, _kind: FileKind, _xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        Ok(())
    }

    async fn remove_xattr(&self, path: &PoolPath, name: &[u8]) -> Result<()>;

    /// Makes the names in a directory durable.
    async fn sync_dir(&self, path: &PoolPath) -> Result<()>;

    /// Removes the unfinished files of these writers (`this_writer`) from one directory, and returns their number.
    /// The writers must have ended.
    async fn sweep_unfinished(&self, _dir: &PoolPath, _writers: &[String]) -> Result<u64> {
        Ok(0)
    }

    /// Counts the unfinished files in one directory whose writers, on any node, ended more than a day ago. With
    /// `remove`, also removes them.
    async fn abandoned(&self, _dir: &PoolPath, _remove: bool) -> Result<u64> {
        Ok(0)
    }

    async fn space(&self) -> Result<Space>;

    /// The layout of a file, or of new files in a directory; `None` if the pool does not tell.
    async fn layout(&self, _path: &PoolPath) -> Result<Option<Layout>> {
        Ok(None)
    }
}
