//! Processors that stay awake while requests stream.
//!
//! A request is two wake-ups: ours, and the client's. A processor that went idle in between is fetched back by an
//! interrupt, and out of whatever state it saves power in; on virtual machines by their host. That takes several times
//! as long as answering. Linux takes a bound on it from whoever holds `/dev/cpu_dma_latency` open
//! (Documentation/power/pm_qos_interface.rst): at 0 an idle processor polls for work. The bound holds for the whole
//! machine and costs power, so it is given only while requests come in a stream, and ends with the process whatever
//! happens to it.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle as Runtime;

/// Takes the bound.
pub const DEVICE: &str = "/dev/cpu_dma_latency";
/// What is written to take the bound back: `PM_QOS_DEFAULT_VALUE`.
const NO_BOUND: i32 = -1;
/// So many requests of one session thread,
const STREAM: u32 = 8;
/// that take no longer than this, are a stream: at 4,000 per second and more wake-ups are what is waited for.
const STREAM_WITHIN: Duration = Duration::from_millis(2);
/// A stream has ended when nothing came for this long.
const QUIET: Duration = Duration::from_millis(10);

thread_local! {
    static PACE: RefCell<Pace> = RefCell::new(Pace { since: Instant::now(), count: 0 });
}

/// The bound of one mount.
#[derive(Debug)]
pub struct Wakeups {
    /// The device, and how long a wake-up may take in microseconds while requests stream. `None`: no bound is given.
    device: Option<(File, i32)>,
    /// Counts what comes in streams.
    streamed: AtomicU64,
    is_held: AtomicBool,
    /// Held while the bound is changed.
    changing: Mutex<()>,
}

impl Wakeups {
    /// `bound`: how long a wake-up may take while requests stream; `None` for as long as it may.
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

    /// Takes note on a session thread that it serves a request.
    pub fn serve(self: &Arc<Self>, runtime: &Runtime) {
        if self.device.is_none() || !PACE.with_borrow_mut(|pace| pace.serve(Instant::now)) {
            return;
        }
        self.streamed.fetch_add(1, Ordering::Relaxed);
        if !self.is_held.load(Ordering::Relaxed) && self.hold() {
            runtime.spawn(Arc::clone(self).give_back_when_quiet());
        }
    }

    /// Whether it was not held before.
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
struct Pace {
    since: Instant,
    count: u32,
}

impl Pace {
    /// Whether this request ends a stretch of [`STREAM`] ones that came fast.
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
        let mut pace = Pace { since: start, count: 0 };
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
        let wakeups = Arc::new(Wakeups::with(Some((device, 7))));
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
            // It says so after the device.
            while wakeups.is_held.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn without_a_bound_nothing_is_held() {
        let wakeups = Arc::new(Wakeups::new(None));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        (0..10 * STREAM).for_each(|_| wakeups.serve(runtime.handle()));
        assert!(!wakeups.is_held.load(Ordering::Relaxed));
    }
}
