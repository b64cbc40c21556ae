//! Changes that the catalog cannot record, as on a full device. Such a change fails and leaves everything as it was, and
//! it succeeds when it is made again.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_backends::decorators::FaultMoment;
use forebay_backends::{ErrorKind, Result, Time};
use forebay_engine::{Change, Ino, Options, Overlay, Policy, SetTime};
use forebay_tests::engine::*;

/// Makes a change again until it succeeds. Only one write fails.
async fn again(what: &str, change: impl AsyncFn() -> Result<()>) {
    for _ in 0..2 {
        match change().await {
            Ok(()) => return,
            Err(error) => assert!(error.is(ErrorKind::NoSpace), "{what}: {error}"),
        }
    }
    change().await.unwrap_or_else(|error| panic!("{what}: {error}"));
}

async fn unlink(overlay: &Overlay, name: &str) -> Result<()> {
    match overlay.unlink(Ino::ROOT, name.as_bytes()).await {
        Err(error) if error.is(ErrorKind::NotFound) => Ok(()),
        done => done,
    }
}

async fn renamed(overlay: &Overlay, from: &str, to: &str) -> Result<()> {
    match rename(overlay, from, to).await {
        // It was done, and a later step failed.
        Err(error) if error.is(ErrorKind::NotFound) => overlay.resolve(&pool_path(to)).await.map(drop),
        done => done,
    }
}

/// SEMANTICS 118: "An operation that fails because the catalog cannot record it can be repeated. It leaves no state that
/// the catalog does not have."
#[tokio::test(flavor = "multi_thread")]
async fn whichever_write_fails_the_change_can_be_made_again() {
    let right = pairs(&[("/a", "new"), ("/d/", ""), ("/d/made", "made"), ("/e", "theirs"), ("/moved", "B")]);
    for number in 1.. {
        let fixture = Fixture::new();
        for (name, content) in [("a", "old"), ("b", "B"), ("c", "C"), ("e", "ours")] {
            fixture.put(name, content.as_bytes()).await;
        }
        fixture.mkdir("d").await;
        let overlay = fixture.open().await;
        fixture.catalog_faults.fail_write(number);
        again("list", async || overlay.read_dir(Ino::ROOT).await.map(drop)).await;
        again("read", async || read(&overlay, "e").await.map(drop)).await;
        again("write a", async || write(&overlay, "a", "new").await).await;
        again("write d/made", async || write(&overlay, "d/made", "made").await).await;
        again("rename", async || renamed(&overlay, "b", "moved").await).await;
        again("remove", async || unlink(&overlay, "c").await).await;
        fixture.put("e", b"theirs").await;
        again("read again", async || read(&overlay, "e").await.map(|now| assert_eq!(now, "theirs"))).await;
        flush(&overlay).await;
        let has_failed = fixture.catalog_faults.has_failed();
        fixture.catalog_faults.fail_write(0);
        flushed(&overlay).await;
        assert_eq!(fixture.pooled(), right, "write {number} failed");
        assert_eq!(overlay.status().await.conflicts, Vec::<String>::new(), "write {number} failed");
        for (path, content) in right.iter().filter(|(path, _)| !path.ends_with('/')) {
            assert_eq!(read(&overlay, path.trim_start_matches('/')).await.unwrap(), *content, "write {number} failed");
        }
        if !has_failed {
            assert!(number > 10, "only {number} writes");
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn set_id_bits_go_although_their_removal_could_not_be_recorded_at_first() {
    let fixture = Fixture::new();
    fixture.put("a", b"program").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    let content = overlay.open_file(ino, RDWR).await.unwrap().resident.expect("it is resident");
    let set_id = Change { mode: Some(0o4755), ..Change::default() };
    overlay.setattr(ino, &set_id, CALLER).await.unwrap();
    content.file.write_all_at(b"other", 0).unwrap();
    fixture.catalog_faults.fail_all();
    for _ in 0..2 {
        assert_eq!(overlay.getattr(ino).await.unwrap().0.mode & 0o7777, 0o755, "the bits are not shown");
    }
    fixture.catalog_faults.fail_write(0);
    assert_eq!(overlay.getattr(ino).await.unwrap().0.mode & 0o7777, 0o755);
    close(&overlay, ino).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_goes_on_if_its_removal_by_another_client_was_not_recorded_and_was_undone() {
    let fixture = Fixture::new();
    fixture.put("a", b"0123456789").await;
    let policy = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\nwhole-file = \"4B\"\n[pool]\nretry = \"0s\"\n";
    let overlay = Overlay::open(Options { policy: Policy::parse(policy).unwrap(), ..fixture.options() }).await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    // The pool says for a moment that it does not have the file.
    fixture.fault.set_error(ErrorKind::NotFound);
    fixture.fault.crash_at(1, FaultMoment::Before);
    fixture.catalog_faults.fail_all();
    assert!(refused(overlay.resolve(&pool_path("a")).await).is(ErrorKind::NoSpace));
    fixture.catalog_faults.fail_write(0);
    fixture.fault.heal();
    assert_eq!(find(&overlay, "a").await, ino);
    assert_eq!(overlay.read(ino, 0, 10).await.unwrap(), Bytes::from_static(b"0123456789"));
    overlay.write(ino, 0, Bytes::from_static(b"new")).await.unwrap();
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "a").unwrap(), b"new3456789");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_could_not_be_recorded_is_not_shown_and_removes_no_set_id_bits() {
    let fixture = Fixture::new();
    fixture.put("a", b"program").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    let set_id = Change { mode: Some(0o4755), ..Change::default() };
    let before = overlay.setattr(ino, &set_id, CALLER).await.unwrap().0;
    let old = Change { mtime: Some(SetTime::At(Time { secs: 1000, nanos: 0 })), ..Change::default() };
    fixture.catalog_faults.fail_all();
    assert!(refused(overlay.setattr(ino, &old, CALLER).await).is(ErrorKind::NoSpace));
    fixture.catalog_faults.fail_write(0);
    let after = overlay.getattr(ino).await.unwrap().0;
    assert_eq!((after.mode, after.mtime), (before.mode, before.mtime));
    let set = overlay.setattr(ino, &old, CALLER).await.unwrap().0;
    assert_eq!((set.mode & 0o7777, set.mtime.secs), (0o4755, 1000));
    assert_eq!(overlay.getattr(ino).await.unwrap().0.mode & 0o7777, 0o4755);
    close(&overlay, ino).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_content_file_is_left_of_a_change_that_could_not_be_recorded() {
    let fixture = Fixture::new();
    for name in ["a", "b"] {
        fixture.put(name, b"content").await;
    }
    let overlay = fixture.open().await;
    let (a, b) = (find(&overlay, "a").await, find(&overlay, "b").await);
    fixture.catalog_faults.fail_all();
    refused(overlay.create(Ino::ROOT, b"new", 0o644, 0, RDWR, CALLER).await);
    refused(overlay.open_file(a, RDWR | libc::O_TRUNC).await);
    // Read from the pool, and not kept.
    overlay.open_file(b, RDONLY).await.unwrap();
    assert_eq!(overlay.read(b, 0, 10).await.unwrap(), Bytes::from_static(b"content"));
    overlay.release(b, RDONLY);
    fixture.catalog_faults.fail_write(0);
    overlay.shutdown().await.unwrap();
    let content_files = || {
        let dirs = std::fs::read_dir(fixture.fast.path().join("content")).unwrap();
        dirs.map(|dir| std::fs::read_dir(dir.unwrap().path()).unwrap().count()).sum::<usize>()
    };
    let begun = Instant::now();
    while content_files() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{} content files are left", content_files());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The scan after the start counts content, and removes what no name leads to.
#[tokio::test(flavor = "multi_thread")]
async fn the_scan_after_the_start_does_not_end_because_of_one_write() {
    const ORPHAN_BYTES: usize = 77_777;
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    for (name, bytes) in [("grown", 100_000), ("orphan", ORPHAN_BYTES)] {
        let ino = create(&overlay, name).await;
        put(&overlay, ino, 0, &vec![1; bytes]).await;
    }
    overlay.unlink(Ino::ROOT, b"orphan").await.unwrap();
    let has_orphan = |fast: &Path| {
        let dirs = std::fs::read_dir(fast.join("content")).unwrap();
        let mut files = dirs.flat_map(|dir| std::fs::read_dir(dir.unwrap().path()).unwrap());
        files.any(|file| file.unwrap().metadata().is_ok_and(|found| found.len() == ORPHAN_BYTES as u64))
    };
    assert!(has_orphan(fixture.fast.path()));
    for number in 1.. {
        // As after a kill, with programs that have ended.
        let place = tempfile::tempdir().unwrap();
        let fast = place.path().join("fast");
        image(fixture.fast.path(), &fast);
        fixture.catalog_faults.fail_write(number);
        let opened = Overlay::open(Options { fast: vec![fast.clone()], ..fixture.options() }).await;
        if let Ok(again) = opened {
            let begun = Instant::now();
            while has_orphan(&fast) {
                assert!(begun.elapsed() < Duration::from_secs(30), "write {number} failed, and the scan ended");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let is_beyond = !fixture.catalog_faults.has_failed();
            fixture.catalog_faults.fail_write(0);
            again.shutdown().await.unwrap();
            if is_beyond {
                break;
            }
        }
    }
    overlay.shutdown().await.unwrap();
}
