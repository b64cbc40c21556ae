//! What is counted where room is asked for, in the fast pool and in the pool.

use forebay_backends::Pool;
use forebay_engine::Change;
use forebay_tests::engine::*;

/// SEMANTICS 44: "Where the daemon computes how much space is left, a dirty file counts with its blocks."
#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_file_that_is_not_flushed_takes_no_room_from_what_is_staged() {
    let fixture = Fixture::new();
    fixture.put("a", &vec![1; 3 << 20]).await;
    let overlay = fixture.open().await;
    write(&overlay, "sparse", "some bytes").await.unwrap();
    let ino = find(&overlay, "sparse").await;
    let change = Change { size: Some(6 << 30), ..Change::default() };
    overlay.setattr(ino, &change, CALLER).await.unwrap();
    let (done, _) = stage(&overlay, "a").await;
    assert_eq!(done.failed, 0, "{:?}", done.message);
}

/// SEMANTICS 45: "`df` shows the free space of the pool, less the bytes that are not flushed yet."
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_flushed_is_taken_from_the_room_in_the_pool() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let text = "x".repeat(3 << 20);
    write(&overlay, "a", &text).await.unwrap();
    let pool = fixture.memory.space().await.unwrap();
    let shown = overlay.statfs().await.unwrap();
    assert!(pool.free_bytes - shown.free_bytes >= 3 << 20, "{pool:?}, {shown:?}");
    assert!(pool.available_bytes - shown.available_bytes >= 3 << 20, "{pool:?}, {shown:?}");
    assert_eq!(shown.total_bytes, pool.total_bytes);
}
