//! Stages what a job that begins will read. The job's own requests go first.
//!
//! For each running job, sixteen small files are fetched at a time, or one large one. They have no lease: a lease is a
//! promise to an owner that requested it, and a leased file is not revalidated at every open. Until the job ends, these
//! files are the last clean content to be evicted (`Foresight::keeps`). A daemon that is started again plans anew for
//! the jobs that it takes over.
//!
//! The plan counts the size that a file had at its last use. A file that has grown since gets more only if the fast pool
//! has room for that beside the plan; otherwise, only as much of it is fetched as was planned.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::{ErrorKind, Result};
use forebay_cache::CHUNK_BYTES;
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
/// A file that has grown by no more than one part in so many is fetched as planned: a profile has sizes that are rounded by that
/// much.
const GROWTH_DIVISOR: u64 = 16;
/// How long the room beside a job's own files is used again: to find it out, all dirty and leased files are visited.
const ROOM_KNOWN_FOR: Duration = Duration::from_secs(5);

/// What is staged for one job. It ends with the job.
pub(crate) struct JobPrefetch {
    stop: CancellationToken,
    /// Files, and the bytes that were fetched of them; 0 for files that were resident.
    pub staged: Mutex<HashMap<Ino, u64>>,
    /// Files that were expected to be read, and why.
    pub foreseen: Mutex<HashMap<Ino, String>>,
    room: Mutex<PlannedRoom>,
}

/// The room of the fast pool that the plan of a job counts on.
#[derive(Debug, Default)]
struct PlannedRoom {
    planned_bytes: u64,
    /// The bytes beyond those planned, of files that have grown and for which there was room.
    grown: HashMap<Ino, u64>,
    /// When the room for the job was found out, and the result.
    found: Option<(Instant, u64)>,
}

impl PlannedRoom {
    /// Returns the bytes that the job's files may take, as of a short while ago.
    fn room_bytes(&mut self, now: Instant, find: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let is_known = |at: Instant| now.saturating_duration_since(at) < ROOM_KNOWN_FOR;
        if let Some((at, bytes)) = self.found
            && is_known(at)
        {
            return Ok(bytes);
        }
        let bytes = find()?;
        self.found = Some((now, bytes));
        Ok(bytes)
    }

    /// Takes `more` bytes for a file beside all that is planned, if they fit into `room_bytes`.
    fn take(&mut self, ino: Ino, more: u64, room_bytes: u64) -> bool {
        let others = self.grown.iter().filter(|(other, _)| **other != ino).map(|(_, bytes)| bytes);
        let taken = others.fold(self.planned_bytes, |sum, bytes| sum.saturating_add(*bytes));
        let fits = taken.saturating_add(more) <= room_bytes;
        if fits {
            self.grown.insert(ino, more);
        }
        fits
    }
}

impl JobPrefetch {
    /// `planned_bytes`: the room that its plan takes, as far as it is known.
    pub(super) fn for_plan(stop: CancellationToken, planned_bytes: u64) -> Self {
        let room = Mutex::new(PlannedRoom { planned_bytes, ..PlannedRoom::default() });
        Self { stop, staged: Mutex::default(), foreseen: Mutex::default(), room }
    }
}

impl Jobs {
    /// Begins to stage what a job will read. Returns at once.
    pub(crate) fn stage_ahead(&self, job: JobSerial, invocation: Invocation) {
        let inner = &self.inner;
        let ahead = Arc::new(JobPrefetch::for_plan(inner.engine.stop().child_token(), 0));
        inner.foresight.running.lock().insert(job, ahead.clone());
        if !inner.registry.has(job) {
            // The job has ended meanwhile, and its end may not have seen the entry.
            inner.end_ahead(job);
            return;
        }
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

    async fn bring_in(&self, ahead: &Arc<JobPrefetch>, invocation: Invocation) -> Result<()> {
        let inner = self.inner.clone();
        let foreseen = blocking(move || inner.foresee(&invocation, Means::default())).await?;
        ahead.room.lock().planned_bytes = foreseen.plan.bytes;
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

    pub(super) async fn bring_in_file(
        &self,
        ahead: &Arc<JobPrefetch>,
        expected: &ExpectedRead,
        begun: Instant,
    ) -> Result<()> {
        let engine = &self.inner.engine;
        let ino = engine.resolve(&parse_path(&expected.path)?).await?;
        engine.check_is_file(ino)?;
        ahead.foreseen.lock().insert(ino, expected.why.to_string());
        // Kept from now on, so that its first chunks are not evicted while the rest is fetched.
        ahead.staged.lock().entry(ino).or_insert(0);
        let fetched = |bytes| _ = ahead.staged.lock().entry(ino).and_modify(|sum| *sum += bytes);
        let wanted = |size| self.ranges_with_room(ahead, ino, expected, size);
        engine.fetch_current_ahead(ino, begun, wanted, fetched).await
    }

    /// Returns the ranges of a file of this size that are wanted, and for which there is room.
    async fn ranges_with_room(
        &self,
        ahead: &Arc<JobPrefetch>,
        ino: Ino,
        expected: &ExpectedRead,
        size: u64,
    ) -> Result<Vec<Range<u64>>> {
        let ranges = wanted(expected, size);
        let (bytes, planned) = (sum_of(&ranges), expected.bytes);
        let as_planned = planned.saturating_add(planned / GROWTH_DIVISOR);
        if bytes <= as_planned {
            return Ok(ranges);
        }
        let (inner, ahead) = (self.inner.clone(), ahead.clone());
        let fits = blocking(move || {
            // Files whose turn comes meanwhile wait for the same answer.
            let mut room = ahead.room.lock();
            let room_bytes = room.room_bytes(Instant::now(), || inner.room_ahead_for(&ahead))?;
            Ok(room.take(ino, bytes - planned, room_bytes))
        });
        Ok(if fits.await? { ranges } else { cut_off(ranges, as_planned) })
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

fn sum_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Returns the beginning of some ranges: at most this many bytes, and no chunk that is cut, since chunks are fetched whole.
fn cut_off(mut ranges: Vec<Range<u64>>, bytes_max: u64) -> Vec<Range<u64>> {
    let mut left = bytes_max;
    for range in &mut ranges {
        match left.checked_sub(range.end - range.start) {
            Some(after) => left = after,
            None => {
                let end = range.start + left;
                (range.end, left) = ((end - end % CHUNK_BYTES).max(range.start), 0);
            }
        }
    }
    ranges.retain(|range| !range.is_empty());
    ranges
}

/// Returns the ranges of a file of this size that are wanted.
fn wanted(expected: &ExpectedRead, size: u64) -> Vec<Range<u64>> {
    let all = || std::iter::once(0..size).collect();
    let Some(parts) = expected.parts.as_ref().filter(|parts| parts.part_bytes > 0) else { return all() };
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for part in (0..256).filter(|part| parts.bits[part / 64] >> (part % 64) & 1 == 1) {
        let from = (part as u64).saturating_mul(parts.part_bytes).min(size);
        let until = if part == 255 { size } else { from.saturating_add(parts.part_bytes).min(size) };
        match ranges.last_mut() {
            Some(last) if last.end == from => last.end = until,
            _ if from < until => ranges.push(from..until),
            _ => {}
        }
    }
    if sum_of(&ranges) as f64 >= size as f64 * WHOLE_SHARE { all() } else { ranges }
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
    fn ranges_are_cut_off_at_a_chunk() {
        const MIB: u64 = CHUNK_BYTES;
        let cut = |ranges: &[Range<u64>], bytes_max| {
            cut_off(ranges.to_vec(), bytes_max).into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        let (all, two) = (0..60 * MIB, [0..2 * MIB, 5 * MIB..60 * MIB]);
        let one = std::slice::from_ref(&all);
        assert_eq!(cut(one, MIB + MIB / 16), [(0, MIB)]);
        assert_eq!(cut(one, 60 * MIB), [(0, 60 * MIB)]);
        assert_eq!(cut(one, 10_000), [], "a chunk would be a hundred times as much");
        assert_eq!(cut(&two, 4 * MIB), [(0, 2 * MIB), (5 * MIB, 7 * MIB)]);
        assert_eq!(cut(&two, MIB), [(0, MIB)], "nothing behind a cut");
    }

    #[test]
    fn a_file_that_has_grown_gets_the_room_beside_the_plan_once() {
        let mut room = PlannedRoom { planned_bytes: 50, ..PlannedRoom::default() };
        assert!(!room.take(Ino(1), 51, 100));
        assert!(room.take(Ino(1), 30, 100) && room.take(Ino(1), 30, 100));
        assert!(!room.take(Ino(2), 21, 100) && room.take(Ino(2), 20, 100));
        assert!(!room.take(Ino(3), u64::MAX, 100));
    }

    #[test]
    fn the_room_is_found_out_once_in_a_while() {
        let (mut room, begun, mut asked) = (PlannedRoom::default(), Instant::now(), 0);
        let mut at = |after: Duration| {
            let find = || {
                asked += 1;
                Ok(asked)
            };
            room.room_bytes(begun + after, find).unwrap()
        };
        assert_eq!((at(Duration::ZERO), at(ROOM_KNOWN_FOR / 2), at(ROOM_KNOWN_FOR), at(ROOM_KNOWN_FOR)), (1, 1, 2, 2));
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
