//! Tiers: which devices content is on, and how it moves between them.
//!
//! | module | does |
//! |---|---|
//! | `absent` | adds the tiers at the start, and gives up content on devices that are not there any more |
//! | `moving` | moves the content of one file to another tier |
//! | `uses` | counts uses, and knows what the faster tiers hold, least recently used first |
//! | `rounds` | promotes what is used, and demotes what is cold where a tier is full |
//! | `device_health` | what the engine does when a device fails |
//!
//! Content that is written goes to the fastest tier that keeps it over a reboot. Content that is fetched goes to the
//! slowest tier: most of it is read once. After some uses it is promoted by one tier. What is in memory (a volatile
//! tier) is always clean, and leaves it before it is changed.

pub(crate) mod absent;
pub(crate) mod device_health;
mod moving;
pub(crate) mod rounds;
mod uses;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_api::operator::{DeviceState, DeviceStatus, TierStatus};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{ContentId, ContentStore, Device, SpaceReservation, StorageTier};
use forebay_policy::Policy;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::node::{Node, NodeState};
use crate::{Inner, Ino, blocking};
use uses::TierUses;

/// What the engine knows of tiers while it runs.
pub(crate) struct TierWork {
    uses: Mutex<TierUses>,
    /// Notified when a round has something to do.
    bell: Notify,
    /// The numbers of bypassed devices whose unsynced clean content was given up.
    left: Mutex<BTreeSet<usize>>,
}

impl TierWork {
    pub fn new(policy: &Policy) -> Self {
        let thresholds = policy.tiers.iter().map(|tier| tier.uses).collect();
        Self { uses: Mutex::new(TierUses::new(thresholds)), bell: Notify::new(), left: Mutex::default() }
    }
}

impl Inner {
    /// Reserves space for bytes that are fetched into a file. Makes room in its tier, too.
    ///
    /// # Errors
    /// `NoSpace` with the numbers.
    pub(crate) async fn reserve_for_fetch(self: &Arc<Self>, node: &Node, bytes: u64) -> Result<SpaceReservation> {
        let mut space = SpaceReservation::from(self.reserve(bytes).await?);
        if !self.store.has_tiers() {
            return Ok(space);
        }
        let content = node.state.lock().record.file.content();
        let tier = content.and_then(|id| self.store.tier_of(id)).unwrap_or_else(|| self.tier_for_fetch(node, bytes));
        let budget = self.store.tiers()[tier].budget.clone();
        space.in_tier = budget.reserve(bytes);
        if space.in_tier.is_some() {
            return Ok(space);
        }
        let inner = self.clone();
        space.in_tier = blocking(move || {
            inner.make_room_in(tier, bytes)?;
            inner.trash.drain();
            Ok(inner.store.tiers()[tier].budget.reserve(bytes))
        })
        .await?;
        if space.in_tier.is_none() {
            self.flush_bell.notify_one();
            let name = &self.store.tiers()[tier].name;
            let what = format!(
                "{bytes} bytes do not fit into tier {name}: {} of {} are used, and nothing more may be evicted",
                budget.used(),
                budget.limit()
            );
            return Err(Error::new(ErrorKind::NoSpace, Side::Cache, what));
        }
        Ok(space)
    }

    /// Returns the tier for new content that is fetched: the one that a rule names, if it survives a reboot and works,
    /// else the slowest one.
    pub(crate) fn tier_for_fetch(&self, node: &Node, bytes: u64) -> usize {
        let by_rule = || {
            let policy = self.policy_of(node);
            let name = policy.tier.as_deref()?;
            let tier = self.store.tiers().iter().position(|tier| tier.name == name && !tier.is_volatile)?;
            self.store.takes_content(tier).then_some(tier)
        };
        let by_rule = if self.store.has_tiers() { by_rule() } else { None };
        by_rule.unwrap_or_else(|| self.store.tier_for_fetches(bytes))
    }

    /// Notes that a program opened clean content.
    pub(crate) fn note_open(&self, ino: Ino, id: ContentId) {
        self.evictor.note_use(ino.0);
        if self.store.has_tiers()
            && let Some(tier) = self.store.tier_of(id)
            && self.tiers.uses.lock().used(ino, tier)
        {
            self.tiers.bell.notify_one();
        }
    }

    /// Notes that the observer saw a use of content. It belongs to an open that was counted, so it only shows that the
    /// content is not cold.
    pub(crate) fn note_observed(&self, ino: Ino) {
        self.evictor.note_use(ino.0);
        if self.store.has_tiers() {
            self.tiers.uses.lock().seen(ino);
        }
    }

    /// Notes that no program has a file open any more: it may be moved.
    pub(crate) fn note_closed(&self, ino: Ino) {
        if self.store.has_tiers() && self.tiers.uses.lock().is_wanted(ino) {
            self.tiers.bell.notify_one();
        }
    }

    /// Notes that a file has clean content of so many bytes, so that it may be evicted or demoted.
    pub(crate) fn note_clean(&self, ino: Ino, id: Option<ContentId>, bytes: u64) {
        let tier = id.and_then(|id| self.store.tier_of(id));
        match id {
            // What is in memory frees no space of the fast pool.
            Some(id) if self.store.is_volatile(id) => self.evictor.remove(ino.0),
            _ => self.evictor.insert(ino.0, bytes),
        }
        if let Some(tier) = tier.filter(|tier| *tier != self.store.last_tier()) {
            self.tiers.uses.lock().holds(ino, tier);
        }
    }

    /// Notes that content in memory became the only copy, because another client removed the pool's.
    pub(crate) fn note_modified(&self, ino: Ino, state: &NodeState) {
        if state.record.file.content().is_some_and(|id| self.store.is_volatile(id)) {
            self.tiers.uses.lock().must_leave(ino);
            self.tiers.bell.notify_one();
        }
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

    /// Returns whether programs may read a content file without the daemon. What is in memory can move to another
    /// content file while it is open, so only a mount that is never written lets them.
    pub(crate) fn may_pass_through(&self, id: ContentId) -> bool {
        self.read_only || !self.store.is_volatile(id)
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
