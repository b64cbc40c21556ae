//! Chooses what to stage ahead, and in which order.
//!
//! A staged file that is used saves its reader the wait for it: a round trip to the pool and the transfer of its bytes.
//! Staging costs room on the fast pool, and time of the pool before the job begins. The plan chooses the files with the
//! most expected seconds saved for their cost, until room or time is used up. This is Dantzig's greedy rule for the
//! knapsack (Operations Research 5, 1957), with the two costs added as shares of their limits (Pirkul's surrogate
//! constraint, Naval Research Logistics 34, 1987, with equal multipliers). No single file is a large share of either
//! limit, so the rule is close to the best choice.

use std::cmp::Reverse;
use std::time::Duration;

/// Files with a smaller probability are never staged: three of four bytes would be fetched for nothing.
pub const PROBABILITY_MIN: f64 = 0.25;

/// A file that may be staged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StagingCandidate {
    /// The caller's identifier of the file.
    pub file: u64,
    /// The room that it will occupy, or already occupies.
    pub bytes: u64,
    /// Bytes that must be fetched: resident bytes take no time.
    pub missing_bytes: u64,
    /// The probability that the job uses it, from 0 to 1.
    pub probability: f64,
    /// Its place in the order of first uses.
    pub rank: u32,
}

/// The speed of the pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PoolRate {
    /// Of all requests together; must be above 0.
    pub bytes_per_second: f64,
    /// From a request to its first byte.
    pub latency: Duration,
    /// Requests under way at the same time; at least 1.
    pub concurrency: u32,
}

impl PoolRate {
    /// Returns how long a reader waits if no byte of the file is resident.
    fn stall_seconds(&self, bytes: u64) -> f64 {
        self.latency.as_secs_f64() + bytes as f64 / self.bytes_per_second
    }

    /// Returns how long this many bytes of a file occupy the pool, while other requests are under way too.
    pub fn busy_seconds(&self, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        let waiting = self.latency.as_secs_f64() / f64::from(self.concurrency.max(1));
        waiting.max(bytes as f64 / self.bytes_per_second)
    }
}

/// The limits of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanLimits {
    /// The room of the fast pool without giving up anything that is dirty or leased.
    pub room_bytes: u64,
    /// Time until the job begins; `None`: the job waits.
    pub time: Option<Duration>,
    /// Files with a smaller probability are not staged; see [`probability_min`].
    pub probability_min: f64,
}

/// The reason why a file is not staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StagingRefusal {
    Improbable,
    /// Other files save more for their room.
    NoRoom,
    /// Other files save more for their time of the pool.
    NoTime,
}

impl std::fmt::Display for StagingRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Improbable => "its use is not probable enough",
            Self::NoRoom => "there is no room for it",
            Self::NoTime => "there is no time for it",
        })
    }
}

/// What to stage, and what not.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StagingPlan {
    /// In the order of staging, which is that of first uses, so that the job finds first what it needs first.
    pub chosen: Vec<StagingCandidate>,
    pub refused: Vec<(StagingCandidate, StagingRefusal)>,
    pub bytes: u64,
    /// How long the pool will be busy.
    pub pool_seconds: f64,
    /// Expected seconds that readers will not wait.
    pub saved_seconds: f64,
}

/// Chooses among files, each of which is listed once.
pub fn plan(candidates: Vec<StagingCandidate>, pool: &PoolRate, limits: &PlanLimits) -> StagingPlan {
    let mut plan = StagingPlan::default();
    let mut wanted = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        match () {
            () if candidate.probability.is_nan() || candidate.probability < limits.probability_min => {
                plan.refused.push((candidate, StagingRefusal::Improbable));
            }
            () => wanted.push((density(&candidate, pool, limits), candidate)),
        }
    }
    // Ties are broken by the order of use, so that equal files are staged from the first.
    wanted.sort_unstable_by(|(a, first), (b, second)| b.total_cmp(a).then(first.rank.cmp(&second.rank)));
    let time = limits.time.map_or(f64::INFINITY, |time| time.as_secs_f64());
    for (_, candidate) in wanted {
        let busy = pool.busy_seconds(candidate.missing_bytes);
        if candidate.bytes > limits.room_bytes - plan.bytes {
            plan.refused.push((candidate, StagingRefusal::NoRoom));
        } else if plan.pool_seconds + busy > time {
            plan.refused.push((candidate, StagingRefusal::NoTime));
        } else {
            plan.bytes += candidate.bytes;
            plan.pool_seconds += busy;
            plan.saved_seconds += candidate.probability * pool.stall_seconds(candidate.bytes);
            plan.chosen.push(candidate);
        }
    }
    plan.chosen.sort_unstable_by_key(|candidate| (candidate.rank, Reverse(candidate.bytes), candidate.file));
    plan
}

/// Returns the expected seconds saved, per share of room and time spent.
fn density(candidate: &StagingCandidate, pool: &PoolRate, limits: &PlanLimits) -> f64 {
    let room = candidate.bytes as f64 / limits.room_bytes.max(1) as f64;
    let busy = pool.busy_seconds(candidate.missing_bytes);
    let time = limits.time.map_or(0.0, |time| busy / time.as_secs_f64().max(f64::MIN_POSITIVE));
    candidate.probability * pool.stall_seconds(candidate.bytes) / (room + time).max(f64::MIN_POSITIVE)
}

/// Returns the least probability of a file to be staged. `accuracy` (0 to 1, by bytes) is the share of earlier staged
/// bytes that was used: wasted prefetch throttles itself, and nearly certain files are always staged.
pub fn probability_min(accuracy: f64) -> f64 {
    let wasted = 1.0 - accuracy.clamp(0.0, 1.0);
    PROBABILITY_MIN + (0.9 - PROBABILITY_MIN) * wasted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POOL: PoolRate = PoolRate { bytes_per_second: 100e6, latency: Duration::from_millis(2), concurrency: 16 };

    fn candidate(file: u64, bytes: u64, probability: f64) -> StagingCandidate {
        StagingCandidate { file, bytes, missing_bytes: bytes, probability, rank: file as u32 }
    }

    fn limits(room_bytes: u64, time: Option<Duration>) -> PlanLimits {
        PlanLimits { room_bytes, time, probability_min: PROBABILITY_MIN }
    }

    fn files(plan: &StagingPlan) -> Vec<u64> {
        plan.chosen.iter().map(|chosen| chosen.file).collect()
    }

    #[test]
    fn all_is_staged_in_the_order_of_use_where_it_fits() {
        let candidates = vec![candidate(3, 1000, 0.5), candidate(1, 1 << 30, 0.9), candidate(2, 10, 1.0)];
        let plan = plan(candidates, &POOL, &limits(u64::MAX, None));
        assert_eq!(files(&plan), [1, 2, 3]);
        assert_eq!((plan.bytes, plan.refused.len()), ((1 << 30) + 1010, 0));
    }

    #[test]
    fn where_room_is_short_the_most_stall_for_a_byte_is_saved() {
        // Small files save a round trip for few bytes.
        let mut candidates: Vec<_> = (1..=100).map(|file| candidate(file, 10_000, 0.6)).collect();
        candidates.push(candidate(200, 1_000_000, 1.0));
        let short = plan(candidates.clone(), &POOL, &limits(1_000_000, None));
        assert_eq!(files(&short), (1..=100).collect::<Vec<u64>>());
        assert_eq!(short.refused, [(candidate(200, 1_000_000, 1.0), StagingRefusal::NoRoom)]);
        assert_eq!(files(&plan(candidates, &POOL, &limits(2_000_000, None))).len(), 101);
    }

    #[test]
    fn where_time_is_short_the_pool_is_asked_for_what_it_can_give() {
        let candidates = (1..=100).map(|file| candidate(file, 10_000_000, 1.0)).collect();
        // 100 ms each.
        let plan = plan(candidates, &POOL, &limits(u64::MAX, Some(Duration::from_millis(1050))));
        assert_eq!(files(&plan), (1..=10).collect::<Vec<u64>>(), "those that are used first");
        assert!(plan.refused.iter().all(|(_, why)| *why == StagingRefusal::NoTime));
        assert!((plan.pool_seconds - 1.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_improbable_is_staged() {
        let candidates = vec![candidate(1, 10, 0.24), candidate(2, 0, 1.0), candidate(3, 10, f64::NAN)];
        let plan = plan(candidates, &POOL, &limits(100, None));
        assert!(plan.refused.iter().all(|(_, why)| *why == StagingRefusal::Improbable));
        assert_eq!(files(&plan), [2]);
    }

    #[test]
    fn what_is_here_takes_room_but_no_time() {
        let here = |file| StagingCandidate { missing_bytes: 0, ..candidate(file, 10_000_000, 1.0) };
        let candidates = || (1..=50).map(here).chain((51..=100).map(|file| candidate(file, 10_000_000, 1.0))).collect();
        let in_time = plan(candidates(), &POOL, &limits(u64::MAX, Some(Duration::from_millis(1050))));
        assert_eq!(files(&in_time), (1..=60).collect::<Vec<u64>>());
        let in_room = plan(candidates(), &POOL, &limits(300_000_000, None));
        assert_eq!(files(&in_room), (1..=30).collect::<Vec<u64>>());
    }

    #[test]
    fn waste_raises_what_is_asked_of_the_next() {
        assert_eq!(probability_min(1.0), PROBABILITY_MIN);
        assert!((probability_min(0.0) - 0.9).abs() < 1e-9);
        assert!(probability_min(0.5) > probability_min(0.9));
    }

    /// The most that any choice saves, by trying all of them.
    fn best(candidates: &[StagingCandidate], room: u64) -> f64 {
        let value = |chosen: u32| {
            let of = |field: fn(&StagingCandidate) -> f64| -> f64 {
                (0..candidates.len()).filter(|at| chosen >> at & 1 == 1).map(|at| field(&candidates[at])).sum()
            };
            let fits = of(|c| c.bytes as f64) <= room as f64;
            if fits { of(|c| c.probability * POOL.stall_seconds(c.bytes)) } else { 0.0 }
        };
        (0..1u32 << candidates.len()).map(value).fold(0.0, f64::max)
    }

    proptest! {
        #[test]
        fn never_more_than_there_is_and_nearly_the_best(
            sizes in prop::collection::vec((1u64..50_000, 0.25f64..1.0), 1..12),
            room in 50_000u64..500_000,
        ) {
            let candidates: Vec<_> =
                sizes.iter().enumerate().map(|(at, (bytes, p))| candidate(at as u64, *bytes, *p)).collect();
            let plan = plan(candidates.clone(), &POOL, &limits(room, None));
            prop_assert!(plan.bytes <= room);
            prop_assert_eq!(plan.chosen.len() + plan.refused.len(), candidates.len());
            // The greedy rule loses less than what one file saves.
            let largest = candidates.iter().map(|c| POOL.stall_seconds(c.bytes)).fold(0.0, f64::max);
            prop_assert!(plan.saved_seconds + largest >= best(&candidates, room));
        }
    }
}
