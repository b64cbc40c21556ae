//! What the prediction of reads needs: facts that need no call to the pool, and fetches that yield to readers.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay_api::operator::ListedPath;
use forebay_backends::{FileKind, PoolPath, Result};
use forebay_cache::{CHUNK_BYTES, ContentStore};
use forebay_catalog::{Catalog, ListingState};
use forebay_prefetch::plan::PoolRate;
use forebay_system::clock::unix_now;
use tokio_util::sync::CancellationToken;

use super::{Ino, Overlay};
use crate::fetch::FetchPriority;

/// Limits the requests at the same time for one job, or for all predicted sessions together: many small files, or one
/// large file. So what is needed first is fetched first, and a reader in between does not wait for long.
pub const AHEAD_REQUESTS: usize = 16;

/// Returns how many of [`AHEAD_REQUESTS`] a file takes.
pub fn requests_of(bytes: u64) -> u32 {
    bytes.div_ceil(CHUNK_BYTES).clamp(1, AHEAD_REQUESTS as u64) as u32
}

/// Facts that cost no call to the pool.
impl Overlay {
    pub fn catalog(&self) -> &Catalog {
        &self.inner.catalog
    }

    pub fn fast_pool(&self) -> &ContentStore {
        &self.inner.store
    }

    /// Cancelled when the engine shuts down.
    pub fn stop(&self) -> &CancellationToken {
        &self.inner.stop
    }

    /// Returns the path of an inode in the mount. `None`: it has no name any more.
    pub fn path_of(&self, ino: Ino) -> Option<PoolPath> {
        self.inner.overlay_path(ino)
    }

    /// Returns the directory of the first name of an inode.
    pub fn directory_of(&self, ino: Ino) -> Option<Ino> {
        self.inner.node(ino).ok()?.state.lock().record.links.first().map(|(parent, _)| *parent)
    }

    /// # Errors
    /// `IsDirectory` or `InvalidInput` if it is no regular file; `Stale` if it is gone.
    pub fn check_is_file(&self, ino: Ino) -> Result<()> {
        self.inner.file_node(ino).map(drop)
    }

    /// Returns the size in bytes. `None`: there is no such inode.
    pub fn size_of(&self, ino: Ino) -> Option<u64> {
        match self.inner.table.peek(ino) {
            Some(node) => Some(node.state.lock().record.size),
            None => Some(self.inner.catalog.inode(ino).ok()??.size),
        }
    }

    /// Returns the size of a regular file that the pool has.
    pub fn size_in_pool(&self, ino: Ino) -> Option<u64> {
        let node = self.inner.node(ino).ok()?;
        let state = node.state.lock();
        (state.record.kind == FileKind::File && state.record.pool_link().is_some()).then_some(state.record.size)
    }

    /// Looks at the first `most` bytes of a file. Returns where they end, and how many of them are not resident. `None`:
    /// neither the pool nor the fast pool has the file.
    pub fn missing_of(&self, ino: Ino, most: u64) -> Option<(u64, u64)> {
        let node = self.inner.file_node(ino).ok()?;
        let size = {
            let state = node.state.lock();
            (state.record.file.is_whole() || state.record.pool_link().is_some()).then_some(state.record.size)?
        };
        let end = size.min(most);
        Some((end, self.inner.missing_bytes(&node, 0..end).ok()?))
    }

    /// Returns how many bytes of the file at a path are not resident. `None`: the path is not known.
    pub fn missing_at(&self, path: &PoolPath) -> Option<u64> {
        let mut at = Ino::ROOT;
        for name in path.components() {
            (at, _) = self.inner.catalog.name(at, name).ok()?.here?;
        }
        let node = self.inner.file_node(at).ok()?;
        let size = node.state.lock().record.size;
        self.inner.missing_bytes(&node, 0..size).ok()
    }

    /// Returns whether all names of a directory are known. `None`: there is no such directory.
    pub fn is_listed(&self, dir: Ino) -> Option<bool> {
        let node = self.inner.node(dir).ok()?;
        let state = node.state.lock();
        let is_all_here = !state.record.in_pool() && dir != Ino::ROOT;
        Some(is_all_here || matches!(state.record.listing, ListingState::Complete(_)))
    }

    /// Returns the bytes that may be fetched ahead: the low watermark, less dirty and leased bytes. Blocks.
    pub fn room_ahead(&self) -> Result<u64> {
        let inner = &self.inner;
        let limit = (inner.store.budget.limit() as f64 * inner.policy().space.low_watermark) as u64;
        Ok(limit.saturating_sub(inner.dirty_bytes()?.saturating_add(inner.leased_bytes()?)))
    }

    /// Returns a file as `list` shows it, and why it cannot be evicted now. `None`: it can.
    pub fn describe(&self, ino: Ino) -> Result<(ListedPath, Option<&'static str>)> {
        let listed = self.inner.listed(ino)?;
        let kept = self.inner.kept(&self.inner.node(ino)?.state.lock(), unix_now());
        Ok((listed, kept.map(super::space::eviction::KeepReason::what_evicts)))
    }
}

impl Overlay {
    /// Reads all names of a directory from the pool, unless they are known and fresh.
    pub async fn list_ahead(&self, dir: Ino) -> Result<()> {
        self.inner.ensure_listed(dir).await
    }

    /// Waits until no reader waits for the pool, but not for long (`fetch/demand_priority.rs`), and then runs `work`.
    pub async fn behind_readers<T>(&self, work: impl Future<Output = T>) -> T {
        let _turn = self.inner.fetcher.demand.ahead().await;
        work.await
    }

    /// Fetches a range of a file. Requests of readers go first.
    pub async fn fetch_ahead(&self, ino: Ino, range: Range<u64>) -> Result<()> {
        let node = self.inner.file_node(ino)?;
        self.inner.ensure(&node, range, FetchPriority::Ahead(None)).await
    }

    /// Fetches ranges of the version that the pool has since `since`. Requests of readers go first. `wanted` chooses
    /// the ranges by the size that the file has now. `fetched` gets the bytes of each attempt.
    pub async fn fetch_current_ahead<F>(
        &self,
        ino: Ino,
        since: Instant,
        wanted: impl Fn(u64) -> F,
        fetched: impl Fn(u64),
    ) -> Result<()>
    where
        F: Future<Output = Result<Vec<Range<u64>>>>,
    {
        let inner = &self.inner;
        let node = &inner.file_node(ino)?;
        let (wanted, fetched) = (&wanted, &fetched);
        let attempt = |size| async move {
            let before = inner.resident_bytes(node, size)?;
            let ranges: Vec<_> = if size == 0 { std::iter::once(0..0).collect() } else { wanted(size).await? };
            let mut result = Ok(());
            for range in ranges {
                if result.is_ok() {
                    result = inner.ensure(node, range, FetchPriority::Ahead(None)).await;
                }
            }
            fetched(inner.resident_bytes(node, size)?.saturating_sub(before));
            result.map(Some)
        };
        inner.fetch_current(ino, since, attempt).await.map(drop)
    }
}

/// Counters, and uses for the order of eviction.
impl Overlay {
    /// Notes uses of files that bypassed the engine.
    pub fn note_uses(&self, files: impl IntoIterator<Item = Ino>) {
        files.into_iter().for_each(|ino| self.inner.note_observed(ino));
    }

    /// Counts a file that was fetched ahead of its reader.
    pub fn count_ahead(&self, bytes: u64) {
        self.inner.counters.ahead_files.fetch_add(1, Ordering::Relaxed);
        self.inner.counters.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a file that was fetched ahead, and that its reader has opened.
    pub fn count_ahead_used(&self) {
        self.inner.counters.ahead_used_files.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends all leases of an owner, and its views.
    pub fn end_leases_of(&self, owner: &str) -> Result<()> {
        self.end_views_of(owner).and(self.inner.end_leases_of(owner))
    }

    /// Gives memory back after many inodes were forgotten.
    pub fn give_back_memory(&self) {
        self.inner.table.give_back();
    }

    /// Returns the measured rate of the pool, but at most `bytes_per_second_max`.
    pub fn pool_rate(&self, bytes_per_second_max: Option<u64>) -> PoolRate {
        let speed = self.inner.fetcher.bandwidth.speed();
        let most = bytes_per_second_max.map_or(f64::INFINITY, |most| most as f64);
        PoolRate {
            bytes_per_second: speed.bytes_per_second.min(most).max(1.0),
            latency: speed.latency,
            concurrency: AHEAD_REQUESTS as u32,
        }
    }
}
