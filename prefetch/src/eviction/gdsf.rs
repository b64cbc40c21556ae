//! GDSF: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs
//! HPL-98-69R1, 1998.
//!
//! The worth of content is the number of its uses times its cost of fetching per byte. The worth of the last victim is
//! the clock, by which old uses fade.

use std::collections::{BTreeSet, HashMap};

use super::Evictor;
use super::cost::FetchCost;

#[derive(Debug, Clone, Copy)]
struct WeighedContent {
    bytes: u64,
    uses: u32,
    worth: Worth,
}

/// Ordered like the number, which is finite and not negative: the bits of such numbers sort as the numbers do. Of equal
/// ones, the one that was used first goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Worth {
    bits: u64,
    used_at: u64,
}

/// The policy; see the head of the file.
#[derive(Debug, Default)]
pub struct Gdsf {
    contents: HashMap<u64, WeighedContent>,
    by_worth: BTreeSet<(Worth, u64)>,
    cost: FetchCost,
    /// The worth of the last victim.
    clock: f64,
    uses: u64,
    bytes: u128,
}

impl Gdsf {
    pub fn new() -> Self {
        Self::default()
    }

    fn worth(&mut self, bytes: u64, uses: u32) -> Worth {
        self.uses += 1;
        let worth = self.clock + f64::from(uses) * self.cost.by_byte(bytes, 1.0);
        Worth { bits: worth.to_bits(), used_at: self.uses }
    }

    /// Recomputes the worth of content.
    fn put(&mut self, key: u64, bytes: u64, uses: u32) {
        let worth = self.worth(bytes, uses);
        if let Some(before) = self.contents.insert(key, WeighedContent { bytes, uses, worth }) {
            self.by_worth.remove(&(before.worth, key));
            self.bytes -= u128::from(before.bytes);
        }
        self.by_worth.insert((worth, key));
        self.bytes += u128::from(bytes);
    }
}

impl Evictor for Gdsf {
    fn insert(&mut self, key: u64, bytes: u64) {
        if self.contents.contains_key(&key) {
            return self.resize(key, bytes);
        }
        self.cost.used(bytes);
        self.put(key, bytes, 1);
    }

    fn access(&mut self, key: u64) {
        if let Some(&WeighedContent { bytes, uses, .. }) = self.contents.get(&key) {
            self.cost.used(bytes);
            self.put(key, bytes, uses.saturating_add(1));
        }
    }

    fn resize(&mut self, key: u64, bytes: u64) {
        if let Some(&WeighedContent { uses, .. }) = self.contents.get(&key) {
            self.put(key, bytes, uses);
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(content) = self.contents.remove(&key) {
            self.by_worth.remove(&(content.worth, key));
            self.bytes -= u128::from(content.bytes);
        }
    }

    fn evict(&mut self, may_evict: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let &(worth, key) = self.by_worth.iter().find(|(_, key)| may_evict(*key))?;
        self.remove(key);
        self.clock = self.clock.max(f64::from_bits(worth.bits));
        Some(key)
    }

    fn len(&self) -> usize {
        self.contents.len()
    }

    fn bytes(&self) -> u64 {
        u64::try_from(self.bytes).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_is_used_as_often_the_largest_goes_first() {
        let mut policy = Gdsf::new();
        policy.insert(1, 10);
        policy.insert(2, 1000);
        policy.insert(3, 100);
        assert_eq!(policy.evict(&mut |_| true), Some(2));
        assert_eq!(policy.evict(&mut |_| true), Some(3));
    }

    #[test]
    fn uses_of_long_ago_fade() {
        let mut policy = Gdsf::new();
        policy.insert(0, 1);
        (0..10).for_each(|_| policy.access(0));
        policy.insert(1, 1);
        for key in 2..100 {
            policy.insert(key, 1);
            if policy.evict(&mut |_| true) == Some(0) {
                return;
            }
        }
        panic!("content of eleven uses outlived a hundred other contents");
    }
}
