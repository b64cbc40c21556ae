//! Code that the tests of this crate share.
#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::Arc;

use bytes::Bytes;
use forebay_backends::{Attrs, Piece, Pieces, Pool, PoolPath, Time, conformance};
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

pub async fn assert_conforms(pool: Arc<dyn Pool>) {
    let scratch = path("scratch");
    pool.mkdir(&scratch, &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
    let report = conformance::run(Arc::clone(&pool), scratch.clone()).await;
    assert!(report.passed(), "{report}");
    // Every case has cleaned up, including the pool's own temporary files.
    pool.remove_dir(&scratch).await.unwrap();
}
