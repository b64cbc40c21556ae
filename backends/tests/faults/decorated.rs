//! Pools on this machine, behind decorators that inject failures and latency.

use std::time::Duration;

use forebay_backends::decorators::{Fault, Odds, Throttle};
use forebay_backends::dir::DirPool;
use forebay_backends::memory::MemoryPool;

use super::*;

const ROUNDS: u32 = 200;
const ODDS: Odds = Odds { before: 0.08, after: 0.08 };

/// Calls that fail before they reach the pool, or lose their answers.
struct Lossy(Arc<Fault>);

impl Trouble for Lossy {
    fn begin(&self, _seed: u64) {
        self.0.set_all_odds(ODDS);
    }

    fn end(&self) {
        self.0.heal();
    }

    /// The expected number of faults among the calls so far.
    fn happened(&self) -> u64 {
        (self.0.calls() as f64 * (ODDS.before + ODDS.after)) as u64
    }
}

async fn endures(pool: Arc<dyn Pool>) {
    let slow = Throttle::new(Arc::clone(&pool), Some(2 << 30), Duration::from_micros(50));
    let fault = Arc::new(Fault::new(Arc::new(slow), seed()));
    assert_endures(Arc::clone(&fault) as Arc<dyn Pool>, pool, Arc::new(Lossy(fault)), ROUNDS).await;
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
