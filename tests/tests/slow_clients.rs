//! Clients of a cache node that are slow, idle, or send what nobody asked for.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use forebay_tests::cache_node::Node;
use forebay_tests::http;
use forebay_tests::mount::{Place, content};
use forebay_tests::process;
use forebay_tests::servers::origin::slow_origin;

/// More than a node lets a client wait.
const LIMIT: Duration = Duration::from_secs(120);
const MIB: usize = 1 << 20;
/// What all idle connections together may cost a node in memory, in KiB.
const IDLE_KIB: u64 = 400 << 10;
/// What all responses together that clients do not take may cost a node in memory, in KiB. Read without a bound, they take
/// more than 512 MiB.
const UNTAKEN_KIB: u64 = 192 << 10;

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Returns what a connection says until its end.
fn to_the_end(mut stream: &TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("the connection stays: {error}"),
        _ => said,
    }
}

#[test]
fn clients_that_stop_are_cut_off() {
    let place = Place::new();
    fs::write(place.pool().join("small"), b"content").unwrap();
    fs::write(place.pool().join("large"), content(1, 64 * MIB)).unwrap();
    let node = Node::of(&place, &[]);
    let address = node.address;
    thread::scope(|scope| {
        // The head of a request that does not end, a byte at a time.
        scope.spawn(move || {
            let mut stream = connect(address);
            stream.write_all(b"GET /small HTTP/1.1\r\nHost: x\r\n").unwrap();
            let mut slow = stream.try_clone().unwrap();
            let sender = thread::spawn(move || {
                while slow.write_all(b"x").is_ok() {
                    thread::sleep(Duration::from_secs(1));
                }
            });
            let said = String::from_utf8_lossy(&to_the_end(&stream)).into_owned();
            assert!(said.is_empty() || said.contains(" 408 "), "{said}");
            drop(stream);
            sender.join().unwrap();
        });
        // Nothing, and what may still become either version of HTTP.
        for start in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n"] {
            scope.spawn(move || {
                let mut stream = connect(address);
                stream.write_all(start).unwrap();
                assert!(to_the_end(&stream).len() < 1000);
            });
        }
        // A response that is not read.
        scope.spawn(move || {
            let mut stream = connect(address);
            stream.write_all(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            let local = stream.local_addr().unwrap();
            let begun = Instant::now();
            while is_connected(local, address) {
                assert!(begun.elapsed() < LIMIT, "the node waits for a client that reads nothing");
                // The kernel writes the list of all connections, and another test has ten thousand.
                thread::sleep(Duration::from_secs(1));
            }
            assert!(to_the_end(&stream).len() < 64 * MIB);
        });
        // Others are served meanwhile.
        scope.spawn(move || {
            for _ in 0..10 {
                assert_eq!(http::get(address, "/small", "").unwrap().status, 200);
                thread::sleep(Duration::from_secs(1));
            }
        });
    });
    assert_eq!(http::get(address, "/small", "").unwrap().body, "content");
}

/// Returns whether the server's side of a connection is still established. Both ends are on this machine.
fn is_connected(client: SocketAddr, server: SocketAddr) -> bool {
    let hex = |at: SocketAddr| match at {
        SocketAddr::V4(v4) => format!("{:08X}:{:04X}", u32::from_le_bytes(v4.ip().octets()), v4.port()),
        SocketAddr::V6(_) => panic!("{at}"),
    };
    let ends = format!("{} {} 01", hex(server), hex(client));
    fs::read_to_string("/proc/net/tcp").unwrap().lines().any(|line| line.contains(&ends))
}

/// Returns the memory of a node, in KiB.
fn resident(node: &Node) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn idle_connections_cost_little_and_end() {
    const CONNECTIONS: usize = 10_000;
    process::allow_open_files(CONNECTIONS as u64 + 1000);
    let place = Place::new();
    fs::write(place.pool().join("f"), b"content").unwrap();
    let node = Node::of(&place, &[]);
    assert_eq!(http::get(node.address, "/f", "").unwrap().status, 200);
    let before = resident(&node);
    let idle: Vec<TcpStream> = (0..CONNECTIONS).map(|_| connect(node.address)).collect();
    for _ in 0..20 {
        assert_eq!(http::get(node.address, "/f", "").unwrap().body, "content", "idle clients keep nobody out");
    }
    let cost = resident(&node).saturating_sub(before);
    println!("{CONNECTIONS} idle connections cost {cost} KiB");
    assert!(cost < IDLE_KIB, "{cost} KiB");
    let (first, last) = (&idle[0], &idle[CONNECTIONS - 1]);
    assert!(to_the_end(first).len() + to_the_end(last).len() < 1000);
    drop(idle);
    assert_eq!(http::get(node.address, "/f", "").unwrap().status, 200);
}

/// A client of HTTP/2, which sends what a test wants and answers pings.
struct Http2Client(TcpStream);

impl Http2Client {
    /// Connects. `window`: bytes that the node may send of each response.
    fn connect(address: SocketAddr, window: u32) -> Self {
        let mut client = Self(connect(address));
        client.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        let initial_window = [&[0, 4][..], &window.to_be_bytes()].concat();
        client.send(4, 0, 0, &initial_window).unwrap();
        client
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> std::io::Result<()> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        self.0.write_all(&[&head, payload].concat())
    }

    /// Asks for a path on stream 1.
    fn get(&mut self, path: &str) {
        self.get_on(1, path);
    }

    fn get_on(&mut self, stream: u32, path: &str) {
        // RFC 7541: GET and http from the static table, then a path and an authority as they are.
        let mut head = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
        head.extend(path.bytes());
        head.extend([0x01, 1, b'x']);
        self.send(1, 0x5, stream, &head).unwrap();
    }

    /// Reads frames until `is_last` accepts one: its type, flags, stream and payload.
    fn read_until(&mut self, mut is_last: impl FnMut(u8, u8, u32, &[u8]) -> bool) {
        let mut head = [0; 9];
        loop {
            self.0.read_exact(&mut head).unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            self.0.read_exact(&mut payload).unwrap();
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            if is_last(head[3], head[4], stream, &payload) {
                return;
            }
        }
    }

    /// Answers the node until the connection ends. Returns the bytes of content.
    fn answer_to_the_end(mut self) -> usize {
        let (begun, mut content) = (Instant::now(), 0);
        let mut head = [0; 9];
        while self.0.read_exact(&mut head).is_ok() {
            assert!(begun.elapsed() < LIMIT, "the node keeps a client that takes nothing");
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            if self.0.read_exact(&mut payload).is_err() {
                break;
            }
            let is_answer = head[4] & 1 == 1;
            let answered = match head[3] {
                0 => {
                    content += payload.len();
                    Ok(())
                }
                4 if !is_answer => self.send(4, 1, 0, &[]),
                6 if !is_answer => self.send(6, 1, 0, &payload),
                _ => Ok(()),
            };
            if answered.is_err() {
                break;
            }
        }
        assert!(begun.elapsed() < LIMIT, "the node keeps a client that takes nothing");
        content
    }
}

#[test]
fn http2_clients_that_take_nothing_are_cut_off_and_slow_ones_are_not() {
    // A client that is cut off after 60 s has no more of these.
    const UPDATES: usize = 15;
    let place = Place::new();
    fs::write(place.pool().join("small"), b"content").unwrap();
    fs::write(place.pool().join("large"), content(1, 8 * MIB)).unwrap();
    let node = Node::of(&place, &[]);
    let address = node.address;
    thread::scope(|scope| {
        // No request; then no window, and a window for one byte, of a response that is large or small.
        scope.spawn(move || assert_eq!(Http2Client::connect(address, 65_535).answer_to_the_end(), 0));
        for (path, window) in [("/large", 0), ("/small", 0), ("/large", 1), ("/small", 1)] {
            scope.spawn(move || {
                let mut client = Http2Client::connect(address, window);
                client.get(path);
                assert_eq!(client.answer_to_the_end(), window as usize, "{path} {window}");
            });
        }
        // A client that has all it asked for, and asks for nothing more.
        scope.spawn(move || {
            let mut client = Http2Client::connect(address, 65_535);
            client.get("/small");
            assert_eq!(client.answer_to_the_end(), 7);
        });
        // One that takes a little now and then.
        scope.spawn(move || {
            let mut client = Http2Client::connect(address, 0);
            client.get("/large");
            let mut updates = Http2Client(client.0.try_clone().unwrap());
            let sender = thread::spawn(move || {
                for _ in 0..UPDATES {
                    thread::sleep(Duration::from_secs(5));
                    updates.send(8, 0, 1, &1000_u32.to_be_bytes()).expect("the connection stays");
                }
                thread::sleep(Duration::from_secs(1));
                updates.0.shutdown(std::net::Shutdown::Both).unwrap();
            });
            assert!(client.answer_to_the_end() > 13 * 1000);
            sender.join().unwrap();
        });
    });
    assert_eq!(http::get(address, "/small", "").unwrap().body, "content");
}

#[test]
fn http2_clients_that_take_nothing_cost_little_memory() {
    const CONNECTIONS: u32 = 20;
    // As many as a node allows.
    const RESPONSES: u32 = 100;
    let place = Place::new();
    fs::write(place.pool().join("large"), content(1, 8 * MIB)).unwrap();
    let node = Node::of(&place, &[]);
    assert_eq!(node.get("/large", &[]).body.len(), 8 * MIB);
    let before = resident(&node);
    let mut clients: Vec<Http2Client> = (0..CONNECTIONS)
        .map(|at| {
            // With a window of one byte, the connection asks for more of each response.
            let mut client = Http2Client::connect(node.address, at % 2);
            (0..RESPONSES).for_each(|at| client.get_on(2 * at + 1, "/large"));
            client
        })
        .collect();
    for client in &mut clients {
        let mut heads = 0;
        client.read_until(|kind, _, _, _| {
            heads += u32::from(kind == 1);
            heads == RESPONSES
        });
    }
    let cost = resident(&node).saturating_sub(before);
    println!("{CONNECTIONS} connections with {RESPONSES} responses each cost {cost} KiB");
    assert!(cost < UNTAKEN_KIB, "{cost} KiB");
    // What a client leaves alone does not keep it from the response that it wants.
    for client in clients.iter_mut().take(2) {
        let wanted = 2 * RESPONSES - 1;
        for stream in [0, wanted] {
            client.send(8, 0, stream, &(16_u32 << 20).to_be_bytes()).unwrap();
        }
        let mut got = 0;
        client.read_until(|kind, flags, stream, payload| {
            let is_wanted = kind == 0 && stream == wanted;
            got += if is_wanted { payload.len() } else { 0 };
            is_wanted && flags & 1 == 1
        });
        assert!(got >= 8 * MIB - 1, "{got}");
    }
    assert_eq!(http::get(node.address, "/healthz", "").unwrap().status, 200);
}

/// What a client may send: on the connection, and on each stream.
struct SendWindows {
    connection: usize,
    /// The first window of a stream.
    initial: usize,
    /// Bytes that were sent, and by which the window has grown, for each stream.
    streams: Vec<(usize, usize)>,
}

impl SendWindows {
    /// Takes a frame of the node: settings, or an update of a window.
    fn take(&mut self, kind: u8, stream: u32, payload: &[u8]) {
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap()) as usize;
        match (kind, stream) {
            (4, _) => {
                let initial = payload.chunks(6).find(|setting| setting[..2] == [0, 4]);
                self.initial = initial.map_or(self.initial, |setting| number(&setting[2..]));
            }
            (8, 0) => self.connection += number(payload),
            (8, _) => self.streams[stream as usize / 2].1 += number(payload),
            _ => {}
        }
    }

    /// Returns how much of a body may be sent now, at most a frame.
    fn next(&self, at: usize, body: usize) -> usize {
        let (sent, grown) = self.streams[at];
        (self.initial + grown).saturating_sub(sent).min(self.connection).min(body - sent).min(16 << 10)
    }
}

#[test]
fn uploads_of_one_http2_connection_that_wait_for_a_turn_do_not_stop_the_others() {
    // More than the turns of a client; together more than all windows.
    const UPLOADS: usize = 24;
    const BODY: usize = 512 << 10;
    let url = slow_origin(Duration::ZERO, |_| "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n".to_owned());
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy", "--forward-changes"]);
    let mut client = Http2Client::connect(node.address, 65_535);
    for at in 0..UPLOADS {
        // RFC 7541: POST and http from the static table, then a path and an authority as they are.
        let head = [0x83, 0x86, 0x04, 2, b'/', b'f', 0x01, 1, b'x'];
        client.send(1, 0x4, 2 * at as u32 + 1, &head).unwrap();
    }
    let mut windows = SendWindows { connection: 65_535, initial: 65_535, streams: vec![(0, 0); UPLOADS] };
    let mut statuses = Vec::new();
    while statuses.len() < UPLOADS {
        // A frame of each in turn, as far as the windows allow.
        loop {
            let mut is_sent = false;
            for at in 0..UPLOADS {
                let bytes = windows.next(at, BODY);
                if bytes > 0 {
                    windows.connection -= bytes;
                    windows.streams[at].0 += bytes;
                    let ends = u8::from(windows.streams[at].0 == BODY);
                    client.send(0, ends, 2 * at as u32 + 1, &vec![7; bytes]).unwrap();
                    is_sent = true;
                }
            }
            if !is_sent {
                break;
            }
        }
        let mut acknowledged = None;
        client.read_until(|kind, flags, stream, payload| {
            match kind {
                1 => statuses.push(payload[0]),
                3 | 7 => panic!("stream {stream} ends: {payload:?}"),
                4 | 6 if flags & 1 == 0 => acknowledged = Some((kind, payload.to_vec())),
                _ => {}
            }
            windows.take(kind, stream, payload);
            true
        });
        if let Some((kind, payload)) = acknowledged {
            client.send(kind, 1, 0, if kind == 6 { &payload } else { &[] }).unwrap();
        }
    }
    // 204 in the static table.
    assert_eq!(statuses, [0x89; UPLOADS]);
}
