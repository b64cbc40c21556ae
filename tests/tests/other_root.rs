//! A pool directory that is another one than before: its file system is not mounted, or it was replaced.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::dir::DirPool;
use forebay_engine::{Ino, Options as EngineOptions, OtherRoot, Overlay};
use forebay_tests::engine::{Fixture, flushed, opened, read, write};
use forebay_tests::mount::{Mount, Options, Place, attempt};
use forebay_tests::process::{sh, wait_until};

const SHELL: Duration = Duration::from_secs(60);
const POOL_UNAVAILABLE: i32 = 4;

fn manual() -> Options {
    Options::policy("[default]\nflush = \"manual\"\n")
}

/// Mounts a place whose pool is a mount of the directory `store`.
fn over_a_mounted_pool() -> Mount {
    let place = Place::new();
    sh(&place.at(""), "mkdir store && mount --bind store pool", SHELL);
    Mount::on(place, manual())
}

fn unmount_pool(place: &Place) {
    sh(&place.at(""), "umount --lazy pool", SHELL);
    assert_eq!(names(&place.pool()), 0, "nothing is below the mount point");
}

fn mount_pool(place: &Place) {
    sh(&place.at(""), "mount --bind store pool", SHELL);
}

/// The number of names, without those of the pool's own temporary files.
fn names(dir: &Path) -> usize {
    let is_own = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b".forebay~");
    fs::read_dir(dir).unwrap().filter(|entry| !is_own(&entry.as_ref().unwrap().file_name())).count()
}

fn write_synced(path: &Path, content: &str) {
    fs::write(path, content).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

/// SEMANTICS 120: "the mount is refused, and the error names the remedy"
#[test]
fn an_empty_mount_point_is_not_taken_for_the_pool() {
    let mount = over_a_mounted_pool();
    fs::write(mount.path("clean"), "clean").unwrap();
    mount.flush();
    write_synced(&mount.path("dirty"), "dirty");
    mount.umount();
    let place = &mount.place;
    unmount_pool(place);
    let pool = place.pool();
    let remedies = ["another directory", pool.to_str().unwrap(), "mount the file system", "fsck --new-root"];
    attempt(place, &manual()).refused(POOL_UNAVAILABLE, &remedies);
    assert_eq!(names(&pool), 0, "written to what is not the pool");
    mount_pool(place);
    mount.mount();
    assert_eq!(fs::read(mount.path("clean")).unwrap(), b"clean");
    assert!(mount.status().dirty_files > 0);
    mount.flush();
    assert_eq!(fs::read(place.at("store/dirty")).unwrap(), b"dirty");
    assert_eq!(names(&place.at("store")), 2);
}

/// SEMANTICS 120: "A worker that takes over a mount starts when the directory is back; until then, programs wait."
#[test]
fn a_new_worker_does_not_take_an_empty_mount_point_for_the_pool() {
    let mount = over_a_mounted_pool();
    fs::write(mount.path("clean"), "clean").unwrap();
    mount.flush();
    write_synced(&mount.path("dirty"), "dirty");
    let old = mount.worker();
    unmount_pool(&mount.place);
    mount.kill_worker();
    wait_until("the refusal", || mount.log().contains("is another directory than before"));
    assert_eq!(names(&mount.place.pool()), 0, "written to what is not the pool");
    mount_pool(&mount.place);
    mount.wait_for_other_worker(old);
    assert_eq!(fs::read_dir(mount.place.mnt()).unwrap().count(), 2);
    assert_eq!(fs::read(mount.path("clean")).unwrap(), b"clean");
    mount.flush();
    assert_eq!(fs::read(mount.place.at("store/dirty")).unwrap(), b"dirty");
}

/// SEMANTICS 120: "`forebay fsck --new-root` accepts a directory that was replaced on purpose."
#[test]
fn a_pool_that_was_restored_from_a_backup_is_accepted_by_fsck() {
    let mount = Mount::manual();
    fs::write(mount.path("clean"), "clean").unwrap();
    mount.flush();
    write_synced(&mount.path("dirty"), "dirty");
    let fast = mount.place.fast();
    mount.forebay(["fsck", "--new-root"], &[&fast]).refused(2, &["no daemon has open", "unmount"]);
    mount.umount();
    sh(&mount.place.at(""), "cp -a pool backup && mv pool old && mv backup pool", SHELL);
    attempt(&mount.place, &manual()).refused(POOL_UNAVAILABLE, &["fsck --new-root"]);
    mount.forebay(["fsck"], &[&fast]).refused(POOL_UNAVAILABLE, &["fsck --new-root"]);
    mount.forebay(["fsck", "--new-root"], &[&fast]).ok();
    fs::write(mount.pool("restored"), "restored").unwrap();
    mount.mount();
    assert_eq!(fs::read_dir(mount.place.mnt()).unwrap().count(), 3);
    for name in ["clean", "dirty", "restored"] {
        assert_eq!(fs::read(mount.path(name)).unwrap(), name.as_bytes());
    }
    mount.flush();
    assert_eq!(fs::read(mount.pool("dirty")).unwrap(), b"dirty");
    mount.umount();
    mount.mount();
}

/// If the pool could not be asked when the overlay was opened, no listing of another root counts.
#[tokio::test(flavor = "multi_thread")]
async fn the_listing_of_another_root_does_not_count() {
    let fixture = Fixture::new();
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let pool = place.path().join("pool");
    fs::create_dir(&pool).unwrap();
    let options =
        |other_root| EngineOptions { pool: Arc::new(DirPool::open(&pool).unwrap()), other_root, ..fixture.options() };
    let overlay = opened(|| options(OtherRoot::Refuse)).await;
    write(&overlay, "a", "content").await.unwrap();
    flushed(&overlay).await;
    overlay.shutdown().await.unwrap();
    drop(overlay);
    let away = place.path().join("away");
    fs::rename(&pool, &away).unwrap();
    fs::create_dir(&pool).unwrap();
    let overlay = opened(|| options(OtherRoot::CompareLater)).await;
    // Known names or an error, but not an empty directory.
    if let Ok(listed) = overlay.read_dir(Ino::ROOT).await {
        assert_eq!(listed.entries.len(), 1);
    }
    overlay.shutdown().await.unwrap();
    drop(overlay);
    fs::remove_dir(&pool).unwrap();
    fs::rename(&away, &pool).unwrap();
    let overlay: Overlay = opened(|| options(OtherRoot::Refuse)).await;
    // Counted by the scan after the start.
    for _ in 0..1000 {
        if overlay.status().await.resident_files == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(overlay.status().await.resident_files, 1, "the content was forgotten");
    assert_eq!(read(&overlay, "a").await.unwrap(), "content");
}
