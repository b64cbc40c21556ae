//! Fetched content: each byte once, with no more requests than needed.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_api::operator::{ContentState, FlushRequest, ListedPath, Progress, ReleaseRequest, StageRequest, Summary};
use forebay_api::views::{ViewPhase, ViewRequest};
use forebay_backends::decorators::{Around, CallKind, Decorated, PoolAnswer, PoolCall};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Error, ErrorKind, Expected, Pool, Result, Side};
use forebay_engine::{Change, Ino, Lookup, Options, Overlay, Policy, summary};
use forebay_system::process::Process;
use forebay_tests::engine::*;
use forebay_tests::expects::Expects;
use forebay_tests::process::wait_until;
use futures::StreamExt;
use futures::future::BoxFuture;

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_before_it_is_staged_with_the_numbers() {
    let fixture = Fixture::new();
    fixture.put("a", &vec![1; 3 << 20]).await;
    let overlay = fixture.limited(2 << 20).await;
    let (done, _) = stage(&overlay, "a").await;
    assert!(done.failed > 0);
    let message = done.message.unwrap();
    assert!(message.contains("3145728") && message.contains("2097152"), "{message}");
    assert_eq!(fixture.metrics.snapshot().bytes_read(), 0);
}

/// SEMANTICS 16: "A stage that does not fit is refused before it starts, with the numbers and exit code 5."
/// What is requested and resident needs its room, too, leased or not.
#[tokio::test(flavor = "multi_thread")]
async fn a_stage_that_does_not_fit_beside_leases_is_refused_though_a_part_of_it_is_resident() {
    const MIB: usize = 1 << 20;
    let fixture = Fixture::new();
    for (name, mib) in [("a", 40), ("b", 20), ("c", 30)] {
        fixture.put(name, &vec![1; mib * MIB]).await;
    }
    // Requests that are in flight need room, too: with less, a chunk of `b` may be read without being kept.
    let overlay = fixture.limited(80 << 20).await;
    assert_eq!(stage(&overlay, "a").await.1, Vec::new());
    assert_eq!(read(&overlay, "b").await.unwrap().len(), 20 * MIB);
    let before = fixture.metrics.snapshot().bytes_read();
    let both = StageRequest { paths: vec!["b".into(), "c".into()], lease_owner: "job".into(), ..Default::default() };
    let (done, _) = summary(overlay.stage(both)).await;
    assert!(done.refused.is_some(), "{done:?}");
    let message = done.message.unwrap();
    assert!(["52428800", "31457280", "83886080", "41943040"].iter().all(|n| message.contains(n)), "{message}");
    assert_eq!(fixture.metrics.snapshot().bytes_read(), before);
    // What has a lease already counts once.
    let again = StageRequest { paths: vec!["a".into(), "b".into()], lease_owner: "job".into(), ..Default::default() };
    assert_eq!(summary(overlay.stage(again)).await.1, Vec::new());
}

/// SEMANTICS 50: "asks the pool again for names that the daemon does not know"
#[tokio::test(flavor = "multi_thread")]
async fn what_has_just_appeared_in_the_pool_is_staged() {
    for versions in [true, false] {
        let mut can = MemoryPool::all_capabilities();
        can.versions.of_directories = versions;
        let fixture = Fixture::over(MemoryPool::with_capabilities(can));
        fixture.mkdir("d").await;
        fixture.put("d/old", b"old").await;
        let policy = Policy::parse("[default]\nmetadata-ttl = \"1h\"\n").unwrap();
        let overlay = Overlay::open(Options { policy, ..fixture.options() }).await.unwrap();
        let dir = find(&overlay, "d").await;
        overlay.read_dir(dir).await.unwrap();
        assert!(matches!(overlay.lookup(dir, b"new").await.unwrap(), Lookup::Negative { .. }));
        fixture.put("d/new", b"new").await;
        let (staged, failed) = stage(&overlay, "d/new").await;
        assert_eq!((staged.files, failed), (1, Vec::new()), "by its name");
        fixture.put("d/newer", b"newer").await;
        let (staged, failed) = stage(&overlay, "d").await;
        assert_eq!((staged.files, failed), (3, Vec::new()), "with its directory");
        let (staged, failed) = stage(&overlay, "d/none").await;
        assert_eq!((staged.files, failed.len()), (0, 1), "what is not there");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn staging_does_not_ask_again_for_what_it_has_just_listed() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    for n in 0..50 {
        fixture.put(&format!("d/{n}"), b"content").await;
    }
    let overlay = fixture.open().await;
    find(&overlay, "d").await;
    let asked = || fixture.metrics.snapshot().of(CallKind::Stat).count;
    let before = asked();
    let (staged, failed) = stage(&overlay, "d").await;
    assert_eq!((staged.files, failed), (50, Vec::new()));
    assert!(asked() - before < 10, "{} questions", asked() - before);
    // The next stage finds what another client changed since.
    fixture.put("d/7", b"changed").await;
    let (_, failed) = stage(&overlay, "d").await;
    assert_eq!(failed, Vec::new());
    assert_eq!(read(&overlay, "d/7").await.unwrap(), "changed");
}

/// A pool that refuses to read a file of this name, as if it were an archived object.
struct Archived(&'static [u8]);

impl Around for Archived {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        if call.kind == CallKind::Read && call.path.name() == Some(self.0) {
            let refused = Error::new(ErrorKind::PermissionDenied, Side::Pool, format!("{}: it is archived", call.path));
            return Box::pin(async { Err(refused) });
        }
        inner
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_content_is_refused_is_reported_and_all_other_files_are_staged() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    // Larger than the content that a listing includes.
    let content = vec![b'x'; 1 << 20];
    for name in ["d/a", "d/archived", "d/z", "d/zz"] {
        fixture.put(name, &content).await;
    }
    fixture.put("d/small", b"small").await;
    let pool = Arc::new(Decorated::with(fixture.metrics.clone(), Archived(b"archived")));
    let overlay = Overlay::open(Options { pool, ..fixture.options() }).await.unwrap();
    for typed in ["d", "d/*", "d"] {
        let (staged, failed) = stage(&overlay, typed).await;
        assert_eq!((staged.files, staged.failed), (4, 1), "{typed}");
        let [(path, reason)] = &failed[..] else { panic!("{failed:?}") };
        assert!(path.ends_with("d/archived") && reason.contains("it is archived"), "{path}: {reason}");
    }
    fixture.fault.set_down(true);
    assert_eq!(read(&overlay, "d/zz").await.unwrap().len(), content.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn small_files_come_along_with_the_listing() {
    let fixture = Fixture::new();
    for dir in ["d", "globbed"] {
        fixture.mkdir(dir).await;
        fixture.put(&format!("{dir}/empty"), b"").await;
        fixture.put(&format!("{dir}/large"), &vec![b'l'; 1 << 20]).await;
        for n in 0..50 {
            fixture.put(&format!("{dir}/{n}"), b"content").await;
        }
    }
    let overlay = fixture.open().await;
    let reads = || fixture.metrics.snapshot().of(CallKind::Read).count;
    let (staged, failed) = stage(&overlay, "d").await;
    assert_eq!((staged.files, staged.bytes, failed), (52, 350 + (1 << 20), Vec::new()));
    assert_eq!(reads(), 1);
    // Files that the glob does not match are not fetched.
    let (staged, _) = stage(&overlay, "globbed/4*").await;
    assert_eq!((staged.files, staged.bytes, reads()), (11, 77, 12));
    fixture.fault.set_down(true);
    for n in 0..50 {
        assert_eq!(read(&overlay, &format!("d/{n}")).await.unwrap(), "content");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_file_and_byte_is_counted_once() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    let counts = |summary: &Summary| (summary.files, summary.bytes);
    let flush = || async { summary(overlay.flush(FlushRequest { wait: true, ..Default::default() })).await.0 };
    write(&overlay, "a", "four").await.unwrap();
    write(&overlay, "b", "sixsix").await.unwrap();
    overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    assert_eq!(counts(&flush().await), (3, 10));
    assert_eq!(counts(&flush().await), (0, 0));
    write(&overlay, "a", "five!").await.unwrap();
    rename(&overlay, "b", "c").await.unwrap();
    // Content of `a`, the new name `c`, and the removal of `b`.
    assert_eq!(counts(&flush().await), (3, 5));
    assert_eq!(evict(&overlay, false).await.files, 2);
    assert_eq!(counts(&stage(&overlay, "a").await.0), (1, 5));
    assert_eq!(counts(&stage(&overlay, "").await.0), (2, 6));
    assert_eq!(counts(&stage(&overlay, "").await.0), (2, 0));
    let kept = evict(&overlay, false).await;
    assert_eq!((counts(&kept), kept.skipped), ((0, 0), 2));
    assert!(kept.message.unwrap().contains("2 leased: --release-leases"));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_readers_of_a_cold_file_fetch_each_byte_once() {
    let fixture = Fixture::new();
    let size = 5 << 20;
    fixture.put("a", &vec![b'x'; size]).await;
    let overlay = fixture.open().await;
    let ino = find(&overlay, "a").await;
    let readers = (0..64).map(|_| {
        let overlay = overlay.clone();
        tokio::spawn(async move {
            overlay.open_file(ino, RDONLY).await.unwrap();
            let mut at = 0;
            while at < size as u64 {
                let bytes = overlay.read(ino, at, 128 << 10).await.unwrap();
                assert!(!bytes.is_empty() && bytes.iter().all(|b| *b == b'x'));
                at += bytes.len() as u64;
            }
            overlay.release(ino, RDONLY);
        })
    });
    for reader in readers.collect::<Vec<_>>() {
        reader.await.unwrap();
    }
    assert_eq!(fixture.metrics.snapshot().bytes_read(), size as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn staging_goes_no_faster_than_it_may_and_ends_when_its_client_leaves() {
    const LARGE: usize = 64 << 20;
    let fixture = Fixture::new();
    fixture.put("large", &vec![1; LARGE]).await;
    let overlay = fixture.open().await;
    let owner = async || overlay.list_residency(&pool_path("large"), false).await.unwrap()[0].lease_owner.clone();
    let bytes_per_second = Some(8 << 20);
    let request =
        StageRequest { paths: vec!["large".into()], lease_owner: "job".into(), bytes_per_second, ..Default::default() };
    let progress = overlay.stage(request);
    let minute = Duration::from_secs(60);
    let read = || fixture.metrics.snapshot().bytes_read();
    until(minute, async || read() > 0).await;
    assert_eq!(owner().await.as_deref(), Some("job"));
    drop(progress);
    until(minute, async || owner().await.is_none()).await;
    // Waits until the requests that were sent already have ended.
    let mut before = read();
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = read();
        if std::mem::replace(&mut before, now) == now {
            break;
        }
    }
    assert!(read() < LARGE as u64, "all of it came: {}", read());
    let (staged, failed) = stage(&overlay, "large").await;
    assert_eq!((staged.bytes + before, failed), (LARGE as u64, Vec::new()));
}

/// Waits until a condition holds, for this time at most.
async fn until(at_most: Duration, holds: impl AsyncFn() -> bool) {
    let all = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(at_most, all).await.expect("it holds in time");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_staging_that_ended_early_left_undone_is_read_and_staged_as_ever() {
    let fixture = Fixture::new();
    let dirs: Vec<String> = (0..4).map(|dir| format!("d{dir}")).collect();
    for dir in &dirs {
        fixture.mkdir(dir).await;
        for n in 0..50 {
            fixture.put(&format!("{dir}/{n}"), b"content").await;
        }
    }
    for round in 0..30 {
        let overlay = fixture.open().await;
        let request = StageRequest { paths: dirs.clone(), lease_owner: "job".into(), ..Default::default() };
        let progress = overlay.stage(request);
        tokio::time::sleep(Duration::from_micros(round * 150)).await;
        drop(progress);
        for dir in &dirs {
            for n in 0..50 {
                assert_eq!(read(&overlay, &format!("{dir}/{n}")).await.unwrap(), "content");
            }
            let (staged, failed) = stage(&overlay, dir).await;
            assert_eq!((staged.files, failed), (50, Vec::new()));
        }
        let gone = evict(&overlay, true).await;
        assert_eq!((gone.files, gone.skipped), (200, 0));
        overlay.shutdown().await.unwrap();
    }
}

async fn listed(overlay: &Overlay, path: &str) -> ListedPath {
    overlay.list_residency(&pool_path(path), false).await.unwrap().remove(0)
}

async fn owners(overlay: &Overlay, path: &str) -> Option<String> {
    listed(overlay, path).await.lease_owner
}

fn request(path: &str, owner: &str) -> StageRequest {
    StageRequest { paths: vec![path.into()], lease_owner: owner.into(), ..Default::default() }
}

async fn release(overlay: &Overlay, paths: &[&str], owner: &str) -> u64 {
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    let request = ReleaseRequest { paths, owner: owner.into(), ..Default::default() };
    summary(overlay.release_leases(request)).await.0.files
}

/// SEMANTICS 17: "the end of one owner's lease does not affect the leases of other owners"
#[tokio::test(flavor = "multi_thread")]
async fn each_owner_has_a_lease_of_his_own() {
    let fixture = Fixture::new();
    fixture.put("a", b"content").await;
    fixture.put("b", b"content").await;
    let overlay = fixture.open().await;
    for owner in ["one", "two", "three"] {
        summary(overlay.stage(request("a", owner))).await;
    }
    summary(overlay.stage(request("b", "one"))).await;
    assert_eq!(owners(&overlay, "a").await.as_deref(), Some("one, two, three"));
    // The owner `two` now wants the file for one second only.
    summary(overlay.stage(StageRequest { lease_secs: Some(1), ..request("a", "two") })).await;
    until(Duration::from_secs(60), async || owners(&overlay, "a").await.as_deref() == Some("one, three")).await;
    assert_eq!(evict(&overlay, false).await.skipped, 2);
    assert_eq!(release(&overlay, &["a"], "one").await, 1);
    assert_eq!(release(&overlay, &["a"], "one").await, 0);
    overlay.shutdown().await.unwrap();
    drop(overlay);
    let overlay = fixture.open().await;
    assert_eq!(
        (owners(&overlay, "a").await.as_deref(), owners(&overlay, "b").await.as_deref()),
        (Some("three"), Some("one"))
    );
    assert_eq!((release(&overlay, &[], "one").await, release(&overlay, &[], "three").await), (1, 1));
    let after = listed(&overlay, "a").await;
    assert_eq!((after.state, after.lease_owner), (ContentState::Resident, None), "it stays until its room is needed");
    assert_eq!(overlay.status().await.leased_bytes, 0);
    assert_eq!(evict(&overlay, false).await.files, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_staging_that_ended_early_had_leased_is_leased_as_before() {
    let fixture = Fixture::new();
    fixture.put("a-small", b"content").await;
    fixture.put("large", &vec![1; 16 << 20]).await;
    let overlay = fixture.open().await;
    let minute = Duration::from_secs(60);
    let slow = |owner| StageRequest { bytes_per_second: Some(1 << 20), ..request("large", owner) };
    // Two stages of different owners have begun, and one ends early.
    let first = overlay.stage(slow("first"));
    until(minute, async || owners(&overlay, "large").await.as_deref() == Some("first")).await;
    let second = overlay.stage(slow("second"));
    until(minute, async || owners(&overlay, "large").await.as_deref() == Some("first, second")).await;
    drop(first);
    until(minute, async || owners(&overlay, "large").await.as_deref() == Some("second")).await;
    drop(second);
    until(minute, async || owners(&overlay, "large").await.is_none()).await;
    // Two stages of one owner have begun, and either may end first.
    for first_ends in [true, false] {
        let (long, short) =
            (overlay.stage(slow("job")), overlay.stage(StageRequest { lease_secs: Some(9), ..slow("job") }));
        until(minute, async || owners(&overlay, "large").await.is_some()).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (ends, stays) = if first_ends { (long, short) } else { (short, long) };
        drop(ends);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(owners(&overlay, "large").await.as_deref(), Some("job"), "the other is under way");
        drop(stays);
        until(minute, async || owners(&overlay, "large").await.is_none()).await;
    }
    // If the later stage ends early, the owner's earlier lease has its old end again.
    let (staged, _) = summary(overlay.stage(StageRequest { lease_secs: Some(3600), ..request("large", "job") })).await;
    assert_eq!(staged.failed, 0);
    fixture.put("large", &vec![2; 32 << 20]).await;
    let again = overlay.stage(slow("job"));
    until(minute, async || listed(&overlay, "large").await.leased_until_unix.is_none()).await;
    drop(again);
    until(minute, async || listed(&overlay, "large").await.leased_until_unix.is_some()).await;
    // A resident file stays leased, although the stage ended before the rest was fetched.
    let both = overlay.stage(StageRequest { paths: vec!["a-small".into(), "large".into()], ..slow("job") });
    until(minute, async || listed(&overlay, "a-small").await.state == ContentState::Resident).await;
    drop(both);
    until(minute, async || listed(&overlay, "large").await.leased_until_unix.is_some()).await;
    assert_eq!(owners(&overlay, "a-small").await.as_deref(), Some("job"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lease_keeps_no_room_even_if_no_program_accesses_its_file() {
    let fixture = Fixture::new();
    fixture.put("a", &vec![1; 3 << 20]).await;
    fixture.put("b", &vec![2; 3 << 20]).await;
    let overlay = fixture.limited(5 << 20).await;
    let (staged, _) = summary(overlay.stage(StageRequest { lease_secs: Some(1), ..request("a", "job") })).await;
    assert_eq!(staged.failed, 0);
    overlay.shutdown().await.unwrap();
    drop(overlay);
    let overlay = fixture.limited(5 << 20).await;
    until(Duration::from_secs(60), async || overlay.status().await.leased_bytes == 0).await;
    assert_eq!(stage(&overlay, "b").await.1, Vec::new());
    assert_eq!(listed(&overlay, "b").await.state, ContentState::Resident);
}

/// SEMANTICS 17: "or when the file is removed"
#[tokio::test(flavor = "multi_thread")]
async fn the_lease_of_a_file_that_is_removed_keeps_no_room() {
    let fixture = Fixture::new();
    for name in ["a", "b", "c"] {
        fixture.put(name, &vec![1; 3 << 20]).await;
    }
    let overlay = fixture.limited(4 << 20).await;
    assert_eq!(stage(&overlay, "a").await.1, Vec::new());
    assert_eq!(overlay.status().await.leased_bytes, 3 << 20);
    let refused = stage(&overlay, "b").await.0;
    assert!(refused.refused.is_some(), "{refused:?}");
    overlay.unlink(Ino::ROOT, b"a").await.unwrap();
    assert_eq!(overlay.status().await.leased_bytes, 0);
    assert_eq!(stage(&overlay, "b").await.1, Vec::new());
    // Another client removes the file.
    fixture.memory.remove(&pool_path("b"), &Expected::Anything).await.unwrap();
    let (staged, failed) = stage(&overlay, "b").await;
    assert_eq!((staged.files, failed.len()), (0, 1));
    assert_eq!(overlay.status().await.leased_bytes, 0);
    assert_eq!(stage(&overlay, "c").await.1, Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn staging_ends_when_its_time_is_up_and_says_how_much_is_short() {
    let fixture = Fixture::new();
    fixture.put("a-small", b"content").await;
    fixture.put("large", &vec![1; 64 << 20]).await;
    let overlay = fixture.open().await;
    let request = StageRequest {
        paths: vec!["a-small".into(), "large".into()],
        bytes_per_second: Some(1 << 20),
        within_ms: Some(10_000),
        ..request("", "job")
    };
    let (staged, failed) =
        tokio::time::timeout(Duration::from_secs(120), summary(overlay.stage(request))).await.unwrap();
    assert_eq!((staged.files, staged.failed, failed), (1, 1, Vec::new()));
    assert_eq!(staged.message.as_deref(), Some("the time was up before 1 of 2 files were resident"));
    assert_eq!(owners(&overlay, "a-small").await.as_deref(), Some("job"));
    until(Duration::from_secs(60), async || owners(&overlay, "large").await.is_none()).await;
    assert_eq!(stage(&overlay, "").await.1, Vec::new());
}

/// Eviction begins above the high watermark, and stops at the low one.
#[tokio::test(flavor = "multi_thread")]
async fn eviction_stops_at_the_low_watermark() {
    const MIB: u64 = 1 << 20;
    let fixture = Fixture::new();
    let name = |at: usize| format!("f{at:02}");
    for at in 0..60 {
        fixture.put(&name(at), &vec![at as u8; MIB as usize]).await;
    }
    let policy = "[space]\nhigh-watermark = 0.5\nlow-watermark = 0.45\nevictor = \"lru\"\n";
    let options = Options { policy: Policy::parse(policy).unwrap(), limit_bytes: Some(64 * MIB), ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    for from in [0, 20, 40] {
        let reads = (from..from + 20).map(|at| {
            let (overlay, name) = (overlay.clone(), name(at));
            tokio::spawn(async move { read(&overlay, &name).await.unwrap().len() })
        });
        for read in reads.collect::<Vec<_>>() {
            assert_eq!(read.await.unwrap() as u64, MIB);
        }
    }
    until(Duration::from_secs(60), async || overlay.status().await.used_bytes <= 32 * MIB).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let used = overlay.status().await.used_bytes;
    assert!(used >= 27 * MIB, "{used} bytes are left of {}", 64 * MIB);
    overlay.shutdown().await.unwrap();
}

/// A client that is killed after it has laid the tree of a view leaves no view, and no lease. One that has mounted it may
/// end.
#[tokio::test(flavor = "multi_thread")]
async fn a_view_whose_client_ends_before_it_has_mounted_it_is_given_up() {
    let fixture = Fixture::new();
    let overlay = fixture.open().await;
    for (dir, is_mounted) in [("mounted", true), ("abandoned", false)] {
        fixture.mkdir(dir).await;
        fixture.put(&format!("{dir}/file"), b"content").await;
        let mut client = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let request = ViewRequest { path: dir.into(), ..ViewRequest::default() };
        let view = overlay.begin_view(request, Some(Process::of(client.id()))).await.unwrap();
        let staged = StageRequest { paths: vec![dir.into()], lease_owner: view.id.clone(), ..StageRequest::default() };
        assert_eq!(summary(overlay.stage(staged)).await.0.failed, 0);
        assert_eq!(overlay.lay_view(&view.id, false, true).await.unwrap().phase, ViewPhase::Laid);
        if is_mounted {
            overlay.view_is_mounted(&view.id).unwrap();
        }
        client.kill().unwrap();
        client.wait().unwrap();
    }
    let shown = || overlay.views().unwrap().into_iter().map(|view| view.path.to_string()).collect::<Vec<_>>();
    wait_until("the abandoned view is gone", || shown() == ["mounted"]);
    assert_eq!(overlay.status().await.leased_bytes, 7);
}

/// A sparse file may have any size. Three of the largest ones have more bytes than 64 bits can count.
#[tokio::test(flavor = "multi_thread")]
async fn sums_of_the_sizes_of_sparse_files_do_not_overflow() {
    // ext4 has no files of that size.
    let fixture = Fixture { fast: tempfile::tempdir_in("/dev/shm").unwrap(), ..Fixture::new() };
    let overlay = fixture.open().await;
    let largest = Change { size: Some(i64::MAX as u64), ..Change::default() };
    for name in ["a", "b", "c"] {
        let ino = create(&overlay, name).await;
        close(&overlay, ino).await;
        overlay.setattr(ino, &largest, CALLER).await.unwrap();
    }
    assert_eq!(overlay.status().await.dirty_bytes, u64::MAX);
    let (staged, failed) = stage(&overlay, "").await;
    assert_eq!((staged.files, staged.failed, failed), (3, 0, Vec::new()));
    assert_eq!(overlay.status().await.leased_bytes, u64::MAX);
    let released =
        summary(overlay.release_leases(ReleaseRequest { owner: "job".into(), ..Default::default() })).await.0;
    assert_eq!((released.files, released.bytes), (3, u64::MAX));
}

fn of_a_command(dry_run: bool) -> StageRequest {
    let invocation = serde_json::from_str(r#"{"user":0,"words":["a"]}"#).unwrap();
    StageRequest { lease_owner: "job".into(), invocation: Some(invocation), dry_run, ..Default::default() }
}

/// A pool that refuses all calls for names that begin with `bad`, once this is set.
struct RefusesBad(Arc<AtomicBool>);

impl Around for RefusesBad {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        let is_bad = call.path.name().is_some_and(|name| name.starts_with(b"bad"));
        if is_bad && self.0.load(Ordering::Relaxed) {
            let refused = Error::new(ErrorKind::PermissionDenied, Side::Pool, call.path.to_string());
            return Box::pin(async { Err(refused) });
        }
        inner
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expected_file_that_the_pool_refuses_is_reported_and_one_that_is_gone_is_not() {
    let fixture = Fixture::new();
    fixture.put("bad", b"1").await;
    fixture.put("good", b"1").await;
    let refuses = Arc::new(AtomicBool::new(false));
    let pool = Arc::new(Decorated::with(fixture.metrics.clone(), RefusesBad(refuses.clone())));
    let overlay = Overlay::open(Options { pool, ..fixture.options() }).await.unwrap();
    overlay.set_advisor(Arc::new(Expects(&["bad", "gone", "good"])));
    find(&overlay, "bad").await;
    refuses.store(true, Ordering::Relaxed);
    let (staged, failed) = summary(overlay.stage(of_a_command(false))).await;
    assert_eq!((staged.files, staged.failed), (1, 1), "{failed:?}");
    assert!(failed[0].0.ends_with("bad"), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_names_no_expected_file_that_is_left_out() {
    let fixture = Fixture::new();
    // It has grown since its earlier use.
    fixture.put("large", &vec![1; 3 << 20]).await;
    fixture.put("small", b"1").await;
    let overlay = fixture.limited(2 << 20).await;
    overlay.set_advisor(Arc::new(Expects(&["large", "small"])));
    let progress: Vec<Progress> = overlay.stage(of_a_command(true)).collect().await;
    let wanted = progress.iter().filter_map(|step| match step {
        Progress::Wanted(wanted) => Some(wanted.path.as_str()),
        _ => None,
    });
    assert_eq!(wanted.collect::<Vec<_>>(), ["small"], "{progress:?}");
}
