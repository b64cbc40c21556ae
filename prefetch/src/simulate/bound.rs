//! A bound for contents of different sizes, for which Belady's policy is none.
//!
//! PFOO-L of Berger, Beckmann, Harchol-Balter, "Practical bounds on optimal caching with variable object sizes",
//! SIGMETRICS 2018: a hit occupies its bytes since the previous use. All hits together cannot occupy more than the
//! whole cache over the whole trace. Choosing the cheapest hits, whenever they occur, gives at least as many hits as
//! any policy.

use super::{Misses, Trace};

/// Returns lower bounds: `missed_requests` for policies that minimise requests, `missed_bytes` for policies that
/// minimise bytes. Each is a bound by itself; no single policy reaches both.
pub fn bound(trace: &Trace, capacity_bytes: u64) -> Misses {
    let mut misses = Misses::default();
    let next_uses = trace.next_uses();
    let mut intervals = Vec::new();
    for (at, &content) in trace.requests().iter().enumerate() {
        let bytes = trace.bytes(content);
        misses.count(bytes, false);
        if next_uses[at] != u32::MAX && bytes <= capacity_bytes {
            intervals.push((u64::from(next_uses[at]) - at as u64, bytes));
        }
    }
    // In bytes times requests.
    let room = u128::from(capacity_bytes) * trace.requests().len() as u128;
    let cost = |&(length, bytes): &(u64, u64)| u128::from(length) * u128::from(bytes);
    intervals.sort_unstable_by_key(cost);
    let mut left = room;
    for interval in &intervals {
        let Some(rest) = left.checked_sub(cost(interval)) else { break };
        left = rest;
        misses.missed_requests -= 1;
    }
    // A byte is worth the same in every content, so the shortest intervals are the cheapest.
    intervals.sort_unstable();
    let mut left = room;
    for interval in &intervals {
        let Some(rest) = left.checked_sub(cost(interval)) else {
            // Counts a part of the last interval, which the bound requires.
            misses.missed_bytes -= left / u128::from(interval.0.max(1));
            break;
        };
        left = rest;
        misses.missed_bytes -= u128::from(interval.1);
    }
    misses
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simulate::belady;

    proptest! {
        #[test]
        fn belady_misses_no_less_with_any_sizes(
            keys in prop::collection::vec(0u64..40, 1..400),
            capacity in 1u64..200,
        ) {
            let trace = Trace::new(keys.into_iter().map(|key| (key, 1 + key % 13))).unwrap();
            let (least, belady) = (bound(&trace, capacity), belady(&trace, capacity));
            prop_assert!(least.missed_requests <= belady.missed_requests);
            prop_assert!(least.missed_bytes <= belady.missed_bytes);
        }
    }
}
