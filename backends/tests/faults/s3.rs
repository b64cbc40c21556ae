//! S3 under faults: broken connections, errors before and after the server carried out a request, truncated answers
//! and answers about another version, wrong clocks, and servers that die.

use std::time::Duration;

use bytes::Bytes;
use forebay_backends::s3::S3Pool;
use forebay_backends::{Error, ErrorKind, Expected, FileKind, RenameMode, Result, Retry, Stat, Version};
use futures::TryStreamExt;

use super::common::pieces;
use super::http::{HttpFaultProxy, Wrong};
use super::restarts::Restarts;
use super::s3_server::{Rgw, Versitygw, curl_at, environment, url_at};
use super::*;

/// In this environment Ceph's gateway answers some hundred requests per second.
fn rounds_on_ceph() -> u32 {
    rounds() / 5
}

async fn attach(port: u16) -> S3Pool {
    S3Pool::attach(&url_at(port), &environment()).await.unwrap()
}

/// A server, an unreliable connection to it, and the pool that uses the connection.
async fn troubled() -> (Versitygw, HttpFaultProxy, S3Pool) {
    let server = Versitygw::start();
    let way = HttpFaultProxy::start(server.port()).await;
    let pool = attach(way.port()).await;
    (server, way, pool)
}

async fn put(pool: &S3Pool, data: &'static str, expected: &Expected) -> Result<Stat> {
    pool.put(&path("f"), data.len() as u64, pieces(&[(0, data)]), &attrs(), expected).await
}

async fn read(pool: &S3Pool, version: &Version) -> Result<Bytes> {
    pool.read(&path("f"), version, 0..u64::MAX).await
}

async fn content(pool: &S3Pool) -> Bytes {
    let version = pool.stat(&path("f")).await.unwrap().version;
    read(pool, &version).await.unwrap()
}

/// Another client's unconditional write.
fn theirs(port: u16) -> impl FnOnce() + Send + 'static {
    move || drop(curl_at(port, &["-X", "PUT", "-d", "theirs"], "f"))
}

/// A listing costs as much as twelve other requests, and each open revalidates.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_known_is_asked_for_by_one_request() {
    let (_server, way, pool) = troubled().await;
    let known = put(&pool, "known", &Expected::Anything).await.unwrap();
    let before = way.requests();
    assert!(pool.still_has(&path("f"), &known.version).await.unwrap());
    assert_eq!(way.requests() - before, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_on_versitygw_endures_a_way_that_fails() {
    let server = Versitygw::start();
    let way = Arc::new(HttpFaultProxy::start(server.port()).await);
    let (troubled, sound) = (attach(way.port()).await, attach(server.port()).await);
    assert_endures(Arc::new(troubled), Arc::new(sound), way, rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_on_ceph_endures_a_way_that_fails() {
    let server = Rgw::start();
    let way = Arc::new(HttpFaultProxy::start(server.port()).await);
    let (troubled, sound) = (attach(way.port()).await, attach(server.port()).await);
    assert_endures(Arc::new(troubled), Arc::new(sound), way, rounds_on_ceph()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_endures_a_server_that_is_killed_and_started_again() {
    let restarts = Restarts::of(Versitygw::start, Versitygw::kill, Versitygw::resume, Versitygw::port);
    let (troubled, sound) = (attach(*restarts.place()).await, attach(*restarts.place()).await);
    assert_endures(Arc::new(troubled), Arc::new(sound), Arc::new(restarts), rounds()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_endures_a_gateway_of_ceph_that_is_killed_and_started_again() {
    let restarts = Restarts::of(Rgw::start, Rgw::kill, Rgw::resume, Rgw::port);
    let (troubled, sound) = (attach(*restarts.place()).await, attach(*restarts.place()).await);
    assert_endures(Arc::new(troubled), Arc::new(sound), Arc::new(restarts), rounds_on_ceph()).await;
}

const LOST: [Wrong; 2] = [Wrong::ResetAfter, Wrong::FailedAfter];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_whose_answer_is_lost_is_made_once() {
    let (_server, way, pool) = troubled().await;
    for wrong in LOST.into_iter().chain([Wrong::ResetBefore, Wrong::SlowDown]) {
        for expected in [Expected::Absent, Expected::Anything] {
            way.next("PUT", wrong, 1);
            let version =
                put(&pool, "ours", &expected).await.unwrap_or_else(|error| panic!("{wrong:?}: {error}")).version;
            assert_eq!(pool.stat(&path("f")).await.unwrap().version, version);
            way.next("DELETE", wrong, 1);
            pool.remove(&path("f"), &Expected::Version(version)).await.unwrap();
            assert!(pool.stat(&path("f")).await.unwrap_err().is(ErrorKind::NotFound));
        }
        way.next("PUT", wrong, 1);
        assert_eq!(pool.mkdir(&path("d"), &attrs()).await.unwrap().kind, FileKind::Directory);
        way.next("DELETE", wrong, 1);
        pool.remove_dir(&path("d")).await.unwrap();
    }
    assert!(pool.retried_requests() >= 24, "{}", pool.retried_requests());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_writes_while_the_answer_of_a_removal_is_lost_stays() {
    let (server, way, pool) = troubled().await;
    for wrong in LOST {
        let version = put(&pool, "ours", &Expected::Anything).await.unwrap().version;
        way.next_while("DELETE", wrong, theirs(server.port()));
        pool.remove(&path("f"), &Expected::Version(version)).await.unwrap();
        assert_eq!(content(&pool).await, "theirs", "{wrong:?}");
    }
}

/// versitygw honours a condition on a removal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_writes_between_the_look_and_the_removal_stays() {
    let (server, way, pool) = troubled().await;
    let version = put(&pool, "ours", &Expected::Anything).await.unwrap().version;
    way.next_while("DELETE", Wrong::Late, theirs(server.port()));
    let error = pool.remove(&path("f"), &Expected::Version(version)).await.unwrap_err();
    assert!(error.is(ErrorKind::Conflict), "{error}");
    assert_eq!(content(&pool).await, "theirs");
    // The same holds for the source of a rename.
    put(&pool, "ours", &Expected::Anything).await.unwrap();
    way.next_while("DELETE", Wrong::Late, theirs(server.port()));
    let error = pool.rename(&path("f"), &path("g"), RenameMode::Replace).await.unwrap_err();
    assert!(error.is(ErrorKind::Busy), "{error}");
    assert_eq!(content(&pool).await, "theirs");
    let copy = pool.stat(&path("g")).await.unwrap().version;
    assert_eq!(pool.read(&path("g"), &copy, 0..u64::MAX).await.unwrap(), "ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_writes_while_the_answer_of_a_put_is_lost_stays() {
    let (server, way, pool) = troubled().await;
    for wrong in LOST {
        for before in [None, Some("before")] {
            if let Some(before) = before {
                put(&pool, before, &Expected::Anything).await.unwrap();
            }
            way.next_while("PUT", wrong, theirs(server.port()));
            let error = put(&pool, "ours", &Expected::Anything).await.unwrap_err();
            assert_eq!((error.kind(), error.retry()), (ErrorKind::Busy, Retry::Later), "{error}");
            assert_eq!(content(&pool).await, "theirs", "{wrong:?}");
            // A caller that still wants its content writes it again.
            put(&pool, "ours", &Expected::Anything).await.unwrap();
            assert_eq!(content(&pool).await, "ours");
            pool.remove(&path("f"), &Expected::Anything).await.unwrap();
        }
    }
}

/// After a kill that interrupted the completion of an upload, versitygw reports the upload as complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_that_is_said_to_be_complete_and_is_not_is_an_error() {
    let (_server, way, pool) = troubled().await;
    let large: &'static str = "0123456789abcdef".repeat(600 << 10).leak();
    way.next("POST", Wrong::Pretended, 2);
    let error = put(&pool, large, &Expected::Absent).await.unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later), "{error}");
    assert!(pool.stat(&path("f")).await.unwrap_err().is(ErrorKind::NotFound));
    // An upload that was completed is complete even if the answer was lost.
    way.next("POST", Wrong::ResetAfter, 1);
    let version = put(&pool, large, &Expected::Absent).await.unwrap().version;
    assert_eq!(read(&pool, &version).await.unwrap(), large);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_breaks_off_is_asked_for_again() {
    let (_server, way, pool) = troubled().await;
    let version = put(&pool, "all of it", &Expected::Absent).await.unwrap().version;
    way.next("GET", Wrong::CutShort, 2);
    assert_eq!(read(&pool, &version).await.unwrap(), "all of it");
    assert_eq!(pool.retried_requests(), 2);
}

/// A server that answers with another version's ETag is not trusted, and its bytes are not returned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_with_another_etag_is_not_taken_for_the_version() {
    let (_server, way, pool) = troubled().await;
    let version = put(&pool, "content", &Expected::Absent).await.unwrap().version;
    way.next("GET", Wrong::OtherEtag, 1);
    let error = read(&pool, &version).await.unwrap_err();
    assert!(error.is(ErrorKind::Stale), "{error}");
    assert_eq!(read(&pool, &version).await.unwrap(), "content");
}

/// The attributes of an archived object are available, its content is not; the listing must not fail for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_with_contents_has_an_object_whose_content_is_refused() {
    let (_server, way, pool) = troubled().await;
    put(&pool, "archived", &Expected::Absent).await.unwrap();
    pool.put(&path("empty"), 0, pieces(&[]), &attrs(), &Expected::Absent).await.unwrap();
    for refused in [true, false] {
        if refused {
            way.next("GET", Wrong::Archived, 100);
        } else {
            // Consumes the last injected fault.
            way.next("GET", Wrong::Archived, 1);
            pool.list(&path("")).await.unwrap().try_collect::<Vec<_>>().await.unwrap();
        }
        let pages: Vec<_> = pool.list_with_contents(&path(""), 1 << 20).await.unwrap().try_collect().await.unwrap();
        let found = |name: &str| pages.iter().flatten().find(|entry| entry.name == name.as_bytes()).expect("a name");
        assert_eq!((found("f").stat.size, found("empty").stat.size), (8, 0));
        let content = found("f").content.as_deref();
        assert_eq!(content, if refused { None } else { Some(&b"archived"[..]) });
        if refused {
            let error = read(&pool, &pool.stat(&path("f")).await.unwrap().version).await.unwrap_err();
            assert!(error.to_string().contains("InvalidObjectState"), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_wrong_is_named() {
    let (_server, way, pool) = troubled().await;
    let version = put(&pool, "content", &Expected::Absent).await.unwrap().version;
    let named = |error: Error| {
        assert_eq!((error.kind(), error.retry()), (ErrorKind::PermissionDenied, Retry::Never), "{error}");
        let text = error.to_string();
        assert!(text.contains("clock") && text.contains("RequestTimeTooSkewed"), "{text}");
    };
    way.next("GET", Wrong::Skewed, 1);
    named(read(&pool, &version).await.unwrap_err());
    way.next("PUT", Wrong::Skewed, 1);
    named(put(&pool, "other", &Expected::Version(version)).await.unwrap_err());
    assert_eq!(pool.retried_requests(), 0, "the clock is no better a moment later");
    way.next("GET", Wrong::Skewed, 1);
    named(S3Pool::attach(&url_at(way.port()), &environment()).await.unwrap_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stays_busy_is_told_of_within_the_retries() {
    let (_server, way, pool) = troubled().await;
    way.next("PUT", Wrong::SlowDown, u32::MAX);
    let error = put(&pool, "content", &Expected::Absent).await.unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later), "{error}");
    assert!(error.to_string().contains("SlowDown"), "{error}");
}

/// A policy's deadline says how long a call may take, and a server may take that long to return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_waited_for_as_long_as_the_deadline_allows() {
    let mut server = Versitygw::start();
    let patient = attach(server.port()).await.with_deadline(Duration::from_secs(60));
    put(&patient, "content", &Expected::Absent).await.unwrap();
    let brief = attach(server.port()).await.with_deadline(Duration::from_secs(1));
    server.kill();
    let error = brief.stat(&path("f")).await.unwrap_err();
    assert!(error.is(ErrorKind::Unavailable) && error.to_string().contains("refused"), "{error}");
    // Longer than calls without a deadline are retried, and than six retries took.
    let away = tokio::time::sleep(Duration::from_secs(14));
    let returns = async move {
        away.await;
        tokio::task::spawn_blocking(move || {
            server.resume();
            server
        })
        .await
    };
    let (_server, stat) = tokio::join!(tokio::spawn(returns), tokio::spawn(async move { content(&patient).await }));
    assert_eq!(stat.unwrap(), "content");
}

/// The server fails after it has taken the note of the rename. The directory may then be here, there, or in both places.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_whose_rename_stops_half_way_is_in_doubt_until_it_is_finished() {
    let (server, way, pool) = troubled().await;
    let way = Arc::new(way);
    pool.mkdir(&path("a"), &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
    for name in ["a/one", "a/two", "a/three"] {
        let content = pieces(&[(0, "content")]);
        pool.put(&path(name), 7, content, &attrs(), &Expected::Absent).await.unwrap();
    }
    // The target is an empty directory: also a rename that has copied nothing finds one there.
    pool.mkdir(&path("b"), &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
    let later = Arc::clone(&way);
    way.next_while("PUT", Wrong::Late, move || later.next("PUT", Wrong::SlowDown, u32::MAX));
    let error = pool.rename(&path("a"), &path("b"), RenameMode::Replace).await.unwrap_err();
    assert!(error.is(ErrorKind::Unavailable), "{error}");
    let error = pool.stat(&path("b")).await.unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Busy, Retry::Later), "{error}");
    assert!(error.to_string().contains("SlowDown"), "{error}");
    for (from, to) in [("a", "b"), ("b", "c"), ("a", "c")] {
        let error = pool.rename(&path(from), &path(to), RenameMode::Replace).await.unwrap_err();
        assert!(error.is(ErrorKind::Busy), "{error}");
    }
    // The server has recovered.
    way.next("PUT", Wrong::Late, 1);
    let since = std::time::Instant::now();
    while let Err(error) = pool.stat(&path("b")).await {
        assert!(error.is(ErrorKind::Busy) && since.elapsed() < Duration::from_secs(120), "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(pool.stat(&path("a")).await.unwrap_err().is(ErrorKind::NotFound));
    let pages: Vec<_> = pool.list(&path("b")).await.unwrap().try_collect().await.unwrap();
    assert_eq!(pages.concat().len(), 3);
    let left = pool.list(&path("")).await.unwrap().try_collect::<Vec<_>>().await.unwrap().concat();
    assert_eq!(left.into_iter().map(|entry| entry.name).collect::<Vec<_>>(), [b"b"]);
    assert!(!curl_at(server.port(), &[], "?list-type=2").contains("rename-"), "the note is still there");
}

/// An archived object cannot be copied, so the rename could never be finished.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_whose_rename_is_refused_for_good_stays_where_it_is() {
    for is_there in [false, true] {
        let (server, way, pool) = troubled().await;
        let way = Arc::new(way);
        for name in ["a", "a/sub"] {
            pool.mkdir(&path(name), &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
        }
        for name in ["a/one", "a/two", "a/sub/three"] {
            let content = pieces(&[(0, "content")]);
            pool.put(&path(name), 7, content, &attrs(), &Expected::Absent).await.unwrap();
        }
        if is_there {
            pool.mkdir(&path("b"), &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
        }
        let later = Arc::clone(&way);
        way.next_while("PUT", Wrong::Late, move || later.next("PUT", Wrong::Archived, 1));
        let error = pool.rename(&path("a"), &path("b"), RenameMode::Replace).await.unwrap_err();
        assert!(error.is(ErrorKind::PermissionDenied), "{error}");
        assert!(error.to_string().contains("InvalidObjectState"), "{error}");
        match pool.stat(&path("b")).await {
            // versitygw may keep the directory of keys that are removed at the same moment.
            Ok(_) => {
                let pages: Vec<_> = pool.list(&path("b")).await.unwrap().try_collect().await.unwrap();
                assert_eq!(pages.concat().len(), 0, "an empty directory at most");
            }
            Err(error) => assert!(error.is(ErrorKind::NotFound) && !is_there, "{error}"),
        }
        let keys = curl_at(server.port(), &[], "?list-type=2");
        assert!(!keys.contains("rename-") && keys.contains("a/sub/three"), "{keys}");
        for name in ["one", "two", "sub"] {
            assert!(!keys.contains(&format!("<Key>b/{name}")), "{keys}");
        }
        pool.rename(&path("a"), &path("b"), RenameMode::Replace).await.unwrap();
        let pages: Vec<_> = pool.list(&path("b")).await.unwrap().try_collect().await.unwrap();
        assert_eq!(pages.concat().len(), 3);
    }
}
