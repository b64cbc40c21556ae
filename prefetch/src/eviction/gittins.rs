//! Evicts first the content that is least likely to be used soon for its space, as learned from past uses.
//!
//! Each content has an index: the highest rate of uses per time in the cache that one may expect, given its age since
//! the last use, its past intervals between uses, and the number of its uses ([`reuse`]). This is the index of Gittins.
//! It needs no choice between recency, frequency and loops: each of them is a shape that the distribution may have. The
//! order of eviction is the index, weighed by the cost of a miss per byte ([`super::cost`]). As in "LHD: improving
//! cache hit rate by maximizing hit density" (Beckmann, Chen, Cidon, NSDI 2018), it is computed for a sample of the
//! resident contents. Evicted contents are remembered as ghosts, so that intervals are known that are longer than the
//! cache is large.
//!
//! Two things are not left to statistics: a set that is read over and over ([`crate::runs`]), for which the order is
//! known; and LRU on the same uses as a rival ([`rival`]), which is followed if it does better.

use std::cmp::Ordering;

use super::Evictor;
use super::cost::FetchCost;
use crate::runs::{Runs, Standing};
use history::AccessHistory;
use reuse::{Past, Reuse};
use rival::Rival;

mod history;
mod reuse;
mod rival;

/// Candidates for eviction. LHD finds that more than 64 gain nothing.
const SAMPLE: usize = 64;

/// Part of the sample: the most and the least recently used contents. If the best order is by recency, one of them is
/// the right victim.
const SAMPLE_NEWEST: usize = 4;
const SAMPLE_OLDEST: usize = 8;

/// The policy; see the head of the file.
#[derive(Debug)]
pub struct Gittins {
    history: AccessHistory,
    reuse: Reuse,
    runs: Runs,
    rival: Rival,
    cost: FetchCost,
    /// Number of uses so far.
    clock: u64,
    random: u64,
    candidates: Vec<(Rank, u32)>,
    /// Where the search among the residents continues if no candidate may be evicted: contents that were refused before
    /// are asked again last.
    search_from: usize,
}

/// The rank of content: the smallest goes first.
#[derive(Debug, Clone, Copy)]
struct Rank {
    standing: Standing,
    worth: f64,
    then: u64,
}

impl Rank {
    fn order(&self, other: &Self) -> Ordering {
        let standing = self.standing.cmp(&other.standing);
        standing.then(self.worth.total_cmp(&other.worth)).then(self.then.cmp(&other.then))
    }
}

/// The ranking of the candidates.
#[derive(Debug, Clone, Copy)]
enum RankingOrder {
    Epoch,
    Recency,
    Index,
}

impl Gittins {
    /// Returns a policy for a fast pool of `capacity_bytes`, any value: this is the size of the LRU with which it is
    /// compared.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            history: AccessHistory::new(capacity_bytes),
            reuse: Reuse::new(),
            runs: Runs::default(),
            rival: Rival::new(),
            cost: FetchCost::default(),
            clock: 0,
            random: 0x9E37_79B9_7F4A_7C15,
            candidates: Vec::new(),
            search_from: 0,
        }
    }

    /// Notes another use of known content.
    fn use_again(&mut self, slot: u32) {
        let node = self.history.node(slot);
        let (bytes, past) = (node.bytes, node.past);
        self.rival.note(bytes, node.is_resident(), node.in_lru, self.history.residents().len());
        self.runs.used_again(node.used_at, self.clock);
        self.reuse.used(past, usize::from(node.bucket));
        let past = past.again(self.clock - node.used_at);
        self.history.renew(slot, past, self.clock);
        self.end_use(past, bytes);
    }

    fn end_use(&mut self, past: Past, bytes: u64) {
        self.reuse.reached(past, 0);
        self.cost.used(bytes);
        self.clock += 1;
        self.history.age(self.clock, |past, bucket| self.reuse.reached(past, bucket));
        self.reuse.tick(self.clock, self.history.known());
    }

    fn resident(&self, key: u64) -> Option<u32> {
        self.history.find(key).filter(|&slot| self.history.node(slot).is_resident())
    }

    fn order(&self) -> RankingOrder {
        match () {
            () if self.runs.is_epoch(self.clock, self.history.residents().len()) => RankingOrder::Epoch,
            () if self.rival.is_followed() => RankingOrder::Recency,
            () => RankingOrder::Index,
        }
    }

    fn rank(&self, slot: u32, order: RankingOrder) -> Rank {
        let node = self.history.node(slot);
        let age = self.clock - node.used_at;
        let standing = self.runs.standing(node.used_at);
        match order {
            RankingOrder::Epoch if standing == Standing::Stale => Rank { standing, worth: 0.0, then: node.used_at },
            // The newest goes first, also among contents that were used in this epoch: if the order is the same each
            // time, the newest is the last to be used again. Sizes do not count: evicting the largest first misses
            // fewer files, but more bytes than Belady.
            RankingOrder::Epoch => Rank { standing, worth: 0.0, then: age },
            RankingOrder::Recency => Rank { standing: Standing::Used, worth: 0.0, then: node.used_at },
            RankingOrder::Index => {
                let index = self.reuse.index(node.past, usize::from(node.bucket), age);
                let worth = index * self.cost.by_byte(node.bytes, self.rival.objects());
                Rank { standing: Standing::Used, worth, then: node.used_at }
            }
        }
    }

    /// Fills the list of candidates. The same content may be in it twice.
    fn sample(&mut self, order: RankingOrder) {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        let residents = self.history.residents().len();
        if residents <= SAMPLE {
            candidates.extend(self.history.residents().iter().map(|&slot| (self.rank(slot, order), slot)));
        } else {
            candidates.extend(self.history.newest_residents(SAMPLE_NEWEST).map(|slot| (self.rank(slot, order), slot)));
            let oldest: Vec<u32> = self.history.oldest_residents(SAMPLE_OLDEST).collect();
            candidates.extend(oldest.into_iter().map(|slot| (self.rank(slot, order), slot)));
            while candidates.len() < SAMPLE {
                let at = self.next_random() as usize % residents;
                let slot = self.history.residents()[at];
                candidates.push((self.rank(slot, order), slot));
            }
        }
        self.candidates = candidates;
    }

    /// Marsaglia, "Xorshift RNGs", 2003: the same numbers in each run.
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }

    fn give_up(&mut self, slot: u32) -> Option<u64> {
        self.history.evict(slot);
        Some(self.history.node(slot).key)
    }
}

impl Evictor for Gittins {
    fn insert(&mut self, key: u64, bytes: u64) {
        match self.history.find(key) {
            Some(slot) if self.history.node(slot).is_resident() => self.history.resize(slot, bytes),
            Some(slot) => {
                self.history.resize(slot, bytes);
                self.use_again(slot);
            }
            None => {
                self.rival.note(bytes, false, false, self.history.residents().len());
                self.history.admit(key, bytes, self.clock);
                self.end_use(Past::once(), bytes);
            }
        }
    }

    fn access(&mut self, key: u64) {
        if let Some(slot) = self.resident(key) {
            self.use_again(slot);
        }
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        if let Some(slot) = self.resident(key) {
            self.history.resize(slot, bytes);
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(slot) = self.history.find(key) {
            self.history.forget(slot);
        }
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        self.sample(self.order());
        // The smallest candidate is nearly always allowed, so this is cheaper than sorting.
        while let Some(least) =
            (0..self.candidates.len()).min_by(|&a, &b| self.candidates[a].0.order(&self.candidates[b].0))
        {
            let (_, slot) = self.candidates.swap_remove(least);
            if may_evict(self.history.node(slot).key) {
                return self.give_up(slot);
            }
        }
        let residents = self.history.residents();
        let from = self.search_from.min(residents.len());
        let at = (from..residents.len()).chain(0..from).find(|&at| may_evict(self.history.node(residents[at]).key))?;
        self.search_from = at;
        self.give_up(residents[at])
    }

    fn len(&self) -> usize {
        self.history.residents().len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.history.resident_bytes()).unwrap_or(u64::MAX)
    }
}
