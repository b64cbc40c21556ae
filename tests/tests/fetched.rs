//! Bytes that the fast pool does not take, or does not have any more, come from the pool.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;

use forebay_backends::decorators::{CallKind, Odds};
use forebay_backends::dir::DirPool;
use forebay_backends::{ErrorKind, Side};
use forebay_engine::{Ino, Options, Overlay};
use forebay_tests::engine::*;

const MIB: u64 = 1 << 20;

/// No byte of it is zero.
fn content(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| ((at >> 12) % 251 + 1) as u8).collect()
}

async fn read_at(overlay: &Overlay, ino: Ino, offset: u64, len: u64) -> Vec<u8> {
    overlay.read(ino, offset, len as u32).await.unwrap().to_vec()
}

/// Returns the content files that are there.
fn content_files(fixture: &Fixture) -> Vec<PathBuf> {
    let dirs = fs::read_dir(fixture.fast.path().join("content")).unwrap();
    let files = dirs.flat_map(|dir| fs::read_dir(dir.unwrap().path()).unwrap());
    files.map(|file| file.unwrap().path()).collect()
}

/// Cuts all content files that have bytes.
fn cut(fixture: &Fixture) {
    let files = content_files(fixture).into_iter().map(|path| File::options().write(true).open(path).unwrap());
    let with_bytes: Vec<_> = files.filter(|file| file.metadata().unwrap().len() > 0).collect();
    assert_eq!(with_bytes.len(), 1);
    with_bytes[0].set_len(1000).unwrap();
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Cut,
    Removed,
    /// While the daemon has it open.
    CutWhileOpen,
}

/// SEMANTICS 7: "If a content file is shorter than its record says, the daemon discards it and fetches the bytes again,
/// where the pool has them."
#[tokio::test(flavor = "multi_thread")]
async fn a_partial_content_file_that_is_damaged_is_fetched_again() {
    let bytes = content(20 * MIB);
    let range = |offset: u64| &bytes[offset as usize..(offset + MIB) as usize];
    for damage in [Damage::Cut, Damage::Removed, Damage::CutWhileOpen] {
        // Fetched before the damage is read, another chunk would make a hole of it.
        for reads in [[8 * MIB, 16 * MIB], [16 * MIB, 8 * MIB]] {
            let fixture = Fixture::new();
            fixture.put("a", &bytes).await;
            let mut overlay = fixture.open().await;
            let mut ino = find(&overlay, "a").await;
            overlay.open_file(ino, RDONLY).await.unwrap();
            assert!(read_at(&overlay, ino, 8 * MIB, MIB).await == range(8 * MIB));
            if damage == Damage::CutWhileOpen {
                cut(&fixture);
            } else {
                overlay.release(ino, RDONLY);
                overlay.shutdown().await.unwrap();
                drop(overlay);
                match damage {
                    Damage::Removed => {
                        content_files(&fixture).into_iter().for_each(|path| fs::remove_file(path).unwrap())
                    }
                    _ => cut(&fixture),
                }
                overlay = fixture.open().await;
                ino = find(&overlay, "a").await;
                overlay.open_file(ino, RDONLY).await.unwrap();
            }
            for offset in reads {
                assert!(read_at(&overlay, ino, offset, MIB).await == range(offset), "{damage:?}, {reads:?}");
            }
            assert!(read_at(&overlay, ino, 0, 20 * MIB).await == bytes, "{damage:?}, {reads:?}");
            overlay.release(ino, RDONLY);
        }
    }
}

/// SEMANTICS 7: "If a content file is shorter than its record says, the daemon discards it and fetches the bytes again,
/// where the pool has them."
#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_whose_content_file_is_damaged_is_fetched_again() {
    for copies in [false, true] {
        let fixture = Fixture::new();
        let bytes = content(100_000);
        fixture.put("a", &bytes).await;
        let overlay = fixture.open().await;
        let ino = find(&overlay, "a").await;
        overlay.open_file(ino, RDONLY).await.unwrap();
        assert!(read_at(&overlay, ino, 0, MIB).await == bytes);
        cut(&fixture);
        if copies {
            let copy = create(&overlay, "copy").await;
            let mut at = 0;
            while at < bytes.len() as u64 {
                let copied = overlay.copy_range(ino, at, copy, at, bytes.len() as u64 - at).await.unwrap();
                assert!(copied > 0, "at {at}");
                at += copied;
            }
            assert!(read_at(&overlay, copy, 0, MIB).await == bytes);
            close(&overlay, copy).await;
        }
        assert!(read_at(&overlay, ino, 50_000, MIB).await == bytes[50_000..]);
        overlay.release(ino, RDONLY);
    }
}

/// The catalog has 32 bits for the number of a chunk.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_beyond_4_pib_are_not_taken_for_others() {
    // Other file systems have no files of this size.
    let (pool_dir, fast) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let far = 4 << 50;
    let file = File::create(pool_dir.path().join("a")).unwrap();
    file.set_len(far + MIB).unwrap();
    for (bytes, at) in [(b"first", 0), (b"after", far)] {
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
    }
    let fixture = Fixture { fast, ..Fixture::new() };
    let pool = Arc::new(DirPool::open(pool_dir.path()).unwrap());
    let options = || Options { pool: pool.clone(), limit_bytes: Some(16 * MIB), ..fixture.options() };
    for _ in 0..2 {
        let overlay = opened(options).await;
        let ino = find(&overlay, "a").await;
        overlay.open_file(ino, RDONLY).await.unwrap();
        assert_eq!(read_at(&overlay, ino, far, 5).await, b"after");
        assert_eq!(read_at(&overlay, ino, far + MIB - 5, 10).await, [0; 5]);
        overlay.release(ino, RDONLY);
        overlay.shutdown().await.unwrap();
        drop(overlay);
        let overlay = opened(options).await;
        let ino = find(&overlay, "a").await;
        overlay.open_file(ino, RDONLY).await.unwrap();
        assert_eq!(read_at(&overlay, ino, 0, 5).await, b"first");
        overlay.release(ino, RDONLY);
        overlay.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_what_the_pool_does_not_permit_to_read_fails_with_that_error() {
    let fixture = Fixture::new();
    fixture.put("a", &content(3 * MIB)).await;
    let overlay = Overlay::open(fixture.options()).await.unwrap();
    let ino = find(&overlay, "a").await;
    fixture.fault.set_error(ErrorKind::NotPermitted);
    fixture.fault.set_odds(CallKind::Read, Odds { before: 1.0, after: 0.0 });
    let before = fixture.fault.calls();
    let error = overlay.fallocate(ino, 0, 0, 4 * MIB).await.unwrap_err();
    assert!(error.is(ErrorKind::NotPermitted) && error.side() == Side::Pool, "{error}");
    let calls = fixture.fault.calls() - before;
    assert!((1..20).contains(&calls), "{calls} calls");
}
