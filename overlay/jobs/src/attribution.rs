//! Finds the job of a thread, by its parents and its cgroup.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use forebay_system::process::{self, process_and_parent};
use lru::LruCache;
use parking_lot::Mutex;

/// Threads whose job is remembered.
const THREADS_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4095);
/// How long a thread's job is remembered. Process numbers are used again, and a process that belongs to no job may be
/// added to one.
const REMEMBERED: Duration = Duration::from_secs(1);
/// Processes that are examined, from the thread's own process upwards.
const GENERATIONS_MAX: usize = 64;

/// Recent results.
#[derive(Debug)]
pub struct Attribution {
    known: Mutex<LruCache<u32, (Instant, Option<u32>)>>,
}

impl Default for Attribution {
    fn default() -> Self {
        Self { known: Mutex::new(LruCache::new(THREADS_MAX)) }
    }
}

impl Attribution {
    /// Returns the job that claims the process of a thread or its nearest ancestor, or else its cgroup, or that adopts
    /// the thread's process now.
    pub fn job_of(
        &self,
        thread: u32,
        claims: impl Fn(u32) -> Option<u32>,
        claims_cgroup: impl Fn(&str) -> Option<u32>,
        adopts: impl Fn(u32) -> Option<u32>,
    ) -> Option<u32> {
        if let Some((at, job)) = self.known.lock().get(&thread)
            && at.elapsed() < REMEMBERED
        {
            return *job;
        }
        let job = climb(thread, claims, process_and_parent)
            .or_else(|| claims_cgroup(&cgroup(thread)?))
            .or_else(|| adopts(thread));
        self.known.lock().put(thread, (Instant::now(), job));
        job
    }

    /// Forgets all results. Called when claims have changed.
    pub fn forget(&self) {
        self.known.lock().clear();
    }
}

/// Returns what is found for the process of a thread, or for its nearest ancestor.
pub fn climb<T>(
    thread: u32,
    find: impl Fn(u32) -> Option<T>,
    process_and_parent: impl Fn(u32) -> Option<(u32, u32)>,
) -> Option<T> {
    let mut at = thread;
    for _ in 0..GENERATIONS_MAX {
        let (process, parent) = process_and_parent(at)?;
        if let Some(found) = find(process) {
            return Some(found);
        }
        if parent <= 1 {
            return None;
        }
        at = parent;
    }
    None
}

/// Returns the cgroup of version 2, below the root of the hierarchy.
fn cgroup(thread: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{thread}/cgroup")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// Returns whether any process is in these cgroups, or below them.
pub fn any_is_within(ancestors: &[String]) -> bool {
    let is_within_any = |cgroup: String| ancestors.iter().any(|ancestor| is_within(&cgroup, ancestor));
    !ancestors.is_empty() && process::all().any(|pid| cgroup(pid).is_some_and(is_within_any))
}

/// Returns whether a cgroup is `ancestor` or lies below it.
pub fn is_within(cgroup: &str, ancestor: &str) -> bool {
    cgroup.strip_prefix(ancestor).is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || ancestor == "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_ancestor_that_is_claimed_decides() {
        // Thread 50 of process 40, whose ancestors are 30, 20, 10 and 1.
        let family = |at| match at {
            50 | 40 => Some((40, 30)),
            30 => Some((30, 20)),
            20 => Some((20, 10)),
            10 => Some((10, 1)),
            _ => None,
        };
        let claims = |process| (process == 10).then_some(1).or((process == 30).then_some(3));
        assert_eq!(climb(50, claims, family), Some(3));
        assert_eq!(climb(20, claims, family), Some(1));
        assert_eq!(climb(50, |_| None::<u32>, family), None);
        assert_eq!(climb(60, claims, family), None, "one that is not there");
        assert_eq!(climb(50, |_| None::<u32>, |at| Some((at, at))), None, "damage is no endless loop");
    }

    #[test]
    fn cgroups_are_within_by_component() {
        assert!(is_within("/a/b", "/a") && is_within("/a", "/a") && is_within("/a", "/"));
        assert!(!is_within("/ab", "/a") && !is_within("/a", "/a/b"));
        assert!(!any_is_within(&[]) && !any_is_within(&["/no such cgroup".into()]));
    }

    #[test]
    fn what_was_found_out_is_asked_again_when_claims_change() {
        let attribution = Attribution::default();
        let own = std::process::id();
        assert_eq!(attribution.job_of(own, |_| None, |_| None, |_| None), None);
        assert_eq!(attribution.job_of(own, |_| Some(1), |_| None, |_| None), None, "remembered");
        attribution.forget();
        assert_eq!(attribution.job_of(own, |process| (process == own).then_some(1), |_| None, |_| None), Some(1));
        attribution.forget();
        assert_eq!(attribution.job_of(own, |_| None, |_| None, |thread| (thread == own).then_some(2)), Some(2));
    }
}
