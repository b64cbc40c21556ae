//! W-TinyLFU: Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on
//! Storage 13(4), 2017.
//!
//! New content passes through a *window*. Content that leaves the window competes with the victim of the main part. The
//! one that was requested less often lately loses; a *sketch* of counters counts the requests of all keys, including
//! those that are not resident. The main part is a segmented LRU: content in *probation* that is used moves to the
//! *protected* segment.
//!
//! The caller inserts content first and asks for victims afterwards, so the loser of the competition is evicted.

use super::Evictor;
use super::queue::{EvictionQueue, QueueEntry};
use sketch::Sketch;

mod sketch;

/// The window's share of the capacity: the paper's 1 %.
const WINDOW_SHARE_PERCENT: u64 = 1;

/// The protected segment's share of the main part: the paper's 80 %.
const PROTECTED_SHARE_PERCENT: u64 = 80;

/// Refusals after which the first search for a victim moves on to the next segment.
const PATIENCE_REFUSALS: usize = 64;

/// The policy; see the head of the file.
#[derive(Debug)]
pub struct WTinyLfu {
    window: EvictionQueue,
    probation: EvictionQueue,
    protected: EvictionQueue,
    sketch: Sketch,
    window_target_bytes: u64,
    protected_target_bytes: u64,
}

impl WTinyLfu {
    /// A policy for a fast pool of `capacity_bytes`, any value.
    pub fn new(capacity_bytes: u64) -> Self {
        let share = |of: u64, percent: u64| (u128::from(of) * u128::from(percent) / 100) as u64;
        let window_target_bytes = share(capacity_bytes, WINDOW_SHARE_PERCENT).max(1);
        Self {
            window: EvictionQueue::new(),
            probation: EvictionQueue::new(),
            protected: EvictionQueue::new(),
            sketch: Sketch::new(),
            window_target_bytes,
            protected_target_bytes: share(capacity_bytes.saturating_sub(window_target_bytes), PROTECTED_SHARE_PERCENT),
        }
    }

    /// Moves content that exceeds the window to probation, as its newest, where it competes.
    fn close_window(&mut self) {
        while self.window.bytes() > u128::from(self.window_target_bytes) {
            let Some(entry) = self.window.pop_oldest() else { break };
            self.probation.push(entry);
        }
    }

    fn close_protected(&mut self) {
        while self.protected.bytes() > u128::from(self.protected_target_bytes) {
            let Some(entry) = self.protected.pop_oldest() else { break };
            self.probation.push(entry);
        }
    }

    /// The candidate for admission is the newest of probation, the victim is the oldest: the one with fewer requests is
    /// evicted. In a tie, the victim stays.
    fn compete(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let (candidate, victim) = (self.probation.newest()?, self.probation.oldest()?);
        let wins = self.sketch.estimate(candidate.key) > self.sketch.estimate(victim.key);
        let loser = if wins { victim } else { candidate };
        may_evict(loser.key).then(|| {
            self.probation.remove(loser.key);
            loser.key
        })
    }
}

/// Takes out the oldest that may be evicted, after at most `patience` refusals.
fn evict_oldest(queue: &mut EvictionQueue, patience: usize, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
    let mut next = queue.oldest();
    for _ in 0..patience {
        let candidate = next?;
        if may_evict(candidate.key) {
            queue.remove(candidate.key);
            return Some(candidate.key);
        }
        next = queue.newer_than(candidate.key);
    }
    None
}

impl Evictor for WTinyLfu {
    fn insert(&mut self, key: u64, bytes: u64) {
        if self.window.contains(key) || self.probation.contains(key) || self.protected.contains(key) {
            return self.resize(key, bytes);
        }
        self.sketch.count(key);
        self.window.push(QueueEntry { key, bytes, frequency: 0 });
        self.sketch.fit(self.len());
        self.close_window();
    }

    fn access(&mut self, key: u64) {
        if self.window.renew(key) || self.protected.renew(key) {
            self.sketch.count(key);
        } else if let Some(entry) = self.probation.remove(key) {
            self.sketch.count(key);
            self.protected.push(entry);
            self.close_protected();
        }
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        let _ =
            self.window.resize(key, bytes) || self.probation.resize(key, bytes) || self.protected.resize(key, bytes);
        self.close_window();
        self.close_protected();
    }

    fn remove(&mut self, key: u64) {
        for queue in [&mut self.window, &mut self.probation, &mut self.protected] {
            queue.remove(key);
        }
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        if let Some(key) = self.compete(may_evict) {
            return Some(key);
        }
        for patience in [PATIENCE_REFUSALS, usize::MAX] {
            for queue in [&mut self.probation, &mut self.protected, &mut self.window] {
                if let Some(key) = evict_oldest(queue, patience, may_evict) {
                    return Some(key);
                }
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.window.len() + self.probation.len() + self.protected.len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.window.bytes() + self.probation.bytes() + self.protected.bytes()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_competes_with_what_is_used_and_loses() {
        let mut policy = WTinyLfu::new(100);
        for key in 0..100 {
            policy.insert(key, 1);
            policy.access(key);
            policy.access(key);
        }
        for key in 1000..1200 {
            policy.insert(key, 1);
            let victim = policy.evict(&mut |_| true);
            assert!(victim.is_some_and(|victim| victim >= 1000 || key == 1000), "{victim:?} for {key}");
        }
    }
}
