//! Set-id programs, devices, capabilities and secrets.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use forebay_tests::mount::{Mount, Options};
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
