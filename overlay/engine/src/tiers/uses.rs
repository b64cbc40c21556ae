//! Counts of uses, and the content of the faster tiers in the order of its last use.

use std::collections::{BTreeSet, HashMap, VecDeque};

use lru::LruCache;

use crate::Ino;

/// Files whose uses are counted. When more are used, all counts are halved, and those that reach zero are forgotten.
const COUNTED_MAX: usize = 64 << 10;
/// Files that wait to be promoted, at most.
const WANTED_MAX: usize = 4096;

#[derive(Debug)]
pub(super) struct TierUses {
    counts: HashMap<Ino, u32>,
    /// For each tier: after how many uses content of the next slower tier is moved there; zero: never.
    thresholds: Vec<u32>,
    /// For each tier: the files whose clean content it has, least recently used first. A file is in one list at most.
    held: Vec<LruCache<Ino, ()>>,
    /// Files to promote, the oldest first.
    wanted: VecDeque<Ino>,
    /// Files in memory that have to leave it: it has their only copy.
    leaving: BTreeSet<Ino>,
}

impl TierUses {
    pub fn new(thresholds: Vec<u32>) -> Self {
        let held = thresholds.iter().map(|_| LruCache::unbounded()).collect();
        let (counts, wanted, leaving) = Default::default();
        Self { counts, thresholds, held, wanted, leaving }
    }

    /// Counts a use of content on a tier. Returns whether it is to be promoted.
    pub fn used(&mut self, ino: Ino, tier: usize) -> bool {
        if self.counts.len() >= COUNTED_MAX && !self.counts.contains_key(&ino) {
            self.counts.retain(|_, count| {
                *count /= 2;
                *count > 0
            });
        }
        let count = self.counts.entry(ino).or_insert(0);
        *count = count.saturating_add(1);
        let count = *count;
        self.seen(ino);
        let threshold = tier.checked_sub(1).and_then(|faster| self.thresholds.get(faster)).copied().unwrap_or(0);
        let wants = threshold > 0 && count >= threshold;
        if wants && !self.wanted.contains(&ino) {
            if self.wanted.len() >= WANTED_MAX {
                self.wanted.pop_front();
            }
            self.wanted.push_back(ino);
        }
        wants
    }

    /// A file is the last that its tier gives up.
    pub fn seen(&mut self, ino: Ino) {
        self.held.iter_mut().for_each(|held| _ = held.promote(&ino));
    }

    /// Returns the uses of a file, as far as they are known.
    pub fn count(&self, ino: Ino) -> u32 {
        self.counts.get(&ino).copied().unwrap_or(0)
    }

    /// A faster tier holds clean content of a file, and no other one does.
    pub fn holds(&mut self, ino: Ino, tier: usize) {
        self.forget(ino);
        self.held[tier].put(ino, ());
    }

    /// Returns whether a faster tier holds clean content of a file.
    pub fn is_in_faster_tier(&self, ino: Ino) -> bool {
        self.held.iter().any(|held| held.contains(&ino))
    }

    /// Returns the file of a tier that was used least recently.
    pub fn coldest(&self, tier: usize) -> Option<Ino> {
        self.held[tier].peek_lru().map(|(ino, ())| *ino)
    }

    /// No faster tier holds clean content of a file.
    pub fn forget(&mut self, ino: Ino) {
        self.held.iter_mut().for_each(|held| _ = held.pop(&ino));
    }

    /// Returns how many files are in the list of a tier.
    pub fn held(&self, tier: usize) -> usize {
        self.held[tier].len()
    }

    pub fn is_wanted(&self, ino: Ino) -> bool {
        self.wanted.contains(&ino)
    }

    /// Returns all files that are to be promoted.
    pub fn wanted(&self) -> Vec<Ino> {
        self.wanted.iter().copied().collect()
    }

    /// A file was promoted, or cannot be. One that is in use stays: its close is waited for.
    pub fn settled(&mut self, ino: Ino) {
        self.wanted.retain(|wanted| *wanted != ino);
    }

    pub fn must_leave(&mut self, ino: Ino) {
        self.leaving.insert(ino);
    }

    pub fn is_leaving(&self, ino: Ino) -> bool {
        self.leaving.contains(&ino)
    }

    pub fn leaving(&self) -> Vec<Ino> {
        self.leaving.iter().copied().collect()
    }

    /// A file has left memory, or need not leave it any more.
    pub fn has_left(&mut self, ino: Ino) {
        self.leaving.remove(&ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_wanted_on_the_next_faster_tier_after_enough_uses() {
        let mut uses = TierUses::new(vec![3, 0, 2]);
        assert_eq!([(); 3].map(|()| uses.used(Ino(7), 1)), [false, false, true]);
        assert!(uses.is_wanted(Ino(7)) && uses.wanted() == [Ino(7)]);
        uses.settled(Ino(7));
        assert!((0..9).all(|_| !uses.used(Ino(8), 2)), "nothing is promoted to this tier");
        assert!((0..9).all(|_| !uses.used(Ino(9), 0)), "there is no faster one");
        assert_eq!((uses.count(Ino(9)), uses.wanted()), (9, Vec::new()));
    }

    #[test]
    fn the_coldest_is_what_was_used_least_recently() {
        let mut uses = TierUses::new(vec![1, 1]);
        (1..=3).for_each(|ino| uses.holds(Ino(ino), 0));
        uses.used(Ino(1), 0);
        assert!(uses.coldest(0) == Some(Ino(2)) && uses.is_in_faster_tier(Ino(2)));
        uses.forget(Ino(2));
        assert_eq!((uses.coldest(0), uses.held(0), uses.is_in_faster_tier(Ino(2))), (Some(Ino(3)), 2, false));
    }

    #[test]
    fn a_file_is_in_the_list_of_one_tier_at_most() {
        let mut uses = TierUses::new(vec![1, 1, 1]);
        (0..1000).for_each(|ino| uses.holds(Ino(ino), 0));
        (0..1000).for_each(|ino| uses.holds(Ino(ino), 1));
        assert_eq!((uses.held(0), uses.held(1)), (0, 1000));
        (0..1000).for_each(|ino| uses.forget(Ino(ino)));
        assert!(uses.held(1) == 0 && !uses.is_in_faster_tier(Ino(7)));
    }

    #[test]
    fn memory_for_counts_is_bounded() {
        let mut uses = TierUses::new(vec![2, 2]);
        uses.used(Ino(0), 1);
        uses.used(Ino(0), 1);
        (1..3 * COUNTED_MAX as u64).for_each(|ino| _ = uses.used(Ino(ino), 1));
        assert!(uses.counts.len() <= COUNTED_MAX && uses.wanted.len() <= WANTED_MAX);
    }
}
