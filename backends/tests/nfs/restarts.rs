//! Servers that end. Some of them are started again.

use super::*;

/// A server that loses power loses uncommitted bytes. The test does the same to the temporary file: it truncates the
/// file while the server is down. Ganesha's verifier is the second in which it started.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn bytes_that_the_server_loses_before_they_are_committed_are_written_again() {
    for away in [Duration::ZERO, Duration::from_millis(1_100)] {
        lose_before_the_commit(away).await;
    }
}

async fn lose_before_the_commit(away: Duration) {
    let mut server = start(Squash::None);
    let pool = open(&server).await;
    let (data, half) = (pattern(12 << 20), 6 << 20);
    let piece = |start: usize, end: usize| Piece { offset: start as u64, data: data.slice(start..end) };
    let (first, second) = (piece(0, half), piece(half, data.len()));
    let export = server.export();
    let down = async {
        let arrived = || unfinished(&export).iter().any(|path| fs::metadata(path).unwrap().len() >= half as u64);
        while !arrived() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        server.kill();
        for path in unfinished(&export) {
            fs::write(path, "").unwrap();
        }
        tokio::time::sleep(away).await;
        server.start_again();
        Ok(second)
    };
    let content = stream::iter([Ok(first)]).chain(stream::once(down)).boxed();
    let (name, attrs) = (path("f"), attrs());
    let put = pool.put(&name, data.len() as u64, content, &attrs, &Expected::Absent);
    let stat = timeout(LIMIT, put).await.unwrap().unwrap();
    assert_eq!(stat.size, data.len() as u64);
    assert!(fs::read(export.join("f")).unwrap() == data, "bytes are missing on the server");
    assert_eq!(unfinished(&export), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reading_goes_on_when_the_server_is_back() {
    let mut server = start(Squash::None);
    let data = pattern(32 << 20);
    fs::write(server.export().join("f"), &data).unwrap();
    let pool = Arc::new(open(&server).await);
    let version = pool.stat(&path("f")).await.unwrap().version;
    let reader = tokio::spawn({
        let (pool, data) = (Arc::clone(&pool), data.clone());
        async move {
            for round in 0..60 {
                let got = pool.read(&path("f"), &version, 0..u64::MAX).await.unwrap();
                assert!(got == data, "wrong bytes in round {round}");
            }
        }
    });
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.kill();
        server.start_again();
    }
    timeout(LIMIT, reader).await.unwrap().unwrap();
    assert!(pool.retried_requests() > 0, "the server never was away while it was read from");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_gone_is_told_within_the_time_for_retries() {
    let mut server = start(Squash::None);
    let pool = open(&server).await;
    put(&pool, "f", "x", &Expected::Absent).await.unwrap();
    server.kill();
    let (known, new, attrs) = (path("f"), path("g"), attrs());
    let put = put(&pool, "g", "x", &Expected::Absent);
    let answers = timeout(LIMIT, async { futures::join!(pool.stat(&known), put, pool.mkdir(&new, &attrs)) }).await;
    let answers = answers.unwrap();
    for answer in [answers.0, answers.1, answers.2] {
        let error = answer.unwrap_err();
        assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later), "{error}");
    }
    server.start_again();
    assert_eq!(content(&pool, "f").await, "x");
}

/// The clock is paused, so it advances as soon as all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_server_that_never_answers_is_given_up() {
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let url = format!("nfs://127.0.0.1/pool?nfsport={port}&mountport={port}");
    let error = timeout(LIMIT, NfsPool::open(&url)).await.unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable), "{error}");
    assert_eq!(error.retry(), Retry::Later);
}

#[tokio::test(flavor = "multi_thread")]
async fn opening_without_a_server_fails_at_once_and_says_what_to_look_at() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let url = format!("nfs://127.0.0.1/pool?nfsport={port}&mountport={port}");
    let error = timeout(Duration::from_secs(10), NfsPool::open(&url)).await.unwrap().unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later));
    assert!(error.to_string().contains(&port.to_string()) && error.to_string().contains("check that"), "{error}");
}
