//! Epoch pin: for a set that is read over and over, as in training, each time in the same order or in another one.
//!
//! Each content is used once in an epoch, so content that was used in this epoch is needed later than all content that
//! was not. Content of the last epoch is pinned until it is used; of the used content, the newest goes first. With room
//! for C of N contents, this gives C hits per epoch. No policy has more if every interval between two uses crosses the
//! border of an epoch; LRU has none if the order is the same. Content from before the last epoch is no longer part of
//! the set, and goes first.

use std::collections::HashMap;

use super::Evictor;
use super::queue::{EvictionQueue, QueueEntry};

/// The policy; see the head of the file.
#[derive(Debug, Default)]
pub struct EpochPin {
    /// Content that was used in this epoch.
    used: EvictionQueue,
    /// Content that was used in the last epoch, and not in this one.
    pinned: EvictionQueue,
    /// Content that was not used in the last epoch either.
    stale: EvictionQueue,
    /// The last use of each content, counted in uses since the epoch began.
    used_at: HashMap<u64, u64>,
    clock: u64,
}

impl EpochPin {
    pub fn new() -> Self {
        Self::default()
    }

    /// Content that was used in this epoch is pinned in the next one.
    fn begin_epoch(&mut self) {
        while let Some(entry) = self.pinned.pop_oldest() {
            self.stale.push(entry);
        }
        std::mem::swap(&mut self.used, &mut self.pinned);
        self.clock = 0;
    }

    /// Notes a use of content that is in none of the queues.
    fn use_entry(&mut self, entry: QueueEntry) {
        self.used.push(entry);
        self.used_at.insert(entry.key, self.clock);
        self.clock += 1;
    }

    fn queues(&mut self) -> [&mut EvictionQueue; 3] {
        [&mut self.used, &mut self.pinned, &mut self.stale]
    }

    fn take(&mut self, key: u64) -> Option<QueueEntry> {
        self.queues().into_iter().find_map(|queue| queue.remove(key))
    }
}

impl Evictor for EpochPin {
    fn insert(&mut self, key: u64, bytes: u64) {
        if self.used_at.contains_key(&key) {
            return self.resize(key, bytes);
        }
        self.use_entry(QueueEntry { key, bytes, frequency: 0 });
    }

    fn access(&mut self, key: u64) {
        let Some(&used_at) = self.used_at.get(&key) else { return };
        // A file that is opened twice in a row begins no epoch: the uses since then must be most of those so far.
        if self.used.contains(key) && (self.clock - used_at) * 2 > self.clock {
            self.begin_epoch();
        }
        if let Some(entry) = self.take(key) {
            self.use_entry(entry);
        }
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        self.queues().into_iter().any(|queue| queue.resize(key, bytes));
    }

    fn remove(&mut self, key: u64) {
        self.take(key);
        self.used_at.remove(&key);
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let mut victim = None;
        for queue in [&self.stale, &self.used, &self.pinned] {
            let mut next = queue.newest();
            while let (None, Some(candidate)) = (victim, next) {
                victim = may_evict(candidate.key).then_some(candidate.key);
                next = queue.older_than(candidate.key);
            }
        }
        self.remove(victim?);
        victim
    }

    fn len(&self) -> usize {
        self.used_at.len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.used.bytes() + self.pinned.bytes() + self.stale.bytes()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_in_this_epoch_goes_before_what_was_not() {
        let mut policy = EpochPin::new();
        for key in 0..4 {
            policy.insert(key, 1);
        }
        policy.access(2); // the second epoch, in another order
        policy.access(0);
        assert_eq!(policy.evict(&mut |_| true), Some(0));
        assert_eq!(policy.evict(&mut |_| true), Some(2));
        assert_eq!(policy.evict(&mut |_| true), Some(3), "the pinned ones at last");
    }

    #[test]
    fn what_the_set_has_lost_goes_first() {
        let mut policy = EpochPin::new();
        for key in 0..4 {
            policy.insert(key, 1);
        }
        for _ in 0..2 {
            (0..3).for_each(|key| policy.access(key));
        }
        assert_eq!(policy.evict(&mut |_| true), Some(3));
    }

    #[test]
    fn a_file_that_is_opened_twice_in_a_row_begins_no_epoch() {
        let mut policy = EpochPin::new();
        for key in 0..10 {
            policy.insert(key, 1);
            policy.access(key);
        }
        assert_eq!((policy.used.len(), policy.pinned.len()), (10, 0));
    }
}
