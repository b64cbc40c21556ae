//! The directory pool against the suite and against faults of real file systems.

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_backends::dir::DirPool;
use forebay_backends::{ErrorKind, Expected, Pool, PoolPath, RESERVED_PREFIX, Result, SetAttrs, Stat, Version};
use futures::TryStreamExt;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT, utimensat};
use tempfile::TempDir;

use common::{attrs, path, pieces};

/// A directory on the disk that the tests run from.
fn on_disk() -> TempDir {
    tempfile::Builder::new().prefix("forebay-dir-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn in_tmpfs() -> TempDir {
    let shm = Path::new("/dev/shm");
    assert!(shm.is_dir(), "these tests need the tmpfs at /dev/shm: mount -t tmpfs tmpfs /dev/shm");
    tempfile::Builder::new().prefix("forebay-dir-").tempdir_in(shm).unwrap()
}

fn open(root: &TempDir) -> DirPool {
    DirPool::open(root.path()).unwrap()
}

async fn put(pool: &DirPool, name: &str, data: &'static str, expected: &Expected) -> Result<Stat> {
    pool.put(&path(name), data.len() as u64, pieces(&[(0, data)]), &attrs(), expected).await
}

/// Names in the root as they are on the disk, including the pool's own.
fn names(root: &TempDir) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn directory_pool_on_disk_conforms() {
    let root = on_disk();
    common::assert_conforms(Arc::new(open(&root))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn directory_pool_on_tmpfs_conforms() {
    let root = in_tmpfs();
    common::assert_conforms(Arc::new(open(&root))).await;
}

#[tokio::test]
async fn opening_leaves_nothing_behind() {
    let root = on_disk();
    let pool = open(&root);
    assert!(pool.capabilities().local);
    assert_eq!(names(&root), Vec::<String>::new());
}

#[test]
fn a_root_that_is_missing_or_no_directory_is_named_with_a_remedy() {
    let root = on_disk();
    let missing = DirPool::open(&root.path().join("missing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("missing") && missing.to_string().contains("create it"), "{missing}");
    fs::write(root.path().join("file"), "x").unwrap();
    let file = DirPool::open(&root.path().join("file")).unwrap_err();
    assert_eq!(file.kind(), ErrorKind::NotDirectory);
    assert!(file.to_string().contains("name the directory"), "{file}");
}

mod vanishing {
    use super::*;

    async fn assert_unavailable(pool: &DirPool) {
        let kind = |answer: Result<()>| answer.unwrap_err().kind();
        assert_eq!(kind(pool.stat(&path("d/f")).await.map(drop)), ErrorKind::Unavailable);
        assert_eq!(kind(pool.stat(&path("none")).await.map(drop)), ErrorKind::Unavailable);
        assert_eq!(kind(pool.readlink(&path("none")).await.map(drop)), ErrorKind::Unavailable);
        assert_eq!(kind(pool.remove(&path("none"), &Expected::Anything).await), ErrorKind::Unavailable);
        assert_eq!(kind(pool.remove(&path("none"), &Expected::Absent).await), ErrorKind::Unavailable);
        let version = pool.stat(&PoolPath::root()).await.map(|stat| stat.version);
        let version = version.unwrap_or(Version::Tag {
            etag: String::new(),
            id: String::new(),
            size: 0,
            mtime: Default::default(),
        });
        assert_eq!(kind(pool.read(&path("none"), &version, 0..1).await.map(drop)), ErrorKind::Unavailable);
        let expected = Expected::Version(version);
        assert_eq!(kind(put(pool, "none", "x", &expected).await.map(drop)), ErrorKind::Unavailable);
        let listing = match pool.list(&PoolPath::root()).await {
            Ok(listing) => listing.try_collect::<Vec<_>>().await.map(drop),
            Err(error) => Err(error),
        };
        assert_eq!(kind(listing), ErrorKind::Unavailable);
    }

    async fn pool_with_a_file(root: &Path) -> DirPool {
        let pool = DirPool::open(root).unwrap();
        pool.mkdir(&path("d"), &attrs()).await.unwrap();
        put(&pool, "d/f", "x", &Expected::Absent).await.unwrap();
        assert_eq!(pool.stat(&path("none")).await.unwrap_err().kind(), ErrorKind::NotFound);
        pool
    }

    #[tokio::test]
    async fn a_removed_root_is_unavailable_not_empty() {
        let parent = on_disk();
        let root = parent.path().join("root");
        fs::create_dir(&root).unwrap();
        let pool = pool_with_a_file(&root).await;
        fs::remove_dir_all(&root).unwrap();
        assert_unavailable(&pool).await;
        // An empty directory in its place, as an unmounted file system leaves it, is not the pool either.
        fs::create_dir(&root).unwrap();
        assert_unavailable(&pool).await;
    }

    #[tokio::test]
    async fn a_lazily_unmounted_pool_does_not_report_files_as_missing() {
        assert!(rustix::process::geteuid().is_root(), "this test mounts a tmpfs: run it as root");
        let parent = on_disk();
        let root = parent.path().join("root");
        fs::create_dir(&root).unwrap();
        let mounted = std::process::Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&root).status();
        assert!(mounted.unwrap().success(), "mount -t tmpfs needs CAP_SYS_ADMIN");
        let pool = pool_with_a_file(&root).await;
        let unmounted = std::process::Command::new("umount").arg("-l").arg(&root).status();
        assert!(unmounted.unwrap().success());
        // Names that the handle still reaches are valid. Any other name is unavailable, not missing.
        pool.stat(&path("d/f")).await.unwrap();
        assert_eq!(pool.stat(&path("none")).await.unwrap_err().kind(), ErrorKind::Unavailable);
        assert!(names_in(&root).is_empty());
    }

    fn names_in(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[tokio::test]
    async fn a_renamed_root_comes_back() {
        let parent = on_disk();
        let (root, away) = (parent.path().join("root"), parent.path().join("away"));
        fs::create_dir(&root).unwrap();
        let pool = pool_with_a_file(&root).await;
        fs::rename(&root, &away).unwrap();
        assert_eq!(pool.stat(&path("none")).await.unwrap_err().kind(), ErrorKind::Unavailable);
        fs::rename(&away, &root).unwrap();
        assert_eq!(pool.stat(&path("none")).await.unwrap_err().kind(), ErrorKind::NotFound);
    }
}

mod third_parties {
    use super::*;

    #[tokio::test]
    async fn a_file_changed_in_place_conflicts_and_keeps_its_content() {
        let root = on_disk();
        let pool = open(&root);
        let version = put(&pool, "f", "ours", &Expected::Absent).await.unwrap().version;
        fs::write(root.path().join("f"), "more of theirs").unwrap();
        let answer = put(&pool, "f", "ours again", &Expected::Version(version.clone())).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Conflict);
        let removal = pool.remove(&path("f"), &Expected::Version(version)).await;
        assert_eq!(removal.unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(fs::read(root.path().join("f")).unwrap(), b"more of theirs");
        assert_eq!(names(&root), ["f"]);
    }

    #[tokio::test]
    async fn a_changed_mode_or_name_is_no_conflict() {
        let root = on_disk();
        let pool = open(&root);
        let version = put(&pool, "f", "one", &Expected::Absent).await.unwrap().version;
        fs::rename(root.path().join("f"), root.path().join("g")).unwrap();
        put(&pool, "g", "two", &Expected::Version(version)).await.unwrap();
        assert_eq!(fs::read(root.path().join("g")).unwrap(), b"two");
    }

    /// Two processes on one directory, as on two nodes: neither knows the other's locks. Each counts its successful
    /// puts. If no update is lost, the file has the total.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn writers_of_different_pools_lose_no_update() {
        for root in [on_disk(), in_tmpfs()] {
            let first = open(&root);
            put(&first, "counter", "0", &Expected::Absent).await.unwrap();
            let writers = (0..6).map(|_| {
                let pool = open(&root);
                tokio::spawn(async move {
                    let mut won = 0_u64;
                    while won < 25 {
                        won += u64::from(increment(&pool).await.unwrap());
                    }
                })
            });
            for writer in writers.collect::<Vec<_>>() {
                writer.await.unwrap();
            }
            assert_eq!(fs::read_to_string(root.path().join("counter")).unwrap(), "150");
            assert_eq!(names(&root), ["counter"]);
        }
    }

    async fn increment(pool: &DirPool) -> Result<bool> {
        let name = path("counter");
        let stat = pool.stat(&name).await?;
        let data = match pool.read(&name, &stat.version, 0..u64::MAX).await {
            Err(error) if error.is(ErrorKind::Stale) => return Ok(false),
            data => data?,
        };
        let count: u64 = std::str::from_utf8(&data).unwrap().parse().unwrap();
        let next: &'static str = (count + 1).to_string().leak();
        let mut attrs = attrs();
        // Each version has a time of its own, as if a program had written it.
        attrs.mtime = forebay_backends::Time::now();
        let content = pieces(&[(0, next)]);
        match pool.put(&name, next.len() as u64, content, &attrs, &Expected::Version(stat.version)).await {
            Ok(_) => Ok(true),
            Err(error) if error.is(ErrorKind::Conflict) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A program replaces the file by rename, without a condition, while the pool replaces versions. The program's
    /// last content must be there at the end, unless the pool replaced exactly that.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_replacing_program_is_never_overwritten_unseen() {
        let root = on_disk();
        let pool = open(&root);
        put(&pool, "f", "start", &Expected::Absent).await.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let program = std::thread::spawn({
            let (dir, stop) = (root.path().to_owned(), Arc::clone(&stop));
            move || {
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) {
                    fs::write(dir.join("theirs"), format!("theirs {round}")).unwrap();
                    fs::rename(dir.join("theirs"), dir.join("f")).unwrap();
                    round += 1;
                }
            }
        });
        let (mut won, mut lost) = (0, 0);
        while won + lost < 300 {
            let Ok(stat) = pool.stat(&path("f")).await else { panic!("the name was missing for a moment") };
            match put(&pool, "f", "ours", &Expected::Version(stat.version)).await {
                Ok(_) => won += 1,
                Err(error) if error.is(ErrorKind::Conflict) => lost += 1,
                Err(error) => panic!("{error}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        program.join().unwrap();
        assert_eq!(names(&root), ["f"], "{won} won, {lost} lost");
    }

    #[tokio::test]
    async fn an_open_version_outlives_its_name_but_never_shows_other_bytes() {
        let root = on_disk();
        let pool = open(&root);
        let version = put(&pool, "f", "old bytes", &Expected::Absent).await.unwrap().version;
        pool.read(&path("f"), &version, 0..3).await.unwrap();
        fs::write(root.path().join("new"), "NEW BYTES").unwrap();
        fs::rename(root.path().join("new"), root.path().join("f")).unwrap();
        // The file is still open with the same content, though the name refers to another file now.
        assert_eq!(pool.read(&path("f"), &version, 0..100).await.unwrap(), "old bytes");
        let version = pool.stat(&path("f")).await.unwrap().version;
        assert_eq!(pool.read(&path("f"), &version, 0..100).await.unwrap(), "NEW BYTES");
        // Changed through the same inode, with the old time restored: the version differs.
        fs::write(root.path().join("f"), "evil byte").unwrap();
        let Version::Inode { mtime, .. } = &version else { panic!("{version:?}") };
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: mtime.secs, tv_nsec: i64::from(mtime.nanos) },
        };
        utimensat(CWD, root.path().join("f"), &times, AtFlags::empty()).unwrap();
        let answer = pool.read(&path("f"), &version, 0..100).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Stale);
    }

    #[tokio::test]
    async fn a_symlink_slipped_in_does_not_lead_outside() {
        let (root, outside) = (on_disk(), on_disk());
        fs::write(outside.path().join("secret"), "x").unwrap();
        let pool = open(&root);
        pool.mkdir(&path("d"), &attrs()).await.unwrap();
        fs::remove_dir(root.path().join("d")).unwrap();
        std::os::unix::fs::symlink(outside.path(), root.path().join("d")).unwrap();
        let kind = |answer: Result<()>| answer.unwrap_err().kind();
        assert_eq!(kind(pool.stat(&path("d/secret")).await.map(drop)), ErrorKind::NotDirectory);
        assert_eq!(kind(pool.remove(&path("d/secret"), &Expected::Anything).await), ErrorKind::NotDirectory);
        assert_eq!(kind(put(&pool, "d/new", "x", &Expected::Anything).await.map(drop)), ErrorKind::NotDirectory);
        std::os::unix::fs::symlink(outside.path().join("secret"), root.path().join("f")).unwrap();
        let shorter = SetAttrs { size: Some(0), ..SetAttrs::default() };
        assert_eq!(kind(pool.set_attrs(&path("f"), &shorter).await.map(drop)), ErrorKind::InvalidInput);
        assert_eq!(kind(pool.write_at(&path("f"), 0, "y".into()).await.map(drop)), ErrorKind::InvalidInput);
        assert_eq!(fs::read(outside.path().join("secret")).unwrap(), b"x");
    }
}

#[tokio::test]
async fn a_sparse_put_takes_little_space_and_rewriting_in_place_keeps_the_holes() {
    use std::os::unix::fs::MetadataExt;
    let root = on_disk();
    let pool = open(&root);
    let size = 256 << 20;
    let content = || pieces(&[(0, "start"), (size - 3, "end")]);
    pool.put(&path("f"), size, content(), &attrs(), &Expected::Absent).await.unwrap();
    let blocks = |name: &str| fs::metadata(root.path().join(name)).unwrap().blocks();
    assert!(blocks("f") < 1_000, "{} blocks", blocks("f"));
    fs::write(root.path().join("a"), "short").unwrap();
    fs::hard_link(root.path().join("a"), root.path().join("b")).unwrap();
    pool.put(&path("a"), size, content(), &attrs(), &Expected::Anything).await.unwrap();
    assert!(blocks("b") < 1_000, "{} blocks", blocks("b"));
    assert_eq!(fs::metadata(root.path().join("b")).unwrap().len(), size);
}

#[tokio::test]
async fn a_full_file_system_is_told_and_keeps_nothing_of_the_attempt() {
    assert!(rustix::process::geteuid().is_root(), "this test mounts a tmpfs: run it as root");
    let parent = on_disk();
    let small =
        std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(parent.path()).status();
    assert!(small.unwrap().success(), "mount -t tmpfs needs CAP_SYS_ADMIN");
    let pool = open(&parent);
    put(&pool, "f", "kept", &Expected::Absent).await.unwrap();
    let data = bytes::Bytes::from(vec![1; 3 << 20]);
    let content = Box::pin(futures::stream::iter([Ok(forebay_backends::Piece { offset: 0, data })]));
    let answer = pool.put(&path("f"), 3 << 20, content, &attrs(), &Expected::Anything).await;
    let (left, kept) = (names(&parent), fs::read(parent.path().join("f")));
    drop(pool);
    std::process::Command::new("umount").arg("-l").arg(parent.path()).status().unwrap();
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("put /f"), "{error}");
    assert_eq!((left, kept.unwrap()), (vec!["f".to_owned()], b"kept".to_vec()));
}

#[tokio::test]
async fn sweep_removes_only_old_files_of_dead_writers() {
    let root = on_disk();
    let pool = open(&root);
    let reserved = String::from_utf8(RESERVED_PREFIX.to_vec()).unwrap();
    for name in [format!("{reserved}put-0-999999999-1"), format!("{reserved}other"), "ordinary".to_owned()] {
        fs::write(root.path().join(name), "x").unwrap();
    }
    // Young files stay: their writer may live on another node. (No test can make a file's ctime old.)
    assert_eq!(pool.sweep(&PoolPath::root()).await.unwrap(), 0);
    assert_eq!(names(&root).len(), 3);
    let listed: Vec<_> = pool.list(&PoolPath::root()).await.unwrap().try_collect().await.unwrap();
    assert_eq!(listed.concat().into_iter().map(|entry| entry.name).collect::<Vec<_>>(), [b"ordinary"]);
}

#[tokio::test]
async fn a_directory_with_nothing_but_the_unfinished_files_of_dead_writers_is_removed() {
    let root = on_disk();
    let pool = open(&root);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
    let reserved = String::from_utf8(RESERVED_PREFIX.to_vec()).unwrap();
    for (dir, writer) in [("dead", 999_999_999), ("alive", std::process::id())] {
        fs::create_dir(root.path().join(dir)).unwrap();
        fs::write(root.path().join(dir).join(format!("{reserved}put-{boot}-{writer}-1")), "x").unwrap();
    }
    pool.remove_dir(&PoolPath::parse("dead").unwrap()).await.unwrap();
    let refused = pool.remove_dir(&PoolPath::parse("alive").unwrap()).await.unwrap_err();
    assert!(refused.is(ErrorKind::NotEmpty), "{refused}");
}

#[tokio::test]
async fn a_url_names_the_absolute_root() {
    let root = on_disk();
    let url = open(&root).url();
    assert!(url.starts_with("file:///") && url.as_bytes().ends_with(root.path().file_name().unwrap().as_bytes()));
}

#[tokio::test]
async fn new_objects_have_the_acls_that_they_are_given_not_those_of_their_directory() {
    let root = on_disk();
    let pool = open(&root);
    // user::rwx, user:1:rwx, group::r-x, mask::rwx, other::r-x
    let mut acl = vec![2, 0, 0, 0];
    for (tag, perm, id) in [(1u16, 7u16, u32::MAX), (2, 7, 1), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)] {
        acl.extend(tag.to_le_bytes());
        acl.extend(perm.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    pool.set_xattr(&PoolPath::root(), b"system.posix_acl_default", &acl).await.unwrap();
    pool.mkdir(&path("dir"), &attrs()).await.unwrap();
    put(&pool, "file", "x", &Expected::Absent).await.unwrap();
    for name in ["dir", "file"] {
        let mode = pool.stat(&path(name)).await.unwrap().mode;
        assert_eq!((pool.xattrs(&path(name)).await.unwrap(), mode), (vec![], attrs().mode), "{name}");
    }
}

#[tokio::test]
async fn paths_longer_than_the_kernel_takes_are_walked() {
    let root = on_disk();
    let pool = open(&root);
    let name = [b'n'; 100];
    let mut dirs = vec![PoolPath::root()];
    for depth in 0..45 {
        let dir = dirs[depth].join(&name);
        pool.mkdir(&dir, &attrs()).await.unwrap();
        dirs.push(dir);
    }
    let file = dirs[45].join(b"f");
    let made = pool.put(&file, 4, pieces(&[(0, "deep")]), &attrs(), &Expected::Absent).await.unwrap();
    assert_eq!(pool.read(&file, &made.version, 0..4).await.unwrap(), "deep");
    pool.remove(&file, &Expected::Version(made.version)).await.unwrap();
    for dir in dirs[1..].iter().rev() {
        pool.remove_dir(dir).await.unwrap();
    }
}

#[tokio::test]
async fn ranged_writes_go_to_the_object_that_is_meant_and_keep_no_removed_file_open() {
    let root = on_disk();
    let pool = open(&root);
    let of = |name: &str, stat: &Stat| path(name).of_object(stat.version.identity());
    let open_here = || {
        let open = fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        open.filter(|file| file.starts_with(root.path()) && !file.ends_with(root.path().file_name().unwrap())).count()
    };
    let stat = put(&pool, "f", "0123456789", &Expected::Absent).await.unwrap();
    let meant = of("f", &stat);
    pool.write_at(&meant, 2, "abc".into()).await.unwrap();
    assert_eq!(open_here(), 1, "it is kept open until it is synced");
    pool.sync_file(&meant).await.unwrap();
    assert_eq!(open_here(), 0);
    // What another process wrote is synced, too.
    pool.sync_file(&meant).await.unwrap();
    // Another client moves it away and gives its name to another file.
    pool.write_at(&meant, 2, "ABC".into()).await.unwrap();
    fs::rename(root.path().join("f"), root.path().join("moved")).unwrap();
    fs::write(root.path().join("f"), "another").unwrap();
    let kind = |answer: Result<()>| answer.unwrap_err().kind();
    assert_eq!(kind(pool.write_at(&meant, 0, "x".into()).await.map(drop)), ErrorKind::NotFound);
    assert_eq!(fs::read(root.path().join("f")).unwrap(), b"another");
    assert_eq!(fs::read(root.path().join("moved")).unwrap(), b"01ABC56789");
    // Removed by this pool, and by another client before another file is written.
    pool.write_at(&of("moved", &stat), 0, "y".into()).await.unwrap();
    pool.remove(&path("moved"), &Expected::Anything).await.unwrap();
    assert_eq!(open_here(), 0, "it was removed by this pool");
    assert_eq!(kind(pool.sync_file(&of("moved", &stat)).await), ErrorKind::NotFound);
    for name in ["g", "h"] {
        let stat = put(&pool, name, "0123456789", &Expected::Absent).await.unwrap();
        pool.write_at(&of(name, &stat), 0, "z".into()).await.unwrap();
        if name == "g" {
            fs::remove_file(root.path().join("g")).unwrap();
        }
    }
    assert_eq!(open_here(), 1, "g was removed by another client");
}
