//! A cache that follows one policy, and its misses.

use super::Trace;
use crate::eviction::Evictor;

/// Requests and misses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Misses {
    pub requests: u64,
    pub missed_requests: u64,
    pub requested_bytes: u128,
    pub missed_bytes: u128,
}

impl Misses {
    /// The share of the requests that missed: 0 to 1.
    pub fn object_ratio(&self) -> f64 {
        self.missed_requests as f64 / self.requests.max(1) as f64
    }

    /// The share of the requested bytes that were missed: 0 to 1.
    pub fn byte_ratio(&self) -> f64 {
        self.missed_bytes as f64 / self.requested_bytes.max(1) as f64
    }

    pub(super) fn count(&mut self, bytes: u64, hit: bool) {
        self.requests += 1;
        self.requested_bytes += u128::from(bytes);
        if !hit {
            self.missed_requests += 1;
            self.missed_bytes += u128::from(bytes);
        }
    }
}

/// Replays a trace in a cache of `capacity_bytes`. Content larger than the cache is a miss and changes nothing. For
/// other content, room is made before it is inserted, so that it cannot be its own victim.
///
/// If a policy gives no victim although content is resident, the cache grows; that is a defect of the policy.
pub fn replay(trace: &Trace, capacity_bytes: u64, policy: &mut dyn Evictor) -> Misses {
    let mut misses = Misses::default();
    let mut present = vec![false; trace.contents()];
    let mut used_bytes = 0;
    for &content in trace.requests() {
        let bytes = trace.bytes(content);
        let hit = present[content as usize];
        misses.count(bytes, hit);
        if hit {
            policy.access(u64::from(content));
            continue;
        }
        if bytes > capacity_bytes {
            continue;
        }
        while used_bytes > capacity_bytes - bytes {
            let Some(victim) = policy.evict(&mut |_| true) else { break };
            present[victim as usize] = false;
            used_bytes -= trace.bytes(victim as u32);
        }
        policy.insert(u64::from(content), bytes);
        present[content as usize] = true;
        used_bytes += bytes;
    }
    misses
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::Lru;

    #[test]
    fn misses_of_lru_by_hand() {
        // Capacity 5. a3 b2 a3(hit) c2 (b out) b2 (a out) d9 (too large) c2(hit).
        let trace = Trace::new([("a", 3), ("b", 2), ("a", 3), ("c", 2), ("b", 2), ("d", 9), ("c", 2)]).unwrap();
        let misses = replay(&trace, 5, &mut Lru::new());
        assert_eq!((misses.requests, misses.missed_requests), (7, 5));
        assert_eq!((misses.requested_bytes, misses.missed_bytes), (23, 18));
    }
}
