//! Files that are kept open: between ranged reads of one version, and between ranged writes and their sync.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures::FutureExt;
use lru::LruCache;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::stat::stat_fd_cached;
use crate::{Identity, Version};

/// The most files that one pool keeps open.
const MAX_OPEN_FILES: NonZeroUsize = match NonZeroUsize::new(64) {
    Some(files) => files,
    None => NonZeroUsize::MIN,
};
/// A removed file takes space as long as it is open, so an unused one is closed soon.
const MAX_IDLE: Duration = Duration::from_secs(10);
const REAP_EVERY: Duration = Duration::from_secs(5);

/// The most files that one pool keeps open between ranged writes.
const MAX_OPEN_WRITERS: usize = 16;

/// Files with ranges that were written and are not synced yet, by their object. An open file keeps its inode number from
/// being used again, so a file is never taken for another one.
#[derive(Debug, Default)]
pub(super) struct OpenWriters(Mutex<HashMap<Identity, OpenWriter>>);

#[derive(Debug, Clone)]
pub(super) struct OpenWriter {
    pub(super) file: Arc<OwnedFd>,
    /// Why a sync failed. The kernel tells it once, and the caller of that sync may have given up.
    pub(super) failed: Option<Errno>,
}

impl OpenWriters {
    pub(super) fn get(&self, object: Identity) -> Option<OpenWriter> {
        self.0.lock().get(&object).cloned()
    }

    /// Notes that a sync failed.
    pub(super) fn note_failed(&self, object: Identity, file: Arc<OwnedFd>, why: Errno) {
        self.0.lock().insert(object, OpenWriter { file, failed: Some(why) });
    }

    /// Keeps a file until it is forgotten. Returns `false` if too many files are kept: then the caller syncs it.
    pub(super) fn keep(&self, object: Identity, file: &Arc<OwnedFd>) -> bool {
        let mut files = self.0.lock();
        // Another client may have removed some.
        files.retain(|_, writer| stat_fd_cached(&*writer.file).is_ok_and(|stat| stat.nlink > 0));
        let keeps = files.len() < MAX_OPEN_WRITERS;
        if keeps {
            files.insert(object, OpenWriter { file: file.clone(), failed: None });
        }
        keeps
    }

    pub(super) fn forget(&self, object: Identity) {
        let file = self.0.lock().remove(&object);
        drop(file);
    }
}

#[derive(Debug)]
struct KeptFile {
    file: Arc<OwnedFd>,
    last_use: Instant,
}

/// Open files by the version that they had when they were opened.
#[derive(Debug)]
pub(super) struct OpenFiles {
    state: Mutex<OpenFilesState>,
}

#[derive(Debug)]
struct OpenFilesState {
    files: LruCache<Version, KeptFile>,
    /// Whether the task that closes idle files runs; it ends when no file is left.
    reaping: bool,
}

impl OpenFiles {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(OpenFilesState { files: LruCache::new(MAX_OPEN_FILES), reaping: false }) }
    }

    pub(super) fn get(&self, version: &Version) -> Option<Arc<OwnedFd>> {
        let mut state = self.state.lock();
        let kept = state.files.get_mut(version)?;
        kept.last_use = Instant::now();
        Some(Arc::clone(&kept.file))
    }

    /// Must be called within a tokio runtime, on a thread that may block: it may close another file.
    pub(super) fn keep(self: &Arc<Self>, version: Version, file: Arc<OwnedFd>) {
        let mut state = self.state.lock();
        let evicted = state.files.push(version, KeptFile { file, last_use: Instant::now() });
        let start = !std::mem::replace(&mut state.reaping, true);
        drop(state);
        drop(evicted);
        if start {
            tokio::spawn(reap(Arc::downgrade(self)).boxed());
        }
    }

    pub(super) fn forget(&self, version: &Version) {
        let file = self.state.lock().files.pop(version);
        drop(file);
    }

    /// Drops every version of one object, so that a file that this pool removes no longer takes space.
    pub(super) fn forget_object(&self, version: &Version) {
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        let versions: Vec<_> =
            state.files.iter().map(|(kept, _)| kept.clone()).filter(|kept| kept.same_object(version)).collect();
        for version in versions {
            gone.extend(state.files.pop(&version));
        }
        drop(state);
        drop(gone);
    }

    /// Takes out the idle files; returns `false` if no file is left to watch.
    fn take_idle(&self, idle: &mut Vec<KeptFile>) -> bool {
        let mut state = self.state.lock();
        while state.files.peek_lru().is_some_and(|(_, kept)| kept.last_use.elapsed() >= MAX_IDLE) {
            idle.extend(state.files.pop_lru().map(|(_, kept)| kept));
        }
        state.reaping = !state.files.is_empty();
        state.reaping
    }
}

async fn reap(files: Weak<OpenFiles>) {
    loop {
        tokio::time::sleep(REAP_EVERY).await;
        let Some(files) = files.upgrade() else { return };
        let mut idle = Vec::new();
        let go_on = files.take_idle(&mut idle);
        // Closing a file of a network file system may wait for its server.
        tokio::task::spawn_blocking(move || drop(idle));
        if !go_on {
            return;
        }
    }
}
