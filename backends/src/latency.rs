//! Histograms of latencies, for counting on hot paths: no lock, and no allocation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets, in microseconds. They reach from an answer out of memory to the longest deadline of a
/// pool call. One more bucket has what took longer.
pub const BOUNDS_US: [u64; 14] =
    [10, 25, 100, 250, 1_000, 2_500, 10_000, 25_000, 100_000, 250_000, 1_000_000, 2_500_000, 10_000_000, 60_000_000];
const BUCKETS: usize = BOUNDS_US.len() + 1;

/// A histogram that many threads add to.
#[derive(Debug, Default)]
pub struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
    max_us: AtomicU64,
}

/// The counts of a [`LatencyHistogram`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LatencySnapshot {
    /// The number of latencies in each bucket, without those in lower buckets. The last bucket has no upper bound.
    pub buckets: [u64; BUCKETS],
    /// The sum of all latencies, in microseconds.
    pub sum_us: u64,
    /// The longest latency, in microseconds.
    pub max_us: u64,
}

impl LatencyHistogram {
    /// Adds one latency.
    pub fn observe(&self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.iter().position(|bound| us <= *bound).unwrap_or(BUCKETS - 1);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.max_us.fetch_max(us, Ordering::Relaxed);
    }

    /// Returns the counts. A latency that is added meanwhile may be in one of them and not yet in another.
    pub fn snapshot(&self) -> LatencySnapshot {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LatencySnapshot {
            buckets: std::array::from_fn(|bucket| load(&self.buckets[bucket])),
            sum_us: load(&self.sum_us),
            max_us: load(&self.max_us),
        }
    }
}

impl LatencySnapshot {
    /// Returns how many latencies were added.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the buckets with their upper bounds in seconds; the last bound is infinite.
    pub fn in_seconds(&self) -> [(f64, u64); BUCKETS] {
        std::array::from_fn(|bucket| {
            let bound = BOUNDS_US.get(bucket).map_or(f64::INFINITY, |us| *us as f64 / 1e6);
            (bound, self.buckets[bucket])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_is_in_the_bucket_whose_bound_it_does_not_exceed() {
        let histogram = LatencyHistogram::default();
        for us in [0, 10, 11, 250, 60_000_000, 60_000_001] {
            histogram.observe(Duration::from_micros(us));
        }
        let snapshot = histogram.snapshot();
        assert_eq!((snapshot.buckets[0], snapshot.buckets[1], snapshot.buckets[3]), (2, 1, 1));
        assert_eq!((snapshot.buckets[13], snapshot.buckets[14], snapshot.count()), (1, 1, 6));
        assert_eq!((snapshot.sum_us, snapshot.max_us), (120_000_272, 60_000_001));
        let bounds = snapshot.in_seconds();
        assert_eq!((bounds[0].0, bounds[14].0), (1e-5, f64::INFINITY));
    }
}
