//! The data of the page, as server-sent events: one at once, then one a second.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use forebay_api::jobs::{JobSummary, Sample};
use forebay_api::operator::{DirtyFile, Status};
use forebay_api::peers::PeersStatus;
use forebay_backends::decorators::{CallKind, SlowCall};
use forebay_backends::latency::LatencySnapshot;
use forebay_engine::Overlay;
use futures::{Stream, stream};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::MountSource;
use crate::ReplyBody;

/// The time between two events.
const TICK: Duration = Duration::from_secs(1);
/// Jobs are read from the catalog, so they come with every fifth event.
const JOBS_EVERY: u64 = 5;
/// Jobs that are sent: the last ones.
const JOBS_MAX: usize = 100;
/// Pages that are open at the same time.
const PAGES_MAX: usize = 16;

/// Sends the data of the page.
pub struct Events {
    overlay: Overlay,
    source: Arc<dyn MountSource>,
    slots: Arc<Semaphore>,
}

/// One event.
#[derive(Serialize)]
struct PageUpdate {
    at_ms: u64,
    status: Status,
    /// Seconds since 1970 of the counts of dirty and leased content.
    census_unix: u64,
    leased_files: u64,
    failing_files: u64,
    /// `None`: as in the event before.
    dirty: Option<Vec<DirtyFile>>,
    pool: Vec<PoolCallCounts>,
    pool_in_flight: u64,
    slow: Vec<SlowCall>,
    requests: Vec<RequestLatency>,
    requests_waiting: u64,
    /// `None`: the node has no peers file.
    peers: Option<PeersStatus>,
    sample: Option<Sample>,
    /// `None`: as in the event before.
    jobs: Option<Vec<JobSummary>>,
}

#[derive(Serialize)]
struct PoolCallCounts {
    call: CallKind,
    count: u64,
    refused: u64,
    failed: u64,
    abandoned: u64,
    latency: LatencySnapshot,
}

#[derive(Serialize)]
struct RequestLatency {
    operation: &'static str,
    latency: LatencySnapshot,
}

struct EventStream {
    overlay: Overlay,
    source: Arc<dyn MountSource>,
    stop: CancellationToken,
    tick: Interval,
    sent: u64,
    census_sent: Option<u64>,
    _slot: OwnedSemaphorePermit,
}

impl Events {
    pub fn new(overlay: Overlay, source: Arc<dyn MountSource>) -> Self {
        Self { overlay, source, slots: Arc::new(Semaphore::new(PAGES_MAX)) }
    }

    /// Answers a page that asks for its data. The answer ends with `stop`, or when the page is closed.
    pub fn answer(&self, stop: CancellationToken) -> Response<ReplyBody> {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            let mut response = Response::new(ReplyBody::from(format!("{PAGES_MAX} pages are open: close one\n")));
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            return response;
        };
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (overlay, source) = (self.overlay.clone(), self.source.clone());
        let events = EventStream { overlay, source, stop, tick, sent: 0, census_sent: None, _slot: slot };
        let mut response = Response::new(ReplyBody::pieces(events.pieces(), None));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}

impl EventStream {
    fn pieces(self) -> impl Stream<Item = io::Result<Bytes>> + Send {
        stream::unfold(self, |mut events| async move {
            let stop = events.stop.clone();
            let event = stop.run_until_cancelled(events.next()).await?;
            Some((event, events))
        })
    }

    async fn next(&mut self) -> io::Result<Bytes> {
        self.tick.tick().await;
        let (overlay, source) = (self.overlay.clone(), self.source.clone());
        // It asks the devices for their space, which blocks.
        let status = tokio::task::spawn_blocking(move || source.complete(overlay.status_at_last_census()));
        let status = status.await.map_err(io::Error::other)?;
        let census = self.overlay.last_census();
        let is_new = self.census_sent.replace(census.counted_unix) != Some(census.counted_unix);
        let calls = self.source.pool_calls();
        let operations = self.source.operations();
        let with_jobs = self.sent.is_multiple_of(JOBS_EVERY);
        let jobs = if with_jobs { self.source.jobs().await.ok().map(newest) } else { None };
        let pool = calls.calls.iter().map(|(call, stats)| PoolCallCounts {
            call: *call,
            count: stats.count,
            refused: stats.errors.saturating_sub(stats.faults),
            failed: stats.faults,
            abandoned: stats.abandoned,
            latency: stats.latency,
        });
        let used = operations.latencies.into_iter().filter(|(_, latency)| latency.count() > 0);
        let update = PageUpdate {
            at_ms: now_ms(),
            status,
            census_unix: census.counted_unix,
            leased_files: census.leased_files,
            failing_files: census.failing_files,
            dirty: is_new.then(|| census.oldest.clone()),
            pool: pool.collect(),
            pool_in_flight: calls.in_flight,
            slow: self.source.slow_calls(),
            requests: used.map(|(operation, latency)| RequestLatency { operation, latency }).collect(),
            requests_waiting: operations.waiting,
            peers: self.source.peers(),
            sample: self.source.sample().await.ok(),
            jobs,
        };
        self.sent += 1;
        let json = serde_json::to_string(&update).map_err(io::Error::other)?;
        Ok(Bytes::from(format!("data: {json}\n\n")))
    }
}

fn newest(mut jobs: Vec<JobSummary>) -> Vec<JobSummary> {
    jobs.drain(..jobs.len().saturating_sub(JOBS_MAX));
    jobs
}

/// Returns the time of day in milliseconds since 1970.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
