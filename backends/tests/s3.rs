//! S3 pools against the suite and against faults, with real servers.

mod common;
#[path = "../../tests/src/servers/s3.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod server;
#[path = "../../tests/src/servers/started.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod started;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_backends::s3::S3Pool;
use forebay_backends::{
    Attrs, ConditionalPut, ErrorKind, Expected, FileKind, Pool, PoolPath, RESERVED_PREFIX, RenameMode, SetAttrs,
    Version,
};
use futures::TryStreamExt;

use common::{attrs, path, pieces};
use server::{Rgw, Versitygw};

async fn attach(server: &Versitygw, prefix: &str) -> S3Pool {
    S3Pool::attach(&server.url(prefix), &server::environment()).await.unwrap()
}

async fn put(pool: &S3Pool, name: &str, data: &'static str) -> Version {
    let put = pool.put(&path(name), data.len() as u64, pieces(&[(0, data)]), &attrs(), &Expected::Anything).await;
    put.unwrap().version
}

async fn content(pool: &S3Pool, path: &PoolPath) -> String {
    let version = pool.stat(path).await.unwrap().version;
    String::from_utf8(pool.read(path, &version, 0..u64::MAX).await.unwrap().to_vec()).unwrap()
}

async fn names(pool: &S3Pool, dir: &str) -> Vec<String> {
    let pages: Vec<_> = pool.list(&path(dir)).await.unwrap().try_collect().await.unwrap();
    let mut names: Vec<_> = pages.concat().into_iter().map(|entry| entry.name.escape_ascii().to_string()).collect();
    names.sort();
    names
}

/// Returns the names in the bucket, without the server's own files.
fn left(server: &Versitygw) -> Vec<String> {
    let names = fs::read_dir(server.files()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != ".sgwtmp").collect()
}

fn directory() -> Attrs {
    Attrs { mode: 0o755, ..attrs() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_pool_on_versitygw_conforms() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    assert_eq!(pool.capabilities().conditional_put, ConditionalPut::Atomic);
    common::assert_conforms(Arc::new(pool)).await;
    assert_eq!(left(&server), [""; 0], "something was left in the bucket");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_pool_below_a_prefix_conforms() {
    let server = Versitygw::start();
    common::assert_conforms_in_part(Arc::new(attach(&server, "some/prefix").await)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_pool_on_ceph_conforms() {
    let server = Rgw::start();
    let pool = S3Pool::attach(&server.url(""), &server::environment()).await.unwrap();
    // Ceph's gateway honours no condition on uploads in parts.
    assert_eq!(pool.capabilities().conditional_put, ConditionalPut::Checked);
    common::assert_conforms_in_part(Arc::new(pool)).await;
}

/// After a kill, a server may list the prefix of a directory that has no key.
#[tokio::test]
async fn a_directory_that_is_only_listed_is_not_there() {
    let server = Versitygw::start();
    server.curl(&["-X", "PUT", "-d", "theirs"], "implied/file");
    fs::create_dir(server.files().join("half-made")).unwrap();
    let listed = server.curl(&[], "?delimiter=%2F&list-type=2");
    assert!(listed.contains("<Prefix>half-made/</Prefix>"), "the server does not do this any more: {listed}");
    let pool = attach(&server, "").await;
    assert_eq!(names(&pool, "").await, ["implied"]);
    assert!(pool.stat(&path("half-made")).await.unwrap_err().is(ErrorKind::NotFound));
    pool.mkdir(&path("half-made"), &directory()).await.unwrap();
    assert_eq!(names(&pool, "").await, ["half-made", "implied"]);
}

const VERSIONED: &str = "<VersioningConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
                         <Status>Enabled</Status></VersioningConfiguration>";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s3_pool_on_a_versioned_bucket_of_ceph_conforms() {
    let server = Rgw::start();
    server.curl(&["-X", "PUT", "-d", VERSIONED], "?versioning=");
    let pool = S3Pool::attach(&server.url(""), &server::environment()).await.unwrap();
    common::assert_conforms_in_part(Arc::new(pool)).await;
}

#[tokio::test]
async fn the_version_id_tells_versions_apart() {
    let server = Versitygw::start();
    server.curl(&["-X", "PUT", "-d", "the same"], "before");
    server.curl(&["-X", "PUT", "-d", VERSIONED], "?versioning=");
    let pool = attach(&server, "").await;
    let id = |version: &Version| match version {
        Version::Tag { id, .. } => id.clone(),
        Version::Inode { .. } => unreachable!(),
    };
    assert_eq!(id(&pool.stat(&path("before")).await.unwrap().version), "");
    // Another client writes the same content, within one second of the server's clock.
    let mut seen = Vec::new();
    for _ in 0..5 {
        server.curl(&["-X", "PUT", "-d", "the same"], "a");
        let version = pool.stat(&path("a")).await.unwrap().version;
        assert!(!id(&version).is_empty() && !seen.contains(&version), "{version:?} {seen:?}");
        for old in &seen {
            let read = pool.read(&path("a"), old, 0..4).await;
            assert_eq!(read.unwrap_err().kind(), ErrorKind::Stale);
        }
        seen.push(version);
    }
    // For a reader with the file open, a rename or a change of attributes keeps the content the same.
    let version = pool.stat(&path("a")).await.unwrap().version;
    let changes = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
    assert!(pool.set_attrs(&path("a"), &changes).await.unwrap().version.same_content(&version));
    let renamed = pool.rename(&path("a"), &path("b"), RenameMode::NoReplace).await.unwrap().version;
    assert!(renamed.same_content(&version));
    assert_eq!(pool.read(&path("b"), &version, 0..8).await.unwrap(), "the same");
    // An overwritten version is gone for the pool, but the server keeps it.
    put(&pool, "b", "another").await;
    assert!(!pool.stat(&path("b")).await.unwrap().version.same_content(&version));
    pool.remove(&path("b"), &Expected::Anything).await.unwrap();
    assert_eq!(pool.stat(&path("b")).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(names(&pool, "").await, ["before"]);
    assert!(server.curl(&[], "?prefix=b&versions=").contains("DeleteMarker"));
}

#[tokio::test]
async fn directories_that_only_keys_imply_are_there_and_stay() {
    let server = Versitygw::start();
    let dir = server.files().join("a/b");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("f"), "by others").unwrap();
    let pool = attach(&server, "").await;
    assert_eq!(pool.stat(&path("a")).await.unwrap().kind, FileKind::Directory);
    assert_eq!(names(&pool, "a/b").await, ["f"]);
    let stat = pool.stat(&path("a/b/f")).await.unwrap();
    assert_eq!((stat.kind, stat.mode, stat.size), (FileKind::File, 0o644, 9));
    assert_eq!(content(&pool, &path("a/b/f")).await, "by others");
    pool.remove(&path("a/b/f"), &Expected::Anything).await.unwrap();
    assert_eq!(pool.stat(&path("a/b")).await.unwrap().kind, FileKind::Directory);
    assert!(names(&pool, "a/b").await.is_empty());
}

#[tokio::test]
async fn a_bucket_has_attributes_too() {
    let server = Versitygw::start();
    for prefix in ["", "some/prefix"] {
        let pool = attach(&server, prefix).await;
        let changes = SetAttrs { mode: Some(0o700), uid: Some(7), ..SetAttrs::default() };
        let changed = pool.set_attrs(&PoolPath::root(), &changes).await.unwrap();
        assert_eq!((changed.kind, changed.mode, changed.uid), (FileKind::Directory, 0o700, 7));
        assert_eq!(pool.stat(&PoolPath::root()).await.unwrap(), changed);
    }
    assert_eq!(names(&attach(&server, "").await, "").await, ["some"]);
}

#[tokio::test]
async fn changes_behind_the_servers_back_are_seen() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    let version = put(&pool, "f", "before").await;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    // The server still reports the old ETag.
    fs::write(server.files().join("f"), "behind").unwrap();
    let now = pool.stat(&path("f")).await.unwrap().version;
    assert!(!now.same_content(&version), "{now:?}");
    assert!(pool.read(&path("f"), &version, 0..6).await.unwrap_err().is(ErrorKind::Stale));
    assert_eq!(content(&pool, &path("f")).await, "behind");
}

/// A file that was put into the server's directory has no ETag.
#[tokio::test]
async fn an_object_without_an_etag_leaves_no_copy_at_its_old_name() {
    let server = Versitygw::start();
    fs::write(server.files().join("old"), "content").unwrap();
    let pool = attach(&server, "").await;
    let (old, new) = (path("old"), path("new"));
    pool.rename(&old, &new, RenameMode::NoReplace).await.unwrap();
    assert_eq!(content(&pool, &new).await, "content");
    assert_eq!(names(&pool, "").await, ["new"]);
}

#[tokio::test]
async fn an_object_of_another_client_keeps_its_metadata() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    put(&pool, "f", "content").await;
    server.curl(&["-X", "PUT", "-H", "x-amz-meta-colour: red", "-H", "content-type: text/x-test", "-d", "other"], "f");
    let before = pool.stat(&path("f")).await.unwrap();
    assert_eq!(before.size, 5);
    let changes = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
    let after = pool.set_attrs(&path("f"), &changes).await.unwrap();
    assert_eq!((after.mode, after.size), (0o600, 5));
    assert_ne!(before.version, after.version);
    assert!(before.version.same_content(&after.version));
    let headers = server.curl(&["-I"], "f").to_ascii_lowercase();
    for wanted in ["x-amz-meta-colour: red", "content-type: text/x-test", "x-amz-meta-mode: 33152"] {
        assert!(headers.contains(wanted), "{wanted} is missing in {headers}");
    }
}

/// Writes a note of a dead process that `from` is to be renamed to `to`. Returns the note's path.
async fn note_a_rename(server: &Versitygw) -> PathBuf {
    // The server's clock ticks in seconds.
    let tick = || tokio::time::sleep(std::time::Duration::from_millis(1_100));
    tick().await;
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let note = format!(
        r#"{{"from":"from/","to":"to/","directory":true,"absent":false,"write":null,"node":"{node}","pid":0,"since_secs":{}}}"#,
        std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
    );
    let name = format!("{}rename-1", std::str::from_utf8(RESERVED_PREFIX).unwrap());
    server.curl(&["-X", "PUT", "-d", &note], &name);
    tick().await;
    server.files().join(name)
}

/// Waits until the rename is finished: on a busy machine that happens in the background, after the attach.
async fn wait_for_its_end(note: &Path) {
    let since = std::time::Instant::now();
    while note.exists() {
        assert!(since.elapsed() < std::time::Duration::from_secs(60), "the note is still there");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_rename_that_was_cut_off_is_finished() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    for dir in ["from", "from/sub", "to", "to/sub"] {
        pool.mkdir(&path(dir), &directory()).await.unwrap();
    }
    // The state after an interrupted rename: one file was moved, one was copied, and one was not touched yet.
    put(&pool, "to/moved", "moved").await;
    put(&pool, "from/copied", "copied").await;
    put(&pool, "from/other", "ours").await;
    put(&pool, "from/sub/waiting", "waiting").await;
    let note = note_a_rename(&server).await;
    server.curl(&["-X", "PUT", "-H", "x-amz-copy-source: pool/from/copied"], "to/copied");
    // An object that was written to the target meanwhile is no copy of the source.
    put(&pool, "to/other", "theirs").await;
    // Another client's new file is not part of the rename.
    put(&pool, "from/new", "new").await;

    let pool = attach(&server, "").await;
    wait_for_its_end(&note).await;
    assert_eq!(names(&pool, "to").await, ["copied", "moved", "other", "sub"]);
    assert_eq!(content(&pool, &path("to/other")).await, "theirs");
    assert_eq!(content(&pool, &path("from/other")).await, "ours");
    assert_eq!(names(&pool, "to/sub").await, ["waiting"]);
    assert_eq!(content(&pool, &path("to/sub/waiting")).await, "waiting");
    assert_eq!(names(&pool, "from").await, ["new", "other"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rename_that_was_cut_off_before_it_began_leaves_nothing_at_its_source() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    for dir in ["from", "from/sub", "from/sub/empty"] {
        pool.mkdir(&path(dir), &directory()).await.unwrap();
    }
    put(&pool, "from/file", "file").await;
    put(&pool, "from/sub/below", "below").await;
    let note = note_a_rename(&server).await;
    let pool = attach(&server, "").await;
    wait_for_its_end(&note).await;
    assert_eq!(left(&server), ["to"], "directories change when they are emptied, and are ours all the same");
    assert_eq!(names(&pool, "to").await, ["file", "sub"]);
    assert_eq!(names(&pool, "to/sub").await, ["below", "empty"]);
    assert_eq!(content(&pool, &path("to/sub/below")).await, "below");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_in_the_middle_loses_nothing_that_was_answered() {
    let mut server = Versitygw::start();
    let pool = Arc::new(attach(&server, "").await);
    let writer = {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move {
            let mut put = 0;
            for n in 0..200 {
                let data: &'static str = "x".repeat(1 + n % 9_000).leak();
                let answer = pool
                    .put(&path(&format!("f{n}")), data.len() as u64, pieces(&[(0, data)]), &attrs(), &Expected::Absent)
                    .await;
                answer.unwrap();
                put += 1;
            }
            put
        })
    };
    for _ in 0..4 {
        tokio::time::sleep(std::time::Duration::from_millis(150)).await;
        tokio::task::block_in_place(|| {
            server.kill();
            server.resume();
        });
    }
    assert_eq!(writer.await.unwrap(), 200);
    for n in 0..200 {
        assert_eq!(content(&pool, &path(&format!("f{n}"))).await.len(), 1 + n % 9_000);
    }
}

#[tokio::test]
async fn what_cannot_be_attached_says_why() {
    let server = Versitygw::start();
    let url = server.url("").replace("/pool/", "/nowhere/");
    let error = S3Pool::attach(&url, &server::environment()).await.unwrap_err();
    assert!(error.is(ErrorKind::NotFound) && error.to_string().contains("no such bucket"), "{error}");
    let mut environment = server::environment();
    environment.insert("AWS_SECRET_ACCESS_KEY".into(), "wrong-and-secret".into());
    let error = S3Pool::attach(&server.url(""), &environment).await.unwrap_err();
    assert!(error.is(ErrorKind::PermissionDenied), "{error}");
    assert!(error.to_string().contains("AWS_SECRET_ACCESS_KEY") && !error.to_string().contains("wrong-and"), "{error}");
}

/// Without its bucket, the server answers 404 to each request, as for a key that was removed.
#[tokio::test]
async fn files_of_a_bucket_that_is_missing_are_not_removed() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    let version = put(&pool, "f", "content").await;
    let away = server.files().with_file_name("away");
    fs::rename(server.files(), &away).unwrap();
    let mut errors = Vec::new();
    for name in ["f", "nothing", ""] {
        errors.push(pool.stat(&path(name)).await.map(drop));
    }
    errors.push(pool.list(&PoolPath::root()).await.map(drop));
    errors.push(pool.read(&path("f"), &version, 0..1).await.map(drop));
    errors.push(pool.remove(&path("f"), &Expected::Anything).await);
    errors.push(pool.rename(&path("f"), &path("g"), RenameMode::Replace).await.map(drop));
    for (n, answer) in errors.into_iter().enumerate() {
        let error = answer.unwrap_err();
        assert!(error.is(ErrorKind::Unavailable), "call {n}: {error}");
    }
    fs::rename(&away, server.files()).unwrap();
    assert_eq!(content(&pool, &path("f")).await, "content");
}

#[tokio::test]
async fn an_unreadable_rename_note_does_not_stop_the_pool() {
    let server = Versitygw::start();
    let name = format!("{}rename-1", std::str::from_utf8(RESERVED_PREFIX).unwrap());
    server.curl(&["-X", "PUT", "-d", "no note"], &name);
    let pool = attach(&server, "").await;
    put(&pool, "f", "x").await;
    assert_eq!(names(&pool, "").await, ["f"]);
    assert!(server.files().join(&name).exists(), "it may belong to another client");
}

/// A client that may write only below the prefix of a pool can write a note, too.
#[tokio::test]
async fn a_note_moves_nothing_from_outside_of_the_pool() {
    let server = Versitygw::start();
    server.curl(&["-X", "PUT", "-d", "secret"], "outside/file");
    let note = r#"{"from":"outside/","to":"root/got/","directory":true,"absent":false,"write":null,"node":"n","pid":0,"since_secs":0}"#;
    let name = format!("root/{}rename-1", std::str::from_utf8(RESERVED_PREFIX).unwrap());
    server.curl(&["-X", "PUT", "-d", note], &name);
    let pool = attach(&server, "root").await;
    assert_eq!(names(&pool, "").await, [""; 0]);
    assert!(server.files().join("outside/file").exists());
}

#[tokio::test]
async fn a_rename_that_would_make_a_key_too_long_moves_nothing() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    let mut deep = String::from("a");
    for _ in 0..4 {
        pool.mkdir(&path(&deep), &directory()).await.unwrap();
        deep = format!("{deep}/{}", "d".repeat(230));
    }
    put(&pool, &deep, "content").await;
    let long = "b".repeat(200);
    let error = pool.rename(&path("a"), &path(&long), RenameMode::NoReplace).await.unwrap_err();
    assert!(error.is(ErrorKind::NameTooLong), "{error}");
    assert_eq!(left(&server), ["a"], "neither a copy nor a note was made");
    assert_eq!(content(&pool, &path(&deep)).await, "content");
}

/// An upload in parts has another ETag than a copy of it.
#[tokio::test]
async fn large_objects_stay_the_same_when_they_are_copied() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    let data: &'static str = "0123456789abcdef".repeat(600 << 10).leak();
    let version = put(&pool, "a", data).await;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    let moved = pool.rename(&path("a"), &path("b"), RenameMode::Replace).await.unwrap();
    assert_eq!(moved.version, version);
    let mode = SetAttrs { mode: Some(0o600), ..SetAttrs::default() };
    let changed = pool.set_attrs(&path("b"), &mode).await.unwrap().version;
    assert!(changed != version && changed.same_content(&version) && changed.same_object(&version));
    let read = pool.read(&path("b"), &version, 0..100).await.unwrap();
    assert_eq!(read, &data.as_bytes()[..100]);
    let wanted = Expected::Version(version.clone());
    pool.put(&path("b"), 3, pieces(&[(0, "new")]), &attrs(), &wanted).await.unwrap();
    assert!(pool.read(&path("b"), &version, 0..100).await.unwrap_err().is(ErrorKind::Stale));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_rename_tells_how_far_it_is() {
    const OBJECTS: u64 = 300;
    let server = Versitygw::start();
    let pool = Arc::new(attach(&server, "root").await);
    pool.mkdir(&path("large"), &directory()).await.unwrap();
    for n in 0..OBJECTS {
        put(&pool, &format!("large/{n}"), "x").await;
    }
    assert_eq!(pool.under_way(), []);
    let moving = tokio::spawn({
        let pool = Arc::clone(&pool);
        async move { pool.rename(&path("large"), &path("moved"), RenameMode::Replace).await }
    });
    let mut seen = Vec::new();
    while !moving.is_finished() {
        seen.extend(pool.under_way());
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    moving.await.unwrap().unwrap();
    assert_eq!(pool.under_way(), []);
    let of = |half: &str| {
        let what = format!("rename of large/ to moved/, objects {half}");
        let half: Vec<_> = seen.iter().filter(|work| work.what == what).collect();
        assert!(half.is_sorted_by_key(|work| work.done), "{half:?}");
        (half.first().map(|work| work.done), half.last().map(|work| work.done), half.last().and_then(|work| work.of))
    };
    let ((first, last, all), removals) = (of("copied"), of("removed at the source"));
    assert!(first.unwrap() < 100 && last.unwrap() > 200 && all.is_none(), "{first:?} to {last:?}");
    // Including the directory itself.
    assert_eq!(removals.2, Some(OBJECTS + 1));
    assert!(removals.0.unwrap() < 100 && removals.1.unwrap() > 200, "{removals:?}");
}

#[tokio::test]
async fn renames_replace_and_do_not_replace() {
    let server = Versitygw::start();
    let pool = attach(&server, "").await;
    let version = put(&pool, "a", "one").await;
    let moved = pool.rename(&path("a"), &path("b"), RenameMode::NoReplace).await.unwrap();
    assert_eq!(moved.version, version, "a rename changes neither content nor attributes");
    assert_eq!(left(&server), ["b"]);
    // A rename of the parent directory changes nothing either, nor does it change other clients' objects.
    pool.mkdir(&path("d"), &directory()).await.unwrap();
    let version = put(&pool, "d/ours", "ours").await;
    server.curl(&["-X", "PUT", "-d", "theirs"], "d/theirs");
    let theirs = pool.stat(&path("d/theirs")).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    for (from, to) in [("d", "e"), ("e", "g")] {
        pool.rename(&path(from), &path(to), RenameMode::Replace).await.unwrap();
    }
    assert_eq!(pool.stat(&path("g/ours")).await.unwrap().version, version);
    assert_eq!(pool.stat(&path("g/theirs")).await.unwrap(), theirs);
    // But a later change without the server makes another version.
    let file = fs::File::options().write(true).open(server.files().join("g/ours")).unwrap();
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(1_000)).unwrap();
    assert!(!pool.stat(&path("g/ours")).await.unwrap().version.same_content(&version));
}
