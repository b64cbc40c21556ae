//! The NFS pool against a real nfs-ganesha: the suite, and what goes wrong with servers and connections.

mod common;
#[path = "../../tests/src/servers/nfs.rs"]
mod server;
#[path = "nfs/unreliable.rs"]
mod unreliable;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_backends::nfs::NfsPool;
use forebay_backends::{
    Attrs, ErrorKind, Expected, FileKind, Piece, Pool, PoolPath, RenameMode, Result, Retry, SetAttrs, Stat, Version,
    conformance,
};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::timeout;

use common::{attrs, path, pieces};
use server::{NfsServer, Squash};
use unreliable::{Loss, Unreliable, procedure};

/// What no single step may take longer than: servers restart in a second or two.
const LIMIT: Duration = Duration::from_secs(60);

fn start(squash: Squash) -> NfsServer {
    NfsServer::start(Path::new(env!("CARGO_TARGET_TMPDIR")), squash)
}

async fn open(server: &NfsServer) -> NfsPool {
    NfsPool::open(&server.url()).await.unwrap()
}

async fn put(pool: &NfsPool, name: &str, data: &'static str, expected: &Expected) -> Result<Stat> {
    pool.put(&path(name), data.len() as u64, pieces(&[(0, data)]), &attrs(), expected).await
}

async fn content(pool: &NfsPool, name: &str) -> Bytes {
    let version = pool.stat(&path(name)).await.unwrap().version;
    pool.read(&path(name), &version, 0..u64::MAX).await.unwrap()
}

/// The pool's own unfinished files in a directory of the export.
fn unfinished(dir: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.file_name().unwrap().as_encoded_bytes().starts_with(b".forebay~")).collect()
}

/// Bytes that differ from place to place.
fn pattern(length: usize) -> Bytes {
    let word = |n: usize| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..length.div_ceil(8)).flat_map(word).take(length).collect()
}

/// Ganesha leaves the times of symlinks as they are, whoever asks. The protocol has nothing else that would set them, so
/// these two cases end where they come to a symlink; other kinds of objects come before it.
const TIMES_OF_SYMLINKS: [(&str, &str); 2] = [
    ("new_objects_have_the_attributes_they_are_given", "symlink: mtime is "),
    ("times_are_set_to_the_nanosecond", "atime of link: "),
];

async fn assert_conforms(pool: NfsPool) {
    let (pool, scratch): (Arc<dyn Pool>, _) = (Arc::new(pool), path("scratch"));
    pool.mkdir(&scratch, &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
    let mut report = conformance::run(Arc::clone(&pool), scratch.clone()).await;
    for result in &mut report.results {
        result.failure = result.failure.take().filter(|failure| {
            !TIMES_OF_SYMLINKS.iter().any(|(case, why)| result.name == *case && failure.starts_with(why))
        });
    }
    assert!(report.passed(), "{report}");
    // Every case has cleaned up, the pool's own temporary files among it.
    pool.remove_dir(&scratch).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nfs_pool_conforms() {
    let server = start(Squash::None);
    let pool = open(&server).await;
    let can = pool.capabilities().clone();
    assert!(can.owners && can.special_files && can.hard_links && can.symlinks && can.sparse && !can.read_only);
    assert_conforms(pool).await;
    assert_eq!(unfinished(&server.export()), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nfs_pool_conforms_where_root_is_squashed() {
    let server = start(Squash::Root);
    fs::set_permissions(server.export(), fs::Permissions::from_mode(0o777)).unwrap();
    let pool = open(&server).await;
    assert!(!pool.capabilities().owners);
    assert_conforms(pool).await;
}

mod rights {
    use super::*;

    const USER: u32 = 4_711;

    /// The calls below change one thread; those of the C library change all.
    fn become_user() {
        // SAFETY: plain system calls with numbers.
        let changed = unsafe {
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
                && libc::syscall(libc::SYS_setresgid, USER, USER, USER) == 0
                && libc::syscall(libc::SYS_setresuid, USER, USER, USER) == 0
        };
        assert!(changed, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn nfs_pool_conforms_for_an_ordinary_user() {
        let server = start(Squash::None);
        chown(server.export(), Some(USER), Some(USER)).unwrap();
        let url = server.url();
        let user = std::thread::spawn(move || {
            become_user();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let pool = NfsPool::open(&url).await.unwrap();
                assert!(!pool.capabilities().owners && !pool.capabilities().special_files);
                assert_conforms(pool).await;
            });
        });
        user.join().unwrap();
        // What others may not touch stays as it is.
        let secret = server.export().join("secret");
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let url = server.url();
        let user = std::thread::spawn(move || {
            become_user();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let pool = NfsPool::open(&url).await.unwrap();
                let version = pool.stat(&path("secret")).await.unwrap().version;
                let refused = pool.read(&path("secret"), &version, 0..1).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
            });
        });
        user.join().unwrap();
    }

    /// A directory and a file in it that none but their owner may use, made on the server.
    fn private_file(server: &NfsServer) -> PathBuf {
        let (dir, file) = (server.export().join("home"), server.export().join("home/secret"));
        fs::create_dir(&dir).unwrap();
        fs::write(&file, "of the user").unwrap();
        for (path, mode) in [(&file, 0o600), (&dir, 0o700)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            chown(path, Some(USER), Some(USER)).unwrap();
        }
        file
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn private_files_are_read_and_put_where_root_is_squashed() {
        let server = start(Squash::Root);
        let file = private_file(&server);
        let pool = open(&server).await;
        let stat = pool.stat(&path("home/secret")).await.unwrap();
        assert_eq!((stat.uid, stat.mode), (USER, 0o600));
        assert_eq!(content(&pool, "home/secret").await, "of the user");
        let attrs = Attrs { uid: USER, gid: USER, mode: 0o600, ..attrs() };
        let expected = Expected::Version(stat.version);
        let put = pool.put(&path("home/secret"), 3, pieces(&[(0, "new")]), &attrs, &expected).await.unwrap();
        assert_eq!((put.uid, put.gid, put.mode), (USER, USER, 0o600));
        pool.put(&path("home/other"), 3, pieces(&[(0, "abc")]), &attrs, &Expected::Absent).await.unwrap();
        let dir = pool.mkdir(&path("home/dir"), &Attrs { mode: 0o700, ..attrs.clone() }).await.unwrap();
        assert_eq!((dir.uid, dir.mode), (USER, 0o700));
        pool.rename(&path("home/other"), &path("home/dir/other"), RenameMode::Replace).await.unwrap();
        assert_eq!(content(&pool, "home/dir/other").await, "abc");
        pool.remove(&path("home/dir/other"), &Expected::Anything).await.unwrap();
        pool.remove_dir(&path("home/dir")).await.unwrap();
        let listed: Vec<_> = pool.list(&path("home")).await.unwrap().try_concat().await.unwrap();
        assert_eq!(listed.into_iter().map(|entry| entry.name).collect::<Vec<_>>(), [b"secret"]);
        assert_eq!((fs::read(&file).unwrap(), fs::metadata(&file).unwrap().uid()), (b"new".to_vec(), USER));
        assert_eq!(unfinished(file.parent().unwrap()), Vec::<PathBuf>::new());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_roots_stays_out_of_reach_where_root_is_squashed() {
        let server = start(Squash::Root);
        fs::write(server.export().join("f"), "of root").unwrap();
        fs::set_permissions(server.export().join("f"), fs::Permissions::from_mode(0o600)).unwrap();
        let pool = open(&server).await;
        let version = pool.stat(&path("f")).await.unwrap().version;
        let refused = pool.read(&path("f"), &version, 0..10).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
        let refused = put(&pool, "g", "x", &Expected::Absent).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn new_objects_belong_to_whom_they_are_for() {
        let server = start(Squash::None);
        let pool = open(&server).await;
        let attrs = Attrs { uid: USER, gid: 12, mode: 0o640, ..attrs() };
        pool.put(&path("f"), 1, pieces(&[(0, "x")]), &attrs, &Expected::Absent).await.unwrap();
        pool.mkdir(&path("d"), &attrs).await.unwrap();
        for name in ["f", "d"] {
            let stat = fs::metadata(server.export().join(name)).unwrap();
            assert_eq!((stat.uid(), stat.gid(), stat.mode() & 0o7777), (USER, 12, 0o640), "{name}");
        }
    }
}

mod restarts {
    use super::*;

    /// What a server that loses its power does to bytes that were not committed is done here to the temporary file: it is
    /// emptied while the server is down. Ganesha's verifier is the second in which it started.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn bytes_that_the_server_loses_before_they_are_committed_are_written_again() {
        for away in [Duration::ZERO, Duration::from_millis(1_100)] {
            lose_before_the_commit(away).await;
        }
    }

    async fn lose_before_the_commit(away: Duration) {
        let mut server = start(Squash::None);
        let pool = open(&server).await;
        let (data, half) = (pattern(12 << 20), 6 << 20);
        let piece = |start: usize, end: usize| Piece { offset: start as u64, data: data.slice(start..end) };
        let (first, second) = (piece(0, half), piece(half, data.len()));
        let export = server.export();
        let down = async {
            let arrived = || unfinished(&export).iter().any(|path| fs::metadata(path).unwrap().len() >= half as u64);
            while !arrived() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            server.kill();
            for path in unfinished(&export) {
                fs::write(path, "").unwrap();
            }
            tokio::time::sleep(away).await;
            server.start_again();
            Ok(second)
        };
        let content = stream::iter([Ok(first)]).chain(stream::once(down)).boxed();
        let (name, attrs) = (path("f"), attrs());
        let put = pool.put(&name, data.len() as u64, content, &attrs, &Expected::Absent);
        let stat = timeout(LIMIT, put).await.unwrap().unwrap();
        assert_eq!(stat.size, data.len() as u64);
        assert!(fs::read(export.join("f")).unwrap() == data, "bytes are missing on the server");
        assert_eq!(unfinished(&export), Vec::<PathBuf>::new());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn reading_goes_on_when_the_server_is_back() {
        let mut server = start(Squash::None);
        let data = pattern(32 << 20);
        fs::write(server.export().join("f"), &data).unwrap();
        let pool = Arc::new(open(&server).await);
        let version = pool.stat(&path("f")).await.unwrap().version;
        let reader = tokio::spawn({
            let (pool, data) = (Arc::clone(&pool), data.clone());
            async move {
                for round in 0..60 {
                    let got = pool.read(&path("f"), &version, 0..u64::MAX).await.unwrap();
                    assert!(got == data, "wrong bytes in round {round}");
                }
            }
        });
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            server.kill();
            server.start_again();
        }
        timeout(LIMIT, reader).await.unwrap().unwrap();
        assert!(pool.retries() > 0, "the server never was away while it was read from");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_is_gone_is_told_within_the_time_for_retries() {
        let mut server = start(Squash::None);
        let pool = open(&server).await;
        put(&pool, "f", "x", &Expected::Absent).await.unwrap();
        server.kill();
        let (known, new, attrs) = (path("f"), path("g"), attrs());
        let put = put(&pool, "g", "x", &Expected::Absent);
        let answers = timeout(LIMIT, async { futures::join!(pool.stat(&known), put, pool.mkdir(&new, &attrs)) }).await;
        let answers = answers.unwrap();
        for answer in [answers.0, answers.1, answers.2] {
            let error = answer.unwrap_err();
            assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later), "{error}");
        }
        server.start_again();
        assert_eq!(content(&pool, "f").await, "x");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn opening_without_a_server_fails_at_once_and_says_what_to_look_at() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let url = format!("nfs://127.0.0.1/pool?nfsport={port}&mountport={port}");
        let error = timeout(Duration::from_secs(10), NfsPool::open(&url)).await.unwrap().unwrap_err();
        assert_eq!((error.kind(), error.retry()), (ErrorKind::Unavailable, Retry::Later));
        assert!(error.to_string().contains(&port.to_string()) && error.to_string().contains("check that"), "{error}");
    }
}

mod lost_answers {
    use super::*;

    /// Runs `work` on a pool whose connection breaks at the next call of a procedure, once before and once after the
    /// server has done what it was asked for.
    async fn each(procedure: u32, work: impl AsyncFn(&NfsPool, &Path, String)) {
        let server = start(Squash::None);
        for (n, loss) in [Loss::Call, Loss::Answer].into_iter().enumerate() {
            let unreliable = Unreliable::start(server.nfs_port()).await;
            let pool = NfsPool::open(&server.url_by("/pool", unreliable.port())).await.unwrap();
            let name = format!("{n}");
            unreliable.lose(procedure, loss);
            timeout(LIMIT, work(&pool, &server.export(), name)).await.unwrap();
            assert!(unreliable.has_lost(), "procedure {procedure} was never called");
            assert_eq!(unfinished(&server.export()), Vec::<PathBuf>::new(), "{loss:?} of procedure {procedure}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_making_a_directory_are_found_out() {
        each(procedure::MKDIR, async |pool, export, name| {
            let stat = pool.mkdir(&path(&name), &attrs()).await.unwrap();
            assert_eq!((stat.mode, stat.mtime), (0o644, attrs().mtime));
            assert!(export.join(&name).is_dir());
            let again = pool.mkdir(&path(&name), &attrs()).await.unwrap_err();
            assert_eq!(again.kind(), ErrorKind::Exists);
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_making_a_symlink_are_found_out() {
        each(procedure::SYMLINK, async |pool, export, name| {
            pool.symlink(&path(&name), b"somewhere", &attrs()).await.unwrap();
            assert_eq!(fs::read_link(export.join(&name)).unwrap(), Path::new("somewhere"));
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_making_a_file_are_found_out() {
        each(procedure::CREATE, async |pool, export, name| {
            pool.mknod(&path(&name), FileKind::File, 0, &attrs()).await.unwrap();
            assert_eq!(fs::metadata(export.join(&name)).unwrap().len(), 0);
        })
        .await;
        each(procedure::CREATE, async |pool, export, name| {
            put(pool, &name, "content", &Expected::Absent).await.unwrap();
            assert_eq!(fs::read(export.join(&name)).unwrap(), b"content");
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_a_rename_are_found_out() {
        each(procedure::RENAME, async |pool, export, name| {
            fs::write(export.join("old"), "moved").unwrap();
            let stat = pool.rename(&path("old"), &path(&name), RenameMode::Replace).await.unwrap();
            assert_eq!(stat.size, 5);
            assert_eq!(fs::read(export.join(&name)).unwrap(), b"moved");
            assert!(!export.join("old").exists());
        })
        .await;
        each(procedure::RENAME, async |pool, export, name| {
            fs::write(export.join(&name), "old").unwrap();
            let version = pool.stat(&path(&name)).await.unwrap().version;
            put(pool, &name, "content", &Expected::Version(version)).await.unwrap();
            assert_eq!(fs::read(export.join(&name)).unwrap(), b"content");
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_a_link_are_found_out() {
        each(procedure::LINK, async |pool, export, name| {
            fs::write(export.join(format!("{name}-first")), "x").unwrap();
            let stat = pool.link(&path(&format!("{name}-first")), &path(&name)).await.unwrap();
            assert_eq!(stat.nlink, 2);
        })
        .await;
        each(procedure::LINK, async |pool, export, name| {
            put(pool, &name, "content", &Expected::Absent).await.unwrap();
            assert_eq!(fs::metadata(export.join(&name)).unwrap().nlink(), 1);
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_a_removal_are_found_out() {
        each(procedure::REMOVE, async |pool, export, name| {
            fs::write(export.join(&name), "x").unwrap();
            pool.remove(&path(&name), &Expected::Anything).await.unwrap();
            assert!(!export.join(&name).exists());
        })
        .await;
        each(procedure::RMDIR, async |pool, export, name| {
            fs::create_dir(export.join(&name)).unwrap();
            pool.remove_dir(&path(&name)).await.unwrap();
            assert!(!export.join(&name).exists());
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_what_can_be_repeated_are_asked_for_again() {
        for procedure in [procedure::WRITE, procedure::COMMIT, procedure::SETATTR, procedure::READ] {
            each(procedure, async |pool, export, name| {
                let data = pattern(3 << 20);
                let piece = Piece { offset: 0, data: data.clone() };
                let pieces = stream::iter([Ok(piece)]).boxed();
                let size = data.len() as u64;
                let stat = pool.put(&path(&name), size, pieces, &attrs(), &Expected::Absent).await.unwrap();
                assert!(fs::read(export.join(&name)).unwrap() == data);
                assert!(pool.read(&path(&name), &stat.version, 0..size).await.unwrap() == data);
            })
            .await;
        }
    }
}

mod third_parties {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_directory_that_was_replaced_is_looked_up_again() {
        let server = start(Squash::None);
        let (pool, dir) = (open(&server).await, server.export().join("a/b"));
        for round in 0..3 {
            // Removed for good: its handle is stale.
            let _ = fs::remove_dir_all(server.export().join("a"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("f"), format!("round {round}")).unwrap();
            assert_eq!(content(&pool, "a/b/f").await, format!("round {round}"));
            let listed: Vec<_> = pool.list(&path("a/b")).await.unwrap().try_concat().await.unwrap();
            assert_eq!(listed.len(), 1);
        }
        fs::remove_dir_all(server.export().join("a")).unwrap();
        fs::create_dir_all(&dir).unwrap();
        put(&pool, "a/b/new", "x", &Expected::Absent).await.unwrap();
        assert_eq!(fs::read(dir.join("new")).unwrap(), b"x");
        // Moved away, and another one put there: its handle goes on working for a moment.
        fs::rename(server.export().join("a"), server.export().join("away")).unwrap();
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("f"), "in the other").unwrap();
        assert_eq!(content(&pool, "a/b/f").await, "in the other");
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        assert_eq!(pool.stat(&path("a/b/new")).await.unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn bytes_of_another_version_are_never_given() {
        let server = start(Squash::None);
        let (pool, file) = (open(&server).await, server.export().join("f"));
        let version = put(&pool, "f", "old bytes", &Expected::Absent).await.unwrap().version;
        assert_eq!(pool.read(&path("f"), &version, 0..3).await.unwrap(), "old");
        fs::write(&file, "evil byte").unwrap();
        assert_eq!(pool.read(&path("f"), &version, 0..3).await.unwrap_err().kind(), ErrorKind::Stale);
        let answer = put(&pool, "f", "ours", &Expected::Version(version)).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(fs::read(&file).unwrap(), b"evil byte");
        assert_eq!(unfinished(&server.export()), Vec::<PathBuf>::new());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_symlink_slipped_in_does_not_lead_outside() {
        let (server, outside) = (start(Squash::None), tempfile::tempdir().unwrap());
        let pool = open(&server).await;
        fs::write(outside.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink(outside.path(), server.export().join("d")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), server.export().join("f")).unwrap();
        let kind = |answer: Result<()>| answer.unwrap_err().kind();
        assert_eq!(kind(pool.stat(&path("d/secret")).await.map(drop)), ErrorKind::NotDirectory);
        assert_eq!(kind(pool.remove(&path("d/secret"), &Expected::Anything).await), ErrorKind::NotDirectory);
        assert_eq!(kind(put(&pool, "d/new", "x", &Expected::Anything).await.map(drop)), ErrorKind::NotDirectory);
        let shorter = SetAttrs { size: Some(0), ..SetAttrs::default() };
        assert_eq!(kind(pool.set_attrs(&path("f"), &shorter).await.map(drop)), ErrorKind::InvalidInput);
        assert_eq!(kind(pool.write_at(&path("f"), 0, "y".into()).await.map(drop)), ErrorKind::InvalidInput);
        assert_eq!(fs::read(outside.path().join("secret")).unwrap(), b"x");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_removed_root_is_unavailable_not_empty() {
        let server = start(Squash::None);
        let root = server.export().join("root");
        fs::create_dir(&root).unwrap();
        let pool = NfsPool::open(&server.url_of("/pool/root")).await.unwrap();
        put(&pool, "f", "x", &Expected::Absent).await.unwrap();
        fs::remove_dir_all(&root).unwrap();
        let told = async |when| {
            for name in ["f", "none"] {
                let error = pool.stat(&path(name)).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{when}: {error}");
            }
            assert_eq!(
                pool.list(&PoolPath::root()).await.map(drop).unwrap_err().kind(),
                ErrorKind::Unavailable,
                "{when}"
            );
        };
        told("removed").await;
        fs::create_dir(&root).unwrap();
        told("another in its place").await;
    }
}

mod listings {
    use super::*;

    const ENTRIES: usize = 10_000;

    /// Lists a directory of many entries, and fails where one is missing, or twice there, or has not its own attributes.
    async fn assert_all_are_listed(server: &NfsServer, pool: &NfsPool) {
        let dir = server.export().join("many");
        if !dir.exists() {
            fs::create_dir(&dir).unwrap();
            for n in 0..ENTRIES {
                fs::write(dir.join(format!("a rather long name of an entry {n:05}")), format!("{n}")).unwrap();
            }
        }
        let pages: Vec<_> = pool.list(&path("many")).await.unwrap().try_collect().await.unwrap();
        assert!(pages.len() > 2, "{} pages", pages.len());
        let entries = pages.concat();
        let names: BTreeSet<_> = entries.iter().map(|entry| &entry.name[..]).collect();
        assert_eq!((entries.len(), names.len()), (ENTRIES, ENTRIES));
        for entry in entries {
            let number: u32 = std::str::from_utf8(&entry.name).unwrap()[31..].trim().parse().unwrap();
            assert_eq!(entry.stat.size, number.to_string().len() as u64);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn ten_thousand_entries_are_listed_once_each() {
        let server = start(Squash::None);
        assert_all_are_listed(&server, &open(&server).await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn entries_are_listed_once_each_where_the_server_forgets_or_lacks_something() {
        const BAD_COOKIE: u32 = 10_003;
        const NOT_SUPPORTED: u32 = 10_004;
        const JUKEBOX: u32 = 10_008;
        let server = start(Squash::None);
        for (before, status) in [(2, BAD_COOKIE), (0, NOT_SUPPORTED), (1, JUKEBOX)] {
            let unreliable = Unreliable::start(server.nfs_port()).await;
            let pool = NfsPool::open(&server.url_by("/pool", unreliable.port())).await.unwrap();
            unreliable.lose_after(before, procedure::READDIRPLUS, Loss::Status(status));
            timeout(LIMIT, assert_all_are_listed(&server, &pool)).await.unwrap();
            assert!(unreliable.has_lost(), "status {status} was never given");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_export_is_named_with_those_that_there_are() {
    let server = start(Squash::None);
    let error = NfsPool::open(&server.url_of("/nothing/here")).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied), "{error}");
    let text = error.to_string();
    assert!(text.contains("/nothing/here") && text.contains("/pool") && text.contains("export"), "{text}");
    let error = NfsPool::open(&server.url_of("/pool/missing")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_an_export_is_a_pool_of_its_own() {
    let server = start(Squash::None);
    fs::create_dir_all(server.export().join("a/b c")).unwrap();
    let pool = NfsPool::open(&server.url_of("/pool/a/b%20c")).await.unwrap();
    assert!(pool.url().contains("/pool/a/b%20c?"), "{}", pool.url());
    put(&pool, "f", "x", &Expected::Absent).await.unwrap();
    assert_eq!(fs::read(server.export().join("a/b c/f")).unwrap(), b"x");
    fs::write(server.export().join("file"), "x").unwrap();
    let file = NfsPool::open(&server.url_of("/pool/file")).await.unwrap_err();
    assert_eq!(file.kind(), ErrorKind::NotDirectory, "{file}");
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_outlive_a_restart_of_the_server() {
    let mut server = start(Squash::None);
    let pool = open(&server).await;
    let version = put(&pool, "f", "x", &Expected::Absent).await.unwrap().version;
    assert!(matches!(version, Version::Inode { dev: 0, .. }), "{version:?}");
    server.kill();
    server.start_again();
    assert_eq!(pool.stat(&path("f")).await.unwrap().version, version);
    assert_eq!(open(&server).await.stat(&path("f")).await.unwrap().version, version);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_put_takes_little_space_and_rewriting_in_place_keeps_the_end_a_hole() {
    let server = start(Squash::None);
    let pool = open(&server).await;
    let size = 256 << 20;
    let content = || pieces(&[(0, "start"), (size - 3, "end")]);
    pool.put(&path("f"), size, content(), &attrs(), &Expected::Absent).await.unwrap();
    let blocks = |name: &str| fs::metadata(server.export().join(name)).unwrap().blocks();
    assert!(blocks("f") < 1_000, "{} blocks", blocks("f"));
    fs::write(server.export().join("a"), "short").unwrap();
    fs::hard_link(server.export().join("a"), server.export().join("b")).unwrap();
    pool.put(&path("a"), size, content(), &attrs(), &Expected::Anything).await.unwrap();
    assert!(blocks("b") < 10_000, "{} blocks", blocks("b"));
    assert_eq!(fs::metadata(server.export().join("b")).unwrap().len(), size);
    assert_eq!(unfinished(&server.export()), Vec::<PathBuf>::new());
}
