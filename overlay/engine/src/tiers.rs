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

use forebay_cache::ContentId;
use forebay_policy::Policy;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::node::NodeState;
use crate::{Inner, Ino};
use uses::TierUses;

/// What the engine knows of tiers while it runs.
pub(crate) struct TierWork {
    uses: Mutex<TierUses>,
    /// Notified when a round has something to do.
    bell: Notify,
}

impl TierWork {
    pub fn new(policy: &Policy) -> Self {
        let thresholds = policy.tiers.iter().map(|tier| tier.uses).collect();
        Self { uses: Mutex::new(TierUses::new(thresholds)), bell: Notify::new() }
    }
}

impl Inner {
    /// Notes that a program opened clean content.
    pub(crate) fn note_open(&self, ino: Ino, id: ContentId) {
        self.space.evictor.note_use(ino.0);
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
        self.space.evictor.note_use(ino.0);
        if self.store.has_tiers() {
            self.tiers.uses.lock().seen(ino);
        }
    }

    /// Returns whether a file has clean content in another tier than the slowest one.
    pub(crate) fn is_in_faster_tier(&self, ino: Ino) -> bool {
        self.tiers.uses.lock().is_in_faster_tier(ino)
    }

    /// Notes that no program has a file open any more: it may be moved.
    pub(crate) fn note_closed(&self, ino: Ino) {
        if !self.store.has_tiers() {
            return;
        }
        let may_move = {
            let uses = self.tiers.uses.lock();
            uses.is_wanted(ino) || uses.is_leaving(ino)
        };
        if may_move {
            self.tiers.bell.notify_one();
        }
    }

    /// Notes that a file has clean content of so many bytes, so that it may be evicted or demoted. The caller holds the
    /// lock of the inode.
    pub(crate) fn note_clean(&self, ino: Ino, id: Option<ContentId>, bytes: u64) {
        match id {
            // What is in memory frees no space of the fast pool.
            Some(id) if self.store.is_volatile(id) => self.space.evictor.remove(ino.0),
            _ => self.space.evictor.insert(ino.0, bytes),
        }
        if !self.store.has_tiers() {
            return;
        }
        let tier = id.and_then(|id| self.store.tier_of(id)).filter(|tier| *tier != self.store.last_tier());
        let mut uses = self.tiers.uses.lock();
        match tier {
            Some(tier) => uses.holds(ino, tier),
            None => uses.forget(ino),
        }
    }

    /// Notes that a file has no clean content any more: it is gone, or dirty.
    pub(crate) fn note_not_clean(&self, ino: Ino) {
        self.space.evictor.remove(ino.0);
        self.note_evicted(ino);
    }

    /// Notes that the eviction policy chose the content of a file, which is gone.
    pub(crate) fn note_evicted(&self, ino: Ino) {
        if self.store.has_tiers() {
            self.tiers.uses.lock().forget(ino);
        }
    }

    /// Notes that content in memory became the only copy, because another client removed the pool's, or that it is the
    /// only copy since before the start. The caller holds the lock of the inode.
    pub(crate) fn note_modified(&self, ino: Ino, state: &NodeState) {
        if state.record.file.content().is_some_and(|id| self.store.is_volatile(id)) {
            self.tiers.uses.lock().must_leave(ino);
            self.tiers.bell.notify_one();
        }
    }

    /// Returns whether programs may read a content file without the daemon. What is in memory can move to another
    /// content file while it is open, so only a mount that is never written lets them.
    pub(crate) fn may_pass_through(&self, id: ContentId) -> bool {
        self.mount.read_only || !self.store.is_volatile(id)
    }
}

#[cfg(test)]
mod tests;
