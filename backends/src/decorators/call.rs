//! The description of a call, for decorators.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Content, DirEntry, Layout, Listing, Piece, PoolPath, SentPart, Space, Stat};

/// The calls of a pool, and the kinds of steps within a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CallKind {
    Stat,
    List,
    /// One page of a listing.
    ListPage,
    /// For a stream: its start.
    Read,
    /// One piece of a stream.
    ReadPiece,
    Readlink,
    Put,
    /// One piece that a `put`, a `send_part` or a `put_parts` sends to the pool.
    PutPiece,
    WriteAt,
    SyncFile,
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
    SendPart,
    ReadPart,
    RemovePart,
    PutParts,
}

impl CallKind {
    pub const ALL: [Self; 28] = [
        Self::Stat,
        Self::List,
        Self::ListPage,
        Self::Read,
        Self::ReadPiece,
        Self::Readlink,
        Self::Put,
        Self::PutPiece,
        Self::WriteAt,
        Self::SyncFile,
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
        Self::SendPart,
        Self::ReadPart,
        Self::RemovePart,
        Self::PutParts,
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
            Self::SyncFile => "sync_file",
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
            Self::SendPart => "send_part",
            Self::ReadPart => "read_part",
            Self::RemovePart => "remove_part",
            Self::PutParts => "put_parts",
        }
    }

    /// Whether it is a step within a call, and not a call of its own to the pool.
    pub fn is_step(self) -> bool {
        matches!(self, Self::ReadPiece | Self::PutPiece)
    }

    /// Whether it changes the pool if it succeeds.
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
                | Self::SyncFile
                | Self::SyncDir
                | Self::Space
                | Self::Layout
                | Self::ReadPart
        )
    }

    /// Whether it transfers content, so that its time limit depends on its length.
    pub fn moves_data(self) -> bool {
        matches!(
            self,
            Self::Read | Self::ReadPiece | Self::Put | Self::WriteAt | Self::SendPart | Self::ReadPart | Self::PutParts
        )
    }
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call on its way to a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolCall<'a> {
    pub kind: CallKind,
    /// The call that a step belongs to; otherwise the call itself.
    pub within: CallKind,
    /// The object; for a link the new name, for a rename the old one; the root for a part that is sent ahead.
    pub path: &'a PoolPath,
    /// The most content bytes that the call can transfer: the range of a read, the size of a `put` including its
    /// holes.
    pub bytes: u64,
}

impl<'a> PoolCall<'a> {
    pub(super) fn new(kind: CallKind, path: &'a PoolPath, bytes: u64) -> Self {
        Self { kind, within: kind, path, bytes }
    }

    /// A step within a call.
    pub(super) fn step(kind: CallKind, within: CallKind, path: &'a PoolPath, bytes: u64) -> Self {
        Self { kind, within, path, bytes }
    }
}

impl fmt::Display for PoolCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.path)
    }
}

/// An answer of a pool.
pub trait PoolAnswer: Send + 'static {
    /// Content bytes in the answer.
    fn content_bytes(&self) -> u64 {
        0
    }
}

impl PoolAnswer for Bytes {
    fn content_bytes(&self) -> u64 {
        self.len() as u64
    }
}

impl PoolAnswer for Option<Bytes> {
    fn content_bytes(&self) -> u64 {
        self.as_ref().map_or(0, PoolAnswer::content_bytes)
    }
}

impl PoolAnswer for Option<Vec<DirEntry>> {
    fn content_bytes(&self) -> u64 {
        self.iter().flatten().filter_map(|entry| entry.content.as_ref()).map(PoolAnswer::content_bytes).sum()
    }
}

impl PoolAnswer for Content {}
impl PoolAnswer for Stat {}
impl PoolAnswer for SentPart {}
impl PoolAnswer for bool {}
impl PoolAnswer for u64 {}
impl PoolAnswer for Listing {}
impl PoolAnswer for Vec<u8> {}
impl PoolAnswer for Vec<(Vec<u8>, Vec<u8>)> {}
impl PoolAnswer for Piece {}
impl PoolAnswer for Space {}
impl PoolAnswer for Option<Layout> {}
impl PoolAnswer for () {}
