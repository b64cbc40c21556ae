//! What operators see: from memory and the catalog, never from the pool or the mount.

use std::sync::atomic::Ordering;

use forebay_api::operator::{
    ContentState, DeviceState, DeviceStatus, DirtyFile, ListedPath, ObjectKind, Overview, PoolState, Status, TierStatus,
};
use forebay_api::protocol::API_VERSION;
use forebay_backends::{FileKind, PoolPath, Result};
use forebay_cache::{ContentStore, Device, StorageTier};
use forebay_catalog::{FileState, ListingState};
use forebay_system::clock::unix_now;

use super::census::Census;
use super::coherence::Age;
use super::namespace::Ask;
use super::{Inner, Ino, Overlay};
use crate::blocking;

impl Overlay {
    /// Returns the state of the mount. Always answers: it asks neither the pool nor the kernel.
    pub async fn status(&self) -> Status {
        match self.scan(|inner| Ok(inner.status_now())).await {
            Ok(status) => status,
            Err(_) => self.inner.status_now(),
        }
    }

    /// Returns everything that the pool does not have yet.
    pub async fn dirty(&self) -> Result<Vec<DirtyFile>> {
        self.scan(Inner::dirty_files).await
    }

    /// Returns the same with the inodes. A name that was removed has none.
    pub async fn dirty_objects(&self) -> Result<Vec<(Option<Ino>, DirtyFile)>> {
        self.scan(Inner::dirty_objects).await
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

    /// Returns the state of the mount with what the last count found. Its cost does not depend on the number of files.
    /// Blocks while a device of the fast pool is asked for its space.
    pub fn status_at_last_census(&self) -> Status {
        self.inner.status_at(&self.last_census())
    }

    /// Returns the state of the mount as of the last count, after a new one if it is time for that.
    ///
    /// # Errors
    /// The engine stops.
    pub async fn overview(&self) -> Result<Overview> {
        self.refresh_census().await;
        let census = self.last_census();
        let inner = self.inner.clone();
        // It asks the devices for their space.
        blocking(move || Ok(Overview { status: inner.status_at(&census), oldest_dirty: census.oldest.clone() })).await
    }
}

impl Inner {
    fn status_now(&self) -> Status {
        self.status_at(&self.take_census())
    }

    /// Returns the state, with the dirty and leased content of a census.
    pub(crate) fn status_at(&self, census: &Census) -> Status {
        let mountpoint = self.mount.mountpoint();
        let conflicts = self.flusher.conflicts.lock().clone();
        let resident_files = self.space.evictor.evictable().files;
        let budget = &self.store.budget;
        let pool_failure = self.pool_calls.health.why_down();
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
            write_pace_bytes: self.write_pace(),
            conflicts,
            leased_bytes: census.leased_bytes,
            resident_files,
            inodes_in_memory: self.table.len() as u64,
            inodes_known_to_kernel: self.table.known_to_kernel() as u64,
            open_files: self.table.opens.load(Ordering::Relaxed),
            passthrough: self.mount.passes_through(),
            no_passthrough: None,
            content_io: match &self.contents.io_fallback {
                Some(why) => format!("{} ({why})", self.contents.io.name()),
                None => self.contents.io.name().into(),
            },
            observer: self.advisor().observer_status(),
            counters: self.counters.read(self.pool.retried_requests()),
        }
    }

    pub(crate) fn listed(&self, ino: Ino) -> Result<ListedPath> {
        let node = self.node(ino)?;
        let attr = self.attr_of(&node)?;
        let path = self.typed_path(ino);
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

    /// Returns what `status` shows of the tiers; nothing if there is one.
    pub(crate) fn tier_statuses(&self) -> Vec<TierStatus> {
        if !self.store.has_tiers() {
            return Vec::new();
        }
        let shown = |tier: &StorageTier| TierStatus {
            name: tier.name.clone(),
            is_volatile: tier.is_volatile,
            limit_bytes: tier.budget.limit(),
            used_bytes: tier.budget.used(),
            promoted_files: tier.promoted_files.load(Ordering::Relaxed),
            demoted_files: tier.demoted_files.load(Ordering::Relaxed),
        };
        self.store.tiers().iter().map(shown).collect()
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

/// Returns what `status` shows of a device.
pub(crate) fn device_status(store: &ContentStore, device: &Device) -> DeviceStatus {
    let health = device.health();
    let tier = store.tiers().iter().find(|tier| store.has_tiers() && tier.devices.contains(&device.number));
    let space = rustix::fs::statvfs(&device.path);
    let state = match &space {
        Err(_) => DeviceState::Bad,
        Ok(_) if health.is_healthy() => DeviceState::Healthy,
        Ok(_) if health.is_used() => DeviceState::Suspect,
        Ok(_) => DeviceState::Bypassed,
    };
    let (total_bytes, free_bytes) =
        space.as_ref().map_or((0, 0), |s| (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize));
    DeviceStatus {
        path: device.path.display().to_string(),
        total_bytes,
        free_bytes,
        state,
        holds_catalog: health.holds_catalog(),
        probe_worked: health.probe_worked(),
        failure: space.err().map(|errno| errno.to_string()),
        tier: tier.map(|tier| tier.name.clone()),
        errors: health.errors(),
        last_error: device.last_error(),
    }
}
