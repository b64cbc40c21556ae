//! A cache node in front of real pools, with curl as its client.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use forebay_tests::cache_node::{Node, curl};
use forebay_tests::http;
use forebay_tests::mount::{Place, content};
use forebay_tests::process;
use forebay_tests::servers::s3::Versitygw;

const MIB: usize = 1 << 20;

fn write(place: &Place, path: &str, bytes: &[u8]) {
    let at = place.pool().join(path);
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    fs::write(at, bytes).unwrap();
}

#[test]
fn files_are_those_of_the_pool_cold_and_warm() {
    let place = Place::new();
    let files = [("empty", 0), ("small.txt", 100), ("d/page", 40_000), ("d/e/large", 9 * MIB + 7)];
    for (seed, (path, len)) in files.into_iter().enumerate() {
        write(&place, path, &content(seed as u64, len));
    }
    write(&place, "d/a b%c", b"odd name");
    let node = Node::of(&place, &[]);
    for round in ["cold", "warm"] {
        for (seed, (path, len)) in files.into_iter().enumerate() {
            let got = node.get(&format!("/{path}"), &[]);
            assert_eq!((got.code, got.status), (0, 200), "{path} {round}: {}", got.head);
            assert!(got.body == content(seed as u64, len), "{path} {round}");
            assert!(got.header("etag").len() > 30 && !got.header("last-modified").is_empty(), "{}", got.head);
            let status = got.header("cache-status");
            // An empty file has no bytes that could come from the pool.
            assert_eq!(status.contains("hit"), round == "warm" || len == 0, "{path} {round}: {status}");
        }
    }
    let reads = node.status().counters.reads;
    let sent: usize = files.iter().map(|(_, len)| 2 * len).sum();
    assert_eq!(reads.fast.bytes + reads.fetched.bytes + reads.direct.bytes, sent as u64, "{reads:?}");
    assert_eq!(node.get("/d/a%20b%25c", &[]).body, b"odd name");
    let head = node.get("/d/e/large", &["-I"]);
    assert_eq!((head.status, head.header("content-length"), head.body.len()), (200, "9437191", head.body.len()));
    assert_eq!(node.get("/small.txt", &[]).header("content-type"), "text/plain");
    assert_eq!(node.get("/nothing", &[]).status, 404);
    assert_eq!(node.get("/d", &[]).status, 403, "directories are not listed unless the node was told so");
    assert_eq!(node.get("/small.txt", &["-X", "DELETE"]).status, 405);
    assert_eq!(node.get("/small.txt", &["-X", "OPTIONS"]).header("allow"), "GET, HEAD, OPTIONS");
    assert_eq!(node.get("/healthz", &[]).status, 200);
    assert_eq!(node.get("/readyz", &[]).status, 200);

    // Other commands know the node by its path.
    let command = |words: &[&str]| {
        let mut command = Command::new(process::forebay());
        process::run(command.args(words).arg(node.path()), Duration::from_secs(30))
    };
    assert!(command(&["ls"]).ok().out.contains("small.txt"));
    assert!(command(&["status"]).ok().out.contains("pool"));
    assert!(command(&["du"]).ok().out.contains("9.0 MiB"));
    command(&["fsck"]).ok();
    // A file that was asked for in the last ten seconds is open.
    process::wait_until("all is evicted", || {
        command(&["evict"]).ok();
        node.status().resident_files == 0
    });
    assert!(node.get("/d/e/large", &[]).header("cache-status").contains("miss"));
    command(&["umount"]).refused(2, &["is a cache node", "kill"]);
}

#[test]
fn ranges_and_conditions_are_answered() {
    let place = Place::new();
    let bytes = content(1, 3 * MIB);
    write(&place, "f", &bytes);
    let node = Node::of(&place, &[]);
    for _ in 0..2 {
        let one = node.get("/f", &["-r", "1000-1999"]);
        assert_eq!((one.status, one.header("content-range")), (206, "bytes 1000-1999/3145728"));
        assert!(one.body == bytes[1000..2000]);
        let suffix = node.get("/f", &["-r", "-70000"]);
        assert!(suffix.status == 206 && suffix.body == bytes[3 * MIB - 70_000..]);
        let beyond = node.get("/f", &["-r", "3145728-"]);
        assert_eq!((beyond.status, beyond.header("content-range")), (416, "bytes */3145728"));
        let several = node.get("/f", &["-r", "0-9,2000000-2099999"]);
        let kind = several.header("content-type").to_owned();
        let boundary = kind.strip_prefix("multipart/byteranges; boundary=").expect("a multipart body");
        let mut expected = format!(
            "--{boundary}\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes 0-9/3145728\r\n\r\n"
        )
        .into_bytes();
        expected.extend(&bytes[..10]);
        expected.extend(
            format!(
                "\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\
                 Content-Range: bytes 2000000-2099999/3145728\r\n\r\n"
            )
            .bytes(),
        );
        expected.extend(&bytes[2_000_000..2_100_000]);
        expected.extend(format!("\r\n--{boundary}--\r\n").bytes());
        assert!(several.status == 206 && several.body == expected);
        assert_eq!(several.header("content-length"), expected.len().to_string());
    }
    let whole = node.get("/f", &["-I"]);
    let (tag, date) = (format!("If-None-Match: {}", whole.header("etag")), whole.header("last-modified").to_owned());
    assert_eq!(node.get("/f", &["-H", &tag]).status, 304);
    assert_eq!(node.get("/f", &["-H", &tag.replace("None-", "")]).status, 200);
    assert_eq!(node.get("/f", &["-H", "If-Match: \"other\""]).status, 412);
    assert_eq!(node.get("/f", &["-H", &format!("If-Modified-Since: {date}")]).status, 304);
    let ranged = node.get("/f", &["-r", "0-9", "-H", &tag.replace("None-Match", "Range")]);
    assert_eq!((ranged.status, ranged.body.len()), (206, 10));
    let other = node.get("/f", &["-r", "0-9", "-H", "If-Range: \"other\""]);
    assert_eq!((other.status, other.body.len()), (200, 3 * MIB));
}

/// SEMANTICS 94: "A response has the bytes of one version. If the pool's copy changes meanwhile, the response ends early, so that
/// the client sees it."
#[test]
fn a_change_in_the_middle_ends_the_response() {
    let place = Place::new();
    let (old, new) = (content(1, 48 * MIB), content(2, 48 * MIB));
    write(&place, "f", &old);
    let node = Node::of(&place, &["--throttle", "16MB/s,1ms"]);
    let out = place.at("got");
    let mut client = process::spawn(
        Command::new("curl")
            .args(["-s", "-m", "60", "-D"])
            .arg(place.at("head"))
            .arg("-o")
            .arg(&out)
            .arg(node.url("/f")),
    )
    .unwrap();
    process::wait_until("some bytes came", || fs::metadata(&out).is_ok_and(|meta| meta.len() > MIB as u64));
    fs::write(place.at("new"), &new).unwrap();
    fs::rename(place.at("new"), place.pool().join("f")).unwrap();
    // The engine learns of it from whoever asks next.
    let tag = node.get("/f", &["-I"]).header("etag").to_owned();
    let status = process::wait(&mut client, Duration::from_secs(90)).expect("curl ends");
    let got = fs::read(&out).unwrap();
    assert_eq!(status.code(), Some(18), "the body ended early: {} bytes", got.len());
    assert!(got.len() < old.len() && got == old[..got.len()], "all bytes are of the old version");
    let head = fs::read_to_string(place.at("head")).unwrap();
    let before = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().trim().to_owned();
    assert_ne!(before, tag);
    let resumed = node.get("/f", &["-r", &format!("{}-", got.len()), "-H", &format!("If-Range: {before}")]);
    assert!(resumed.status == 200 && resumed.body == new, "the client begins again");
}

/// SEMANTICS 95: "A client gets what the node's user may read, and nothing outside of the pool."
#[test]
fn nothing_outside_of_the_pool_and_nothing_private_is_served() {
    let place = Place::new();
    write(&place, "open/f", b"public");
    write(&place, "open/private", b"secret");
    write(&place, "closed/f", b"secret");
    write(&place, "open/d/f", b"inside");
    fs::write(place.at("outside"), b"secret").unwrap();
    let chmod = |path: &str, mode| fs::set_permissions(place.pool().join(path), Permissions::from_mode(mode)).unwrap();
    chmod("open/private", 0o600);
    chmod("closed", 0o711);
    chmod("closed/f", 0o640);
    for (name, target) in [
        ("open/up", "../../outside"),
        ("open/absolute", "/etc/passwd"),
        ("open/inside", "d/../d/f"),
        ("open/to-closed", "../closed/f"),
        ("open/loop", "loop"),
    ] {
        symlink(target, place.pool().join(name)).unwrap();
    }
    let node = Node::of(&place, &["--listings"]);
    assert_eq!(node.get("/open/f", &[]).body, b"public");
    assert_eq!(node.get("/open/inside", &[]).body, b"inside");
    for path in ["/open/private", "/closed/f", "/closed/", "/open/to-closed", "/open/up", "/open/absolute"] {
        let got = node.get(path, &[]);
        assert_eq!(got.status, 403, "{path}");
        assert!(!String::from_utf8_lossy(&got.body).contains("secret"), "{path}");
    }
    for path in [
        "/../outside",
        "/open/../../outside",
        "/%2e%2e/outside",
        "/..%2foutside",
        "/open/..%2f..%2foutside",
        "/open/f%00",
        "//etc/passwd",
        "/open/%zz",
        "/open/%c0%ae%c0%ae/outside",
        "/open/loop",
        "/.forebay/x",
    ] {
        let got = node.get(path, &[]);
        assert!(matches!(got.status, 400 | 404), "{path}: {}", got.head);
    }
    let listed: serde_json::Value = serde_json::from_slice(&node.get("/open/?format=json", &[]).body).unwrap();
    let names: Vec<&str> = listed.as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["absolute", "d", "f", "inside", "loop", "private", "to-closed", "up"]);
    let moved = node.get("/open/d", &[]);
    assert_eq!((moved.status, moved.header("location")), (301, "./d/"));
    let root = Node::start(place.pool().to_str().unwrap(), &place.at("fast2"), &["--user", "root"]);
    assert_eq!(root.get("/closed/f", &[]).body, b"secret", "a node may serve with the rights of another user");
}

/// SEMANTICS 96: "Clients that ask for the same bytes at the same time cost the pool one read of them."
#[test]
fn many_clients_of_one_cold_file_cost_one_read() {
    let place = Place::new();
    let bytes = content(3, 24 * MIB);
    write(&place, "f", &bytes);
    let node = Node::of(&place, &["--throttle", "60MB/s,2ms"]);
    let address = node.address;
    let step = bytes.len() / 100;
    thread::scope(|scope| {
        for client in 0..100 {
            let bytes = &bytes;
            scope.spawn(move || {
                // Half of them want all, half a part.
                let range = if client % 2 == 0 { 0..bytes.len() } else { client * step..(client + 1) * step };
                let header = format!("Range: bytes={}-{}", range.start, range.end - 1);
                let got = curl(&format!("http://{address}/f"), &["-H", &header]);
                assert!(got.code == 0 && got.body == bytes[range], "client {client}: {}", got.head);
            });
        }
    });
    assert_eq!(node.status().counters.pool_read_bytes, bytes.len() as u64);
}

/// SEMANTICS 97: "While the pool does not answer, a node serves what is resident."
#[test]
fn resident_files_outlive_the_pool() {
    let place = Place::new();
    let mut server = Versitygw::start();
    let bytes = content(4, 5 * MIB);
    for (key, content) in [("d/f", &bytes[..]), ("d/g", b"never read")] {
        fs::write(place.at("object"), content).unwrap();
        server.curl(&["-T", place.at("object").to_str().unwrap()], key);
    }
    let policy = place.at("policy.toml");
    fs::write(&policy, "[pool]\ndeadline = \"2s\"\n[default]\nconsistency = \"ttl:1s\"\nmetadata-ttl = \"1s\"\n")
        .unwrap();
    let asking_place = Place::new();
    let asking = Node::start(&server.url(""), &asking_place.fast(), &[]);
    assert!(asking.get("/d/f", &[]).body == bytes);
    let words = ["--policy", policy.to_str().unwrap(), "--stale-while-revalidate", "1m"];
    let node = Node::start(&server.url(""), &place.fast(), &words);
    let first = node.get("/d/f", &[]);
    assert!(first.body == bytes && first.header("cache-control") == "max-age=1", "{}", first.head);
    let fresh = node.get("/d/f", &[]);
    assert!(fresh.header("cache-status").starts_with("forebay; hit"), "{}", fresh.head);
    server.kill();
    let got = asking.get("/d/f", &[]);
    assert!(got.body == bytes && got.header("cache-status") == "forebay; hit; detail=POOL-FAILS", "{}", got.head);
    for _ in 0..6 {
        let got = node.get("/d/f", &[]);
        assert!(got.status == 200 && got.body == bytes, "{}", got.head);
        thread::sleep(Duration::from_millis(500));
    }
    // Its time is over, and no answer of the pool has made it fresh again.
    let stale = node.get("/d/f", &[]);
    let age: u64 = stale.header("age").parse().unwrap();
    assert!(stale.header("cache-status") == "forebay; hit; detail=STALE" && age >= 2, "{}", stale.head);
    let absent = node.get("/d/g", &[]);
    assert!(matches!(absent.status, 503 | 504) && !absent.header("retry-after").is_empty(), "{}", absent.head);
    assert_eq!(node.get("/readyz", &[]).status, 200);
}

#[test]
fn tokens_and_signed_urls_open_what_they_are_for() {
    let place = Place::new();
    write(&place, "public/f", b"one");
    write(&place, "other/f", b"two");
    let file = place.at("access.toml");
    let text = "signing-key = \"0123456789abcdef0123\"\n[[token]]\nname = \"ci\"\nsecret = \"correct horse battery\"\n\
                path = \"/public\"\n[[token]]\nname = \"operator\"\nsecret = \"staple correct horse\"\nadmin = true\n";
    fs::write(&file, text).unwrap();
    let at = file.to_str().unwrap();
    let refused = Node::attempt(place.pool().to_str().unwrap(), &place.fast(), &["--access", at]).unwrap_err();
    refused.refused(2, &["access.toml", "chmod 600"]);
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let log = place.at("log");
    let mut node = Node::of(
        &place,
        &["--access", at, "--access-log", log.to_str().unwrap(), "--access-log-format", "json", "--immutable"],
    );
    let ci = ["-H", "Authorization: Bearer correct horse battery"];
    let operator = ["-H", "Authorization: Bearer staple correct horse"];
    assert_eq!(node.get("/public/f", &[]).status, 401);
    assert_eq!(node.get("/public/f", &ci).body, b"one");
    assert_eq!(node.get("/other/f", &ci).status, 403);
    let sign = |path: &str| {
        let mut command = Command::new(process::forebay());
        command.args(["sign-url", &node.url(path), "--access", at, "--valid", "1m"]);
        process::run(&mut command, Duration::from_secs(30)).ok().out.trim().to_owned()
    };
    let signed = sign("/other/f");
    let got = curl(&signed, &[]);
    assert_eq!(got.body, b"two");
    // Caches before the node must not answer other clients, nor this one for longer than the URL is for.
    let control = node.get("/public/f", &ci).header("cache-control").to_owned();
    assert_eq!(control, "private, max-age=31536000, immutable");
    let control = got.header("cache-control").strip_prefix("private, max-age=").expect("it is for one client");
    let left: u64 = control.strip_suffix(", immutable").unwrap().parse().unwrap();
    assert!(left <= 60, "{}", got.head);
    assert_eq!(curl(&signed.replace("/other/", "/public/"), &[]).status, 403);
    // A browser names the page from which it comes.
    assert_eq!(node.get("/public/f", &[ci[0], ci[1], "-e", &signed]).status, 200);
    assert_eq!(node.get("/public/f", &[ci[0], ci[1], "-e", "http://page/"]).status, 200);
    assert_eq!(node.get("/public/f?expires=99999999999&signature=00", &ci).status, 403);

    // An immutable file is asked about again only after a purge, which a reader may not do.
    fs::write(place.pool().join("public/f"), b"one, changed").unwrap();
    assert_eq!(node.get("/public/f", &ci).body, b"one");
    let purge = |who: &[&str; 2]| node.get("/.forebay/purge/public", &["-X", "POST", who[0], who[1]]);
    assert_eq!(purge(&ci).status, 403);
    let purged = purge(&operator);
    assert_eq!(purged.status, 200, "{}", String::from_utf8_lossy(&purged.body));
    assert_eq!(node.get("/public/f", &ci).body, b"one, changed");
    write(&place, "other/g", &content(5, MIB));
    let fetched = node.get("/.forebay/prefetch/other/g", &["-X", "POST", operator[0], operator[1]]);
    let said: serde_json::Value = serde_json::from_slice(&fetched.body).unwrap();
    assert_eq!((fetched.status, &said["files"], &said["failed"]), (200, &1.into(), &0.into()), "{said}");
    let got = node.get("/other/g", &operator);
    assert!(got.body == content(5, MIB) && got.header("cache-status").contains("hit"), "{}", got.head);

    // A reload takes new tokens, and refuses a file that is wrong.
    fs::write(&file, text.replace("correct horse battery", "another horse battery")).unwrap();
    node.signal(libc::SIGHUP);
    process::wait_until("the new token counts", || node.get("/public/f", &ci).status == 401);
    assert_eq!(node.get("/public/f", &["-H", "Authorization: Bearer another horse battery"]).status, 200);
    node.signal(libc::SIGTERM);
    assert_eq!(node.wait(), Some(0));
    let logged = fs::read_to_string(log).unwrap();
    let lines: Vec<serde_json::Value> = logged.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|l| l["user"] == "ci" && l["status"] == 200 && l["bytes"] == 3), "{logged}");
    assert!(lines.iter().any(|l| l["target"].as_str().unwrap().starts_with("/other/f?expires=")), "{logged}");
    assert!(lines.iter().any(|l| l["referer"] == "http://page/"), "{logged}");
    assert!(!logged.contains("signature=") && !logged.contains("horse"), "{logged}");
}

/// SEMANTICS 98: "A node that is asked to end answers the requests under way, for up to half a minute."
#[test]
fn a_node_that_ends_finishes_what_it_began() {
    let place = Place::new();
    let bytes = content(6, 24 * MIB);
    write(&place, "f", &bytes);
    let mut node = Node::of(&place, &["--throttle", "8MB/s,1ms"]);
    let out = place.at("got");
    let mut client =
        process::spawn(Command::new("curl").args(["-sf", "-m", "60", "-o"]).arg(&out).arg(node.url("/f"))).unwrap();
    process::wait_until("some bytes came", || fs::metadata(&out).is_ok_and(|meta| meta.len() > 0));
    node.signal(libc::SIGTERM);
    process::wait_until("no connection is accepted", || std::net::TcpStream::connect(node.address).is_err());
    assert_eq!(process::wait(&mut client, Duration::from_secs(60)).expect("curl ends").code(), Some(0));
    assert!(fs::read(out).unwrap() == bytes);
    assert_eq!(node.wait(), Some(0));
}

#[test]
fn https_and_http2_are_served() {
    let place = Place::new();
    let bytes = content(7, 2 * MIB);
    write(&place, "f", &bytes);
    let (cert, key) = (place.at("cert.pem"), place.at("key.pem"));
    let make = || {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]);
        command.args(["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]);
        command.arg("-keyout").arg(&key).arg("-out").arg(&cert);
        process::run(&mut command, Duration::from_secs(30)).ok();
    };
    make();
    let words = ["--tls-cert", cert.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let node = Node::of(&place, &words);
    let url = format!("https://{}/f", node.address);
    for (option, protocol) in [("--http1.1", "HTTP/1.1 200"), ("--http2", "HTTP/2 200")] {
        let got = curl(&url, &[option, "--cacert", cert.to_str().unwrap()]);
        assert!(got.head.starts_with(protocol) && got.body == bytes, "{option}: {}", got.head);
    }
    // Without TLS, for clients that know it.
    let plain = Node::start(place.pool().to_str().unwrap(), &place.at("fast2"), &[]);
    let got = plain.get("/f", &["--http2-prior-knowledge"]);
    assert!(got.head.starts_with("HTTP/2 200") && got.body == bytes, "{}", got.head);
    // The conformance suite for RFC 9113 and RFC 7541.
    let (host, port) = (node.address.ip().to_string(), node.address.port().to_string());
    let mut suite = Command::new(process::tool("h2spec"));
    suite.args(["-t", "-k", "-h", &host, "-p", &port, "-P", "/f", "-o", "10"]);
    process::run(&mut suite, Duration::from_secs(120)).ok();
    let old = fs::read_to_string(&cert).unwrap();
    make();
    node.signal(libc::SIGHUP);
    process::wait_until("the new certificate is shown", || {
        curl(&url, &["--cacert", cert.to_str().unwrap()]).status == 200
    });
    fs::write(&cert, old).unwrap();
    let refused = Node::attempt(place.pool().to_str().unwrap(), &place.at("fast3"), &words).unwrap_err();
    refused.refused(2, &["key.pem", "does not fit the certificate"]);
}

#[test]
fn bad_clients_are_refused() {
    let place = Place::new();
    write(&place, "f", b"content");
    let node = Node::of(&place, &["--rate", "20"]);
    let shapes = [
        (
            "GET /f HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
            400,
        ),
        ("GET /f HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\nConnection: close\r\n\r\nx", 400),
        ("GET /f HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\nConnection: close\r\n\r\n", 400),
        ("GET /f HTTP/1.1\r\nHost : x\r\nConnection: close\r\n\r\n", 400),
        ("GET /f\u{1}g HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
    ];
    for (request, status) in shapes {
        // A connection that ends without an answer is a refusal, too.
        match http::exchange(node.address, request) {
            Ok(answer) => assert_eq!(answer.status, status, "{request:?}"),
            Err(error) => println!("{request:?}: {error}"),
        }
    }
    let huge = format!("GET /f HTTP/1.1\r\nHost: x\r\nX: {}\r\nConnection: close\r\n\r\n", "y".repeat(100_000));
    if let Ok(answer) = http::exchange(node.address, &huge) {
        assert_eq!(answer.status, 431);
    }
    let begun = Instant::now();
    // Several at a time: on a busy machine, one thread may ask less often than the limit allows.
    let refused = Mutex::new(None);
    let ask = || {
        while refused.lock().unwrap().is_none() && begun.elapsed() < Duration::from_secs(120) {
            let got = http::get(node.address, "/f", "").unwrap();
            if got.status == 429 {
                *refused.lock().unwrap() = Some(got.head);
            }
        }
    };
    thread::scope(|scope| (0..8).for_each(|_| _ = scope.spawn(ask)));
    let head = refused.into_inner().unwrap().expect("a client that asks without a pause is told to wait");
    assert!(head.contains("retry-after: "), "{head}");
    process::wait_until("the client may ask again", || http::get(node.address, "/f", "").unwrap().status == 200);
}

/// A program that passes its first argument as a socket, as systemd does.
#[test]
fn a_passed_socket_is_used() {
    let place = Place::new();
    write(&place, "f", b"content");
    process::need(&["python3"]);
    let script = "import os,socket,sys\n\
                  s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 0)); s.listen()\n\
                  print(s.getsockname()[1], flush=True)\n\
                  os.dup2(s.fileno(), 3) if s.fileno() != 3 else os.set_inheritable(3, True)\n\
                  os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n\
                  os.execv(sys.argv[1], sys.argv[1:])\n";
    let name = format!("passed-{}", std::process::id());
    let mut child = process::spawn(
        Command::new("python3")
            .args(["-c", script])
            .arg(process::forebay())
            .arg("serve")
            .arg(place.pool())
            .arg("--fast")
            .arg(place.fast())
            .args(["--name", &name])
            .stdout(Stdio::piped()),
    )
    .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
    // The kernel queues connections before the node is ready.
    let got = curl(&format!("http://127.0.0.1:{}/f", line.trim()), &[]);
    let _ = child.kill();
    let _ = child.wait();
    let _ = fs::remove_dir_all(forebay_daemon::registry::Runtime::of(&Path::new("/forebay").join(name)).dir());
    assert_eq!((got.status, &got.body[..]), (200, &b"content"[..]));
}

#[test]
fn what_cannot_be_served_is_refused_with_the_remedy() {
    let place = Place::new();
    let attempt = |words: &[&str]| Node::attempt(place.pool().to_str().unwrap(), &place.fast(), words).unwrap_err();
    attempt(&["--user", "nobody-at-all"]).refused(2, &["--user nobody-at-all", "there is no such user"]);
    attempt(&["--listen", "192.0.2.1:80"]).refused(2, &["192.0.2.1:80", "no address of this machine", "--listen"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    attempt(&["--listen", &taken.local_addr().unwrap().to_string()])
        .refused(6, &["cannot listen on 127.0.0.1:", "another program"]);
    attempt(&["--name", "../x"]).refused(2, &["--name"]);
    attempt(&["--tls-cert", "/nothing", "--tls-key", "/nothing"]).refused(2, &["certificate /nothing"]);
}
