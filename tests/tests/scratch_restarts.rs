//! Scratch directories while the daemon starts again, or their file system is not mounted.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use forebay_system::mounts;
use forebay_tests::mount::{COMMAND, Mount, Options, Place, content};
use forebay_tests::process::{forebay, need, run, wait_until};
use forebay_tests::scratch::{commit, create, job, listed, scratch};
use forebay_tests::users::U1;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

/// Nothing is flushed that no request asks for.
const MANUAL: &str = "[default]\nflush = \"manual\"\n";

const DENIED: i32 = 7;

/// Takes the mounts below a directory away, at the latest when it is dropped.
struct LeftMounts(PathBuf);

impl LeftMounts {
    fn take_away(&self) {
        for at in mounts::list().unwrap().iter().rev().filter(|at| at.mountpoint.starts_with(&self.0)) {
            unmount(&at.mountpoint, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).unwrap();
        }
    }
}

impl Drop for LeftMounts {
    fn drop(&mut self) {
        self.take_away();
    }
}

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

/// SEMANTICS 71: "A scratch directory stays until it is discarded, or until the allocation of its name is over."
#[test]
fn the_directory_of_a_finished_allocation_is_removed_by_the_next_daemon() {
    let mount = Mount::new(Options::policy(MANUAL));
    let job = |verb: &str, more: &[&str]| job(&mount, verb, "j", more);
    job("begin", &[]);
    let dir = create(&mount, &["--job", "j"]);
    fs::write(dir.join("f"), "x").unwrap();
    job("start", &[]);
    // The end of the allocation has another second than the creation of the directory.
    std::thread::sleep(Duration::from_millis(1_100));
    // As if the daemon died before it removed the directory.
    let discarded = dir.parent().unwrap().with_file_name("discarded");
    fs::write(&discarded, "").unwrap();
    job("stage-out", &["--wait", "60s"]);
    assert!(dir.exists() && listed(&mount).len() == 1);
    fs::remove_file(&discarded).unwrap();
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    wait_until("it is removed", || listed(&mount).is_empty() && !dir.exists());
    // A later directory of this name has nothing to do with the allocation.
    let dir = create(&mount, &["--job", "j"]);
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    std::thread::sleep(Duration::from_secs(1));
    assert!(dir.exists());
}

/// A client that waits for a worker is served by the next one.
#[test]
fn a_verb_is_carried_out_by_the_next_worker_if_its_worker_dies() {
    let mount = Mount::new(Options::policy(MANUAL));
    for words in [["create", "--job", "j", "--size", "1MB"].as_slice(), &["list"]] {
        let old = mount.worker();
        let stopped = rustix::process::Pid::from_raw(old.pid as i32).unwrap();
        rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
        let mut command = Command::new(forebay());
        command.arg("scratch").args(words).arg("--mount").arg(mount.place.mnt());
        let client = std::thread::spawn(move || run(&mut command, COMMAND));
        // Its request waits in the socket.
        std::thread::sleep(Duration::from_millis(500));
        mount.kill_worker();
        client.join().unwrap().ok();
        mount.wait_for_other_worker(old);
    }
    assert_eq!(listed(&mount).len(), 1);
}

/// SEMANTICS 69: "A commit that is interrupted is finished or undone when the daemon starts again: the files are in the
/// mount or in the scratch directory, each once."
#[test]
fn a_commit_whose_worker_dies_is_finished_or_repeated_and_succeeds() {
    const FILES: usize = 3_000;
    let mount = Mount::new(Options::policy(MANUAL));
    for round in 0..5_u64 {
        let dir = create(&mount, &["--job", &format!("j{round}")]);
        fs::create_dir(dir.join("out")).unwrap();
        (0..FILES).for_each(|at| fs::write(dir.join(format!("out/{at}")), "x").unwrap());
        let old = mount.worker();
        let out = mount.path(format!("out{round}"));
        let mut command = Command::new(forebay());
        command.args(["scratch", "commit", "--merge"]).arg(dir.join("out")).arg(&out);
        let client = std::thread::spawn(move || run(&mut command, COMMAND));
        std::thread::sleep(Duration::from_millis(10 + 30 * round));
        mount.kill_worker();
        client.join().unwrap().ok();
        mount.wait_for_other_worker(old);
        assert!(!dir.join("out").exists());
        assert_eq!(fs::read_dir(&out).unwrap().count(), FILES);
    }
}

/// SEMANTICS 67: "What a commit refuses stays in the scratch directory, unchanged."
#[test]
fn a_commit_whose_directory_cannot_be_made_anew_leaves_the_files_in_their_place() {
    need(&["setfacl"]);
    let more = vec!["-o".into(), "allow_other".into()];
    let mount = Mount::new(Options { more, ..Options::policy(MANUAL) });
    mount.place.let_users_pass();
    let dir = create(&mount, &["--job", "j", "--uid", &U1.0.to_string()]);
    chown(mount.path(""), Some(U1.0), None).unwrap();
    U1.sh(&dir, "mkdir a && echo x > a/f").ok();
    // Its user still reaches the mount.
    let above = mount.place.fast().parent().unwrap().to_owned();
    let acl = format!("setfacl -m u:{}:x {}", U1.0, above.display());
    run(Command::new("sh").args(["-c", &acl]), COMMAND).ok();
    fs::set_permissions(&above, PermissionsExt::from_mode(0o750)).unwrap();
    commit(&mount, &dir, "out").refused(DENIED, &["cannot pass through it"]);
    assert_eq!(fs::read(dir.join("a/f")).unwrap(), b"x\n");
    mount.place.let_users_pass();
    commit(&mount, &dir, "out").ok();
    assert_eq!(fs::read(mount.path("out/a/f")).unwrap(), b"x\n");
}

/// The device holds what is being removed.
#[test]
fn what_is_discarded_is_counted_until_it_is_removed() {
    const BYTES: u64 = 8 << 20;
    let mount = Mount::new(Options::policy(MANUAL));
    let dir = create(&mount, &["--job", "j"]);
    let discarded = dir.parent().unwrap().with_file_name("discarded");
    let held = LeftMounts(discarded.clone());
    fs::create_dir(dir.join("a")).unwrap();
    fs::write(dir.join("a/held"), content(1, BYTES as usize)).unwrap();
    fs::write(dir.join("a/f"), content(2, BYTES as usize)).unwrap();
    let used = || mount.status().used_bytes;
    wait_until("it is counted", || used() >= 2 * BYTES);
    // A file that is a mountpoint cannot be removed.
    let _created = LeftMounts(dir.clone());
    mount_bind(dir.join("a/held"), dir.join("a/held")).unwrap();
    scratch(&mount, "discard", &[dir.to_str().unwrap()]).ok();
    assert!(used() >= BYTES && !dir.exists());
    wait_until("what is removed is free", || used() < 2 * BYTES);
    assert!(used() >= BYTES);
    let tree = fs::read_dir(&discarded).unwrap().next().unwrap().unwrap().path();
    // The next daemon finds it.
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    wait_until("it is counted again", || used() >= BYTES);
    held.take_away();
    wait_until("its bytes are free", || used() < BYTES);
    assert!(!tree.exists());
}
