//! Names and attributes that this node has just changed, or is changing in the pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_api::operator::FlushRequest;
use forebay_backends::decorators::{CallKind, Metrics, Throttle};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{ListingSupport, Pool, Time};
use forebay_engine::{Change, Ino, Lookup, Options, Overlay, Policy, SetTime, summary};
use forebay_tests::engine::*;
use forebay_tests::held::open_held;

fn policy(ttl: &str) -> Policy {
    let text = format!("[default]\nflush = \"manual\"\nmetadata-ttl = \"{ttl}\"\n[pool]\nretry = \"0s\"\n");
    Policy::parse(&text).unwrap()
}

/// A pool whose directories do not show that their names changed, like those of object stores.
fn store() -> Fixture {
    let mut capabilities = MemoryPool::all_capabilities();
    capabilities.versions.of_directories = false;
    capabilities.listings = ListingSupport::AskEach;
    Fixture::over(MemoryPool::with_capabilities(capabilities))
}

fn questions(metrics: &Metrics) -> u64 {
    let now = metrics.snapshot();
    now.of(CallKind::Stat).count + now.of(CallKind::List).count
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_being_flushed_is_listed_once() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    for at in 0..50 {
        fixture.put(&format!("d/theirs{at}"), b"x").await;
    }
    // Flushes make names in the directory all the time while it is listed.
    let slow = Arc::new(Throttle::new(fixture.metrics.clone(), None, Duration::from_millis(10)));
    let overlay = Overlay::open(Options { pool: slow, policy: policy("1h"), ..fixture.options() }).await.unwrap();
    let dir = find(&overlay, "d").await;
    let stop = Arc::new(AtomicBool::new(false));
    let flushing = (0..4).map(|task| {
        let (overlay, stop) = (overlay.clone(), stop.clone());
        tokio::spawn(async move {
            let mut made = 0;
            while !stop.load(Ordering::Relaxed) {
                write(&overlay, &format!("d/ours{task}-{made}"), "x").await.unwrap();
                flush(&overlay).await;
                made += 1;
            }
            made
        })
    });
    let flushing: Vec<_> = flushing.collect();
    while fixture.pooled().len() < 60 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for _ in 0..5 {
        fixture.put("d/new", b"x").await;
        let before = fixture.metrics.snapshot().of(CallKind::List).count;
        let listed = overlay.read_dir(dir).await.unwrap();
        let lists = fixture.metrics.snapshot().of(CallKind::List).count - before;
        assert!(lists <= 1, "listed {lists} times for one reader");
        let theirs = listed.entries.iter().filter(|e| e.name.starts_with(b"theirs")).count();
        assert_eq!(theirs, 50);
    }
    stop.store(true, Ordering::Relaxed);
    let mut made = Vec::new();
    for task in flushing {
        made.push(task.await.unwrap());
    }
    flushed(&overlay).await;
    let listed = overlay.read_dir(dir).await.unwrap();
    let ours = listed.entries.iter().filter(|e| e.name.starts_with(b"ours")).count();
    assert_eq!(ours, made.iter().sum::<usize>());
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_ours_are_renamed_without_a_question_for_each() {
    const FILES: usize = 300;
    for flushed_between in [false, true] {
        let fixture = store();
        let overlay = Overlay::open(Options { policy: policy("1h"), ..fixture.options() }).await.unwrap();
        overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
        flushed(&overlay).await;
        for at in 0..FILES {
            write(&overlay, &format!("d/{at}.lock"), "x").await.unwrap();
        }
        if flushed_between {
            flushed(&overlay).await;
        }
        let before = questions(&fixture.metrics);
        for at in 0..FILES {
            rename(&overlay, &format!("d/{at}.lock"), &format!("d/{at}")).await.unwrap();
        }
        let asked = questions(&fixture.metrics) - before;
        assert!(asked < 10, "{asked} questions for {FILES} renames");
        flushed(&overlay).await;
        // The daemon knows which names are gone and which ones exist.
        let before = questions(&fixture.metrics);
        let dir = find(&overlay, "d").await;
        for at in FILES - 100..FILES {
            let gone = overlay.lookup(dir, format!("{at}.lock").as_bytes()).await.unwrap();
            assert!(matches!(gone, Lookup::Negative { .. }));
            let there = overlay.lookup(dir, at.to_string().as_bytes()).await.unwrap();
            assert!(matches!(there, Lookup::Found(_)));
        }
        let asked = questions(&fixture.metrics) - before;
        assert!(asked < 10, "{asked} questions for names that were just renamed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_a_store_whose_listing_is_old_are_listed_again_and_not_asked_for_one_by_one() {
    let fixture = store();
    fixture.mkdir("d").await;
    fixture.put("d/there", b"x").await;
    let overlay = Overlay::open(Options { policy: policy("300ms"), ..fixture.options() }).await.unwrap();
    let dir = find(&overlay, "d").await;
    overlay.read_dir(dir).await.unwrap();
    tokio::time::sleep(Duration::from_millis(400)).await;
    let before = fixture.metrics.snapshot().of(CallKind::List).count;
    for at in 0..40 {
        let found = overlay.lookup(dir, format!("absent{at}").as_bytes()).await.unwrap();
        assert!(matches!(found, Lookup::Negative { .. }));
    }
    assert!(fixture.metrics.snapshot().of(CallKind::List).count > before);
}

/// SEMANTICS 8: "Under `close-to-open`, the default, an open sees what any client flushed before it."
#[tokio::test(flavor = "multi_thread")]
async fn an_open_sees_new_content_though_attributes_are_being_flushed() {
    for (times, theirs) in [(false, "their content"), (true, "their content"), (true, "theirs, which is longer")] {
        let fixture = Fixture::new();
        fixture.put("f", b"first content").await;
        let slow = Arc::new(Throttle::new(fixture.metrics.clone(), None, Duration::from_millis(50)));
        let overlay = Overlay::open(Options { pool: slow, ..fixture.options() }).await.unwrap();
        assert_eq!(read(&overlay, "f").await.unwrap(), "first content");
        let mtime = times.then_some(SetTime::At(Time { secs: 1_000_000_000, nanos: 0 }));
        let change = Change { mode: Some(0o600), mtime, ..Change::default() };
        overlay.setattr(find(&overlay, "f").await, &change, CALLER).await.unwrap();
        let stats = || fixture.metrics.snapshot().of(CallKind::Stat).count;
        let before = stats();
        let opening = async {
            // The flush has looked at the object, and has not sent the attributes yet.
            while stats() == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            fixture.memory.write_at(&pool_path("f"), 0, theirs.into()).await.unwrap();
            read(&overlay, "f").await.unwrap()
        };
        let (_, seen) = tokio::join!(flush(&overlay), opening);
        assert_eq!(seen, theirs, "with times: {times}");
        assert_eq!(read(&overlay, "f").await.unwrap(), theirs, "with times: {times}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_content_is_staged_though_attributes_are_being_flushed() {
    let fixture = Fixture::new();
    fixture.put("f", b"first content").await;
    let slow = Arc::new(Throttle::new(fixture.metrics.clone(), None, Duration::from_millis(50)));
    let overlay = Overlay::open(Options { pool: slow, ..fixture.options() }).await.unwrap();
    assert_eq!(read(&overlay, "f").await.unwrap(), "first content");
    let change = Change { mode: Some(0o600), ..Change::default() };
    overlay.setattr(find(&overlay, "f").await, &change, CALLER).await.unwrap();
    let stats = || fixture.metrics.snapshot().of(CallKind::Stat).count;
    let before = stats();
    let staging = async {
        while stats() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        fixture.memory.write_at(&pool_path("f"), 0, "their content".into()).await.unwrap();
        assert_eq!(stage(&overlay, "f").await.0.failed, 0);
    };
    tokio::join!(flush(&overlay), staging);
    fixture.fault.set_down(true);
    assert_eq!(read(&overlay, "f").await.unwrap(), "their content");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_of_attributes_that_meets_another_writer_sends_the_others() {
    let fixture = Fixture::new();
    fixture.put("f", b"first content").await;
    let slow = Arc::new(Throttle::new(fixture.metrics.clone(), None, Duration::from_millis(50)));
    let overlay = Overlay::open(Options { pool: slow, ..fixture.options() }).await.unwrap();
    let ino = find(&overlay, "f").await;
    let mtime = Some(SetTime::At(Time { secs: 1_000_000_000, nanos: 0 }));
    overlay.setattr(ino, &Change { mode: Some(0o600), mtime, ..Change::default() }, CALLER).await.unwrap();
    let stats = || fixture.metrics.snapshot().of(CallKind::Stat).count;
    let before = stats();
    let writing = async {
        // The flush has looked at the object, and has not sent the attributes yet.
        while stats() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        fixture.memory.write_at(&pool_path("f"), 0, "their content".into()).await.unwrap()
    };
    let flushing = summary(overlay.flush(FlushRequest { wait: true, ..FlushRequest::default() }));
    let ((done, failed), theirs) = tokio::join!(flushing, writing);
    assert_eq!((done.failed, failed), (0, Vec::new()));
    let now = fixture.memory.stat(&pool_path("f")).await.unwrap();
    assert_eq!((now.mode, now.mtime), (0o600, theirs.mtime));
    assert_eq!(read(&overlay, "f").await.unwrap(), "their content");
}

/// SEMANTICS 8: "Under `close-to-open`, the default, an open sees what any client flushed before it."
#[tokio::test(flavor = "multi_thread")]
async fn an_open_sees_new_content_though_the_file_is_renamed_in_the_pool_meanwhile() {
    let fixture = Fixture::new();
    fixture.put("f", b"first content").await;
    let (overlay, held) = open_held(&fixture).await;
    assert_eq!(read(&overlay, "f").await.unwrap(), "first content");
    let ino = find(&overlay, "f").await;
    rename(&overlay, "f", "g").await.unwrap();
    held.hold(1, |call| call.kind == CallKind::Stat);
    let opening = async {
        overlay.open_file(ino, RDONLY).await.unwrap();
        let seen = overlay.read(ino, 0, 100).await.unwrap();
        overlay.release(ino, RDONLY);
        seen
    };
    let flushing = async {
        held.until_waiting(1).await;
        flushed(&overlay).await;
        fixture.memory.write_at(&pool_path("g"), 0, "other content".into()).await.unwrap();
        held.release();
    };
    let (seen, ()) = tokio::join!(opening, flushing);
    assert_eq!(seen, "other content");
}

/// A rename of a directory in an object store takes long. The other directories can be listed meanwhile, and lookups in
/// them end.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_listed_and_looked_up_while_another_one_is_renamed_in_the_pool() {
    let fixture = Fixture::new();
    for dir in ["a", "other", "third"] {
        fixture.mkdir(dir).await;
        fixture.put(&format!("{dir}/f"), b"x").await;
    }
    let (overlay, held) = open_held(&fixture).await;
    let (other, third) = (find(&overlay, "other").await, find(&overlay, "third").await);
    rename(&overlay, "a", "b").await.unwrap();
    held.hold(1, |call| call.kind == CallKind::Rename);
    let using = async {
        held.until_waiting(1).await;
        let listed = overlay.read_dir(other).await.unwrap();
        assert_eq!(listed.entries.len(), 1);
        let stats = || fixture.metrics.snapshot().of(CallKind::Stat).count;
        let before = stats();
        assert!(matches!(overlay.lookup(third, b"absent").await.unwrap(), Lookup::Negative { .. }));
        assert!(matches!(overlay.lookup(third, b"f").await.unwrap(), Lookup::Found(_)));
        assert!(stats() - before < 10, "{} questions for two names", stats() - before);
        held.release();
    };
    tokio::join!(flushed(&overlay), using);
    assert!(matches!(overlay.lookup(find(&overlay, "b").await, b"f").await.unwrap(), Lookup::Found(_)));
}

/// What a listing says of a file does not depend on the path of another directory.
#[tokio::test(flavor = "multi_thread")]
async fn a_listing_shows_a_changed_file_while_another_directory_is_renamed_in_the_pool() {
    let fixture = Fixture::new();
    for dir in ["a", "other"] {
        fixture.mkdir(dir).await;
        fixture.put(&format!("{dir}/f"), b"x").await;
    }
    let (overlay, held) = open_held(&fixture).await;
    let (other, file) = (find(&overlay, "other").await, find(&overlay, "other/f").await);
    overlay.read_dir(other).await.unwrap();
    rename(&overlay, "a", "b").await.unwrap();
    held.hold(1, |call| call.kind == CallKind::Rename);
    let using = async {
        held.until_waiting(1).await;
        fixture.put("other/f", b"longer").await;
        overlay.read_dir(other).await.unwrap();
        assert_eq!(overlay.getattr(file).await.unwrap().0.size, 6);
        held.release();
    };
    tokio::join!(flushed(&overlay), using);
}

/// SEMANTICS 12: "While the pool does not answer, programs can read resident files and write new files"
///
/// A pool without versions of directories is asked for each name, and after many names for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_files_is_made_while_a_pool_without_versions_of_directories_does_not_answer() {
    let fixture = store();
    fixture.put("theirs", b"x").await;
    fixture.mkdir("never-listed").await;
    let policy = || Policy::parse("[default]\nmetadata-ttl = \"10ms\"").unwrap();
    let overlay = opened(|| Options { policy: policy(), ..fixture.options() }).await;
    overlay.read_dir(Ino::ROOT).await.unwrap();
    fixture.fault.set_down(true);
    tokio::time::sleep(Duration::from_millis(20)).await;
    for at in 0..50 {
        let name = format!("ours-{at}");
        let found = overlay.lookup(Ino::ROOT, name.as_bytes()).await.unwrap();
        assert!(matches!(found, Lookup::Negative { .. }), "{name}");
        close(&overlay, create(&overlay, &name).await).await;
    }
    // A file of this name may be in the pool.
    let unlisted = find(&overlay, "never-listed").await;
    assert!(refused(overlay.lookup(unlisted, b"ours").await).is_unreachable());
}

/// What the pool has told about the names of the root is remembered as long as for other directories.
#[tokio::test(flavor = "multi_thread")]
async fn a_listing_of_the_root_answers_for_its_names_although_nothing_else_is_in_use() {
    let fixture = store();
    fixture.put("theirs", b"x").await;
    let overlay = opened(|| Options { policy: policy("1h"), ..fixture.options() }).await;
    overlay.read_dir(Ino::ROOT).await.unwrap();
    close(&overlay, create(&overlay, "ours").await).await;
    flushed(&overlay).await;
    let before = fixture.fault.calls();
    for at in 0..10 {
        overlay.lookup(Ino::ROOT, format!("absent-{at}").as_bytes()).await.unwrap();
    }
    assert_eq!(fixture.fault.calls() - before, 0);
}
