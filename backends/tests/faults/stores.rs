//! Read-only stores under faults: broken connections, errors, truncated answers and answers about another version.

use bytes::Bytes;
use forebay_backends::store::StorePool;
use forebay_backends::{ErrorKind, Pool, Retry};

use super::http::{HttpFaultProxy, Wrong};
use super::path;
use super::store_servers::{Kind, StoreServer};

const KINDS: [Kind; 4] = [Kind::FakeGcs, Kind::Azurite, Kind::Nginx, Kind::NginxDav];

/// A server with one file, an unreliable connection to it, and the pool that uses the connection.
async fn troubled(kind: Kind, content: &Bytes) -> (StoreServer, HttpFaultProxy, StorePool) {
    let server = StoreServer::start(kind).await;
    server.put("f", content.clone()).await.unwrap();
    let way = HttpFaultProxy::start(server.port()).await;
    let pool = StorePool::attach(&server.url_by("", way.port()), &server.environment()).await.unwrap();
    (server, way, pool)
}

fn bytes() -> Bytes {
    (0..300_000_u32).flat_map(u32::to_le_bytes).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_read_over_a_way_that_fails_is_right() {
    let content = bytes();
    for kind in KINDS {
        let (_server, way, pool) = troubled(kind, &content).await;
        let version = pool.stat(&path("f")).await.unwrap().version;
        for wrong in [Wrong::ResetBefore, Wrong::ResetAfter, Wrong::SlowDown, Wrong::FailedAfter, Wrong::CutShort] {
            let before = pool.retried_requests();
            way.next("GET", wrong, 2);
            let range = 1_000..content.len() - 1_000;
            let read = pool.read(&path("f"), &version, range.start as u64..range.end as u64).await;
            let read = read.unwrap_or_else(|error| panic!("{kind:?}, {wrong:?}: {error}"));
            assert!(read == content[range], "{kind:?}, {wrong:?}: the bytes differ");
            assert_eq!(pool.retried_requests() - before, 2, "{kind:?}, {wrong:?}");
            way.next("HEAD", wrong, 1);
            if wrong != Wrong::CutShort {
                assert_eq!(pool.stat(&path("f")).await.unwrap().version, version, "{kind:?}, {wrong:?}");
            }
        }
    }
}

/// The version in an answer is checked, whether or not the server honoured the condition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_about_another_version_is_not_taken_for_it() {
    for kind in [Kind::Azurite, Kind::Nginx, Kind::NginxDav] {
        let (_server, way, pool) = troubled(kind, &bytes()).await;
        let version = pool.stat(&path("f")).await.unwrap().version;
        way.next("GET", Wrong::OtherEtag, 1);
        let error = pool.read(&path("f"), &version, 0..10).await.unwrap_err();
        assert!(error.is(ErrorKind::Stale), "{kind:?}: {error}");
        assert_eq!(pool.read(&path("f"), &version, 0..4).await.unwrap(), &[0; 4][..], "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_stays_busy_is_told_of_within_the_retries() {
    let (_server, way, pool) = troubled(Kind::Nginx, &bytes()).await;
    let version = pool.stat(&path("f")).await.unwrap().version;
    way.next("GET", Wrong::SlowDown, u32::MAX);
    let error = pool.read(&path("f"), &version, 0..10).await.unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later), "{error}");
}
