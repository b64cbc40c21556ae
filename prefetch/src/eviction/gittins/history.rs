//! Resident contents and ghosts in the order of their last use, each with its bucket of ages and a mark whether LRU
//! would have it.

use std::collections::{HashMap, VecDeque};

use super::reuse::{BOUNDS, BUCKETS, Past};

/// The end of the list. The number of known contents is below `u32::MAX`.
pub(super) const NIL: u32 = u32::MAX;

/// The most evicted contents that are remembered. About 100 bytes each: 50 MiB.
pub(super) const GHOSTS_MAX: usize = 1 << 19;

/// A bucket is entered up to a sixteenth of its bound too late, so that not every bound is checked at every use.
const LATE_ONE_IN: u64 = 16;

/// A content, resident or a ghost.
#[derive(Debug, Clone)]
pub(super) struct HistoryNode {
    pub key: u64,
    pub bytes: u64,
    pub used_at: u64,
    newer: u32,
    older: u32,
    /// Its index among the residents; [`NIL`]: a ghost.
    place: u32,
    pub past: Past,
    pub bucket: u8,
    /// LRU would have it resident.
    pub in_lru: bool,
}

impl HistoryNode {
    pub fn is_resident(&self) -> bool {
        self.place != NIL
    }
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct AccessHistory {
    slots: HashMap<u64, u32>,
    nodes: Vec<HistoryNode>,
    free: Vec<u32>,
    residents: Vec<u32>,
    resident_bytes: u128,
    newest: u32,
    oldest: u32,
    /// No content older than this one is resident.
    oldest_resident: u32,
    /// For each bound of ages, the oldest content that has not reached it.
    cursors: [u32; BUCKETS],
    /// Slots of evicted contents, and the times of their last uses. A content that was fetched again is still listed,
    /// but with another time in its node.
    ghosts: VecDeque<(u32, u64)>,
    lru_oldest: u32,
    lru_bytes: u128,
    capacity_bytes: u64,
}

impl AccessHistory {
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            slots: HashMap::new(),
            nodes: Vec::new(),
            free: Vec::new(),
            residents: Vec::new(),
            resident_bytes: 0,
            newest: NIL,
            oldest: NIL,
            oldest_resident: NIL,
            cursors: [NIL; BUCKETS],
            ghosts: VecDeque::new(),
            lru_oldest: NIL,
            lru_bytes: 0,
            capacity_bytes,
        }
    }

    pub fn find(&self, key: u64) -> Option<u32> {
        self.slots.get(&key).copied()
    }

    pub fn node(&self, slot: u32) -> &HistoryNode {
        &self.nodes[slot as usize]
    }

    fn node_mut(&mut self, slot: u32) -> &mut HistoryNode {
        &mut self.nodes[slot as usize]
    }

    pub fn residents(&self) -> &[u32] {
        &self.residents
    }

    pub fn resident_bytes(&self) -> u128 {
        self.resident_bytes
    }

    /// Returns the number of known contents, resident or not.
    pub fn known(&self) -> usize {
        self.slots.len()
    }

    /// Adds unknown content, as the newest.
    pub fn admit(&mut self, key: u64, bytes: u64, now: u64) {
        let past = Past::once();
        let (newer, older, place) = (NIL, NIL, NIL);
        let node = HistoryNode { key, bytes, used_at: now, newer, older, place, past, bucket: 0, in_lru: false };
        let slot = match self.free.pop() {
            Some(slot) => {
                *self.node_mut(slot) = node;
                slot
            }
            None => {
                assert!(self.nodes.len() < NIL as usize, "fewer than {NIL} contents are known");
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        self.slots.insert(key, slot);
        self.settle(slot);
        self.link_newest(slot);
    }

    /// Makes known content the newest, with a new past. A ghost becomes resident again.
    pub fn renew(&mut self, slot: u32, past: Past, now: u64) {
        self.unlink(slot);
        if !self.node(slot).is_resident() {
            self.settle(slot);
        }
        let node = self.node_mut(slot);
        (node.past, node.used_at, node.bucket) = (past, now, 0);
        self.link_newest(slot);
    }

    pub fn resize(&mut self, slot: u32, bytes: u64) {
        let node = self.node_mut(slot);
        let before = std::mem::replace(&mut node.bytes, bytes);
        let (resident, in_lru) = (node.is_resident(), node.in_lru);
        for (counted, sum) in [(resident, &mut self.resident_bytes), (in_lru, &mut self.lru_bytes)] {
            if counted {
                *sum = *sum - u128::from(before) + u128::from(bytes);
            }
        }
    }

    /// Makes a resident a ghost. If there are too many ghosts, forgets the one that was evicted first.
    pub fn evict(&mut self, slot: u32) {
        self.leave(slot);
        self.ghosts.push_back((slot, self.node(slot).used_at));
        while self.ghosts.len() > GHOSTS_MAX {
            let Some((slot, used_at)) = self.ghosts.pop_front() else { break };
            if self.node(slot).used_at == used_at && !self.node(slot).is_resident() {
                self.forget(slot);
            }
        }
    }

    pub fn forget(&mut self, slot: u32) {
        if self.node(slot).is_resident() {
            self.leave(slot);
        }
        self.unlink(slot);
        let node = self.node_mut(slot);
        node.used_at = u64::MAX; // so that no ghost is taken for it
        let key = node.key;
        self.slots.remove(&key);
        self.free.push(slot);
    }

    /// Advances the ages to `now`. Calls `reached` with the past and the bucket of each content that enters a bucket.
    pub fn age(&mut self, now: u64, mut reached: impl FnMut(Past, usize)) {
        for (bucket, &bound) in BOUNDS.iter().enumerate().take(BUCKETS - 1) {
            let period = (bound / LATE_ONE_IN).next_power_of_two();
            if now & (period - 1) != 0 {
                break; // and longer ones are multiples of it
            }
            let mut at = self.cursors[bucket];
            while at != NIL && now - self.node(at).used_at >= bound {
                let node = self.node_mut(at);
                node.bucket = bucket as u8 + 1;
                at = node.newer;
                reached(self.node(self.cursors[bucket]).past, bucket + 1);
                self.cursors[bucket] = at;
            }
        }
    }

    /// Returns up to `most` of the most recently used residents, found in a few steps.
    pub fn newest_residents(&self, most: usize) -> impl Iterator<Item = u32> {
        self.walk(self.newest, |node| node.older, most)
    }

    /// Returns up to `most` of the least recently used residents, found in a few steps.
    pub fn oldest_residents(&mut self, most: usize) -> impl Iterator<Item = u32> {
        while self.oldest_resident != NIL && !self.node(self.oldest_resident).is_resident() {
            self.oldest_resident = self.node(self.oldest_resident).newer;
        }
        self.walk(self.oldest_resident, |node| node.newer, most)
    }

    fn walk(&self, from: u32, next: fn(&HistoryNode) -> u32, most: usize) -> impl Iterator<Item = u32> {
        let mut at = from;
        let steps = std::iter::from_fn(move || {
            let here = at;
            (here != NIL).then(|| {
                at = next(self.node(here));
                here
            })
        });
        steps.take(4 * most).filter(|&slot| self.node(slot).is_resident()).take(most)
    }

    fn settle(&mut self, slot: u32) {
        let place = self.residents.len() as u32;
        self.residents.push(slot);
        let node = self.node_mut(slot);
        node.place = place;
        self.resident_bytes += u128::from(self.node(slot).bytes);
    }

    fn leave(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.node_mut(slot).place, NIL);
        self.residents.swap_remove(place as usize);
        if let Some(&moved) = self.residents.get(place as usize) {
            self.node_mut(moved).place = place;
        }
        self.resident_bytes -= u128::from(self.node(slot).bytes);
    }

    fn link_newest(&mut self, slot: u32) {
        let before = std::mem::replace(&mut self.newest, slot);
        // The bounds that all other contents have reached.
        let passed = if before == NIL { BUCKETS } else { usize::from(self.node(before).bucket) };
        self.cursors[..passed].fill(slot);
        let node = self.node_mut(slot);
        (node.older, node.newer) = (before, NIL);
        match before {
            NIL => self.oldest = slot,
            _ => self.node_mut(before).newer = slot,
        }
        for first in [&mut self.oldest_resident, &mut self.lru_oldest] {
            if *first == NIL {
                *first = slot;
            }
        }
        self.node_mut(slot).in_lru = true;
        self.lru_bytes += u128::from(self.node(slot).bytes);
        while self.lru_bytes > u128::from(self.capacity_bytes) && self.lru_oldest != slot {
            let node = self.node_mut(self.lru_oldest);
            node.in_lru = false;
            let (newer, bytes) = (node.newer, node.bytes);
            self.lru_oldest = newer;
            self.lru_bytes -= u128::from(bytes);
        }
    }

    fn unlink(&mut self, slot: u32) {
        let HistoryNode { newer, older, bucket, bytes, in_lru, .. } = *self.node(slot);
        // The bounds that this content would have been the next to reach.
        let next_for = if older == NIL { BUCKETS } else { usize::from(self.node(older).bucket) };
        self.cursors[usize::from(bucket)..next_for].fill(newer);
        if in_lru {
            self.node_mut(slot).in_lru = false;
            self.lru_bytes -= u128::from(bytes);
        }
        for first in [&mut self.oldest_resident, &mut self.lru_oldest] {
            if *first == slot {
                *first = newer;
            }
        }
        match newer {
            NIL => self.newest = older,
            _ => self.node_mut(newer).older = older,
        }
        match older {
            NIL => self.oldest = newer,
            _ => self.node_mut(older).newer = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_pass_the_bounds_in_order_and_what_is_used_begins_anew() {
        let mut history = AccessHistory::new(100);
        for now in 0..40 {
            history.admit(now, 1, now);
            history.age(now + 1, |_, _| ());
        }
        history.renew(history.find(0).unwrap(), Past::once(), 40);
        history.age(41, |_, _| ());
        let age = |key| 41 - history.node(history.find(key).unwrap()).used_at;
        for key in 0..40 {
            let bucket = usize::from(history.node(history.find(key).unwrap()).bucket);
            assert!(age(key) < BOUNDS[bucket] + BOUNDS[bucket] / LATE_ONE_IN + 2, "{key} is {} in {bucket}", age(key));
            assert!(bucket == 0 || age(key) >= BOUNDS[bucket - 1]);
        }
    }

    #[test]
    fn lru_would_have_what_was_used_last() {
        let mut history = AccessHistory::new(3);
        for key in 0..5 {
            history.admit(key, 1, key);
        }
        let in_lru = |history: &AccessHistory, key| history.node(history.find(key).unwrap()).in_lru;
        assert!(!in_lru(&history, 1) && in_lru(&history, 2));
        history.renew(history.find(0).unwrap(), Past::once(), 5);
        assert!(in_lru(&history, 0) && !in_lru(&history, 2));
    }

    #[test]
    fn ghosts_are_bounded_and_forgotten_in_order() {
        let mut history = AccessHistory::new(1);
        for key in 0..GHOSTS_MAX as u64 + 3 {
            history.admit(key, 1, key);
            history.evict(history.find(key).unwrap());
        }
        assert_eq!(history.known(), GHOSTS_MAX);
        assert!(history.find(2).is_none() && history.find(3).is_some());
    }
}
