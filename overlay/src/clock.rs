//! The time of day, as records keep it.

use std::time::{SystemTime, UNIX_EPOCH};

use forebay_backends::Time;

/// Seconds since 1970.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The moment with the granularity that file systems stamp with, so that our stamps and those of content
/// files compare.
pub(crate) fn stamp_now() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    Time { secs: now.tv_sec, nanos: now.tv_nsec as u32 }
}
