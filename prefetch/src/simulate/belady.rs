//! The policy that knows the future: it evicts the content whose next use is furthest away.
//!
//! Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. No
//! policy misses less often if all contents have the same size. With different sizes it is no bound: see
//! [`super::bound`].

use std::collections::BTreeSet;

use super::{Misses, Trace};

/// Replays a trace as [`super::replay`] does. Of contents that are never needed again, the largest is evicted first.
pub fn belady(trace: &Trace, capacity_bytes: u64) -> Misses {
    let mut misses = Misses::default();
    let next_uses = trace.next_uses();
    // By next use, then by size.
    let mut present: BTreeSet<(u32, u64, u32)> = BTreeSet::new();
    let mut used_bytes = 0;
    for (at, &content) in trace.requests().iter().enumerate() {
        let bytes = trace.bytes(content);
        let hit = present.remove(&(at as u32, bytes, content));
        misses.count(bytes, hit);
        if bytes > capacity_bytes {
            continue;
        }
        if !hit {
            while used_bytes > capacity_bytes - bytes {
                let Some((_, freed, _)) = present.pop_last() else { break };
                used_bytes -= freed;
            }
            used_bytes += bytes;
        }
        present.insert((next_uses[at], bytes, content));
    }
    misses
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::eviction::{by_name, names};
    use crate::simulate::replay;

    #[test]
    fn misses_by_hand() {
        // The usual textbook example: three frames, and nine misses of OPT in twenty requests.
        let pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let trace = Trace::new(pages.map(|page| (page, 1))).unwrap();
        assert_eq!(belady(&trace, 3).missed_requests, 9);
        assert_eq!(replay(&trace, 3, by_name("lru", 3).unwrap().as_mut()).missed_requests, 12);
    }

    #[test]
    fn what_is_larger_than_the_cache_is_missed_and_pushes_nothing_out() {
        let trace = Trace::new([(1, 2), (2, 9), (1, 2), (2, 9)]).unwrap();
        assert_eq!(belady(&trace, 4).missed_requests, 3);
    }

    proptest! {
        #[test]
        fn no_policy_misses_less_where_sizes_are_equal(
            keys in prop::collection::vec(0u64..40, 1..400),
            capacity in 1u64..40,
        ) {
            let trace = Trace::new(keys.into_iter().map(|key| (key, 1))).unwrap();
            let least = belady(&trace, capacity).missed_requests;
            for name in names() {
                let mut policy = by_name(name, capacity).unwrap();
                let misses = replay(&trace, capacity, policy.as_mut()).missed_requests;
                prop_assert!(misses >= least, "{name} misses {misses}, Belady {least}");
            }
        }
    }
}
