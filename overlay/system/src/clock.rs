//! The time of day, as records keep it.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_backends::Time;

thread_local! {
    static AHEAD_SECS: RefCell<Option<Arc<AtomicI64>>> = const { RefCell::new(None) };
}

/// From now on the time of day that this thread sees is ahead of the system's by so many seconds. Only for tests of clocks
/// that are set while the daemon runs.
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

/// The moment with the granularity that file systems stamp with, so that our stamps and those of content
/// files compare.
pub fn stamp_now() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    Time { secs: now.tv_sec.saturating_add(ahead_secs()), nanos: now.tv_nsec as u32 }
}
