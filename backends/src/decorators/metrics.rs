//! Counts of a pool's calls and their results.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::latency::{LatencyHistogram, LatencySnapshot};
use crate::{Error, ErrorKind, Pool, Result, Retry, Side};

use super::{Around, CallKind, Decorated, PoolAnswer, PoolCall};

/// From this duration on, an answered call is listed as slow.
const SLOW: Duration = Duration::from_millis(500);
/// Slow calls that are listed: the last ones.
const SLOW_LISTED: usize = 32;

/// A pool that counts its calls.
pub type Metrics = Decorated<CallCounters>;

/// The counts of one kind of call since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CallStats {
    /// Calls that were answered, with an error or without.
    pub count: u64,
    pub errors: u64,
    /// Those errors that are faults: the pool or the connection to it failed. Other errors are answers, such as "not
    /// found".
    pub faults: u64,
    /// Calls that were cancelled before they were answered, for example by a deadline.
    pub abandoned: u64,
    /// Content read from the pool.
    pub bytes_read: u64,
    /// Content sent to the pool, without holes; an upper bound if a `put` failed.
    pub bytes_written: u64,
    /// The sum over all answered calls, in microseconds.
    pub total_latency_us: u64,
    /// The slowest answered call, in microseconds.
    pub max_latency_us: u64,
    /// The latencies of all answered calls.
    pub latency: LatencySnapshot,
}

/// A call that took long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowCall {
    pub kind: CallKind,
    /// The object in the pool.
    pub path: String,
    pub took_ms: u64,
    /// Seconds since 1970 at which it was answered.
    pub answered_unix: u64,
    /// The error, if it was answered with one.
    pub error: Option<String>,
}

/// All counts at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MetricsSnapshot {
    /// Kinds without calls are left out.
    pub calls: BTreeMap<CallKind, CallStats>,
    /// Calls that wait for their answers.
    pub in_flight: u64,
}

impl MetricsSnapshot {
    /// The counts of one kind; zeros if there was no call.
    pub fn of(&self, kind: CallKind) -> CallStats {
        self.calls.get(&kind).copied().unwrap_or_default()
    }

    pub fn bytes_read(&self) -> u64 {
        self.calls.values().map(|stats| stats.bytes_read).sum()
    }

    pub fn bytes_written(&self) -> u64 {
        self.calls.values().map(|stats| stats.bytes_written).sum()
    }

    pub fn errors(&self) -> u64 {
        self.calls.values().map(|stats| stats.errors).sum()
    }
}

#[derive(Debug, Default)]
struct CallCounter {
    started: AtomicU64,
    errors: AtomicU64,
    faults: AtomicU64,
    abandoned: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    latency: LatencyHistogram,
}

/// The counters behind [`Metrics`].
#[derive(Debug, Default)]
pub struct CallCounters {
    counters: [CallCounter; CallKind::ALL.len()],
    in_flight: AtomicU64,
    slow: Mutex<VecDeque<SlowCall>>,
}

impl Metrics {
    pub fn new(inner: Arc<dyn Pool>) -> Self {
        Self::with(inner, CallCounters::default())
    }

    pub fn snapshot(&self) -> MetricsSnapshot {
        self.around.snapshot()
    }

    /// Calls that wait for their answers.
    pub fn in_flight(&self) -> u64 {
        self.around.in_flight.load(Ordering::Relaxed)
    }

    /// The last calls that took half a second or longer, the oldest first.
    pub fn slow_calls(&self) -> Vec<SlowCall> {
        self.around.slow.lock().iter().cloned().collect()
    }
}

/// Whether an error says that the pool failed. Otherwise it is the pool's answer to the request.
fn is_fault(error: &Error) -> bool {
    let is_io_error = matches!(error.kind(), ErrorKind::Os(_) | ErrorKind::Corrupt) && error.side() == Side::Pool;
    error.retry() == Retry::Later || is_io_error
}

impl CallCounters {
    fn of(&self, kind: CallKind) -> &CallCounter {
        &self.counters[kind as usize]
    }

    fn note_slow(&self, call: &PoolCall<'_>, took: Duration, error: Option<&Error>) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut slow = self.slow.lock();
        if slow.len() == SLOW_LISTED {
            slow.pop_front();
        }
        slow.push_back(SlowCall {
            kind: call.kind,
            path: call.path.to_string(),
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            answered_unix: now.as_secs(),
            error: error.map(ToString::to_string),
        });
    }

    fn snapshot(&self) -> MetricsSnapshot {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut calls = BTreeMap::new();
        for kind in CallKind::ALL.into_iter().filter(|kind| !kind.is_step()) {
            let counter = self.of(kind);
            if load(&counter.started) == 0 {
                continue;
            }
            let latency = counter.latency.snapshot();
            let stats = CallStats {
                count: latency.count(),
                errors: load(&counter.errors),
                faults: load(&counter.faults),
                abandoned: load(&counter.abandoned),
                bytes_read: load(&counter.bytes_read),
                bytes_written: load(&counter.bytes_written),
                total_latency_us: latency.sum_us,
                max_latency_us: latency.max_us,
                latency,
            };
            calls.insert(kind, stats);
        }
        MetricsSnapshot { calls, in_flight: load(&self.in_flight) }
    }
}

/// Counts a call as abandoned unless it was answered.
struct CallInFlight<'a> {
    counters: &'a CallCounters,
    call: PoolCall<'a>,
    started: Instant,
    answered: bool,
}

impl<'a> CallInFlight<'a> {
    fn new(counters: &'a CallCounters, call: PoolCall<'a>) -> Self {
        counters.in_flight.fetch_add(1, Ordering::Relaxed);
        counters.of(call.kind).started.fetch_add(1, Ordering::Relaxed);
        Self { counters, call, started: Instant::now(), answered: false }
    }

    fn answered(mut self, error: Option<&Error>) {
        self.answered = true;
        let counter = self.counters.of(self.call.kind);
        let took = self.started.elapsed();
        counter.latency.observe(took);
        counter.errors.fetch_add(u64::from(error.is_some()), Ordering::Relaxed);
        counter.faults.fetch_add(u64::from(error.is_some_and(is_fault)), Ordering::Relaxed);
        if took >= SLOW {
            self.counters.note_slow(&self.call, took, error);
        }
    }
}

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        self.counters.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.answered {
            self.counters.of(self.call.kind).abandoned.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Around for CallCounters {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        if call.kind == CallKind::PutPiece {
            self.of(call.within).bytes_written.fetch_add(call.bytes, Ordering::Relaxed);
            return inner;
        }
        if call.kind == CallKind::ReadPiece {
            return async move {
                let answer = inner.await;
                let counter = self.of(call.within);
                match &answer {
                    Ok(answer) => counter.bytes_read.fetch_add(answer.content_bytes(), Ordering::Relaxed),
                    Err(error) => {
                        counter.faults.fetch_add(u64::from(is_fault(error)), Ordering::Relaxed);
                        counter.errors.fetch_add(1, Ordering::Relaxed)
                    }
                };
                answer
            }
            .boxed();
        }
        async move {
            let in_flight = CallInFlight::new(self, call);
            let answer = inner.await;
            in_flight.answered(answer.as_ref().err());
            let counter = self.of(call.kind);
            if let Ok(answer) = &answer {
                counter.bytes_read.fetch_add(answer.content_bytes(), Ordering::Relaxed);
                let written = if call.kind == CallKind::WriteAt { call.bytes } else { 0 };
                counter.bytes_written.fetch_add(written, Ordering::Relaxed);
            }
            answer
        }
        .boxed()
    }
}
