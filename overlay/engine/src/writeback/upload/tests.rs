use std::os::unix::fs::FileExt;

use forebay_backends::memory::MemoryPool;
use forebay_backends::{Attrs, Pool};

use super::*;
use crate::{Caller, Lookup, Options, Overlay, TestOptions, content_io};

async fn opened(pool: Arc<MemoryPool>, fast: &tempfile::TempDir) -> Overlay {
    let options = Options {
        pool,
        fast: vec![fast.path().to_owned()],
        limit_bytes: Some(1 << 28),
        policy: forebay_policy::Policy::parse("[default]\nflush = \"manual\"\n").unwrap(),
        memory_bytes: 16 << 20,
        content_io: content_io::Choice::Plain,
        read_only: false,
        node: "here".into(),
        reattached: false,
        other_root: Default::default(),
        for_tests: TestOptions::default(),
    };
    Overlay::open(options).await.unwrap()
}

/// Puts a file into the pool, as another client does.
async fn put(pool: &MemoryPool, name: &str) -> PoolPath {
    let time = Time { secs: 1, nanos: 0 };
    let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() };
    let data = Piece { offset: 0, data: Bytes::from_static(b"content") };
    let data = Box::pin(stream::iter([Ok(data)]));
    let path = PoolPath::parse(name).unwrap();
    pool.put(&path, 7, data, &attrs, &Expected::Absent).await.unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_file_whose_content_was_given_up_is_not_sent() {
    let (pool, fast) = (Arc::new(MemoryPool::new()), tempfile::tempdir_in("/var/tmp").unwrap());
    let path = put(&pool, "f").await;
    let overlay = opened(pool, &fast).await;
    let Lookup::Found(entry) = overlay.lookup(Ino::ROOT, b"f").await.unwrap() else { panic!("it is there") };
    let ino = entry.attr.ino;
    assert!(overlay.inner.snapshot(ino).await.unwrap().is_none());
    let sent = overlay.inner.upload(ino, &(Ino::ROOT, b"f"[..].into()), &path, &Expected::Anything).await;
    assert!(sent.unwrap().is_none());
    overlay.shutdown().await.unwrap();
}

/// After a power cut, the file may be dirty again, based on what was sent: the next flush sends what the device has.
#[tokio::test(flavor = "multi_thread")]
async fn content_that_cannot_be_synced_does_not_replace_the_pools_copy() {
    let (pool, fast) = (Arc::new(MemoryPool::new()), tempfile::tempdir_in("/var/tmp").unwrap());
    let overlay = opened(pool.clone(), &fast).await;
    let caller = Caller { uid: 0, gid: 0, pid: 1 };
    let created = overlay.create(Ino::ROOT, b"f", 0o644, 0, libc::O_RDWR, caller).await.unwrap();
    let ino = created.0.attr.ino;
    overlay.release(ino, libc::O_RDWR);
    let node = overlay.inner.node(ino).unwrap();
    let id = node.state.lock().record.file.content().unwrap();
    // Everything but a sync succeeds on this file.
    let unsynced = Content::new(id.0, File::open("/dev/null").unwrap(), true);
    node.state.lock().content = Some(Arc::new(unsynced));
    overlay.inner.flush_inode_now(ino).await.expect_err("its content cannot be synced");
    assert!(pool.stat(&PoolPath::parse("f").unwrap()).await.is_err(), "it was sent");
    overlay.shutdown().await.unwrap();
}

/// After a power cut, dirty content counts. Fetched content of an open epoch may not be on the device.
#[tokio::test(flavor = "multi_thread")]
async fn fetched_content_that_becomes_the_only_copy_is_synced_before_the_catalog_says_so() {
    let (pool, fast) = (Arc::new(MemoryPool::new()), tempfile::tempdir_in("/var/tmp").unwrap());
    put(&pool, "f").await;
    let overlay = opened(pool, &fast).await;
    let Lookup::Found(entry) = overlay.lookup(Ino::ROOT, b"f").await.unwrap() else { panic!("it is there") };
    let ino = entry.attr.ino;
    overlay.open_file(ino, libc::O_RDONLY).await.unwrap();
    overlay.release(ino, libc::O_RDONLY);
    // No task syncs the catalog from now on.
    overlay.inner.stop.cancel();
    let node = overlay.inner.node(ino).unwrap();
    assert!(node.state.lock().record.file.is_whole());
    {
        let mut txn = Txn::begin(&overlay.inner);
        txn.pool_has(Ino::ROOT, b"f", None).unwrap();
        overlay.inner.lost_in_pool(&mut txn, ino).unwrap();
        assert_eq!(overlay.inner.catalog.to_sync_first(), 0, "a change that is not written registers nothing");
        txn.commit().unwrap();
        assert_eq!(overlay.inner.catalog.to_sync_first(), 1);
    }
    {
        let state = node.state.lock();
        assert!(state.record.file.is_dirty() && !state.dirty_content.is_durable());
    }
    let inner = overlay.inner.clone();
    blocking(move || inner.sync_now(false)).await.unwrap();
    assert!(node.state.lock().dirty_content.is_durable());
    overlay.shutdown().await.unwrap();
}

#[test]
fn a_write_that_is_under_way_is_waited_for() {
    const LEN: usize = 128 << 20;
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&vec![b'a'; LEN], 0).unwrap();
    let byte_at = |at: usize| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).unwrap();
        byte[0]
    };
    std::thread::scope(|scope| {
        scope.spawn(|| file.write_at(&vec![b'b'; LEN], 0).unwrap());
        while byte_at(0) == b'a' {
            std::thread::yield_now();
        }
        let before = Stamp::of(&file).unwrap();
        await_writes(&file).unwrap();
        assert_eq!(byte_at(LEN - 1), b'b');
        assert_eq!(Stamp::of(&file).unwrap(), before, "the write set the times when it began, and we set none");
    });
}
