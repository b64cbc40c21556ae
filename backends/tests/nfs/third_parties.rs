//! Changes of other clients that bypass the pool.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_was_replaced_is_looked_up_again() {
    let server = start(Squash::None);
    let (pool, dir) = (open(&server).await, server.export().join("a/b"));
    for round in 0..3 {
        // The directory is removed for good, so its handle is stale.
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
    // The directory is moved away and replaced: its handle keeps working for a moment.
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
        assert_eq!(pool.list(&PoolPath::root()).await.map(drop).unwrap_err().kind(), ErrorKind::Unavailable, "{when}");
    };
    told("removed").await;
    fs::create_dir(&root).unwrap();
    told("another in its place").await;
}
