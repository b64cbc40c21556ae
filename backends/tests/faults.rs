//! Pools under faults: the suite for that, and single faults, with real servers.

mod common;
#[path = "faults/decorated.rs"]
mod decorated;
#[path = "faults/http.rs"]
mod http;
#[path = "faults/nfs.rs"]
mod nfs;
#[path = "../../tests/src/servers/nfs.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod nfs_server;
#[path = "faults/restarts.rs"]
mod restarts;
#[path = "nfs/unreliable.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rpc;
#[path = "faults/s3.rs"]
mod s3;
#[path = "../../tests/src/servers/s3.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod s3_server;
#[path = "../../tests/src/servers/started.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod started;
#[path = "../../tests/src/servers/stores.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod store_servers;
#[path = "faults/stores.rs"]
mod stores;

use std::sync::Arc;

use forebay_backends::conformance::troubled::{self, Trouble, TroubledPool};
use forebay_backends::{Attrs, Pool};

use common::settings::{is_complete, number};
use common::{attrs, path};

/// The minimum number of faults in each case.
const FAULTS_EACH: u64 = 4;
/// The default seed; `FOREBAY_SEED` sets another one.
const SEED: u64 = 1;

fn seed() -> u64 {
    number("FOREBAY_SEED").unwrap_or(SEED)
}

/// Rounds of each case over a real server.
fn rounds() -> u32 {
    if is_complete() { 60 } else { 30 }
}

/// Fails if a case fails, if no fault happened, or if anything is left in the pool.
async fn assert_endures(troubled: Arc<dyn Pool>, sound: Arc<dyn Pool>, trouble: Arc<dyn Trouble>, rounds: u32) {
    let scratch = path("scratch");
    sound.mkdir(&scratch, &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
    let (sound_too, trouble_too) = (Arc::clone(&sound), Arc::clone(&trouble));
    let setting =
        TroubledPool { troubled, sound: sound_too, trouble: trouble_too, seed: seed(), rounds, faults: FAULTS_EACH };
    let report = troubled::run(setting, scratch.clone()).await;
    assert!(report.passed(), "{report}");
    assert!(trouble.happened() > 0, "nothing went wrong on the way");
    sound.remove_dir(&scratch).await.unwrap();
}
