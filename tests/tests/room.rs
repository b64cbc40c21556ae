//! What counts when space is requested, in the fast pool and in the pool.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_api::operator::ContentState;
use forebay_backends::{ErrorKind, Pool, PoolPath, Time};
use forebay_engine::{Change, Ino, Options, Overlay, Policy, SetTime};
use forebay_tests::engine::*;
use forebay_tests::process::wait_until;
use rustix::fs::{IFlags, ioctl_getflags};

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

/// A request for space that cannot be met must not cost the node its cache.
#[tokio::test(flavor = "multi_thread")]
async fn space_that_is_asked_for_in_vain_evicts_nothing() {
    const KIB: u64 = 1 << 10;
    let fixture = Fixture::new();
    fixture.put("a", &vec![1; 1 << 20]).await;
    let overlay = fixture.limited(4 << 20).await;
    read(&overlay, "a").await.unwrap();
    write(&overlay, "b", &"b".repeat(1 << 20)).await.unwrap();
    let ino = find(&overlay, "b").await;
    let is_resident = async |overlay: &Overlay| {
        let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
        listed.iter().any(|file| file.path == "/a" && file.state == ContentState::Resident)
    };
    let ask = async |bytes: u64| overlay.fallocate(ino, 0, 1 << 20, bytes).await;
    // More than the limit, and more than the eviction of all clean content would free beside the dirty content.
    for bytes in [1 << 50, 3500 * KIB] {
        let refused = ask(bytes).await.unwrap_err();
        assert!(refused.is(ErrorKind::NoSpace), "{refused}");
        assert!(is_resident(&overlay).await, "{bytes} bytes: {refused}");
    }
    ask(2500 * KIB).await.unwrap();
    assert!(!is_resident(&overlay).await);
}

/// Waits until a content file of the fast pool is immutable: writers that the daemon does not see are stopped.
fn wait_until_writers_are_stopped(content: &Path) {
    let is_immutable = |file: &Path| {
        let flags = ioctl_getflags(File::open(file).unwrap()).unwrap();
        flags.contains(IFlags::IMMUTABLE)
    };
    wait_until("a content file is immutable", || {
        let dirs = fs::read_dir(content).unwrap();
        let mut files = dirs.flat_map(|dir| fs::read_dir(dir.unwrap().path()).unwrap());
        files.any(|file| is_immutable(&file.unwrap().path()))
    });
}

/// A program that makes a file smaller needs no room, and frees some.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_writers_are_stopped_can_be_truncated() {
    let fixture = Fixture::new();
    // Less than what is left free for writers that the daemon does not see.
    let overlay = fixture.limited(4 << 20).await;
    for size in [0, 5, 9 << 30] {
        write(&overlay, "a", "some bytes").await.unwrap();
        let ino = find(&overlay, "a").await;
        // The kernel may write it past the daemon.
        overlay.open_inherited(ino, libc::O_RDWR).await.unwrap();
        wait_until_writers_are_stopped(&fixture.fast.path().join("content"));
        let change = Change { size: Some(size), ..Change::default() };
        let (attr, _) = overlay.setattr(ino, &change, CALLER).await.unwrap();
        assert_eq!(attr.size, size);
        overlay.close(ino, true).await.unwrap();
    }
}

/// `tar`, `rsync` and `cp -p` set the times of a file that they still have open.
#[tokio::test(flavor = "multi_thread")]
async fn times_of_a_file_whose_writers_are_stopped_can_be_set() {
    let fixture = Fixture::new();
    let overlay = fixture.limited(4 << 20).await;
    write(&overlay, "a", &"a".repeat(1 << 20)).await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.open_inherited(ino, libc::O_RDWR).await.unwrap();
    let contents = fixture.fast.path().join("content");
    wait_until_writers_are_stopped(&contents);
    let time = Time { secs: 1_000_000_000, nanos: 7 };
    let change = Change { mtime: Some(SetTime::At(time)), ..Change::default() };
    let (attr, _) = overlay.setattr(ino, &change, CALLER).await.unwrap();
    assert_eq!(attr.mtime, time);
    wait_until_writers_are_stopped(&contents);
    overlay.close(ino, true).await.unwrap();
    assert_eq!(overlay.getattr(ino).await.unwrap().0.mtime, time);
}

/// The same for a program that punches a hole.
#[tokio::test(flavor = "multi_thread")]
async fn a_hole_can_be_punched_into_a_file_whose_writers_are_stopped() {
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let fixture = Fixture::new();
    let overlay = fixture.limited(4 << 20).await;
    write(&overlay, "a", &"a".repeat(1 << 20)).await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.open_inherited(ino, libc::O_RDWR).await.unwrap();
    wait_until_writers_are_stopped(&fixture.fast.path().join("content"));
    overlay.fallocate(ino, PUNCH, 0, 1 << 19).await.unwrap();
    let (attr, _) = overlay.getattr(ino).await.unwrap();
    assert_eq!((attr.size, attr.blocks * 512), (1 << 20, 1 << 19));
    assert_eq!(overlay.seek(ino, 0, forebay_engine::Seek::Data).await.unwrap(), 1 << 19);
    overlay.close(ino, true).await.unwrap();
}

/// The victim of one request is not free yet when the other requests compute how much room there is.
#[tokio::test(flavor = "multi_thread")]
async fn several_that_need_the_room_of_one_file_at_once_all_get_room() {
    const SMALL: [&str; 3] = ["x", "y", "z"];
    let fixture = Fixture::new();
    fixture.put("large", &vec![1; 3 << 20]).await;
    for name in SMALL {
        fixture.put(name, &vec![2; 1 << 20]).await;
    }
    let overlay = std::sync::Arc::new(fixture.limited(4 << 20).await);
    for round in 0..100 {
        read(&overlay, "large").await.unwrap();
        let opens = SMALL.map(|name| {
            let overlay = overlay.clone();
            tokio::spawn(async move {
                let ino = find(&overlay, name).await;
                (name, ino, overlay.open_file(ino, RDONLY).await.unwrap().resident.is_some())
            })
        });
        // What is open is not evicted.
        for open in futures::future::join_all(opens).await {
            let (name, ino, is_resident) = open.unwrap();
            assert!(is_resident, "round {round}: {name} got no room");
            overlay.release(ino, RDONLY);
        }
    }
}

/// SEMANTICS 45: "`df` shows the free space of the pool, less the bytes that are not flushed yet."
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_flushed_is_taken_from_the_room_in_the_pool() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let text = "x".repeat(3 << 20);
    write(&overlay, "a", &text).await.unwrap();
    let pool = fixture.memory.space().await.unwrap();
    let shown = overlay.statfs(Ino::ROOT).await.unwrap();
    assert!(pool.free_bytes - shown.free_bytes >= 3 << 20, "{pool:?}, {shown:?}");
    assert!(pool.available_bytes - shown.available_bytes >= 3 << 20, "{pool:?}, {shown:?}");
    assert_eq!(shown.total_bytes, pool.total_bytes);
}

/// While a writer waits for room, few large files are sent at a time, so that the first of them ends early.
#[tokio::test(flavor = "multi_thread")]
async fn few_large_files_are_sent_at_a_time_while_a_writer_waits_for_room() {
    let fixture = Fixture::new();
    // Nothing but the flush asks the pool while it hangs.
    let policy = Policy::parse("[default]\nflush = \"idle:1h\"\nmetadata-ttl = \"1h\"\n").unwrap();
    let overlay = Overlay::open(Options { limit_bytes: Some(78 << 20), policy, ..fixture.options() }).await.unwrap();
    let content = "x".repeat(8 << 20);
    for file in 0..9 {
        write(&overlay, &format!("f{file}"), &content).await.unwrap();
    }
    fixture.fault.set_hanging(true);
    let writer = tokio::spawn(async move {
        write(&overlay, "last", &content).await.unwrap();
        overlay
    });
    let in_flight = || fixture.metrics.snapshot().in_flight;
    let begun = Instant::now();
    while in_flight() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60) && !writer.is_finished());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(in_flight(), 2);
    fixture.fault.set_hanging(false);
    let overlay = writer.await.unwrap();
    flushed(&overlay).await;
    assert_eq!(fixture.pooled().len(), 10);
}
