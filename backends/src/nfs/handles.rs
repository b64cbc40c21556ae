//! Caches the handles of directories by their paths, briefly, and those of files by their versions.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use lru::LruCache;
use nfs3_client::nfs3_types::nfs3::nfs_fh3;
use parking_lot::Mutex;

use crate::{Identity, PoolPath, Stat, Version};

use super::credentials::Owner;
use super::limits::{DIRECTORY_TTL, MAX_DIRECTORIES, MAX_FILES};

/// A directory of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Directory {
    pub(super) handle: nfs_fh3,
    pub(super) owner: Owner,
    pub(super) identity: Option<Identity>,
}

impl Directory {
    pub(super) fn new(handle: nfs_fh3, stat: &Stat) -> Self {
        Self { handle, owner: Owner::from(stat), identity: stat.version.identity() }
    }
}

/// A file that has been read.
pub(super) type File = (nfs_fh3, Owner);

#[derive(Debug)]
pub(super) struct Handles {
    directories: Mutex<Directories>,
    files: Mutex<LruCache<Version, File>>,
}

#[derive(Debug)]
struct Directories {
    by_path: LruCache<PoolPath, (Arc<Directory>, Instant)>,
    /// Counts removals from the cache, so that a walk that began before a removal does not restore the entry.
    forgettings: u64,
}

fn bound(entries: usize) -> NonZeroUsize {
    NonZeroUsize::new(entries).unwrap_or(NonZeroUsize::MIN)
}

impl Handles {
    pub(super) fn new() -> Self {
        let by_path = LruCache::new(bound(MAX_DIRECTORIES));
        let directories = Mutex::new(Directories { by_path, forgettings: 0 });
        Self { directories, files: Mutex::new(LruCache::new(bound(MAX_FILES))) }
    }

    pub(super) fn directory(&self, path: &PoolPath) -> Option<Arc<Directory>> {
        let mut directories = self.directories.lock();
        let (directory, since) = directories.by_path.get(path)?;
        if since.elapsed() < DIRECTORY_TTL {
            return Some(Arc::clone(directory));
        }
        directories.by_path.pop(path);
        None
    }

    /// Must be read before a walk whose results are to be kept.
    pub(super) fn forgettings(&self) -> u64 {
        self.directories.lock().forgettings
    }

    pub(super) fn keep_directory(&self, path: PoolPath, directory: Arc<Directory>, forgettings: u64) {
        let mut directories = self.directories.lock();
        if directories.forgettings == forgettings {
            directories.by_path.put(path, (directory, Instant::now()));
        }
    }

    /// Forgets a directory and all its parents.
    pub(super) fn forget_way(&self, path: &PoolPath) {
        let mut directories = self.directories.lock();
        directories.forgettings += 1;
        let mut at = Some(path.clone());
        while let Some(path) = at {
            directories.by_path.pop(&path);
            at = path.parent();
        }
    }

    /// Forgets a directory that is no longer at its path, and everything below it.
    pub(super) fn forget_tree(&self, path: &PoolPath) {
        let mut directories = self.directories.lock();
        directories.forgettings += 1;
        let gone: Vec<_> =
            directories.by_path.iter().map(|(at, _)| at).filter(|at| at.starts_with(path)).cloned().collect();
        for path in gone {
            directories.by_path.pop(&path);
        }
    }

    pub(super) fn file(&self, version: &Version) -> Option<File> {
        self.files.lock().get(version).cloned()
    }

    pub(super) fn keep_file(&self, version: Version, file: File) {
        self.files.lock().put(version, file);
    }

    pub(super) fn forget_file(&self, version: &Version) {
        self.files.lock().pop(version);
    }
}
