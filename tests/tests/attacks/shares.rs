//! Limits on the daemon's resources that one user can take.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options, Place};
use forebay_tests::users::{U1, U2};

/// The longest that the flush of a due file may take.
const ARRIVAL: Duration = Duration::from_secs(120);

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
fn files_of_a_manual_rule_do_not_stop_the_flush_of_other_files() {
    let mount = shared("[default]\nflush = \"idle:1s\"\n[[rule]]\npaths = [\"**/*.tmp\"]\nflush = \"manual\"\n");
    U1.sh(&mount.path("shared"), "mkdir mine && for n in $(seq 17000); do : >mine/$n.tmp; done").ok();
    U2.sh(&mount.path("shared"), "echo due >due").ok();
    await_in_pool(&mount, "shared/due", b"due\n");
    assert!(!mount.pool("shared/mine/1.tmp").exists());
    // After a rename, the rule for the new name decides when the file is flushed.
    U1.sh(&mount.path("shared/mine"), "mv 1.tmp 1").ok();
    await_in_pool(&mount, "shared/mine/1", b"");
}

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

/// SECURITY 10: "The dirty files of one user leave space in the fast pool for other users"
#[test]
fn one_user_does_not_fill_the_fast_pool_for_another() {
    let options = Options { limit: Some("256M".into()), ..Options::policy("[default]\nflush = \"manual\"\n") };
    let mount = Mount::new(options);
    fs::set_permissions(mount.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let full = U1.sh(&mount.path(""), "head -c 250000000 /dev/zero >big");
    assert!(full.code != Some(0) && full.err.contains("quota"), "{full}");
    let taken = fs::metadata(mount.path("big")).unwrap().len();
    assert!((100 << 20..=192_000_000).contains(&taken), "{taken}");
    // Smaller files and `fallocate` do not get past the quota, either.
    let more = U1
        .sh(&mount.path(""), "for n in $(seq 8); do head -c 20000000 /dev/zero >more$n; done; fallocate -l 50M space");
    assert!(more.err.contains("quota"), "{more}");
    let wanted = "head -c 20000000 /dev/zero >mine && sync mine";
    U2.sh(&mount.path(""), wanted).ok();
    assert!(mount.log().contains(&format!("bytes of user {}", U1.0)), "{}", mount.log());
    // The space of removed and of flushed files is free for the user again.
    U1.sh(&mount.path(""), "rm big && head -c 20000000 /dev/zero >again").ok();
    mount.flush();
    U1.sh(&mount.path(""), "rm -f again more*; head -c 150000000 /dev/zero >big").ok();
}

/// SECURITY 10: "the file is written through to the pool"
#[test]
fn a_file_that_is_larger_than_the_share_of_its_user_goes_to_the_pool() {
    const BYTES: u64 = 250_000_000;
    let options = Options { limit: Some("256M".into()), ..Options::policy("[default]\nflush = \"idle:1s\"\n") };
    let mount = Mount::new(options);
    fs::set_permissions(mount.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    U1.sh(&mount.path(""), &format!("yes | head -c {BYTES} >big && sync big")).ok();
    let there = fs::read(mount.pool("big")).unwrap();
    assert!(there.len() as u64 == BYTES && there.chunks(2).all(|pair| pair == b"y\n"), "{}", there.len());
    assert!(mount.status().used_bytes < 192_000_000);
    U2.sh(&mount.path(""), "head -c 20000000 /dev/zero >mine && sync mine").ok();
}

/// A program that opens files, prints how many it opened and the errno of the first failure, and closes them when its
/// input ends.
const HOLD: &str = "
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held, why = [], 0
try:
    for n in range(int(sys.argv[1])):
        held.append(os.open(f'{n}', os.O_RDWR | os.O_CREAT, 0o666))
except OSError as error:
    why = error.errno
print(len(held), why, flush=True)
sys.stdin.read()
";

/// Opens files in a directory as a user, until `wanted` files are open or an open fails. Returns the process, the
/// number of open files and the errno.
fn hold(user: forebay_tests::users::User, dir: &Path, wanted: u32) -> (std::process::Child, u32, i32) {
    let mut command = user.command("python3", dir);
    command.args(["-c", HOLD, &wanted.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = forebay_tests::process::spawn(&mut command).expect("python3 is installed");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut words = line.split_whitespace();
    let held = words.next().and_then(|word| word.parse().ok()).expect("it says how many");
    (child, held, words.next().and_then(|word| word.parse().ok()).unwrap())
}

fn let_go(mut child: std::process::Child) {
    drop(child.stdin.take());
    assert!(forebay_tests::process::wait(&mut child, Duration::from_secs(20)).is_some());
}

/// SECURITY 11: "The open files of one user leave descriptors for other users and for the daemon"
#[test]
fn one_user_does_not_take_all_descriptors() {
    let mount = Mount::new(Options { descriptors: Some(1024), ..Options::default() });
    for (dir, user) in [("a", U1), ("b", U2)] {
        fs::create_dir(mount.path(dir)).unwrap();
        chown(mount.path(dir), Some(user.0), Some(user.0)).unwrap();
    }
    let (first, held, errno) = hold(U1, &mount.path("a"), 900);
    assert_eq!((held, errno), (384, libc::EMFILE));
    let (second, others, errno) = hold(U2, &mount.path("b"), 60);
    assert_eq!((others, errno), (60, 0));
    assert_eq!(mount.status().open_files, 384 + 60);
    // After the close, the user may open files again.
    let_go(first);
    let (first, held, _) = hold(U1, &mount.path("a"), 200);
    assert_eq!(held, 200);
    let_go(first);
    let_go(second);
    mount.flush();
}

/// A program needs at least about a hundred files. If the daemon has too few descriptors for that, the mount logs the
/// limit of a user.
#[test]
fn few_descriptors_are_for_programs_first_and_their_cost_is_told() {
    let mount = Mount::new(Options { descriptors: Some(256), ..Options::default() });
    fs::set_permissions(mount.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(mount.log().contains("96 of one user"), "{}", mount.log());
    let (child, held, errno) = hold(U1, &mount.path(""), 96);
    assert_eq!((held, errno), (96, 0));
    U2.sh(&mount.path(""), "for n in $(seq 300); do echo $n >u2-$n || exit 1; done; cat u2-* >/dev/null").ok();
    mount.flush();
    let_go(child);
    assert_eq!(fs::read(mount.pool("u2-300")).unwrap(), b"300\n");
}

/// SECURITY 17: "The extended attributes of one file take at most 128 KiB, also if the pool has more of them"
#[test]
fn extended_attributes_of_one_file_take_no_more_than_their_bound() {
    let place = Place::new();
    // XFS takes any number of values of 64 KiB.
    place.small_disk("pool", "xfs", 300);
    let mount = Mount::on(place, Options::default());
    fs::set_permissions(mount.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let set =
        |n: usize, file: &str| format!("setfattr -n user.{n} -v 0s$(head -c 60000 /dev/zero | base64 -w0) {file}");
    let set = |range: std::ops::Range<usize>, file: &str| range.map(|n| set(n, file)).collect::<Vec<_>>().join(" && ");
    U1.sh(&mount.path(""), &format!("touch mine && {}", set(0..2, "mine"))).ok();
    let refused = U1.sh(&mount.path(""), &set(2..3, "mine"));
    assert!(refused.code != Some(0) && refused.err.contains("No space left"), "{refused}");
    mount.flush();
    // The user sets more attributes in the pool itself.
    U1.sh(&mount.place.pool(), &format!("touch large && {}", set(0..20, "large"))).ok();
    let before = mount.rss_bytes();
    let refused = U1.sh(&mount.path(""), "cat large && getfattr -d large");
    assert!(refused.code != Some(0) && refused.err.contains("too long"), "{refused}");
    assert!(mount.rss_bytes() < before + (16 << 20), "{before}, then {}", mount.rss_bytes());
    U1.sh(&mount.path(""), "rm large").ok();
    mount.flush();
    assert!(!mount.pool("large").exists() && mount.pool("mine").exists());
}
