//! Answers of the pool that arrive after later questions were answered: what is newer stays.

use std::sync::Arc;

use forebay_backends::decorators::CallKind;
use forebay_engine::{Options, Overlay, Policy};
use forebay_tests::engine::*;
use forebay_tests::held::{HeldCalls, HeldPool, open_held};

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
