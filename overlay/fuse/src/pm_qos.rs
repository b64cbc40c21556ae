//! Keeps processors awake while requests stream.
//!
//! A request costs two wake-ups: that of the session thread and that of the client. If a processor went idle in
//! between, an interrupt has to wake it, out of its power-saving state; on virtual machines the host has to run it
//! again. That takes several times as long as the answer. A process that holds `/dev/cpu_dma_latency` open sets a bound
//! on this latency (Documentation/power/pm_qos_interface.rst): at 0 an idle processor polls for work. The bound holds
//! for the whole machine and costs power. So it is set only while requests stream, and the kernel removes it when the
//! process ends.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::runtime::Handle as Runtime;

/// The device to which the bound is written.
pub const DEVICE: &str = "/dev/cpu_dma_latency";
/// The value that removes the bound: `PM_QOS_DEFAULT_VALUE`.
const NO_BOUND: i32 = -1;
/// This many requests of one session thread are a stream if they come within `STREAM_WITHIN`.
const STREAM: u32 = 8;
/// The longest time in which `STREAM` requests are a stream. At 4,000 requests per second and more, programs wait
/// mainly for wake-ups.
const STREAM_WITHIN: Duration = Duration::from_millis(2);
/// A stream ends if no request came for this long.
const QUIET: Duration = Duration::from_millis(10);

thread_local! {
    static PACE: RefCell<RequestRate> = RefCell::new(RequestRate { since: Instant::now(), count: 0 });
}

/// The bound of one mount.
#[derive(Debug)]
pub struct WakeupLatency {
    /// The device, and the bound in microseconds. `None`: no bound is set.
    device: Option<(File, i32)>,
    /// Counts the stretches of `STREAM` fast requests.
    streamed: AtomicU64,
    is_held: AtomicBool,
    /// Held while the bound is changed.
    changing: Mutex<()>,
}

impl WakeupLatency {
    /// `bound`: how long a wake-up may take while requests stream. `None`: no bound.
    pub fn new(bound: Option<Duration>) -> Self {
        let device = bound.and_then(|bound| match File::options().write(true).open(DEVICE) {
            Ok(device) => Some((device, i32::try_from(bound.as_micros()).unwrap_or(i32::MAX))),
            Err(error) => {
                tracing::debug!(%error, "{DEVICE}: wake-ups take as long as they do");
                None
            }
        });
        Self::with(device)
    }

    fn with(device: Option<(File, i32)>) -> Self {
        Self { device, streamed: AtomicU64::new(0), is_held: AtomicBool::new(false), changing: Mutex::new(()) }
    }

    /// Notes on a session thread that it serves a request.
    pub fn serve(self: &Arc<Self>, runtime: &Runtime) {
        if self.device.is_none() || !PACE.with_borrow_mut(|pace| pace.serve(Instant::now)) {
            return;
        }
        self.streamed.fetch_add(1, Ordering::Relaxed);
        if !self.is_held.load(Ordering::Relaxed) && self.hold() {
            runtime.spawn(Arc::clone(self).give_back_when_quiet().boxed());
        }
    }

    /// Sets the bound. Returns whether it was not set before.
    fn hold(&self) -> bool {
        let _changing = self.changing.lock();
        let first = !self.is_held.swap(true, Ordering::Relaxed);
        if let (true, Some((_, bound))) = (first, &self.device) {
            self.set(*bound);
        }
        first
    }

    async fn give_back_when_quiet(self: Arc<Self>) {
        let mut seen = 0;
        loop {
            let now = self.streamed.load(Ordering::Relaxed);
            if now == seen {
                break;
            }
            seen = now;
            tokio::time::sleep(QUIET).await;
        }
        let _changing = self.changing.lock();
        self.set(NO_BOUND);
        self.is_held.store(false, Ordering::Relaxed);
    }

    fn set(&self, bound: i32) {
        let Some((device, _)) = &self.device else { return };
        if let Err(error) = device.write_all_at(&bound.to_ne_bytes(), 0) {
            tracing::debug!(%error, bound, "{DEVICE}");
        }
    }
}

/// How fast requests come to one session thread.
#[derive(Debug)]
struct RequestRate {
    since: Instant,
    count: u32,
}

impl RequestRate {
    /// Counts a request. Returns whether it completes a stretch of [`STREAM`] fast requests.
    fn serve(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.count += 1;
        if self.count < STREAM {
            return false;
        }
        let now = now();
        let fast = now.duration_since(self.since) <= STREAM_WITHIN;
        *self = Self { since: now, count: 0 };
        fast
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn pace(each: Duration, requests: u32) -> usize {
        let start = Instant::now();
        let mut pace = RequestRate { since: start, count: 0 };
        (1..=requests).filter(|n| pace.serve(|| start + each * *n)).count()
    }

    #[test]
    fn a_stream_is_told_from_single_requests() {
        assert_eq!(pace(Duration::from_micros(250), 10 * STREAM), 10);
        assert_eq!(pace(Duration::from_micros(251), 10 * STREAM), 0);
        assert_eq!(pace(Duration::ZERO, STREAM - 1), 0);
    }

    #[test]
    fn the_bound_is_given_back_when_requests_end() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let device = File::options().write(true).open(path.path()).unwrap();
        let wakeups = Arc::new(WakeupLatency::with(Some((device, 7))));
        let bound = || {
            let mut bytes = [0; 4];
            File::open(path.path()).unwrap().read_exact(&mut bytes).map(|()| i32::from_ne_bytes(bytes)).ok()
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        for _ in 0..2 {
            while !wakeups.is_held.load(Ordering::Relaxed) {
                wakeups.serve(runtime.handle());
            }
            assert_eq!(bound(), Some(7));
            let begun = Instant::now();
            while bound() != Some(NO_BOUND) {
                assert!(begun.elapsed() < Duration::from_secs(30), "it is held for ever");
                std::thread::sleep(QUIET);
            }
            // `is_held` changes after the device.
            while wakeups.is_held.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn without_a_bound_nothing_is_held() {
        let wakeups = Arc::new(WakeupLatency::new(None));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        (0..10 * STREAM).for_each(|_| wakeups.serve(runtime.handle()));
        assert!(!wakeups.is_held.load(Ordering::Relaxed));
    }
}
