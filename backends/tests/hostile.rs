//! Servers that send what no server should: endless pages, names that lead elsewhere, listings that loop. Each is a
//! script behind a port of this machine.

mod common;
#[path = "hostile/web.rs"]
mod web;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forebay_backends::decorators::{CallLimits, Deadline};
use forebay_backends::s3::S3Pool;
use forebay_backends::store::{Environment, StorePool};
use forebay_backends::{ErrorKind, FileKind, Pool, Result, SetAttrs};
use futures::TryStreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use common::path;

/// Long enough for everything that is bounded; a test that takes longer fails.
const PATIENCE: Duration = Duration::from_secs(120);
/// The delay of a slow server's answers.
const LATE: Duration = Duration::from_millis(200);
/// The time limit for one part of a listing of a slow server.
const PART: Duration = Duration::from_secs(4);
/// The number of names that a slow server lists. Requests for all of them take longer than `PART`.
const LATE_NAMES: usize = 960;
/// The most bytes that are read from a page with an endless token.
const TAKEN_BYTES_MAX: u64 = 64 << 20;

/// The answer to a request, by its first line.
enum HttpReply {
    Whole(&'static str, String),
    /// A page that begins with the first string and then repeats the second without end.
    Endless(&'static str, &'static str),
    /// Like `Whole`, after `LATE`.
    Late(&'static str, String),
}

struct Hostile {
    port: u16,
    /// Bytes of endless pages that clients have read.
    sent: Arc<AtomicU64>,
    /// Endless pages that are still being sent.
    open: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Hostile {
    async fn start(script: fn(&str) -> HttpReply) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sent, open) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut tasks = JoinSet::new();
        let (count, under_way) = (Arc::clone(&sent), Arc::clone(&open));
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (count, under_way) = (Arc::clone(&count), Arc::clone(&under_way));
                // A connection ends with an error.
                connections.spawn(async move { _ = serve(client, script, &count, &under_way).await });
            }
        });
        Self { port, sent, open, _tasks: tasks }
    }

    async fn web(&self) -> StorePool {
        StorePool::attach(&format!("http://127.0.0.1:{}", self.port), &Environment::default()).await.unwrap()
    }

    async fn bucket(&self) -> StorePool {
        let url = format!("gs://bucket?anonymous=true&endpoint=http://127.0.0.1:{}", self.port);
        StorePool::attach(&url, &Environment::default()).await.unwrap()
    }

    async fn s3(&self) -> S3Pool {
        let url = format!("s3://bucket?anonymous=true&endpoint=http://127.0.0.1:{}", self.port);
        S3Pool::attach(&url, &Environment::default()).await.unwrap()
    }

    async fn assert_all_given_up(&self) {
        let ended = async {
            while self.open.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, ended).await.is_ok(), "a page is still read for a listing that is over");
    }
}

async fn serve(
    mut client: TcpStream,
    script: fn(&str) -> HttpReply,
    sent: &AtomicU64,
    open: &AtomicU64,
) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        let mut buffer = [0; 4096];
        match client.read(&mut buffer).await? {
            0 => return Ok(()),
            length => request.extend_from_slice(&buffer[..length]),
        }
    }
    let text = String::from_utf8_lossy(&request).to_ascii_lowercase();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_default();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    // A connection that is closed before the body has come would be broken for the client.
    let mut missing = length.unwrap_or(0_usize).saturating_sub(body.len());
    while missing > 0 {
        let mut buffer = [0; 4096];
        match client.read(&mut buffer).await? {
            0 => return Ok(()),
            length => missing = missing.saturating_sub(length),
        }
    }
    let request = String::from_utf8_lossy(&request).into_owned();
    let line = request.lines().next().unwrap_or_default();
    let answer = script(line);
    if matches!(answer, HttpReply::Late(..)) {
        tokio::time::sleep(LATE).await;
    }
    match answer {
        HttpReply::Whole(head, body) | HttpReply::Late(head, body) => {
            let length = if head.contains("Content-Length") {
                String::new()
            } else {
                format!("Content-Length: {}\r\n", body.len())
            };
            let body = if line.starts_with("HEAD") { String::new() } else { body };
            let answer = format!("HTTP/1.1 {head}\r\n{length}Connection: close\r\n\r\n{body}");
            client.write_all(answer.as_bytes()).await
        }
        HttpReply::Endless(begin, rest) => {
            open.fetch_add(1, Ordering::SeqCst);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n";
            let rest = rest.repeat(1 + (64 << 10) / rest.len());
            let mut outcome = client.write_all(format!("{head}{begin}").as_bytes()).await;
            while outcome.is_ok() {
                outcome = client.write_all(rest.as_bytes()).await;
                sent.fetch_add(rest.len() as u64, Ordering::SeqCst);
            }
            open.fetch_sub(1, Ordering::SeqCst);
            outcome
        }
    }
}

/// A well-behaved root with one directory, `d`, whose page is `page`.
fn site(line: &str, page: HttpReply) -> HttpReply {
    let root = "<html><head><title>Index of /</title></head><body><a href=\"d/\">d/</a></body></html>";
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["GET", "/", _] => HttpReply::Whole("200 OK\r\nContent-Type: text/html", root.to_owned()),
        ["HEAD", "/d", _] => HttpReply::Whole("301 Moved Permanently\r\nLocation: /d/", String::new()),
        ["GET", "/d/", _] => page,
        _ => HttpReply::Whole("405 Method Not Allowed", String::new()),
    }
}

/// The names in `d`, or the error, within a time limit.
async fn listed(pool: &dyn Pool) -> Result<Vec<String>> {
    let listing = async {
        let pages: Vec<_> = pool.list(&path("d")).await?.try_collect().await?;
        Ok(pages.concat())
    };
    let entries = tokio::time::timeout(PATIENCE, listing).await.expect("the listing has no end")?;
    let mut names: Vec<_> = entries.into_iter().map(|entry| entry.name.escape_ascii().to_string()).collect();
    names.sort();
    Ok(names)
}

async fn assert_refused_in_time(script: fn(&str) -> HttpReply) {
    let server = Hostile::start(script).await;
    let error = listed(&server.web().await).await.unwrap_err();
    assert!(error.is(ErrorKind::Corrupt), "{error}");
    server.assert_all_given_up().await;
    let sent = server.sent.load(Ordering::SeqCst);
    assert!(sent < TAKEN_BYTES_MAX, "{sent} bytes were taken");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_title_without_an_end_is_not_read_on() {
    assert_refused_in_time(|line| site(line, HttpReply::Endless("<html><title>Index of ", "endless "))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_without_an_end_is_not_read_on() {
    assert_refused_in_time(|line| site(line, HttpReply::Endless("<html><a href=\"", "endless"))).await;
}

/// All links lead elsewhere, so the listing never returns a name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_that_was_given_up_takes_its_request_with_it() {
    let script =
        |line: &str| site(line, HttpReply::Endless("<html><title>Index of /d</title>", "<a href=\"/x/y\">y</a>\n"));
    let server = Hostile::start(script).await;
    let pool = server.web().await;
    let mut listing = pool.list(&path("d")).await.unwrap();
    let first = tokio::time::timeout(Duration::from_millis(200), listing.try_next()).await;
    assert!(first.is_err() || first.unwrap().is_err(), "no name can have come");
    drop(listing);
    server.assert_all_given_up().await;
}

/// A bucket with a directory `d` whose listing has `objects` and `prefixes`. The server refuses HEAD for `bad` objects.
fn bucket(line: &str, keys: &str) -> HttpReply {
    let contents = |key: &str| {
        format!(
            "<Contents><Key>{key}</Key><Size>3</Size><LastModified>2020-01-01T00:00:00Z</LastModified><ETag>\"e\"</ETag></Contents>"
        )
    };
    let list = |inner: String| {
        let body = format!("<?xml version=\"1.0\"?><ListBucketResult>{inner}</ListBucketResult>");
        HttpReply::Whole("200 OK\r\nContent-Type: application/xml", body)
    };
    if line.starts_with("GET") && line.contains("list-type=2") {
        let prefix = line.split("prefix=").nth(1).unwrap_or_default().split(['&', ' ']).next().unwrap_or_default();
        return match (prefix, line.contains("delimiter")) {
            ("d%2F", true) => list(
                keys.split(' ').map(contents).collect::<String>()
                    + "<CommonPrefixes><Prefix>d/./</Prefix></CommonPrefixes><CommonPrefixes><Prefix>d/x/../../y/</Prefix></CommonPrefixes>",
            ),
            ("d%2F", false) => list(contents("d/good")),
            ("d%2F.%2F", _) => list(contents("d/./c")),
            ("d%2Frefused", _) => list(contents("d/refused")),
            ("d%2Fwrong", _) => list(contents("d/wrong")),
            _ => list(String::new()),
        };
    }
    let found = "200 OK\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\nContent-Length: 3";
    match line {
        _ if line.contains("refused") => HttpReply::Whole("403 Forbidden", String::new()),
        _ if line.contains("wrong") => HttpReply::Whole("400 Bad Request", String::new()),
        _ if line.contains("/d/good") => HttpReply::Whole(found, "abc".into()),
        _ => HttpReply::Whole("404 Not Found", String::new()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_lead_elsewhere_are_left_out_and_bad_objects_are_shown() {
    let server = Hostile::start(|line| bucket(line, "d/good d/refused d/wrong d/a/../../x d/a/b")).await;
    let pool = server.bucket().await;
    assert_eq!(listed(&pool).await.unwrap(), ["..%key", "good", "refused", "wrong"]);
    for name in ["refused", "wrong"] {
        let stat = pool.stat(&path("d").join(name.as_bytes())).await.unwrap();
        assert_eq!((stat.kind, stat.size), (FileKind::File, 3), "{name}");
        assert!(pool.read(&path("d").join(name.as_bytes()), &stat.version, 0..3).await.is_err(), "{name}");
    }
    assert_eq!(pool.stat(&path("d/..%key")).await.unwrap().kind, FileKind::Directory);
    let below: Vec<_> = pool.list(&path("d/..%key")).await.unwrap().try_collect().await.unwrap();
    assert_eq!(below.concat().into_iter().map(|entry| entry.name).collect::<Vec<_>>(), [b"c"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_that_goes_in_a_circle_is_refused() {
    let circle = |line: &str| {
        let page = "<ListBucketResult><NextContinuationToken>again</NextContinuationToken></ListBucketResult>";
        match line {
            _ if line.contains("delimiter") => {
                HttpReply::Whole("200 OK\r\nContent-Type: application/xml", page.to_owned())
            }
            _ => bucket(line, ""),
        }
    };
    let server = Hostile::start(circle).await;
    let error = listed(&server.bucket().await).await.unwrap_err();
    assert!(error.is(ErrorKind::Corrupt), "{error}");
}

/// Attributes are requested one by one. Those of one page take longer than the time limit for a part of a listing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_of_a_slow_server_is_listed_though_its_names_take_long() {
    const HEAD: &str = "200 OK\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\nContent-Length: 3";
    fn names() -> impl Iterator<Item = String> {
        (0..LATE_NAMES).map(|n| format!("{n:04}"))
    }
    fn web(line: &str) -> HttpReply {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["HEAD", name, _] if name.len() == "/d/0000".len() => HttpReply::Late(HEAD, String::new()),
            _ => {
                let links = names().map(|name| format!("<a href=\"{name}\">{name}</a>")).collect::<String>();
                let title = "<html><head><title>Index of /d/</title></head><body>";
                site(
                    line,
                    HttpReply::Whole("200 OK\r\nContent-Type: text/html", format!("{title}{links}</body></html>")),
                )
            }
        }
    }
    fn google(line: &str) -> HttpReply {
        match line.starts_with("HEAD") && line.contains("/d/0") {
            true => HttpReply::Late(HEAD, String::new()),
            false => bucket(line, &names().map(|name| format!("d/{name}")).collect::<Vec<_>>().join(" ")),
        }
    }
    let limits = CallLimits { metadata: PART, data: PART, copies: PART, min_bytes_per_second: 0 };
    let (site, store) = (Hostile::start(web).await, Hostile::start(google).await);
    let pools: [Arc<dyn Pool>; 2] = [Arc::new(site.web().await), Arc::new(store.bucket().await)];
    for pool in pools {
        let mut found = listed(&Deadline::new(pool, limits)).await.unwrap();
        // The bucket also has a key that leads elsewhere.
        found.retain(|name| !name.starts_with('.'));
        assert_eq!(found, names().collect::<Vec<_>>());
    }
}

/// A bucket whose keys were all deleted has pages without keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_pages_of_a_slow_server_have_a_time_of_their_own() {
    const PAGES: u64 = 20;
    fn pages(line: &str) -> HttpReply {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if !line.contains("delimiter") {
            return bucket(line, "");
        }
        let page = NEXT.fetch_add(1, Ordering::SeqCst);
        let next = format!("<NextContinuationToken>{page}</NextContinuationToken>");
        let next = if page < PAGES {
            next
        } else {
            "<Contents><Key>d/good</Key><Size>3</Size><LastModified>2020-01-01T00:00:00Z</LastModified><ETag>\"e\"</ETag></Contents>".to_owned()
        };
        HttpReply::Late(
            "200 OK\r\nContent-Type: application/xml",
            format!("<ListBucketResult>{next}</ListBucketResult>"),
        )
    }
    let limits = CallLimits { metadata: PART, data: PART, copies: PART, min_bytes_per_second: 0 };
    let server = Hostile::start(pages).await;
    let pool = Deadline::new(Arc::new(server.bucket().await), limits);
    assert_eq!(listed(&pool).await.unwrap(), ["good"]);
}

/// A bucket that cannot be changed.
fn fixed(line: &str) -> HttpReply {
    match line.starts_with("PUT") {
        true => HttpReply::Whole("403 Forbidden", String::new()),
        false => bucket(line, "d/good d/refused"),
    }
}

/// The attributes of an object whose HEAD is refused may be stricter than those of an object without attributes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_whose_attributes_are_refused_is_open_to_the_daemon_alone() {
    let server = Hostile::start(fixed).await;
    let pool = server.s3().await;
    let pages: Vec<_> = pool.list(&path("d")).await.unwrap().try_collect().await.unwrap();
    let mut found: Vec<_> = pages.concat().into_iter().map(|entry| (entry.name, entry.stat.mode)).collect();
    found.retain(|(name, _)| !name.starts_with(b"."));
    found.sort();
    assert_eq!(found, [(b"good".to_vec(), 0o644), (b"refused".to_vec(), 0o400)]);
    let stat = pool.stat(&path("d/refused")).await.unwrap();
    assert_eq!((stat.kind, stat.mode, stat.uid), (FileKind::File, 0o400, rustix::process::geteuid().as_raw()));
}

/// Credentials expire between the page of a listing and the requests for its objects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_whose_requests_are_all_refused_fails() {
    static EXPIRED: AtomicBool = AtomicBool::new(false);
    let refused = |line: &str| {
        EXPIRED.fetch_or(line.contains("/d/refused"), Ordering::SeqCst);
        match EXPIRED.load(Ordering::SeqCst) {
            true => HttpReply::Whole("403 Forbidden", String::new()),
            false => bucket(line, "d/good d/refused"),
        }
    };
    let server = Hostile::start(refused).await;
    let error = listed(&server.bucket().await).await.unwrap_err();
    assert!(error.is(ErrorKind::PermissionDenied), "{error}");
}

/// Rights may be given by prefix.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_with_one_that_may_not_be_listed_is_listed() {
    let script = |line: &str| {
        match line {
        _ if line.contains("closed") => HttpReply::Whole("403 Forbidden", String::new()),
        _ if line.contains("delimiter") => HttpReply::Whole(
            "200 OK\r\nContent-Type: application/xml",
            "<ListBucketResult><Contents><Key>d/good</Key><Size>3</Size><LastModified>2020-01-01T00:00:00Z</LastModified>\
             <ETag>\"e\"</ETag></Contents><CommonPrefixes><Prefix>d/closed/</Prefix></CommonPrefixes></ListBucketResult>"
                .to_owned(),
        ),
        _ => bucket(line, "d/good"),
    }
    };
    let server = Hostile::start(script).await;
    assert_eq!(listed(&server.bucket().await).await.unwrap(), ["closed", "good"]);
}

/// A header for S3 names a time before 1970, which a condition on the time cannot express; and a size is larger than that
/// of any file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_that_no_file_can_have_are_not_believed() {
    const OLD: &str = "200 OK\r\nLast-Modified: Thu, 01 Jan 1970 00:01:00 GMT\r\nx-amz-meta-forebay-copied: -5 60\r\n\
                       x-amz-meta-mode: 33279\r\nContent-Length: 3";
    const LARGE: &str = "200 OK\r\nETag: \"e\"\r\nContent-Length: 10000000000000000000";
    let script = |line: &str| match line {
        _ if line.contains("/d/old") => HttpReply::Whole(OLD, "abc".into()),
        _ if line.starts_with("HEAD /d/large") => HttpReply::Whole(LARGE, String::new()),
        _ => site(line, HttpReply::Whole("404 Not Found", String::new())),
    };
    let server = Hostile::start(script).await;
    let pool = server.web().await;
    let stat = pool.stat(&path("d/old")).await.unwrap();
    assert_eq!((stat.mtime.secs, stat.mode), (60, 0o644));
    assert_eq!(pool.read(&path("d/old"), &stat.version, 0..3).await.unwrap(), "abc");
    assert_eq!(pool.stat(&path("d/large")).await.unwrap().size, i64::MAX as u64);
}

/// A token would go to the host that the redirection names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_a_bucket_follow_no_redirections() {
    static FOLLOWED: AtomicBool = AtomicBool::new(false);
    fn script(line: &str) -> HttpReply {
        FOLLOWED.fetch_or(line.contains("/elsewhere"), Ordering::SeqCst);
        match line.contains("/d/good") {
            true => HttpReply::Whole("307 Temporary Redirect\r\nLocation: /elsewhere", String::new()),
            false => bucket(line, "d/good"),
        }
    }
    let server = Hostile::start(script).await;
    let pool = server.bucket().await;
    let version = forebay_backends::Version::Tag {
        etag: "\"e\"".into(),
        id: String::new(),
        size: 3,
        mtime: forebay_backends::Time::default(),
    };
    assert!(pool.read(&path("d/good"), &version, 0..3).await.is_err());
    assert!(!FOLLOWED.load(Ordering::SeqCst));
}

/// A server without conditions on the completion of an upload. Another client replaces the object after a part of it was
/// copied: the parts would be of two versions, and its write would be lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_is_replaced_while_its_parts_are_copied_stays() {
    const SIZE: u64 = (16 << 20) + 50;
    static IS_REPLACED: AtomicBool = AtomicBool::new(false);
    static COMPLETED: AtomicBool = AtomicBool::new(false);
    fn script(line: &str) -> HttpReply {
        const OURS: &str =
            "200 OK\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\nContent-Length: 16777266";
        const THEIRS: &str =
            "200 OK\r\nETag: \"t\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:09 GMT\r\nContent-Length: 16777266";
        const REST: &str = "206 Partial Content\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\n\
                            Content-Range: bytes 16777216-16777265/16777266";
        let made = "<Made><UploadId>u</UploadId><ETag>\"e\"</ETag></Made>".to_owned();
        if line.starts_with("HEAD /bucket/f ") {
            return HttpReply::Whole(if IS_REPLACED.load(Ordering::SeqCst) { THEIRS } else { OURS }, String::new());
        }
        if line.starts_with("GET /bucket/f ") {
            IS_REPLACED.store(true, Ordering::SeqCst);
            return HttpReply::Whole(REST, "x".repeat(50));
        }
        if line.starts_with("POST /bucket/f?uploadId") {
            COMPLETED.store(true, Ordering::SeqCst);
        }
        match line.split(' ').next() {
            Some("PUT" | "POST") => HttpReply::Whole("200 OK\r\nETag: \"e\"", made),
            Some("DELETE") => HttpReply::Whole("204 No Content", String::new()),
            _ => bucket(line, ""),
        }
    }
    let server = Hostile::start(script).await;
    let pool = server.s3().await;
    assert!(!pool.capabilities().read_only);
    let larger = SetAttrs { size: Some(SIZE + 50), ..SetAttrs::default() };
    let error = pool.set_attrs(&path("f"), &larger).await.unwrap_err();
    assert!(error.is(ErrorKind::Busy), "{error}");
    assert!(!COMPLETED.load(Ordering::SeqCst), "the upload was completed");
}

/// Any client may store the mode of a symlink with content of any size. A target is read as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_is_too_long_for_a_target_is_a_file() {
    const LINK: &str =
        "200 OK\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\nx-goog-meta-mode: 41471";
    static READ: AtomicBool = AtomicBool::new(false);
    fn script(line: &str) -> HttpReply {
        const LARGE: &str = "200 OK\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT\r\n\
                             x-goog-meta-mode: 41471\r\nContent-Length: 21474836480";
        match line {
            _ if line.starts_with("HEAD /bucket/large ") => HttpReply::Whole(LARGE, String::new()),
            _ if line.starts_with("GET /bucket/large ") => {
                READ.store(true, Ordering::SeqCst);
                HttpReply::Whole("404 Not Found", String::new())
            }
            _ if line.contains(" /bucket/empty ") => HttpReply::Whole(LINK, String::new()),
            _ if line.contains(" /bucket/link ") => HttpReply::Whole(LINK, "d/good".into()),
            _ => bucket(line, ""),
        }
    }
    let server = Hostile::start(script).await;
    let pool = server.bucket().await;
    for name in ["large", "empty"] {
        assert_eq!(pool.stat(&path(name)).await.unwrap().kind, FileKind::File, "{name}");
        assert!(pool.readlink(&path(name)).await.unwrap_err().is(ErrorKind::InvalidInput), "{name}");
    }
    assert!(!READ.load(Ordering::SeqCst), "its content was requested");
    assert_eq!(pool.stat(&path("link")).await.unwrap().kind, FileKind::Symlink);
    assert_eq!(pool.readlink(&path("link")).await.unwrap(), b"d/good");
}
