//! What operators see: from memory and the catalog, never from the pool or the mount.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use forebay_api::operator::{
    ContentState, Counters, Difference, DirtyFile, Evicted, Evictions, ListedPath, ObjectKind, PoolState, ReadSources,
    ServedReads, Status,
};
use forebay_api::protocol::API_VERSION;
use forebay_backends::{FileKind, PoolPath, Result};
use forebay_catalog::{FileState, Intent, ListingState};
use forebay_system::clock::unix_now;
use tokio::sync::Semaphore;

use super::census::Census;
use super::coherence::Age;
use super::namespace::Ask;
use super::space::eviction::ChosenBy;
use super::{Inner, Ino, Overlay};
use crate::tiers::device_status;

#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    pub pool_read_bytes: AtomicU64,
    pub peer_read_bytes: AtomicU64,
    pub pool_written_bytes: AtomicU64,
    pub fetches: AtomicU64,
    pub opens_resident: AtomicU64,
    pub opens_absent: AtomicU64,
    /// Files and bytes, by [`ChosenBy`].
    evictions: [[AtomicU64; 2]; 5],
    /// Reads and bytes, by [`ReadSource`].
    reads: [[AtomicU64; 2]; 3],
    pub flush_failures: AtomicU64,
    pub conflicts: AtomicU64,
    pub flushed_files: AtomicU64,
    pub read_hits: AtomicU64,
    pub read_misses: AtomicU64,
    pub ahead_files: AtomicU64,
    pub ahead_bytes: AtomicU64,
    pub ahead_used_files: AtomicU64,
}

/// Where the bytes of a read that the daemon answers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadSource {
    Fast,
    Fetched,
    Direct,
}

impl EngineCounters {
    /// Counts a read, if it succeeded.
    pub fn count_read(&self, source: ReadSource, read: Result<Bytes>) -> Result<Bytes> {
        if let Ok(data) = &read {
            count(&self.reads[source as usize], data.len() as u64);
        }
        read
    }

    /// Counts bytes of the fast pool that were sent without being read.
    pub fn count_sent(&self, bytes: u64) {
        count(&self.reads[ReadSource::Fast as usize], bytes);
    }

    pub fn count_eviction(&self, chosen_by: ChosenBy, bytes: u64) {
        count(&self.evictions[chosen_by as usize], bytes);
    }

    fn evictions(&self) -> Evictions {
        let of = |chosen_by: ChosenBy| {
            let [files, bytes] = pair(&self.evictions[chosen_by as usize]);
            Evicted { files, bytes }
        };
        Evictions {
            space: of(ChosenBy::Space),
            tier: of(ChosenBy::Tier),
            request: of(ChosenBy::Request),
            policy: of(ChosenBy::Rule),
            repair: of(ChosenBy::Repair),
        }
    }

    fn reads(&self) -> ReadSources {
        let of = |source: ReadSource| {
            let [reads, bytes] = pair(&self.reads[source as usize]);
            ServedReads { reads, bytes }
        };
        ReadSources { fast: of(ReadSource::Fast), fetched: of(ReadSource::Fetched), direct: of(ReadSource::Direct) }
    }

    fn read(&self, pool_retries: u64) -> Counters {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let evictions = self.evictions();
        Counters {
            pool_read_bytes: get(&self.pool_read_bytes),
            peer_read_bytes: get(&self.peer_read_bytes),
            pool_written_bytes: get(&self.pool_written_bytes),
            fetches: get(&self.fetches),
            opens_resident: get(&self.opens_resident),
            opens_absent: get(&self.opens_absent),
            evicted_bytes: self.evictions.iter().map(|[_, bytes]| get(bytes)).sum(),
            flushed_files: get(&self.flushed_files),
            read_hits: get(&self.read_hits),
            read_misses: get(&self.read_misses),
            ahead_files: get(&self.ahead_files),
            ahead_bytes: get(&self.ahead_bytes),
            ahead_used_files: get(&self.ahead_used_files),
            pool_retries,
            reads: self.reads(),
            evictions,
            flush_failures: get(&self.flush_failures),
            conflicts: get(&self.conflicts),
        }
    }
}

fn count([times, sum]: &[AtomicU64; 2], bytes: u64) {
    times.fetch_add(1, Ordering::Relaxed);
    sum.fetch_add(bytes, Ordering::Relaxed);
}

fn pair([times, bytes]: &[AtomicU64; 2]) -> [u64; 2] {
    [times.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed)]
}

/// Scans of everything that is dirty. They run one at a time, since each takes memory for every file that it finds. A
/// scan goes on to its end even if its caller is gone.
#[derive(Debug)]
pub(crate) struct Looks {
    turn: Arc<Semaphore>,
    /// Intents scanned since the start.
    seen: AtomicU64,
}

impl Default for Looks {
    fn default() -> Self {
        Self { turn: Arc::new(Semaphore::new(1)), seen: AtomicU64::new(0) }
    }
}

impl Overlay {
    /// Returns the state of the mount. Always answers: it asks neither the pool nor the kernel.
    pub async fn status(&self) -> Status {
        match self.look(|inner| Ok(inner.status_now())).await {
            Ok(status) => status,
            Err(_) => self.inner.status_now(),
        }
    }

    /// Returns everything that the pool does not have yet.
    pub async fn dirty(&self) -> Result<Vec<DirtyFile>> {
        self.look(Inner::dirty_files).await
    }

    /// Returns a counter that grows as long as any call of [`Overlay::status`] or [`Overlay::dirty`] makes progress.
    pub fn looked_at(&self) -> u64 {
        self.inner.looks.seen.load(Ordering::Relaxed)
    }

    pub(crate) async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.inner.looks.turn.clone().acquire_owned().await;
        let inner = self.inner.clone();
        super::blocking(move || {
            let _turn = turn;
            work(&inner)
        })
        .await
    }

    /// Returns what is listed below a path, with the resident bytes of each entry.
    pub async fn list_residency(&self, path: &PoolPath, recursive: bool) -> Result<Vec<ListedPath>> {
        let root = self.resolve(path).await?;
        let inner = &self.inner;
        let is_dir = inner.node(root)?.state.lock().record.kind == FileKind::Directory;
        let inos: Vec<Ino> = if !is_dir {
            vec![root]
        } else if recursive {
            inner.tree(root, Ask::Names(Age::Metadata)).await?.into_iter().skip(1).map(|(ino, _)| ino).collect()
        } else {
            inner.ensure_listed(root).await?;
            inner.entries(root)?.into_iter().map(|e| e.ino).collect()
        };
        let pools = inner.storage_pools(&inos).await;
        let mut listed = Vec::with_capacity(inos.len());
        for (ino, storage_pool) in inos.into_iter().zip(pools) {
            match inner.listed(ino) {
                Ok(entry) => listed.push(ListedPath { storage_pool, ..entry }),
                Err(e) if !is_dir => return Err(e),
                Err(_) => {}
            }
        }
        Ok(listed)
    }
}

impl Inner {
    fn status_now(&self) -> Status {
        self.status_at(&self.take_census())
    }

    /// Returns the state, with the dirty and leased content of a census.
    pub(crate) fn status_at(&self, census: &Census) -> Status {
        let mountpoint = self.mountpoint.lock().clone();
        let conflicts = self.conflicts.lock().clone();
        let resident_files = self.evictor.evictable().files;
        let budget = &self.store.budget;
        let pool_failure = self.health.why_down();
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            api: API_VERSION,
            pid: std::process::id(),
            mountpoint,
            pool: self.pool.url(),
            under_way: self.pool.under_way(),
            pool_state: if pool_failure.is_some() { PoolState::Down } else { PoolState::Up },
            pool_failure,
            fast: self.store.devices().iter().map(|device| device_status(&self.store, device)).collect(),
            tiers: self.tier_statuses(),
            limit_bytes: budget.limit(),
            used_bytes: budget.used(),
            reserved_bytes: budget.reserved(),
            dirty_files: census.dirty_files,
            dirty_bytes: census.dirty_bytes,
            oldest_dirty_secs: census.oldest_dirty_unix.map(|since| unix_now().saturating_sub(since)),
            flush_errors: census.flush_errors.clone(),
            flush_stuck: self.stuck(),
            waiting_for_room: self.waiting_for_room(),
            conflicts,
            leased_bytes: census.leased_bytes,
            resident_files,
            inodes_in_memory: self.table.len() as u64,
            inodes_known_to_kernel: self.table.known_to_kernel() as u64,
            open_files: self.table.opens.load(Ordering::Relaxed),
            passthrough: self.passthrough.get().copied().unwrap_or(false),
            no_passthrough: None,
            content_io: match &self.io_fallback {
                Some(why) => format!("{} ({why})", self.io.name()),
                None => self.io.name().into(),
            },
            observer: self.advisor().observer_status(),
            counters: self.counters.read(self.pool.retried_requests()),
        }
    }

    pub(super) fn dirty_files(&self) -> Result<Vec<DirtyFile>> {
        let mut intents = Vec::new();
        let seen = || self.looks.seen.fetch_add(1, Ordering::Relaxed);
        self.catalog.intents(|intent, since| {
            seen();
            intents.push((intent, since));
            Ok(true)
        })?;
        let mut found: std::collections::BTreeMap<String, DirtyFile> = Default::default();
        for (intent, since_unix) in intents {
            seen();
            let Some(dirty) = self.dirty_file(&intent, since_unix)? else { continue };
            if !self.still_differs(&intent) {
                continue;
            }
            let slot = found.entry(dirty.path.clone()).or_insert_with(|| dirty.clone());
            slot.since_unix = slot.since_unix.min(dirty.since_unix);
            slot.bytes = slot.bytes.max(dirty.bytes);
            slot.what = slot.what.max(dirty.what);
            slot.error = slot.error.take().or(dirty.error);
        }
        Ok(found.into_values().collect())
    }

    /// Returns the bytes of files that cannot be evicted, because the pool may not have them.
    pub(crate) fn dirty_bytes(&self) -> Result<u64> {
        let mut inos = Vec::new();
        self.catalog.intents(|intent, _| {
            inos.extend(if let Intent::Inode(ino) = intent { Some(ino) } else { None });
            Ok(true)
        })?;
        let mut bytes = 0;
        for ino in inos {
            let Ok(node) = self.node(ino) else { continue };
            let dirty = node.state.lock().record.file.is_dirty();
            bytes += if dirty { self.attr_of(&node).map_or(0, |attr| attr.blocks * 512) } else { 0 };
        }
        Ok(bytes)
    }

    fn dirty_file(&self, intent: &Intent, since_unix: u64) -> Result<Option<DirtyFile>> {
        let (path, ino, mut what) = match intent {
            Intent::Inode(ino) => (self.display(*ino), Some(*ino), Difference::Attributes),
            Intent::Name(parent, name) => {
                let record = self.catalog.name(*parent, name)?;
                let dir = self.overlay_path(*parent).or_else(|| self.pool_path(*parent).ok()).unwrap_or_default();
                let what = if record.here.is_some() { Difference::Name } else { Difference::Removed };
                (dir.join(name).to_string(), record.here_ino(), what)
            }
        };
        let mut dirty = DirtyFile { path, bytes: 0, since_unix, what, error: None, why: self.flush_reason(intent) };
        if let Some(node) = ino.and_then(|ino| self.node(ino).ok()) {
            let (is_data, is_uploaded) = {
                let state = node.state.lock();
                (state.record.file.is_dirty(), state.is_uploaded())
            };
            if is_data && !is_uploaded {
                what = Difference::Data;
                dirty.bytes = self.attr_of(&node).map_or(0, |a| a.size);
            }
            let state = node.state.lock();
            let lost = state.record.file.content().and_then(|id| self.catalog.check_kept(id).err());
            let unhealthy = || state.record.file.content().and_then(|id| self.store.unhealthy(id));
            let failed = lost.map(|error| error.to_string()).or_else(|| self.flusher.errors.of(node.ino));
            dirty.error = failed.or_else(unhealthy);
            if matches!(intent, Intent::Inode(ino) if state.is_unlinked(*ino)) {
                return Ok(None);
            }
            // A directory's own times follow what is flushed into it.
            let record = &state.record;
            let has_attributes = record.dirty.any() || !record.dirty_xattrs.is_empty();
            if matches!(intent, Intent::Inode(_)) && is_uploaded && !has_attributes {
                // It counts as dirty only because a program may still write it.
                return Ok(None);
            }
            let only_times =
                record.dirty.times && !record.dirty.mode && !record.dirty.owner && record.dirty_xattrs.is_empty();
            if matches!(intent, Intent::Inode(_)) && state.record.kind == FileKind::Directory && only_times {
                what = Difference::Times;
            }
        }
        dirty.what = what;
        Ok(Some(dirty))
    }

    /// Returns how many bytes of a file of `size` bytes are resident.
    pub(crate) fn resident_bytes(&self, node: &crate::node::Node, size: u64) -> Result<u64> {
        let mut state = node.state.lock();
        Ok(match state.record.file {
            file if file.is_whole() => size,
            file if file.is_spilled() => match file.content() {
                Some(id) => size.saturating_sub(self.catalog.spilled(id)?.bytes()),
                None => 0,
            },
            file if file.is_partial() => self.residency(&mut state)?.extents().bytes(),
            _ => 0,
        })
    }

    /// Returns how many bytes of a range are not resident.
    pub(crate) fn missing_bytes(&self, node: &crate::node::Node, range: std::ops::Range<u64>) -> Result<u64> {
        let mut state = node.state.lock();
        Ok(match state.record.file {
            file if file.is_whole() || file.is_dirty() => 0,
            file if file.is_partial() => {
                let missing = self.residency(&mut state)?.extents().missing(range);
                missing.iter().map(|gap| gap.end - gap.start).sum()
            }
            _ => range.end - range.start,
        })
    }

    pub(crate) fn listed(&self, ino: Ino) -> Result<ListedPath> {
        let node = self.node(ino)?;
        let attr = self.attr_of(&node)?;
        let path = self.display(ino);
        let resident_bytes = self.resident_bytes(&node, attr.size)?;
        let state = node.state.lock();
        let file = state.record.file;
        let (kind, content) = match attr.kind {
            FileKind::File => (ObjectKind::File, content_state(file)),
            FileKind::Directory => match state.record.listing {
                ListingState::Complete(_) => (ObjectKind::Directory, ContentState::Resident),
                ListingState::Partly => (ObjectKind::Directory, ContentState::Partial),
            },
            FileKind::Symlink => (ObjectKind::Symlink, ContentState::Resident),
            _ => (ObjectKind::Special, ContentState::Resident),
        };
        let now = unix_now();
        let owners: Vec<&str> = state.leases.holding(now).map(|lease| lease.owner.as_str()).collect();
        // A lease without an expiry ends after all leases with one.
        let until = state.leases.holding(now).map(|lease| lease.expires_unix.unwrap_or(u64::MAX)).max();
        Ok(ListedPath {
            path,
            kind,
            size: attr.size,
            resident_bytes,
            state: content,
            leased_until_unix: until.filter(|until| *until < u64::MAX),
            lease_owner: (!owners.is_empty()).then(|| owners.join(", ")),
            mtime_unix: attr.mtime.secs,
            mode: attr.mode,
            storage_pool: None,
        })
    }
}

fn content_state(file: FileState) -> ContentState {
    match () {
        () if file.is_dirty() => ContentState::Dirty,
        () if file.is_whole() => ContentState::Resident,
        () if file.is_partial() => ContentState::Partial,
        () => ContentState::Absent,
    }
}
