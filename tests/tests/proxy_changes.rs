//! A cache node as a reverse proxy: changes through it, purges, and bodies whose end is told in odd ways.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use forebay_tests::cache_node::{Node, curl};
use forebay_tests::http;
use forebay_tests::mount::{COMMAND, Place};
use forebay_tests::process::{self, wait_until};
use forebay_tests::servers::origin::slow_origin;

/// An origin with one page for all paths, which says its version. Each request that is no GET makes the next version, unless
/// it is refused.
#[derive(Clone, Default)]
struct PageOrigin {
    version: Arc<AtomicUsize>,
    /// Methods and paths.
    requests: Arc<Mutex<Vec<String>>>,
    /// What those GET requests have that wait: nothing (0), the first half of the page (1), all of it.
    stage: Arc<AtomicUsize>,
}

impl PageOrigin {
    /// Starts an origin. Its first `waiting` GET requests wait for [`Self::go_to`]. Returns the URL, too.
    fn start(headers: &'static str, waiting: usize) -> (Self, String) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        let origin = Self::default();
        let answering = origin.clone();
        thread::spawn(move || {
            for stream in socket.incoming().map_while(Result::ok) {
                let origin = answering.clone();
                thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                    let head: Vec<String> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
                    let _ = origin.answer(&stream, head.first().map_or("", |line| line), headers, waiting);
                });
            }
        });
        (origin, url)
    }

    fn answer(&self, mut to: impl Write, line: &str, headers: &str, waiting: usize) -> std::io::Result<()> {
        let request = line.rsplit_once(' ').unwrap_or_default().0.to_owned();
        if !request.starts_with("GET ") {
            let times = {
                let mut requests = self.requests.lock().unwrap();
                requests.push(request.clone());
                requests.iter().filter(|one| **one == request).count()
            };
            let status = match (&*request, times) {
                ("DELETE /refused", _) => "403 Forbidden\r\ncontent-length: 0",
                // The first one takes effect, and its answer is lost.
                ("DELETE /lost", 2..) => "404 Not Found\r\ncontent-length: 0",
                ("DELETE /fails", _) => "500 Internal Server Error\r\ncontent-length: 0",
                _ => "204 No Content",
            };
            if !status.starts_with('4') {
                self.change();
            }
            if request == "DELETE /lost" && times == 1 {
                return Ok(());
            }
            return to.write_all(format!("HTTP/1.1 {status}\r\nconnection: close\r\n\r\n").as_bytes());
        }
        let page = format!("{:<1000}", self.page());
        let (first, rest) = page.split_at(500);
        let waits = {
            let mut requests = self.requests.lock().unwrap();
            requests.push(request);
            requests.iter().filter(|request| request.starts_with("GET ")).count() <= waiting
        };
        let wait = |stage| wait_until("it goes on", || !waits || self.stage.load(Ordering::SeqCst) >= stage);
        wait(1);
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\nconnection: close\r\n{headers}\r\n");
        to.write_all(head.as_bytes())?;
        to.write_all(first.as_bytes())?;
        to.flush()?;
        wait(2);
        to.write_all(rest.as_bytes())
    }

    fn page(&self) -> String {
        format!("version {} of the page", self.version.load(Ordering::SeqCst))
    }

    fn change(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    fn go_to(&self, stage: usize) {
        self.stage.store(stage, Ordering::SeqCst);
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    /// Asserts for a while that a node serves the present page: what was on its way may come late.
    #[track_caller]
    fn assert_served(&self, node: &Node, path: &str) {
        for _ in 0..15 {
            let got = node.get(path, &["-m", "20"]);
            assert_eq!(String::from_utf8_lossy(&got.body).trim_end(), self.page(), "{}", got.head);
            thread::sleep(Duration::from_millis(50));
        }
    }
}

const FRESH: &str = "cache-control: max-age=3600\r\n";
const ADMIN: [&str; 2] = ["-H", "Authorization: Bearer staple correct horse"];
const READER: [&str; 2] = ["-H", "Authorization: Bearer correct horse battery"];
const WRITER: [&str; 2] = ["-H", "Authorization: Bearer battery staple correct"];

/// Writes an access file. Returns its path.
fn access(place: &Place) -> String {
    let file = place.at("access.toml");
    let token =
        |name: &str, secret: &str, more: &str| format!("[[token]]\nname = \"{name}\"\nsecret = \"{secret}\"\n{more}\n");
    let tokens = [
        "signing-key = \"0123456789abcdef0123\"\n".to_owned(),
        token("reader", "correct horse battery", ""),
        token("operator", "staple correct horse", "admin = true"),
        token("writer", "battery staple correct", "admin = true\npath = \"/drafts\""),
    ];
    fs::write(&file, tokens.concat()).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn a_change_needs_a_token_that_may_manage() {
    let (origin, url) = PageOrigin::start(FRESH, 0);
    let place = Place::new();
    let access = access(&place);
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--forward-changes", "--access", &access]);
    let signed = sign(&node, "/f", &access);
    assert_eq!((curl(&signed, &[]).status, node.get("/f", &READER).status), (200, 200));
    for method in ["PUT", "DELETE", "POST", "PATCH", "PROPFIND"] {
        let ask = |url: &str, token: &[&str]| curl(url, &[&["-X", method], token].concat()).status;
        assert_eq!(ask(&signed, &[]), 401, "{method} by a signed URL");
        assert_eq!(ask(&signed, &READER), 403, "{method} by a signed URL and a token to read");
        assert_eq!(ask(&node.url("/f"), &READER), 403, "{method} by a token to read");
        assert_eq!(ask(&node.url("/f"), &WRITER), 403, "{method} by a token for another path");
        assert_eq!(ask(&node.url("/f"), &[]), 401, "{method} without a token");
    }
    assert!(origin.requests().iter().all(|request| request.starts_with("GET ")), "{:?}", origin.requests());
    let change = |path: &str, token: &[&str; 2]| node.get(path, &["-X", "DELETE", token[0], token[1]]).status;
    assert_eq!((change("/f", &ADMIN), change("/drafts/f", &WRITER)), (204, 204));
    assert_eq!(origin.requests().iter().filter(|request| request.starts_with("DELETE /")).count(), 2);
    // What a client asks before a request of another origin is no change.
    assert_eq!(node.get("/f", &["-X", "OPTIONS", READER[0], READER[1]]).status, 204);
}

fn sign(node: &Node, path: &str, access: &str) -> String {
    let mut sign = Command::new(process::forebay());
    sign.args(["sign-url", &node.url(path), "--access", access, "--valid", "5m"]);
    process::run(&mut sign, COMMAND).ok().out.trim().to_owned()
}

#[test]
fn a_signed_url_is_for_its_query_and_no_shared_cache_keeps_the_response() {
    let (origin, url) = PageOrigin::start("cache-control: public, max-age=3600\r\n", 0);
    let place = Place::new();
    let access = access(&place);
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--access", &access]);
    let (bare, with) = (sign(&node, "/get", &access), sign(&node, "/get?id=1", &access));
    let got = curl(&with, &[]);
    let left = got.header("cache-control").strip_prefix("private, max-age=").expect("it is for one client");
    assert!(got.status == 200 && left.parse::<u64>().unwrap() <= 300, "{}", got.head);
    assert_eq!(node.get("/get?id=1", &READER).header("cache-control"), "private, max-age=3600");
    assert_eq!(curl(&bare, &[]).status, 200);
    for forged in [format!("{bare}&id=2"), bare.replace('?', "?id=2&"), with.replace("id=1", "id=2")] {
        assert_eq!(curl(&forged, &[]).status, 403, "{forged}");
    }
    let mut asked = origin.requests();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked, ["GET /get", "GET /get?id=1"]);
    // The node reads these parts of a query as a signature.
    let mut sign = Command::new(process::forebay());
    sign.args(["sign-url", &node.url("/get?expires=1"), "--access", &access]);
    process::run(&mut sign, COMMAND).refused(2, &["expires"]);
}

#[test]
fn a_change_that_may_have_taken_effect_outdates_a_response() {
    let (origin, url) = PageOrigin::start(FRESH, 0);
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--forward-changes"]);
    let is_hit = |path: &str| node.get(path, &[]).header("cache-status").starts_with("forebay; hit");
    for (path, status, times) in [("/lost", 404, 2), ("/fails", 500, 1), ("/refused", 403, 1)] {
        wait_until("it is kept", || is_hit(path));
        assert_eq!(node.get(path, &["-X", "DELETE"]).status, status, "{path}");
        let asked = format!("DELETE {path}");
        assert_eq!(origin.requests().iter().filter(|request| **request == asked).count(), times, "{path}");
        match status {
            403 => assert!(is_hit(path), "nothing has changed"),
            _ => origin.assert_served(&node, path),
        }
    }
}

#[test]
fn a_change_outdates_a_response_that_only_one_client_reads() {
    let (origin, url) = PageOrigin::start(FRESH, 2);
    origin.go_to(1);
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--forward-changes"]);
    let ask = |words: &'static [&'static str]| {
        let url = node.url("/f");
        thread::spawn(move || curl(&url, words))
    };
    let plain = ask(&[]);
    wait_until("the first request is at the origin", || origin.requests().len() == 1);
    // This client wants no response for which another one has asked.
    let own = ask(&["-H", "Cache-Control: no-cache"]);
    wait_until("the second request is at the origin", || origin.requests().len() == 2);
    let before = origin.page();
    assert_eq!(node.get("/f", &["-X", "PUT"]).status, 204);
    origin.go_to(2);
    for client in [plain, own] {
        let got = client.join().unwrap();
        assert_eq!((got.code, String::from_utf8_lossy(&got.body).trim_end()), (0, &*before), "it goes on");
    }
    origin.assert_served(&node, "/f");
}

#[test]
fn a_change_outdates_a_response_that_turns_out_to_vary() {
    let (origin, url) = PageOrigin::start("cache-control: max-age=3600\r\nvary: x-b\r\n", 1);
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--forward-changes"]);
    let (address, before) = (node.address, origin.page());
    let first = thread::spawn(move || http::get_until(address, "/f", |text| text.contains(&before)).unwrap());
    wait_until("the request is at the origin", || origin.requests().len() == 1);
    assert_eq!(node.get("/f", &["-X", "PUT"]).status, 204);
    // Now its head comes, with `Vary`, and the first half of the page.
    origin.go_to(1);
    first.join().unwrap();
    origin.assert_served(&node, "/f");
    origin.go_to(2);
    origin.assert_served(&node, "/f");
}

#[test]
fn a_purge_reaches_paths_of_many_directories() {
    const PARTS: usize = 18;
    let (origin, url) = PageOrigin::start(FRESH, 0);
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--access", &access(&place)]);
    let path = |parts: usize| (1..=parts).map(|at| format!("/part{at}")).collect::<String>();
    let deep = path(PARTS);
    let read = || {
        let got = node.get(&deep, &ADMIN);
        (got.header("cache-status").to_owned(), String::from_utf8(got.body).unwrap().trim_end().to_owned())
    };
    for parts in [1, 2, 14, 15, 16, 17, 18] {
        wait_until("it is kept", || read().0.starts_with("forebay; hit"));
        origin.change();
        assert_ne!(read().1, origin.page(), "it is fresh");
        let purged = node.get(&format!("/.forebay/purge{}", path(parts)), &[&["-X", "POST"], &ADMIN[..]].concat());
        assert_eq!(purged.body.trim_ascii(), br#"{"files":1,"bytes":0,"failed":0}"#, "{parts} parts: {}", purged.head);
        assert_eq!(read().1, origin.page(), "{parts} parts");
    }
    // What is beside the purged path, and not that deep, stays.
    wait_until("it is kept", || read().0.starts_with("forebay; hit"));
    node.get(&format!("/.forebay/purge{}x", path(14)), &[&["-X", "POST"], &ADMIN[..]].concat());
    assert!(read().0.starts_with("forebay; hit"));
}

#[test]
fn a_length_beside_a_transfer_coding_does_not_count() {
    let url = slow_origin(Duration::ZERO, |head| {
        let control = if head.contains("/kept") { "max-age=3600" } else { "no-store" };
        format!(
            "HTTP/1.1 200 OK\r\ncache-control: {control}\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\
             connection: close\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
        )
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy"]);
    for path in ["/f", "/kept"] {
        for option in ["--http1.1", "--http2-prior-knowledge"] {
            let got = node.get(path, &[option]);
            assert_eq!((got.code, &got.body[..]), (0, &b"hello world"[..]), "{path} {option}: {}", got.head);
        }
    }
}

#[test]
fn a_body_that_ends_with_its_connection_is_not_kept_whatever_its_coding() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    let url = slow_origin(Duration::ZERO, move |_| {
        // Whether this is all of it cannot be seen.
        let body = if counted.fetch_add(1, Ordering::SeqCst) == 0 { "hel" } else { "hello" };
        format!("HTTP/1.1 200 OK\r\ncache-control: max-age=3600\r\ntransfer-encoding: chunked, gzip\r\n\r\n{body}")
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy"]);
    assert_eq!(node.get("/f", &[]).body, b"hel");
    for at in 2..6 {
        thread::sleep(Duration::from_millis(100));
        let got = node.get("/f", &[]);
        assert_eq!((&got.body[..], asked.load(Ordering::SeqCst)), (&b"hello"[..], at), "{}", got.head);
    }
}
