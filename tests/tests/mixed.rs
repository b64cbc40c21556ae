//! Several pools in one mount, as programs and operators see them.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_daemon::registry::{self, Phase, Process, RegisteredMount};
use forebay_daemon::{client, mounts, multi_mount};
use forebay_tests::mount::{COMMAND, Mount, Place, content, kill, program_as};
use forebay_tests::process::{self, Answer, run, sh, wait_until};
use forebay_tests::servers::nfs::{NfsServer, Squash};

const USAGE: i32 = 2;
const NO_DAEMON: i32 = 3;
const POOL_UNAVAILABLE: i32 = 4;
const NO_SPACE: i32 = 5;
const BUSY: i32 = 6;
const NOBODY: u32 = 65_534;
const MANUAL: &str = "[default]\nflush = \"manual\"\n";
/// Two directory pools: `pool` and `native` of the place.
const TWO: &str = "[[pool]]\nname = \"a\"\nurl = \"pool\"\n[[pool]]\nname = \"b\"\nurl = \"native\"\n";
const SHELL: Duration = Duration::from_secs(60);

/// A mixed root at `mnt`, described by `forebay.toml` of the place.
struct Mixed {
    place: Place,
    user: Option<u32>,
}

impl Mixed {
    #[track_caller]
    fn new(text: &str) -> Self {
        let mixed = Self { place: Place::new(), user: None };
        mixed.describe(text);
        mixed.mount().ok();
        mixed
    }

    fn describe(&self, text: &str) {
        fs::write(self.place.at("forebay.toml"), text).unwrap();
    }

    fn command(&self) -> Command {
        let mut command = program_as(&self.place, self.user);
        command.args(["mount", "--config"]).arg(self.place.at("forebay.toml")).arg(self.place.mnt());
        command.arg("--fast").arg(self.place.fast()).args(["--limit", "1G"]);
        command
    }

    fn mount(&self) -> Answer {
        run(&mut self.command(), COMMAND)
    }

    fn forebay<const N: usize>(&self, words: [&str; N], path: &str) -> Answer {
        run(program_as(&self.place, self.user).args(words).arg(self.path(path)), COMMAND)
    }

    fn path(&self, below: &str) -> PathBuf {
        if below.is_empty() { self.place.mnt() } else { self.place.mnt().join(below) }
    }

    /// Returns the registry's entries of the pools.
    fn entries(&self) -> Vec<RegisteredMount> {
        registry::entries().into_iter().filter(|e| e.mountpoint().starts_with(self.place.mnt())).collect()
    }

    #[track_caller]
    fn entry(&self, pool: &str) -> RegisteredMount {
        self.entries().into_iter().find(|e| e.mountpoint() == self.path(pool)).expect("the pool is registered")
    }

    #[track_caller]
    fn worker(&self, pool: &str) -> Process {
        self.entry(pool).state.worker.expect("a worker runs")
    }

    fn processes(&self) -> Vec<Process> {
        self.entries().into_iter().flat_map(|e| [Some(e.state.supervisor), e.state.worker]).flatten().collect()
    }

    #[track_caller]
    fn nothing_is_left(&self) {
        let left: Vec<_> = mounts::list().unwrap();
        let left: Vec<_> = left.into_iter().filter(|m| m.mountpoint.starts_with(self.place.mnt())).collect();
        assert!(left.is_empty(), "{left:?}");
        assert!(self.entries().is_empty(), "{:?}", self.entries());
        assert!(multi_mount::MultiMountRoot::at(&self.place.mnt()).is_none());
        assert!(!registry::Runtime::of(&self.place.mnt()).dir().exists());
        assert_eq!(fs::read_dir(self.place.mnt()).unwrap().count(), 0);
    }
}

#[track_caller]
fn signal(process: Process, signal: i32) {
    // SAFETY: a plain system call on a process that was started for this test.
    assert_eq!(unsafe { libc::kill(process.pid.cast_signed(), signal) }, 0);
}

/// SEMANTICS 38: "A rename or a link from one pool to another is refused with `EXDEV`."
#[test]
fn files_of_each_pool_are_there_and_nothing_is_renamed_across() {
    let server = NfsServer::start(Path::new("/var/tmp"), Squash::None);
    let export = server.export();
    fs::write(export.join("from"), "far away").unwrap();
    let text = format!("{MANUAL}{TWO}[[pool]]\nname = \"far away\"\nurl = \"{}\"\n", server.url());
    let mixed = Mixed { place: Place::new(), user: None };
    fs::write(mixed.place.pool().join("from"), "a").unwrap();
    fs::write(mixed.place.native().join("from"), "b").unwrap();
    mixed.describe(&text);
    mixed.mount().ok();
    let pools = [("a", mixed.place.pool()), ("b", mixed.place.native()), ("far away", export)];
    let mut names: Vec<_> = fs::read_dir(mixed.place.mnt()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a", "b", "far away"]);
    assert_eq!(File::create(mixed.path("new")).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    for (name, _) in &pools {
        let from = mixed.path(name).join("from");
        assert_eq!(fs::read_to_string(&from).unwrap(), *name);
        for (other, _) in pools.iter().filter(|(other, _)| other != name) {
            let to = mixed.path(other).join("to");
            assert_eq!(fs::rename(&from, &to).unwrap_err().kind(), ErrorKind::CrossesDevices, "{name} to {other}");
            assert_eq!(fs::hard_link(&from, &to).unwrap_err().kind(), ErrorKind::CrossesDevices, "{name} to {other}");
            assert_ne!(mixed.path(name).metadata().unwrap().dev(), mixed.path(other).metadata().unwrap().dev());
        }
    }
    sh(&mixed.place.mnt(), "mv a/from 'far away/moved'; cp -a 'far away/from' b/copied", SHELL);
    let dirty = mixed.forebay(["dirty"], "").ok().out;
    assert!(dirty.contains("far away/moved") && dirty.contains("b/copied"), "{dirty}");
    mixed.forebay(["flush", "--wait"], "").ok();
    assert_eq!(mixed.forebay(["dirty"], "").ok().out, "");
    let read = |at: usize, name: &str| fs::read_to_string(pools[at].1.join(name)).unwrap_or_default();
    assert_eq!((read(0, "from"), read(2, "moved"), read(1, "copied")), (String::new(), "a".into(), "far away".into()));
    mixed.forebay(["umount"], "").ok();
    mixed.nothing_is_left();
}

/// SEMANTICS 39: "If several pools are in one mount, each keeps its own limit."
#[test]
fn each_pool_keeps_its_own_limit() {
    let mixed = Mixed::new(&TWO.replacen("url = \"pool\"", "url = \"pool\"\nlimit = \"64MiB\"", 1));
    for dir in [mixed.place.pool(), mixed.place.native()] {
        (0..12).for_each(|n| fs::write(dir.join(n.to_string()), content(n, 10 << 20)).unwrap());
    }
    for n in 0..12 {
        for pool in ["a", "b"] {
            assert_eq!(fs::read(mixed.path(pool).join(n.to_string())).unwrap(), content(n, 10 << 20), "{pool}/{n}");
        }
        assert!(client::status(&mixed.entry("a")).unwrap().used_bytes <= 64 << 20);
    }
    let (a, b) = (client::status(&mixed.entry("a")).unwrap(), client::status(&mixed.entry("b")).unwrap());
    assert_eq!((a.limit_bytes, b.limit_bytes), (64 << 20, 1_000_000_000));
    // A content file in many pieces also takes metadata blocks of the file system.
    assert!((120 << 20..121 << 20).contains(&b.used_bytes), "a's limit is not b's: {} bytes", b.used_bytes);
}

/// SEMANTICS 39: "A pool that hangs or dies does not affect the other pools."
#[test]
fn a_pool_that_hangs_or_dies_leaves_the_other_pools_serving() {
    let mixed = Mixed::new(&format!("{MANUAL}{TWO}"));
    let bytes = content(39, 100_000);
    fs::write(mixed.path("a/kept"), &bytes).unwrap();
    File::open(mixed.path("a/kept")).unwrap().sync_all().unwrap();
    let (a, b) = (mixed.worker("a"), mixed.worker("b"));
    signal(a, libc::SIGSTOP);
    fs::write(mixed.path("b/new"), &bytes).unwrap();
    mixed.forebay(["flush", "--wait"], "b").ok();
    assert_eq!(fs::read(mixed.place.native().join("new")).unwrap(), bytes);
    kill(a);
    assert_eq!(fs::read(mixed.path("b/new")).unwrap(), bytes);
    assert_eq!(fs::read(mixed.path("a/kept")).unwrap(), bytes);
    wait_until("another worker of a", || {
        let state = mixed.entry("a").state;
        state.phase == Phase::Serving && state.worker.is_some_and(|w| w != a && w.is_alive())
    });
    assert_eq!(mixed.worker("b"), b);
    mixed.forebay(["flush", "--wait"], "").ok();
    assert_eq!(fs::read(mixed.place.pool().join("kept")).unwrap(), bytes);
}

/// SEMANTICS 40: "A mixed root is mounted and unmounted as a whole."
#[test]
fn umount_takes_all_away_and_keeps_what_was_not_flushed() {
    let mixed = Mixed::new(&format!("{MANUAL}{TWO}"));
    fs::write(mixed.path("a/x"), "1").unwrap();
    mixed.mount().refused(BUSY, &["already mounted", "forebay umount"]);
    let processes = mixed.processes();
    assert_eq!(processes.len(), 4);
    let said = mixed.forebay(["umount"], "").ok();
    assert!(said.err.contains("not in the pool") && said.err.contains("mnt/a"), "{said}");
    mixed.nothing_is_left();
    assert!(!processes.iter().any(Process::is_alive));
    mixed.forebay(["status"], "").refused(NO_DAEMON, &["under no forebay mount"]);
    mixed.mount().ok();
    assert_eq!(fs::read(mixed.path("a/x")).unwrap(), b"1");
    mixed.forebay(["umount", "--flush"], "").ok();
    mixed.nothing_is_left();
    assert_eq!(fs::read(mixed.place.pool().join("x")).unwrap(), b"1");
}

/// Without the record of a mount, nothing can be flushed there. Then `--flush` unmounts nothing.
#[test]
fn umount_with_flush_refuses_a_mount_whose_daemon_is_not_known() {
    let mixed = Mixed::new(&format!("{MANUAL}{TWO}"));
    let one = Mount::manual();
    fs::write(mixed.path("a/x"), "1").unwrap();
    fs::write(one.path("x"), "1").unwrap();
    for (runtime, place, pool) in [
        (mixed.entry("a").runtime, mixed.place.mnt(), mixed.place.pool()),
        (one.runtime(), one.place.mnt(), one.place.pool()),
    ] {
        let (state, aside) = (runtime.dir().join("state.json"), runtime.dir().join("aside"));
        fs::rename(&state, &aside).unwrap();
        for more in [&["--flush", "--dry-run"][..], &["--flush"]] {
            let answer = run(Command::new(process::forebay()).arg("umount").args(more).arg(&place), COMMAND);
            answer.refused(NO_DAEMON, &["its daemon is not known here"]);
        }
        assert!(!pool.join("x").exists());
        fs::rename(&aside, &state).unwrap();
        run(Command::new(process::forebay()).args(["umount", "--flush"]).arg(&place), COMMAND).ok();
        assert_eq!(fs::read(pool.join("x")).unwrap(), b"1");
    }
    mixed.nothing_is_left();
}

/// SEMANTICS 40: "If one pool is in use, all pools stay mounted."
#[test]
fn a_pool_in_use_keeps_all_mounted_and_is_named() {
    let mixed = Mixed::new(TWO);
    fs::write(mixed.path("b/x"), "1").unwrap();
    let open = File::open(mixed.path("b/x")).unwrap();
    mixed.forebay(["umount"], "").refused(BUSY, &["mnt/b/x", "nothing was unmounted", "--lazy"]);
    fs::write(mixed.path("a/y"), "2").unwrap();
    drop(open);
    mixed.forebay(["umount", "--dry-run"], "").ok();
    fs::write(mixed.path("a/y"), "3").unwrap();
    mixed.forebay(["umount"], "").ok();
    mixed.nothing_is_left();
}

/// SEMANTICS 40: "If one pool fails, no pool is mounted."
#[test]
fn a_pool_that_fails_leaves_nothing_mounted() {
    let mixed = Mixed { place: Place::new(), user: None };
    mixed.describe(&format!("{TWO}[[pool]]\nname = \"gone\"\nurl = \"nfs://127.0.0.1/x?nfsport=1&mountport=1\"\n"));
    mixed.mount().refused(POOL_UNAVAILABLE, &["forebay.toml", "gone", "127.0.0.1"]);
    mixed.nothing_is_left();
    mixed.describe(TWO);
    mixed.mount().ok();
}

#[test]
fn commands_on_the_root_act_on_all_pools() {
    let mixed = Mixed::new(TWO);
    for (dir, name) in [(mixed.place.pool(), "one"), (mixed.place.native(), "two")] {
        fs::write(dir.join(name), content(1, 5000)).unwrap();
    }
    mixed.forebay(["stage"], "").ok();
    let listed = mixed.forebay(["ls", "-R"], "").ok().out;
    assert!(listed.contains("a/one") && listed.contains("b/two") && listed.contains("leased"), "{listed}");
    let listed = mixed.forebay(["ls"], "b").ok().out;
    assert!(listed.contains(" two") && !listed.contains("one"), "{listed}");
    let sums = mixed.forebay(["--json", "du"], "").ok().out;
    let sums: Vec<serde_json::Value> = sums.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let bytes = |path: &str| sums.iter().find(|s| s["path"] == path).map(|s| s["sum"]["resident_bytes"].clone());
    assert_eq!((bytes("a"), bytes("b")), (Some(5000.into()), Some(5000.into())), "{sums:?}");
    assert_eq!(sums.last().unwrap()["sum"]["bytes"], 10_000);
    mixed.forebay(["evict", "--release-leases"], "").ok();
    let status = mixed.forebay(["--json", "status"], "").ok().out;
    let status: Vec<serde_json::Value> = status.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let places: Vec<_> = status.iter().map(|s| s["mountpoint"].as_str().unwrap().to_owned()).collect();
    assert_eq!(places, [mixed.path("a"), mixed.path("b")].map(|p| p.display().to_string()));
    assert!(status.iter().all(|s| s["status"]["resident_files"] == 0), "{status:?}");
    mixed.forebay(["fsck"], "").ok();
    mixed.forebay(["status"], "c").refused(NO_DAEMON, &["mixed root", "a, b"]);
    mixed.forebay(["umount"], "a").ok();
    mixed.forebay(["status"], "").refused(NO_DAEMON, &["mnt/a  NOT MOUNTED", "mnt/b"]);
    mixed.forebay(["flush", "--wait"], "").refused(NO_DAEMON, &["pool a", "not mounted"]);
    mixed.forebay(["umount"], "").ok();
    mixed.nothing_is_left();
}

#[test]
fn df_shows_the_space_of_each_pool() {
    const SMALL_MIB: u64 = 64;
    let place = Place::new();
    place.small_disk("small", "tmpfs", SMALL_MIB);
    let mixed = Mixed { place, user: None };
    mixed.describe(&TWO.replace("native", "small"));
    mixed.mount().ok();
    let total = |path: PathBuf| rustix::fs::statvfs(&path).map(|s| s.f_blocks * s.f_frsize).unwrap();
    assert_eq!(total(mixed.path("a")), total(mixed.place.pool()));
    assert_eq!(total(mixed.path("b")), SMALL_MIB << 20);
}

#[test]
fn a_root_whose_daemons_were_killed_is_mounted_again() {
    let mixed = Mixed::new(&format!("{MANUAL}{TWO}"));
    fs::write(mixed.path("b/x"), "1").unwrap();
    mixed.processes().into_iter().for_each(kill);
    mixed.mount().ok();
    assert_eq!(fs::read(mixed.path("b/x")).unwrap(), b"1");
    mixed.processes().into_iter().for_each(kill);
    mixed.forebay(["umount"], "").ok();
    mixed.nothing_is_left();
}

#[test]
fn in_the_foreground_a_signal_ends_all_and_so_does_umount() {
    let mixed = Mixed { place: Place::new(), user: None };
    mixed.describe(TWO);
    for by_signal in [true, false] {
        let mut child = mixed.command().arg("-f").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("both serve", || mixed.entries().iter().filter(|e| e.state.phase == Phase::Serving).count() == 2);
        fs::write(mixed.path("a/x"), "1").unwrap();
        match by_signal {
            true => signal(Process::of(child.id()), libc::SIGTERM),
            false => drop(mixed.forebay(["umount"], "").ok()),
        }
        let status = process::wait(&mut child, Duration::from_secs(60)).expect("it ends");
        assert!(status.success(), "{status}");
        mixed.nothing_is_left();
    }
}

#[test]
fn an_unprivileged_user_mounts_in_a_directory_of_their_own() {
    let place = Place::new();
    place.let_users_mount();
    place.give_to(NOBODY);
    let mixed = Mixed { place, user: Some(NOBODY) };
    mixed.describe(TWO);
    fs::write(mixed.path("stray"), "").unwrap();
    mixed.mount().refused(USAGE, &["not empty", "stray"]);
    fs::remove_file(mixed.path("stray")).unwrap();
    fs::write(mixed.place.pool().join("x"), "1").unwrap();
    mixed.mount().ok();
    sh(&mixed.place.mnt(), "! findmnt -no FSTYPE -M . && findmnt -no FSTYPE -M a | grep -q forebay", SHELL);
    let read = format!("setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups cat a/x");
    assert_eq!(sh(&mixed.place.mnt(), &read, SHELL).out, "1");
    mixed.forebay(["umount"], "").ok();
    assert_eq!(fs::read_dir(mixed.place.mnt()).unwrap().count(), 0);
    mixed.mount().ok();
    ["a", "b", ""].iter().for_each(|pool| drop(mixed.forebay(["umount"], pool).ok()));
    assert_eq!(fs::read_dir(mixed.place.mnt()).unwrap().count(), 0);
}

#[test]
fn a_file_that_makes_no_sense_is_refused_before_anything_is_mounted() {
    let mixed = Mixed { place: Place::new(), user: None };
    fs::write(mixed.place.at("file"), "").unwrap();
    let pool = |name: &str, url: &str, more: &str| format!("[[pool]]\nname = {name:?}\nurl = {url:?}\n{more}\n");
    let second = |name: &str, url: &str, more: &str| format!("{}{}", pool("a", "pool", ""), pool(name, url, more));
    for (text, code, words) in [
        (String::new(), USAGE, &["no [[pool]]"][..]),
        (pool("", "pool", ""), USAGE, &["[[pool]] 1", "is empty"]),
        (pool("a/b", "pool", ""), USAGE, &["[[pool]] 1 (\"a/b\")", "slash"]),
        (pool("..", "pool", ""), USAGE, &["(\"..\")"]),
        (pool(".forebay~x", "pool", ""), USAGE, &[".forebay~"]),
        (second("a", "native", ""), USAGE, &["[[pool]] 2 (\"a\")", "another pool has the name"]),
        (second("b", "native", "colour = 1"), USAGE, &["[[pool]] 2 (\"b\")", "colour"]),
        (second("b", "ftp://host/x", ""), USAGE, &["[[pool]] 2 (\"b\")", "ftp://"]),
        (second("b", "none", ""), POOL_UNAVAILABLE, &["[[pool]] \"b\"", "none"]),
        (second("b", "file", ""), USAGE, &["[[pool]] \"b\"", "is not a directory"]),
        (second("b", "native", "fast = [\"fast/a\"]"), USAGE, &["[[pool]] \"b\"", "the same directory"]),
        (second("b", "native", "fast = [\"pool/fast\"]"), USAGE, &["[[pool]] \"b\"", "lies inside", "\"a\""]),
        (second("b", "native", "limit = \"5\""), USAGE, &["[[pool]] \"b\"", "5 B", "500G"]),
        (second("b", "native", "limit = \"900P\""), NO_SPACE, &["[[pool]] \"b\"", "PiB", "or less"]),
        (second("b", "mnt/below", ""), POOL_UNAVAILABLE, &["[[pool]] \"b\""]),
        (format!("[pool]\n{TWO}"), USAGE, &["forebay.toml"]),
        (format!("[defult]\n{TWO}"), USAGE, &["defult"]),
    ] {
        mixed.describe(&text);
        let answer = mixed.mount().refused(code, words).refused(code, &["forebay.toml"]);
        assert!(!answer.err.contains("panicked") && answer.out.is_empty(), "{answer}");
    }
    let total = sh(&mixed.place.fast(), "df --output=size -B1 . | tail -1", SHELL).out.trim().parse::<u64>().unwrap();
    let most = format!("limit = \"{}\"", total / 10 * 6);
    mixed.describe(&format!("{}{}", pool("a", "pool", &most), pool("b", "native", &most)));
    mixed.mount().refused(NO_SPACE, &["a, b", "together"]);
    mixed.describe(TWO);
    let forebay = |words: &str| {
        run(Command::new(process::forebay()).args(words.split(' ')).current_dir(mixed.place.at("")), COMMAND)
    };
    forebay("mount --config forebay.toml mnt --fast fast").refused(USAGE, &["no limit", "limit = "]);
    forebay("mount --config forebay.toml mnt --limit 1G").refused(USAGE, &["no fast pool", "--fast"]);
    forebay("mount --config none.toml mnt --fast fast --limit 1G").refused(USAGE, &["none.toml"]);
    forebay("mount --config forebay.toml pool mnt --fast fast").refused(USAGE, &["pool", "--config"]);
    forebay("mount --config forebay.toml --fast fast").refused(USAGE, &["no mountpoint"]);
    forebay("mount --config forebay.toml none --fast fast --limit 1G").refused(USAGE, &["none does not exist"]);
    forebay("mount --config forebay.toml mnt --policy forebay.toml").refused(USAGE, &["--policy", "--config"]);
    forebay("mount pool mnt --fast fast --policy forebay.toml").refused(USAGE, &["forebay.toml", "--config"]);
    mixed.nothing_is_left();
    assert_eq!(fs::read_dir(mixed.place.fast()).unwrap().count(), 0, "something was made all the same");
    let planned = forebay("mount none mnt -o config=forebay.toml,fast=fast,limit=1G --dry-run").ok();
    assert!(planned.out.contains("mnt/a") && planned.out.contains("mnt/b"), "{planned}");
    mixed.nothing_is_left();
}
