//! Resources of the daemon that one user takes from all others.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options};
use forebay_tests::users::{U1, U2};

/// How long a file that is due may take to the pool.
const ARRIVAL: Duration = Duration::from_secs(40);

fn shared(policy: &str) -> Mount {
    let mount = Mount::new(Options::policy(policy));
    fs::create_dir(mount.path("shared")).unwrap();
    fs::set_permissions(mount.path("shared"), fs::Permissions::from_mode(0o777)).unwrap();
    mount.flush();
    mount
}

fn await_in_pool(mount: &Mount, path: &str, content: &[u8]) {
    let begun = Instant::now();
    while fs::read(mount.pool(path)).ok().as_deref() != Some(content) {
        let status = mount.status();
        assert!(begun.elapsed() < ARRIVAL, "{path} did not arrive: {:?} {:?}", status.flush_errors, status.flush_stuck);
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn chattr(what: &str, dir: &Path) {
    let done = Command::new("chattr").arg(what).arg(dir).status().expect("chattr of e2fsprogs is installed");
    assert!(done.success(), "chattr {what} {}: the pool has to lie on ext4, xfs or btrfs", dir.display());
}

#[test]
fn files_of_a_manual_rule_do_not_stop_the_flush_of_others() {
    let mount = shared("[default]\nflush = \"idle:1s\"\n[[rule]]\npaths = [\"**/*.tmp\"]\nflush = \"manual\"\n");
    U1.sh(&mount.path("shared"), "mkdir mine && for n in $(seq 17000); do : >mine/$n.tmp; done").ok();
    U2.sh(&mount.path("shared"), "echo due >due").ok();
    await_in_pool(&mount, "shared/due", b"due\n");
    assert!(!mount.pool("shared/mine/1.tmp").exists());
    // A name that another rule holds for is flushed by that.
    U1.sh(&mount.path("shared/mine"), "mv 1.tmp 1").ok();
    await_in_pool(&mount, "shared/mine/1", b"");
}

///
/// SECURITY 9: "do not stop the flush of other users' files"
#[test]
fn a_directory_that_cannot_be_flushed_into_stops_nothing_else() {
    let mount = shared("[default]\nflush = \"idle:1s\"\n");
    U1.sh(&mount.path("shared"), "mkdir full").ok();
    mount.flush();
    chattr("+i", &mount.pool("shared/full"));
    U1.sh(&mount.path("shared"), "for n in $(seq 4500); do : >full/$n; done").ok();
    U2.sh(&mount.path("shared"), "echo due >due").ok();
    await_in_pool(&mount, "shared/due", b"due\n");
    let begun = Instant::now();
    while mount.status().flush_stuck.is_empty() {
        assert!(begun.elapsed() < ARRIVAL, "rounds that get nothing done are not told");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(mount.status().flush_stuck.iter().any(|why| why.contains("/shared/full/")));
    chattr("-i", &mount.pool("shared/full"));
}
