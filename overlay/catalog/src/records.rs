//! The records of the catalog, in memory and on disk. They are encoded by postcard.

use forebay_backends::{FileKind, Stat, Time, Version};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use smallvec::SmallVec;

use crate::FileState;
use crate::Ino;

/// A name in a directory: the directory and the bytes of the name.
pub type Link = (Ino, Box<[u8]>);

/// What the overlay and the pool each have under one name of one directory. They differ by exactly the unflushed
/// changes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NameRecord {
    /// The object that the mount shows.
    pub here: Option<(Ino, FileKind)>,
    /// The object that the pool has, or had before the calls that are pending.
    pub pool: Option<Ino>,
    /// Calls that were sent to the pool for this name without a known answer, oldest first: the pool may have executed
    /// any of them. Written before the call is sent, deleted by the commit after the answer.
    pub pending: Vec<PendingCall>,
}

impl NameRecord {
    /// Returns whether mount and pool have the same under this name as in `other`.
    pub fn is_as(&self, other: &Self) -> bool {
        (self.here, self.pool) == (other.here, other.pool)
    }

    pub fn clean(ino: Ino, kind: FileKind) -> Self {
        Self { here: Some((ino, kind)), pool: Some(ino), pending: Vec::new() }
    }

    /// Returns the record with `here` replaced.
    pub fn showing(self, here: Option<(Ino, FileKind)>) -> Self {
        Self { here, ..self }
    }

    pub fn here_ino(&self) -> Option<Ino> {
        self.here.map(|(ino, _)| ino)
    }

    /// Returns whether the pool must be changed, or asked about an unanswered call.
    pub fn differs(&self) -> bool {
        self.here_ino() != self.pool || !self.pending.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.here.is_none() && self.pool.is_none() && self.pending.is_empty()
    }
}

/// A call that was sent for a name of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCall {
    pub ino: Ino,
    pub what: PendingChange,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PendingChange {
    /// Content or times: the size and modification time that the pool's object shows afterwards. The daemon sets the
    /// modification time, to the nanosecond.
    Content { size: u64, mtime: Time },
    /// A directory, symlink or special file was created with this mode and owner.
    Made { mode: u32, uid: u32, gid: u32 },
    /// The pool's object was renamed from this name.
    Moved { from: Link },
    /// The pool's object got this name as a further hard link.
    Linked,
    /// The name was removed. The mount may give it to the same file again before the answer is known.
    Removed,
}

/// How many names of a directory the catalog has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListingState {
    /// Only those that were looked up.
    Partly,
    /// All, as of this version of the pool's directory; `None` for a directory that was created in the mount.
    Complete(Option<Version>),
}

/// Attributes that were changed in the mount and are not flushed yet.
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

/// Extended attributes: name and value.
pub type Xattrs = Vec<(Box<[u8]>, Box<[u8]>)>;

/// Changes of extended attributes: name and new value, or `None` if the attribute was removed.
pub type XattrChanges = Vec<(Box<[u8]>, Option<Box<[u8]>>)>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeRecord {
    pub kind: FileKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// For a directory: 2, plus one for each directory in it; 0 after it was removed.
    pub dir_nlink: u32,
    /// The number of names that the pool has for it and that were never looked up.
    pub unseen_links: u32,
    pub rdev: u64,
    /// While the content is dirty, the content file's own size is the truth, and its mtime replaces `mtime`.
    pub size: u64,
    /// Bytes that the pool's copy occupies, if the pool reports them.
    pub occupied_in_pool: Option<u64>,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    /// Its names in the mount. Empty for the root, and after the last unlink.
    pub links: SmallVec<[Link; 1]>,
    /// Its names in the pool.
    pub pool_links: SmallVec<[Link; 1]>,
    /// The names whose [`NameRecord::pending`] contains this inode.
    pub pending_at: SmallVec<[Link; 1]>,
    /// The version of the pool's copy: the version of the clean content, or the one that the dirty content is based on.
    /// `None` if the pool has no copy.
    pub version: Option<Version>,
    pub file: FileState,
    /// Of anything but a directory: `Partly` if the pool had it, even if the pool has lost it since.
    pub listing: ListingState,
    /// The target of a symlink, once known.
    pub target: Option<Box<[u8]>>,
    /// The extended attributes as the mount shows them, once known.
    pub xattrs: Option<Xattrs>,
    pub dirty: DirtyAttrs,
    /// The extended attributes that were changed in the mount: new values and removals.
    pub dirty_xattrs: XattrChanges,
    /// Another client changed the content after a name was removed in the mount that the pool still has.
    pub changed_since_removal: bool,
}

/// The most bytes of content that a file system may store in the inode itself: an inode of ext4 has at most this size.
const INLINE_BYTES: u64 = 4096;
/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Returns a version that no object has: a record with this version is always revalidated.
pub fn unmatched() -> Version {
    Version::Tag { etag: String::new(), id: String::new(), size: 0, mtime: Time::default() }
}

impl InodeRecord {
    /// Returns whether the pool has it under a name that was removed in the mount.
    pub fn has_removed_names(&self) -> bool {
        self.pool_links.iter().any(|link| !self.links.contains(link))
    }

    /// Returns the version that the pool's object must have for the flush to remove a name that was removed in the
    /// mount. If another client changed the content since the removal, the caller of unlink had not seen that change.
    /// So, if it is the object's last name, no version matches, and the object stays.
    pub fn removed_version(&self) -> Option<Version> {
        let last = self.links.is_empty() && self.pool_links.len() < 2 && self.unseen_links == 0;
        if last && self.changed_since_removal { Some(unmatched()) } else { self.version.clone() }
    }

    /// Returns the record of a clean inode, from the attributes of the pool.
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
            size: size_of(stat),
            occupied_in_pool: stat.occupied,
            atime: stat.atime,
            mtime: stat.mtime,
            ctime: stat.ctime,
            pool_links: links.clone(),
            links,
            pending_at: SmallVec::new(),
            version: Some(stat.version.clone()),
            file: FileState::absent(),
            listing: ListingState::Partly,
            target: None,
            xattrs: None,
            dirty: DirtyAttrs::default(),
            dirty_xattrs: Vec::new(),
            changed_since_removal: false,
        }
    }

    /// Copies the pool's attributes, except those that were changed in the mount.
    pub fn take_attrs(&mut self, stat: &Stat) {
        self.take_access(stat);
        if !self.dirty.times {
            (self.atime, self.mtime, self.ctime) = (stat.atime, stat.mtime, stat.ctime);
        }
        if self.kind != FileKind::Directory {
            self.take_size(stat);
        }
        self.occupied_in_pool = stat.occupied;
        self.count_links(stat);
        self.rdev = stat.rdev;
    }

    /// Copies the size of the pool's copy.
    pub fn take_size(&mut self, stat: &Stat) {
        self.size = size_of(stat);
    }

    /// Returns the bytes that clean content occupies: as many as the pool's copy, if the pool reports them, else its
    /// size. A file system may store a few bytes in the inode itself and count no block for them, so a file of at most
    /// 4096 bytes is taken to have no holes. Other file systems count a block only once it is on the disk, and some
    /// programs treat a file without blocks as empty, so a larger file has at least one block.
    pub fn clean_bytes(&self) -> u64 {
        match self.occupied_in_pool {
            Some(occupied) if self.size > INLINE_BYTES => occupied.max(BLOCK_BYTES),
            _ => self.size,
        }
    }

    /// Copies the pool's mode and owner, except those that were changed in the mount.
    pub fn take_access(&mut self, stat: &Stat) {
        if !self.dirty.mode {
            self.mode = stat.mode;
        }
        if !self.dirty.owner {
            (self.uid, self.gid) = (stat.uid, stat.gid);
        }
    }

    /// Counts the names that the pool has and the catalog does not know.
    pub fn count_links(&mut self, stat: &Stat) {
        self.unseen_links = unseen(stat, self.pool_links.len());
    }

    /// Returns the link count that `stat` shows.
    pub fn nlink(&self) -> u32 {
        match self.kind {
            FileKind::Directory => self.dir_nlink,
            _ => self.links.len() as u32 + self.unseen_links,
        }
    }

    /// Returns whether content or attributes are newer than the pool's, or the pool has no copy and must get one.
    pub fn is_dirty(&self) -> bool {
        self.file.is_dirty() || self.dirty.any() || !self.dirty_xattrs.is_empty()
    }

    /// Returns whether the pool's object is this inode, and not another object that replaced it.
    pub fn is_object(&self, stat: &Stat) -> bool {
        self.kind == stat.kind && self.version.as_ref().is_some_and(|v| v.same_object(&stat.version))
    }

    /// Sets or removes one extended attribute, and marks it for the flush.
    pub fn set_xattr(&mut self, name: &[u8], value: Option<&[u8]>) {
        if let Some(xattrs) = &mut self.xattrs {
            change_xattr(xattrs, name, value);
        }
        self.dirty_xattrs.retain(|(n, _)| **n != *name);
        self.dirty_xattrs.push((name.into(), value.map(Into::into)));
    }

    /// Changes the value of an extended attribute that the flush sends only if it was set in the mount.
    pub fn change_xattr(&mut self, name: &[u8], value: &[u8]) {
        if let Some(xattrs) = &mut self.xattrs {
            change_xattr(xattrs, name, Some(value));
        }
        for (_, sent) in self.dirty_xattrs.iter_mut().filter(|(dirty, sent)| **dirty == *name && sent.is_some()) {
            *sent = Some(value.into());
        }
    }

    /// Takes over the pool's extended attributes, with the local changes on top. Returns what the mount shows.
    pub fn learn_xattrs(&mut self, pooled: Xattrs) -> &Xattrs {
        let mut xattrs = pooled;
        for (name, value) in &self.dirty_xattrs {
            change_xattr(&mut xattrs, name, value.as_deref());
        }
        xattrs.sort();
        self.xattrs.insert(xattrs)
    }

    /// Marks all extended attributes for the flush.
    pub fn all_xattrs_differ(&mut self) {
        let known = self.xattrs.iter().flatten().cloned();
        let mut all: XattrChanges = known.map(|(name, value)| (name, Some(value))).collect();
        all.extend(self.dirty_xattrs.drain(..).filter(|(_, value)| value.is_none()));
        self.dirty_xattrs = all;
    }

    /// Returns the name to use for calls to the pool: preferably one that the mount has, too.
    pub fn pool_link(&self) -> Option<&Link> {
        self.pool_links.iter().find(|link| self.links.contains(link)).or(self.pool_links.first())
    }

    /// Returns whether the pool has it under some name.
    pub fn in_pool(&self) -> bool {
        !self.pool_links.is_empty()
    }

    /// Notes that the pool does not have it under a name any more.
    pub fn remove_pool_link(&mut self, link: &Link) {
        self.pool_links.retain(|known| known != link);
        if self.kind != FileKind::Directory {
            self.listing = ListingState::Partly;
        }
    }

    /// Returns whether it was created on this node, and the pool never had it. A directory that another client removed from
    /// the pool counts as created on this node, a file does not.
    pub fn is_made_here(&self) -> bool {
        !self.in_pool() && (self.kind == FileKind::Directory || self.listing != ListingState::Partly)
    }

    /// Returns whether it is reachable under a name, including names that were never looked up.
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

/// Returns the size of an object, as far as files of Linux can be so large (`loff_t`). An untrusted server may report any
/// number.
fn size_of(stat: &Stat) -> u64 {
    stat.size.min(i64::MAX as u64)
}

fn unseen(stat: &Stat, known: usize) -> u32 {
    match stat.kind {
        FileKind::Directory => 0,
        _ => stat.nlink.saturating_sub(known as u32),
    }
}

/// A promise to an owner that eviction spares the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub owner: String,
    /// Seconds since 1970; `None`: the lease holds until it is released.
    pub expires_unix: Option<u64>,
    pub bytes: u64,
}

impl LeaseRecord {
    fn holds(&self, now_unix: u64) -> bool {
        self.expires_unix.is_none_or(|at| at > now_unix)
    }
}

/// The leases of one file, one for each owner. The end of one lease does not affect the other leases.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases(Vec<LeaseRecord>);

impl Leases {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the owner's unexpired lease. At `now_unix` 0, no lease is expired.
    pub fn of(&self, owner: &str, now_unix: u64) -> Option<&LeaseRecord> {
        self.holding(now_unix).find(|lease| lease.owner == owner)
    }

    /// Returns the unexpired leases.
    pub fn holding(&self, now_unix: u64) -> impl Iterator<Item = &LeaseRecord> {
        self.0.iter().filter(move |lease| lease.holds(now_unix))
    }

    pub fn hold(&self, now_unix: u64) -> bool {
        self.holding(now_unix).next().is_some()
    }

    /// Returns the number of bytes that the leases protect together: each protects a prefix of the file. `None` if none
    /// holds.
    pub fn bytes(&self, now_unix: u64) -> Option<u64> {
        self.holding(now_unix).map(|lease| lease.bytes).max()
    }

    /// Grants a lease, which replaces the owner's previous one. Removes expired leases.
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

/// Appends the encoding of a record to `encoded`.
pub fn append<T: Serialize>(record: &T, encoded: Vec<u8>) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_extend(record, encoded)
}

/// Decodes the first of several records. Returns it and the remaining bytes.
pub fn decode_first<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), postcard::Error> {
    postcard::take_from_bytes(bytes)
}

pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(bytes)
}
