//! Files for front ends without a kernel: found by path with the rights of a user, and read under one version.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side, Time, Version};
use forebay_cache::ContentId;
use forebay_policy::Consistency;

use super::coherence::Age;
use super::namespace::Ask;
use super::{Content, Inner, Ino, Overlay};
use crate::counters::{ChosenBy, ReadSource};
pub use crate::permission::UserGroups;
use crate::permission::{READ, SEARCH};
pub use crate::pool_calls::Invalidations;

/// The most symlinks on one path: Linux's MAXSYMLINKS.
const SYMLINKS_MAX: u32 = 40;
/// How often an open starts again because the file changed meanwhile.
const ATTEMPTS: u32 = 5;

/// What a path names.
pub enum Served {
    File(ServedFile),
    Directory(Ino),
}

/// One version of a regular file, open for reading until this is dropped.
pub struct ServedFile {
    pub(crate) overlay: Overlay,
    pub(crate) ino: Ino,
    /// `None`: the pool does not have this content yet.
    version: Option<Version>,
    resident: Option<Arc<Content>>,
    pub size: u64,
    pub mtime: Time,
    /// How long the file may be served without asking the pool again. `None`: for ever.
    pub fresh_for: Option<Duration>,
    /// Whether the open found all of it on the fast pool.
    pub was_resident: bool,
    /// When the pool confirmed the version. `None`: that was too long ago, and the pool does not answer. The file is
    /// served as it is.
    pub confirmed: Option<Instant>,
}

/// One name of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedEntry {
    pub name: Box<[u8]>,
    pub kind: FileKind,
    pub size: u64,
    pub mtime: Time,
}

impl Overlay {
    /// Finds what a path names, and opens it if it is a regular file. Symlinks are followed inside the pool.
    ///
    /// # Errors
    /// `NotFound`; `PermissionDenied` if the user may not search a directory on the way or read the file, or if a
    /// symlink leaves the pool; `InvalidInput` for what is neither a file nor a directory; errors of the pool.
    pub async fn open_path(&self, path: &PoolPath, user: &UserGroups) -> Result<Served> {
        let mut left = ATTEMPTS;
        loop {
            match self.open_path_once(path, user).await {
                // What the path names was replaced between the lookup and the open.
                Err(e) if e.is(ErrorKind::Stale) && left > 0 => left -= 1,
                other => return other,
            }
        }
    }

    async fn open_path_once(&self, path: &PoolPath, user: &UserGroups) -> Result<Served> {
        let ino = self.inner.walk(path, user).await.map_err(|e| e.context(path))?;
        let kind = self.inner.node(ino)?.state.lock().record.kind;
        match kind {
            FileKind::Directory => {
                self.inner.check_allowed(ino, user, SEARCH).await?;
                Ok(Served::Directory(ino))
            }
            _ => Ok(Served::File(self.open_served(ino, user).await.map_err(|e| e.context(path))?)),
        }
    }

    pub(crate) async fn open_served(&self, ino: Ino, user: &UserGroups) -> Result<ServedFile> {
        let node = self.inner.file_node(ino)?;
        for _ in 0..ATTEMPTS {
            let health = &self.inner.pool_calls.health;
            let answers = || health.why_down().is_none() && !health.is_slow();
            let (begun, answered) = (Instant::now(), answers());
            let opened = self.open_file(ino, libc::O_RDONLY).await?;
            let mut file = ServedFile {
                overlay: self.clone(),
                ino,
                version: None,
                resident: opened.resident,
                size: 0,
                mtime: Time::default(),
                fresh_for: match self.inner.policy_of(&node).consistency {
                    Consistency::CloseToOpen => Some(Duration::ZERO),
                    Consistency::Ttl(ttl) => Some(ttl),
                    Consistency::Immutable => None,
                },
                was_resident: !opened.missed,
                confirmed: None,
            };
            // Rights may have changed with the version that the open found.
            self.inner.check_allowed(ino, user, READ).await?;
            let attr = self.inner.attr_of(&node)?;
            (file.size, file.mtime) = (attr.size, attr.mtime);
            let state = node.state.lock();
            file.version = state.record.version.clone().filter(|_| !state.record.file.is_dirty());
            let is_lately = |at: &Instant| *at >= begun || file.fresh_for.is_some_and(|ttl| at.elapsed() < ttl);
            // Where the pool only says that it still has a version, `validated` stays as it is. Peers do not confirm one.
            let fetched = opened.fetched_bytes > 0 && self.inner.peers.get().is_none();
            let now = (fetched || (answered && answers())).then_some(begun);
            file.confirmed = state.validated.filter(is_lately).or(now);
            let same = |content: &Arc<Content>| state.record.file.content() == Some(ContentId(content.id));
            if file.resident.as_ref().is_none_or(same) && (file.resident.is_some() || file.version.is_some()) {
                drop(state);
                return Ok(file);
            }
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, "changes while it is opened"))
    }

    /// Returns the names of a directory that the user may read, sorted by name.
    ///
    /// # Errors
    /// `PermissionDenied`, and errors of the pool.
    pub async fn list_served(&self, dir: Ino, user: &UserGroups) -> Result<Vec<ServedEntry>> {
        self.inner.check_allowed(dir, user, READ).await?;
        self.inner.ensure_listed(dir).await?;
        let mut entries = Vec::new();
        for entry in self.inner.entries(dir)? {
            // Removed meanwhile.
            let Ok(attr) = self.inner.node(entry.ino).and_then(|node| self.inner.attr_of(&node)) else { continue };
            entries.push(ServedEntry { name: entry.name, kind: entry.kind, size: attr.size, mtime: attr.mtime });
        }
        Ok(entries)
    }
}

/// What a purge did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Files about which the pool was asked.
    pub files: u64,
    /// Bytes that were evicted. Content that a response or a program still uses is not evicted.
    pub bytes: u64,
}

impl Overlay {
    /// Asks the pool about a path and everything below it, whatever the policy says about freshness, and evicts its
    /// clean content.
    ///
    /// # Errors
    /// `NotFound`, and errors of the pool; `Timeout` if it does not answer. Then some files may not have been asked about.
    pub async fn purge(&self, path: &PoolPath) -> Result<Purged> {
        let purges = &self.inner.pool_calls.invalidations.purges;
        purges.fetch_add(1, Ordering::AcqRel);
        let purged = self.purge_below(path).await;
        // What was opened meanwhile may be of before.
        purges.fetch_add(1, Ordering::AcqRel);
        purged
    }

    /// Numbers that change with each purge, and when another node says that it has changed the pool. A file that was
    /// opened with other numbers must be opened again, however long it is fresh.
    pub fn invalidations(&self) -> Invalidations {
        self.inner.pool_calls.invalidations.counts()
    }

    async fn purge_below(&self, path: &PoolPath) -> Result<Purged> {
        let inner = &self.inner;
        let begun = Instant::now();
        let age = Age::Purge(begun);
        let root = self.resolve_as(path, Ask::Names(age)).await?;
        let mut purged = Purged::default();
        for (ino, kind) in inner.tree(root, Ask::Names(age)).await? {
            if kind == FileKind::Directory {
                continue;
            }
            match inner.revalidate(ino, age).await {
                Ok(()) => {}
                Err(e) if e.is(ErrorKind::Stale) => continue,
                Err(e) => return Err(e),
            }
            let node = match inner.node(ino) {
                Err(e) if e.is(ErrorKind::Stale) => continue,
                node => node?,
            };
            // Cached state may be shown while the pool is slow. A purge must not count on it.
            if !inner.is_known_since(&node, begun) {
                return Err(Error::new(ErrorKind::Timeout, Side::Pool, "it does not answer: purge again"));
            }
            if kind != FileKind::File {
                continue;
            }
            purged.files += 1;
            match inner.evict_inode(ino, ChosenBy::Request) {
                Ok(Ok(bytes)) => purged.bytes += bytes,
                Ok(Err(_)) => {}
                Err(e) if e.is(ErrorKind::Stale) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(purged)
    }
}

impl ServedFile {
    /// The version of the pool's copy; `None` if the pool does not have this content yet.
    pub fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// The content file, if all of it is resident. It holds this version as long as this is open.
    pub fn resident(&self) -> Option<&Arc<Content>> {
        self.resident.as_ref()
    }

    /// Counts bytes of [`Self::resident`] that are sent without a call of [`Self::read`].
    pub fn count_sent(&self, bytes: u64) {
        self.overlay.inner.counters.count_sent(bytes);
    }

    /// Returns whether a range is resident now.
    pub fn has(&self, range: Range<u64>) -> bool {
        let missing = || {
            let node = self.overlay.inner.node(self.ino)?;
            self.overlay.inner.missing_bytes(&node, range)
        };
        self.resident.is_some() || matches!(missing(), Ok(0))
    }

    /// Reads up to `len` bytes of this version; fewer only at the end of the file.
    ///
    /// # Errors
    /// `Stale` if the pool has another version by now; errors of the pool.
    pub async fn read(&self, offset: u64, len: u32) -> Result<Bytes> {
        let len = u64::from(len).min(self.size.saturating_sub(offset)) as u32;
        if let Some(content) = &self.resident {
            let inner = &self.overlay.inner;
            let read = inner.read_content(content, offset, len as usize).await;
            return inner.counters.count_read(ReadSource::Fast, read);
        }
        self.check_same()?;
        let bytes = self.overlay.read(self.ino, offset, len).await?;
        // A version does not come back: if it is the same before and after, the bytes are of it.
        self.check_same()?;
        Ok(bytes)
    }

    fn check_same(&self) -> Result<()> {
        let node = self.overlay.inner.node(self.ino)?;
        let state = node.state.lock();
        let same = match (&state.record.version, &self.version) {
            (Some(now), Some(then)) => now.same_content(then) && !state.record.file.is_dirty(),
            _ => false,
        };
        if same { Ok(()) } else { Err(Error::new(ErrorKind::Stale, Side::Pool, "another version is in the pool")) }
    }
}

impl Drop for ServedFile {
    fn drop(&mut self) {
        self.overlay.release(self.ino, libc::O_RDONLY);
    }
}

impl Inner {
    /// Returns the inode of a path for a user. The last component is followed, too, if it is a symlink.
    async fn walk(self: &Arc<Self>, path: &PoolPath, user: &UserGroups) -> Result<Ino> {
        let outside = || Error::new(ErrorKind::PermissionDenied, Side::Application, "a symlink leaves the pool");
        let mut above = vec![Ino::ROOT];
        let mut left: Vec<Box<[u8]>> = path.components().map(Into::into).collect();
        left.reverse();
        let mut symlinks = 0;
        while let Some(name) = left.pop() {
            let dir = *above.last().ok_or_else(outside)?;
            match &*name {
                b"" | b"." => continue,
                b".." => {
                    above.pop();
                    if above.is_empty() {
                        return Err(outside());
                    }
                    continue;
                }
                _ => {}
            }
            self.check_allowed(dir, user, SEARCH).await?;
            let found = self.find(dir, &name).await?;
            let ino = found.ok_or_else(|| Error::new(ErrorKind::NotFound, Side::Application, "no such file"))?;
            let kind = self.node(ino)?.state.lock().record.kind;
            if kind != FileKind::Symlink {
                above.push(ino);
                continue;
            }
            symlinks += 1;
            if symlinks > SYMLINKS_MAX {
                return Err(Error::os(libc::ELOOP, Side::Application, "too many symlinks"));
            }
            let target = Overlay { inner: self.clone() }.readlink(ino).await?;
            if target.first() == Some(&b'/') {
                return Err(outside());
            }
            left.extend(target.split(|b| *b == b'/').rev().map(Into::into));
        }
        above.pop().ok_or_else(outside)
    }
}
