//! Quotas: what users and groups may hold of the fast pool that eviction cannot free.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use forebay_api::operator::StageRequest;
use forebay_api::quotas::{QuotaKind, QuotaNumber, QuotaReport, QuotaUse, QuotaVerb};
use forebay_engine::{Caller, Change, Ino, Options as EngineOptions, Overlay, Policy, summary};
use forebay_tests::engine::{Fixture, RDWR, evict, find, flush, opened, rename};
use forebay_tests::mount::{Mount, Options};
use forebay_tests::process::{Answer, run, wait_until};
use forebay_tests::settings::seed;
use forebay_tests::users::{U1, U2, User};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const MIB: u64 = 1 << 20;

/// A mount whose root any user may change.
fn shared(policy: &str) -> Mount {
    let mount = Mount::new(Options { limit: Some("1G".into()), ..Options::policy(policy) });
    fs::set_permissions(mount.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    mount
}

fn report(mount: &Mount, verb: &str) -> QuotaReport {
    let answer = mount.forebay(["--json", "quota", verb], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

/// Returns what a user or group holds. The counts must be right.
fn of(mount: &Mount, kind: QuotaKind, id: u32) -> Option<QuotaUse> {
    let report = report(mount, "check");
    assert!(report.differences.is_empty(), "{report:?}");
    report.quotas.into_iter().find(|quota| (quota.kind, quota.id) == (kind, id))
}

fn of_user(mount: &Mount, user: User) -> QuotaUse {
    let nothing = QuotaUse {
        kind: QuotaKind::User,
        id: user.0,
        bytes: QuotaNumber::default(),
        files: QuotaNumber::default(),
        staged_bytes: QuotaNumber::default(),
    };
    of(mount, QuotaKind::User, user.0).unwrap_or(nothing)
}

fn apply(mount: &Mount, text: &str) {
    let file = mount.place.at("applied.toml");
    fs::write(&file, text).unwrap();
    mount.forebay(["policy", "apply"], &[&file, &mount.place.mnt()]).ok();
}

/// Writes a file of so many MiB as a user.
fn write(user: User, mount: &Mount, name: &str, mib: u64) -> Answer {
    user.sh(&mount.path(""), &format!("head -c {} /dev/zero >{name}", mib * MIB))
}

const MANUAL: &str = "[default]\nflush = \"manual\"\n";

/// SEMANTICS 114: "No write takes what the files of a user hold above the hard limit."
#[test]
fn a_user_holds_no_more_than_its_quota_and_other_users_do_not_notice() {
    let mount = shared(&format!("{MANUAL}[[quota]]\nuser = \"*\"\nbytes = \"20MiB\"\n"));
    write(U1, &mount, "a", 15).ok();
    let refused = write(U1, &mount, "b", 10);
    assert!(refused.err.contains("quota"), "{refused}");
    let held = of_user(&mount, U1);
    assert!(held.bytes.used > 15 * MIB && held.bytes.used <= 20 * MIB, "{held:?}");
    assert_eq!((held.bytes.hard, held.files.used, held.files.hard), (Some(20 * MIB), 2, None));
    assert!(mount.log().contains(&format!("user {} has", U1.0)), "{}", mount.log());
    let shown = mount.forebay(["quota", "show"], &[&mount.place.mnt()]).ok();
    assert!(shown.out.contains(&format!("user {}", U1.0)) && shown.out.contains("20.0 MiB"), "{shown}");
    // `fallocate` and a longer file need room, too; a hole needs none.
    for (more, fits) in
        [("fallocate -l 10M c", false), ("truncate -s 100M d", true), ("rm a && fallocate -l 10M c", true)]
    {
        let answer = U1.sh(&mount.path(""), more);
        assert_eq!(answer.code == Some(0), fits, "{more}: {answer}");
    }
    write(U2, &mount, "other", 19).ok();
    // Root has no quota, and neither have its files.
    fs::write(mount.path("of-root"), vec![1; 30 << 20]).unwrap();
    // What the pool has is not counted.
    mount.flush();
    assert_eq!((of_user(&mount, U1).bytes.used, of_user(&mount, U1).files.used), (0, 0));
    write(U1, &mount, "again", 19).ok();
}

/// SEMANTICS 114: "A write that does not fit waits while the background flush makes room."
#[test]
fn a_copy_of_many_files_waits_for_the_flush_and_a_large_file_goes_to_the_pool() {
    let mount = shared("[default]\nflush = \"idle:1h\"\n[[quota]]\nuser = \"*\"\nbytes = \"20MiB\"\n");
    U1.sh(&mount.path(""), "for n in $(seq 20); do head -c 5000000 /dev/zero >f$n || exit 1; done").ok();
    assert!(of_user(&mount, U1).bytes.used <= 20 * MIB);
    // One that is larger than the quota is written through.
    U1.sh(&mount.path(""), "rm f* && yes | head -c 60000000 >big && sync big").ok();
    let there = fs::read(mount.pool("big")).unwrap();
    assert!(there.len() == 60_000_000 && there.chunks(2).all(|pair| pair == b"y\n"), "{}", there.len());
    assert!(of_user(&mount, U1).bytes.used <= 20 * MIB);
}

/// SEMANTICS 115: "The counts are those of the catalog, to the byte, also after a restart and a crash"
#[test]
fn counts_survive_kills_and_restarts() {
    let mount = shared(&format!("{MANUAL}[[quota]]\nuser = \"*\"\nbytes = \"20MiB\"\nfiles = 3\n"));
    write(U1, &mount, "a", 8).ok();
    write(U1, &mount, "b", 8).ok();
    let before = of_user(&mount, U1);
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    assert_eq!(of_user(&mount, U1), before);
    assert!(write(U1, &mount, "c", 8).err.contains("quota"));
    mount.umount();
    mount.mount();
    let more = U1.sh(&mount.path(""), "head -c 1000000 /dev/zero >>c && : >e");
    assert!(more.err.contains("quota"), "the fourth file: {more}");
    U1.sh(&mount.path(""), "rm c && : >e").ok();
    let after = of_user(&mount, U1);
    assert_eq!((after.bytes, after.files.used), (before.bytes, 3));
}

/// SEMANTICS 114: "A quota of files refuses to create one more, and to change one more that the pool has."
#[test]
fn a_quota_of_files_counts_those_that_the_pool_lacks() {
    let mount = shared(&format!("{MANUAL}[[quota]]\nuser = \"*\"\nfiles = 5\n"));
    let made = U1.sh(&mount.path(""), "mkdir d && for n in $(seq 5); do : >d/$n || exit 9; done; : >d/6");
    assert!(made.code == Some(1) && made.err.contains("quota"), "{made}");
    assert!(!mount.path("d/6").exists());
    // Links and other names of a file are not files.
    U1.sh(&mount.path(""), "ln d/1 d/link && mv d/2 d/two && ln -s d/3 d/symlink && mkdir d/e").ok();
    assert_eq!(of_user(&mount, U1).files.used, 5);
    mount.flush();
    let made = U1.sh(&mount.path(""), "cd d; for n in 1 two 3 4 5; do echo x >>$n || exit 9; done; : >6");
    assert!(made.code == Some(1) && made.err.contains("quota"), "{made}");
    let other = U1.sh(&mount.path(""), "rm d/1 d/3 && : >d/6; echo x >>d/link");
    assert!(other.code == Some(0), "{other}");
}

/// Emptying a file of the pool makes it one that the pool lacks.
#[test]
fn a_quota_of_files_holds_for_files_that_are_emptied() {
    let mount = shared(&format!("{MANUAL}[[quota]]\nuser = \"*\"\nfiles = 3\n"));
    for round in 0..2 {
        U1.sh(&mount.path(""), &format!("for n in 1 2 3; do echo x >{round}-$n || exit 9; done")).ok();
        mount.flush();
    }
    let emptied = U1.sh(&mount.path(""), ": >0-1; : >0-2; truncate -s 0 0-3; : >1-1");
    assert!(emptied.code == Some(1) && emptied.err.contains("quota"), "{emptied}");
    assert_eq!((of_user(&mount, U1).files.used, fs::read(mount.path("1-1")).unwrap().len()), (3, 2));
}

/// Blocks behind the end of a file do not make its holes free.
#[test]
fn holes_cannot_be_filled_past_a_quota() {
    let mount = shared(&format!("{MANUAL}[[quota]]\nuser = \"*\"\nbytes = \"8MiB\"\n"));
    let filled = U1.sh(
        &mount.path(""),
        "fallocate -n -o 1G -l 3M f; for mib in 2 4 6 8 10 12; do truncate -s ${mib}M f
         dd if=/dev/zero of=f bs=1M count=$mib conv=notrunc status=none || exit 9; done",
    );
    assert!(filled.code == Some(9) && filled.err.contains("quota"), "{filled}");
    assert!(of_user(&mount, U1).bytes.used <= 8 * MIB);
}

/// A file that is opened at the limit is written through, as one that reaches it while it is open.
#[test]
fn a_file_of_the_pool_can_be_changed_at_the_limit() {
    let mount = shared("[default]\nflush = \"idle:1h\"\n[[quota]]\nuser = \"*\"\nbytes = \"8MiB\"\n");
    U1.sh(&mount.path(""), "yes | head -c 3000000 >old && yes | head -c 20000000 >large").ok();
    mount.flush();
    // A program that writes keeps the room.
    let changed = "exec 3>held; head -c 8000000 /dev/zero >&3; for f in old large; do printf new | \
                   dd of=$f bs=3 seek=1 conv=notrunc status=none || exit 9; done";
    U1.sh(&mount.path(""), changed).ok();
    mount.flush();
    for (name, bytes) in [("old", 3_000_000), ("large", 20_000_000)] {
        let there = fs::read(mount.pool(name)).unwrap();
        assert!(there.len() == bytes && there.starts_with(b"y\nynewy\ny"), "{name}: {:?}", &there[..12]);
    }
}

/// A file that is read past the daemon cannot be opened at the limit so that stores through a mapping would be lost.
#[test]
fn stores_through_a_mapping_at_the_limit_are_refused_or_kept() {
    const STORE: &str = "
import mmap, os
reader = os.open('old', os.O_RDONLY)
os.read(reader, 10)
try:
    writer = os.open('old', os.O_RDWR)
    mapped = mmap.mmap(writer, 4096)
    mapped[0:3] = b'new'
    mapped.flush()
    print('stored')
except OSError as error:
    print(error.errno)
";
    for flush in ["manual", "idle:1h"] {
        let quota = "[[quota]]\nuser = \"*\"\nfiles = 1\n";
        let mount = shared(&format!("[default]\nflush = \"{flush}\"\n{quota}"));
        U1.sh(&mount.path(""), "yes | head -c 5000 >old").ok();
        mount.flush();
        U1.sh(&mount.path(""), "cat old >/dev/null").ok();
        // The one file that the user may have; it is open, so that the flush does not make room.
        let held = "import subprocess, sys\nheld = open('held', 'w')\nheld.write('x')\nheld.flush()\nexec(sys.argv[1])";
        let mut command = U1.command("python3", &mount.path(""));
        let answer = run(command.args(["-c", held, STORE]), Duration::from_secs(60)).ok();
        mount.flush();
        mount.forebay(["evict"], &[&mount.path("old")]).ok();
        let there = fs::read(mount.pool("old")).unwrap();
        match answer.out.trim() {
            "stored" => assert_eq!(there[..4], *b"new\n", "{flush}"),
            errno => assert_eq!((errno, &there[..4]), ("122", &b"y\ny\n"[..]), "{flush}"),
        }
    }
}

/// SEMANTICS 114: "files of a group count for its quota, whoever owns them"
#[test]
fn groups_have_quotas_for_projects_in_setgid_directories() {
    const PROJECT: u32 = 4100;
    let mount = shared(&format!("{MANUAL}[[quota]]\ngroup = \"{PROJECT}\"\nbytes = \"20MiB\"\n"));
    fs::create_dir(mount.path("project")).unwrap();
    chown(mount.path("project"), None, Some(PROJECT)).unwrap();
    fs::set_permissions(mount.path("project"), fs::Permissions::from_mode(0o2777)).unwrap();
    write(U1, &mount, "project/a", 12).ok();
    assert_eq!(fs::metadata(mount.path("project/a")).unwrap().gid(), PROJECT);
    assert!(write(U2, &mount, "project/b", 12).err.contains("quota"));
    write(U2, &mount, "elsewhere", 30).ok();
    let group = of(&mount, QuotaKind::Group, PROJECT).unwrap();
    assert!(group.bytes.used > 12 * MIB && group.bytes.used <= 20 * MIB, "{group:?}");
    // A member gives a file to the group: that is no way around the quota. Root may.
    let (user, project) = (U2.0.to_string(), PROJECT.to_string());
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--groups", &project, "--inh-caps", "-all"]);
    command.args(["chgrp", &project, "elsewhere"]).current_dir(mount.path(""));
    let refused = run(&mut command, Duration::from_secs(60));
    assert!(refused.err.contains("quota"), "{refused}");
    assert_eq!(fs::metadata(mount.path("elsewhere")).unwrap().gid(), U2.0);
    chown(mount.path("elsewhere"), None, Some(PROJECT)).unwrap();
    assert!(of(&mount, QuotaKind::Group, PROJECT).unwrap().bytes.used > 30 * MIB);
}

/// Returns the bytes and files that `df` shows: all of them, and those that are left.
fn shown_space(path: &Path) -> [u64; 4] {
    let space = rustix::fs::statvfs(path).unwrap();
    [space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize, space.f_files, space.f_ffree]
}

#[test]
fn the_space_of_a_project_is_what_its_quota_leaves() {
    const PROJECT: u32 = 4101;
    let quota = format!("[[quota]]\ngroup = \"{PROJECT}\"\nbytes = \"20MiB\"\nfiles = 10\n");
    let mount = shared(&format!("{MANUAL}{quota}"));
    let of_pool = shown_space(&mount.path(""));
    assert!(of_pool[0] > 100 * MIB && of_pool[2] > 10);
    fs::create_dir(mount.path("project")).unwrap();
    chown(mount.path("project"), None, Some(PROJECT)).unwrap();
    assert_eq!(shown_space(&mount.path("project"))[0], of_pool[0], "new files have other groups");
    fs::set_permissions(mount.path("project"), fs::Permissions::from_mode(0o2777)).unwrap();
    assert_eq!(shown_space(&mount.path("project")), [20 * MIB, 20 * MIB, 10, 10]);
    write(U1, &mount, "project/a", 12).ok();
    for path in ["project", "project/a"] {
        let left = shown_space(&mount.path(path));
        assert!(left[0] == 20 * MIB && left[1] <= 8 * MIB && left[1] >= 7 * MIB, "{left:?}");
        assert_eq!(left[2..], [10, 9]);
    }
    assert_eq!(shown_space(&mount.path(""))[0], of_pool[0]);
    // Where the flush makes room, more can be written than the quota leaves.
    apply(&mount, &format!("[default]\nflush = \"idle:1h\"\n{quota}"));
    assert_eq!(shown_space(&mount.path("project"))[0], of_pool[0]);
}

/// SEMANTICS 116: "A soft limit may be exceeded for the time of `grace`; after that it is a hard one until the use is
/// below it again."
#[test]
fn a_soft_limit_is_hard_after_its_grace_also_over_a_restart() {
    let quota = "[[quota]]\nuser = \"*\"\nsoft-bytes = \"10MiB\"\nbytes = \"40MiB\"\n";
    let mount = shared(&format!("{MANUAL}{quota}grace = \"1h\"\n"));
    write(U1, &mount, "a", 20).ok();
    let held = of_user(&mount, U1);
    assert!(held.bytes.grace_left_secs.is_some_and(|left| (3500..=3600).contains(&left)), "{held:?}");
    // The begin is saved within a second or two.
    thread::sleep(Duration::from_secs(3));
    mount.umount();
    mount.mount();
    let left = of_user(&mount, U1).bytes.grace_left_secs.unwrap();
    assert!(left <= 3598, "{left}");
    apply(&mount, &format!("{MANUAL}{quota}grace = \"2s\"\n"));
    wait_until("the grace is over", || of_user(&mount, U1).bytes.grace_left_secs == Some(0));
    let refused = write(U1, &mount, "b", 1);
    assert!(refused.err.contains("quota"), "{refused}");
    U1.sh(&mount.path(""), "rm a && head -c 5000000 /dev/zero >c").ok();
    assert_eq!(of_user(&mount, U1).bytes.grace_left_secs, None);
}

/// SEMANTICS 115: "`policy apply` changes quotas at once."
#[test]
fn another_policy_has_other_quotas_and_what_is_there_counts() {
    let mount = shared(MANUAL);
    write(U1, &mount, "a", 15).ok();
    let none = mount.forebay(["quota", "show"], &[&mount.place.mnt()]).ok();
    assert!(none.out.contains("there are no quotas"), "{none}");
    apply(&mount, &format!("{MANUAL}[[quota]]\nuser = \"{}\"\nbytes = \"20MiB\"\n", U1.0));
    assert!(write(U1, &mount, "b", 15).err.contains("quota"));
    write(U2, &mount, "c", 30).ok();
    apply(&mount, &format!("{MANUAL}[[quota]]\nuser = \"{}\"\nbytes = \"50MiB\"\n", U1.0));
    write(U1, &mount, "b", 15).ok();
    assert!(of_user(&mount, U1).bytes.used >= 30 * MIB);
    apply(&mount, MANUAL);
    write(U1, &mount, "d", 100).ok();
}

/// SEMANTICS 117: "The limit of a scratch directory counts from its creation on, and one that does not fit is refused with
/// the numbers."
#[test]
fn a_scratch_directory_that_would_break_a_quota_is_refused_before_it_starts() {
    let mount = shared(&format!("{MANUAL}[[quota]]\nuser = \"{}\"\nbytes = \"20MiB\"\n", U1.0));
    write(U1, &mount, "a", 8).ok();
    let user = U1.0.to_string();
    let create = |id: &str, size: &str| {
        let words = ["scratch", "create", "--job", id, "--size", size, "--uid", &user, "--mount"];
        mount.forebay(words, &[&mount.place.mnt()])
    };
    let refused = create("one", "16M");
    assert!(refused.code != Some(0) && refused.err.contains(&format!("user {user} has")), "{refused}");
    let made = create("two", "10M").ok();
    assert!(of_user(&mount, U1).bytes.used >= 18_000_000);
    mount.umount();
    mount.mount();
    assert!(of_user(&mount, U1).bytes.used >= 18_000_000, "it counts after a restart");
    assert!(write(U1, &mount, "b", 5).err.contains("quota"));
    mount.forebay(["scratch", "discard"], &[Path::new(made.out.trim())]).ok();
    write(U1, &mount, "b", 5).ok();
}

/// SEMANTICS 117: "A stage that would exceed `staged-bytes` of its user is refused before it starts"
#[tokio::test(flavor = "multi_thread")]
async fn a_stage_that_would_break_a_quota_is_refused_before_it_starts() {
    let fixture = Fixture::new();
    for name in ["a", "b", "c"] {
        fixture.put(name, &vec![7; 1 << 20]).await;
    }
    let policy = "[default]\nflush = \"manual\"\n[[quota]]\nuser = \"1\"\nstaged-bytes = \"2MiB\"\n";
    let options = EngineOptions { policy: Policy::parse(policy).unwrap(), ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    let stage = async |paths: &[&str], lease_owner: &str| {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        summary(overlay.stage(StageRequest { paths, lease_owner: lease_owner.into(), ..Default::default() })).await.0
    };
    // User 1 is `daemon` on every Debian.
    let done = stage(&["a", "b", "c"], "daemon").await;
    let message = done.message.unwrap();
    assert_eq!(done.refused, Some(libc::EDQUOT), "{message}");
    assert!(message.contains("3145728 bytes are to be staged for user 1"), "{message}");
    assert_eq!(overlay.status().await.used_bytes, 0, "nothing was fetched");
    let done = stage(&["a", "b"], "daemon").await;
    assert_eq!((done.failed, done.message), (0, None));
    // What is staged already does not count twice.
    assert_eq!(stage(&["b", "a"], "daemon").await.refused, None);
    assert_eq!(stage(&["c"], "daemon").await.refused, Some(libc::EDQUOT));
    assert_eq!(stage(&["c"], "user:1").await.refused, Some(libc::EDQUOT));
    assert_eq!(stage(&["c"], "user:2").await.refused, None);
    let shown = overlay.quotas(QuotaVerb::Show).await.unwrap();
    let user = shown.quotas.iter().find(|quota| quota.id == 1 && quota.kind == QuotaKind::User).unwrap();
    assert_eq!((user.staged_bytes.used, user.staged_bytes.hard), (2 << 20, Some(2 << 20)));
    overlay.shutdown().await.unwrap();
}

/// SEMANTICS 117: "What other stages of the user are about to lease counts, too."
#[tokio::test(flavor = "multi_thread")]
async fn stages_that_begin_at_the_same_time_do_not_break_a_quota_together() {
    for _ in 0..10 {
        let fixture = Fixture::new();
        for name in ["a", "b", "c", "d"] {
            fixture.put(name, &vec![7; 1 << 20]).await;
        }
        let policy = "[default]\nflush = \"manual\"\n[[quota]]\nuser = \"1\"\nstaged-bytes = \"3MiB\"\n";
        let options = EngineOptions { policy: Policy::parse(policy).unwrap(), ..fixture.options() };
        let overlay = Overlay::open(options).await.unwrap();
        let stage = async |paths: [&str; 2]| {
            let paths = paths.map(str::to_owned).to_vec();
            summary(overlay.stage(StageRequest { paths, lease_owner: "user:1".into(), ..Default::default() })).await.0
        };
        let (one, two) = tokio::join!(stage(["a", "b"]), stage(["c", "d"]));
        let refused = [one.refused, two.refused];
        assert!(refused == [None, Some(libc::EDQUOT)] || refused == [Some(libc::EDQUOT), None], "{refused:?}");
        // What both stage counts once.
        let (one, two) = tokio::join!(stage(["a", "b"]), stage(["b", "a"]));
        let shown = overlay.quotas(QuotaVerb::Show).await.unwrap();
        let user = shown.quotas.iter().find(|quota| quota.id == 1 && quota.kind == QuotaKind::User).unwrap();
        assert!(user.staged_bytes.used <= 3 << 20, "{user:?}");
        assert_eq!(one.refused, two.refused);
        overlay.shutdown().await.unwrap();
    }
}

const LIMIT: u64 = 4 << 20;
const FILES: u64 = 12;

/// What a user may hold at any moment.
fn check(report: &QuotaReport, history: &[String]) {
    assert!(report.differences.is_empty(), "{:?} after {history:?}", report.differences);
    for quota in report.quotas.iter().filter(|quota| quota.kind == QuotaKind::User && quota.id != 0) {
        let held = (quota.bytes.used, quota.files.used);
        assert!(held.0 <= LIMIT && held.1 <= FILES, "{quota:?} after {history:?}");
    }
}

/// SEMANTICS 115: "`forebay quota check` compares them."
#[tokio::test(flavor = "multi_thread")]
async fn the_counts_are_right_after_anything() {
    let mut random = StdRng::seed_from_u64(seed());
    let fixture = Fixture::new();
    let policy = format!(
        "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n\
         [[quota]]\nuser = \"*\"\nbytes = \"{LIMIT}B\"\nfiles = {FILES}\n[[quota]]\ngroup = \"*\"\nbytes = \"1GiB\"\n"
    );
    let options = || EngineOptions { policy: Policy::parse(&policy).unwrap(), ..fixture.options() };
    let mut overlay = Overlay::open(options()).await.unwrap();
    let mut history = Vec::new();
    for step in 0..400 {
        let name = format!("f{}", random.random_range(0..20));
        let other = format!("f{}", random.random_range(0..20));
        let caller = Caller { uid: random.random_range(1..4), gid: random.random_range(1..3), pid: 1 };
        let offset = random.random_range(0..2_000_000);
        let bytes = vec![9; random.random_range(1..900_000)];
        let ino = overlay.resolve(&forebay_tests::engine::pool_path(&name)).await.ok();
        let what = random.random_range(0..13);
        history.push(format!("{step}: {what} {name} {other} {}", caller.uid));
        // An operation may be refused. The counts must be right all the same.
        match (what, ino) {
            (0..4, None) => {
                if let Ok((entry, _)) = overlay.create(Ino::ROOT, name.as_bytes(), 0o666, 0, RDWR, caller).await {
                    let _ = overlay.write(entry.attr.ino, offset, Bytes::from(bytes)).await;
                    let _ = overlay.close(entry.attr.ino, true).await;
                    overlay.release(entry.attr.ino, RDWR);
                }
            }
            (0..4, Some(ino)) => {
                let flags = if what == 0 { RDWR | libc::O_TRUNC } else { RDWR };
                if overlay.open_file(ino, flags).await.is_ok() {
                    let _ = overlay.write(ino, offset, Bytes::from(bytes)).await;
                    if what == 1 {
                        let _ = overlay.unlink(Ino::ROOT, name.as_bytes()).await;
                        let _ = overlay.write(ino, offset, Bytes::from_static(b"after its end")).await;
                    }
                    let _ = overlay.close(ino, true).await;
                    overlay.release(ino, RDWR);
                }
            }
            (4, Some(ino)) => {
                let change = Change { size: Some(offset), ..Change::default() };
                _ = overlay.setattr(ino, &change, caller).await;
            }
            (5, Some(ino)) => {
                let change = Change { gid: Some(caller.gid), ..Change::default() };
                _ = overlay.setattr(ino, &change, caller).await;
            }
            (6, Some(_)) => _ = rename(&overlay, &name, &other).await,
            (7, Some(_)) => _ = overlay.unlink(Ino::ROOT, name.as_bytes()).await,
            (8, Some(ino)) => _ = overlay.link(ino, Ino::ROOT, other.as_bytes()).await,
            (9, Some(ino)) => _ = overlay.fallocate(ino, 0, offset, bytes.len() as u64).await,
            (10, _) => _ = flush(&overlay).await,
            (11, _) => _ = evict(&overlay, true).await,
            (12, _) => {
                overlay.shutdown().await.unwrap();
                drop(overlay);
                overlay = opened(&options).await;
            }
            _ => {}
        }
        check(&overlay.quotas(QuotaVerb::Check).await.unwrap(), &history);
    }
    assert!(find(&overlay, "").await == Ino::ROOT);
    overlay.shutdown().await.unwrap();
}
