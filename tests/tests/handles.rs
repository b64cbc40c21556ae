//! File handles (`name_to_handle_at`, `open_by_handle_at`), and servers that export a mount by them.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_backends::nfs::NfsPool;
use forebay_backends::{Attrs, Pool, PoolPath, RenameMode, Time};
use forebay_tests::mount::{COMMAND, Mount, Options, content};
use forebay_tests::servers::nfs::{NfsServer, Squash};
use futures::TryStreamExt;

/// `MAX_HANDLE_SZ`
const HANDLE_BYTES: usize = 128;

/// `struct file_handle`
#[repr(C)]
#[derive(Clone)]
struct Handle {
    bytes: u32,
    kind: i32,
    handle: [u8; HANDLE_BYTES],
}

#[track_caller]
fn handle(path: &Path) -> Handle {
    let mut handle = Handle { bytes: HANDLE_BYTES as u32, kind: 0, handle: [0; HANDLE_BYTES] };
    let (text, mut mount) = (CString::new(path.as_os_str().as_bytes()).unwrap(), 0_i32);
    // SAFETY: the handle has the room that it says, and all pointers outlive the call.
    let rc = unsafe {
        libc::syscall(libc::SYS_name_to_handle_at, libc::AT_FDCWD, text.as_ptr(), &raw mut handle, &raw mut mount, 0)
    };
    assert_eq!(rc, 0, "{}: {}", path.display(), io::Error::last_os_error());
    handle
}

fn open(mount: &Mount, handle: &Handle, flags: i32) -> io::Result<File> {
    let root = File::open(mount.place.mnt())?;
    // SAFETY: the handle outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, root.as_raw_fd(), handle, flags | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened just now, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

#[track_caller]
fn text(mount: &Mount, handle: &Handle) -> String {
    let mut text = String::new();
    open(mount, handle, libc::O_RDONLY).unwrap().read_to_string(&mut text).unwrap();
    text
}

#[track_caller]
fn path_of(mount: &Mount, handle: &Handle) -> PathBuf {
    let file = open(mount, handle, libc::O_PATH).unwrap();
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

#[track_caller]
fn is_stale(mount: &Mount, handle: &Handle) {
    let error = open(mount, handle, libc::O_RDONLY).map(drop).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}");
}

/// Makes the kernel forget unused names and inodes.
fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}

/// SEMANTICS 55: "A file handle (`name_to_handle_at`) stays valid as long as the file has a name: after the kernel
/// forgot the file, after the daemon died, and after the pool was mounted again with the same fast pool."
#[test]
fn handles_are_good_whatever_is_forgotten() {
    let mount = Mount::new(Options::default());
    fs::create_dir_all(mount.pool("a/b/c")).unwrap();
    fs::write(mount.pool("a/b/c/of the pool"), "of the pool").unwrap();
    fs::write(mount.path("a/b/made here"), "made here").unwrap();
    std::os::unix::fs::symlink("nowhere", mount.path("a/link")).unwrap();
    let names = ["", "a", "a/b", "a/b/c", "a/link", "a/b/c/of the pool", "a/b/made here"];
    let handles: Vec<_> = names.iter().map(|name| (name, handle(&mount.path(name)))).collect();
    let check = |when: &str| {
        for (name, handle) in &handles {
            let file = open(&mount, handle, libc::O_PATH).unwrap_or_else(|e| panic!("{when}, {name}: {e}"));
            let (by_handle, by_name) = (file.metadata().unwrap(), fs::symlink_metadata(mount.path(name)).unwrap());
            assert_eq!((by_handle.ino(), by_handle.mode()), (by_name.ino(), by_name.mode()), "{when}, {name}");
        }
        assert_eq!(text(&mount, &handles[5].1), "of the pool", "{when}");
        assert_eq!(text(&mount, &handles[6].1), "made here", "{when}");
        assert_eq!(path_of(&mount, &handles[3].1), mount.path("a/b/c"), "{when}");
    };
    check("at once");
    drop_caches();
    check("after the kernel forgot");
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    check("after the worker was killed");
    drop_caches();
    check("after the worker was killed and the kernel forgot");
    mount.umount();
    mount.mount();
    check("after a mount");
    // A write by handle changes the same file.
    drop_caches();
    open(&mount, &handles[6].1, libc::O_WRONLY | libc::O_APPEND).unwrap().write_all(b", and changed").unwrap();
    assert_eq!(fs::read_to_string(mount.path("a/b/made here")).unwrap(), "made here, and changed");
    fs::rename(mount.path("a/b"), mount.path("moved")).unwrap();
    drop_caches();
    assert_eq!(text(&mount, &handles[5].1), "of the pool");
    assert_eq!(path_of(&mount, &handles[3].1), mount.path("moved/c"));
}

/// SEMANTICS 55: "A handle of a file that was removed, in the mount or in the pool, fails with `ESTALE`"
#[test]
fn handles_of_what_was_removed_are_stale() {
    let mount = Mount::new(Options::policy("[default]\nmetadata-ttl = \"1s\"\n"));
    let names = ["removed here", "removed in the pool", "replaced", "stays"];
    names.iter().for_each(|name| fs::write(mount.path(name), name).unwrap());
    fs::create_dir(mount.path("dir")).unwrap();
    mount.flush();
    let [here, pool, replaced, stays, dir] =
        ["removed here", "removed in the pool", "replaced", "stays", "dir"].map(|name| handle(&mount.path(name)));
    fs::remove_file(mount.path("removed here")).unwrap();
    fs::remove_dir(mount.path("dir")).unwrap();
    fs::write(mount.path("new"), "new").unwrap();
    fs::rename(mount.path("new"), mount.path("replaced")).unwrap();
    [&here, &dir, &replaced].iter().for_each(|handle| is_stale(&mount, handle));
    drop_caches();
    [&here, &dir, &replaced].iter().for_each(|handle| is_stale(&mount, handle));
    fs::remove_file(mount.pool("removed in the pool")).unwrap();
    let deadline = Instant::now() + COMMAND;
    while open(&mount, &pool, libc::O_RDONLY).is_ok() {
        assert!(Instant::now() < deadline, "what was removed in the pool is opened by its handle");
        std::thread::sleep(Duration::from_millis(200));
        drop_caches();
    }
    is_stale(&mount, &pool);
    assert_eq!(text(&mount, &stays), "stays");
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    drop_caches();
    [&here, &dir, &replaced, &pool].iter().for_each(|handle| is_stale(&mount, handle));

    // A new fast pool gives the same inode numbers to other files.
    let numbers = |mount: &Mount| fs::metadata(mount.path("stays")).unwrap().ino();
    let before = numbers(&mount);
    mount.flush();
    mount.umount();
    fs::remove_dir_all(mount.place.fast()).unwrap();
    mount.mount();
    let all: Vec<_> = (0..20).map(|n| mount.path(format!("other {n}"))).collect();
    all.iter().for_each(|path| fs::write(path, "other").unwrap());
    assert!(all.iter().any(|path| fs::metadata(path).unwrap().ino() == before), "the number was given again");
    is_stale(&mount, &stays);
    drop_caches();
    is_stale(&mount, &stays);
}

/// SEMANTICS 55: "So a mount can be exported by an NFS server (nfs-ganesha with its FSAL VFS)."
#[test]
fn a_mount_is_exported_by_an_nfs_server() {
    let mount = Mount::new(Options::default());
    fs::create_dir_all(mount.pool("a/b")).unwrap();
    fs::write(mount.pool("a/b/f"), "of the pool").unwrap();
    let server = NfsServer::exporting(&mount.place.mnt(), &mount.place.at(""), Squash::None);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let wait = |work| runtime.block_on(async { tokio::time::timeout(COMMAND, work).await.expect("an answer") });
    let path = |text: &str| PoolPath::parse(text).unwrap();
    wait(Box::pin(async {
        let client = NfsPool::open(&server.url()).await.unwrap();
        let read = async |name: &str| {
            let version = client.stat(&path(name)).await.unwrap().version;
            client.read(&path(name), &version, 0..u64::MAX).await.unwrap()
        };
        assert_eq!(read("a/b/f").await, "of the pool");
        let time = Time { secs: 1_650_000_000, nanos: 5 };
        let attrs = Attrs { mode: 0o755, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() };
        client.mkdir(&path("a/made"), &attrs).await.unwrap();
        let data = Bytes::from(content(7, 1 << 20));
        File::create(mount.path("a/made/data")).unwrap();
        client.write_at(&path("a/made/data"), 0, data.clone()).await.unwrap();
        assert_eq!(fs::read(mount.path("a/made/data")).unwrap(), data);
        // The server holds handles of files that neither the kernel nor the daemon has in memory.
        let worker = mount.worker();
        mount.kill_worker();
        mount.wait_for_other_worker(worker);
        drop_caches();
        assert_eq!(read("a/made/data").await, data);
        client.rename(&path("a/b"), &path("a/moved"), RenameMode::Replace).await.unwrap();
        drop_caches();
        assert_eq!(read("a/moved/f").await, "of the pool");
        let names: Vec<_> = client.list(&path("a")).await.unwrap().try_concat().await.unwrap();
        assert_eq!(names.len(), 2, "{names:?}");
    }));
    mount.flush();
    assert_eq!(fs::read(mount.pool("a/made/data")).unwrap(), content(7, 1 << 20));
    assert!(mount.pool("a/moved/f").exists());
    drop(server);
}
