//! Stages what a job that begins will read. The job's own requests go first.
//!
//! For each running job, sixteen small files are fetched at a time, or one large one. They have no lease: a lease is a
//! promise to an owner that requested it, and a leased file is not revalidated at every open. Until the job ends, these
//! files are the last clean content to be evicted (`Foresight::keeps`). A daemon that is started again plans anew for
//! the jobs that it takes over.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use forebay_backends::{ErrorKind, Result};
use forebay_catalog::JobSerial;
use forebay_engine::{AHEAD_REQUESTS, Ino, Means, blocking, parse_path, requests_of};
use forebay_prefetch::profile::ExpectedRead;
use forebay_prefetch::signature::Invocation;
use futures::{FutureExt, StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::Jobs;
use crate::JobsInner;

/// If at least this share of a file is wanted, the whole file is fetched: then the kernel can serve it by passthrough.
const WHOLE_SHARE: f64 = 0.75;

/// What is staged for one job. It ends with the job.
pub(crate) struct JobPrefetch {
    stop: CancellationToken,
    /// Files, and the bytes that were fetched of them; 0 for files that were resident.
    pub staged: Mutex<HashMap<Ino, u64>>,
    /// Files that were expected to be read, and why.
    pub foreseen: Mutex<HashMap<Ino, String>>,
}

impl Jobs {
    /// Begins to stage what a job will read. Returns at once.
    pub(crate) fn stage_ahead(&self, job: JobSerial, invocation: Invocation) {
        let inner = &self.inner;
        let ahead = Arc::new(JobPrefetch {
            stop: inner.engine.stop().child_token(),
            staged: Mutex::default(),
            foreseen: Mutex::default(),
        });
        inner.foresight.running.lock().insert(job, ahead.clone());
        let jobs = self.clone();
        let task = async move {
            let stop = ahead.stop.clone();
            let work = jobs.bring_in(&ahead, invocation);
            if let Some(Err(error)) = stop.run_until_cancelled(work).await {
                tracing::warn!(%error, "staging ahead of a job");
            }
        };
        inner.foresight.runtime.spawn(task.boxed());
    }

    async fn bring_in(&self, ahead: &JobPrefetch, invocation: Invocation) -> Result<()> {
        let inner = self.inner.clone();
        let foreseen = blocking(move || inner.foresee(&invocation, Means::default())).await?;
        let begun = Instant::now();
        let turns = &Semaphore::new(AHEAD_REQUESTS);
        let in_turn =
            |expected: ExpectedRead| async move { (turns.acquire_many(requests_of(expected.bytes)).await, expected) };
        stream::iter(foreseen.into_chosen())
            .then(in_turn)
            .for_each_concurrent(None, |(turn, expected)| async move {
                let _turn = turn;
                match self.bring_in_file(ahead, &expected, begun).await {
                    // A profile has the files of earlier runs, which may be gone.
                    Err(error) if !error.is(ErrorKind::NotFound) => {
                        tracing::debug!(%error, "{} is not staged", expected.path);
                    }
                    _ => {}
                }
            })
            .await;
        Ok(())
    }

    async fn bring_in_file(&self, ahead: &JobPrefetch, expected: &ExpectedRead, begun: Instant) -> Result<()> {
        let engine = &self.inner.engine;
        let ino = engine.resolve(&parse_path(&expected.path)?).await?;
        engine.check_is_file(ino)?;
        ahead.foreseen.lock().insert(ino, expected.why.to_string());
        // Kept from now on, so that its first chunks are not evicted while the rest is fetched.
        ahead.staged.lock().entry(ino).or_insert(0);
        let fetched = |bytes| _ = ahead.staged.lock().entry(ino).and_modify(|sum| *sum += bytes);
        engine.fetch_current_ahead(ino, begun, |size| wanted(expected, size), fetched).await
    }
}

impl JobsInner {
    /// Ends staging for a job. Returns what was staged.
    pub(crate) fn end_ahead(&self, job: JobSerial) -> Option<Arc<JobPrefetch>> {
        let ahead = self.foresight.running.lock().remove(&job);
        if let Some(ahead) = &ahead {
            ahead.stop.cancel();
        }
        ahead
    }
}

/// Returns the ranges of a file of this size that are wanted.
fn wanted(expected: &ExpectedRead, size: u64) -> Vec<std::ops::Range<u64>> {
    let all = || std::iter::once(0..size).collect();
    let Some(parts) = expected.parts.as_ref().filter(|parts| parts.part_bytes > 0) else { return all() };
    let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
    for part in (0..256).filter(|part| parts.bits[part / 64] >> (part % 64) & 1 == 1) {
        let from = (part as u64).saturating_mul(parts.part_bytes).min(size);
        let until = if part == 255 { size } else { from.saturating_add(parts.part_bytes).min(size) };
        match ranges.last_mut() {
            Some(last) if last.end == from => last.end = until,
            _ if from < until => ranges.push(from..until),
            _ => {}
        }
    }
    let sum: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if sum as f64 >= size as f64 * WHOLE_SHARE { all() } else { ranges }
}

#[cfg(test)]
mod tests {
    use forebay_prefetch::profile::{Parts, Reason};

    use super::*;

    fn of(bits: [u64; 4], size: u64) -> Vec<(u64, u64)> {
        let parts = Some(Parts { part_bytes: 10, bits });
        let why = Reason::Replayed { used: 1, seen: 1 };
        let expected = ExpectedRead { path: "a".into(), bytes: size, rank: 1, probability: 1.0, parts, why };
        wanted(&expected, size).into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn parts_are_ranges_and_nearly_all_is_all() {
        assert_eq!(of([0b1011, 0, 0, 0], 100), [(0, 20), (30, 40)]);
        assert_eq!(of([0b1000, 0, 0, 0], 35), [(30, 35)]);
        assert_eq!(of([0b1000, 0, 0, 0], 20), [], "it is shorter now");
        assert_eq!(of([0, 0, 0, 1 << 63], 5000), [(2550, 5000)], "the last stands for all beyond");
        assert_eq!(of([0b1110, 0, 0, 0], 40), [(0, 40)]);
    }
}
