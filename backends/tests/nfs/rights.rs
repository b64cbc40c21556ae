//! The user as which the pool acts.

use super::*;

const USER: u32 = 4_711;

/// Changes the user of this thread alone: the functions of the C library would change all threads.
fn become_user() {
    // SAFETY: plain system calls with numbers.
    let changed = unsafe {
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
            && libc::syscall(libc::SYS_setresgid, USER, USER, USER) == 0
            && libc::syscall(libc::SYS_setresuid, USER, USER, USER) == 0
    };
    assert!(changed, "{}", std::io::Error::last_os_error());
}

/// Uses the pool as a user other than root.
fn as_user(server: &NfsServer, work: impl AsyncFnOnce(NfsPool) + Send + 'static) {
    let url = server.url();
    let user = std::thread::spawn(move || {
        become_user();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { work(NfsPool::open(&url).await.unwrap()).await });
    });
    user.join().unwrap();
}

#[test]
fn nfs_pool_conforms_for_an_ordinary_user() {
    let server = start(Squash::None);
    chown(server.export(), Some(USER), Some(USER)).unwrap();
    as_user(&server, async |pool| {
        assert!(!pool.capabilities().objects.owners && !pool.capabilities().objects.special_files);
        assert_conforms(pool).await;
    });
}

#[test]
fn an_ordinary_user_does_not_pass_for_the_owner() {
    let server = start(Squash::None);
    let (file, other) = (private_file(&server), server.export().join("other"));
    chown(file.parent().unwrap(), Some(USER), Some(USER)).unwrap();
    chown(&file, Some(USER + 1), Some(USER + 1)).unwrap();
    fs::create_dir(&other).unwrap();
    as_user(&server, async |pool| {
        let version = pool.stat(&path("private/secret")).await.unwrap().version;
        let refused = pool.read(&path("private/secret"), &version, 0..1).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
        let refused = put(&pool, "other/f", "x", &Expected::Absent).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    });
}

/// A directory and a file in it that only their owner may use, made on the server.
fn private_file(server: &NfsServer) -> PathBuf {
    let (dir, file) = (server.export().join("private"), server.export().join("private/secret"));
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
    let stat = pool.stat(&path("private/secret")).await.unwrap();
    assert_eq!((stat.uid, stat.mode), (USER, 0o600));
    assert_eq!(content(&pool, "private/secret").await, "of the user");
    let attrs = Attrs { uid: USER, gid: USER, mode: 0o600, ..attrs() };
    let expected = Expected::Version(stat.version);
    let put = pool.put(&path("private/secret"), 3, pieces(&[(0, "new")]), &attrs, &expected).await.unwrap();
    assert_eq!((put.uid, put.gid, put.mode), (USER, USER, 0o600));
    pool.put(&path("private/other"), 3, pieces(&[(0, "abc")]), &attrs, &Expected::Absent).await.unwrap();
    let dir = pool.mkdir(&path("private/dir"), &Attrs { mode: 0o700, ..attrs.clone() }).await.unwrap();
    assert_eq!((dir.uid, dir.mode), (USER, 0o700));
    pool.rename(&path("private/other"), &path("private/dir/other"), RenameMode::Replace).await.unwrap();
    assert_eq!(content(&pool, "private/dir/other").await, "abc");
    pool.remove(&path("private/dir/other"), &Expected::Anything).await.unwrap();
    pool.remove_dir(&path("private/dir")).await.unwrap();
    let listed: Vec<_> = pool.list(&path("private")).await.unwrap().try_concat().await.unwrap();
    assert_eq!(listed.into_iter().map(|entry| entry.name).collect::<Vec<_>>(), [b"secret"]);
    assert_eq!((fs::read(&file).unwrap(), fs::metadata(&file).unwrap().uid()), (b"new".to_vec(), USER));
    assert_eq!(unfinished(file.parent().unwrap()), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_directory_is_a_pool_where_root_is_squashed() {
    let server = start(Squash::Root);
    private_file(&server);
    fs::create_dir(server.export().join("private/pool")).unwrap();
    chown(server.export().join("private/pool"), Some(USER), Some(USER)).unwrap();
    let pool = NfsPool::open(&server.url_of("/pool/private/pool")).await.unwrap();
    let attrs = Attrs { uid: USER, gid: USER, ..attrs() };
    pool.put(&path("f"), 3, pieces(&[(0, "abc")]), &attrs, &Expected::Absent).await.unwrap();
    assert_eq!(fs::read(server.export().join("private/pool/f")).unwrap(), b"abc");
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

/// A file with two names is rewritten in place. Until it has the mode of the new content, the new content is not there
/// for users to whom only the old content was open.
#[tokio::test(flavor = "multi_thread")]
async fn private_content_is_never_in_a_file_with_its_old_mode() {
    let server = start(Squash::None);
    let unreliable = NfsFaultProxy::start(server.nfs_port()).await;
    let pool = NfsPool::open(&server.url_by("/pool", unreliable.port())).await.unwrap();
    let (file, other) = (server.export().join("f"), server.export().join("other"));
    fs::write(&file, "old").unwrap();
    fs::hard_link(&file, other).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    chown(&file, Some(USER), Some(USER)).unwrap();
    let expected = Expected::Version(pool.stat(&path("f")).await.unwrap().version);
    let attrs = Attrs { uid: USER, gid: USER, mode: 0o600, ..attrs() };
    // The first WRITE goes to the temporary file. The answer to the second one arrives late, so that the file is seen.
    unreliable.lose_after(1, procedure::WRITE, Loss::Answer);
    let name = path("f");
    let put = pool.put(&name, 7, pieces(&[(0, "private")]), &attrs, &expected);
    let watched = tokio::task::spawn_blocking(move || {
        let since = std::time::Instant::now();
        while fs::read(&file).unwrap() != b"private" {
            assert!(since.elapsed() < LIMIT, "the content never came");
        }
        fs::metadata(&file).unwrap().mode() & 0o7777
    });
    let (put, seen) = futures::join!(timeout(LIMIT, put), watched);
    assert_eq!(seen.unwrap() & 0o077, 0, "others may read what is private");
    let put = put.unwrap().unwrap();
    assert_eq!((put.mode, put.uid, put.nlink), (0o600, USER, 2));
}
