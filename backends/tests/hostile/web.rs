//! Web servers whose root is missing, that do not answer, or that refuse single paths.

use forebay_backends::{AttachTimes, OpenedPool, PoolDescription, PoolLocation};

use super::*;

const FILE: &str = "200 OK\r\nETag: \"e\"\r\nContent-Length: 3";
const HTML: &str = "200 OK\r\nContent-Type: text/html";

/// The root of the server is a file system that is not mounted for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_a_web_server_whose_root_is_missing_are_not_removed() {
    static IS_GONE: AtomicBool = AtomicBool::new(false);
    fn script(line: &str) -> HttpReply {
        let root = "<html><head><title>Index of /</title></head><body><a href=\"f\">f</a></body></html>";
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["PROPFIND", ..] => HttpReply::Whole("405 Method Not Allowed", String::new()),
            [_, "/", _] if !IS_GONE.load(Ordering::SeqCst) => {
                HttpReply::Whole("200 OK\r\nContent-Type: text/html", root.to_owned())
            }
            ["HEAD", "/f", _] if !IS_GONE.load(Ordering::SeqCst) => {
                HttpReply::Whole("200 OK\r\nETag: \"e\"\r\nContent-Length: 3", String::new())
            }
            _ => HttpReply::Whole("404 Not Found", String::new()),
        }
    }
    let server = Hostile::start(script).await;
    let pool = server.web().await;
    assert_eq!(pool.stat(&path("f")).await.unwrap().size, 3);
    assert!(pool.stat(&path("nothing")).await.unwrap_err().is(ErrorKind::NotFound));
    IS_GONE.store(true, Ordering::SeqCst);
    let error = pool.stat(&path("f")).await.unwrap_err();
    assert!(error.is(ErrorKind::Unavailable), "{error}");
    IS_GONE.store(false, Ordering::SeqCst);
    pool.stat(&path("f")).await.unwrap();
}

/// A worker starts while the root of the server is a file system that is not mounted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_named_files_before_is_attached_only_when_it_names_them_again() {
    static IS_GONE: AtomicBool = AtomicBool::new(false);
    fn script(line: &str) -> HttpReply {
        let root = "<html><head><title>Index of /</title></head><body><a href=\"f\">f</a></body></html>";
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["PROPFIND", ..] => HttpReply::Whole("405 Method Not Allowed", String::new()),
            [_, "/", _] if !IS_GONE.load(Ordering::SeqCst) => HttpReply::Whole(HTML, root.to_owned()),
            ["HEAD", "/f", _] if !IS_GONE.load(Ordering::SeqCst) => HttpReply::Whole(FILE, String::new()),
            _ => HttpReply::Whole("404 Not Found", String::new()),
        }
    }
    let server = Hostile::start(script).await;
    let known = PoolDescription::of(&server.web().await);
    assert!(known.capabilities.listings.exist());
    IS_GONE.store(true, Ordering::SeqCst);
    assert!(!server.web().await.capabilities().listings.exist(), "a first attach believes it");
    let location = PoolLocation::parse(&known.url).unwrap();
    let short = Duration::from_millis(100);
    let times = AttachTimes { within: PATIENCE, deadline: short, retry: short };
    let OpenedPool { pool, not_attached } = location.open_now_or_later(known.clone(), times).await.unwrap();
    assert!(not_attached.is_some());
    assert_eq!(PoolDescription::of(&*pool), known);
    let error = pool.stat(&path("f")).await.unwrap_err();
    assert!(error.is(ErrorKind::Unavailable), "{error}");
    IS_GONE.store(false, Ordering::SeqCst);
    let attached = async {
        while pool.stat(&path("f")).await.is_err() {
            tokio::time::sleep(short).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, attached).await.is_ok(), "it is not attached");
}

/// The root is always a directory. Whether its server answers is known only by a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_root_of_a_server_that_does_not_answer_is_unreachable() {
    let listing = |line: &str| site(line, HttpReply::Whole("404 Not Found", String::new()));
    let bare = |_: &str| HttpReply::Whole("404 Not Found", String::new());
    for script in [listing as fn(&str) -> HttpReply, bare] {
        let server = Hostile::start(script).await;
        let pool: Arc<dyn Pool> = Arc::new(server.web().await);
        let root = path("");
        assert_eq!(pool.stat(&root).await.unwrap().kind, FileKind::Directory);
        drop(server);
        // Without a time limit, requests are sent again for several seconds.
        let limits = CallLimits { metadata: PART, data: PART, copies: PART, min_bytes_per_second: 0 };
        let error = Deadline::new(pool, limits).stat(&root).await.unwrap_err();
        assert!(error.is_unreachable(), "{error}");
    }
}

/// `circle` redirects to itself, `ftp` to no URL of HTTP, `nowhere` without a target, and `dir` to a directory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirection_that_is_not_followed_is_a_refusal_of_one_path() {
    fn script(line: &str) -> HttpReply {
        let names = ["good", "circle", "ftp", "nowhere", "dir"].map(|name| format!("<a href=\"{name}\">{name}</a>"));
        let page = format!("<html><head><title>Index of /d/</title></head><body>{}</body></html>", names.concat());
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["HEAD", "/d/good", _] => HttpReply::Whole(FILE, String::new()),
            ["HEAD", "/d/circle", _] => HttpReply::Whole("302 Found\r\nLocation: /d/circle", String::new()),
            ["HEAD", "/d/ftp", _] => HttpReply::Whole("302 Found\r\nLocation: ftp://localhost/x", String::new()),
            ["HEAD", "/d/nowhere", _] => HttpReply::Whole("302 Found", String::new()),
            ["HEAD", "/d/dir", _] => HttpReply::Whole("301 Moved Permanently\r\nLocation: /d/dir/", String::new()),
            _ => site(line, HttpReply::Whole(HTML, page)),
        }
    }
    let server = Hostile::start(script).await;
    let pool = server.web().await;
    assert_eq!(listed(&pool).await.unwrap(), ["dir", "good"]);
    assert_eq!(pool.stat(&path("d/dir")).await.unwrap().kind, FileKind::Directory);
    for name in ["circle", "ftp", "nowhere"] {
        let error = pool.stat(&path("d").join(name.as_bytes())).await.unwrap_err();
        assert!(!error.is_unreachable() && !error.is(ErrorKind::NotFound), "{name}: {error}");
    }
    assert_eq!(pool.retried_requests(), 0);
}

const ROOT_PAGE: &str = "<html><head><title>Index of /</title></head><body><a href=\"f\">f</a></body></html>";
const CIRCLE: &str = "302 Found\r\nLocation: /login";

/// As that of a gateway that asks for a login.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_redirects_everything_in_a_circle_is_unreachable() {
    static IS_GONE: AtomicBool = AtomicBool::new(true);
    fn script(line: &str) -> HttpReply {
        match line.split(' ').collect::<Vec<_>>()[..] {
            _ if IS_GONE.load(Ordering::SeqCst) => HttpReply::Whole(CIRCLE, String::new()),
            ["PROPFIND", ..] => HttpReply::Whole("405 Method Not Allowed", String::new()),
            [_, "/", _] => HttpReply::Whole(HTML, ROOT_PAGE.to_owned()),
            ["HEAD", "/f", _] => HttpReply::Whole(FILE, String::new()),
            _ => HttpReply::Whole("404 Not Found", String::new()),
        }
    }
    let server = Hostile::start(script).await;
    let attached = StorePool::attach(&format!("http://127.0.0.1:{}", server.port), &Environment::default()).await;
    assert!(attached.err().unwrap().is(ErrorKind::Unavailable), "not a pool without names");
    IS_GONE.store(false, Ordering::SeqCst);
    let pool = server.web().await;
    assert_eq!(pool.stat(&path("f")).await.unwrap().size, 3);
    IS_GONE.store(true, Ordering::SeqCst);
    for name in ["", "f"] {
        let error = pool.stat(&path(name)).await.unwrap_err();
        assert!(error.is(ErrorKind::Unavailable), "{name}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_fails_at_the_head_of_its_root_answers() {
    fn script(line: &str) -> HttpReply {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["PROPFIND", ..] => HttpReply::Whole("405 Method Not Allowed", String::new()),
            ["HEAD", "/", _] => HttpReply::Whole("500 Internal Server Error", String::new()),
            ["GET", "/", _] => HttpReply::Whole(HTML, ROOT_PAGE.to_owned()),
            _ => HttpReply::Whole("404 Not Found", String::new()),
        }
    }
    let bare = |line: &str| match line.starts_with("GET") {
        true => HttpReply::Whole("404 Not Found", String::new()),
        false => script(line),
    };
    for script in [script as fn(&str) -> HttpReply, bare] {
        let server = Hostile::start(script).await;
        let pool = server.web().await;
        assert_eq!(pool.stat(&path("")).await.unwrap().kind, FileKind::Directory);
    }
}
