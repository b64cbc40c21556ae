//! What a mount did during one interval, as differences of counts, and its state afterwards.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use forebay_api::jobs::{JobFile, Sample, Traffic};
use forebay_api::operator::{DirtyFile, Overview, Status};
use forebay_backends::decorators::{CallKind, CallStats, MetricsSnapshot};
use forebay_backends::latency::{BOUNDS_US, LatencySnapshot};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client};

/// What is requested beside the counts: it costs the daemon more than they do, so only what is shown is requested.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Details {
    #[default]
    None,
    /// The files of a job.
    FilesOf(String),
}

/// One interval of a mount.
#[derive(Debug, Clone)]
pub(super) struct MountSample {
    pub ms: u64,
    pub status: Status,
    /// What was used during the interval. The counts of files are totals.
    pub used: Sample,
    pub peer_bytes: u64,
    pub calls: Vec<CallActivity>,
    /// Pool calls that wait for their answers.
    pub in_flight: u64,
    /// The oldest files that are not in the pool yet.
    pub dirty: Vec<DirtyFile>,
    /// If they were requested; those that were used most come first.
    pub files: Vec<HotFile>,
}

/// The calls of one kind during an interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallActivity {
    pub call: &'static str,
    pub count: u64,
    pub failed: u64,
    pub mean_us: u64,
    /// 99 of 100 calls took at most this; `None`: longer than the longest bound that is counted.
    pub p99_us: Option<u64>,
}

/// A file of a job, and its use during an interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HotFile {
    pub path: String,
    pub traffic: Traffic,
}

/// The counts at the end of the last interval.
#[derive(Debug)]
struct Counts {
    used: Sample,
    peer_bytes: u64,
    calls: MetricsSnapshot,
    files: Option<(String, HashMap<String, Traffic>)>,
}

/// Samples one mount again and again.
#[derive(Debug, Default)]
pub(super) struct MountSampler {
    last: Option<Counts>,
}

impl MountSampler {
    /// Returns what happened since the last call, or `None` at the first call, and after a daemon was started again.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn sample(
        &mut self,
        entry: &RegisteredMount,
        interval: Duration,
        details: &Details,
    ) -> Result<Option<MountSample>, Failure> {
        let used = ask(entry, interval)?;
        let Overview { status, oldest_dirty: dirty } = overview(entry)?;
        let calls = pool_calls(entry)?;
        let files = match details {
            Details::FilesOf(job) => Some((job.clone(), files(entry, job)?)),
            Details::None => None,
        };
        let now = Counts { used, peer_bytes: status.counters.peer_read_bytes, calls, files };
        let before = self.last.take();
        let sample = before.filter(|before| before.used.at_ms < now.used.at_ms).map(|before| MountSample {
            ms: now.used.at_ms - before.used.at_ms,
            used: difference(now.used.clone(), &before.used),
            peer_bytes: now.peer_bytes.saturating_sub(before.peer_bytes),
            calls: activities(&now.calls, &before.calls),
            in_flight: now.calls.in_flight,
            files: hot_files(now.files.as_ref(), before.files.as_ref()),
            status,
            dirty,
        });
        self.last = Some(now);
        Ok(sample)
    }
}

/// Asks for what jobs have used since the daemon began to count. `interval`: the time until the next question.
pub(super) fn ask(entry: &RegisteredMount, interval: Duration) -> Result<Sample, Failure> {
    let interval_ms = interval.as_millis().try_into().unwrap_or(u64::MAX);
    for reply in client::call(entry, &Request::Sample { interval_ms })? {
        if let Reply::Sample(sample) = reply? {
            return Ok(sample);
        }
    }
    Err(Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the sample"))
}

fn pool_calls(entry: &RegisteredMount) -> Result<MetricsSnapshot, Failure> {
    for reply in client::call(entry, &Request::PoolCalls)? {
        if let Reply::PoolCalls(calls) = reply? {
            return Ok(*calls);
        }
    }
    Err(Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the calls"))
}

fn overview(entry: &RegisteredMount) -> Result<Overview, Failure> {
    for reply in client::call(entry, &Request::Overview)? {
        if let Reply::Overview(overview) = reply? {
            return Ok(*overview);
        }
    }
    Err(Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the overview"))
}

/// The files of a job. A job that is not known has none.
fn files(entry: &RegisteredMount, job: &str) -> Result<HashMap<String, Traffic>, Failure> {
    let mut files = HashMap::new();
    for reply in client::call(entry, &Request::Job { id: job.to_owned() })? {
        match reply {
            Ok(Reply::JobFiles(part)) => {
                files.extend(part.into_iter().map(|JobFile { path, traffic, .. }| (path, traffic)));
            }
            Err(failure) if failure.kind == FailureKind::NoDaemon => return Err(failure),
            _ => {}
        }
    }
    Ok(files)
}

/// What was used since `before`. A job that is new counts from zero.
pub(super) fn difference(mut sample: Sample, before: &Sample) -> Sample {
    for job in &mut sample.jobs {
        let earlier = before.jobs.iter().find(|known| known.id == job.id);
        job.traffic = job.traffic.since(&earlier.map_or(Traffic::default(), |known| known.traffic));
    }
    sample.others = sample.others.since(&before.others);
    sample
}

/// Sorts by bytes, most first.
pub(super) fn by_traffic(traffic: &Traffic) -> Reverse<u64> {
    Reverse(traffic.read_bytes + traffic.written_bytes)
}

fn hot_files(
    now: Option<&(String, HashMap<String, Traffic>)>,
    before: Option<&(String, HashMap<String, Traffic>)>,
) -> Vec<HotFile> {
    let Some((job, now)) = now else { return Vec::new() };
    // At the first sample of a job, it is not known what it used during the interval.
    let Some((_, before)) = before.filter(|(known, _)| known == job) else { return Vec::new() };
    let used = now.iter().map(|(path, traffic)| {
        let earlier = before.get(path).copied().unwrap_or_default();
        HotFile { path: path.clone(), traffic: traffic.since(&earlier) }
    });
    let mut files: Vec<HotFile> = used.filter(|file| file.traffic != Traffic::default()).collect();
    files.sort_by(|a, b| (by_traffic(&a.traffic), &a.path).cmp(&(by_traffic(&b.traffic), &b.path)));
    files
}

fn activities(now: &MetricsSnapshot, before: &MetricsSnapshot) -> Vec<CallActivity> {
    let each = now.calls.iter().map(|(kind, stats)| activity(*kind, stats, &before.of(*kind)));
    each.filter(|activity| activity.count > 0).collect()
}

fn activity(kind: CallKind, now: &CallStats, before: &CallStats) -> CallActivity {
    let count = now.count.saturating_sub(before.count);
    let buckets = now.latency.buckets.iter().zip(before.latency.buckets);
    let during: Vec<u64> = buckets.map(|(now, before)| now.saturating_sub(before)).collect();
    CallActivity {
        call: kind.name(),
        count,
        failed: now.faults.saturating_sub(before.faults),
        mean_us: mean_us(&now.latency, &before.latency, during.iter().sum()),
        p99_us: percentile(&during, 99),
    }
}

fn mean_us(now: &LatencySnapshot, before: &LatencySnapshot, count: u64) -> u64 {
    now.sum_us.saturating_sub(before.sum_us).checked_div(count).unwrap_or(0)
}

/// Returns the upper bound of the bucket in which the percentile lies.
fn percentile(buckets: &[u64], percent: u64) -> Option<u64> {
    let wanted = (buckets.iter().sum::<u64>() * percent).div_ceil(100);
    let mut seen = 0;
    let at = buckets.iter().position(|count| {
        seen += count;
        seen >= wanted
    });
    at.and_then(|bucket| BOUNDS_US.get(bucket).copied())
}

/// The bytes per second that were read, from the page cache, from the fast pool and from the pool, and that were written.
pub(super) fn byte_rates(traffic: &Traffic, ms: u64) -> [u64; 5] {
    let counts =
        [traffic.read_bytes, traffic.cache_bytes, traffic.fast_bytes, traffic.pool_bytes, traffic.written_bytes];
    counts.map(|count| per_second(count, ms))
}

/// A count during an interval, for one second.
pub(super) fn per_second(count: u64, ms: u64) -> u64 {
    count.saturating_mul(1000).checked_div(ms).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_api::jobs::JobSample;

    fn traffic(read_bytes: u64) -> Traffic {
        Traffic { read_bytes, ..Traffic::default() }
    }

    #[test]
    fn rates_are_of_what_came_in_between() {
        let job = |id: &str, read| JobSample { id: id.into(), uid: 0, files: 1, traffic: traffic(read) };
        let sample =
            |at_ms, jobs, others| Sample { at_ms, jobs, others: traffic(others), observer: Default::default() };
        let before = sample(1_000, vec![job("a", 500), job("over", 1)], 7);
        let now = difference(sample(3_000, vec![job("a", 900), job("new", 30)], 8), &before);
        assert_eq!(now.jobs.iter().map(|job| job.traffic.read_bytes).collect::<Vec<_>>(), [400, 30]);
        assert_eq!(now.others.read_bytes, 1);
        assert_eq!(per_second(400, 2_000), 200);
        assert_eq!(per_second(400, 0), 0);
    }

    #[test]
    fn the_files_that_were_used_most_come_first() {
        let of = |job: &str, files: &[(&str, u64)]| {
            (job.to_owned(), files.iter().map(|(path, read)| ((*path).to_owned(), traffic(*read))).collect())
        };
        let before = of("j", &[("idle", 9_000), ("busy", 100)]);
        let now = of("j", &[("idle", 9_000), ("busy", 700), ("new", 50)]);
        let hot = hot_files(Some(&now), Some(&before));
        let hot: Vec<_> = hot.iter().map(|file| (&*file.path, file.traffic.read_bytes)).collect();
        assert_eq!(hot, [("busy", 600), ("new", 50)]);
        assert_eq!(hot_files(Some(&now), Some(&of("other", &[]))), []);
        assert_eq!(hot_files(Some(&now), None), []);
    }

    #[test]
    fn latencies_are_of_the_calls_of_the_interval() {
        let stats = |counts: [u64; 3], sum_us| {
            let mut latency = LatencySnapshot { sum_us, ..LatencySnapshot::default() };
            latency.buckets[..3].copy_from_slice(&counts);
            CallStats { count: counts.iter().sum(), latency, ..CallStats::default() }
        };
        let (before, now) = (stats([5, 0, 0], 50), stats([5, 98, 2], 2_050));
        let during = activity(CallKind::Stat, &now, &before);
        assert_eq!((during.call, during.count, during.mean_us, during.p99_us), ("stat", 100, 20, Some(BOUNDS_US[2])));
        let mut slow = before;
        slow.latency.buckets[BOUNDS_US.len()] = 3;
        assert_eq!(activity(CallKind::Stat, &slow, &before).p99_us, None);
    }
}
