//! What the catalog holds, in memory and on disk. Records are encoded by postcard.

use forebay_backends::{FileKind, Stat, Time, Version};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use smallvec::SmallVec;

use crate::FileState;
use crate::Ino;

/// A name in a directory: the directory and the bytes of the name.
pub type Link = (Ino, Box<[u8]>);

/// What the overlay and the pool each have under one name of one directory. They differ by exactly what has
/// not been flushed yet.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NameRecord {
    /// What the mount shows.
    pub here: Option<(Ino, FileKind)>,
    /// What the pool has, or had before `sent`.
    pub pool: Option<Ino>,
    /// What was sent to this name, oldest first, and no answer is known of: the pool may have any of it by now.
    /// Written before it is sent, deleted with the commit after.
    pub sent: Vec<Sent>,
}

impl NameRecord {
    /// Mount and pool have the same under it as under another.
    pub fn is_as(&self, other: &Self) -> bool {
        (self.here, self.pool) == (other.here, other.pool)
    }

    pub fn clean(ino: Ino, kind: FileKind) -> Self {
        Self { here: Some((ino, kind)), pool: Some(ino), sent: Vec::new() }
    }

    /// The same, but for what the mount shows.
    pub fn showing(self, here: Option<(Ino, FileKind)>) -> Self {
        Self { here, ..self }
    }

    pub fn here_ino(&self) -> Option<Ino> {
        self.here.map(|(ino, _)| ino)
    }

    /// The pool must be told, or asked.
    pub fn differs(&self) -> bool {
        self.here_ino() != self.pool || !self.sent.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.here.is_none() && self.pool.is_none() && self.sent.is_empty()
    }
}

/// What was sent to a name of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    pub ino: Ino,
    pub what: SentWhat,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SentWhat {
    /// Content, or times: what the pool's object shows of it. We set its modification time, to the nanosecond.
    Content { size: u64, mtime: Time },
    /// A directory, symlink or special file, made there with this mode and owner.
    Made { mode: u32, uid: u32, gid: u32 },
    /// What the pool had under another name before.
    Moved { from: Link },
    /// Another name of what the pool has.
    Linked,
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

/// Changes of extended attributes, name and value.
pub type XattrChanges = Vec<(Box<[u8]>, Option<Box<[u8]>>)>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeRecord {
    pub kind: FileKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Of a directory: 2 and one for each directory in it; 0 once it was removed.
    pub dir_nlink: u32,
    /// Names that the pool has for it and nobody asked for yet.
    pub unseen_links: u32,
    pub rdev: u64,
    /// While the content is dirty, the content file's own size and mtime are the truth, not these.
    pub size: u64,
    /// Bytes that the pool's copy occupies, where the pool tells.
    pub occupied_in_pool: Option<u64>,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// The names that the mount shows it under. Empty for the root, and after the last unlink.
    pub links: SmallVec<[Link; 1]>,
    /// The names that the pool has it under.
    pub pool_links: SmallVec<[Link; 1]>,
    /// The names of which [`NameRecord::sent`] names it.
    pub sent_to: SmallVec<[Link; 1]>,
    /// The version of the pool's copy: of the clean content, or the one that dirty content is based on.
    /// `None` where the pool has no copy.
    pub version: Option<Version>,
    pub file: FileState,
    pub listing: Listing,
    /// Of a symlink, once known.
    pub target: Option<Box<[u8]>>,
    /// Once known: as the mount shows them.
    pub xattrs: Option<Xattrs>,
    pub dirty: DirtyAttrs,
    /// The extended attributes that were changed here: their values, or that they were removed.
    pub dirty_xattrs: XattrChanges,
    /// Others changed the content after a name was removed here that the pool still has.
    pub changed_since_removal: bool,
}

/// Content that fits may lie in the inode itself: an inode of ext4 has so many bytes at most.
const INLINE_BYTES: u64 = 4096;
/// What `st_blocks` counts in.
const BLOCK_BYTES: u64 = 512;

/// A version that no object has: what carries it is asked for again.
pub fn unmatched() -> Version {
    Version::Tag { etag: String::new(), id: String::new(), size: 0, mtime: Time::default() }
}

impl InodeRecord {
    /// Whether the pool has it under a name that was removed here.
    pub fn has_removed_names(&self) -> bool {
        self.pool_links.iter().any(|link| !self.links.contains(link))
    }

    /// The version from which the pool's name may be taken that was removed here. Who removed it had not seen what
    /// others wrote since: where it is the last name, that is to stay.
    pub fn removed_version(&self) -> Option<Version> {
        let last = self.links.is_empty() && self.pool_links.len() < 2 && self.unseen_links == 0;
        if last && self.changed_since_removal { Some(unmatched()) } else { self.version.clone() }
    }

    /// What the pool shows, clean.
    pub fn from_pool(stat: &Stat, link: Option<Link>) -> Self {
        let links: SmallVec<[Link; 1]> = link.into_iter().collect();
        Self {
            kind: stat.kind,
            mode: stat.mode,
            uid: stat.uid,
            gid: stat.gid,
            dir_nlink: if stat.kind == FileKind::Directory { stat.nlink } else { 0 },
            unseen_links: unseen(stat, links.len()),
            rdev: stat.rdev,
            size: stat.size,
            occupied_in_pool: stat.occupied,
            atime: stat.atime,
            mtime: stat.mtime,
            ctime: stat.ctime,
            pool_links: links.clone(),
            links,
            sent_to: SmallVec::new(),
            version: Some(stat.version.clone()),
            file: FileState::absent(),
            listing: Listing::Partly,
            target: None,
            xattrs: None,
            dirty: DirtyAttrs::default(),
            dirty_xattrs: Vec::new(),
            changed_since_removal: false,
        }
    }

    /// Takes over the attributes that were not changed here.
    pub fn take_attrs(&mut self, stat: &Stat) {
        self.take_access(stat);
        if !self.dirty.times {
            (self.atime, self.mtime, self.ctime) = (stat.atime, stat.mtime, stat.ctime);
        }
        if self.kind != FileKind::Directory {
            self.size = stat.size;
        }
        self.occupied_in_pool = stat.occupied;
        self.count_links(stat);
        self.rdev = stat.rdev;
    }

    /// Bytes that clean content takes: what the pool's copy does, where that is told; else all. A file system may keep
    /// a few bytes in the inode itself and count no block for them: such a file has no holes. Others count a block only
    /// once it is on the disk, and some programs read nothing of a file that has no block at all: it has one.
    pub fn clean_bytes(&self) -> u64 {
        match self.occupied_in_pool {
            Some(occupied) if self.size > INLINE_BYTES => occupied.max(BLOCK_BYTES),
            _ => self.size,
        }
    }

    /// Mode and owner as the pool has them, but for what was changed here.
    pub fn take_access(&mut self, stat: &Stat) {
        if !self.dirty.mode {
            self.mode = stat.mode;
        }
        if !self.dirty.owner {
            (self.uid, self.gid) = (stat.uid, stat.gid);
        }
    }

    /// Of the names that the pool counts, those that are not known here.
    pub fn count_links(&mut self, stat: &Stat) {
        self.unseen_links = unseen(stat, self.pool_links.len());
    }

    /// What `stat` shows.
    pub fn nlink(&self) -> u32 {
        match self.kind {
            FileKind::Directory => self.dir_nlink,
            _ => self.links.len() as u32 + self.unseen_links,
        }
    }

    /// Content or attributes are newer than the pool's, or the pool has no copy and should.
    pub fn is_dirty(&self) -> bool {
        self.file.is_dirty() || self.dirty.any() || !self.dirty_xattrs.is_empty()
    }

    /// What the pool has there is the inode, and nothing that others put in its place.
    pub fn is_object(&self, stat: &Stat) -> bool {
        self.kind == stat.kind && self.version.as_ref().is_some_and(|v| v.same_object(&stat.version))
    }

    /// Sets or removes one extended attribute, for the flush too.
    pub fn set_xattr(&mut self, name: &[u8], value: Option<&[u8]>) {
        if let Some(xattrs) = &mut self.xattrs {
            change_xattr(xattrs, name, value);
        }
        self.dirty_xattrs.retain(|(n, _)| **n != *name);
        self.dirty_xattrs.push((name.into(), value.map(Into::into)));
    }

    /// The pool's extended attributes are these: shown are they with what was changed here since.
    pub fn learn_xattrs(&mut self, pooled: Xattrs) -> &Xattrs {
        let mut xattrs = pooled;
        for (name, value) in &self.dirty_xattrs {
            change_xattr(&mut xattrs, name, value.as_deref());
        }
        xattrs.sort();
        self.xattrs.insert(xattrs)
    }

    /// The pool is to be told of all that are there.
    pub fn all_xattrs_differ(&mut self) {
        let known = self.xattrs.iter().flatten().cloned();
        let mut all: XattrChanges = known.map(|(name, value)| (name, Some(value))).collect();
        all.extend(self.dirty_xattrs.drain(..).filter(|(_, value)| value.is_none()));
        self.dirty_xattrs = all;
    }

    /// The name under which the pool is asked about it: one that stays, if there is any.
    pub fn pool_link(&self) -> Option<&Link> {
        self.pool_links.iter().find(|link| self.links.contains(link)).or(self.pool_links.first())
    }

    /// In the pool under some name.
    pub fn in_pool(&self) -> bool {
        !self.pool_links.is_empty()
    }

    /// Reachable under a name, though perhaps one that nobody asked for yet.
    pub fn has_names(&self) -> bool {
        !self.links.is_empty() || self.unseen_links > 0
    }
}

fn change_xattr(xattrs: &mut Xattrs, name: &[u8], value: Option<&[u8]>) {
    xattrs.retain(|(n, _)| **n != *name);
    if let Some(value) = value {
        xattrs.push((name.into(), value.into()));
        xattrs.sort();
    }
}

fn unseen(stat: &Stat, known: usize) -> u32 {
    match stat.kind {
        FileKind::Directory => 0,
        _ => stat.nlink.saturating_sub(known as u32),
    }
}

/// A promise to somebody that eviction will not touch a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub owner: String,
    /// Seconds since 1970; `None` until it is released.
    pub expires_unix: Option<u64>,
    pub bytes: u64,
}

impl LeaseRecord {
    fn holds(&self, now_unix: u64) -> bool {
        self.expires_unix.is_none_or(|at| at > now_unix)
    }
}

/// The leases of one file, one for each owner: that one ends is nothing to the others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases(Vec<LeaseRecord>);

impl Leases {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// That of an owner, if its time is not up; at moment 0 no time is.
    pub fn of(&self, owner: &str, now_unix: u64) -> Option<&LeaseRecord> {
        self.holding(now_unix).find(|lease| lease.owner == owner)
    }

    /// Those whose time is not up.
    pub fn holding(&self, now_unix: u64) -> impl Iterator<Item = &LeaseRecord> {
        self.0.iter().filter(move |lease| lease.holds(now_unix))
    }

    pub fn hold(&self, now_unix: u64) -> bool {
        self.holding(now_unix).next().is_some()
    }

    /// What they protect together: all are of the same bytes, from the first on. `None` where none holds.
    pub fn bytes(&self, now_unix: u64) -> Option<u64> {
        self.holding(now_unix).map(|lease| lease.bytes).max()
    }

    /// Grants a lease, in place of the one that its owner had. Those whose time is up go.
    pub fn grant(&mut self, lease: LeaseRecord, now_unix: u64) {
        self.0.retain(|known| known.holds(now_unix) && known.owner != lease.owner);
        self.0.push(lease);
    }

    /// Ends the lease of an owner.
    pub fn end(&mut self, owner: &str) {
        self.0.retain(|lease| lease.owner != owner);
    }
}

pub fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    // Records hold no maps and no types that postcard refuses, so this cannot fail.
    postcard::to_stdvec(record).unwrap_or_default()
}

/// Adds a record to others.
pub fn append<T: Serialize>(record: &T, others: Vec<u8>) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_extend(record, others)
}

/// The first of several records, and the others.
pub fn decode_first<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), postcard::Error> {
    postcard::take_from_bytes(bytes)
}

pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(bytes)
}
