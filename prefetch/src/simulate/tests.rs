//! Promises of the default policy, on synthetic traces. A bench evaluates it on real ones.

use super::*;
use crate::eviction::{DEFAULT, by_name};

/// Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn shuffle(&mut self, keys: &mut [u64]) {
        for last in (1..keys.len()).rev() {
            keys.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

fn trace(keys: impl IntoIterator<Item = u64>) -> Trace {
    Trace::new(keys.into_iter().map(|key| (key, 1))).unwrap()
}

fn default(trace: &Trace, capacity: u64) -> f64 {
    replay(trace, capacity, by_name(DEFAULT, capacity).unwrap().as_mut()).object_ratio()
}

fn lru(trace: &Trace, capacity: u64) -> f64 {
    replay(trace, capacity, by_name("lru", capacity).unwrap().as_mut()).object_ratio()
}

#[test]
fn epochs_cost_the_default_at_most_one_percent_more_than_belady() {
    for (contents, epochs) in [(300, 4), (3000, 3), (1000, 20)] {
        let mut random = Random(contents);
        let same = trace((0..epochs).flat_map(|_| 0..contents));
        let shuffled = trace((0..epochs).flat_map(|_| {
            let mut keys: Vec<u64> = (0..contents).collect();
            random.shuffle(&mut keys);
            keys
        }));
        for (order, trace) in [("same", same), ("shuffled", shuffled)] {
            for capacity in [contents / 4, contents / 2, contents * 3 / 4] {
                let (default, belady) = (default(&trace, capacity), belady(&trace, capacity).object_ratio());
                assert!(default <= belady + 0.01, "{order} {contents}: {capacity}: {default}, Belady {belady}");
            }
        }
    }
}

/// Each request is for the content at a random depth of the LRU stack, mostly near its top, so no policy is better than
/// LRU.
#[test]
fn where_lru_is_right_the_default_is_at_most_one_percent_worse() {
    let mut random = Random(1);
    let mut stack: Vec<u64> = (0..2000).collect();
    let mut next = 2000;
    let requests: Vec<u64> = (0..60_000)
        .map(|_| {
            let depth = random.below(2000) * random.below(2000) * random.below(2000) / (2000 * 2000);
            let mut key = stack.remove(depth as usize);
            if random.below(50) == 0 {
                (key, next) = (next, next + 1);
            }
            stack.insert(0, key);
            key
        })
        .collect();
    let trace = trace(requests);
    for capacity in [50, 200, 1000] {
        let (default, lru) = (default(&trace, capacity), lru(&trace, capacity));
        assert!(default <= lru + 0.01, "{capacity}: {default}, LRU {lru}");
    }
}

#[test]
fn a_scan_does_not_cost_the_default_its_hot_set() {
    let mut random = Random(2);
    let mut scanned = 1_000_000;
    let trace = trace((0..60_000u64).map(|at| {
        if at % 5000 < 2000 {
            scanned += 1;
            scanned
        } else {
            random.below(400)
        }
    }));
    let (default, belady) = (default(&trace, 500), belady(&trace, 500).object_ratio());
    assert!(default < belady + 0.02, "{default}, Belady {belady}");
}

#[test]
fn the_same_trace_gives_the_same_misses() {
    let mut random = Random(3);
    let trace = trace((0..20_000).map(|_| random.below(40) * random.below(40)));
    assert_eq!(default(&trace, 200), default(&trace, 200));
}
