//! What a worker that takes over a mount, and a mount without its records, may rely on.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use forebay_daemon::mounts;
use forebay_daemon::registry::Phase;
use forebay_tests::mount::{Mount, Options, Place, attempt, content, kill};
use forebay_tests::process::{sh, wait_until};

const SHELL: Duration = Duration::from_secs(60);
const BUSY: i32 = 6;
const MANUAL: &str = "[default]\nflush = \"manual\"\n";

/// A page of the file of open modes that has no room would end the worker by SIGBUS, and each one after it.
#[test]
fn a_full_runtime_directory_does_not_end_the_worker() {
    // More than the records of one page.
    const FILES: u64 = 300;
    let place = Place::new();
    place.let_users_mount();
    sh(&place.at(""), "mkdir -p /run/forebay && mount -t tmpfs -o size=2m,mode=755 tmpfs /run/forebay", SHELL);
    for number in 0..FILES {
        fs::write(place.pool().join(number.to_string()), content(number, 1000)).unwrap();
    }
    let mount = Mount::on(place, Options::policy(MANUAL));
    let worker = mount.worker();
    let mut full = File::create("/run/forebay/full").unwrap();
    while full.write_all(&[1; 4096]).is_ok() {}
    let open: Vec<File> = (0..FILES).map(|number| File::open(mount.path(number.to_string())).unwrap()).collect();
    for (number, file) in (0..).zip(&open) {
        let mut bytes = vec![0; 1000];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(number, 1000), "{number}");
    }
    assert!(worker.is_alive(), "{}", mount.log());
    // The space of a file that is open is not given back.
    drop((open, full));
    fs::remove_file("/run/forebay/full").unwrap();
    let again: Vec<File> = (0..FILES).map(|number| File::open(mount.path(number.to_string())).unwrap()).collect();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    for (number, file) in (0..).zip(&again) {
        let mut bytes = vec![0; 1000];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(number, 1000), "{number}");
    }
    drop(again);
    mount.umount();
}

#[test]
fn a_mount_that_was_detached_serves_its_open_files_after_the_death_of_its_worker() {
    const LEN: usize = 20 << 20;
    let place = Place::new();
    fs::write(place.pool().join("large"), content(1, LEN)).unwrap();
    let mount = Mount::on(place, Options::policy(MANUAL));
    let worker = mount.worker();
    let file = File::open(mount.path("large")).unwrap();
    let mut bytes = vec![0; LEN];
    file.read_exact_at(&mut bytes[..1000], 0).unwrap();
    sh(&mount.place.at(""), "umount --lazy mnt", SHELL);
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == content(1, LEN));
    drop(file);
    wait_until("its daemon ends", || mount.runtime().load().is_err());
}

/// Each worker says that it serves, and dies on the requests that are sent again.
#[test]
fn a_detached_mount_whose_workers_die_again_and_again_ends() {
    const LEN: usize = 20 << 20;
    let place = Place::new();
    fs::write(place.pool().join("large"), content(1, LEN)).unwrap();
    let mount = Mount::on(place, Options::policy(MANUAL));
    let file = File::open(mount.path("large")).unwrap();
    sh(&mount.place.at(""), "umount --lazy mnt", SHELL);
    wait_until("its daemon ends", || {
        let Ok(state) = mount.runtime().load() else { return true };
        state.worker.filter(|_| state.phase == Phase::Serving).into_iter().for_each(kill);
        false
    });
    assert!(file.read_exact_at(&mut vec![0; LEN], 0).is_err());
}

/// The second signal detaches a mount that is in use.
#[test]
fn a_mount_that_a_signal_has_detached_gets_no_other_worker() {
    let place = Place::new();
    fs::write(place.pool().join("file"), "file").unwrap();
    let mount = Mount::on(place, Options::policy(MANUAL));
    let file = File::open(mount.path("file")).unwrap();
    let (supervisor, worker) = (mount.state().supervisor, mount.worker());
    wait_until("it is detached", || {
        sh(&mount.place.at(""), &format!("kill -TERM {}", supervisor.pid), SHELL);
        !mounts::is_ours(&mount.place.mnt())
    });
    kill(worker);
    wait_until("its daemon ends", || mount.runtime().load().is_err());
    drop(file);
}

/// A mount whose runtime directory is gone, as after the logout of its user.
#[test]
fn a_live_mount_without_records_is_not_taken_for_a_dead_one() {
    let mount = Mount::new(Options::policy(MANUAL));
    fs::write(mount.path("file"), "file").unwrap();
    let runtime = mount.runtime();
    let (supervisor, worker) = (mount.state().supervisor, mount.worker());
    // Each directory beside it counts as one of a mount.
    let away = PathBuf::from(format!("/run/forebay-away-{}", worker.pid));
    fs::rename(runtime.dir(), &away).unwrap();
    attempt(&mount.place, &Options::policy(MANUAL)).refused(BUSY, &["already mounted"]);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"file");
    assert!(supervisor.is_alive() && worker.is_alive());
    let _ = fs::remove_dir_all(runtime.dir());
    fs::rename(&away, runtime.dir()).unwrap();
    mount.umount();
}
