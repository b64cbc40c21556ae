//! A pool in memory, for tests: full POSIX semantics without permission checks, every capability, atomic conditional
//! changes, and a logical clock, so that the same calls give the same answers in every run.

mod content;
mod parts;
mod tree;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};
use parking_lot::Mutex;

use crate::pieces::PieceOrder;
use crate::{
    Attrs, Capabilities, ConditionalPut, DirEntry, Error, ErrorKind, Expected, FileKind, LISTED_CONTENT_BYTES, Layout,
    Listing, ListingSupport, Objects, Part, Piece, Pieces, Pool, PoolPath, RenameMode, Renames, Result, SentPart,
    SetAttrs, Side, Space, Stat, Version, Versions,
};

use content::MemoryContent;
use parts::MemoryParts;
use tree::{Body, Outcome, ROOT, Tree};

/// Entries in one page of a listing.
const PAGE_ENTRIES: usize = 1_000;
const DEFAULT_CAPACITY_BYTES: u64 = 1 << 40;
/// Linux's limits.
const XATTR_NAME_MAX: usize = 255;
const XATTR_SIZE_MAX: usize = 65_536;
const XATTR_NAMESPACES: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system."];

/// A file tree in memory.
pub struct MemoryPool {
    tree: Mutex<Tree>,
    capabilities: Capabilities,
    layouts: Mutex<BTreeMap<PoolPath, Layout>>,
    /// Bytes that the extended attributes of one object may take.
    xattrs_max: AtomicUsize,
    abandoned: Mutex<BTreeMap<PoolPath, u64>>,
    parts: Mutex<MemoryParts>,
}

/// What [`MemoryPool::snapshot`] returns for one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotEntry {
    pub kind: FileKind,
    pub mode: u32,
    /// 0 for directories.
    pub size: u64,
    /// Empty for all but files.
    pub content: Bytes,
    /// Empty for all but symlinks.
    pub target: Vec<u8>,
    pub nlink: u32,
}

impl Default for MemoryPool {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryPool {
    pub fn new() -> Self {
        Self::with_capabilities(Self::all_capabilities())
    }

    /// A pool with fewer capabilities. It refuses the missing ones with `Unsupported` or `ReadOnly`.
    pub fn with_capabilities(capabilities: Capabilities) -> Self {
        Self {
            tree: Mutex::new(Tree::new(DEFAULT_CAPACITY_BYTES)),
            capabilities,
            layouts: Mutex::default(),
            xattrs_max: AtomicUsize::new(usize::MAX),
            abandoned: Mutex::default(),
            parts: Mutex::default(),
        }
    }

    pub fn all_capabilities() -> Capabilities {
        Capabilities {
            local: true,
            read_only: false,
            objects: Objects {
                symlinks: true,
                symlink_times: true,
                hard_links: true,
                special_files: true,
                xattrs: true,
                owners: true,
                sparse: true,
            },
            renames: Renames::Atomic { exchange: true },
            listings: ListingSupport::Whole,
            listed_contents: true,
            versions: Versions { confirmed_by_reads: true, alone: false, of_directories: true, outlive_mounts: true },
            streams: false,
            ranged_write: true,
            parts_ahead: Some(4096),
            conditional_put: ConditionalPut::Atomic,
            layouts: false,
            time_granularity_ns: 1,
            name_max: 255,
            path_max: None,
        }
    }

    /// Limits the content to `bytes` from now on; writes beyond that fail with `NoSpace`.
    pub fn set_capacity_bytes(&self, bytes: u64) {
        self.tree.lock().capacity_bytes = bytes;
    }

    /// Sets the layout that the pool returns for `path` and everything below it, if it has the capability.
    pub fn set_layout(&self, path: &PoolPath, layout: Layout) {
        self.layouts.lock().insert(path.clone(), layout);
    }

    /// The whole tree but for its root, sorted by path.
    pub fn snapshot(&self) -> BTreeMap<PoolPath, SnapshotEntry> {
        let tree = self.tree.lock();
        let mut all = BTreeMap::new();
        let mut open = vec![(PoolPath::root(), ROOT)];
        while let Some((path, ino)) = open.pop() {
            let Ok(entries) = tree.entries(ino) else { continue };
            for (name, ino) in entries {
                let path = path.join(name);
                let Ok(node) = tree.node(*ino) else { continue };
                let (size, content, target) = match &node.body {
                    Body::File(content) => (content.size(), content.read(0..u64::MAX), Vec::new()),
                    Body::Symlink(target) => (target.len() as u64, Bytes::new(), target.clone()),
                    _ => (0, Bytes::new(), Vec::new()),
                };
                if matches!(node.body, Body::Directory(_)) {
                    open.push((path.clone(), *ino));
                }
                let (kind, mode, nlink) = (node.kind(), node.mode, node.nlink);
                all.insert(path, SnapshotEntry { kind, mode, size, content, target, nlink });
            }
        }
        all
    }

    /// Runs one operation on the tree; its error names `what` and `path`.
    fn with<T>(&self, what: &str, path: &PoolPath, work: impl FnOnce(&mut Tree) -> Outcome<T>) -> Result<T> {
        let answer = if path.is_reserved() { Err(ErrorKind::InvalidInput) } else { work(&mut self.tree.lock()) };
        answer.map_err(|kind| Error::new(kind, Side::Pool, format!("{what} {path} in memory")))
    }

    fn change<T>(&self, what: &str, path: &PoolPath, work: impl FnOnce(&mut Tree) -> Outcome<T>) -> Result<T> {
        let read_only = self.capabilities.read_only;
        self.with(what, path, |tree| if read_only { Err(ErrorKind::ReadOnly) } else { work(tree) })
    }

    /// Fails with `Unsupported`, `NoSpace` and so on, and names the first attribute that an object of this kind
    /// cannot have.
    fn check_all(&self, what: &str, kind: FileKind, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut room = self.xattrs_max.load(Ordering::Relaxed);
        for (name, value) in xattrs {
            let bytes = name.len() + value.len();
            let checked = if bytes > room { Err(ErrorKind::NoSpace) } else { check_xattr(name, value, kind) };
            checked.map_err(|kind| {
                let what = format!("{what}: extended attribute {}", name.escape_ascii());
                Error::new(kind, Side::Pool, what).of_attribute(name)
            })?;
            room -= bytes;
        }
        Ok(())
    }

    /// Pretends that daemons of other nodes left `files` unfinished files in a directory.
    pub fn leave_unfinished(&self, dir: &PoolPath, files: u64) {
        self.abandoned.lock().insert(dir.clone(), files);
    }

    /// Limits the extended attributes of one object to `bytes` from now on.
    pub fn limit_xattrs(&self, bytes: usize) {
        self.xattrs_max.store(bytes, Ordering::Relaxed);
    }

    /// Creates or replaces a file with content that has arrived.
    fn put_whole(
        &self,
        path: &PoolPath,
        size: u64,
        pieces: Vec<Piece>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        self.require(attrs.xattrs.is_empty() || self.capabilities.objects.xattrs, "put attributes of", path)?;
        self.check_all("put attributes of", FileKind::File, &attrs.xattrs)?;
        self.change("put", path, |tree| {
            if path.is_root() {
                return Err(ErrorKind::IsDirectory);
            }
            let slot = tree.slot(path)?;
            check_expected(tree, slot.ino, expected)?;
            let together = !matches!(expected, Expected::Name(_));
            let ino = tree.replace(&slot, MemoryContent::from_pieces(size, pieces), attrs, together)?;
            tree.stat(ino)
        })
    }

    fn require(&self, able: bool, what: &str, path: &PoolPath) -> Result<()> {
        if able {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, Side::Pool, format!("{what} {path} in memory")))
    }
}

impl fmt::Debug for MemoryPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryPool").field("objects", &self.tree.lock().len()).finish_non_exhaustive()
    }
}

/// All pieces of a stream, checked.
async fn arrived(size: u64, mut content: Pieces<'_>) -> Result<Vec<Piece>> {
    let mut order = PieceOrder::new(size);
    let mut pieces = Vec::new();
    while let Some(piece) = content.next().await {
        let piece = piece?;
        order.check(&piece)?;
        pieces.push(piece);
    }
    Ok(pieces)
}

fn check_expected(tree: &Tree, ino: Option<tree::Ino>, expected: &Expected) -> Outcome<()> {
    let as_expected = match (expected, ino) {
        (Expected::Anything, _) | (Expected::Absent, None) => true,
        (Expected::Absent, Some(_)) | (Expected::Version(_) | Expected::Name(_), None) => false,
        (Expected::Version(version) | Expected::Name(version), Some(ino)) => {
            tree.stat(ino)?.version.same_content(version)
        }
    };
    if as_expected { Ok(()) } else { Err(ErrorKind::Conflict) }
}

fn check_xattr(name: &[u8], value: &[u8], kind: FileKind) -> Outcome<()> {
    if name.ends_with(b".") && XATTR_NAMESPACES.contains(&name) {
        return Err(ErrorKind::InvalidInput);
    }
    if name.len() > XATTR_NAME_MAX {
        return Err(ErrorKind::OutOfRange);
    }
    if value.len() > XATTR_SIZE_MAX {
        return Err(ErrorKind::Os(libc::E2BIG));
    }
    if !XATTR_NAMESPACES.iter().any(|space| name.starts_with(space)) {
        return Err(ErrorKind::Unsupported);
    }
    // As on Linux: only files and directories have user attributes.
    if name.starts_with(b"user.") && !matches!(kind, FileKind::File | FileKind::Directory) {
        return Err(ErrorKind::NotPermitted);
    }
    Ok(())
}

#[async_trait]
impl Pool for MemoryPool {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn url(&self) -> String {
        "memory:".to_owned()
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        self.with("stat", path, |tree| tree.stat(tree.lookup(path)?))
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        self.list_with_contents(path, 0).await
    }

    async fn list_with_contents(&self, path: &PoolPath, bytes: u64) -> Result<Listing> {
        let mut left = bytes;
        let entries = self.with("list", path, |tree| {
            let entries = tree.entries(tree.lookup(path)?)?.iter().map(|(name, ino)| {
                let stat = tree.stat(*ino)?;
                let content = match &tree.node(*ino)?.body {
                    Body::File(content) if bytes > 0 && stat.size <= left.min(LISTED_CONTENT_BYTES) => {
                        Some(content.read(0..stat.size))
                    }
                    _ => None,
                };
                left -= content.as_ref().map_or(0, |content| content.len() as u64);
                Ok(DirEntry { name: name.clone(), stat, content })
            });
            entries.collect()
        })?;
        let entries: Vec<DirEntry> = entries;
        let pages: Vec<_> = entries.chunks(PAGE_ENTRIES).map(|page| Ok(page.to_vec())).collect();
        Ok(stream::iter(pages).boxed())
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        self.with("read", path, |tree| {
            let ino = tree.lookup(path)?;
            let Body::File(content) = &tree.node(ino)?.body else {
                let directory = tree.node(ino)?.kind() == FileKind::Directory;
                return Err(if directory { ErrorKind::IsDirectory } else { ErrorKind::InvalidInput });
            };
            if range.start > range.end {
                return Err(ErrorKind::InvalidInput);
            }
            if tree.stat(ino)?.version != *version {
                return Err(ErrorKind::Stale);
            }
            Ok(content.read(range))
        })
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        self.with("readlink", path, |tree| match &tree.node(tree.lookup(path)?)?.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(ErrorKind::InvalidInput),
        })
    }

    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let pieces = arrived(size, content).await?;
        self.put_whole(path, size, pieces, attrs, expected)
    }

    async fn send_part(&self, name: &str, len: u64, content: Pieces<'_>) -> Result<SentPart> {
        self.keep_part(name, len, content).await
    }

    async fn read_part(&self, part: &SentPart, range: Range<u64>) -> Result<Bytes> {
        self.read_kept_part(part, range)
    }

    async fn remove_part(&self, name: &str) -> Result<()> {
        self.forget_part(name)
    }

    async fn put_parts(
        &self,
        path: &PoolPath,
        parts: Vec<Part<'_>>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let (size, pieces) = self.joined(path, parts).await?;
        self.put_whole(path, size, pieces, attrs, expected)
    }

    async fn write_at(&self, path: &PoolPath, offset: u64, data: Bytes) -> Result<Stat> {
        self.require(self.capabilities.ranged_write, "write", path)?;
        self.change("write", path, |tree| {
            let ino = tree.lookup(path)?;
            if offset.checked_add(data.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
                return Err(ErrorKind::TooLarge);
            }
            tree.rewrite(ino, |content| content.write(offset, data))?;
            tree.stat(ino)
        })
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat> {
        self.require(attrs.xattrs.is_empty() || self.capabilities.objects.xattrs, "mkdir", path)?;
        self.check_all("mkdir", FileKind::Directory, &attrs.xattrs)?;
        self.change("mkdir", path, |tree| {
            let ino = tree.create(path, Body::Directory(BTreeMap::new()), attrs)?;
            tree.stat(ino)
        })
    }

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat> {
        self.require(self.capabilities.objects.symlinks, "symlink", path)?;
        self.change("symlink", path, |tree| {
            if target.is_empty() {
                return Err(ErrorKind::NotFound);
            }
            let attrs = Attrs { mode: 0o777, ..attrs.clone() };
            let ino = tree.create(path, Body::Symlink(target.to_vec()), &attrs)?;
            tree.stat(ino)
        })
    }

    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat> {
        self.require(self.capabilities.objects.special_files || kind == FileKind::File, "mknod", path)?;
        self.change("mknod", path, |tree| {
            let body = match kind {
                FileKind::File => Body::File(MemoryContent::default()),
                FileKind::Fifo | FileKind::Socket => Body::Special(kind, 0),
                FileKind::CharDevice | FileKind::BlockDevice => Body::Special(kind, rdev),
                FileKind::Directory | FileKind::Symlink => return Err(ErrorKind::InvalidInput),
            };
            let ino = tree.create(path, body, attrs)?;
            tree.stat(ino)
        })
    }

    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        self.require(self.capabilities.objects.hard_links, "link", new)?;
        self.change("link", new, |tree| {
            if existing.is_reserved() {
                return Err(ErrorKind::InvalidInput);
            }
            let ino = tree.link(existing, new)?;
            tree.stat(ino)
        })
    }

    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        self.change("remove", path, |tree| {
            if path.is_root() {
                return Err(ErrorKind::IsDirectory);
            }
            let slot = tree.slot(path)?;
            match (slot.ino, expected) {
                (None, Expected::Absent) => return Ok(()),
                (None, _) => return Err(ErrorKind::NotFound),
                (Some(_), _) => check_expected(tree, slot.ino, expected)?,
            }
            let ino = slot.ino.ok_or(ErrorKind::NotFound)?;
            if tree.node(ino)?.kind() == FileKind::Directory {
                return Err(ErrorKind::IsDirectory);
            }
            tree.detach(&slot, ino)
        })
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        self.change("rmdir", path, |tree| tree.remove_dir(path))
    }

    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        self.require(self.capabilities.renames.exist(), "rename", from)?;
        self.require(self.capabilities.renames.exchange() || mode != RenameMode::Exchange, "exchange", from)?;
        self.change(&format!("rename {from} to"), to, |tree| {
            if from.is_reserved() {
                return Err(ErrorKind::InvalidInput);
            }
            let ino = tree.rename(from, to, mode)?;
            tree.stat(ino)
        })
    }

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        self.change("set attributes of", path, |tree| {
            let ino = tree.lookup(path)?;
            if !changes.applies_to(&tree.stat(ino)?.version) {
                return Err(ErrorKind::Busy);
            }
            let owners = self.capabilities.objects.owners;
            let changes = SetAttrs {
                uid: changes.uid.filter(|_| owners),
                gid: changes.gid.filter(|_| owners),
                ..changes.clone()
            };
            tree.set_attrs(ino, &changes)?;
            tree.stat(ino)
        })
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        self.require(self.capabilities.objects.xattrs, "list extended attributes of", path)?;
        self.with("list extended attributes of", path, |tree| {
            let xattrs = &tree.node(tree.lookup(path)?)?.xattrs;
            Ok(xattrs.iter().map(|(name, value)| (name.clone(), value.clone())).collect())
        })
    }

    async fn set_xattr(&self, path: &PoolPath, name: &[u8], value: &[u8]) -> Result<()> {
        self.require(self.capabilities.objects.xattrs, "set an extended attribute of", path)?;
        let (kind, mut all) = self.with("set an extended attribute of", path, |tree| {
            let node = tree.node(tree.lookup(path)?)?;
            let others = node.xattrs.iter().filter(|(other, _)| *other != name);
            Ok((node.kind(), others.map(|(name, value)| (name.clone(), value.clone())).collect::<Vec<_>>()))
        })?;
        all.push((name.to_vec(), value.to_vec()));
        self.check_all("set", kind, &all)?;
        self.change("set an extended attribute of", path, |tree| {
            let ino = tree.lookup(path)?;
            tree.change_xattrs(ino, |xattrs| {
                xattrs.insert(name.to_vec(), value.to_vec());
                Ok(())
            })
        })
    }

    async fn check_xattrs(&self, kind: FileKind, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.check_all("check", kind, xattrs)
    }

    async fn remove_xattr(&self, path: &PoolPath, name: &[u8]) -> Result<()> {
        self.require(self.capabilities.objects.xattrs, "remove an extended attribute of", path)?;
        self.change("remove an extended attribute of", path, |tree| {
            let ino = tree.lookup(path)?;
            tree.change_xattrs(ino, |xattrs| xattrs.remove(name).map(drop).ok_or(ErrorKind::NoAttribute))
        })
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        self.with("sync", path, |tree| tree.entries(tree.lookup(path)?).map(drop))
    }

    async fn abandoned(&self, dir: &PoolPath, remove: bool) -> Result<u64> {
        let mut abandoned = self.abandoned.lock();
        let files = abandoned.get(dir).copied().unwrap_or(0);
        if remove {
            abandoned.remove(dir);
        }
        Ok(files)
    }

    async fn space(&self) -> Result<Space> {
        let tree = self.tree.lock();
        let free = tree.capacity_bytes.saturating_sub(tree.used_bytes);
        Ok(Space {
            total_bytes: tree.capacity_bytes,
            free_bytes: free,
            available_bytes: free,
            total_files: u64::from(u32::MAX),
            free_files: u64::from(u32::MAX).saturating_sub(tree.len()),
        })
    }

    async fn layout(&self, path: &PoolPath) -> Result<Option<Layout>> {
        if !self.capabilities.layouts {
            return Ok(None);
        }
        self.with("query the layout of", path, |tree| tree.lookup(path))?;
        let layouts = self.layouts.lock();
        Ok(layouts.iter().rfind(|(at, _)| path.starts_with(at)).map(|(_, layout)| layout.clone()))
    }
}
