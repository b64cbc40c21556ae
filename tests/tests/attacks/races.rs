//! Objects that an attacker swaps in the pool after the flush has made an object and before it has changed its owner.

use std::ffi::CString;
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use forebay_tests::mount::{Mount, Options};
use forebay_tests::users::{U1, U2};

/// Without the daemon's check of the object that it gives away, the attacker won after some 60 to 110 tries.
const TRIES: usize = 300;

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// Changes the user of this thread, and of no other one, to the attacker.
fn become_u1() {
    let (none, keep) = (std::ptr::null::<libc::gid_t>(), libc::gid_t::MAX);
    // SAFETY: plain system calls; the functions of the C library would change all threads.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_setgroups, 0, none), 0);
        assert_eq!(libc::syscall(libc::SYS_setresgid, U1.0, U1.0, keep), 0);
        assert_eq!(libc::syscall(libc::SYS_setresuid, U1.0, U1.0, libc::uid_t::MAX), 0);
    }
}

/// Renames `victim` to `name` as soon as `name` exists. Returns whether it did.
fn swap_when_made(name: &Path, victim: &Path, stop: &AtomicBool) -> bool {
    let (name, victim) = (c(name), c(victim));
    while !stop.load(Ordering::Relaxed) {
        // SAFETY: both end with NUL and outlive the calls.
        if unsafe { libc::access(name.as_ptr(), libc::F_OK) } == 0 {
            return unsafe { libc::rename(victim.as_ptr(), name.as_ptr()) } == 0;
        }
    }
    false
}

/// The flush makes a directory or a fifo in the pool as root, and then gives it to the user who made it in the mount. A
/// user who swaps it for another user's object in between must not get that object.
///
/// SECURITY 7: "never another object that was moved to its name"
#[test]
fn what_takes_the_place_of_a_new_object_is_not_given_away() {
    let mount = Mount::new(Options::policy("[default]\nflush = \"manual\"\n"));
    let pool = mount.pool("shared");
    fs::create_dir(&pool).unwrap();
    fs::set_permissions(&pool, Permissions::from_mode(0o777)).unwrap();
    let swapped = AtomicUsize::new(0);
    for n in 0..TRIES {
        let (new, victim) = (pool.join(format!("new{n}")), pool.join(format!("victim{n}")));
        let make = if n % 2 == 0 {
            fs::create_dir(&victim).unwrap();
            "mkdir"
        } else {
            fs::write(&victim, "secret").unwrap();
            "mkfifo"
        };
        fs::set_permissions(&victim, Permissions::from_mode(0o700)).unwrap();
        chown(&victim, Some(U2.0), Some(U2.0)).unwrap();
        let inode = fs::metadata(&victim).unwrap().ino();
        U1.sh(&mount.path("shared"), &format!("{make} -m 777 new{n}")).ok();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                become_u1();
                swapped.fetch_add(usize::from(swap_when_made(&new, &victim, &stop)), Ordering::Relaxed);
            });
            // It may fail for names that the attacker took.
            let _ = mount.forebay(["flush", "--wait"], &[&mount.path("shared")]);
            stop.store(true, Ordering::Relaxed);
        });
        let mut there = [&new, &victim].into_iter().filter_map(|path| fs::symlink_metadata(path).ok());
        let victim = there.find(|meta| meta.ino() == inode).expect("the other user's object is there");
        assert_eq!((victim.uid(), victim.mode() & 0o7777), (U2.0, 0o700), "{make}, try {n}");
    }
    assert!(swapped.load(Ordering::Relaxed) > TRIES / 4, "the attacker was there: {swapped:?}");
}
