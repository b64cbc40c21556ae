//! Estimates how fast a pool is from the times of its answers, and how long requests should be.
//!
//! Each request costs the time until its first byte, whatever its length. A request is long enough if that time is a
//! small share of the whole; longer ones only make the reader of the first byte wait behind the last.
//!
//! The bandwidth of a pool is what arrived for all requests together while any was in flight. If little was requested,
//! that says little about the pool. So unless enough was in flight, a measurement counts only if it is above the
//! earlier ones. (In terms of congestion control: application-limited samples only raise the estimate, as in BBR, ACM
//! Queue 14(5), 2016.)

use std::time::{Duration, Instant};

use forebay_cache::CHUNK_BYTES;
use parking_lot::Mutex;

/// The length of requests to a pool that streams, until its speed is known: what most object stores advise.
const FIRST_BYTES: u64 = 8 << 20;
/// The longest request.
pub(super) const MAX_BYTES: u64 = 16 << 20;
/// The time until the first byte should be at most this share of the time of a request.
const LATENCY_SHARE: f64 = 0.1;
/// The least weight of a new measurement against those before it: the first ones weigh the same.
const WEIGHT: f64 = 0.125;
/// A request without streaming of at most this length spends nearly all of its time before its first byte.
const SMALL_BYTES: u64 = 16 << 10;
/// One measurement of the bandwidth takes this much time with requests in flight.
const WINDOW: Duration = Duration::from_millis(200);
/// Enough is in flight if it is this many times what arrives in the time until a first byte (back-to-back requests
/// reach three quarters of the line's rate then), or half of what staging has in flight.
const FILLING: f64 = 4.0;
const FILLING_BYTES: f64 = (8 * CHUNK_BYTES) as f64;
/// The assumed speed of a pool that was not measured yet: a file server in the same building.
const UNMEASURED: Speed = Speed { latency: Duration::from_millis(2), bytes_per_second: 100e6 };

/// How fast a pool is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Speed {
    /// Time until the first byte.
    pub latency: Duration,
    /// Of all requests together; above 0.
    pub bytes_per_second: f64,
}

/// Measurements of the requests so far.
#[derive(Debug, Default)]
pub(crate) struct BandwidthEstimator {
    measured: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    latency_secs: Mean,
    /// The shortest time until a first byte, or until all bytes of a request without streaming.
    soonest_secs: Option<f64>,
    /// Of one request, after its first byte.
    stream_bytes_per_sec: Mean,
    /// Of all requests together.
    bytes_per_sec: Mean,
    line: Line,
}

/// A moving average of measurements.
#[derive(Debug, Default)]
struct Mean {
    value: Option<f64>,
    count: u32,
}

impl Mean {
    fn add(&mut self, measured: f64) {
        self.count = self.count.saturating_add(1);
        let weight = f64::from(self.count).recip().max(WEIGHT);
        self.value = Some(self.value.map_or(measured, |before| before + (measured - before) * weight));
    }
}

/// What is in flight, and what arrived since the last measurement.
#[derive(Debug, Default)]
struct Line {
    requests: usize,
    bytes_under_way: u64,
    looked: Option<Instant>,
    /// Time with requests in flight.
    busy_secs: f64,
    bytes_came: u64,
    /// The bytes in flight, integrated over that time.
    byte_secs: f64,
}

/// A request in flight.
pub(super) struct TimedRequest<'a> {
    estimator: &'a BandwidthEstimator,
    is_stream: bool,
    bytes: u64,
    missing: u64,
    asked: Instant,
    first_byte: Option<Duration>,
}

impl BandwidthEstimator {
    /// Begins a request for `bytes` bytes. The pool streams them (`is_stream`), or returns them as a whole.
    pub(super) fn begin(&self, bytes: u64, is_stream: bool, now: Instant) -> TimedRequest<'_> {
        let line = &mut self.measured.lock().line;
        line.look(now);
        line.requests += 1;
        line.bytes_under_way += bytes;
        TimedRequest { estimator: self, is_stream, bytes, missing: bytes, asked: now, first_byte: None }
    }

    pub fn speed(&self) -> Speed {
        self.measured.lock().speed()
    }

    /// Bytes that one request should ask for: whole chunks.
    pub fn request_bytes(&self) -> u64 {
        let measured = self.measured.lock();
        let (Some(latency), Some(rate)) = (measured.latency_secs.value, measured.stream_bytes_per_sec.value) else {
            return FIRST_BYTES;
        };
        ((latency / LATENCY_SHARE * rate) as u64).clamp(CHUNK_BYTES, MAX_BYTES).next_multiple_of(CHUNK_BYTES)
    }
}

impl TimedRequest<'_> {
    /// Counts bytes that arrived.
    pub(super) fn came(&mut self, bytes: u64, now: Instant) {
        // No more than was requested, even if the pool sends more.
        let bytes = bytes.min(self.missing);
        if bytes == 0 {
            return;
        }
        self.missing -= bytes;
        let took = now.duration_since(self.asked);
        let first_byte = *self.first_byte.get_or_insert(took);
        let measured = &mut *self.estimator.measured.lock();
        measured.line.look(now);
        measured.line.bytes_came += bytes;
        measured.line.leave(bytes, self.missing == 0);
        if self.missing == 0 {
            let soonest = measured.soonest_secs.unwrap_or(f64::INFINITY);
            measured.soonest_secs = Some(soonest.min(first_byte.as_secs_f64()));
            if self.is_stream {
                measured.stream_bytes_per_sec.add(per_second(self.bytes, (took - first_byte).as_secs_f64()));
            }
            if self.is_stream || self.bytes <= SMALL_BYTES {
                measured.latency_secs.add(first_byte.as_secs_f64());
            }
        }
        measured.measure();
    }
}

/// Bytes that will not arrive any more are not in flight.
impl Drop for TimedRequest<'_> {
    fn drop(&mut self) {
        if self.missing > 0 {
            let line = &mut self.estimator.measured.lock().line;
            line.look(Instant::now());
            line.leave(self.missing, true);
        }
    }
}

impl Line {
    /// Adds the time since the last look, during which the same bytes were in flight.
    fn look(&mut self, now: Instant) {
        let since = self.looked.map_or(Duration::ZERO, |looked| now.duration_since(looked)).as_secs_f64();
        if self.requests > 0 {
            self.busy_secs += since;
            self.byte_secs += since * self.bytes_under_way as f64;
        }
        self.looked = self.looked.max(Some(now));
    }

    fn leave(&mut self, bytes: u64, is_last: bool) {
        self.bytes_under_way -= bytes;
        self.requests -= usize::from(is_last);
    }
}

impl Measured {
    fn speed(&self) -> Speed {
        Speed {
            latency: self.latency_secs.value.map_or(UNMEASURED.latency, Duration::from_secs_f64),
            bytes_per_second: self.bytes_per_sec.value.unwrap_or(UNMEASURED.bytes_per_second).max(1.0),
        }
    }

    /// Takes a measurement once requests were in flight for `WINDOW`.
    fn measure(&mut self) {
        let Line { busy_secs, bytes_came, byte_secs, .. } = self.line;
        if busy_secs < WINDOW.as_secs_f64() {
            return;
        }
        let known = self.speed();
        let latency_max = self.latency_secs.value.or(self.soonest_secs).unwrap_or(known.latency.as_secs_f64());
        let enough = (FILLING * known.bytes_per_second * latency_max).min(FILLING_BYTES);
        let fills = byte_secs / busy_secs >= enough;
        let given = per_second(bytes_came, busy_secs);
        if fills || given > known.bytes_per_second {
            self.bytes_per_sec.add(given);
        }
        self.line = Line { busy_secs: 0.0, bytes_came: 0, byte_secs: 0.0, ..std::mem::take(&mut self.line) };
    }
}

fn per_second(bytes: u64, secs: f64) -> f64 {
    bytes as f64 / secs.max(1e-6)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::VecDeque;

    const MIB: u64 = 1 << 20;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn after(latency_ms: u64, mib_per_sec: u64) -> u64 {
        let (estimator, begun) = (BandwidthEstimator::default(), Instant::now());
        assert_eq!(estimator.request_bytes(), FIRST_BYTES);
        for _ in 0..50 {
            let mut request = estimator.begin(mib_per_sec * MIB, true, begun);
            request.came(1, begun + ms(latency_ms));
            request.came(mib_per_sec * MIB - 1, begun + ms(latency_ms + 1000));
        }
        estimator.request_bytes() / MIB
    }

    #[test]
    fn requests_are_long_where_they_are_slow_to_begin() {
        assert_eq!(after(0, 1000), 1, "nothing to wait for");
        assert_eq!(after(20, 80), 16, "an object store far away");
        assert_eq!(after(10, 30), 3);
        assert_eq!(after(1000, 1000), MAX_BYTES / MIB, "never longer than that");
    }

    /// Keeps `at_once` requests in flight. Answers arrive in bunches of `bunch`, one bunch every `each`.
    fn requests(
        estimator: &BandwidthEstimator,
        begun: Instant,
        [at_once, bunch]: [usize; 2],
        bytes: u64,
        each: Duration,
    ) -> Instant {
        let mut now = begun;
        let mut under_way: VecDeque<_> = (0..at_once).map(|_| estimator.begin(bytes, false, now)).collect();
        for _ in 0..1600 / bunch {
            now += each;
            for _ in 0..bunch {
                under_way.pop_front().unwrap().came(bytes, now);
                under_way.push_back(estimator.begin(bytes, false, now));
            }
        }
        now
    }

    fn mb_per_second(estimator: &BandwidthEstimator) -> f64 {
        (estimator.speed().bytes_per_second / 1e6).round()
    }

    #[test]
    fn a_pool_gives_what_came_of_all_requests_together() {
        let estimator = BandwidthEstimator::default();
        assert_eq!(estimator.speed(), UNMEASURED);
        let now = requests(&estimator, Instant::now(), [16, 1], MIB, ms(21));
        assert_eq!(mb_per_second(&estimator), 50.0);
        let now = requests(&estimator, now, [16, 16], MIB, ms(42));
        assert!((300.0..450.0).contains(&mb_per_second(&estimator)), "400 in bunches: {}", mb_per_second(&estimator));
        let now = requests(&estimator, now, [16, 1], MIB, ms(84));
        assert_eq!(mb_per_second(&estimator), 12.0, "it is slower now");
        assert_eq!(estimator.speed().latency, UNMEASURED.latency, "nothing small came");
        // A dropped request is not in flight, and time without requests does not count.
        drop(estimator.begin(MIB, false, now));
        let later = now + ms(3_600_000);
        estimator.begin(MIB, false, later).came(MIB, later + ms(84));
        assert_eq!(mb_per_second(&estimator), 12.0);
    }

    #[test]
    fn small_requests_measure_latency_and_not_bandwidth() {
        let estimator = BandwidthEstimator::default();
        let now = requests(&estimator, Instant::now(), [1, 1], 4096, ms(4));
        assert_eq!((estimator.speed().latency, mb_per_second(&estimator)), (ms(4), 100.0));
        let now = requests(&estimator, now, [1, 1], 500_000, ms(10));
        assert_eq!(mb_per_second(&estimator), 100.0, "50, where the time until a first byte is nearly half");
        requests(&estimator, now, [8, 1], 500_000, ms(500));
        assert_eq!((estimator.speed().latency, mb_per_second(&estimator)), (ms(4), 1.0), "a slow one");
    }

    /// Models a line that lets a burst pass after a pause.
    #[test]
    fn the_first_measurement_weighs_no_more_than_the_next() {
        let estimator = BandwidthEstimator::default();
        let mut now = Instant::now();
        for mib_per_second in [400, 50, 50, 50, 50] {
            let mut request = estimator.begin(mib_per_second * MIB / 4, false, now);
            now += ms(250);
            request.came(mib_per_second * MIB / 4, now);
        }
        let mean = (400.0 + 4.0 * 50.0) / 5.0;
        assert_eq!(mb_per_second(&estimator), (mean * MIB as f64 / 1e6_f64).round());
    }

    #[test]
    fn one_reader_of_a_pool_far_away_does_not_make_it_slow() {
        let estimator = BandwidthEstimator::default();
        let now = requests(&estimator, Instant::now(), [1, 1], MIB, ms(60));
        assert_eq!(mb_per_second(&estimator), 100.0, "50 ms until the first byte, for all that is known");
        requests(&estimator, now, [16, 1], MIB, ms(5));
        assert!((205.0..215.0).contains(&mb_per_second(&estimator)), "and more is given to more requests");
    }
}
