//! S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
//!
//! New content is on probation in a *small* queue. Content that is used more than once there moves to the *main* queue;
//! the rest is evicted soon. So a scan passes through a tenth of the fast pool and leaves the other nine tenths alone.
//! The keys evicted from probation are remembered in a *ghost* queue, and content that is fetched again goes to main at
//! once.
//!
//! Unlike in the paper, sizes count in bytes, and some content must stay (`may_evict`):
//! * Content larger than the whole small queue goes to main: in small it would be evicted before a second use could
//!   show its value, and would push all other entries out.
//! * Refused content goes round in its queue. It does not move to main: once flushed, a dirty file that was written
//!   once is no more worth keeping than a clean one.

use super::Evictor;
use super::queue::{EvictionQueue, QueueEntry};

/// The share of the capacity for probation: the paper's 10 %, which it finds robust between 5 and 20.
const SMALL_SHARE_PERCENT: u64 = 10;

/// Two bits of uses for each content, as in the paper.
const FREQUENCY_MAX: u8 = 3;

/// Content moves from probation to main with at least this many uses after the first one.
const PROMOTE_FREQUENCY: u8 = 2;

/// The most keys that the ghost queue remembers, whatever their sizes. About 64 bytes each: 64 MiB.
const GHOST_ENTRIES_MAX: usize = 1 << 20;

/// Refusals after which the search moves on to the other queue, so that a queue full of leased or dirty content is not
/// walked for every victim that the other queue could give at once.
const PATIENCE_REFUSALS: usize = 64;

/// The policy; see the head of the file.
#[derive(Debug)]
pub struct S3Fifo {
    small: EvictionQueue,
    main: EvictionQueue,
    /// Sizes in it are those at eviction.
    ghost: EvictionQueue,
    small_target_bytes: u64,
    /// The paper's bound: the ghosts' sizes add up to at most what main may hold.
    ghost_limit_bytes: u64,
}

impl S3Fifo {
    /// A policy for a fast pool of `capacity_bytes`, any value.
    pub fn new(capacity_bytes: u64) -> Self {
        let small_target_bytes = (u128::from(capacity_bytes) * u128::from(SMALL_SHARE_PERCENT) / 100) as u64;
        Self {
            small: EvictionQueue::new(),
            main: EvictionQueue::new(),
            ghost: EvictionQueue::new(),
            small_target_bytes,
            ghost_limit_bytes: capacity_bytes - small_target_bytes,
        }
    }

    /// Looks for a victim in small, until `patience` refusals or once through all entries. Afterwards, each visited
    /// entry is in main, refused, or the victim.
    fn evict_small(&mut self, patience: usize, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let mut refusals = 0;
        for _ in 0..self.small.len() {
            let oldest = self.small.oldest()?;
            if oldest.frequency >= PROMOTE_FREQUENCY {
                self.small.remove(oldest.key);
                self.main.push(QueueEntry { frequency: 0, ..oldest });
            } else if may_evict(oldest.key) {
                self.small.remove(oldest.key);
                self.remember(oldest);
                return Some(oldest.key);
            } else {
                self.small.rotate();
                refusals += 1;
                if refusals >= patience {
                    break;
                }
            }
        }
        None
    }

    /// Looks for a victim in main, until `patience` refusals or a whole round of refusals. An entry with uses pays one
    /// of them for another round. So there are at most [`FREQUENCY_MAX`] rounds in which an entry pays, and each
    /// payment was earned by an access.
    fn evict_main(&mut self, patience: usize, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let mut refusals = 0;
        let mut refusals_in_a_row = 0;
        while refusals_in_a_row < self.main.len() && refusals < patience {
            let oldest = self.main.oldest()?;
            if oldest.frequency > 0 {
                if let Some(frequency) = self.main.frequency_mut(oldest.key) {
                    *frequency -= 1;
                }
                refusals_in_a_row = 0;
            } else if may_evict(oldest.key) {
                // Not remembered: in the paper, only entries of probation become ghosts.
                self.main.remove(oldest.key);
                return Some(oldest.key);
            } else {
                refusals += 1;
                refusals_in_a_row += 1;
            }
            self.main.rotate();
        }
        None
    }

    fn remember(&mut self, evicted: QueueEntry) {
        if evicted.bytes > self.ghost_limit_bytes {
            return; // it would push out all other ghosts
        }
        self.ghost.push(QueueEntry { frequency: 0, ..evicted });
        while self.ghost.bytes() > u128::from(self.ghost_limit_bytes) || self.ghost.len() > GHOST_ENTRIES_MAX {
            self.ghost.pop_oldest();
        }
    }
}

impl Evictor for S3Fifo {
    fn insert(&mut self, key: u64, bytes: u64) {
        if self.small.contains(key) || self.main.contains(key) {
            return self.resize(key, bytes);
        }
        let returned = self.ghost.remove(key).is_some();
        let entry = QueueEntry { key, bytes, frequency: 0 };
        if returned || bytes > self.small_target_bytes {
            self.main.push(entry);
        } else {
            self.small.push(entry);
        }
    }

    fn access(&mut self, key: u64) {
        let frequency = match self.small.frequency_mut(key) {
            Some(frequency) => Some(frequency),
            None => self.main.frequency_mut(key),
        };
        if let Some(frequency) = frequency {
            *frequency = (*frequency + 1).min(FREQUENCY_MAX);
        }
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        if !self.small.resize(key, bytes) {
            self.main.resize(key, bytes);
        } else if bytes > self.small_target_bytes {
            // Content grows while it is fetched or written: it is treated as if it had been inserted with this size.
            if let Some(entry) = self.small.remove(key) {
                self.main.push(entry);
            }
        }
    }

    fn remove(&mut self, key: u64) {
        for queue in [&mut self.small, &mut self.main, &mut self.ghost] {
            queue.remove(key);
        }
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let small_is_due = self.small.bytes() >= u128::from(self.small_target_bytes);
        let quick = if small_is_due {
            self.evict_small(PATIENCE_REFUSALS, may_evict).or_else(|| self.evict_main(PATIENCE_REFUSALS, may_evict))
        } else {
            self.evict_main(PATIENCE_REFUSALS, may_evict).or_else(|| self.evict_small(PATIENCE_REFUSALS, may_evict))
        };
        // Small goes first: entries that it promotes are still found in main.
        quick.or_else(|| self.evict_small(usize::MAX, may_evict)).or_else(|| self.evict_main(usize::MAX, may_evict))
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.small.bytes() + self.main.bytes()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evict(policy: &mut S3Fifo) -> Option<u64> {
        policy.evict(&mut |_| true)
    }

    #[test]
    fn content_touched_on_probation_outlives_content_that_was_not() {
        let mut policy = S3Fifo::new(100);
        for key in 0..10 {
            policy.insert(key, 1);
        }
        policy.access(0);
        policy.access(0);
        assert_eq!(evict(&mut policy), Some(1));
        assert!(policy.main.contains(0));
    }

    #[test]
    fn content_that_comes_back_goes_to_main_and_its_ghost_is_gone() {
        let mut policy = S3Fifo::new(100);
        policy.insert(7, 10);
        assert_eq!(evict(&mut policy), Some(7));
        assert!(policy.ghost.contains(7));
        policy.insert(7, 10);
        assert!(policy.main.contains(7) && !policy.ghost.contains(7));
    }

    #[test]
    fn removed_content_leaves_no_ghost() {
        let mut policy = S3Fifo::new(100);
        policy.insert(1, 10);
        evict(&mut policy);
        policy.insert(2, 10);
        policy.remove(1);
        policy.remove(2);
        assert_eq!((policy.ghost.len(), policy.len(), policy.bytes()), (0, 0, 0));
    }

    #[test]
    fn content_larger_than_probation_goes_to_main_at_once_and_when_it_grows() {
        let mut policy = S3Fifo::new(100);
        policy.insert(1, 11);
        policy.insert(2, 10);
        assert!(policy.main.contains(1) && policy.small.contains(2));
        policy.resize(2, 11);
        assert!(policy.main.contains(2));
        assert_eq!(policy.bytes(), 22);
    }

    #[test]
    fn ghosts_stand_for_no_more_bytes_than_main_holds() {
        let mut policy = S3Fifo::new(1000);
        for key in 0..100_000 {
            policy.insert(key, 1 + key % 100);
            evict(&mut policy);
            assert!(policy.ghost.bytes() <= 900);
        }
        assert!(policy.ghost.nodes_allocated() <= 901);
    }

    #[test]
    fn ghosts_of_empty_files_are_bounded_too() {
        let mut policy = S3Fifo::new(1000);
        for key in 0..(GHOST_ENTRIES_MAX as u64 + 10) {
            policy.insert(key, 0);
            evict(&mut policy);
        }
        assert_eq!(policy.ghost.len(), GHOST_ENTRIES_MAX);
    }

    #[test]
    fn a_main_queue_full_of_leases_is_not_walked_for_every_victim() {
        const LEASED: u64 = 10_000;
        let mut policy = S3Fifo::new(LEASED * 100);
        for key in 0..LEASED {
            policy.insert(key, 100);
            policy.access(key);
            policy.access(key);
        }
        policy.insert(LEASED, 1);
        evict(&mut policy); // moves the touched content to main
        let mut asked = 0;
        for key in LEASED + 1..LEASED + 1001 {
            policy.insert(key, 1);
            let victim = policy.evict(&mut |candidate| {
                asked += 1;
                candidate >= LEASED
            });
            assert_eq!(victim, Some(key));
        }
        assert!(asked <= 1000 * (PATIENCE_REFUSALS + 1), "{asked} questions for 1000 victims");
    }

    #[test]
    fn sizes_beyond_all_reason_do_not_overflow() {
        let mut policy = S3Fifo::new(u64::MAX);
        for key in 0..4 {
            policy.insert(key, u64::MAX);
        }
        assert_eq!(policy.bytes(), u64::MAX);
        policy.remove(0);
        policy.resize(1, 0);
        policy.remove(2);
        policy.remove(3);
        assert_eq!(policy.bytes(), 0);
    }
}
