//! Tests of fallbacks for file systems and kernels with fewer abilities, which cannot be tested from outside.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rustix::process::{getegid, geteuid};

use futures::TryStreamExt;

use crate::unfinished::boot_id;
use crate::{Attrs, Time, conformance};

use super::*;

fn attrs() -> Attrs {
    let time = Time { secs: 1, nanos: 0 };
    Attrs {
        mode: 0o755,
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        atime: time,
        mtime: time,
        xattrs: Vec::new(),
    }
}

/// A pool without some abilities, on the file system of the build.
fn pool_without(root: &Path, lose: impl FnOnce(&mut Shared)) -> DirPool {
    let mut pool = DirPool::open(root).unwrap();
    lose(Arc::get_mut(&mut pool.shared).unwrap());
    pool
}

async fn assert_conforms(lose: impl FnOnce(&mut Shared)) {
    let root = tempfile::tempdir().unwrap();
    let pool = Arc::new(pool_without(root.path(), lose));
    let scratch = PoolPath::root().join(b"scratch");
    pool.mkdir(&scratch, &attrs()).await.unwrap();
    let report = conformance::run(pool, scratch).await;
    assert!(report.passed(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn conforms_without_openat2() {
    assert_conforms(|shared| shared.root.has_openat2 = false).await;
}

/// Like the kernel's NFS client: no flags of `renameat2`, and no answers without a network.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn conforms_without_rename_flags_over_a_network() {
    assert_conforms(|shared| {
        shared.abilities.rename_noreplace = false;
        shared.abilities.public.renames = crate::Renames::Atomic { exchange: false };
        shared.abilities.public.conditional_put = crate::ConditionalPut::Checked;
        shared.abilities.public.local = false;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn conforms_without_xattrs_links_and_devices() {
    assert_conforms(|shared| {
        let public = &mut shared.abilities.public;
        (public.objects.xattrs, public.objects.symlinks, public.objects.hard_links, public.objects.special_files) =
            (false, false, false, false);
    })
    .await;
}

#[tokio::test]
async fn sweep_takes_what_dead_writers_left_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let pool = DirPool::open(root.path()).unwrap();
    let dead = format!(".forebay~put-{}-{}-1", boot_id(), i32::MAX);
    let elsewhere = ".forebay~put-otherone-1-1".to_owned();
    let alive = format!(".forebay~put-{}-{}-1", boot_id(), std::process::id());
    let foreign = [".forebay~other".to_owned(), ".forebay~put-odd".to_owned(), "ordinary".to_owned()];
    for name in [&dead, &elsewhere, &alive].into_iter().chain(&foreign) {
        fs::write(root.path().join(name), "x").unwrap();
    }
    // The directory of a probe.
    let probed = format!(".forebay~put-{}-{}-2", boot_id(), i32::MAX);
    fs::create_dir(root.path().join(&probed)).unwrap();
    fs::write(root.path().join(&probed).join("link"), "x").unwrap();
    let path = PoolPath::root();
    let call = pool.shared.root.call("sweep", &path);
    assert_eq!(listing::sweep(&pool.shared.root, call, Duration::from_secs(60), true).unwrap(), 0);
    for counted in [false, false, true] {
        assert_eq!(listing::sweep(&pool.shared.root, call, Duration::ZERO, counted).unwrap(), 3);
    }
    let left = |name: &String| root.path().join(name).exists();
    assert!(!left(&dead) && !left(&elsewhere) && !left(&probed) && left(&alive) && foreign.iter().all(left));
}

#[tokio::test]
async fn versions_do_not_depend_on_the_number_of_the_device() {
    let root = tempfile::tempdir().unwrap();
    let pool = DirPool::open(root.path()).unwrap();
    let made = pool.mkdir(&PoolPath::root().join(b"d"), &attrs()).await.unwrap();
    assert!(matches!(made.version, Version::Inode { dev: ROOT_DEVICE, .. }), "{:?}", made.version);
}

/// The thread of a `put` runs to its end without its caller. It must not publish what its caller has given up, because
/// a later version may be there by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_was_given_up_publishes_nothing_and_its_name_is_not_looked_at_before_it_ended() {
    let root = tempfile::tempdir().unwrap();
    let pool = DirPool::open(root.path()).unwrap();
    let path = PoolPath::root().join(b"f");
    let content = || stream::iter([Ok(crate::Piece { offset: 0, data: Bytes::from_static(b"late") })]).boxed();
    let (held, wait) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    let (shared, name) = (pool.shared.clone(), path.clone());
    let turn = std::thread::spawn(move || {
        let _turn = shared.turn(&name);
        held.0.send(()).unwrap();
        wait.1.recv().unwrap();
    });
    held.1.recv().unwrap();
    let attrs = attrs();
    let staged = async {
        while fs::read_dir(root.path()).unwrap().count() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        put = pool.put(&path, 4, content(), &attrs, &Expected::Absent) => panic!("did not wait for its turn: {put:?}"),
        () = staged => {}
    }
    let error = pool.stat(&path).await.unwrap_err();
    assert!(error.is(ErrorKind::Busy), "{error}");
    wait.0.send(()).unwrap();
    turn.join().unwrap();
    let ended = loop {
        match pool.stat(&path).await {
            Err(error) if error.is(ErrorKind::Busy) => tokio::time::sleep(Duration::from_millis(1)).await,
            answer => break answer,
        }
    };
    assert!(ended.is_err_and(|error| error.is(ErrorKind::NotFound)), "it was published");
    pool.put(&path, 4, content(), &attrs, &Expected::Absent).await.unwrap();
    assert_eq!(fs::read(root.path().join("f")).unwrap(), b"late");
}

/// One name that cannot be removed does not keep the others.
#[tokio::test]
async fn a_sweep_goes_on_after_a_name_that_it_cannot_remove() {
    let root = tempfile::tempdir().unwrap();
    let pool = DirPool::open(root.path()).unwrap();
    for number in 0..20 {
        let name = root.path().join(format!(".forebay~put-{}-{}-{number}", boot_id(), i32::MAX));
        match number {
            7 => {
                fs::create_dir(&name).unwrap();
                fs::write(name.join("of another program"), "x").unwrap();
            }
            _ => fs::write(&name, "x").unwrap(),
        }
    }
    let path = PoolPath::root();
    let call = pool.shared.root.call("sweep", &path);
    let error = listing::sweep(&pool.shared.root, call, Duration::ZERO, true).unwrap_err();
    assert!(error.is(ErrorKind::NotEmpty), "{error}");
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
}

/// The name of an unfinished file would be removed by the next sweep, together with another writer's version.
#[tokio::test]
async fn a_version_of_another_writer_that_cannot_be_put_back_gets_a_name_that_is_listed() {
    let root = tempfile::tempdir().unwrap();
    let pool = DirPool::open(root.path()).unwrap();
    let path = PoolPath::root().join(&[b'n'; 255]);
    let call = pool.shared.root.call("put", &path);
    let mut staging = TempFile::create(&pool.shared.root, call, false).unwrap();
    staging.owned = false;
    fs::write(root.path().join(std::str::from_utf8(&staging.temp).unwrap()), "theirs").unwrap();
    let attrs = attrs();
    let name = path.name().unwrap();
    let publish = Publish { call, name, attrs: &attrs, may_chown: true, rename_noreplace: true, rename_exchange: true };
    let error = publish.left_behind(&staging, Errno::BUSY).to_string();
    let listed: Vec<_> = pool.list(&PoolPath::root()).await.unwrap().try_concat().await.unwrap();
    let [entry] = &listed[..] else { panic!("{listed:?}") };
    let shown = String::from_utf8(entry.name.clone()).unwrap();
    assert!(shown.starts_with("nnn") && shown.contains("n.conflict-") && error.contains(&shown), "{shown}: {error}");
    assert_eq!(fs::read(root.path().join(&shown)).unwrap(), b"theirs");
}
