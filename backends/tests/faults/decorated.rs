//! Pools on this machine, behind decorators that fail and are slow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_backends::decorators::{Fault, Odds, Throttle};
use forebay_backends::dir::DirPool;
use forebay_backends::memory::MemoryPool;

use super::*;

const ROUNDS: u32 = 200;
const ODDS: Odds = Odds { before: 0.08, after: 0.08 };

/// Calls that fail before they reach the pool, or lose their answers.
struct Lossy {
    fault: Arc<Fault>,
    /// Calls before it began.
    before: AtomicU64,
    calls: AtomicU64,
}

impl Trouble for Lossy {
    fn begin(&self, _seed: u64) {
        self.before.store(self.fault.calls(), Ordering::Relaxed);
        self.fault.set_all_odds(ODDS);
    }

    fn end(&self) {
        self.fault.heal();
        self.calls
            .fetch_add(self.fault.calls() - self.before.swap(self.fault.calls(), Ordering::Relaxed), Ordering::Relaxed);
    }

    /// As the odds have it.
    fn happened(&self) -> u64 {
        (self.calls.load(Ordering::Relaxed) as f64 * (ODDS.before + ODDS.after)) as u64
    }
}

async fn endures(pool: Arc<dyn Pool>) {
    let slow = Throttle::new(Arc::clone(&pool), Some(2 << 30), Duration::from_micros(50));
    let fault = Arc::new(Fault::new(Arc::new(slow), seed()));
    let lossy = Lossy { fault: Arc::clone(&fault), before: AtomicU64::new(0), calls: AtomicU64::new(0) };
    assert_endures(fault, pool, Arc::new(lossy), ROUNDS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_pool_in_memory_endures() {
    endures(Arc::new(MemoryPool::new())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_directory_endures() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    endures(Arc::new(DirPool::open(dir.path()).unwrap())).await;
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something was left");
}
