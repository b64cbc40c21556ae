//! What the catalog holds, in memory and on disk. Records are encoded by postcard.

use forebay_backends::{FileKind, Stat, Time, Version};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use smallvec::SmallVec;

use crate::Ino;
use crate::extents::ExtentSet;
use crate::state::FileState;

/// The number of a content file: given once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContentId(pub u64);

/// A name in a directory: the directory and the bytes of the name.
pub type Link = (Ino, Box<[u8]>);

/// What the overlay and the pool each have under one name of one directory. They differ by exactly what has
/// not been flushed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NameRecord {
    /// What the mount shows.
    pub here: Option<(Ino, FileKind)>,
    /// What the pool has, as far as we know.
    pub pool: Option<Ino>,
}

impl NameRecord {
    pub fn clean(ino: Ino, kind: FileKind) -> Self {
        Self { here: Some((ino, kind)), pool: Some(ino) }
    }

    pub fn here_ino(&self) -> Option<Ino> {
        self.here.map(|(ino, _)| ino)
    }

    /// The pool must be told.
    pub fn differs(&self) -> bool {
        self.here_ino() != self.pool
    }

    pub fn is_empty(&self) -> bool {
        self.here.is_none() && self.pool.is_none()
    }
}

/// Whether the catalog has all names of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Listing {
    /// Only those that somebody asked for.
    Partly,
    /// All, as of this version of the pool's directory; `None` for a directory that was made here.
    Complete(Option<Version>),
}

/// Attributes that were changed here and not flushed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DirtyAttrs {
    pub mode: bool,
    pub owner: bool,
    pub times: bool,
}

impl DirtyAttrs {
    pub fn any(self) -> bool {
        self.mode || self.owner || self.times
    }
}

/// Extended attributes, name and value.
pub type Xattrs = Vec<(Box<[u8]>, Box<[u8]>)>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeRecord {
    pub kind: FileKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u64,
    /// While the content is dirty, the content file's own size and mtime are the truth, not these.
    pub size: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// The names that the mount shows it under. Empty for the root, and after the last unlink.
    pub links: SmallVec<[Link; 1]>,
    /// The names that the pool has it under.
    pub pool_links: SmallVec<[Link; 1]>,
    /// The version of the pool's copy: of the clean content, or the one that dirty content is based on.
    /// `None` where the pool has no copy.
    pub version: Option<Version>,
    pub file: FileState,
    pub listing: Listing,
    /// Of a symlink, once known.
    pub target: Option<Box<[u8]>>,
    /// Once known.
    pub xattrs: Option<Xattrs>,
    pub dirty: DirtyAttrs,
    /// Names of the extended attributes that were changed here.
    pub dirty_xattrs: Vec<Box<[u8]>>,
}

impl InodeRecord {
    /// What the pool shows, clean.
    pub fn from_pool(stat: &Stat, link: Option<Link>) -> Self {
        let links: SmallVec<[Link; 1]> = link.into_iter().collect();
        Self {
            kind: stat.kind,
            mode: stat.mode,
            uid: stat.uid,
            gid: stat.gid,
            nlink: stat.nlink,
            rdev: stat.rdev,
            size: stat.size,
            atime: stat.atime,
            mtime: stat.mtime,
            ctime: stat.ctime,
            pool_links: links.clone(),
            links,
            version: Some(stat.version.clone()),
            file: FileState::absent(),
            listing: Listing::Partly,
            target: None,
            xattrs: None,
            dirty: DirtyAttrs::default(),
            dirty_xattrs: Vec::new(),
        }
    }

    /// Takes over the attributes that were not changed here.
    pub fn take_attrs(&mut self, stat: &Stat) {
        if !self.dirty.mode {
            self.mode = stat.mode;
        }
        if !self.dirty.owner {
            (self.uid, self.gid) = (stat.uid, stat.gid);
        }
        if !self.dirty.times {
            (self.atime, self.mtime, self.ctime) = (stat.atime, stat.mtime, stat.ctime);
        }
        if self.kind == FileKind::File {
            self.size = stat.size;
        }
        self.count_links(stat.nlink);
        self.rdev = stat.rdev;
    }

    /// Counts the names of anything but a directory from those that the pool counts, of which some may not be
    /// known here: names that it does not have yet are more, names that it is to lose are fewer.
    pub fn count_links(&mut self, pool_nlink: u32) {
        if self.kind == FileKind::Directory {
            return;
        }
        let more = self.links.iter().filter(|l| !self.pool_links.contains(l)).count();
        let fewer = self.pool_links.iter().filter(|l| !self.links.contains(l)).count();
        self.nlink = (pool_nlink + more as u32).saturating_sub(fewer as u32);
    }

    /// Content or attributes are newer than the pool's, or the pool has no copy and should.
    pub fn is_dirty(&self) -> bool {
        self.file.is_dirty() || self.dirty.any() || !self.dirty_xattrs.is_empty()
    }

    /// In the pool under some name.
    pub fn in_pool(&self) -> bool {
        !self.pool_links.is_empty()
    }
}

/// What is valid in a content file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentRecord {
    pub ino: Ino,
    /// Bytes that it is known to occupy.
    pub bytes: u64,
    /// Valid ranges of a partial file; empty where all is valid or the content is dirty.
    pub extents: ExtentSet,
    /// The epoch in which bytes were fetched into it last; see `Catalog::epoch`.
    pub epoch: u64,
    /// CRC32C of each fetched chunk, by chunk number.
    pub checksums: Vec<(u32, u32)>,
}

/// A promise that eviction will not touch a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub owner: String,
    /// Seconds since 1970; `None` until it is released.
    pub expires_unix: Option<u64>,
    pub bytes: u64,
}

pub(crate) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    // Records hold no maps and no types that postcard refuses, so this cannot fail.
    postcard::to_stdvec(record).unwrap_or_default()
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(bytes)
}
