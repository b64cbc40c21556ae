//! A cache node as a reverse proxy: what no client gets, and what no client may keep from the others.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay_tests::cache_node::Node;
use forebay_tests::http;
use forebay_tests::mount::Place;
use forebay_tests::process::wait_until;
use forebay_tests::servers::origin::slow_origin;

#[test]
fn a_path_that_the_origin_would_read_as_another_one_is_refused() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    let url = slow_origin(Duration::ZERO, move |head| {
        seen.lock().unwrap().push(head.lines().next().unwrap_or_default().to_owned());
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok".to_owned()
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy"]);
    for path in [
        "/public/%%32e%%32e/private/x",
        "/public/%%32%65%%32%65/private/x",
        "/public/.%%32e/private/x",
        "/public/..%%35cprivate/x",
        "/public/%%30%30",
        "/public/%+f",
        "/public/%",
    ] {
        let got = node.get(path, &[]);
        assert_eq!(got.status, 400, "{path}: {}", got.head);
    }
    assert_eq!(asked.lock().unwrap().len(), 0);
    // A query is for the origin alone to read.
    assert_eq!(node.get("/public/x?100%", &[]).status, 200);
    assert_eq!(*asked.lock().unwrap(), ["get /public/x?100% http/1.1"]);
}

#[test]
fn a_confirmation_for_one_client_does_not_count_for_the_others() {
    let is_restricted = Arc::new(AtomicBool::new(false));
    let restricted = is_restricted.clone();
    let url = slow_origin(Duration::ZERO, move |head| {
        let is_authorized = head.contains("authorization: basic");
        let (status, age, body) = match restricted.load(Ordering::SeqCst) {
            true if !is_authorized => ("401 Unauthorized", 0, "no"),
            true if head.contains("if-none-match: \"a\"") => ("304 Not Modified", 3600, ""),
            true => ("200 OK", 3600, "page"),
            false => ("200 OK", 1, "page"),
        };
        let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        format!(
            "HTTP/1.1 {status}\r\netag: \"a\"\r\ncache-control: max-age={age}\r\n{length}connection: close\r\n\r\n{body}"
        )
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy"]);
    let kept = || node.get("/f", &["-H", "Cache-Control: only-if-cached"]).status;
    wait_until("it is kept", || node.get("/f", &[]).header("cache-status").starts_with("forebay; hit"));
    is_restricted.store(true, Ordering::SeqCst);
    wait_until("it is stale", || kept() == 504);
    let got = node.get("/f", &["-u", "user:password"]);
    assert_eq!((got.status, &got.body[..]), (200, &b"page"[..]), "{}", got.head);
    assert_eq!(kept(), 504);
    let stale = node.get("/f", &["-H", "Cache-Control: only-if-cached, max-stale=600"]);
    assert_eq!((stale.status, &stale.body[..]), (200, &b"page"[..]), "it stays kept: {}", stale.head);
    let got = node.get("/f", &[]);
    assert_eq!(got.status, 401, "{}", got.head);
}

#[test]
fn slow_readers_do_not_keep_other_responses_from_being_kept() {
    const MIB: usize = 1 << 20;
    // Two of them take nearly all the room for what is coming, which is half of the limit.
    let url = slow_origin(Duration::ZERO, |head| {
        let length = if head.starts_with("get /large") { 15 * MIB } else { 3 * MIB };
        let body = "x".repeat(length);
        format!(
            "HTTP/1.1 200 OK\r\ncache-control: max-age=3600\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        )
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--limit", "64M"]);
    let is_hit = |path: &str| node.get(path, &["-r", "0-9"]).header("cache-status").starts_with("forebay; hit");
    let slow = ["/large/1", "/large/2"].map(|path| {
        let mut stream = TcpStream::connect(node.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        stream.read_exact(&mut vec![0; MIB]).unwrap();
        wait_until("all of it has come", || is_hit(path));
        stream
    });
    let got = node.get("/small", &[]);
    assert_eq!((got.header("cache-status"), got.body.len()), ("forebay; fwd=uri-miss; stored", 3 * MIB));
    wait_until("it is kept", || is_hit("/small"));
    // They still get all of it.
    for mut stream in slow {
        stream.read_exact(&mut vec![0; 14 * MIB]).unwrap();
    }
}

#[test]
fn content_of_a_client_without_a_token_is_not_waited_for() {
    let url = slow_origin(Duration::ZERO, |head| {
        assert!(head.starts_with("put /f "), "{head}");
        "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n".to_owned()
    });
    let place = Place::new();
    let access = place.at("access.toml");
    fs::write(&access, "[[token]]\nname = \"a\"\nsecret = \"0123456789abcdef\"\nadmin = true\n").unwrap();
    fs::set_permissions(&access, Permissions::from_mode(0o600)).unwrap();
    let words = ["--reverse-proxy", "--forward-changes", "--access", access.to_str().unwrap()];
    let node = Node::start(&url, &place.fast(), &words);
    // Most of the content does not come.
    let ask = |line: &str, more: &str| {
        let request = format!("{line} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: 8000000\r\n\r\nbegin");
        http::exchange(node.address, &request).unwrap()
    };
    for (line, more, status) in [
        ("PUT /f", "", 401),
        ("PUT /f", "Authorization: Bearer another-secret-00\r\n", 401),
        ("OPTIONS /f", "", 401),
        // No request to the node itself has content.
        ("POST /.forebay/purge/f", "Authorization: Bearer 0123456789abcdef\r\n", 400),
    ] {
        let got = ask(line, more);
        assert!(got.status == status && got.head.contains("connection: close"), "{line} {more}: {}", got.head);
    }
    let token = ["-H", "Authorization: Bearer 0123456789abcdef"];
    assert_eq!(node.get("/f", &["-X", "PUT", "-d", "content", token[0], token[1]]).status, 204);
}

#[test]
fn guesses_of_a_token_are_limited_also_by_requests_with_content() {
    let url = slow_origin(Duration::ZERO, |head| panic!("{head}"));
    let place = Place::new();
    let access = place.at("access.toml");
    fs::write(&access, "[[token]]\nname = \"a\"\nsecret = \"0123456789abcdef\"\nadmin = true\n").unwrap();
    fs::set_permissions(&access, Permissions::from_mode(0o600)).unwrap();
    let words = ["--reverse-proxy", "--forward-changes", "--rate", "1", "--access", access.to_str().unwrap()];
    let node = Node::start(&url, &place.fast(), &words);
    let begun = Instant::now();
    let mut told = 0;
    for at in 0..50 {
        let request = format!(
            "PUT /f HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-wrong-secret-{at}\r\nContent-Length: 8000000\r\n\r\nbegin"
        );
        let got = http::exchange(node.address, &request).unwrap();
        assert!(matches!(got.status, 401 | 429) && got.head.contains("connection: close"), "{}", got.head);
        told += u64::from(got.status == 401);
    }
    // One in a second, with a burst of two seconds.
    assert!(told > 0 && told <= 3 + begun.elapsed().as_secs(), "{told}");
}

#[test]
fn small_changes_of_one_client_do_not_wait_for_each_other() {
    // More than a client may have with much content.
    const CHANGES: usize = 20;
    let come = Arc::new(Mutex::new(0));
    let counted = come.clone();
    let url = slow_origin(Duration::ZERO, move |_| {
        *counted.lock().unwrap() += 1;
        wait_until("all changes are at the origin", || *counted.lock().unwrap() == CHANGES);
        "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n".to_owned()
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--forward-changes"]);
    let address = node.address;
    let change = move |at: usize| {
        let content = match at % 2 {
            0 => "Content-Length: 7\r\n\r\ncontent",
            _ => "Transfer-Encoding: chunked\r\n\r\n3\r\ncon\r\n4\r\ntent\r\n0\r\n\r\n",
        };
        let request = format!("POST /{at} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{content}");
        http::exchange(address, &request).unwrap().status
    };
    let statuses: Vec<u16> = thread::scope(|scope| {
        let clients: Vec<_> = (0..CHANGES).map(|at| scope.spawn(move || change(at))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(statuses, [204; CHANGES]);
}
