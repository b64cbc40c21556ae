//! Set-id programs, devices, capabilities and secrets.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place};
use forebay_tests::process;
use forebay_tests::users::U1;

/// Makes a set-id program of root's in the pool, and says as whom it runs for an ordinary user of the mount.
fn runs_as(options: Options) -> String {
    let mount = Mount::new(options);
    fs::copy("/usr/bin/id", mount.pool("id")).unwrap();
    fs::set_permissions(mount.pool("id"), fs::Permissions::from_mode(0o4755)).unwrap();
    U1.sh(Path::new("/"), &format!("{} -u", mount.path("id").display())).ok().out.trim().to_owned()
}

/// SECURITY 1: "A mount is `nosuid` and `nodev` from the mount(2) call on"
#[test]
fn a_set_id_program_in_the_pool_gives_nothing_unless_the_mount_says_suid() {
    assert_eq!(runs_as(Options::default()), U1.0.to_string());
    let suid = Options { more: vec!["-o".into(), "suid".into()], ..Options::default() };
    assert_eq!(runs_as(suid), "0");
}

/// SECURITY 1: "What the file system of a directory pool forbids (`nosuid`, `nodev`, `noexec`, `ro`), the mount forbids, too."
#[test]
fn a_mount_forbids_what_the_file_system_of_its_pool_forbids() {
    let place = Place::new();
    place.small_disk("pool", "tmpfs", 16);
    process::sh(&place.at(""), "mount -o remount,noexec pool", Duration::from_secs(10));
    let mount = Mount::on(place, Options::default());
    let options = process::sh(&mount.place.at(""), "findmnt -n -o OPTIONS mnt", Duration::from_secs(10)).out;
    for option in ["nosuid", "nodev", "noexec"] {
        assert!(options.trim().split(',').any(|o| o == option), "{option} is not among {options}");
    }
}
