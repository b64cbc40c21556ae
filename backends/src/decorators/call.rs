//! What a decorator is told about a call.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Content, DirEntry, Layout, Listing, Piece, PoolPath, Space, Stat};

/// The calls of a pool, and the kinds of steps within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallKind {
    Stat,
    List,
    /// One page of a listing.
    ListPage,
    /// Of a stream its beginning.
    Read,
    /// One piece of a stream.
    ReadPiece,
    Readlink,
    Put,
    /// One piece on its way into a `put`.
    PutPiece,
    WriteAt,
    Mkdir,
    Symlink,
    Mknod,
    Link,
    Remove,
    RemoveDir,
    Rename,
    SetAttrs,
    Xattrs,
    SetXattr,
    RemoveXattr,
    SyncDir,
    Space,
    Layout,
}

impl CallKind {
    pub const ALL: [Self; 23] = [
        Self::Stat,
        Self::List,
        Self::ListPage,
        Self::Read,
        Self::ReadPiece,
        Self::Readlink,
        Self::Put,
        Self::PutPiece,
        Self::WriteAt,
        Self::Mkdir,
        Self::Symlink,
        Self::Mknod,
        Self::Link,
        Self::Remove,
        Self::RemoveDir,
        Self::Rename,
        Self::SetAttrs,
        Self::Xattrs,
        Self::SetXattr,
        Self::RemoveXattr,
        Self::SyncDir,
        Self::Space,
        Self::Layout,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Stat => "stat",
            Self::List => "list",
            Self::ListPage => "list_page",
            Self::Read => "read",
            Self::ReadPiece => "read_piece",
            Self::Readlink => "readlink",
            Self::Put => "put",
            Self::PutPiece => "put_piece",
            Self::WriteAt => "write_at",
            Self::Mkdir => "mkdir",
            Self::Symlink => "symlink",
            Self::Mknod => "mknod",
            Self::Link => "link",
            Self::Remove => "remove",
            Self::RemoveDir => "remove_dir",
            Self::Rename => "rename",
            Self::SetAttrs => "set_attrs",
            Self::Xattrs => "xattrs",
            Self::SetXattr => "set_xattr",
            Self::RemoveXattr => "remove_xattr",
            Self::SyncDir => "sync_dir",
            Self::Space => "space",
            Self::Layout => "layout",
        }
    }

    /// Whether it is a step within a call, and no call of its own to the pool.
    pub fn is_step(self) -> bool {
        matches!(self, Self::ReadPiece | Self::PutPiece)
    }

    /// Whether it changes the pool where it succeeds.
    pub fn changes(self) -> bool {
        !matches!(
            self,
            Self::Stat
                | Self::List
                | Self::ListPage
                | Self::Read
                | Self::ReadPiece
                | Self::Readlink
                | Self::PutPiece
                | Self::Xattrs
                | Self::SyncDir
                | Self::Space
                | Self::Layout
        )
    }

    /// Whether it moves content, so that its length decides how long it may take.
    pub fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::ReadPiece | Self::Put | Self::WriteAt)
    }
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call on its way to a pool.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    pub kind: CallKind,
    /// The object; of a link the new name, of a rename the old one.
    pub path: &'a PoolPath,
    /// Content bytes that it is about, at most: the range of a read, the size of a `put` with its holes.
    pub bytes: u64,
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.path)
    }
}

/// An answer of a pool.
pub trait Answer: Send + 'static {
    /// Content bytes in it.
    fn content_bytes(&self) -> u64 {
        0
    }
}

impl Answer for Bytes {
    fn content_bytes(&self) -> u64 {
        self.len() as u64
    }
}

impl Answer for Option<Bytes> {
    fn content_bytes(&self) -> u64 {
        self.as_ref().map_or(0, Answer::content_bytes)
    }
}

impl Answer for Option<Vec<DirEntry>> {
    fn content_bytes(&self) -> u64 {
        self.iter().flatten().filter_map(|entry| entry.content.as_ref()).map(Answer::content_bytes).sum()
    }
}

impl Answer for Content {}
impl Answer for Stat {}
impl Answer for bool {}
impl Answer for u64 {}
impl Answer for Listing {}
impl Answer for Vec<u8> {}
impl Answer for Vec<(Vec<u8>, Vec<u8>)> {}
impl Answer for Piece {}
impl Answer for Space {}
impl Answer for Option<Layout> {}
impl Answer for () {}
