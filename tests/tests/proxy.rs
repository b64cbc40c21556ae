//! A cache node as a reverse proxy, in front of real web servers.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use forebay_tests::cache_node::{Got, Node, curl};
use forebay_tests::http;
use forebay_tests::mount::{Place, content};
use forebay_tests::process;
use forebay_tests::servers::free_port;
use forebay_tests::servers::origin::{CacheTest, Origin, run_cache_tests, slow_origin};
use forebay_tests::settings::seed;
use rand::{Rng, SeedableRng};

const MIB: usize = 1 << 20;

fn node(origin: &Origin, place: &Place, words: &[&str]) -> Node {
    Node::start(&origin.url(), &place.fast(), &[&["--reverse-proxy"], words].concat())
}

fn cache_status(got: &Got) -> &str {
    got.header("cache-status").strip_prefix("forebay; ").unwrap_or_default()
}

/// Returns how many responses of a kind a node has sent.
fn responses(port: u16, cache: &str, status: &str) -> u64 {
    http::metric(port, &format!("forebay_http_responses_total{{cache=\"{cache}\",status=\"{status}\"}}"))
}

/// Waits until a response is kept: clients may have all of it a moment before.
fn until_kept(node: &Node, path: &str, words: &[&str]) -> Got {
    let mut got = node.get(path, words);
    process::wait_until("the response is kept", || {
        got = node.get(path, words);
        cache_status(&got).starts_with("hit")
    });
    got
}

/// Tests of the suite that a node does not pass, with the reason.
const NOT_PASSED: &[(&str, &str)] = &[
    ("304-etag-update-response-ETag", "a 304 with another tag is about another response: the whole is asked for"),
    ("304-etag-update-response-Set-Cookie", "a cookie is for one client, unless the response says `public`"),
    ("age-parse-prefix", "a response with two ages is stale; the suite wants the first one to count, here alone"),
    ("headers-store-Set-Cookie", "as above"),
    (
        "headers-store-Transfer-Encoding",
        "the server names an unknown coding, so nothing tells whether the body is whole",
    ),
    ("stale-close-must-revalidate", "the suite takes a 502 for a response from the cache, here and in the next three"),
    ("stale-close-no-cache", ""),
    ("stale-close-proxy-revalidate", ""),
    ("stale-close-s-maxage=2", ""),
];

/// SEMANTICS 108: "A response is used for another request only if RFC 9111 and the headers of the response allow it."
#[test]
fn the_conformance_suite_passes() {
    let (origin, place) = (Origin::cache_tests(), Place::new());
    let node = node(&origin, &place, &["--forward-changes", "--stale-if-error", "60s"]);
    let verdicts = run_cache_tests(&node.url(""));
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for test in &verdicts {
        *counts.entry((&test.kind, &test.verdict)).or_default() += 1;
    }
    println!("{counts:?}");
    let bad = |test: &&CacheTest| test.kind == "required" && test.verdict != "pass";
    for test in verdicts.iter().filter(|test| test.verdict != "pass") {
        println!("{} ({}): {} {}", test.id, test.kind, test.verdict, test.why);
    }
    let mut bad: Vec<&str> = verdicts.iter().filter(bad).map(|test| &*test.id).collect();
    bad.sort_unstable();
    let known: Vec<&str> = NOT_PASSED.iter().map(|(id, _)| *id).collect();
    assert_eq!(bad, known);
}

/// SEMANTICS 109: "Clients that ask for the same response at the same time cost the web server one request, if the response may be used for"
#[test]
fn many_clients_of_one_cold_response_cost_one_request() {
    let origin = Origin::nginx("location / { add_header Cache-Control max-age=3600; limit_rate 4m; }");
    let bytes = content(1, 6 * MIB);
    fs::write(origin.files().join("large"), &bytes).unwrap();
    let place = Place::new();
    let node = node(&origin, &place, &[]);
    let (bytes, url) = (Arc::new(bytes), node.url("/large"));
    let all = Arc::new(Barrier::new(40));
    let clients: Vec<_> = (0..40)
        .map(|client: usize| {
            let (bytes, url, all) = (bytes.clone(), url.clone(), all.clone());
            thread::spawn(move || {
                all.wait();
                // Half of them want a part.
                let (from, to) = (client * 100_000, client * 120_000 + 70_000);
                let range = format!("{from}-{to}");
                let in_part = client % 2 == 1;
                let words: &[&str] = if in_part { &["-r", &range] } else { &[] };
                let got = curl(&url, words);
                let wanted = if in_part { &bytes[from..=to] } else { &bytes[..] };
                assert_eq!((got.code, got.body.len()), (0, wanted.len()), "{client}: {}", got.head);
                assert!(got.body == wanted, "{client}");
                cache_status(&got).to_owned()
            })
        })
        .collect();
    let said: Vec<String> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert_eq!(said.iter().filter(|said| *said == "fwd=uri-miss; stored").count(), 1, "{said:?}");
    assert_eq!(origin.requests("/large"), ["GET /large 200 -"]);
    let got = until_kept(&node, "/large", &["-r", "-5"]);
    assert!(got.status == 206 && got.body == bytes[bytes.len() - 5..], "{}", got.head);
    assert_eq!(origin.requests("/large").len(), 1);
}

#[test]
fn a_connection_that_the_origin_has_closed_costs_no_error() {
    // It answers the first request of each connection, and ends it when the second one comes.
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    thread::spawn(move || {
        for stream in socket.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                let _ = lines.by_ref().find(|line| line.is_empty());
                let _ =
                    (&stream).write_all(b"HTTP/1.1 200 OK\r\ncache-control: no-store\r\ncontent-length: 2\r\n\r\nok");
                let _ = lines.next();
            });
        }
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy"]);
    for _ in 0..4 {
        let got = node.get("/f", &[]);
        assert_eq!((got.status, &got.body[..]), (200, &b"ok"[..]), "{}", got.head);
    }
}

#[test]
fn a_page_that_is_gone_is_not_used_any_longer() {
    let origin = Origin::nginx("location / { add_header Cache-Control max-age=1; }");
    fs::write(origin.files().join("f"), "one").unwrap();
    let place = Place::new();
    let node = node(&origin, &place, &["--stale-while-revalidate", "1h"]);
    until_kept(&node, "/f", &[]);
    process::wait_until("it is stale", || cache_status(&node.get("/f", &[])) == "hit; detail=STALE");
    fs::remove_file(origin.files().join("f")).unwrap();
    process::wait_until("the node has heard of it", || node.get("/f", &[]).status == 404);
}

#[test]
fn a_response_that_is_not_fresh_is_for_the_client_that_asked() {
    // As many frameworks answer: a tag, and nothing about time.
    let url = slow_origin(Duration::from_millis(300), |head| {
        let cookie = head.lines().find_map(|line| line.strip_prefix("cookie: ")).unwrap_or("none");
        let tag = format!("etag: \"{cookie}\"");
        match head.contains(&format!("if-none-match: \"{cookie}\"")) {
            true => format!("HTTP/1.1 304 Not Modified\r\n{tag}\r\nconnection: close\r\n\r\n"),
            false => {
                let length = cookie.len();
                format!("HTTP/1.1 200 OK\r\n{tag}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{cookie}")
            }
        }
    });
    let place = Place::new();
    let words = ["--reverse-proxy", "--stale-if-error", "1h", "--stale-while-revalidate", "1h"];
    let node = Node::start(&url, &place.fast(), &words);
    for round in 0..3 {
        let clients: Vec<_> = (0..6)
            .map(|client| {
                let (url, cookie) = (node.url("/account"), format!("id={}", client % 3));
                thread::spawn(move || {
                    let got = curl(&url, &["-H", &format!("Cookie: {cookie}")]);
                    assert_eq!(String::from_utf8_lossy(&got.body), cookie, "{round}: {}", got.head);
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
    }
}

#[test]
fn a_change_is_seen_although_the_old_response_is_still_coming() {
    let origin = Origin::nginx(
        "location / { add_header Cache-Control max-age=3600; dav_methods PUT; client_max_body_size 1m; limit_rate 400k; }",
    );
    let old = content(1, 2 * MIB);
    fs::write(origin.files().join("f"), &old).unwrap();
    let place = Place::new();
    let node = node(&origin, &place, &["--forward-changes"]);
    let url = node.url("/f");
    let client = thread::spawn(move || curl(&url, &[]));
    process::wait_until("it is coming", || cache_status(&node.get("/f", &["-r", "0-9"])) == "fwd=uri-miss; collapsed");
    assert_eq!(node.get("/f", &["-X", "PUT", "-d", "new"]).status, 204);
    assert_eq!(node.get("/f", &[]).body, b"new");
    let got = client.join().unwrap();
    assert!(got.code == 0 && got.body == old, "who began to read the old one goes on");
    assert_eq!(until_kept(&node, "/f", &[]).body, b"new");
}

#[test]
fn another_origin_has_other_responses() {
    let origins = [1, 2].map(|_| Origin::nginx("location / { add_header Cache-Control max-age=3600; }"));
    for (at, origin) in origins.iter().enumerate() {
        fs::write(origin.files().join("f"), at.to_string()).unwrap();
    }
    let place = Place::new();
    let first = node(&origins[0], &place, &[]);
    until_kept(&first, "/f", &[]);
    drop(first);
    let second = Node::attempt(&origins[1].url(), &place.fast(), &["--reverse-proxy"]);
    second.unwrap_err().refused(2, &["caches", "give another directory"]);
    assert_eq!(cache_status(&node(&origins[0], &place, &[]).get("/f", &[])).split('=').next(), Some("hit; ttl"));
}

#[test]
fn the_first_byte_does_not_wait_for_the_last() {
    let origin = Origin::nginx("location / { add_header Cache-Control max-age=60; limit_rate 500k; }");
    fs::write(origin.files().join("f"), content(1, 4 * MIB)).unwrap();
    let place = Place::new();
    let node = node(&origin, &place, &[]);
    let head = http::get_until(node.address, "/f", |text| text.len() > 100_000).unwrap();
    assert!(head.starts_with("HTTP/1.1 200"));
    // Its client has gone: the response is kept all the same, though not yet.
    let got = curl(&node.url("/f"), &["-r", "0-9"]);
    assert_eq!((got.status, cache_status(&got)), (206, "fwd=uri-miss; collapsed"));
    process::wait_until("all of it has come", || {
        cache_status(&curl(&node.url("/f"), &["-r", "0-9"])).starts_with("hit")
    });
    assert_eq!(origin.requests("/f").len(), 1);
}

#[test]
fn what_is_kept_outlives_the_node_and_its_origin() {
    let mut origin = Origin::nginx(
        "location /long { add_header Cache-Control max-age=3600; }\n\
         location /short { add_header Cache-Control max-age=1; }\n\
         location /strict { add_header Cache-Control 'max-age=1, must-revalidate'; }",
    );
    let large = content(3, 3 * MIB);
    for name in ["long", "short", "strict"] {
        fs::create_dir(origin.files().join(name)).unwrap();
        fs::write(origin.files().join(name).join("f"), &large).unwrap();
    }
    let place = Place::new();
    let words = ["--stale-if-error", "1h"];
    let paths = ["/long/f?a", "/short/f", "/strict/f"];
    let before = node(&origin, &place, &words);
    for path in paths {
        assert!(before.get(path, &[]).body == large, "{path}");
    }
    assert!(until_kept(&before, paths[0], &[]).body == large);
    thread::sleep(Duration::from_secs(1));
    before.signal(libc::SIGKILL);
    drop(before);
    origin.stop();
    let node = node(&origin, &place, &words);
    process::wait_until("they are stale", || cache_status(&node.get("/short/f", &[])).contains("ORIGIN-FAILS"));
    for (path, status, said) in
        [(paths[0], 200, "hit; ttl="), (paths[1], 200, "hit; detail="), (paths[2], 502, "fwd=miss")]
    {
        let got = node.get(path, &[]);
        assert_eq!((got.status, cache_status(&got).starts_with(said)), (status, true), "{path}: {}", got.head);
        assert!(status != 200 || got.body == large, "{path}");
    }
    assert_eq!(node.get("/long/f", &[]).status, 502, "another query is another response");
    assert_eq!(node.get("/other", &["-H", "Cache-Control: only-if-cached"]).status, 504);

    // The origin is back: it confirms what has not changed, and is believed where it has.
    origin.start();
    let got = node.get("/strict/f", &[]);
    assert!(cache_status(&got) == "fwd=stale; fwd-status=304" && got.body == large, "{}", got.head);
    fs::write(origin.files().join("short/f"), "new").unwrap();
    let got = node.get("/short/f", &[]);
    assert_eq!((cache_status(&got), &got.body[..]), ("fwd=stale; stored", &b"new"[..]));
    assert_eq!(origin.requests("/strict/f"), ["GET /strict/f 200 -", "GET /strict/f 304 -"]);
}

/// SEMANTICS 110: "A response that did not come to its end is never used again. Those that did are used again after kill -9."
#[test]
fn a_response_that_breaks_off_is_not_kept() {
    let mut origin = Origin::nginx("location / { add_header Cache-Control max-age=3600; limit_rate 200k; }");
    fs::write(origin.files().join("f"), content(1, 2 * MIB)).unwrap();
    let place = Place::new();
    let mut node1 = node(&origin, &place, &[]);
    let url = node1.url("/f");
    let client = thread::spawn(move || curl(&url, &[]));
    process::wait_until("it is coming", || cache_status(&node1.get("/f", &["-r", "0-9"])) == "fwd=uri-miss; collapsed");
    // `stop` would let it go on to its end.
    origin.kill();
    assert_eq!(client.join().unwrap().code, 18, "the client sees that there is more");
    assert_eq!(node1.get("/f", &[]).status, 502);
    origin.start();
    let url = node1.url("/f");
    let client = thread::spawn(move || curl(&url, &[]));
    process::wait_until("it is coming again", || {
        cache_status(&node1.get("/f", &["-r", "0-9"])) == "fwd=uri-miss; collapsed"
    });
    node1.signal(libc::SIGKILL);
    node1.wait();
    client.join().unwrap();
    let node2 = node(&origin, &place, &[]);
    assert_eq!(cache_status(&node2.get("/f", &["-r", "0-9"])), "fwd=uri-miss; stored");
}

/// SEMANTICS 111: "A token or a signature of the node is not sent to the web server."
#[test]
fn requests_that_change_something_are_forwarded_only_if_asked_to() {
    let origin = Origin::nginx(
        "location /d { add_header Cache-Control max-age=3600; dav_methods PUT DELETE; }\n\
         location /says { add_header Cache-Control private; return 200 \"$http_authorization|$http_x_forwarded_for|$http_via\"; }",
    );
    fs::create_dir(origin.files().join("d")).unwrap();
    fs::write(origin.files().join("d/f"), "one").unwrap();
    let place = Place::new();
    let access = place.at("access.toml");
    fs::write(&access, "[[token]]\nname = \"a\"\nsecret = \"0123456789abcdef\"\nadmin = true\n").unwrap();
    fs::set_permissions(&access, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let token = ["-H", "Authorization: Bearer 0123456789abcdef"];
    let with = |more: &[&'static str]| [&token[..], more].concat();

    let closed = node(&origin, &place, &["--access", access.to_str().unwrap()]);
    assert_eq!(closed.get("/d/f", &[]).status, 401);
    assert_eq!(closed.get("/d/f", &token).body, b"one");
    let refused = closed.get("/d/f", &with(&["-X", "PUT", "-d", "two"]));
    assert!(refused.status == 400 || refused.status == 405, "{}", refused.head);
    assert_eq!(closed.get("/d/f", &with(&["-X", "DELETE"])).status, 405);
    // The token is for the node, and stays with it.
    let said = String::from_utf8(closed.get("/says", &token).body).unwrap();
    assert!(said.starts_with("|127.0.0.1|1.1 forebay-"), "{said}");
    drop(closed);

    let open = node(&origin, &place, &["--forward-changes", "--access", access.to_str().unwrap()]);
    assert!(cache_status(&open.get("/d/f", &token)).starts_with("hit"));
    assert_eq!(open.get("/d/f", &with(&["-X", "PUT", "-d", "two"])).status, 204);
    assert_eq!(open.get("/d/f", &token).body, b"two", "what was kept is not used after a change");
    assert_eq!(open.get("/d/f", &[]).status, 401);
    assert_eq!(open.get("/d/f", &["-X", "DELETE"]).status, 401, "a change needs the token, too");
    assert_eq!(open.get("/%64/f", &token).body, b"two");
    let redirected = open.get("/d", &token);
    assert_eq!((redirected.status, redirected.header("location")), (301, "/d/"), "clients stay at the node");
    for path in ["/d/..;/d/f", "/d/%2e%2e/d/f", "/d/..%5cd/f"] {
        assert_eq!(open.get(path, &token).status, 400, "{path}");
    }
    let none = open.get("/d/f", &with(&["-X", "TRACE"]));
    assert_eq!(none.status, 405);

    // Purge by path, with all that is below it, whatever the queries.
    for path in ["/d/f?1", "/d/f?2", "/d/f"] {
        until_kept(&open, path, &token);
    }
    fs::write(origin.files().join("d/f"), "three").unwrap();
    assert_eq!(open.get("/d/f?1", &token).body, b"two");
    let purged = open.get("/.forebay/purge/d/f", &with(&["-X", "POST"]));
    assert_eq!(purged.body.trim_ascii(), br#"{"files":3,"bytes":0,"failed":0}"#);
    assert_eq!(open.get("/d/f?1", &token).body, b"three");
    until_kept(&open, "/d/f?1", &token);
    fs::write(origin.files().join("d/f"), "four").unwrap();
    assert_eq!(
        open.get("/.forebay/purge/", &with(&["-X", "POST"])).body.trim_ascii(),
        // The redirection is kept, too.
        br#"{"files":2,"bytes":0,"failed":0}"#
    );
    let fetched = open.get("/.forebay/prefetch/d/f?1", &with(&["-X", "POST"]));
    assert_eq!(fetched.body.trim_ascii(), br#"{"files":1,"bytes":4,"failed":0}"#);
    let got = open.get("/d/f?1", &token);
    assert!(got.body == b"four" && cache_status(&got).starts_with("hit"), "{}", got.head);
    assert_eq!(open.get("/.forebay/prefetch/none", &with(&["-X", "POST"])).status, 502);
}

#[test]
fn responses_vary_by_what_the_request_says() {
    let origin = Origin::nginx(
        "location /v { add_header Cache-Control max-age=3600; add_header Vary 'Accept-Language, X-B'; \
         return 200 \"$http_accept_language.$http_x_b\"; }",
    );
    let place = Place::new();
    let first = node(&origin, &place, &[]);
    let ask = |node: &Node, language: &str, b: &str| {
        let (language, b) = (format!("Accept-Language: {language}"), format!("X-B: {b}"));
        node.get("/v", &["-H", &language, "-H", &b])
    };
    for (language, b) in [("de", "1"), ("de", "2"), ("en", "1")] {
        let got = ask(&first, language, b);
        process::wait_until("it is kept", || cache_status(&ask(&first, language, b)).starts_with("hit"));
        assert_eq!(
            (String::from_utf8_lossy(&got.body), cache_status(&got)),
            (format!("{language}.{b}").into(), "fwd=uri-miss; stored")
        );
    }
    drop(first);
    let second = node(&origin, &place, &[]);
    for (language, b) in [("de", "1"), ("de", "2"), ("en", "1")] {
        let got = ask(&second, language, b);
        assert!(cache_status(&got).starts_with("hit"), "{}", got.head);
        assert_eq!(String::from_utf8_lossy(&got.body), format!("{language}.{b}"));
    }
    assert_eq!(origin.requests("/v").len(), 3);
}

#[test]
fn a_small_fast_pool_gives_up_old_responses() {
    let origin = Origin::nginx("location / { add_header Cache-Control max-age=3600; }");
    for at in 0..40 {
        fs::write(origin.files().join(at.to_string()), content(at, 2 * MIB)).unwrap();
    }
    fs::write(origin.files().join("huge"), content(99, 40 * MIB)).unwrap();
    let place = Place::new();
    let node = node(&origin, &place, &["--limit", "48M"]);
    for round in 0..2 {
        for at in 0..40 {
            let got = node.get(&format!("/{at}"), &[]);
            assert!(got.code == 0 && got.body == content(at, 2 * MIB), "{round} {at}: {}", got.head);
        }
    }
    let status = node.status();
    assert!(status.used_bytes <= 48 << 20, "{status:?}");
    let mut told = Command::new(process::forebay());
    let told = process::run(told.arg("status").arg(node.path()), Duration::from_secs(30)).ok();
    assert!(told.out.contains(&origin.url()), "{told}");
    let huge = node.get("/huge", &["-r", "5-6"]);
    assert_eq!(
        (huge.status, huge.body, origin.requests("/huge").len()),
        (206, content(99, 40 * MIB)[5..7].to_vec(), 2)
    );
    assert!(node.get("/huge", &[]).body == content(99, 40 * MIB), "what is too large to be kept is passed on");
}

#[test]
fn responses_are_counted_by_where_they_came_from() {
    let origin = Origin::nginx("location / { add_header Cache-Control max-age=3600; }");
    fs::write(origin.files().join("f"), content(1, 1000)).unwrap();
    let (place, port) = (Place::new(), free_port());
    let node = node(&origin, &place, &["--metrics", &port.to_string()]);
    let mut hits = 0;
    assert_eq!(node.get("/f", &[]).status, 200);
    process::wait_until("the response is kept", || {
        let is_hit = cache_status(&node.get("/f", &[])).starts_with("hit");
        hits += u64::from(is_hit);
        is_hit
    });
    assert_eq!((node.get("/none", &[]).status, node.get("/../f", &["--path-as-is"]).status), (404, 400));
    assert_eq!((responses(port, "miss", "2xx"), responses(port, "hit", "2xx")), (1, hits));
    assert_eq!((responses(port, "passed", "4xx"), responses(port, "none", "4xx")), (1, 1));
    assert_eq!(http::metric(port, "forebay_http_sent_bytes_total{cache=\"hit\"}"), hits * 1000);
}

/// SEMANTICS 112: "A response that the fast pool has no room for reaches its clients whole, and is not kept."
#[test]
fn a_response_that_grows_beyond_its_share_is_passed_on_to_all_its_clients() {
    // The origin sends nothing more than the head until all clients have joined.
    let (requests, all_joined) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (asked, goes_on) = (requests.clone(), all_joined.clone());
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    thread::spawn(move || {
        for stream in socket.incoming().map_while(Result::ok) {
            let (asked, goes_on) = (asked.clone(), goes_on.clone());
            thread::spawn(move || {
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                let _ = lines.by_ref().find(|line| line.is_empty());
                asked.fetch_add(1, Ordering::SeqCst);
                let mut stream = &stream;
                let head = "HTTP/1.1 200 OK\r\ncache-control: max-age=3600\r\ntransfer-encoding: chunked\r\n\r\n";
                let mut send = || -> std::io::Result<()> {
                    stream.write_all(head.as_bytes())?;
                    process::wait_until("all clients have joined", || goes_on.load(Ordering::SeqCst));
                    for chunk in content(7, 40 * MIB).chunks(100_000) {
                        write!(stream, "{:x}\r\n", chunk.len())?;
                        stream.write_all(chunk)?;
                        stream.write_all(b"\r\n")?;
                    }
                    stream.write_all(b"0\r\n\r\n")
                };
                let _ = send();
            });
        }
    });
    let (place, port) = (Place::new(), free_port());
    let words = ["--reverse-proxy", "--limit", "48M", "--metrics", &port.to_string()];
    let node = Node::start(&url, &place.fast(), &words);
    let clients: Vec<_> = (0..2)
        .map(|client: usize| {
            let url = node.url("/stream");
            // One of them is slower than the other.
            let words: &[&str] = [&[][..], &["--limit-rate", "10M"]][client];
            thread::spawn(move || curl(&url, words))
        })
        .collect();
    // And one goes away when it has more than is stored.
    let mut leaves = Command::new("bash");
    leaves.args(["-c", "curl -s \"$0\" | head -c 20000000 | wc -c"]).arg(node.url("/stream"));
    let leaves = thread::spawn(move || process::run(&mut leaves, Duration::from_secs(60)).ok());
    process::wait_until("all clients have joined", || {
        responses(port, "miss", "2xx") + responses(port, "collapsed", "2xx") == 3
    });
    all_joined.store(true, Ordering::SeqCst);
    let got: Vec<Got> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert_eq!(leaves.join().unwrap().out.trim(), "20000000");
    for got in &got {
        assert!(got.code == 0 && got.body == content(7, 40 * MIB), "{} {} {}", got.code, got.body.len(), got.head);
    }
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    // It is not kept.
    let again = node.get("/stream", &[]);
    assert!(again.body == content(7, 40 * MIB) && cache_status(&again).starts_with("fwd=uri-miss"), "{}", again.head);
    assert_eq!(requests.load(Ordering::SeqCst), 2);
    process::wait_until("nothing of it is left", || node.status().used_bytes < 1 << 20);
}

#[test]
fn ranges_and_conditions_are_answered_as_by_the_origin() {
    let origin = Origin::nginx("location / { add_header Cache-Control max-age=3600; }");
    let size = 200_000;
    fs::write(origin.files().join("f.txt"), content(1, size)).unwrap();
    let place = Place::new();
    let node = node(&origin, &place, &[]);
    let first = node.get("/f.txt", &[]);
    let (tag, date) = (first.header("etag").to_owned(), first.header("last-modified").to_owned());
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let past = "Sun, 06 Nov 1994 08:49:37 GMT";
    for _ in 0..300 {
        let mut words = Vec::new();
        let mut add = |name: &str, value: String| words.push(format!("{name}: {value}"));
        let edge = |rng: &mut rand_chacha::ChaCha8Rng| match rng.random_range(0..4) {
            0 => 0,
            1 => size - 1,
            2 => size + rng.random_range(0..10),
            _ => rng.random_range(0..size),
        };
        match rng.random_range(0..5) {
            0 => {
                // nginx refuses a range that ends before it begins. By RFC 9110 it counts as absent.
                let (one, other) = (edge(&mut rng), edge(&mut rng));
                add("Range", format!("bytes={}-{}", one.min(other), one.max(other)));
            }
            1 => add("Range", format!("bytes={}-", edge(&mut rng))),
            2 => add("Range", format!("bytes=-{}", edge(&mut rng).max(1))),
            _ => {}
        }
        match rng.random_range(0..6) {
            0 => add("If-None-Match", tag.clone()),
            1 => add("If-None-Match", "\"x\"".into()),
            2 => add("If-Modified-Since", date.clone()),
            3 => add("If-Range", tag.clone()),
            4 => add("If-Range", past.into()),
            _ => {}
        }
        let words: Vec<&str> = words.iter().flat_map(|word| ["-H", word]).collect();
        let (ours, theirs) = (node.get("/f.txt", &words), curl(&format!("{}/f.txt", origin.url()), &words));
        let shown = |got: &Got| {
            let headers =
                ["content-range", "content-length", "etag", "last-modified"].map(|name| got.header(name).to_owned());
            (got.status, if got.status == 416 || got.status == 304 { Default::default() } else { headers })
        };
        assert_eq!(shown(&ours), shown(&theirs), "{words:?}\n{}\n{}", ours.head, theirs.head);
        assert!(ours.status == 416 || ours.body == theirs.body, "{words:?}");
    }
}

#[test]
fn bad_arguments_are_refused() {
    let place = Place::new();
    let attempt = |url: &str, words: &[&str]| Node::attempt(url, &place.fast(), words).unwrap_err();
    attempt("/tmp", &["--reverse-proxy"]).refused(2, &["an origin is http://HOST[:PORT]"]);
    attempt("http://host/path", &["--reverse-proxy"]).refused(2, &["an origin is http://HOST[:PORT]"]);
    attempt("http://host", &["--forward-changes"]).refused(2, &["--reverse-proxy"]);
    attempt("http://host", &["--reverse-proxy", "--immutable"]).refused(2, &["--immutable"]);
    let mut mount = Command::new(process::forebay());
    mount
        .arg("mount")
        .arg(format!("hollow://{}", place.at("x").display()))
        .arg(place.at("m"))
        .arg("--fast")
        .arg(place.fast());
    process::run(&mut mount, Duration::from_secs(30)).refused(2, &["hollow"]);
    assert!(!Path::new(&place.at("x")).exists());
}
