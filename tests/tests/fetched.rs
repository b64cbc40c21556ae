//! Bytes that the fast pool does not take, or does not have any more, come from the pool.

use forebay_tests::engine::*;

const MIB: u64 = 1 << 20;

/// No byte of it is zero.
fn content(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| ((at >> 12) % 251 + 1) as u8).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_fast_pool_refuses_is_read_from_the_pool() {
    for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG] {
        let fixture = Fixture::new();
        let files = [("small", content(100_000)), ("large", content(8 * MIB))];
        for (name, bytes) in &files {
            fixture.put(name, bytes).await;
        }
        let overlay = fixture.open().await;
        for fails_with in [errno, 0] {
            fixture.content_faults.fail_writes(fails_with);
            for (name, bytes) in &files {
                let ino = find(&overlay, name).await;
                overlay.open_file(ino, RDONLY).await.unwrap_or_else(|e| panic!("{name}, errno {errno}: {e}"));
                let is = overlay.read(ino, 0, 64 << 20).await.unwrap_or_else(|e| panic!("{name}, errno {errno}: {e}"));
                assert!(is == *bytes, "{name}, errno {errno}");
                overlay.release(ino, RDONLY);
            }
        }
    }
}
