//! Reports of what jobs used. They are complete whether the kernel or the daemon serves a read, and if files are
//! renamed, the daemon dies or a job loses its owner meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use forebay_api::jobs::ObserverKind;
use forebay_daemon::mounts;
use forebay_tests::mount::{COMMAND, Mount, Options, Place, content, program_as};
use forebay_tests::process::{Answer, Running, forebay, run, wait, wait_until};
use serde_json::Value;

const USAGE: i32 = 2;
const NO_DAEMON: i32 = 3;
const NOBODY: u32 = 65_534;
/// Larger than a file that is fetched whole at its open, so the first reader gets it through the daemon.
const LARGE: usize = 9_000_000;

/// Makes a mount with some files in the pool. `mask_hooks` names the hooks that the observer cannot use.
fn mount(mask_hooks: Option<&str>) -> Mount {
    let more = mask_hooks.map_or(Vec::new(), |names| vec!["-o".into(), format!("mask_hooks={names}")]);
    let mount = Mount::new(Options { more, ..Options::default() });
    for (seed, (name, len)) in [("a", 3_000_000), ("b", 200_001), ("c", 1_000_000), ("large", LARGE)].iter().enumerate()
    {
        fs::write(mount.pool(name), content(seed as u64, *len)).unwrap();
    }
    mount
}

/// `forebay run` of a shell script in the mount.
fn job(mount: &Mount, id: &str, script: &str) -> Command {
    let mut command = Command::new(forebay());
    command.args(["run", "--job", id, "--mount"]).arg(mount.place.mnt());
    command.args(["--", "bash", "-euc", script]).current_dir(mount.place.mnt());
    command
}

fn report(mount: &Mount, id: &str) -> Value {
    let answer = mount.forebay(["--json", "job", "show", id, "--mount"], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

/// Returns a number that a report has for a file.
#[track_caller]
fn of(report: &Value, path: &str, field: &str) -> u64 {
    let files = report["files"].as_array().unwrap();
    let file = files.iter().find(|file| file["path"] == path).unwrap_or_else(|| panic!("{path} is not in {report}"));
    file[field].as_u64().unwrap_or_else(|| panic!("no {field}: {report}"))
}

fn paths(report: &Value) -> Vec<&str> {
    report["files"].as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect()
}

#[track_caller]
#[test]
fn jobs_at_the_same_time_are_told_apart_and_each_has_what_it_used() {
    let mount = mount(None);
    mount.forebay(["stage"], &[&mount.path("a"), &mount.path("b")]).ok();
    let begun = mount.place.at("begun");
    let other = format!("cat c c >/dev/null; touch {0}; cat a >/dev/null; head -c 65536 b >/dev/null", begun.display());
    let one = format!(
        "until [ -e {0} ]; do sleep 0.01; done; cat a >/dev/null; cat b a a >/dev/null; cat large >/dev/null
         cat ../pool/c >/dev/null",
        begun.display()
    );
    let mut other = Running::new(&mut job(&mount, "other", &other));
    let answer = run(&mut job(&mount, "one", &one), COMMAND).ok();
    assert!(wait(&mut other.0, COMMAND).is_some_and(|status| status.success()));
    let seen = answer.err.contains("job one at") && answer.err.contains("read") && answer.err.contains("opens");
    assert!(seen && answer.err.lines().count() == 1, "one line sums it up: {answer}");

    let one = report(&mount, "one");
    assert_eq!((&one["observer"], &one["missing"]), (&"ebpf".into(), &serde_json::json!([])), "{one}");
    let ranks: Vec<u64> =
        one["files"].as_array().unwrap().iter().map(|f| f["first_use_rank"].as_u64().unwrap()).collect();
    assert_eq!((paths(&one), ranks), (vec!["a", "b", "large", "c"], vec![1, 2, 3, 4]), "{one}");
    let (a, b) = (3_000_000, 200_001);
    assert_eq!((of(&one, "a", "bytes"), of(&one, "a", "opens")), (3 * a, 3), "{one}");
    assert_eq!((of(&one, "b", "bytes"), of(&one, "b", "opens")), (b, 1), "{one}");
    assert_eq!((of(&one, "large", "bytes"), of(&one, "large", "opens")), (LARGE as u64, 1), "{one}");
    // The job read `c` in the pool, and not through the mount.
    assert_eq!((of(&one, "c", "bytes"), of(&one, "c", "opens")), (1_000_000, 0), "{one}");
    for file in one["files"].as_array().unwrap() {
        let sum: u64 = ["cache_bytes", "fast_bytes", "pool_bytes"].iter().map(|f| file[f].as_u64().unwrap()).sum();
        assert_eq!(Some(sum), file["bytes"].as_u64(), "bytes come from somewhere: {one}");
        assert_eq!(file["in_pool"], file["path"] == "c", "{one}");
        assert_eq!(file["parts"]["written"], "", "{one}");
    }
    assert!(of(&one, "large", "pool_bytes") > 0, "it was not here: {one}");
    assert_eq!(of(&one, "b", "pool_bytes"), 0, "it was staged: {one}");
    assert!(of(&one, "a", "cache_bytes") >= 2 * a, "it was read again: {one}");
    assert_eq!(one["bytes"], 3 * a + b + LARGE as u64 + 1_000_000);

    let other = report(&mount, "other");
    assert_eq!(paths(&other), ["c", "a", "b"], "{other}");
    assert_eq!((of(&other, "c", "bytes"), of(&other, "c", "opens")), (2_000_000, 2), "{other}");
    assert_eq!((of(&other, "a", "bytes"), of(&other, "a", "opens")), (a, 1), "{other}");
    assert!(of(&other, "b", "bytes") < b && of(&other, "b", "bytes") >= 65_536, "{other}");
    let files = other["files"].as_array().unwrap();
    let read = files.iter().find(|file| file["path"] == "b").unwrap();
    assert_eq!(read["parts"]["part_bytes"], 65_536, "{other}");
    assert!(read["parts"]["read"].as_str().is_some_and(|parts| !parts.contains('3')), "the end was not: {other}");

    let shown = mount.forebay(["job", "show", "one", "--mount"], &[&mount.place.mnt()]).ok();
    for words in ["seen by     ebpf", "page cache", "large", "(in the pool)"] {
        assert!(shown.out.contains(words), "{shown}");
    }
    let listed = mount.forebay(["job", "list", "--mount"], &[&mount.place.mnt()]).ok();
    assert!(listed.out.contains("one ") && listed.out.contains("other ") && listed.out.contains("4 files"), "{listed}");
}

/// Bytes that an open waits for count as the pool's, although the daemon leaves them in the page cache.
#[test]
fn small_files_that_a_job_had_fetched_count_as_the_pools() {
    let mount = mount(None);
    run(&mut job(&mount, "cold", "cat a b >/dev/null; cat a >/dev/null"), COMMAND).ok();
    run(&mut job(&mount, "warm", "cat a >/dev/null"), COMMAND).ok();
    let cold = report(&mount, "cold");
    assert_eq!((of(&cold, "a", "bytes"), of(&cold, "a", "pool_bytes")), (6_000_000, 3_000_000), "{cold}");
    assert_eq!((of(&cold, "b", "bytes"), of(&cold, "b", "pool_bytes")), (200_001, 200_001), "{cold}");
    let warm = report(&mount, "warm");
    assert_eq!((of(&warm, "a", "bytes"), of(&warm, "a", "pool_bytes")), (3_000_000, 0), "{warm}");
}

#[test]
fn files_that_are_renamed_made_and_removed_meanwhile_are_known_by_their_last_names() {
    let mount = mount(None);
    let script =
        "cat a >/dev/null; mv a renamed; cat b >/dev/null; rm b; cp c new; cat new >/dev/null; mkdir d; mv c d/c";
    run(&mut job(&mount, "names", script), COMMAND).ok();
    let report = report(&mount, "names");
    assert_eq!(paths(&report), ["renamed", "b", "d/c", "new"], "{report}");
    assert_eq!((of(&report, "renamed", "bytes"), of(&report, "renamed", "opens")), (3_000_000, 1), "{report}");
    assert_eq!((of(&report, "b", "bytes"), of(&report, "b", "opens")), (200_001, 1), "{report}");
    assert_eq!((of(&report, "new", "bytes"), of(&report, "new", "opens")), (1_000_000, 2), "{report}");
    // Writes count by pages. The last page counts up to the end that the file had when it was written.
    let written = of(&report, "new", "written_bytes");
    assert!((996_000..=1_000_000).contains(&written), "{report}");
}

#[test]
fn without_ebpf_requests_tell_what_they_can_and_say_what_is_missing() {
    let mount = mount(Some("all"));
    mount.forebay(["stage"], &[&mount.path("a")]).ok();
    wait_until("it is found out", || mount.status().observer.why.is_some_and(|why| why.contains("masked")));
    let status = mount.status().observer;
    assert_eq!((status.kind, status.missing.len()), (ObserverKind::Requests, 1), "{status:?}");
    let shown = mount.forebay(["status"], &[&mount.place.mnt()]).ok();
    assert!(shown.out.contains("seen by requests alone"), "{shown}");
    // An orphaned process reads `large`.
    let script = "cat a a >/dev/null; ( (sleep 0.3; cat large >/dev/null; echo new >d) & ); sleep 1.5";
    let answer = run(&mut job(&mount, "requests", script), COMMAND).ok();
    assert!(answer.err.contains("without eBPF"), "{answer}");
    let report = report(&mount, "requests");
    assert_eq!(report["observer"], "requests");
    assert_eq!(report["missing"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(paths(&report), ["a", "large", "d"], "{report}");
    assert_eq!((of(&report, "a", "opens"), of(&report, "large", "opens")), (2, 1), "{report}");
    assert_eq!(of(&report, "large", "bytes"), LARGE as u64, "it came through the daemon: {report}");
    assert_eq!(report["files"][0]["parts"], Value::Null);
}

#[test]
fn a_hook_that_the_kernel_lacks_is_named_and_the_other_hooks_are_used() {
    let mount = mount(Some("writeback_dirty_folio:sched_process_fork:sched_process_exit"));
    wait_until("the observer starts", || mount.status().observer.kind == ObserverKind::Ebpf);
    run(&mut job(&mount, "masked", "cat a >/dev/null"), COMMAND).ok();
    let report = report(&mount, "masked");
    let missing: Vec<_> = report["missing"].as_array().unwrap().iter().map(|what| what.as_str().unwrap()).collect();
    assert!(missing.contains(&"writes are not counted") && missing.len() == 3, "{report}");
    assert_eq!((paths(&report), of(&report, "a", "opens")), (vec!["a"], 1), "{report}");
}

/// Masks the hooks that kernels before 6.12 lack.
#[test]
fn where_reads_are_not_told_what_comes_into_memory_is() {
    let mount = mount(Some("mm_filemap_get_pages:mm_filemap_map_pages:mm_filemap_fault"));
    wait_until("the observer starts", || mount.status().observer.kind == ObserverKind::Ebpf);
    run(&mut job(&mount, "first", "cat a >/dev/null; head -c 300000 large >/dev/null"), COMMAND).ok();
    let report = report(&mount, "first");
    assert_eq!(report["missing"].as_array().unwrap().len(), 3, "{report}");
    assert_eq!(paths(&report), ["a", "large"], "{report}");
    assert_eq!(of(&report, "a", "cache_bytes"), 0, "{report}");
    // Bytes that come into memory count, of content files and of the mount, readahead included.
    assert!(of(&report, "a", "bytes") <= 3_000_000_u64.next_multiple_of(4096), "{report}");
    assert!((300_000..LARGE as u64).contains(&of(&report, "large", "bytes")), "{report}");
}

#[test]
fn a_job_outlives_the_worker_and_no_job_outlives_its_forebay_run() {
    let mount = mount(None);
    let (first, go) = (mount.place.at("first"), mount.place.at("go"));
    let script = format!(
        "cat a >/dev/null; touch {}; until [ -e {} ]; do sleep 0.02; done; cat b >/dev/null; cat c >/dev/null",
        first.display(),
        go.display()
    );
    let running = Running::new(&mut job(&mount, "kept", &script));
    let mut orphaned = Running::new(&mut job(&mount, "orphaned", "sleep 1000"));
    wait_until("the first read", || first.exists());
    wait_until("both run", || {
        mount.forebay(["--json", "job", "list", "--mount"], &[&mount.place.mnt()]).ok().out.contains("orphaned")
    });
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    wait_until("it is taken up", || report(&mount, "kept")["processes"].as_array().is_some_and(|p| p.len() > 1));
    assert_eq!(report(&mount, "kept")["ended_unix"], Value::Null);
    fs::write(&go, "").unwrap();
    assert_eq!(running.end(), Some(0));
    let kept = report(&mount, "kept");
    assert_eq!((&kept["interrupted"], kept["ended_unix"].is_u64()), (&true.into(), true), "{kept}");
    assert_eq!((of(&kept, "b", "bytes"), of(&kept, "c", "bytes")), (200_001, 1_000_000), "{kept}");
    // The daemon ends a job whose owner is gone.
    orphaned.0.kill().unwrap();
    orphaned.0.wait().unwrap();
    wait_until("it is ended", || report(&mount, "orphaned")["ended_unix"].is_u64());
    let list = mount.forebay(["job", "list", "--mount"], &[&mount.place.mnt()]).ok();
    assert!(!list.out.contains("still running"), "{list}");
    // The next mount has the recorded report.
    drop(orphaned);
    wait_until("all have left", || mounts::holders(&mount.place.mnt(), 1).is_empty());
    mount.umount();
    mount.mount();
    assert_eq!(report(&mount, "kept"), kept);
}

#[test]
fn a_command_runs_as_without_us_whether_there_is_a_daemon_or_not() {
    let place = Place::new();
    place.give_to(NOBODY);
    let as_nobody = |words: &[&str]| -> Answer {
        let mut command = program_as(&place, Some(NOBODY));
        // Hides other mounts of this user.
        command.env("XDG_RUNTIME_DIR", place.fast()).current_dir(place.mnt());
        run(command.args(words), COMMAND)
    };
    let answer =
        as_nobody(&["run", "--", "sh", "-c", "echo out; exit 7"]).refused(7, &["unobserved", "no forebay mount"]);
    assert_eq!(answer.out, "out\n");
    as_nobody(&["run", "--mount", "/no/such/mount", "--", "sh", "-c", "kill -TERM $$"]).refused(143, &["unobserved"]);
    as_nobody(&["run", "--", "/no/such/command"]).refused(127, &["/no/such/command"]);
    as_nobody(&["run", "--", "/etc/passwd"]).refused(126, &["/etc/passwd"]);
    as_nobody(&["run"]).refused(USAGE, &["COMMAND"]);
    as_nobody(&["job", "list"]).refused(NO_DAEMON, &["no forebay mount"]);
    as_nobody(&["top", "--count", "1"]).refused(NO_DAEMON, &["no forebay mount"]);
    as_nobody(&["observe", "--pid", "1"]).refused(NO_DAEMON, &["no forebay mount"]);
}

/// Returns the permitted capabilities of all threads of a process, as the bits of `capabilities(7)`. The allocator's
/// own threads do not count: they start before the program begins, and only give memory back.
fn capabilities(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let permitted = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        if status.starts_with("Name:\tjemalloc_bg_thd") {
            return 0;
        }
        let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).map(str::trim).unwrap_or("0");
        u64::from_str_radix(line, 16).unwrap()
    };
    tasks.map(|task| permitted(task.unwrap())).fold(0, |all, one| all | one)
}

const SYS_ADMIN: u64 = 1 << 21;
/// CAP_SYS_MODULE, CAP_NET_ADMIN, CAP_SYS_BOOT, CAP_SYS_TIME, CAP_PERFMON and CAP_BPF.
const NOT_NEEDED: u64 = 1 << 16 | 1 << 12 | 1 << 22 | 1 << 25 | 1 << 38 | 1 << 39;

#[test]
fn a_worker_keeps_no_capability_that_it_does_not_need() {
    let mount = mount(None);
    wait_until("the observer", || mount.status().observer.kind == ObserverKind::Ebpf);
    let worker = mount.worker().pid;
    wait_until("the observer's thread gives up", || capabilities(worker) & NOT_NEEDED == 0);
    assert!(capabilities(worker) & SYS_ADMIN != 0, "passthrough takes it");
}

#[test]
fn a_user_observes_by_two_capabilities_and_the_worker_keeps_neither() {
    let place = Place::new();
    place.let_users_mount();
    place.give_to(NOBODY);
    fs::write(place.pool().join("a"), content(1, 300_000)).unwrap();
    let lent = place.lend(&forebay());
    run(Command::new("setcap").arg("cap_bpf,cap_perfmon+ep").arg(&lent), COMMAND).ok();
    let mount = Mount::on(place, Options { user: Some(NOBODY), ..Options::default() });
    wait_until("the observer", || mount.status().observer.kind == ObserverKind::Ebpf);
    let mut job = program_as(&mount.place, Some(NOBODY));
    job.args(["run", "--job", "user", "--mount"]).arg(mount.place.mnt()).args(["--", "cat"]).arg(mount.path("a"));
    run(&mut job, COMMAND).ok();
    let report = report(&mount, "user");
    assert_eq!((&report["observer"], of(&report, "a", "bytes")), (&"ebpf".into(), 300_000), "{report}");
    let status = mount.forebay(["--json", "status"], &[&mount.place.mnt()]).ok().out;
    let status: Value = serde_json::from_str(&status).unwrap();
    let worker = status["state"]["worker"]["pid"].as_u64().unwrap_or_else(|| panic!("no worker: {status}"));
    wait_until("the observer's thread gives up", || capabilities(worker as u32) == 0);
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let mount = mount(None);
    let mnt = mount.place.mnt();
    let refused = |words: &[&str], says: &[&str]| {
        run(Command::new(forebay()).args(words).arg("--mount").arg(&mnt), COMMAND).refused(USAGE, says);
    };
    refused(&["job", "show", "nobody"], &["no job `nobody`", "job list"]);
    refused(&["observe", "--pid", "4194304"], &["process 4194304 does not exist"]);
    refused(&["observe", "--cgroup", "/sys/fs/cgroup/no/such"], &["/sys/fs/cgroup/no/such", "No such file"]);
    refused(&["observe", "--slurm-job", "999999999"], &["999999999", "is on this node"]);
    refused(&["observe", "--pid", "1", "--job", "a b"], &["no spaces"]);
    let answer = run(Command::new(forebay()).args(["job", "list", "--mount", "/no/such"]), COMMAND);
    answer.refused(NO_DAEMON, &["/no/such"]);
}

/// Returns the mountpoint of cgroup version 2.
fn cgroups() -> PathBuf {
    mounts::list()
        .unwrap()
        .into_iter()
        .find(|m| m.fs_type == "cgroup2")
        .expect("cgroups of version 2: mount -t cgroup2")
        .mountpoint
}

#[test]
fn processes_that_run_already_are_observed_until_they_have_ended() {
    let mount = mount(None);
    let go = mount.place.at("go");
    let script =
        format!("until [ -e {} ]; do sleep 0.02; done; cat a >/dev/null; bash -c 'cat b >/dev/null'", go.display());
    let start = |id: &str, whom: &[&str]| {
        let mut command = Command::new(forebay());
        let observer =
            Running::new(command.args(["observe", "--job", id]).args(whom).arg("--mount").arg(mount.place.mnt()));
        wait_until("it is observed", || {
            mount.forebay(["job", "list", "--mount"], &[&mount.place.mnt()]).ok().out.contains(id)
        });
        observer
    };
    let shell = || Running::new(Command::new("bash").args(["-euc", &script]).current_dir(mount.place.mnt()));
    let (tree, grouped) = (shell(), shell());
    let cgroup = cgroups().join(format!("forebay-test-{}", std::process::id()));
    fs::create_dir(&cgroup).unwrap();
    fs::write(cgroup.join("cgroup.procs"), grouped.0.id().to_string()).unwrap();
    let by_pid = start("by-pid", &["--pid", &tree.0.id().to_string()]);
    let by_cgroup = start("by-cgroup", &["--cgroup", cgroup.to_str().unwrap()]);
    fs::write(&go, "").unwrap();
    assert_eq!((tree.end(), grouped.end()), (Some(0), Some(0)));
    assert_eq!((by_pid.end(), by_cgroup.end()), (Some(0), Some(0)));
    fs::remove_dir(&cgroup).unwrap();
    for id in ["by-pid", "by-cgroup"] {
        let report = report(&mount, id);
        assert_eq!(paths(&report), ["a", "b"], "{report}");
        assert_eq!((of(&report, "a", "bytes"), of(&report, "a", "opens")), (3_000_000, 1), "{report}");
        assert_eq!((of(&report, "b", "bytes"), of(&report, "b", "opens")), (200_001, 1), "{report}");
    }
}

#[test]
fn top_shows_how_much_each_job_reads_and_from_where() {
    let mount = mount(None);
    mount.forebay(["stage"], &[&mount.path("a")]).ok();
    let _running = Running::new(&mut job(&mount, "busy", "while :; do cat a >/dev/null; sleep 0.02; done"));
    let top = |words: &[&str]| {
        run(
            Command::new(forebay()).args(words).arg("top").arg(mount.place.mnt()).args([
                "--count",
                "3",
                "--interval",
                "500ms",
            ]),
            COMMAND,
        )
        .ok()
    };
    let answer = top(&["--json"]);
    let samples: Vec<Value> = answer.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(samples.len(), 3, "{answer}");
    let traffic = &samples[2]["jobs"][0]["traffic"];
    assert_eq!(samples[2]["jobs"][0]["id"], "busy");
    assert!(traffic["bytes"].as_u64() >= Some(3_000_000) && traffic["opens"].as_u64() > Some(0), "{answer}");
    assert_eq!(traffic["bytes"], traffic["cache_bytes"], "it is all in memory by now: {answer}");
    let shown = top(&[]);
    assert!(
        shown.out.contains("page cache") && shown.out.contains("busy") && shown.out.contains("(no job)"),
        "{shown}"
    );
}

/// Eviction begins far below the limit, because room below the limit is kept for passthrough writers.
const SPACE: &str = "[default]\nconsistency = \"immutable\"\n[space]\nhigh-watermark = 0.45\nlow-watermark = 0.42\n";
/// Without an observer, this evictor takes the order in which files were fetched for the order of their uses.
const LRU: &str = "evictor = \"lru\"\n";
const LIMIT: &str = "440MiB";
const FILE: usize = 4 << 20;
const HOT: usize = 12;
const COLD: usize = 30;
const NEW: usize = 20;

/// Reads some files again and again, stages as many other files as fit, and returns how many of the first ones are
/// still resident. No open and no read of them reaches the daemon.
fn hot_files_that_stay(evictor: &str, more: &[&str]) -> usize {
    let mount = Place::new();
    for at in 0..HOT + COLD + NEW {
        fs::write(mount.pool().join(format!("f{at:03}")), content(at as u64, FILE)).unwrap();
    }
    let more = more.iter().map(|word| (*word).to_owned()).collect();
    let policy = format!("{SPACE}{evictor}");
    let mount =
        Mount::on(mount, Options { immutable: true, limit: Some(LIMIT.into()), more, ..Options::policy(&policy) });
    wait_until("the observer starts", || mount.status().observer.why.is_none_or(|why| why.contains("masked")));
    let files = |range: std::ops::Range<usize>| range.map(|at| mount.path(format!("f{at:03}"))).collect::<Vec<_>>();
    let stage = |files: Vec<PathBuf>| {
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        mount.forebay(["stage", "--lease", "1s"], &files).ok();
    };
    stage(files(0..HOT + COLD));
    // The observer is attached while the fast pool fills. On a busy machine the kernel needs seconds for that.
    wait_until("the observer works", || mount.status().observer.why.is_some() || !mount.status().observer.rests);
    for _ in 0..4 {
        files(0..HOT).iter().for_each(|file| drop(fs::read(file).unwrap()));
        // Each `job list` makes the daemon collect what the observer saw.
        mount.forebay(["job", "list", "--mount"], &[&mount.place.mnt()]).ok();
        thread::sleep(Duration::from_millis(300));
    }
    for part in [HOT + COLD..HOT + COLD + NEW / 2, HOT + COLD + NEW / 2..HOT + COLD + NEW] {
        stage(files(part));
        // Leases end, and eviction runs.
        thread::sleep(Duration::from_millis(1_500));
    }
    let listed = mount.forebay(["--json", "ls"], &[&mount.place.mnt()]).ok();
    let states = listed.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let resident: Vec<String> =
        states.filter(|f| f["state"] == "resident").map(|f| f["path"].as_str().unwrap().to_owned()).collect();
    assert!(resident.len() < HOT + COLD + NEW, "nothing was evicted");
    (0..HOT).filter(|at| resident.iter().any(|path| path.ends_with(&format!("f{at:03}")))).count()
}

#[test]
fn files_read_past_the_daemon_are_not_evicted_before_unread_files() {
    // The default evictor uses estimates, so it may confuse two files.
    let by_default = hot_files_that_stay("", &[]);
    assert!(by_default >= HOT - 2, "{by_default} stay by default");
    assert_eq!(hot_files_that_stay(LRU, &[]), HOT);
    let blind = hot_files_that_stay(LRU, &["-o", "mask_hooks=all"]);
    assert!(blind < HOT / 2, "{blind} stay of those that seem unused");
}

/// Returns the number of programs that the daemon has attached in the kernel.
fn attached(mount: &Mount) -> usize {
    let open = fs::read_dir(format!("/proc/{}/fd", mount.status().pid)).unwrap();
    let kinds = open.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    kinds.filter(|kind| kind.to_string_lossy().contains("bpf_link")).count()
}

/// The observer costs readers time, so it is attached only while a job or `top` needs it.
#[test]
fn the_observer_works_while_it_is_needed_and_rests_otherwise() {
    let mount = mount(None);
    let rests = || mount.status().observer.rests && attached(&mount) == 0;
    mount.forebay(["stage"], &[&mount.path("a")]).ok();
    wait_until("it is detached", rests);
    for name in ["first", "second"] {
        run(&mut job(&mount, name, "cat a a >/dev/null"), COMMAND).ok();
        assert!(!mount.status().observer.rests && attached(&mount) > 0, "the next one may begin at once");
        let report = report(&mount, name);
        assert_eq!((of(&report, "a", "bytes"), of(&report, "a", "opens")), (6_000_000, 2), "{report}");
        assert_eq!((&report["observer"], &report["missing"]), (&"ebpf".into(), &serde_json::json!([])), "{report}");
        wait_until("it rests again", rests);
    }
    // `top` counts everything between two samples, however long its interval is.
    let mount = &mount;
    let answer = thread::scope(|scope| {
        let top = scope.spawn(move || {
            let mut top = Command::new(forebay());
            run(top.args(["--json", "top", "--interval", "20s", "--count", "1"]).arg(mount.place.mnt()), COMMAND).ok()
        });
        wait_until("it is attached for `top`", || !rests());
        // Waits until `top` has taken its first sample.
        thread::sleep(Duration::from_secs(2));
        fs::read(mount.path("a")).unwrap();
        thread::sleep(Duration::from_secs(10));
        fs::read(mount.path("a")).unwrap();
        top.join().unwrap()
    });
    let sample: Value = serde_json::from_str(&answer.out).unwrap();
    assert_eq!(sample["others"]["bytes"], 6_000_000, "{answer}");

    let always = Mount::new(Options::policy("[observer]\nat-work = \"always\"\n"));
    wait_until("it starts", || always.status().observer.why.is_none());
    // Without this policy the observer would rest after a second.
    thread::sleep(Duration::from_secs(3));
    assert!(!always.status().observer.rests && attached(&always) > 0);
}

/// `forebay run` passes a signal on to its command, and the job has ended when `forebay run` ends.
#[test]
fn a_job_that_is_asked_to_end_ends_and_is_reported() {
    let mount = mount(None);
    let ready = mount.place.at("ready");
    let script =
        format!("trap 'exit 9' TERM; cat a >/dev/null; touch {}; while :; do sleep 0.02; done", ready.display());
    let running = Running::new(&mut job(&mount, "asked", &script));
    wait_until("it runs", || ready.exists());
    // SAFETY: a plain system call on a child process that was not reaped.
    unsafe { libc::kill(running.0.id().cast_signed(), libc::SIGTERM) };
    assert_eq!(running.end(), Some(9));
    let report = report(&mount, "asked");
    assert!(report["ended_unix"].is_u64() && of(&report, "a", "bytes") == 3_000_000, "{report}");
    assert_eq!(report["interrupted"], false, "{report}");
}
