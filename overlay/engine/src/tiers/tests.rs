//! Tests of what the engine knows of tiers while files come, move and go.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::operator::{EvictRequest, FlushRequest};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Attrs, Error, Expected, Piece, Pool, PoolPath, RenameMode, Side, Time};
use forebay_cache::{Content, ContentId};
use tempfile::TempDir;

use super::moving::{MoveEnd, MoveReason};
use crate::fetch::FetchPriority;
use crate::node::NodeState;
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
        self.open_with(limit_bytes, "").await
    }

    /// The same with rules.
    async fn open_with(&self, limit_bytes: u64, rules: &str) -> Overlay {
        let policy = format!(
            "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
             [[tier]]\nname = \"quick\"\nfast = [\"{}\"]\nlimit = \"16MiB\"\n{rules}",
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
            other_root: Default::default(),
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

    /// Puts a file into the pool, as another client does.
    async fn put(&self, name: &str, content: &[u8]) {
        let pieces = vec![Ok(Piece { offset: 0, data: Bytes::copy_from_slice(content) })];
        let now = Time::now();
        let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, atime: now, mtime: now, xattrs: Vec::new() };
        let pieces = Box::pin(futures::stream::iter(pieces));
        self.pool.put(&path(name), content.len() as u64, pieces, &attrs, &Expected::Anything).await.unwrap();
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

const MIB: u64 = 1 << 20;
/// The limit of the fast directory in which the only copy finds no room.
const SMALL: u64 = 32 * MIB;
const LEN: usize = 3 << 19;

fn path(name: &str) -> PoolPath {
    PoolPath::parse(name).unwrap()
}

async fn read(overlay: &Overlay, name: &str) -> Vec<u8> {
    let ino = overlay.resolve(&path(name)).await.unwrap();
    overlay.open_file(ino, libc::O_RDONLY).await.unwrap();
    let bytes = overlay.read(ino, 0, 64 << 20).await.unwrap();
    overlay.release(ino, libc::O_RDONLY);
    bytes.to_vec()
}

/// Returns what is known of a file whose content is in memory.
fn in_memory(overlay: &Overlay, ino: Ino, is: impl Fn(&NodeState) -> bool) -> bool {
    let node = overlay.inner.node(ino).unwrap();
    let state = node.state.lock();
    state.record.file.content().is_some_and(|id| overlay.inner.store.is_volatile(id)) && is(&state)
}

/// Makes a file `b` whose only copy is in memory, while the fast directory has no room for it: `filler` has it, which
/// is not in the pool either.
async fn only_copy_in_memory(tiered: &Tiered, overlay: &Overlay) -> Ino {
    tiered.put("a", &[7; LEN]).await;
    for _ in 0..3 {
        assert!(read(overlay, "a").await == [7; LEN]);
    }
    let ino = overlay.resolve(&path("a")).await.unwrap();
    wait_until("it is promoted", || in_memory(overlay, ino, |_| true)).await;
    overlay.inner.trash.drain();
    write(overlay, "filler", &vec![1; (SMALL - MIB) as usize]).await;
    // The mount has another name for it than the pool. So another client that removes the pool's copy does not remove it.
    overlay.rename(Ino::ROOT, b"a", Ino::ROOT, b"b", RenameMode::Replace).await.unwrap();
    tiered.pool.remove(&path("a"), &Expected::Anything).await.unwrap();
    assert_eq!(overlay.resolve(&path("b")).await.unwrap(), ino);
    wait_until("it is the only copy", || in_memory(overlay, ino, |state| state.record.file.is_dirty())).await;
    // A round that finds no room.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(in_memory(overlay, ino, |state| state.record.file.is_dirty()));
    ino
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_copy_leaves_memory_when_there_is_room() {
    let tiered = Tiered::new("/dev/shm");
    let overlay = tiered.open(SMALL).await;
    let ino = only_copy_in_memory(&tiered, &overlay).await;
    assert!(overlay.inner.tiers.uses.lock().is_leaving(ino));
    overlay.unlink(Ino::ROOT, b"filler").await.unwrap();
    wait_until("it has left memory", || !in_memory(&overlay, ino, |_| true)).await;
    wait_until("it is noted", || !overlay.inner.tiers.uses.lock().is_leaving(ino)).await;
    assert!(read(&overlay, "b").await == [7; LEN]);
    overlay.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_copy_leaves_memory_after_a_restart() {
    let tiered = Tiered::new("/dev/shm");
    let overlay = tiered.open(SMALL).await;
    let ino = only_copy_in_memory(&tiered, &overlay).await;
    overlay.shutdown().await.unwrap();
    drop(overlay);
    let overlay = tiered.open(4 * SMALL).await;
    wait_until("it has left memory", || !in_memory(&overlay, ino, |_| true)).await;
    assert!(read(&overlay, "b").await == [7; LEN]);
    overlay.shutdown().await.unwrap();
}

/// SEMANTICS 93: "If a device fails that does not hold the catalog, clean content on it is read from the pool"
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_partly_on_a_bypassed_device_is_read() {
    let tiered = Tiered::new("/var/tmp");
    let content = |len: u64| (0..len).map(|at| ((at >> 12) % 251 + 1) as u8).collect::<Vec<_>>();
    let files = [("small", content(3 * MIB)), ("large", content(8 * MIB))];
    for (name, bytes) in &files {
        tiered.put(name, bytes).await;
    }
    let overlay = tiered.open_with(1 << 30, "[[rule]]\npaths = \"*\"\ntier = \"quick\"\n").await;
    let inner = &overlay.inner;
    let large = overlay.resolve(&path("large")).await.unwrap();
    overlay.open_file(large, libc::O_RDONLY).await.unwrap();
    let mut ids = Vec::new();
    for (name, _) in &files {
        let node = inner.node(overlay.resolve(&path(name)).await.unwrap()).unwrap();
        inner.ensure(&node, MIB..2 * MIB, FetchPriority::Demand).await.unwrap();
        ids.extend(node.state.lock().record.file.content());
    }
    assert_eq!(ids.len(), 2);
    // Content that is on the device for certain stays when the device is bypassed.
    let again = inner.clone();
    blocking(move || again.close_epoch()).await.unwrap();
    for _ in 0..3 {
        inner.store.note_error(ids[0], &Error::os(libc::EIO, Side::Cache, "a test made it fail"));
    }
    assert!(ids.iter().all(|id| inner.store.device_of(*id) != 0 && !inner.store.is_used(*id)));
    assert!(overlay.read(large, 6 * MIB, 1 << 20).await.unwrap() == files[1].1[6 << 20..7 << 20]);
    for (name, bytes) in &files {
        assert!(read(&overlay, name).await == *bytes, "{name}");
    }
    overlay.release(large, libc::O_RDONLY);
    overlay.shutdown().await.unwrap();
}

/// Content that a failed sync makes count as lost is not sent any more, so the syncs of a device that fails must end.
#[tokio::test(flavor = "multi_thread")]
async fn a_device_whose_syncs_fail_is_bypassed_and_no_more_content_is_synced_there() {
    let tiered = Tiered::new("/var/tmp");
    tiered.put("a", b"content").await;
    let overlay = tiered.open_with(1 << 30, "[[rule]]\npaths = \"*\"\ntier = \"quick\"\n").await;
    let inner = &overlay.inner;
    assert_eq!(read(&overlay, "a").await, b"content");
    let ino = overlay.resolve(&path("a")).await.unwrap();
    let id = inner.node(ino).unwrap().state.lock().record.file.content().unwrap();
    assert!(inner.store.device_of(id) != 0);
    // On the same device.
    let (lost, intact) = (ContentId(id.0 + 1), ContentId(id.0 + 2));
    let unsynced = |id: ContentId| Arc::new(Content::new(id.0, File::open("/dev/null").unwrap(), true));
    inner.sync_content(&unsynced(lost)).await.expect_err("nothing can be synced there");
    let known = inner.catalog.lost(lost);
    assert!(known.is_some());
    let failed = Err(Error::os(libc::EIO, Side::Cache, "a test made it fail"));
    for _ in 0..3 {
        inner.note_sync(lost, known.as_ref(), &failed);
    }
    assert!(inner.store.is_used(id), "a loss that is reported again says nothing new of the device");
    for _ in 0..3 {
        inner.note_sync(intact, None, &failed);
    }
    assert!(!inner.store.is_used(id));
    assert!(!inner.keep_what_is_sent(&unsynced(intact), false).await.unwrap());
    assert_eq!(inner.catalog.lost(intact), None);
    overlay.shutdown().await.unwrap();
}
