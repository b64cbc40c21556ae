//! A mount right after an unmount, and the time of the pool's root, which a mount does not change.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;

use forebay_tests::mount::{Mount, Options, attempt};

fn umount(mount: &Mount) {
    let path = CString::new(mount.place.mnt().as_os_str().as_bytes()).unwrap();
    // SAFETY: the path ends with NUL and outlives the call.
    let rc = unsafe { libc::umount2(path.as_ptr(), 0) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// `umount(8)` returns before the daemon has ended. A mount right after it waits for that end, as `forebay umount`
/// does.
#[test]
fn a_mount_right_after_umount_waits_for_the_last_daemon() {
    let options = Options::policy("[default]\nflush = \"manual\"\n");
    let mount = Mount::new(options.clone());
    for turn in 0..5 {
        for file in 0..200 {
            std::fs::write(mount.path(format!("{turn}-{file}")), "content").unwrap();
        }
        umount(&mount);
        attempt(&mount.place, &options).ok();
    }
    // The same fast pool serves another mountpoint.
    umount(&mount);
    let other = mount.place.at("other");
    std::fs::create_dir(&other).unwrap();
    let (pool, fast) = (mount.place.pool(), mount.place.fast());
    let words = [pool.as_os_str(), other.as_os_str(), "--fast".as_ref(), fast.as_os_str()];
    forebay_tests::mount::attempt_with(&mount.place, &options, &words).ok();
    assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1000);
    mount.forebay(["umount"], &[&other]).ok();
}

/// The daemon makes and removes files in the pool's root to find out what the file system can do. Backups and builds
/// compare the time of the root, so it stays.
#[test]
fn a_mount_leaves_the_time_of_the_pools_root_as_it_was() {
    let place = forebay_tests::mount::Place::new();
    let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_789);
    std::fs::File::open(place.pool()).unwrap().set_modified(time).unwrap();
    let mount = Mount::on(place, Options::default());
    mount.umount();
    assert_eq!(std::fs::metadata(mount.place.pool()).unwrap().modified().unwrap(), time);
}
