//! Links that carry one transfer after the other, and the pool behind such a link.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::Moment;

/// One direction of a connection to the network.
#[derive(Debug, Clone)]
pub struct QueuedLink {
    bytes_per_sec: u64,
    free_at: Moment,
}

impl QueuedLink {
    pub fn new(bytes_per_sec: u64) -> Self {
        Self { bytes_per_sec: bytes_per_sec.max(1), free_at: Moment::ZERO }
    }

    /// Sends bytes that are there from `at` on. Returns when the first and the last one leave.
    pub fn send(&mut self, at: Moment, bytes: u64) -> (Moment, Moment) {
        let begin = self.free_at.max(at);
        self.free_at = begin + time_of(bytes, self.bytes_per_sec);
        (begin, self.free_at)
    }

    /// Receives bytes whose last one left the sender at `now`: they arrive while they are sent, if the link is free and
    /// as fast. Returns when all of them have arrived.
    pub fn receive(&mut self, now: Moment, bytes: u64) -> Moment {
        let time = time_of(bytes, self.bytes_per_sec);
        self.free_at = self.free_at.max(now.saturating_sub(time)) + time;
        self.free_at
    }

    /// Forgets what is under way.
    pub fn clear(&mut self, now: Moment) {
        self.free_at = now;
    }
}

fn time_of(bytes: u64, bytes_per_sec: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_sec)) as u64)
}

/// The pool: so many calls at once, a latency for each, and one link.
#[derive(Debug)]
pub struct PoolModel {
    link: QueuedLink,
    latency: Duration,
    calls_max: usize,
    /// When each call that is under way ends.
    ends: BinaryHeap<Reverse<Moment>>,
    pub bytes: u64,
}

impl PoolModel {
    pub fn new(bytes_per_sec: u64, latency: Duration, calls_max: u32) -> Self {
        let link = QueuedLink::new(bytes_per_sec);
        Self { link, latency, calls_max: calls_max as usize, ends: BinaryHeap::new(), bytes: 0 }
    }

    /// Reads bytes. Returns when the last one leaves the pool.
    pub fn read(&mut self, now: Moment, bytes: u64) -> Moment {
        let mut at = now;
        if self.ends.len() >= self.calls_max
            && let Some(Reverse(end)) = self.ends.pop()
        {
            at = at.max(end);
        }
        let (_, sent) = self.link.send(at + self.latency, bytes);
        self.ends.push(Reverse(sent));
        self.bytes += bytes;
        sent
    }
}
