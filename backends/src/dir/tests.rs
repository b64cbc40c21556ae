//! Tests of fallbacks for file systems and kernels with fewer abilities, which cannot be tested from outside.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rustix::process::{getegid, geteuid};

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
