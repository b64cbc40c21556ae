//! Set-id programs, devices, capabilities and secrets.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place, attempt, attempt_with};
use forebay_tests::process;
use forebay_tests::users::U1;

/// Makes a set-user-id program of root in the pool. Returns the user id that it runs with if an ordinary user starts it
/// in the mount.
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

/// SECURITY 1: "If the file system of a directory pool forbids something (`nosuid`, `nodev`, `noexec`, `ro`), the mount
/// forbids it, too."
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

/// Returns a field of `/proc/PID/task/TID/status` for each thread of a process.
fn of_threads(pid: u32, name: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    let texts = threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
    let value = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().to_owned())
    };
    texts.filter_map(value).collect()
}

fn capabilities(pid: u32, set: &str) -> Vec<u64> {
    of_threads(pid, set).iter().map(|hex| u64::from_str_radix(hex, 16).unwrap()).collect()
}

/// Capabilities that no process of a mount needs, by their numbers in `linux/capability.h`: CAP_KILL, CAP_SETUID,
/// CAP_NET_ADMIN, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SETPCAP, CAP_SYS_BOOT, CAP_SYS_TIME, CAP_AUDIT_CONTROL.
const NOT_NEEDED: [u32; 9] = [5, 7, 12, 16, 17, 8, 22, 25, 30];
/// CAP_PERFMON and CAP_BPF, which the observer is loaded with.
const OBSERVERS: [u32; 2] = [38, 39];

/// SECURITY 12: "No process of a mount that root made can gain privileges, and no thread of such a process has a
/// capability that none of the threads needs."
#[test]
fn every_thread_of_a_mount_has_given_up_what_it_does_not_need() {
    let mount = Mount::new(Options::default());
    // A write and a flush start all threads.
    fs::write(mount.path("f"), "content").unwrap();
    mount.flush();
    let (supervisor, worker) = (mount.state().supervisor.pid, mount.worker().pid);
    for pid in [supervisor, worker] {
        for (name, wanted) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
            let found = of_threads(pid, name);
            assert!(!found.is_empty() && found.iter().all(|value| value == wanted), "{name} of {pid}: {found:?}");
        }
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            for has in capabilities(pid, set) {
                let kept: Vec<_> = NOT_NEEDED.iter().filter(|n| has >> **n & 1 == 1).collect();
                assert!(kept.is_empty(), "{set} of {pid} has {kept:?}");
            }
        }
    }
    // Once the observer is loaded, the worker cannot load another one.
    let begun = std::time::Instant::now();
    while capabilities(worker, "CapEff").iter().any(|has| OBSERVERS.iter().any(|n| has >> n & 1 == 1)) {
        assert!(begun.elapsed() < Duration::from_secs(20), "a thread keeps what the observer is loaded with");
        std::thread::sleep(Duration::from_millis(50));
    }
    // The next worker has the seccomp filter, too.
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    assert_eq!(fs::read(mount.path("f")).unwrap(), b"content");
    assert!(of_threads(mount.worker().pid, "Seccomp").iter().all(|value| value == "2"));
}

/// SECURITY 13: "Credentials in a URL are refused and shown nowhere"
#[test]
fn secrets_in_urls_are_refused_and_not_told() {
    let place = Place::new();
    for url in
        ["nfs://u:hush@localhost/x", "nfs://localhost/x?token=hush", "s3://b?endpoint=http://localhost/?sig=hush"]
    {
        let (mnt, fast) = (place.mnt(), place.fast());
        let words = [std::ffi::OsStr::new(url), mnt.as_os_str(), "--fast".as_ref(), fast.as_os_str()];
        let answer = attempt_with(&place, &Options::default(), &words);
        assert!(answer.code == Some(2) && !answer.err.contains("hush") && !answer.out.contains("hush"), "{answer}");
    }
}

/// SECURITY 14: "Names of `trusted.` attributes are shown to root alone"
#[test]
fn names_of_trusted_attributes_are_for_root_alone() {
    let mount = Mount::new(Options::default());
    fs::write(mount.path("f"), "").unwrap();
    process::sh(
        &mount.path(""),
        "setfattr -n trusted.secret -v x f && setfattr -n user.open -v x f",
        Duration::from_secs(10),
    );
    let list = "python3 -c 'import os; print(os.listxattr(\"f\"))'";
    assert!(process::sh(&mount.path(""), list, Duration::from_secs(10)).out.contains("trusted.secret"));
    let seen = U1.sh(&mount.path(""), list).ok().out;
    assert!(seen.contains("user.open") && !seen.contains("trusted"), "{seen}");
}

/// SECURITY 15: "A runtime directory in /tmp that another user created is refused"
#[test]
fn a_runtime_directory_that_another_user_took_is_refused() {
    let place = Place::new();
    place.let_users_mount();
    // No other test mounts as this user.
    let user = 4077;
    place.give_to(user);
    let taken = Path::new("/tmp").join(format!("forebay-{user}"));
    fs::create_dir(&taken).unwrap();
    chown(&taken, Some(U1.0), Some(U1.0)).unwrap();
    fs::set_permissions(&taken, fs::Permissions::from_mode(0o777)).unwrap();
    let answer = attempt(&place, &Options { user: Some(user), ..Options::default() });
    let made = fs::read_dir(&taken).unwrap().count();
    fs::remove_dir_all(&taken).unwrap();
    assert!(answer.code != Some(0) && answer.err.contains("XDG_RUNTIME_DIR"), "{answer}");
    assert_eq!(made, 0, "something was made in it");
}
