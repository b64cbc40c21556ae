//! Read-only pools against the suite for them and against faults, with real servers.

mod common;
#[path = "../../tests/src/servers/stores.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod servers;
#[path = "../../tests/src/servers/started.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod started;

use std::fs;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_backends::conformance::reads::{self, Origin};
use forebay_backends::store::{Environment, StorePool};
use forebay_backends::{ErrorKind, FileKind, Pool, PoolPath, Time};
use futures::TryStreamExt;

use common::path;
use servers::{Kind, StoreServer};

struct By(StoreServer);

#[async_trait]
impl Origin for By {
    async fn put(&self, path: &str, content: Bytes) -> Result<(), String> {
        self.0.put(path, content).await
    }

    fn holds(&self, name: &str) -> bool {
        !(name.starts_with('.') && self.0.hides_dots())
    }
}

async fn attach(server: &StoreServer, prefix: &str) -> StorePool {
    StorePool::attach(&server.url(prefix), &server.environment()).await.unwrap()
}

async fn conforms(kind: Kind) {
    let server = StoreServer::start(kind).await;
    let pool = Arc::new(attach(&server, "").await);
    let report = reads::run(pool, Arc::new(By(server))).await;
    assert!(report.passed(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn google_by_fake_gcs_server_conforms() {
    conforms(Kind::FakeGcs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn azure_by_azurite_conforms() {
    conforms(Kind::Azurite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn index_pages_of_nginx_conform() {
    conforms(Kind::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn webdav_of_nginx_conforms() {
    conforms(Kind::NginxDav).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn index_pages_of_python_conform() {
    conforms(Kind::Python).await;
}

async fn names(pool: &StorePool, dir: &str) -> Vec<String> {
    let pages: Vec<_> = pool.list(&path(dir)).await.unwrap().try_collect().await.unwrap();
    let mut names: Vec<_> = pages.concat().into_iter().map(|entry| entry.name.escape_ascii().to_string()).collect();
    names.sort();
    names
}

async fn content(pool: &StorePool, path: &PoolPath) -> Bytes {
    let version = pool.stat(path).await.unwrap().version;
    pool.read(path, &version, 0..u64::MAX).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_below_a_prefix_is_all_that_is_shown() {
    for kind in [Kind::FakeGcs, Kind::Azurite, Kind::Nginx, Kind::NginxDav] {
        let server = StoreServer::start(kind).await;
        for name in ["some/prefix/a/f", "some/prefix-not/g", "h"] {
            server.put(name, Bytes::from_static(b"x")).await.unwrap();
        }
        let pool = attach(&server, "some/prefix").await;
        assert_eq!(names(&pool, "").await, ["a"], "{kind:?}");
        assert_eq!(names(&pool, "a").await, ["f"], "{kind:?}");
        assert_eq!(content(&pool, &path("a/f")).await, "x", "{kind:?}");
        assert!(pool.url().starts_with(server.url("").split(':').next().unwrap()));
    }
}

/// Attributes as S3's clients store them, the same in listings and in `stat`. Owners, set-id bits and devices are not
/// trusted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attributes_are_those_of_the_metadata() {
    for kind in [Kind::FakeGcs, Kind::Azurite] {
        let server = StoreServer::start(kind).await;
        let meta = [("mode", "36256"), ("uid", "7"), ("gid", "8"), ("mtime", "1500000000.25")];
        server.put_with("d/f", Bytes::from_static(b"x"), &meta).await.unwrap();
        server.put_with("d/link", Bytes::from_static(b"f"), &[("mode", "41471")]).await.unwrap();
        let device = [("mode", "8630"), ("rdev", "259")];
        server.put_with("d/device", Bytes::from_static(b"x"), &device).await.unwrap();
        server.put("d/plain", Bytes::from_static(b"x")).await.unwrap();
        let url = format!("{}&uid=5&mode=600&dir-mode=700", server.url(""));
        let pool = StorePool::attach(&url, &server.environment()).await.unwrap();
        let pages: Vec<_> = pool.list(&path("d")).await.unwrap().try_collect().await.unwrap();
        for entry in pages.concat() {
            let stat = pool.stat(&path("d").join(&entry.name)).await.unwrap();
            assert_eq!(entry.stat, stat, "{kind:?}");
            match entry.name.as_slice() {
                b"f" => {
                    assert_eq!((stat.mode, stat.uid), (0o640, 5), "{kind:?}");
                    assert_ne!(stat.gid, 8, "{kind:?}");
                    assert_eq!(stat.mtime, Time { secs: 1_500_000_000, nanos: 250_000_000 }, "{kind:?}");
                }
                b"device" => assert_eq!((stat.kind, stat.rdev, stat.uid), (FileKind::File, 0, 5), "{kind:?}"),
                b"link" => assert_eq!(stat.kind, FileKind::Symlink, "{kind:?}"),
                _ => assert_eq!((stat.mode, stat.uid), (0o600, 5), "{kind:?}"),
            }
        }
        assert_eq!(pool.readlink(&path("d/link")).await.unwrap(), b"f");
        assert_eq!(pool.stat(&path("d")).await.unwrap().mode, 0o700);
    }
}

/// Other programs mark directories of Azure's store by empty objects without a slash.
#[tokio::test]
async fn objects_that_stand_for_directories_are_directories() {
    let server = StoreServer::start(Kind::Azurite).await;
    for name in ["dir", "hollow"] {
        server.put_with(name, Bytes::new(), &[("hdi_isfolder", "true")]).await.unwrap();
    }
    server.put("dir/f", Bytes::from_static(b"x")).await.unwrap();
    let pool = attach(&server, "").await;
    assert_eq!(names(&pool, "").await, ["dir", "hollow"]);
    for (dir, wanted) in [("dir", &["f"][..]), ("hollow", &[])] {
        assert_eq!(pool.stat(&path(dir)).await.unwrap().kind, FileKind::Directory);
        assert_eq!(names(&pool, dir).await, wanted);
    }
}

/// A key that cannot be a name is shown as on S3.
#[tokio::test]
async fn keys_that_are_no_paths_are_shown_escaped() {
    for kind in [Kind::FakeGcs, Kind::Azurite] {
        let server = StoreServer::start(kind).await;
        for key in ["both", "both/below"] {
            server.put(key, Bytes::from(key)).await.unwrap();
        }
        let pool = attach(&server, "").await;
        assert_eq!(names(&pool, "").await, ["both", "both.%key"], "{kind:?}");
        assert_eq!(content(&pool, &path("both.%key")).await, "both", "{kind:?}");
        assert_eq!(content(&pool, &path("both/below")).await, "both/below", "{kind:?}");
    }
}

#[tokio::test]
async fn a_server_that_lists_no_names_gives_files_by_their_paths() {
    let server = StoreServer::start(Kind::NginxBare).await;
    server.put("a/f", Bytes::from_static(b"by path")).await.unwrap();
    let pool = attach(&server, "").await;
    assert!(!pool.capabilities().listings.exist());
    assert_eq!(content(&pool, &path("a/f")).await, "by path");
    assert_eq!(pool.stat(&path("a")).await.unwrap().kind, FileKind::Directory);
    for dir in ["", "a"] {
        let Err(error) = pool.list(&path(dir)).await else { panic!("it was listed") };
        assert!(error.is(ErrorKind::Unsupported), "{error}");
        assert!(error.to_string().contains("names no files here"), "{error}");
    }
}

/// Names that are not UTF-8 are valid names of files.
#[tokio::test]
async fn web_servers_have_names_of_any_bytes() {
    use std::os::unix::ffi::OsStrExt;
    for kind in [Kind::Nginx, Kind::NginxDav] {
        let server = StoreServer::start(kind).await;
        let name = b"\xff\xfe and more";
        fs::write(server.files().join(std::ffi::OsStr::from_bytes(name)), "bytes").unwrap();
        let pool = attach(&server, "").await;
        assert_eq!(content(&pool, &PoolPath::root().join(name)).await, "bytes", "{kind:?}");
        if kind == Kind::Nginx {
            assert_eq!(names(&pool, "").await, [name.escape_ascii().to_string()], "{kind:?}");
        }
    }
}

/// Only links to children of the directory are its names.
#[tokio::test]
async fn other_links_of_a_page_are_no_names() {
    let server = StoreServer::start(Kind::Nginx).await;
    for name in ["d/f", "d/sub/deep", "other"] {
        server.put(name, Bytes::from_static(b"x")).await.unwrap();
    }
    let page = r##"<!doctype html><title>A page</title><a href="f">f</a> <a href='f'>again</a> <a href="?C=N;O=D">sort</a>
        <a href="../other">up</a> <a href="/other">root</a> <a href="http://127.0.0.1:1/d/g">far</a> <a href="sub/deep">deep</a>
        <a href="sub/">sub</a> <a href="missing">missing</a> <a href="#here">here</a> <a href="..%2Fother">slash</a>
        <a href="mailto:a@b">mail</a> <a name="x">none</a> <!-- <a href="other">comment</a> -->"##;
    fs::write(server.files().join("d/index.html"), page).unwrap();
    assert_eq!(names(&attach(&server, "").await, "d").await, ["f", "sub"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_attached_says_why() {
    let mut server = StoreServer::start(Kind::Azurite).await;
    let attach =
        async |url: &str, environment: &Environment| StorePool::attach(url, environment).await.map(drop).unwrap_err();
    let environment = server.environment();
    let url = server.url("").replace("az://pool/", "az://nowhere/");
    let error = attach(&url, &environment).await;
    assert!(error.is(ErrorKind::NotFound) && error.to_string().contains("no such container"), "{error}");
    let mut wrong = environment.clone();
    wrong.insert("AZURE_STORAGE_ACCOUNT_KEY".into(), "d3JvbmctYW5kLXNlY3JldA==".into());
    let error = attach(&server.url(""), &wrong).await;
    assert!(error.is(ErrorKind::PermissionDenied), "{error}");
    let text = error.to_string();
    assert!(text.contains("AZURE_STORAGE_ACCOUNT_NAME") && !text.contains("d3Jvbmct"), "{text}");
    // The cloud's credential service does not exist: a closed port stands for it.
    let none = Environment::from([
        ("AZURE_STORAGE_ACCOUNT_NAME".to_owned(), "forebay".to_owned()),
        ("AZURE_MSI_ENDPOINT".to_owned(), "http://127.0.0.1:1/token".to_owned()),
    ]);
    let error = attach(&server.url(""), &none).await;
    assert!(error.is(ErrorKind::PermissionDenied), "{error}");
    assert!(error.to_string().contains("AZURE_STORAGE_SAS_TOKEN"), "{error}");
    server.kill();
    let error = attach(&server.url(""), &environment).await;
    assert!(error.is(ErrorKind::Unavailable), "{error}");
}

#[test]
fn what_is_wrong_with_a_url_is_said() {
    let nobody = Environment::new();
    let error = |url: &str| forebay_backends::store::check(url, &nobody).unwrap_err().to_string();
    for url in ["gs://key:secret@bucket", "az://key:secret@box", "https://key:secret@host/a"] {
        let said = error(url);
        assert!(said.contains("do not belong") && !said.contains("secret@"), "{said}");
    }
    let said = error("gs://b?anonymous=true&endpoint=http://key:secret@127.0.0.1:1");
    assert!(said.contains("do not belong") && !said.contains("secret"), "{said}");
    for url in ["gs://b?colour=red", "az://b?account=a&colour=red", "http://h/a?colour=red"] {
        assert!(error(url).contains("unknown option colour"), "{url}");
    }
    assert!(error("az://box?anonymous=true").contains("AZURE_STORAGE_ACCOUNT_NAME"));
    assert!(error("gs:///prefix").contains("gs://BUCKET"));
    assert!(error("gs://b?endpoint=example.org").contains("lacks http"));
    assert!(error("https://h/?ca=/no/such.pem").contains("/no/such.pem"));
    assert!(error("http://h/?mode=999").contains("mode"));
}
