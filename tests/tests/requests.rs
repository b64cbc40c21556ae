//! Requests that few programs make: whiteouts, for an overlayfs whose upper directory is on a mount, and `statx`.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::path::Path;
use std::process::Command;

use forebay_tests::mount::{COMMAND, Mount, Options, Place};
use forebay_tests::process::{self, sh};

/// Somebody whom the machine knows by name.
const USER: u32 = 65534;

fn rename(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let (from, to) = (text(from), text(to));
    // SAFETY: both paths end with NUL and outlive the call.
    let rc = unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[track_caller]
fn is_whiteout(path: &Path) {
    let meta = fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(meta.file_type().is_char_device() && meta.rdev() == 0, "{}: {meta:?}", path.display());
}

/// SEMANTICS 56: "`RENAME_WHITEOUT` leaves a character device 0:0 under the old name, in one step"
#[test]
fn a_rename_leaves_a_whiteout_where_it_is_asked_for() {
    let mount = Mount::new(Options::default());
    fs::write(mount.pool("of the pool"), "of the pool").unwrap();
    fs::write(mount.path("made here"), "made here").unwrap();
    fs::write(mount.path("target"), "target").unwrap();
    fs::create_dir_all(mount.path("dir/below")).unwrap();
    chown(mount.path("made here"), Some(7), Some(7)).unwrap();
    let names = [("of the pool", "moved"), ("made here", "target"), ("dir", "dir moved")];
    for (from, to) in names {
        rename(&mount.path(from), &mount.path(to), libc::RENAME_WHITEOUT).unwrap();
    }
    let links = fs::metadata(mount.place.mnt()).unwrap().nlink();
    let check = |at: &dyn Fn(&str) -> std::path::PathBuf| {
        names.iter().for_each(|(from, _)| is_whiteout(&at(from)));
        assert_eq!(fs::read_to_string(at("moved")).unwrap(), "of the pool");
        assert_eq!(fs::read_to_string(at("target")).unwrap(), "made here");
        assert!(at("dir moved/below").is_dir());
    };
    check(&|name| mount.path(name));
    let refused = rename(&mount.path("moved"), &mount.path("target"), libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE);
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EEXIST));
    mount.flush();
    check(&|name| mount.pool(name));
    assert_eq!(links, fs::metadata(mount.place.pool()).unwrap().nlink(), "directories in the root");
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    check(&|name| mount.path(name));
}

/// SEMANTICS 56: "so a mount can be the upper directory of an overlayfs."
#[test]
fn a_mount_is_the_upper_directory_of_an_overlayfs() {
    let mount = Mount::new(Options::default());
    for dir in ["up", "work"] {
        fs::create_dir(mount.path(dir)).unwrap();
    }
    let lower = mount.place.at("lower");
    fs::create_dir_all(lower.join("dir")).unwrap();
    for name in ["removed", "renamed", "changed", "dir/stays", "dir/goes"] {
        fs::write(lower.join(name), name).unwrap();
    }
    let merged = mount.place.at("merged");
    fs::create_dir(&merged).unwrap();
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        mount.path("up").display(),
        mount.path("work").display()
    );
    process::run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged), COMMAND).ok();
    let script = "rm removed dir/goes; mv renamed new; echo more >> changed; echo made > made; ls . dir | sort";
    let listed = sh(&merged, script, COMMAND).out;
    process::run(Command::new("umount").arg(&merged), COMMAND).ok();
    let expected = ["changed", "dir", "dir:", "made", "new", "stays", ".:"];
    let mut listed: Vec<_> = listed.split_whitespace().collect();
    let mut expected = expected.to_vec();
    (listed.sort_unstable(), expected.sort_unstable());
    assert_eq!(listed, expected);
    mount.flush();
    for at in [mount.path("up"), mount.pool("up")] {
        ["removed", "renamed", "dir/goes"].iter().for_each(|name| is_whiteout(&at.join(name)));
        assert_eq!(fs::read_to_string(at.join("changed")).unwrap(), "changedmore\n");
        assert_eq!(fs::read_to_string(at.join("new")).unwrap(), "renamed");
    }
}

/// SEMANTICS 56: "where the pool can hold one, else it is refused with `EINVAL`"
#[test]
fn a_pool_without_devices_refuses_whiteouts() {
    // A user's own pool holds no devices.
    let place = Place::new();
    place.let_users_mount();
    place.give_to(USER);
    let allow_other = vec!["-o".into(), "allow_other".into()];
    let mount = Mount::on(place, Options { user: Some(USER), more: allow_other, ..Options::default() });
    fs::write(mount.path("f"), "f").unwrap();
    let refused = rename(&mount.path("f"), &mount.path("g"), libc::RENAME_WHITEOUT).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EINVAL), "{refused}");
    assert_eq!(fs::read_to_string(mount.path("f")).unwrap(), "f");
    assert!(!mount.path("g").exists());
    rename(&mount.path("f"), &mount.path("g"), 0).unwrap();
    mount.umount();
}

/// SEMANTICS 57: "`statx` tells no time of birth"
#[test]
fn statx_tells_all_but_the_time_of_birth() {
    let mount = Mount::new(Options::default());
    fs::write(mount.path("f"), "content").unwrap();
    let path = CString::new(mount.path("f").as_os_str().as_bytes()).unwrap();
    for flags in [libc::AT_STATX_SYNC_AS_STAT, libc::AT_STATX_FORCE_SYNC, libc::AT_STATX_DONT_SYNC] {
        // SAFETY: all bytes 0 are a value of it.
        let mut seen: libc::statx = unsafe { std::mem::zeroed() };
        let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
        // SAFETY: the path ends with NUL, and all pointers outlive the call.
        let rc = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, mask, &mut seen) };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
        assert_eq!(seen.stx_mask & mask, libc::STATX_BASIC_STATS, "{flags:x}");
        assert_eq!(seen.stx_size, 7);
    }
    let refused = fs::metadata(mount.path("f")).unwrap().created().unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::Unsupported, "{refused}");
}
