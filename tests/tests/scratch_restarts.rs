//! Scratch directories while the daemon starts again, or their file system is not mounted.

use std::fs;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place};
use forebay_tests::scratch::{commit, create, job, listed, scratch};

/// Nothing is flushed that no request asks for.
const MANUAL: &str = "[default]\nflush = \"manual\"\n";

/// SEMANTICS 71: "A scratch directory stays until it is discarded, or until the allocation of its name is over."
#[test]
fn results_of_an_ended_job_stay_when_the_daemon_starts_again() {
    let mount = Mount::new(Options::policy(MANUAL));
    let dir = create(&mount, &["--job", "j"]);
    fs::write(dir.join("f"), "x").unwrap();
    let job = |verb: &str, more: &[&str]| job(&mount, verb, "j", more);
    job("begin", &[]);
    job("start", &[]);
    // As the epilog of a job whose results could not be committed.
    job("end", &[]);
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    // A write-back of nothing would have ended long ago.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(fs::read(dir.join("f")).unwrap(), b"x");
    mount.umount();
    mount.mount();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(fs::read(dir.join("f")).unwrap(), b"x");
    job("stage-out", &["--wait", "60s"]);
    assert!(!dir.exists() && listed(&mount).is_empty());
}

#[test]
fn a_directory_whose_file_system_was_not_mounted_is_there_again() {
    let place = Place::new();
    let (second, away) = (place.at("second"), place.at("away"));
    let tier = format!("[[tier]]\nname = \"second\"\nfast = [\"{}\"]\n", second.display());
    let more = vec!["-o".into(), "allow_other".into()];
    let mount = Mount::on(place, Options { more, ..Options::policy(&format!("{MANUAL}{tier}")) });
    mount.place.let_users_pass();
    // Both devices have the same space: one of them is taken.
    let mut ids = (0..50).map(|number| format!("j{number}"));
    let id = ids.find(|id| create(&mount, &["--job", id, "--size", "1MB"]).starts_with(&second)).unwrap();
    let dir = create(&mount, &["--job", &id]);
    fs::write(dir.join("f"), "x").unwrap();
    mount.umount();
    fs::rename(&second, &away).unwrap();
    mount.mount();
    let missing = |mount: &Mount| {
        let all = listed(mount);
        let found = all.iter().find(|dir| dir["id"] == id.as_str());
        found.map(|dir| dir["is_missing"] == true)
    };
    assert_eq!(missing(&mount), Some(true));
    assert!(mount.log().contains(&format!("scratch directory {id} is not in the fast pool")));
    let refused = scratch(&mount, "create", &["--job", &id]);
    assert!(refused.code != Some(0) && refused.err.contains("mount it and start again"), "{refused}");
    mount.umount();
    let back = || {
        fs::remove_dir_all(&second).unwrap();
        fs::rename(&away, &second).unwrap();
    };
    back();
    mount.mount();
    assert_eq!((missing(&mount), fs::read(dir.join("f")).unwrap()), (Some(false), b"x".to_vec()));
    commit(&mount, &dir.join("f"), "f").ok();
    mount.flush();
    mount.umount();
    fs::rename(&second, &away).unwrap();
    mount.mount();
    scratch(&mount, "discard", &[&id]).ok();
    assert_eq!(missing(&mount), None);
    mount.umount();
    back();
    mount.mount();
    assert!(!dir.exists(), "it was given up");
    assert_eq!(fs::read(mount.path("f")).unwrap(), b"x");
}
