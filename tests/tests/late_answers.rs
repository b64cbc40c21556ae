//! Answers of the pool that arrive after later questions were answered: what is newer stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_backends::decorators::{Around, CallKind, Decorated, PoolAnswer, PoolCall};
use forebay_backends::{Expected, Pool, RenameMode, Result, SetAttrs};
use forebay_engine::{Ino, Options, Overlay, Policy};
use forebay_tests::engine::*;
use forebay_tests::held::{HeldCalls, HeldPool, open_held};
use futures::FutureExt;
use futures::future::BoxFuture;

const MIB: usize = 1 << 20;

/// Opens an overlay of which an open does not fetch the whole file, on a pool of which calls can be held.
async fn open_partly(fixture: &Fixture) -> (Overlay, HeldCalls) {
    let policy = "[default]\nflush = \"manual\"\nwhole-file = \"0\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    let held = HeldCalls::default();
    let pool = Arc::new(HeldPool::with(fixture.metrics.clone(), held.clone()));
    let options = Options { pool, policy: Policy::parse(policy).unwrap(), ..fixture.options() };
    (Overlay::open(options).await.unwrap(), held)
}

/// Reads a directory, and does `meanwhile` after the pool has read its names and before the listing has them.
async fn listed_during(overlay: &Overlay, held: &HeldCalls, dir: &str, meanwhile: impl AsyncFnOnce()) {
    let dir = find(overlay, dir).await;
    held.hold_answers(1, |call| call.kind == CallKind::List);
    let overtaking = async {
        held.until_waiting(1).await;
        meanwhile().await;
        held.release();
    };
    tokio::join!(overlay.read_dir(dir), overtaking).0.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_was_found_while_its_directory_was_listed_is_not_forgotten() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    let (overlay, held) = open_held(&fixture).await;
    let mut ino = None;
    listed_during(&overlay, &held, "d", async || {
        fixture.put("d/g", b"old").await;
        let found = find(&overlay, "d/g").await;
        overlay.open_file(found, RDWR).await.unwrap();
        put(&overlay, found, 0, b"new").await;
        ino = Some(found);
    })
    .await;
    let ino = ino.unwrap();
    assert_eq!(find(&overlay, "d/g").await, ino);
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert_eq!(fixture.pooled(), pairs(&[("/d/", ""), ("/d/g", "new")]));
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
}

/// A program that reads a file of which a part is resident gets the rest from the pool.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_found_while_its_directory_was_listed_can_be_read_to_its_end() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    let (overlay, held) = open_partly(&fixture).await;
    let mut ino = None;
    listed_during(&overlay, &held, "d", async || {
        fixture.put("d/g", &vec![b'x'; 3 * MIB]).await;
        let found = find(&overlay, "d/g").await;
        overlay.open_file(found, RDONLY).await.unwrap();
        ino = Some(found);
    })
    .await;
    let ino = ino.unwrap();
    let last = overlay.read(ino, 2 * MIB as u64, MIB as u32).await.map(|bytes| bytes.len());
    overlay.release(ino, RDONLY);
    assert_eq!(last.unwrap(), MIB);
    assert_eq!(find(&overlay, "d/g").await, ino);
}

/// A program has the version open that the pool has now. The listing has the one before.
#[tokio::test(flavor = "multi_thread")]
async fn a_listing_does_not_replace_a_version_that_was_confirmed_since_it_began() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/f", &vec![b'x'; 3 * MIB]).await;
    let (overlay, held) = open_partly(&fixture).await;
    let ino = find(&overlay, "d/f").await;
    listed_during(&overlay, &held, "d", async || {
        fixture.memory.write_at(&pool_path("d/f"), 0, Bytes::from_static(b"y")).await.unwrap();
        overlay.open_file(ino, RDONLY).await.unwrap();
        assert_eq!(overlay.read(ino, 0, 1).await.unwrap(), "y");
    })
    .await;
    let last = overlay.read(ino, 2 * MIB as u64, MIB as u32).await.map(|bytes| bytes.len());
    overlay.release(ino, RDONLY);
    assert_eq!(last.unwrap(), MIB);
    assert_eq!(find(&overlay, "d/f").await, ino);
}

/// The name was away when the pool read the directory.
#[tokio::test(flavor = "multi_thread")]
async fn a_listing_does_not_forget_a_known_name_that_was_confirmed_since_it_began() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/f", &vec![b'x'; 3 * MIB]).await;
    let (overlay, held) = open_partly(&fixture).await;
    let ino = find(&overlay, "d/f").await;
    let (f, away) = (pool_path("d/f"), pool_path("away"));
    fixture.memory.rename(&f, &away, RenameMode::NoReplace).await.unwrap();
    listed_during(&overlay, &held, "d", async || {
        fixture.memory.rename(&away, &f, RenameMode::NoReplace).await.unwrap();
        overlay.open_file(ino, RDONLY).await.unwrap();
        assert_eq!(overlay.read(ino, 0, 1).await.unwrap(), "x");
    })
    .await;
    let last = overlay.read(ino, 2 * MIB as u64, MIB as u32).await.map(|bytes| bytes.len());
    overlay.release(ino, RDONLY);
    assert_eq!(last.unwrap(), MIB);
    assert_eq!(find(&overlay, "d/f").await, ino);
    // What is really gone is forgotten.
    fixture.memory.remove(&f, &Expected::Anything).await.unwrap();
    assert!(overlay.read_dir(find(&overlay, "d").await).await.unwrap().entries.is_empty());
}

async fn mode(overlay: &Overlay, ino: Ino) -> u32 {
    overlay.getattr(ino).await.unwrap().0.mode & 0o777
}

/// Waits until a program sees this mode.
async fn shows(overlay: &Overlay, ino: Ino, expected: u32) {
    let shown = async {
        while mode(overlay, ino).await != expected {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), shown).await;
    waited.unwrap_or_else(|_| panic!("the mode {expected:o} is not shown"));
}

/// Sets the mode in the pool, as another client does.
async fn chmod(fixture: &Fixture, path: &str, mode: u32) {
    let changes = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
    fixture.memory.set_attrs(&pool_path(path), &changes).await.unwrap();
}

/// SEMANTICS 9: "Names and attributes lag behind the pool by at most `metadata-ttl`." What was shown is not taken back.
#[tokio::test(flavor = "multi_thread")]
async fn rights_that_were_shown_do_not_come_back_with_an_older_listing() {
    let ttl = Duration::from_secs(1);
    let fixture = Fixture::new();
    for dir in ["d", "d/sub"] {
        fixture.mkdir(dir).await;
    }
    let held = HeldCalls::default();
    let pool = Arc::new(HeldPool::with(fixture.metrics.clone(), held.clone()));
    let policy = format!("[default]\nflush = \"manual\"\nmetadata-ttl = \"{}s\"\n", ttl.as_secs());
    let options = Options { pool, policy: Policy::parse(&policy).unwrap(), ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    let sub = find(&overlay, "d/sub").await;
    tokio::time::sleep(ttl).await;
    listed_during(&overlay, &held, "d", async || {
        chmod(&fixture, "d/sub", 0o700).await;
        assert_eq!(mode(&overlay, sub).await, 0o700);
    })
    .await;
    assert_eq!(mode(&overlay, sub).await, 0o700);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_answers_the_one_to_the_later_question_counts() {
    let fixture = Fixture::new();
    fixture.put("f", b"x").await;
    let (overlay, held) = open_held(&fixture).await;
    let ino = find(&overlay, "f").await;
    held.hold_answers(1, |call| call.kind == CallKind::Stat && call.path.name() == Some(b"f"));
    let overtaking = async {
        held.until_waiting(1).await;
        chmod(&fixture, "f", 0o600).await;
        assert_eq!(mode(&overlay, ino).await, 0o600);
        held.release();
    };
    assert_eq!(tokio::join!(mode(&overlay, ino), overtaking).0, 0o600);
    // It is asked again, and not only shown as it was. If the machine was so busy that the held answer counted as a slow
    // one, that takes a second.
    chmod(&fixture, "f", 0o640).await;
    shows(&overlay, ino, 0o640).await;
}

/// The name is removed and made again between the two questions.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_that_a_file_is_gone_does_not_count() {
    let fixture = Fixture::new();
    fixture.put("f", b"x").await;
    let (overlay, held) = open_held(&fixture).await;
    let ino = find(&overlay, "f").await;
    let (f, away) = (pool_path("f"), pool_path("away"));
    fixture.memory.rename(&f, &away, RenameMode::NoReplace).await.unwrap();
    held.hold_answers(1, |call| call.kind == CallKind::Stat && call.path.name() == Some(b"f"));
    let overtaking = async {
        held.until_waiting(1).await;
        fixture.memory.rename(&away, &f, RenameMode::NoReplace).await.unwrap();
        assert_eq!(mode(&overlay, ino).await, 0o644);
        held.release();
    };
    assert_eq!(tokio::join!(mode(&overlay, ino), overtaking).0, 0o644);
    assert_eq!(find(&overlay, "f").await, ino);
}

/// While this is set, each answer to `stat` takes longer than a confirmation waits for.
#[derive(Clone, Default)]
struct SlowStats(Arc<AtomicBool>);

impl Around for SlowStats {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        if call.kind != CallKind::Stat || !self.0.load(Ordering::Relaxed) {
            return inner;
        }
        async move {
            tokio::time::sleep(Duration::from_millis(1300)).await;
            inner.await
        }
        .boxed()
    }
}

/// SEMANTICS 50: "`forebay stage` asks the pool again for names that the daemon does not know, and for new names in a
/// directory"
#[tokio::test(flavor = "multi_thread")]
async fn a_stage_waits_for_the_answers_of_a_slow_pool() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/f", b"old").await;
    let slow = SlowStats::default();
    let pool = Arc::new(Decorated::with(fixture.metrics.clone(), slow.clone()));
    let policy = "[default]\nflush = \"manual\"\nmetadata-ttl = \"1h\"\n[pool]\nretry = \"0s\"\n";
    let options = Options { pool, policy: Policy::parse(policy).unwrap(), ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    // A directory that changed just before it was listed is listed again anyway.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(stage(&overlay, "d").await.1, Vec::new());
    fixture.put("d/f", b"changed").await;
    fixture.put("d/g", b"made").await;
    slow.0.store(true, Ordering::Relaxed);
    let (staged, failed) = stage(&overlay, "d").await;
    assert_eq!((staged.files, failed), (2, Vec::new()));
    fixture.memory.write_at(&pool_path("d/f"), 0, Bytes::from_static(b"C")).await.unwrap();
    let (staged, failed) = stage(&overlay, "d/f").await;
    assert_eq!((staged.files, failed), (1, Vec::new()));
    fixture.fault.set_down(true);
    slow.0.store(false, Ordering::Relaxed);
    assert_eq!(read(&overlay, "d/f").await.unwrap(), "Changed");
    assert_eq!(read(&overlay, "d/g").await.unwrap(), "made");
}

/// SEMANTICS 9: "Names and attributes lag behind the pool by at most `metadata-ttl`."
#[tokio::test(flavor = "multi_thread")]
async fn new_names_are_seen_although_each_answer_of_the_pool_is_slow() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/f", b"old").await;
    let slow = SlowStats::default();
    let pool = Arc::new(Decorated::with(fixture.metrics.clone(), slow.clone()));
    let overlay = Overlay::open(Options { pool, ..fixture.options() }).await.unwrap();
    // A listing of a directory that changed just before does not say that a name is absent.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let dir = find(&overlay, "d").await;
    let names = async || -> Vec<Vec<u8>> {
        let listed = overlay.read_dir(dir).await.unwrap();
        listed.entries.iter().map(|entry| entry.name.to_vec()).collect()
    };
    assert_eq!(names().await, [b"f"]);
    slow.0.store(true, Ordering::Relaxed);
    fixture.put("d/g", b"made").await;
    find(&overlay, "d/g").await;
    fixture.put("d/h", b"made").await;
    let mut now = names().await;
    now.sort();
    assert_eq!(now, [b"f", b"g", b"h"]);
}

/// Counts the listings.
#[derive(Clone, Default)]
struct CountedLists(Arc<AtomicUsize>);

impl Around for CountedLists {
    fn around<'a, T: PoolAnswer>(
        &'a self,
        call: PoolCall<'a>,
        inner: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        if call.kind == CallKind::List {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        inner
    }
}

/// The listing of a directory confirms the directories in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stage_of_a_known_tree_lists_only_directories_that_changed() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    for dir in ["d/a", "d/b", "d/c"] {
        fixture.mkdir(dir).await;
        fixture.put(&format!("{dir}/f"), b"x").await;
    }
    let lists = CountedLists::default();
    let pool = Arc::new(Decorated::with(fixture.metrics.clone(), lists.clone()));
    let overlay = Overlay::open(Options { pool, ..fixture.options() }).await.unwrap();
    // A directory that changed just before it was listed is listed again anyway.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(stage(&overlay, "d").await.1, Vec::new());
    let before = lists.0.load(Ordering::Relaxed);
    assert!(before >= 4, "{before}");
    fixture.put("d/made", b"y").await;
    let (staged, failed) = stage(&overlay, "d").await;
    assert_eq!((staged.files, failed), (4, Vec::new()));
    assert_eq!(lists.0.load(Ordering::Relaxed) - before, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_fetches_the_present_version_while_another_directory_is_moved() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.mkdir("other").await;
    fixture.put("d/f", b"old").await;
    let (overlay, held) = open_held(&fixture).await;
    assert_eq!(stage(&overlay, "d/f").await.1, Vec::new());
    rename(&overlay, "other", "moved").await.unwrap();
    held.hold(1, |call| call.kind == CallKind::Rename);
    let again = overlay.clone();
    let flushing = tokio::spawn(async move { flushed(&again).await });
    held.until_waiting(1).await;
    fixture.memory.write_at(&pool_path("d/f"), 0, Bytes::from_static(b"new")).await.unwrap();
    let (staged, failed) = stage(&overlay, "d/f").await;
    assert_eq!((staged.files, failed), (1, Vec::new()));
    assert_eq!(read(&overlay, "d/f").await.unwrap(), "new");
    held.release();
    flushing.await.unwrap();
}

/// The name was away when the pool read the directory. That the object was confirmed under its other name says nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_listing_does_not_forget_one_of_several_names_that_was_confirmed_since_it_began() {
    let fixture = Fixture::new();
    fixture.mkdir("d").await;
    fixture.put("d/f", b"x").await;
    let (g, away) = (pool_path("d/g"), pool_path("away"));
    fixture.memory.link(&pool_path("d/f"), &g).await.unwrap();
    let (overlay, held) = open_held(&fixture).await;
    let (dir, ino) = (find(&overlay, "d").await, find(&overlay, "d/f").await);
    assert_eq!(find(&overlay, "d/g").await, ino);
    fixture.memory.rename(&g, &away, RenameMode::NoReplace).await.unwrap();
    held.hold_answers(1, |call| call.kind == CallKind::List);
    let overtaking = async {
        held.until_waiting(1).await;
        fixture.memory.rename(&away, &g, RenameMode::NoReplace).await.unwrap();
        assert_eq!(find(&overlay, "d/g").await, ino);
        held.release();
    };
    let listed = tokio::join!(overlay.read_dir(dir), overtaking).0.unwrap();
    let mut names: Vec<_> = listed.entries.iter().map(|entry| entry.name.to_vec()).collect();
    names.sort();
    assert_eq!(names, [b"f", b"g"]);
    // A name that is really gone is forgotten.
    fixture.memory.remove(&g, &Expected::Anything).await.unwrap();
    assert_eq!(overlay.read_dir(dir).await.unwrap().entries.len(), 1);
}
