//! LRU: the least recently used content goes first. The baseline for the other policies.

use super::Evictor;
use super::queue::{EvictionQueue, QueueEntry};

/// The policy; see the head of the file.
#[derive(Debug)]
pub struct Lru {
    recency: EvictionQueue,
}

impl Lru {
    pub fn new() -> Self {
        Self { recency: EvictionQueue::new() }
    }
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

impl Evictor for Lru {
    fn insert(&mut self, key: u64, bytes: u64) {
        if !self.recency.resize(key, bytes) {
            self.recency.push(QueueEntry { key, bytes, frequency: 0 });
        }
    }

    fn access(&mut self, key: u64) {
        self.recency.renew(key);
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        self.recency.resize(key, bytes);
    }

    fn remove(&mut self, key: u64) {
        self.recency.remove(key);
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let mut next = self.recency.oldest();
        while let Some(candidate) = next {
            if may_evict(candidate.key) {
                self.recency.remove(candidate.key);
                return Some(candidate.key);
            }
            next = self.recency.newer_than(candidate.key);
        }
        None
    }

    fn len(&self) -> usize {
        self.recency.len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.recency.bytes()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_goes_last_and_what_must_stay_keeps_its_place() {
        let mut policy = Lru::new();
        for key in 0..4 {
            policy.insert(key, 1);
        }
        policy.access(0);
        assert_eq!(policy.evict(&mut |key| key != 1), Some(2));
        assert_eq!(policy.evict(&mut |_| true), Some(1));
        assert_eq!(policy.evict(&mut |_| true), Some(3));
        assert_eq!(policy.evict(&mut |_| true), Some(0));
    }
}
