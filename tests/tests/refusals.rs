//! What the engine makes of a pool that refuses single paths, or whose answers cannot be.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_backends::store::{Environment, StorePool};
use forebay_backends::{ErrorKind, Pool, PoolPath};
use forebay_engine::{Options, Overlay};
use forebay_tests::engine::*;

const FILE: &str = "200 OK\r\nETag: \"e\"\r\nLast-Modified: Wed, 01 Jan 2020 00:00:00 GMT";
const HTML: &str = "200 OK\r\nContent-Type: text/html";

/// Answers each request by its first line with a head and a body.
fn serve(answer: impl Fn(&str) -> (&'static str, String) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let answer = answer.clone();
            // The client may end the connection at any time.
            std::thread::spawn(move || _ = reply(client, &*answer));
        }
    });
    url
}

fn reply(mut client: TcpStream, answer: &dyn Fn(&str) -> (&'static str, String)) -> std::io::Result<()> {
    let (mut request, mut buffer) = (Vec::new(), [0; 4096]);
    let is_whole = |request: &[u8]| {
        let text = String::from_utf8_lossy(request).to_ascii_lowercase();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        body.len() >= length.unwrap_or(0_usize)
    };
    while !is_whole(&request) {
        match client.read(&mut buffer)? {
            0 => return Ok(()),
            length => request.extend_from_slice(&buffer[..length]),
        }
    }
    let text = String::from_utf8_lossy(&request);
    let line = text.lines().next().unwrap_or_default();
    let (head, body) = answer(line);
    let length = body.len();
    let body = if line.starts_with("HEAD") { "" } else { &body };
    let answer = format!("HTTP/1.1 {head}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
    client.write_all(answer.as_bytes())
}

async fn over(fixture: &Fixture, url: &str) -> Overlay {
    let pool = StorePool::attach(url, &Environment::default()).await.unwrap();
    Overlay::open(Options { pool: Arc::new(pool), read_only: true, ..fixture.options() }).await.unwrap()
}

/// Reads and lists a directory with the files `good` and `shut`, of which the server refuses `shut` after a while.
async fn a_refused_name_stays(url: &str, is_shut: &AtomicBool) {
    let fixture = Fixture::new();
    let overlay = over(&fixture, url).await;
    let (staged, failed) = stage(&overlay, "d").await;
    assert_eq!((staged.bytes, failed), (6, Vec::new()));
    is_shut.store(true, Ordering::SeqCst);
    let dir = find(&overlay, "d").await;
    for _ in 0..2 {
        let listed = overlay.read_dir(dir).await.unwrap();
        let mut names: Vec<_> = listed.entries.iter().map(|entry| entry.name.escape_ascii().to_string()).collect();
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        assert_eq!(names, ["good", "shut"]);
    }
    is_shut.store(false, Ordering::SeqCst);
    let shut = overlay.list_residency(&PoolPath::parse("d/shut").unwrap(), false).await.unwrap();
    assert_eq!((shut[0].resident_bytes, shut[0].lease_owner.as_deref()), (3, Some("job")));
    assert_eq!(read(&overlay, "d/shut").await.unwrap(), "abc");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_on_an_index_page_that_the_server_refuses_stays_and_hides_no_other() {
    static IS_SHUT: AtomicBool = AtomicBool::new(false);
    let url = serve(|line| {
        let page = |dir: &str, links: &str| format!("<html><head><title>Index of {dir}</title></head>{links}</html>");
        match line.split(' ').collect::<Vec<_>>()[..] {
            [_, "/", _] => (HTML, page("/", "<a href=\"d/\">d</a>")),
            ["HEAD", "/d", _] => ("301 Moved Permanently\r\nLocation: /d/", String::new()),
            ["GET", "/d/", _] => (HTML, page("/d/", "<a href=\"good\">good</a><a href=\"shut\">shut</a>")),
            [_, "/d/shut", _] if IS_SHUT.load(Ordering::SeqCst) => ("403 Forbidden", String::new()),
            ["HEAD" | "GET", "/d/good" | "/d/shut", _] => (FILE, "abc".to_owned()),
            ["PROPFIND", ..] => ("405 Method Not Allowed", String::new()),
            _ => ("404 Not Found", String::new()),
        }
    });
    a_refused_name_stays(&url, &IS_SHUT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_webdav_lists_and_the_server_refuses_stays() {
    static IS_SHUT: AtomicBool = AtomicBool::new(false);
    let url = serve(|line| {
        let resource = |href: &str, kind: &str| {
            format!(
                "<d:response><d:href>{href}</d:href><d:propstat><d:prop><d:resourcetype>{kind}</d:resourcetype></d:prop>\
                 </d:propstat></d:response>"
            )
        };
        let told = |resources: &str| {
            let text = format!("<?xml version=\"1.0\"?><d:multistatus xmlns:d=\"DAV:\">{resources}</d:multistatus>");
            ("207 Multi-Status\r\nContent-Type: application/xml", text)
        };
        let dir = |href: &str| resource(href, "<d:collection/>");
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["PROPFIND", "/", _] => told(&(dir("/") + &dir("/d/"))),
            ["PROPFIND", "/d", _] => told(&dir("/d/")),
            ["PROPFIND", "/d/", _] => told(&(dir("/d/") + &resource("/d/good", "") + &resource("/d/shut", ""))),
            ["PROPFIND", "/d/good" | "/d/shut", _] => told(&resource("/d/f", "")),
            ["HEAD" | "GET", "/d/shut", _] if IS_SHUT.load(Ordering::SeqCst) => ("403 Forbidden", String::new()),
            ["HEAD" | "GET", "/d/good" | "/d/shut", _] => (FILE, "abc".to_owned()),
            _ => ("404 Not Found", String::new()),
        }
    });
    a_refused_name_stays(&url, &IS_SHUT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_the_target_of_a_symlink_is_an_error() {
    let fixture = Fixture::new();
    for (name, target) in [("long", vec![b'x'; 4096]), ("nul", b"a\0b".to_vec()), ("good", vec![b'x'; 4095])] {
        fixture.memory.symlink(&pool_path(name), &target, &attrs(0o777)).await.unwrap();
    }
    let overlay = fixture.open().await;
    for name in ["long", "nul"] {
        let error = refused(overlay.readlink(find(&overlay, name).await).await);
        assert!(error.is(ErrorKind::Corrupt), "{name}: {error}");
    }
    assert_eq!(overlay.readlink(find(&overlay, "good").await).await.unwrap().len(), 4095);
}
