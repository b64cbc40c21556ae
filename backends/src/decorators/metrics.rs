//! Counts of a pool's calls and their results.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{Pool, Result};

use super::{Around, CallKind, Decorated, PoolAnswer, PoolCall};

/// A pool that counts its calls.
pub type Metrics = Decorated<CallCounters>;

/// The counts of one kind of call since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallStats {
    /// Calls that were answered, with an error or without.
    pub count: u64,
    pub errors: u64,
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
}

/// All counts at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    count: AtomicU64,
    errors: AtomicU64,
    abandoned: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    total_latency_us: AtomicU64,
    max_latency_us: AtomicU64,
}

/// The counters behind [`Metrics`].
#[derive(Debug, Default)]
pub struct CallCounters {
    counters: [CallCounter; CallKind::ALL.len()],
    in_flight: AtomicU64,
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
}

impl CallCounters {
    fn of(&self, kind: CallKind) -> &CallCounter {
        &self.counters[kind as usize]
    }

    fn snapshot(&self) -> MetricsSnapshot {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut calls = BTreeMap::new();
        for kind in CallKind::ALL.into_iter().filter(|kind| !kind.is_step()) {
            let counter = self.of(kind);
            if load(&counter.started) == 0 {
                continue;
            }
            let stats = CallStats {
                count: load(&counter.count),
                errors: load(&counter.errors),
                abandoned: load(&counter.abandoned),
                bytes_read: load(&counter.bytes_read),
                bytes_written: load(&counter.bytes_written),
                total_latency_us: load(&counter.total_latency_us),
                max_latency_us: load(&counter.max_latency_us),
            };
            calls.insert(kind, stats);
        }
        MetricsSnapshot { calls, in_flight: load(&self.in_flight) }
    }
}

/// Counts a call as abandoned unless it was answered.
struct CallInFlight<'a> {
    counters: &'a CallCounters,
    kind: CallKind,
    started: Instant,
    answered: bool,
}

impl<'a> CallInFlight<'a> {
    fn new(counters: &'a CallCounters, kind: CallKind) -> Self {
        counters.in_flight.fetch_add(1, Ordering::Relaxed);
        counters.of(kind).started.fetch_add(1, Ordering::Relaxed);
        Self { counters, kind, started: Instant::now(), answered: false }
    }

    fn answered(mut self, error: bool) {
        self.answered = true;
        let counter = self.counters.of(self.kind);
        let latency_us = u64::try_from(Duration::as_micros(&self.started.elapsed())).unwrap_or(u64::MAX);
        counter.count.fetch_add(1, Ordering::Relaxed);
        counter.errors.fetch_add(u64::from(error), Ordering::Relaxed);
        counter.total_latency_us.fetch_add(latency_us, Ordering::Relaxed);
        counter.max_latency_us.fetch_max(latency_us, Ordering::Relaxed);
    }
}

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        self.counters.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.answered {
            self.counters.of(self.kind).abandoned.fetch_add(1, Ordering::Relaxed);
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
            self.of(CallKind::Put).bytes_written.fetch_add(call.bytes, Ordering::Relaxed);
            return inner;
        }
        if call.kind == CallKind::ReadPiece {
            return async move {
                let answer = inner.await;
                let counter = self.of(CallKind::Read);
                match &answer {
                    Ok(answer) => counter.bytes_read.fetch_add(answer.content_bytes(), Ordering::Relaxed),
                    Err(_) => counter.errors.fetch_add(1, Ordering::Relaxed),
                };
                answer
            }
            .boxed();
        }
        async move {
            let in_flight = CallInFlight::new(self, call.kind);
            let answer = inner.await;
            in_flight.answered(answer.is_err());
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
