//! How long the requests to a pool should be: by what earlier ones took.
//!
//! A request costs the time until its first byte, whatever its length. One is long enough when that is a small share of
//! the whole; longer ones only make the reader of the first byte wait behind the last.

use std::time::Duration;

use parking_lot::Mutex;

use crate::content::CHUNK_BYTES;

/// Requests of pools that hand on bytes as they come, while nothing is known of them: what most object stores advise.
const FIRST_BYTES: u64 = 8 << 20;
/// The longest request.
pub(super) const MAX_BYTES: u64 = 16 << 20;
/// The time until the first byte should be no more than this part of the time of a request.
const LATENCY_SHARE: f64 = 0.1;
/// How much one request weighs against those before it.
const WEIGHT: f64 = 0.125;

/// What the requests so far took.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    measured: Mutex<Option<Measured>>,
}

#[derive(Debug, Clone, Copy)]
struct Measured {
    latency_secs: f64,
    bytes_per_sec: f64,
}

impl Pace {
    /// A request was answered: its first byte after `latency`, the others within `rest`.
    pub fn note(&self, latency: Duration, rest: Duration, bytes: u64) {
        let now = Measured {
            latency_secs: latency.as_secs_f64(),
            bytes_per_sec: bytes as f64 / rest.max(Duration::from_micros(1)).as_secs_f64(),
        };
        let mut measured = self.measured.lock();
        let mixed = |before: f64, now: f64| before + (now - before) * WEIGHT;
        *measured = Some(measured.map_or(now, |before| Measured {
            latency_secs: mixed(before.latency_secs, now.latency_secs),
            bytes_per_sec: mixed(before.bytes_per_sec, now.bytes_per_sec),
        }));
    }

    /// How long a request takes until its first byte, and bytes in a second after it. `None`: none was answered yet.
    pub fn rate(&self) -> Option<(Duration, f64)> {
        let measured = *self.measured.lock();
        measured.map(|measured| (Duration::from_secs_f64(measured.latency_secs), measured.bytes_per_sec))
    }

    /// Bytes that one request should ask for: whole chunks.
    pub fn request_bytes(&self) -> u64 {
        let Some(measured) = *self.measured.lock() else { return FIRST_BYTES };
        let bytes = measured.latency_secs / LATENCY_SHARE * measured.bytes_per_sec;
        (bytes as u64).clamp(CHUNK_BYTES, MAX_BYTES).next_multiple_of(CHUNK_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(latency_ms: u64, mib_per_sec: u64) -> u64 {
        let pace = Pace::default();
        assert_eq!(pace.request_bytes(), FIRST_BYTES);
        for _ in 0..50 {
            pace.note(Duration::from_millis(latency_ms), Duration::from_secs(1), mib_per_sec << 20);
        }
        pace.request_bytes() >> 20
    }

    #[test]
    fn requests_are_long_where_they_are_slow_to_begin() {
        assert_eq!(after(0, 1000), 1, "nothing to wait for");
        assert_eq!(after(20, 80), 16, "an object store far away");
        assert_eq!(after(10, 30), 3);
        assert_eq!(after(1000, 1000), MAX_BYTES >> 20, "never longer than that");
    }
}
