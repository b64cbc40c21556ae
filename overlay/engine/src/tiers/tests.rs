//! Tests of what the engine knows of tiers while files come, move and go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::operator::{EvictRequest, FlushRequest};
use forebay_backends::memory::MemoryPool;
use tempfile::TempDir;

use super::moving::{MoveEnd, MoveReason};
use crate::{Caller, Ino, Options, Overlay, TestOptions, blocking, content_io, summary};

const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };
/// How long a test waits for a move.
const WAIT: Duration = Duration::from_secs(60);

/// A pool, a fast directory on a disk, and the directory of a faster tier.
struct Tiered {
    pool: Arc<MemoryPool>,
    disk: TempDir,
    tier: TempDir,
}

impl Tiered {
    /// `above`: where the faster tier is.
    fn new(above: &str) -> Self {
        let dir = |on| tempfile::tempdir_in(on).unwrap();
        Self { pool: Arc::new(MemoryPool::new()), disk: dir("/var/tmp"), tier: dir(above) }
    }

    /// Opens an overlay with a limit for the fast directory. A task of one that was shut down may hold it for a moment.
    async fn open(&self, limit_bytes: u64) -> Overlay {
        let policy = format!(
            "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
             [[tier]]\nname = \"quick\"\nfast = [\"{}\"]\nlimit = \"16MiB\"\n",
            self.tier.path().join("quick").display()
        );
        let options = || Options {
            pool: self.pool.clone(),
            fast: vec![self.disk.path().join("fast")],
            limit_bytes: Some(limit_bytes),
            policy: forebay_policy::Policy::parse(&policy).unwrap(),
            memory_bytes: 16 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            for_tests: TestOptions::default(),
        };
        let begun = Instant::now();
        loop {
            match Overlay::open(options()).await {
                Err(_) if begun.elapsed() < WAIT => tokio::time::sleep(Duration::from_millis(5)).await,
                opened => return opened.unwrap(),
            }
        }
    }
}

async fn write(overlay: &Overlay, name: &str, content: &[u8]) -> Ino {
    let created = overlay.create(Ino::ROOT, name.as_bytes(), 0o644, 0, libc::O_RDWR, CALLER).await;
    let ino = created.unwrap().0.attr.ino;
    for (number, part) in content.chunks(1 << 20).enumerate() {
        let written = overlay.write(ino, (number as u64) << 20, Bytes::copy_from_slice(part)).await;
        assert_eq!(written.unwrap() as usize, part.len());
    }
    overlay.close(ino, true).await.unwrap();
    overlay.release(ino, libc::O_RDWR);
    ino
}

async fn flush(overlay: &Overlay) {
    for _ in 0..3 {
        let done = summary(overlay.flush(FlushRequest { wait: true, ..Default::default() })).await.0;
        assert_eq!((done.failed, done.message), (0, None));
    }
}

async fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < WAIT, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn held(overlay: &Overlay) -> usize {
    overlay.inner.tiers.uses.lock().held(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_gone_or_changed_are_not_remembered() {
    const FILES: usize = 1000;
    let tiered = Tiered::new("/var/tmp");
    let overlay = tiered.open(1 << 30).await;
    let mut inos = Vec::new();
    for number in 0..FILES {
        inos.push(write(&overlay, &format!("f{number}"), b"content").await);
    }
    assert_eq!(held(&overlay), 0, "they are not in the pool yet");
    flush(&overlay).await;
    wait_until("all are clean", || held(&overlay) == FILES).await;
    assert!(inos.iter().all(|ino| overlay.inner.is_in_faster_tier(*ino)));
    // Changed.
    overlay.open_file(inos[0], libc::O_RDWR).await.unwrap();
    overlay.write(inos[0], 0, Bytes::from_static(b"other")).await.unwrap();
    overlay.close(inos[0], true).await.unwrap();
    overlay.release(inos[0], libc::O_RDWR);
    assert_eq!((held(&overlay), overlay.inner.is_in_faster_tier(inos[0])), (FILES - 1, false));
    // Evicted.
    let request = EvictRequest { paths: vec!["f1".into()], release_leases: false, dry_run: false };
    summary(overlay.evict(request)).await;
    assert_eq!((held(&overlay), overlay.inner.is_in_faster_tier(inos[1])), (FILES - 2, false));
    let inner = overlay.inner.clone();
    blocking(move || inner.evict_of_tier(1, &|_| true)).await.unwrap();
    assert_eq!(held(&overlay), FILES - 3, "evicted by the policy");
    // Removed.
    for number in 0..FILES {
        overlay.unlink(Ino::ROOT, format!("f{number}").as_bytes()).await.unwrap();
    }
    assert_eq!(held(&overlay), 0);
    assert!(inos.iter().all(|ino| !overlay.inner.is_in_faster_tier(*ino)));
    overlay.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_moved_to_the_last_tier_is_in_no_faster_one() {
    let tiered = Tiered::new("/var/tmp");
    let overlay = tiered.open(1 << 30).await;
    let ino = write(&overlay, "a", &[1; 100_000]).await;
    flush(&overlay).await;
    wait_until("it is clean", || overlay.inner.is_in_faster_tier(ino)).await;
    let begun = Instant::now();
    loop {
        let inner = overlay.inner.clone();
        let moved = blocking(move || {
            let node = inner.node(ino)?;
            inner.move_content(&node, inner.store.last_tier(), MoveReason::Placement)
        });
        match moved.await.unwrap() {
            MoveEnd::Moved(_) => break,
            // A task of the flush may have its content open.
            end => assert!(begun.elapsed() < WAIT, "{end:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!overlay.inner.is_in_faster_tier(ino) && held(&overlay) == 0);
    overlay.shutdown().await.unwrap();
}
