//! SIEVE: Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for
//! web caches", NSDI 2024.
//!
//! A queue in the order of arrival, and a hand that moves from the oldest to the newest. Content that was used since
//! the hand last passed it is spared once and keeps its place; other content is evicted. New content arrives ahead of
//! the hand, so content that is used only once is evicted after one round, while used content stays behind the hand.

use super::Evictor;
use super::queue::{EvictionQueue, QueueEntry};

/// The policy; see the head of the file.
#[derive(Debug)]
pub struct Sieve {
    /// `frequency` is 1 for content that was used since the hand last passed it.
    arrivals: EvictionQueue,
    /// The next position of the hand; `None`: the oldest entry.
    hand: Option<u64>,
}

impl Sieve {
    pub fn new() -> Self {
        Self { arrivals: EvictionQueue::new(), hand: None }
    }

    /// Returns the key after `key` in the direction of the hand; `None` after the newest, for the oldest.
    fn after(&self, key: u64) -> Option<u64> {
        self.arrivals.newer_than(key).map(|entry| entry.key)
    }

    fn take(&mut self, key: u64) {
        if self.hand == Some(key) {
            self.hand = self.after(key);
        }
        self.arrivals.remove(key);
    }
}

impl Default for Sieve {
    fn default() -> Self {
        Self::new()
    }
}

impl Evictor for Sieve {
    fn insert(&mut self, key: u64, bytes: u64) {
        if !self.arrivals.resize(key, bytes) {
            self.arrivals.push(QueueEntry { key, bytes, frequency: 0 });
        }
    }

    fn access(&mut self, key: u64) {
        if let Some(frequency) = self.arrivals.frequency_mut(key) {
            *frequency = 1;
        }
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        self.arrivals.resize(key, bytes);
    }

    fn remove(&mut self, key: u64) {
        self.take(key);
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        // Each entry is spared for a use at most once, so this takes little more than two rounds.
        let mut refused_in_a_row = 0;
        while refused_in_a_row < self.arrivals.len() {
            let key = self.hand.or_else(|| self.arrivals.oldest().map(|entry| entry.key))?;
            let used = self.arrivals.frequency_mut(key).map(std::mem::take).unwrap_or(0);
            if used == 0 {
                if may_evict(key) {
                    self.take(key);
                    return Some(key);
                }
                refused_in_a_row += 1;
            } else {
                refused_in_a_row = 0;
            }
            self.hand = self.after(key);
        }
        None
    }

    fn len(&self) -> usize {
        self.arrivals.len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.arrivals.bytes()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the paper's figure: used content is spared in its place, and the hand stays where it evicted.
    #[test]
    fn the_hand_spares_what_was_used_and_goes_on_from_where_it_was() {
        let mut policy = Sieve::new();
        for key in 0..5 {
            policy.insert(key, 1);
        }
        policy.access(0);
        policy.access(2);
        assert_eq!(policy.evict(&mut |_| true), Some(1));
        policy.insert(5, 1);
        assert_eq!(policy.evict(&mut |_| true), Some(3), "2 is spared");
        assert_eq!(policy.evict(&mut |_| true), Some(4));
        assert_eq!(policy.evict(&mut |_| true), Some(5));
        assert_eq!(policy.evict(&mut |_| true), Some(0), "from the newest to the oldest");
        assert_eq!(policy.evict(&mut |_| true), Some(2));
    }
}
