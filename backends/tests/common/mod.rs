//! Code that the tests of this crate share.
#![allow(dead_code, reason = "each test program uses its part")]

#[path = "../../../tests/src/settings.rs"]
pub mod settings;

use std::sync::Arc;

use bytes::Bytes;
use forebay_backends::conformance::{self, Case};
use forebay_backends::{Attrs, Piece, Pieces, Pool, PoolPath, Time};
use futures::{StreamExt, stream};

pub fn path(path: &str) -> PoolPath {
    PoolPath::parse(path).unwrap()
}

/// Attributes of this process's own user.
pub fn attrs() -> Attrs {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let time = Time { secs: 1_650_000_000, nanos: 5 };
    Attrs { mode: 0o644, uid, gid, atime: time, mtime: time, xattrs: Vec::new() }
}

pub fn pieces(pieces: &[(u64, &'static str)]) -> Pieces<'static> {
    let pieces: Vec<_> = pieces
        .iter()
        .map(|(offset, data)| Ok(Piece { offset: *offset, data: Bytes::from_static(data.as_bytes()) }))
        .collect();
    stream::iter(pieces).boxed()
}

/// Cases with thousands of requests. On Ceph's gateway, they take most of the time of the suite.
const LONG: [&str; 3] = [
    "three_thousand_entries_are_listed_once_each",
    "racing_puts_and_reads_are_never_torn",
    "entries_that_vanish_while_listing_are_left_out",
];

/// Draws one of [`LONG`], another one each time, and leaves out the others. `FOREBAY_SEED` repeats a draw.
fn share(mut cases: Vec<Case>) -> Vec<Case> {
    if settings::is_complete() {
        return cases;
    }
    let seed = settings::seed();
    let all = cases.len();
    let drawn = LONG[seed as usize % LONG.len()];
    cases.retain(|case| case.name == drawn || !LONG.contains(&case.name));
    assert_eq!(cases.len(), all + 1 - LONG.len(), "the suite has no case with the name of one of {LONG:?}");
    cases
}

/// As [`assert_conforms`], but for most of the [`LONG`] cases: for a server that is slow, or one that another test asks
/// for all cases.
pub async fn assert_conforms_in_part(pool: Arc<dyn Pool>) {
    assert_cases(pool, share(conformance::cases())).await;
}

pub async fn assert_conforms(pool: Arc<dyn Pool>) {
    assert_cases(pool, conformance::cases()).await;
}

async fn assert_cases(pool: Arc<dyn Pool>, cases: Vec<Case>) {
    let scratch = path("scratch");
    pool.mkdir(&scratch, &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
    let report = conformance::run_cases(Arc::clone(&pool), scratch.clone(), cases).await;
    assert!(report.passed(), "{report}");
    // Every case has cleaned up, including the pool's own temporary files.
    pool.remove_dir(&scratch).await.unwrap();
}
