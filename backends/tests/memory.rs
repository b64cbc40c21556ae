//! The pool in memory against the suite, and its features for tests.

mod common;

use std::sync::Arc;

use bytes::Bytes;
use forebay_backends::memory::MemoryPool;
use forebay_backends::{
    Capabilities, ConditionalPut, ErrorKind, Expected, FileKind, Objects, Part, Pool, PoolPath, Renames,
};

use common::{attrs, path, pieces};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_pool_conforms() {
    common::assert_conforms(Arc::new(MemoryPool::new())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_pool_without_capabilities_conforms() {
    let less = Capabilities {
        objects: Objects { symlink_times: true, sparse: true, ..Objects::default() },
        renames: Renames::Unable,
        ranged_write: false,
        parts_ahead: None,
        conditional_put: ConditionalPut::Checked,
        ..MemoryPool::all_capabilities()
    };
    common::assert_conforms(Arc::new(MemoryPool::with_capabilities(less))).await;
}

#[tokio::test]
async fn a_read_only_pool_refuses_every_change() {
    let pool = MemoryPool::with_capabilities(Capabilities { read_only: true, ..MemoryPool::all_capabilities() });
    let answer = pool.mkdir(&path("d"), &attrs()).await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::ReadOnly);
    pool.stat(&PoolPath::root()).await.unwrap();
}

#[tokio::test]
async fn snapshot_shows_the_whole_tree() {
    let pool = MemoryPool::new();
    pool.mkdir(&path("d"), &attrs()).await.unwrap();
    pool.put(&path("d/f"), 5, pieces(&[(1, "abc")]), &attrs(), &Expected::Absent).await.unwrap();
    pool.link(&path("d/f"), &path("g")).await.unwrap();
    pool.symlink(&path("l"), b"d/f", &attrs()).await.unwrap();
    let snapshot = pool.snapshot();
    let names: Vec<_> = snapshot.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["/d", "/d/f", "/g", "/l"]);
    assert_eq!(snapshot[&path("g")].content, Bytes::from_static(b"\0abc\0"));
    assert_eq!((snapshot[&path("g")].nlink, snapshot[&path("g")].kind), (2, FileKind::File));
    assert_eq!(snapshot[&path("l")].target, b"d/f");
}

#[tokio::test]
async fn parts_that_were_sent_have_names_and_are_not_in_the_tree() {
    let pool = MemoryPool::new();
    pool.send_part("b", 3, pieces(&[(0, "abc")])).await.unwrap();
    let part = pool.send_part("a", 5, pieces(&[(1, "def")])).await.unwrap();
    assert_eq!(pool.parts(), ["a", "b"]);
    assert!(pool.snapshot().is_empty());
    pool.remove_part("b").await.unwrap();
    pool.put_parts(&path("f"), vec![Part::Sent(part)], &attrs(), &Expected::Absent).await.unwrap();
    assert_eq!(pool.parts(), ["a"], "parts stay until they are removed");
    assert_eq!(pool.snapshot()[&path("f")].content, Bytes::from_static(b"\0def\0"));
}

#[tokio::test]
async fn a_full_pool_refuses_content_and_takes_it_again_after_removals() {
    let pool = MemoryPool::new();
    pool.set_capacity_bytes(10);
    pool.put(&path("a"), 8, pieces(&[(0, "12345678")]), &attrs(), &Expected::Absent).await.unwrap();
    let full = pool.put(&path("b"), 3, pieces(&[(0, "abc")]), &attrs(), &Expected::Absent).await;
    assert_eq!(full.unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(pool.space().await.unwrap().free_bytes, 2);
    pool.put(&path("a"), 9, pieces(&[(0, "123456789")]), &attrs(), &Expected::Anything).await.unwrap();
    assert_eq!(pool.space().await.unwrap().free_bytes, 1);
    pool.remove(&path("a"), &Expected::Anything).await.unwrap();
    assert_eq!(pool.space().await.unwrap().free_bytes, 10);
    pool.put(&path("b"), 3, pieces(&[(0, "abc")]), &attrs(), &Expected::Absent).await.unwrap();
}

#[tokio::test]
async fn the_same_calls_give_the_same_versions() {
    let mut versions = Vec::new();
    for _ in 0..2 {
        let pool = MemoryPool::new();
        pool.mkdir(&path("d"), &attrs()).await.unwrap();
        let put = pool.put(&path("d/f"), 1, pieces(&[(0, "x")]), &attrs(), &Expected::Absent).await.unwrap();
        versions.push(put.version);
    }
    assert_eq!(versions[0], versions[1]);
}
