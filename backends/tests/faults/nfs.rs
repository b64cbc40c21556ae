//! NFS under faults: broken connections, dropped calls, short reads, truncated records, servers that die.

use std::path::Path;
use std::time::Duration;

use forebay_backends::nfs::NfsPool;
use forebay_backends::{ErrorKind, FileKind};

use super::nfs_server::{NfsServer, Squash};
use super::restarts::Restarts;
use super::rpc::{Loss, NfsFaultProxy, procedure};
use super::*;

fn start() -> NfsServer {
    NfsServer::start(Path::new(env!("CARGO_TARGET_TMPDIR")), Squash::None)
}

/// Returns all names in the export, including those of the pool's own unfinished files.
fn unfinished(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nfs_endures_a_way_that_fails() {
    let server = start();
    let way = Arc::new(NfsFaultProxy::start(server.nfs_port()).await);
    let troubled = NfsPool::open(&server.url_by("/pool", way.port())).await.unwrap();
    let sound = NfsPool::open(&server.url()).await.unwrap();
    assert_endures(Arc::new(troubled), Arc::new(sound), way, rounds()).await;
    assert_eq!(unfinished(&server.export()), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nfs_endures_a_server_that_is_killed_and_started_again() {
    let restarts =
        Restarts::of(start, NfsServer::kill, NfsServer::start_again, |server| (server.url(), server.export()));
    let (url, export) = restarts.place().clone();
    let (troubled, sound) = (NfsPool::open(&url).await.unwrap(), NfsPool::open(&url).await.unwrap());
    let restarts = Arc::new(restarts);
    assert_endures(Arc::new(troubled), Arc::new(sound), Arc::clone(&restarts) as Arc<dyn Trouble>, rounds()).await;
    // The server's files exist only while the server value lives.
    assert_eq!(unfinished(&export), [""; 0]);
    drop(restarts);
}

/// A policy's deadline says how long a call may take, and a server may take that long to return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_nfs_server_that_is_away_is_waited_for_as_long_as_the_deadline_allows() {
    let mut server = start();
    let patient = NfsPool::open(&server.url()).await.unwrap().with_deadline(Duration::from_secs(60));
    let brief = NfsPool::open(&server.url()).await.unwrap().with_deadline(Duration::from_secs(1));
    server.kill();
    let error = brief.stat(&path("")).await.unwrap_err();
    assert!(error.is(ErrorKind::Unavailable), "{error}");
    let returns = async move {
        tokio::time::sleep(Duration::from_secs(12)).await;
        tokio::task::spawn_blocking(move || {
            server.start_again();
            server
        })
        .await
    };
    let stat = async move { patient.stat(&path("")).await };
    let (_server, stat) = tokio::join!(tokio::spawn(returns), tokio::spawn(stat));
    assert_eq!(stat.unwrap().unwrap().kind, FileKind::Directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_short_read_leaves_out_is_asked_for() {
    let server = start();
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n / 7) as u8).collect();
    std::fs::write(server.export().join("f"), &data).unwrap();
    for wrong in [Loss::Short, Loss::Cut, Loss::Late] {
        let way = NfsFaultProxy::start(server.nfs_port()).await;
        let pool = NfsPool::open(&server.url_by("/pool", way.port())).await.unwrap();
        let version = pool.stat(&path("f")).await.unwrap().version;
        way.lose(procedure::READ, wrong);
        let read = pool.read(&path("f"), &version, 0..u64::MAX).await.unwrap();
        assert!(way.has_lost() && read == data, "{wrong:?}: {} bytes", read.len());
    }
}
