//! Answers of the pool that arrive after later questions were answered: what is newer stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_backends::Result;
use forebay_backends::decorators::{Around, CallKind, Decorated, PoolAnswer, PoolCall};
use forebay_engine::{Options, Overlay, Policy};
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
    assert_eq!(stage(&overlay, "d").await.1, Vec::new());
    fixture.put("d/f", b"changed").await;
    fixture.put("d/g", b"made").await;
    slow.0.store(true, Ordering::Relaxed);
    let (staged, failed) = stage(&overlay, "d").await;
    assert_eq!((staged.files, failed), (2, Vec::new()));
    fixture.fault.set_down(true);
    slow.0.store(false, Ordering::Relaxed);
    assert_eq!(read(&overlay, "d/f").await.unwrap(), "changed");
    assert_eq!(read(&overlay, "d/g").await.unwrap(), "made");
}
