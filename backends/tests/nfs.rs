//! The NFS pool against a real nfs-ganesha: the suite, and faults of servers and connections.

mod common;
#[path = "nfs/listings.rs"]
mod listings;
#[path = "nfs/lost_answers.rs"]
mod lost_answers;
#[path = "nfs/restarts.rs"]
mod restarts;
#[path = "nfs/rights.rs"]
mod rights;
#[path = "../../tests/src/servers/nfs.rs"]
#[allow(dead_code, reason = "some calls are for benches alone")]
mod server;
#[path = "../../tests/src/servers/started.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod started;
#[path = "nfs/third_parties.rs"]
mod third_parties;
#[path = "nfs/unreliable.rs"]
mod unreliable;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_backends::nfs::NfsPool;
use forebay_backends::{
    Attrs, ErrorKind, Expected, FileKind, Piece, Pool, PoolPath, RenameMode, Result, Retry, SetAttrs, Stat, Version,
};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::timeout;

use common::{attrs, path, pieces};
use server::{NfsServer, Squash};
use unreliable::{Loss, NfsFaultProxy, procedure};

/// The time limit of a single step: servers restart in a second or two.
const LIMIT: Duration = Duration::from_secs(60);

fn start(squash: Squash) -> NfsServer {
    NfsServer::start(Path::new(env!("CARGO_TARGET_TMPDIR")), squash)
}

async fn open(server: &NfsServer) -> NfsPool {
    NfsPool::open(&server.url()).await.unwrap()
}

async fn put(pool: &NfsPool, name: &str, data: &'static str, expected: &Expected) -> Result<Stat> {
    pool.put(&path(name), data.len() as u64, pieces(&[(0, data)]), &attrs(), expected).await
}

async fn content(pool: &NfsPool, name: &str) -> Bytes {
    let version = pool.stat(&path(name)).await.unwrap().version;
    pool.read(&path(name), &version, 0..u64::MAX).await.unwrap()
}

/// The pool's own unfinished files in a directory of the export.
fn unfinished(dir: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.file_name().unwrap().as_encoded_bytes().starts_with(b".forebay~")).collect()
}

/// Bytes that differ from offset to offset.
fn pattern(length: usize) -> Bytes {
    let word = |n: usize| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..length.div_ceil(8)).flat_map(word).take(length).collect()
}

async fn assert_conforms(pool: NfsPool) {
    // Ganesha never changes the times of symlinks.
    assert!(!pool.capabilities().objects.symlink_times);
    common::assert_conforms(Arc::new(pool)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nfs_pool_conforms() {
    let server = start(Squash::None);
    let pool = open(&server).await;
    let can = pool.capabilities().clone();
    assert!(
        can.objects.owners
            && can.objects.special_files
            && can.objects.hard_links
            && can.objects.symlinks
            && can.objects.sparse
            && !can.read_only
    );
    assert_conforms(pool).await;
    assert_eq!(unfinished(&server.export()), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nfs_pool_conforms_where_root_is_squashed() {
    let server = start(Squash::Root);
    fs::set_permissions(server.export(), fs::Permissions::from_mode(0o777)).unwrap();
    let pool = open(&server).await;
    assert!(!pool.capabilities().objects.owners);
    assert_conforms(pool).await;
}

/// A put whose caller drops it at any moment leaves either the old file or the new one, complete, and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn puts_that_are_given_up_leave_whole_files() {
    let server = start(Squash::None);
    let pool = open(&server).await;
    let (name, attrs) = (path("f"), attrs());
    let (old, new) = (Bytes::from(vec![1; 3 << 20]), Bytes::from(vec![2; (3 << 20) + 1]));
    let put = |data: &Bytes| {
        let pieces = [Ok(Piece { offset: 0, data: data.clone() })];
        pool.put(&name, data.len() as u64, stream::iter(pieces).boxed(), &attrs, &Expected::Anything)
    };
    let mut given_up = 0;
    for round in 0..150 {
        put(&old).await.unwrap();
        given_up += u32::from(timeout(Duration::from_micros(60 * round), put(&new)).await.is_err());
        // A call that was dropped at its last step may still be completed.
        let found = loop {
            let version = match pool.stat(&name).await {
                Ok(stat) => stat.version,
                // The call that was given up has not ended yet.
                Err(error) => {
                    assert!(error.is(ErrorKind::Busy), "{error}");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                }
            };
            match pool.read(&name, &version, 0..u64::MAX).await {
                Err(error) if error.is(ErrorKind::Stale) => {}
                found => break found.unwrap(),
            }
        };
        assert!(found == old || found == new, "{} bytes in round {round}", found.len());
    }
    assert!(given_up > 0, "every put was too quick to be given up");
    let cleared = timeout(LIMIT, async {
        while !unfinished(&server.export()).is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    cleared.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_export_is_named_with_those_that_there_are() {
    let server = start(Squash::None);
    let error = NfsPool::open(&server.url_of("/nothing/here")).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied), "{error}");
    let text = error.to_string();
    assert!(text.contains("/nothing/here") && text.contains("/pool") && text.contains("export"), "{text}");
    let error = NfsPool::open(&server.url_of("/pool/missing")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_an_export_is_a_pool_of_its_own() {
    let server = start(Squash::None);
    fs::create_dir_all(server.export().join("a/b c")).unwrap();
    let pool = NfsPool::open(&server.url_of("/pool/a/b%20c")).await.unwrap();
    assert!(pool.url().contains("/pool/a/b%20c?"), "{}", pool.url());
    put(&pool, "f", "x", &Expected::Absent).await.unwrap();
    assert_eq!(fs::read(server.export().join("a/b c/f")).unwrap(), b"x");
    fs::write(server.export().join("file"), "x").unwrap();
    let file = NfsPool::open(&server.url_of("/pool/file")).await.unwrap_err();
    assert_eq!(file.kind(), ErrorKind::NotDirectory, "{file}");
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_outlive_a_restart_of_the_server() {
    let mut server = start(Squash::None);
    let pool = open(&server).await;
    let version = put(&pool, "f", "x", &Expected::Absent).await.unwrap().version;
    assert!(matches!(version, Version::Inode { dev: 0, .. }), "{version:?}");
    server.kill();
    server.start_again();
    assert_eq!(pool.stat(&path("f")).await.unwrap().version, version);
    assert_eq!(open(&server).await.stat(&path("f")).await.unwrap().version, version);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_put_takes_little_space_and_rewriting_in_place_keeps_the_end_a_hole() {
    let server = start(Squash::None);
    let pool = open(&server).await;
    let size = 256 << 20;
    let content = || pieces(&[(0, "start"), (size - 3, "end")]);
    pool.put(&path("f"), size, content(), &attrs(), &Expected::Absent).await.unwrap();
    let blocks = |name: &str| fs::metadata(server.export().join(name)).unwrap().blocks();
    assert!(blocks("f") < 1_000, "{} blocks", blocks("f"));
    fs::write(server.export().join("a"), "short").unwrap();
    fs::hard_link(server.export().join("a"), server.export().join("b")).unwrap();
    pool.put(&path("a"), size, content(), &attrs(), &Expected::Anything).await.unwrap();
    assert!(blocks("b") < 10_000, "{} blocks", blocks("b"));
    assert_eq!(fs::metadata(server.export().join("b")).unwrap().len(), size);
    assert_eq!(unfinished(&server.export()), Vec::<PathBuf>::new());
}
