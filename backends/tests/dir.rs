//! The directory pool against the suite and against what goes wrong on real file systems.

mod common;

use std::path::Path;
use std::sync::Arc;

use forebay_backends::dir::DirPool;
use tempfile::TempDir;

/// A directory on the disk that the tests run from.
fn on_disk() -> TempDir {
    tempfile::Builder::new().prefix("forebay-dir-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn in_tmpfs() -> TempDir {
    let shm = Path::new("/dev/shm");
    assert!(shm.is_dir(), "these tests need the tmpfs at /dev/shm: mount -t tmpfs tmpfs /dev/shm");
    tempfile::Builder::new().prefix("forebay-dir-").tempdir_in(shm).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn directory_pool_on_disk_conforms() {
    let root = on_disk();
    common::assert_conforms(Arc::new(DirPool::open(root.path()).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn directory_pool_on_tmpfs_conforms() {
    let root = in_tmpfs();
    common::assert_conforms(Arc::new(DirPool::open(root.path()).unwrap())).await;
}
