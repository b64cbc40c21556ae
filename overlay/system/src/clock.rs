//! The time of day for records.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::Timelike;
use forebay_backends::Time;

thread_local! {
    static AHEAD_SECS: RefCell<Option<Arc<AtomicI64>>> = const { RefCell::new(None) };
}

/// Sets the time of day of this thread ahead of the system's by `secs`. Only for tests of clocks that are set while the
/// daemon runs.
pub fn run_ahead(secs: Arc<AtomicI64>) {
    AHEAD_SECS.with(|ahead| *ahead.borrow_mut() = Some(secs));
}

fn ahead_secs() -> i64 {
    AHEAD_SECS.with(|ahead| ahead.borrow().as_ref().map_or(0, |secs| secs.load(Ordering::Relaxed)))
}

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    now.saturating_add_signed(ahead_secs())
}

/// Returns the minute of the day by the clock and the time zone of this machine, from 0 to 1439.
pub fn minute_of_day() -> u32 {
    let now = chrono::Local::now();
    now.hour() * 60 + now.minute()
}

/// Returns the current time with the granularity of file system timestamps, so that timestamps of the daemon and those
/// of content files are comparable.
pub fn stamp_now() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    Time { secs: now.tv_sec.saturating_add(ahead_secs()), nanos: now.tv_nsec as u32 }
}
