//! The promises of the engine, one by one, without a mount. `model.rs` tests them with random operations.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::operator::{ContentState, Difference, ListedPath, PoolState};
use forebay_backends::decorators::{CallKind, CallLimits, Deadline, FaultMoment, Odds};
use forebay_backends::{ErrorKind, Expected, FileKind, Pool, PoolPath, RenameMode, Time};
use forebay_engine::{Change, Ino, Options, Overlay, Policy, SetTime};
use forebay_tests::engine::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_keeps_both_and_is_reported() {
    let fixture = Fixture::new();
    fixture.put("a", b"old").await;
    let overlay = fixture.open().await;
    write(&overlay, "a", "ours").await.unwrap();
    fixture.put("a", b"theirs").await;
    flushed(&overlay).await;
    let pooled = fixture.pooled();
    assert_eq!(pooled[0], ("/a".into(), "theirs".into()));
    assert!(pooled[1].0.starts_with("/a.conflict-here-"), "{pooled:?}");
    assert_eq!(pooled[1].1, "ours");
    assert_eq!(overlay.status().await.conflicts.len(), 1);
    assert_eq!(read(&overlay, "a").await.unwrap(), "theirs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_over_hard_links_ends() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    write(&overlay, "a", "old").await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.link(ino, Ino::ROOT, b"b").await.unwrap();
    flushed(&overlay).await;
    write(&overlay, "a", "ours").await.unwrap();
    fixture.memory.write_at(&pool_path("b"), 0, Bytes::from_static(b"theirs")).await.unwrap();
    flushed(&overlay).await;
    let contents: Vec<String> = fixture.pooled().into_iter().map(|(_, content)| content).collect();
    assert_eq!(contents, ["theirs", "ours", "theirs", "ours"], "{:?}", fixture.pooled());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_client_made_is_shown_after_a_conflict_however_fresh_the_listing_is() {
    let fixture = Fixture::new();
    let policy = Policy::parse("[default]\nflush = \"manual\"\nmetadata-ttl = \"1h\"\n").unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    overlay.read_dir(Ino::ROOT).await.unwrap();
    fixture.mkdir("a").await;
    write(&overlay, "a", "ours").await.unwrap();
    flushed(&overlay).await;
    let listed = overlay.read_dir(Ino::ROOT).await.unwrap();
    assert_eq!(listed.entries.len(), 2);
    assert_eq!(listed.entries[0].kind, FileKind::Directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_was_lost_makes_no_conflict() {
    // Each run loses the answer to another call of the flush.
    for call in 1..12 {
        let fixture = Fixture::new();
        fixture.put("a", b"old").await;
        fixture.mkdir("d").await;
        let overlay = fixture.open().await;
        write(&overlay, "a", "new").await.unwrap();
        write(&overlay, "d/b", "made").await.unwrap();
        rename(&overlay, "d", "e").await.unwrap();
        fixture.fault.fail_call(call, FaultMoment::After);
        flush(&overlay).await;
        fixture.fault.heal();
        flushed(&overlay).await;
        assert_eq!(overlay.status().await.conflicts, Vec::<String>::new(), "call {call}");
        assert_eq!(fixture.pooled(), pairs(&[("/a", "new"), ("/e/", ""), ("/e/b", "made")]), "call {call}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_during_a_flush_makes_no_conflict() {
    for call in 1..12 {
        for moment in [FaultMoment::Before, FaultMoment::After] {
            let mut fixture = Fixture::new();
            fixture.put("a", b"old").await;
            fixture.put("b", b"moved").await;
            let overlay = fixture.open().await;
            write(&overlay, "a", "new").await.unwrap();
            rename(&overlay, "b", "c").await.unwrap();
            write(&overlay, "d", "made").await.unwrap();
            fixture.fault.crash_at(call, moment);
            flush(&overlay).await;
            let after = tempfile::tempdir().unwrap();
            image(fixture.fast.path(), after.path());
            overlay.shutdown().await.unwrap();
            fixture.fast = after;
            fixture.fault.heal();
            let overlay = fixture.open().await;
            assert_eq!(read(&overlay, "a").await.unwrap(), "new");
            assert_eq!(read(&overlay, "c").await.unwrap(), "moved");
            flushed(&overlay).await;
            assert_eq!(overlay.status().await.conflicts, Vec::<String>::new(), "call {call} {moment:?}");
            assert_eq!(fixture.pooled(), pairs(&[("/a", "new"), ("/c", "moved"), ("/d", "made")]));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_move_in_a_circle_arrive() {
    let fixture = Fixture::new();
    for (name, content) in [("a", "A"), ("b", "B"), ("c", "C")] {
        fixture.put(name, content.as_bytes()).await;
        fixture.mkdir(&format!("d{name}")).await;
        fixture.put(&format!("d{name}/in"), content.as_bytes()).await;
    }
    let overlay = fixture.open().await;
    for prefix in ["", "d"] {
        for (from, to) in [("c", "x"), ("b", "c"), ("a", "b"), ("x", "a")] {
            rename(&overlay, &format!("{prefix}{from}"), &format!("{prefix}{to}")).await.unwrap();
        }
    }
    flushed(&overlay).await;
    let right = [
        ("/a", "C"),
        ("/b", "A"),
        ("/c", "B"),
        ("/da/", ""),
        ("/da/in", "C"),
        ("/db/", ""),
        ("/db/in", "A"),
        ("/dc/", ""),
        ("/dc/in", "B"),
    ];
    assert_eq!(fixture.pooled(), pairs(&right));
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_changes_places_with_its_parent() {
    let fixture = Fixture::new();
    fixture.mkdir("p").await;
    fixture.mkdir("p/c").await;
    fixture.put("p/f", b"of the parent").await;
    fixture.put("p/c/g", b"of the child").await;
    let overlay = fixture.open().await;
    rename(&overlay, "p/c", "c").await.unwrap();
    rename(&overlay, "p", "c/p").await.unwrap();
    rename(&overlay, "c", "q").await.unwrap();
    rename(&overlay, "q/p", "q/c").await.unwrap();
    rename(&overlay, "q", "p").await.unwrap();
    flushed(&overlay).await;
    let right = [("/p/", ""), ("/p/c/", ""), ("/p/c/f", "of the parent"), ("/p/g", "of the child")];
    assert_eq!(fixture.pooled(), pairs(&right));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_takes_the_name_of_a_file_that_moved_into_it() {
    let fixture = Fixture::new();
    fixture.put("a", b"file").await;
    fixture.mkdir("b").await;
    let overlay = fixture.open().await;
    rename(&overlay, "a", "b/a").await.unwrap();
    rename(&overlay, "b", "a").await.unwrap();
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a/", ""), ("/a/a", "file")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_and_removed_never_reaches_the_pool() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    for number in 0..50 {
        write(&overlay, &format!("d/tmp{number}"), "scratch").await.unwrap();
        rename(&overlay, &format!("d/tmp{number}"), "d/again").await.unwrap();
    }
    let dir = find(&overlay, "d").await;
    overlay.unlink(dir, b"again").await.unwrap();
    overlay.rmdir(Ino::ROOT, b"d").await.unwrap();
    flushed(&overlay).await;
    let calls = fixture.metrics.snapshot();
    for kind in [CallKind::Put, CallKind::Mkdir, CallKind::Remove, CallKind::RemoveDir, CallKind::Rename] {
        assert_eq!(calls.of(kind).count, 0, "{kind:?}");
    }
    assert_eq!(calls.bytes_written(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn hard_links_survive_a_flush_and_are_recognised_from_the_pool() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    write(&overlay, "a", "one").await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.link(ino, Ino::ROOT, b"b").await.unwrap();
    flushed(&overlay).await;
    write(&overlay, "b", "two").await.unwrap();
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a", "two"), ("/b", "two")]));
    assert!(fixture.memory.snapshot().values().all(|e| e.nlink == 2));
    overlay.shutdown().await.unwrap();
    // Another node, which has never seen the files.
    let other = tempfile::tempdir().unwrap();
    let options = Options { fast: vec![other.path().to_owned()], ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    overlay.read_dir(Ino::ROOT).await.unwrap();
    let ino = find(&overlay, "a").await;
    assert_eq!(ino, find(&overlay, "b").await);
    assert_eq!(overlay.getattr(ino).await.unwrap().0.nlink, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_pool_is_gone_what_is_here_is_read_and_writes_are_absorbed() {
    let fixture = Fixture::new();
    fixture.put("a", b"here").await;
    fixture.put("b", b"not here").await;
    let overlay = fixture.open().await;
    overlay.read_dir(Ino::ROOT).await.unwrap();
    assert_eq!(read(&overlay, "a").await.unwrap(), "here");
    fixture.fault.set_down(true);
    assert_eq!(read(&overlay, "a").await.unwrap(), "here");
    write(&overlay, "c", "absorbed").await.unwrap();
    write(&overlay, "a", "newer").await.unwrap();
    assert_eq!(read(&overlay, "c").await.unwrap(), "absorbed");
    assert!(refused(read(&overlay, "b").await).is(ErrorKind::Unavailable));
    assert!(flush(&overlay).await.failed > 0);
    assert_eq!(overlay.status().await.pool_state, PoolState::Down);
    fixture.fault.set_down(false);
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a", "newer"), ("/b", "not here"), ("/c", "absorbed")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_hangs_does_not_hang_what_is_local() {
    let fixture = Fixture::new();
    fixture.put("a", b"here").await;
    fixture.put("b", b"not here").await;
    let brief = Duration::from_millis(1000);
    let limits = CallLimits { metadata: brief, data: brief, copies: brief, min_bytes_per_second: 1 << 30 };
    let pool = Arc::new(Deadline::new(fixture.fault.clone(), limits));
    let overlay = Overlay::open(Options { pool, ..fixture.options() }).await.unwrap();
    overlay.read_dir(Ino::ROOT).await.unwrap();
    assert_eq!(read(&overlay, "a").await.unwrap(), "here");
    fixture.fault.set_hanging(true);
    assert_eq!(read(&overlay, "a").await.unwrap(), "here");
    write(&overlay, "c", "absorbed").await.unwrap();
    let error =
        tokio::time::timeout(Duration::from_secs(60), read(&overlay, "b")).await.expect("an answer").unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable), "{error}");
    overlay.status().await;
    fixture.fault.set_hanging(false);
    flushed(&overlay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eviction_respects_leases_and_what_is_not_flushed() {
    let fixture = Fixture::new();
    for name in ["a", "b", "c"] {
        fixture.put(name, &vec![7; 1 << 20]).await;
    }
    let overlay = fixture.limited(4 << 20).await;
    assert_eq!(stage(&overlay, "a").await.0.failed, 0);
    write(&overlay, "d", &"d".repeat(1 << 20)).await.unwrap();
    // Only one of these fits beside `a` and `d`, so each read evicts the other one.
    for name in ["b", "c", "b", "c"] {
        assert_eq!(read(&overlay, name).await.unwrap().len(), 1 << 20);
    }
    evict(&overlay, false).await;
    let state = |listed: &[ListedPath], name: &str| listed.iter().find(|f| f.path == name).map(|f| f.state).unwrap();
    let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
    assert_eq!(state(&listed, "/a"), ContentState::Resident);
    assert_eq!(state(&listed, "/b"), ContentState::Absent);
    assert_eq!(state(&listed, "/d"), ContentState::Dirty);
    assert!(overlay.status().await.used_bytes <= 4 << 20);
    evict(&overlay, true).await;
    let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
    assert_eq!(state(&listed, "/a"), ContentState::Absent);
    assert_eq!(state(&listed, "/d"), ContentState::Dirty);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_does_not_fit_fails_and_passes_no_limit() {
    let fixture = Fixture::new();
    let overlay = fixture.limited(1 << 20).await;
    write(&overlay, "a", &"a".repeat(1 << 20)).await.unwrap();
    assert!(refused(write(&overlay, "b", "b").await).is(ErrorKind::NoSpace));
    assert!(overlay.status().await.used_bytes <= 1 << 20);
    flushed(&overlay).await;
    write(&overlay, "b", "b").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_write_into_a_small_fast_pool_evicts_nothing() {
    let fixture = Fixture::new();
    fixture.put("a", &[b'a'; 1 << 20]).await;
    let overlay = fixture.limited(100 << 20).await;
    assert_eq!(read(&overlay, "a").await.unwrap().len(), 1 << 20);
    write(&overlay, "b", "b").await.unwrap();
    let ino = find(&overlay, "b").await;
    overlay.open_file(ino, libc::O_RDWR).await.unwrap();
    // The daemon checks writers ten times a second, and more often if there is little room.
    tokio::time::sleep(Duration::from_millis(500)).await;
    overlay.release(ino, libc::O_RDWR);
    let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
    assert_eq!(listed.iter().find(|file| file.path == "/a").unwrap().state, ContentState::Resident);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_program_writes_past_the_daemon_before_there_is_room_and_room_is_made() {
    let fixture = Fixture::new();
    let overlay = fixture.limited(1250 << 20).await;
    for letter in 'b'..='s' {
        fixture.put(&letter.to_string(), &vec![7; 64 << 20]).await;
        assert_eq!(read(&overlay, &letter.to_string()).await.unwrap().len(), 64 << 20);
    }
    write(&overlay, "a", "a").await.unwrap();
    let ino = find(&overlay, "a").await;
    let past = async || {
        let opened = overlay.open_file(ino, libc::O_RDWR).await.unwrap();
        overlay.release(ino, libc::O_RDWR);
        opened.resident.is_some()
    };
    assert!(!past().await, "there is room for 98 MiB, and for 200 if something is evicted");
    let begun = Instant::now();
    while !past().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "no room is made");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_content_file_that_was_cut_short_is_fetched_again() {
    let fixture = Fixture::new();
    fixture.put("a", b"all of it").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    let opened = overlay.open_file(ino, RDONLY).await.unwrap();
    overlay.release(ino, RDONLY);
    opened.resident.unwrap().file.set_len(3).unwrap();
    assert_eq!(read(&overlay, "a").await.unwrap(), "all of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_finds_damaged_content_and_repair_fetches_it_again() {
    let fixture = Fixture::new();
    fixture.put("a", b"all of it").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    let opened = overlay.open_file(ino, RDONLY).await.unwrap();
    opened.resident.unwrap().file.write_all_at(b"not", 0).unwrap();
    overlay.release(ino, RDONLY);
    assert_eq!(overlay.fsck(false).await.unwrap().problems.len(), 1);
    assert_eq!(overlay.fsck(true).await.unwrap().repaired, 1);
    assert_eq!(read(&overlay, "a").await.unwrap(), "all of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_of_a_mount_in_use_finds_nothing_and_takes_nothing() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let checks = tokio::spawn({
        let (overlay, done) = (overlay.clone(), done.clone());
        async move {
            let mut checks = 0;
            while !done.load(std::sync::atomic::Ordering::SeqCst) {
                let report = overlay.fsck(true).await.unwrap();
                assert_eq!((report.problems, report.orphans_removed), (Vec::new(), 0));
                checks += 1;
            }
            checks
        }
    });
    for round in 0..400 {
        let (name, kept) = (format!("a{}", round % 7), format!("b{round}"));
        write(&overlay, &name, "first").await.unwrap();
        write(&overlay, &name, "second").await.unwrap();
        rename(&overlay, &name, &kept).await.unwrap();
        if round % 3 == 0 {
            overlay.unlink(Ino::ROOT, kept.as_bytes()).await.unwrap();
        }
        if round % 50 == 0 {
            flushed(&overlay).await;
        }
    }
    done.store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(checks.await.unwrap() > 1);
    for round in (0..400).filter(|round| round % 3 != 0) {
        assert_eq!(read(&overlay, &format!("b{round}")).await.unwrap(), "second");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fast_pool_of_another_pool_is_refused() {
    let fixture = Fixture::new();
    fixture.open().await.shutdown().await.unwrap();
    let other = tempfile::tempdir().unwrap();
    let pool = Arc::new(forebay_backends::dir::DirPool::open(other.path()).unwrap());
    let open = || async { refused(Overlay::open(Options { pool: pool.clone(), ..fixture.options() }).await) };
    let mut error = open().await;
    // The first engine releases the directory when its last task has ended.
    let begun = Instant::now();
    while error.is(ErrorKind::Busy) && begun.elapsed() < Duration::from_secs(60) {
        tokio::time::sleep(Duration::from_millis(10)).await;
        error = open().await;
    }
    assert!(error.is(ErrorKind::InvalidInput) && error.to_string().contains("memory:"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_engines_on_one_fast_pool_are_refused() {
    let fixture = Fixture::new();
    let _first = fixture.open().await;
    let error = refused(Overlay::open(fixture.options()).await);
    assert!(error.is(ErrorKind::Busy), "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_another_client_removed_after_a_local_rename_is_gone() {
    let fixture = Fixture::new();
    fixture.put("a", b"moved").await;
    let overlay = fixture.open().await;
    rename(&overlay, "a", "b").await.unwrap();
    fixture.memory.remove(&pool_path("a"), &Expected::Anything).await.unwrap();
    assert!(refused(read(&overlay, "b").await).is(ErrorKind::NotFound));
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_file_is_read_while_it_is_open_and_leaves_nothing() {
    let fixture = Fixture::new();
    fixture.put("a", b"pool's").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    overlay.unlink(Ino::ROOT, b"a").await.unwrap();
    overlay.write(ino, 0, Bytes::from_static(b"mine")).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), []);
    assert_eq!(overlay.read(ino, 0, 100).await.unwrap(), &b"mine's"[..]);
    overlay.release(ino, RDWR);
    assert!(overlay.fsck(true).await.unwrap().problems.is_empty());
    assert_eq!(overlay.status().await.used_bytes, 0);
}

/// SEMANTICS 37: "A change that the pool may lose in a power cut does not count as flushed"
#[tokio::test(flavor = "multi_thread")]
async fn what_the_pool_may_forget_when_it_loses_power_is_not_clean() {
    let mut fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("old", b"x").await;
    let overlay = fixture.open().await;
    write(&overlay, "d/a", "x").await.unwrap();
    rename(&overlay, "old", "new").await.unwrap();
    fixture.fault.set_odds(CallKind::SyncDir, Odds { before: 1.0, after: 0.0 });
    assert!(flush(&overlay).await.failed > 0);
    let dirty: Vec<_> = overlay.dirty().await.unwrap().into_iter().map(|d| d.path).collect();
    assert_eq!(dirty, ["/d/a", "/new", "/old"]);
    // After a kill, the next engine does not take what was sent for another client's change.
    let after = tempfile::tempdir().unwrap();
    image(fixture.fast.path(), after.path());
    overlay.shutdown().await.unwrap();
    drop(overlay);
    fixture.fast = after;
    fixture.fault.heal();
    let overlay = fixture.open().await;
    flushed(&overlay).await;
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    assert_eq!(fixture.pooled(), pairs(&[("/d/", ""), ("/d/a", "x"), ("/new", "x")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_uploaded_while_it_was_written_is_clean_with_the_last_close() {
    let fixture = Fixture::new();
    let policy = Policy::parse("[default]\nflush = \"on-close\"").unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    write(&overlay, "a", "x").await.unwrap();
    let listed = overlay.list_residency(&PoolPath::root(), true).await.unwrap();
    assert_eq!(listed[0].state, ContentState::Resident);
}

#[tokio::test(flavor = "multi_thread")]
async fn dirty_is_what_the_pool_lacks_and_not_what_somebody_has_open() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let ino = overlay.create(Ino::ROOT, b"a", 0o644, 0, RDWR, CALLER).await.unwrap().0.attr.ino;
    overlay.write(ino, 0, Bytes::from_static(b"x")).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(overlay.status().await.dirty_files, 0);
    overlay.write(ino, 1, Bytes::from_static(b"y")).await.unwrap();
    assert_eq!(overlay.dirty().await.unwrap()[0].what, Difference::Data);
    overlay.release(ino, RDWR);
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/a", "xy")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_are_not_given_to_an_object_of_another_kind_that_replaced_the_file() {
    let fixture = Fixture::new();
    fixture.put("a", b"x").await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    let change = Change { mode: Some(0o600), ..Change::default() };
    overlay.setattr(ino, &change, CALLER).await.unwrap();
    fixture.memory.remove(&pool_path("a"), &Expected::Anything).await.unwrap();
    fixture.mkdir("a").await;
    flushed(&overlay).await;
    assert_eq!(fixture.memory.stat(&pool_path("a")).await.unwrap().mode, 0o755);
    assert_eq!(overlay.getattr(find(&overlay, "a").await).await.unwrap().0.kind, FileKind::Directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_says_of_a_file_that_it_is_a_directory_now() {
    const TTL: Duration = Duration::from_secs(2);
    let fixture = Fixture::new();
    fixture.put("a", b"x").await;
    let policy = Policy::parse(&format!("[default]\nmetadata-ttl = \"{}s\"", TTL.as_secs())).unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let was = find(&overlay, "a").await;
    overlay.read_dir(Ino::ROOT).await.unwrap();
    fixture.memory.remove(&pool_path("a"), &Expected::Anything).await.unwrap();
    fixture.mkdir("a").await;
    tokio::time::sleep(TTL + Duration::from_millis(100)).await;
    overlay.read_dir(Ino::ROOT).await.unwrap();
    // A lookup does not ask the pool for a name that was just listed.
    let now = find(&overlay, "a").await;
    assert_ne!(now, was);
    assert_eq!(overlay.getattr(now).await.unwrap().0.kind, FileKind::Directory);
}

/// Writes a file with fixed times, so that size and times do not tell its versions apart.
async fn write_as_of_old(overlay: &Overlay, name: &str, content: &str) {
    write(overlay, name, content).await.unwrap();
    let time = SetTime::At(Time { secs: 1_000_000_000, nanos: 0 });
    let change = Change { atime: Some(time), mtime: Some(time), ..Change::default() };
    overlay.setattr(find(overlay, name).await, &change, CALLER).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_there_before_is_not_taken_for_what_was_sent() {
    for (call, removed) in (1..6).flat_map(|call| [(call, false), (call, true)]) {
        let fixture = Fixture::new();
        let overlay = fixture.open().await;
        write_as_of_old(&overlay, "a", "one").await;
        flushed(&overlay).await;
        if removed {
            overlay.unlink(Ino::ROOT, b"a").await.unwrap();
        }
        write_as_of_old(&overlay, "a", "two").await;
        // In each run, another call of the flush does not arrive.
        fixture.fault.fail_call(call, FaultMoment::Before);
        flush(&overlay).await;
        fixture.fault.heal();
        flushed(&overlay).await;
        assert_eq!(fixture.pooled(), pairs(&[("/a", "two")]), "removed first: {removed}, call {call}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_client_wrote_under_the_last_name_of_a_removed_file_stays() {
    let fixture = Fixture::new();
    fixture.put("a", b"old").await;
    fixture.put("b", b"other").await;
    let policy = Policy::parse("[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n").unwrap();
    let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
    let ino = find(&overlay, "a").await;
    overlay.link(ino, Ino::ROOT, b"d").await.unwrap();
    flushed(&overlay).await;
    overlay.unlink(Ino::ROOT, b"d").await.unwrap();
    // Another client writes to the file by its other name. The mount sees the new version.
    fixture.memory.write_at(&pool_path("d"), 0, Bytes::from_static(b"NEWS")).await.unwrap();
    assert_eq!(read(&overlay, "a").await.unwrap(), "NEWS");
    fixture.memory.rename(&pool_path("b"), &pool_path("a"), RenameMode::Replace).await.unwrap();
    assert_eq!(read(&overlay, "a").await.unwrap(), "other");
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), [("/a".into(), "other".into()), ("/d".into(), "NEWS".into())]);
    assert_eq!(read(&overlay, "d").await.unwrap(), "NEWS");
    assert_eq!(overlay.status().await.conflicts.len(), 1);
}

/// What the pool has under one name of an object says nothing about its other names.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_of_a_linked_file_that_another_client_replaces_or_removes_is_seen() {
    let fixture = Fixture::new();
    fixture.mkdir("unseen").await;
    fixture.put("a", b"first").await;
    for link in ["b", "c", "unseen/d", "unseen/e"] {
        fixture.memory.link(&pool_path("a"), &pool_path(link)).await.unwrap();
    }
    let overlay = fixture.open().await;
    for name in ["a", "b", "c"] {
        assert_eq!(read(&overlay, name).await.unwrap(), "first");
    }
    fixture.put("new", b"second").await;
    fixture.memory.rename(&pool_path("new"), &pool_path("b"), RenameMode::Replace).await.unwrap();
    fixture.memory.remove(&pool_path("c"), &Expected::Anything).await.unwrap();
    assert_eq!(read(&overlay, "b").await.unwrap(), "second");
    assert!(read(&overlay, "c").await.unwrap_err().is(ErrorKind::NotFound));
    assert_eq!(read(&overlay, "a").await.unwrap(), "first");
}
