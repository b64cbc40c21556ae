//! Changes whose answers are lost with the connection.

use super::*;

/// Runs `work` on a pool whose connection breaks at the next call of a procedure, once before and once after the
/// server has carried out the call.
async fn each(procedure: u32, work: impl AsyncFn(&NfsPool, &Path, String)) {
    let server = start(Squash::None);
    for (n, loss) in [Loss::Call, Loss::Answer].into_iter().enumerate() {
        let unreliable = NfsFaultProxy::start(server.nfs_port()).await;
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

/// nfs-ganesha drops a READ of a file that is replaced at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn that_never_come_are_asked_for_again() {
    let server = start(Squash::None);
    fs::write(server.export().join("f"), "content").unwrap();
    for procedure in [procedure::GETATTR, procedure::LOOKUP, procedure::READ, procedure::READDIRPLUS] {
        let unreliable = NfsFaultProxy::start(server.nfs_port()).await;
        let pool = NfsPool::open(&server.url_by("/pool", unreliable.port())).await.unwrap();
        unreliable.lose(procedure, Loss::Silence);
        let work = async {
            assert_eq!(pool.stat(&PoolPath::root()).await.unwrap().kind, FileKind::Directory);
            let version = pool.stat(&path("f")).await.unwrap().version;
            assert_eq!(pool.read(&path("f"), &version, 0..7).await.unwrap(), "content");
            let pages: Vec<_> = pool.list(&PoolPath::root()).await.unwrap().try_collect().await.unwrap();
            assert_eq!(pages.concat().len(), 1);
        };
        // The time that a mount waits for an answer.
        timeout(Duration::from_secs(10), work).await.unwrap();
        assert!(unreliable.has_lost(), "procedure {procedure} was never called");
    }
}
