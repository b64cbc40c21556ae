//! A fast directory that another user prepared or can change.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};

use forebay_tests::mount::{Mount, Options, Place, attempt};
use forebay_tests::users::U1;

/// The exit code for bad arguments.
const USAGE: i32 = 2;

fn mode(path: &std::path::Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// SECURITY 2: "Forebay refuses a fast directory that another user owns, prepared or can change, also through one of
/// its parents."
#[test]
fn a_directory_that_another_user_prepared_is_refused_and_nothing_of_it_is_followed() {
    let place = Place::new();
    let target = place.at("roots-file");
    fs::write(&target, "kept").unwrap();
    fs::create_dir_all(place.fast().join("content/0")).unwrap();
    for number in 0..64 {
        symlink(&target, place.fast().join(format!("content/0/{number:x}"))).unwrap();
    }
    chown(place.fast(), Some(U1.0), Some(U1.0)).unwrap();
    attempt(&place, &Options::default()).refused(USAGE, &["belongs to another user", "--fast", "0700"]);
    // Root takes back the directory alone: its content still belongs to another user.
    chown(place.fast(), Some(0), Some(0)).unwrap();
    chown(place.fast().join("content"), Some(U1.0), Some(U1.0)).unwrap();
    attempt(&place, &Options::default()).refused(USAGE, &["content", "another user"]);
    assert_eq!(fs::read(&target).unwrap(), b"kept");
}

#[test]
fn a_directory_below_one_that_all_may_write_is_refused() {
    let place = Place::new();
    fs::set_permissions(place.at(""), fs::Permissions::from_mode(0o777)).unwrap();
    attempt(&place, &Options::default()).refused(USAGE, &["another user may change it", "--fast"]);
}

/// SECURITY 3: "The fast directory has mode 0700, and the daemon's own files in it have mode 0600"
#[test]
fn the_directory_and_its_files_are_for_the_mounting_user_alone() {
    let mount = Mount::new(Options::default());
    let fast = mount.place.fast();
    assert_eq!(mode(&fast), 0o700);
    for name in ["mount.json", "device", "boot", "lock"] {
        assert_eq!(mode(&fast.join(name)), 0o600, "{name}");
    }
}

/// SECURITY 4: "`forebay fsck` of a fast directory trusts no note in it that another user could have written"
#[test]
fn an_offline_check_believes_no_note_that_another_user_could_write() {
    let mount = Mount::new(Options::default());
    mount.umount();
    let note = mount.place.fast().join("mount.json");
    chown(&note, Some(U1.0), Some(U1.0)).unwrap();
    let answer = mount.forebay(["fsck"], &[&mount.place.fast()]);
    assert!(answer.code != Some(0) && answer.err.contains("another user could have written it"), "{answer}");
}
