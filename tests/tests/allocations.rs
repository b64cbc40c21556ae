//! What a batch job holds at a mount, from its declaration until its results are in the pool, without a batch system.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use forebay_daemon::registry::Runtime;
use forebay_tests::cache_node::Node;
use forebay_tests::mount::{COMMAND, Mount, Options, Place, content};
use forebay_tests::process::{Answer, Running, forebay, run, wait_until};
use forebay_tests::scratch;
use forebay_tests::servers::Server;
use forebay_tests::servers::s3::Versitygw;
use serde_json::Value;

const INCOMPLETE: i32 = 1;
const USAGE: i32 = 2;
const NO_DAEMON: i32 = 3;
const BUSY: i32 = 6;

/// A mount whose pool has four files of 1 MiB below `in`, and reads them with 4 MiB/s.
fn slow() -> Mount {
    let options = Options { throttle: Some("4MiB/s,1ms".into()), ..Options::policy("[default]\nflush = \"manual\"\n") };
    let mount = Mount::new(options);
    fill(&mount);
    mount
}

fn fill(mount: &Mount) {
    fs::create_dir(mount.pool("in")).unwrap();
    (0..4).for_each(|at| fs::write(mount.pool(format!("in/{at}")), content(at, 1 << 20)).unwrap());
}

/// `forebay job VERB j`, with further words.
fn job(mount: &Mount, verb: &str, more: &[&str]) -> Answer {
    let mut command = std::process::Command::new(forebay());
    command.args(["--json", "job", verb, "j", "--mount"]).arg(mount.place.mnt()).args(more);
    run(&mut command, COMMAND)
}

fn begin(mount: &Mount, paths: &[&str]) -> Answer {
    let paths: Vec<String> = paths.iter().map(|path| mount.path(path).display().to_string()).collect();
    let words: Vec<&str> = paths.iter().flat_map(|path| ["--stage-in", path]).collect();
    job(mount, "begin", &words).ok()
}

fn value(answer: &Answer) -> Value {
    serde_json::from_str(answer.out.lines().next().unwrap_or("null")).unwrap()
}

fn shown(mount: &Mount) -> Value {
    value(&job(mount, "show", &[]).ok())["allocation"].clone()
}

fn phase(mount: &Mount) -> String {
    shown(mount)["phase"].as_str().unwrap().to_owned()
}

/// Returns how many files below a path are leased by the allocation.
fn leased(mount: &Mount, path: &str) -> usize {
    let answer = mount.forebay(["--json", "ls", "-R"], &[&mount.path(path)]).ok();
    answer.out.lines().filter(|line| serde_json::from_str::<Value>(line).unwrap()["lease_owner"] == "j").count()
}

fn status_of(mount: &Mount, path: &str) -> String {
    let answer = mount.forebay(["--json", "ls"], &[&mount.path(path)]).ok();
    value(&answer)["state"].as_str().unwrap().to_owned()
}

/// SEMANTICS 62: "An allocation keeps what it has reached if the daemon dies: the next daemon goes on with its staging
/// and its write-back."
#[test]
fn staging_goes_on_after_the_death_of_the_daemon() {
    let mount = slow();
    begin(&mount, &["in"]);
    assert_eq!(phase(&mount), "declared");
    job(&mount, "stage-in", &[]).refused(BUSY, &[]);
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    let ready = job(&mount, "ready", &["--wait", "60s"]).ok();
    assert_eq!(value(&ready)["phase"], "ready");
    assert_eq!(leased(&mount, "in"), 4);
    mount.umount();
    mount.mount();
    assert_eq!((phase(&mount).as_str(), leased(&mount, "in")), ("ready", 4));
    job(&mount, "end", &[]).ok();
    assert_eq!(leased(&mount, "in"), 0, "the leases end with the job");
    assert_eq!(status_of(&mount, "in/0"), "resident");
}

/// SEMANTICS 61: "Each verb of an allocation may be repeated, and may arrive in any order that the retries of a
/// scheduler produce."
#[test]
fn verbs_may_be_repeated_and_come_in_any_order() {
    let mount = slow();
    for verb in ["stage-in", "ready", "start", "show"] {
        job(&mount, verb, &[]).refused(USAGE, &["j"]);
    }
    // A job of that name that no allocation began is left alone.
    let mut command = std::process::Command::new(forebay());
    command.args(["run", "--job", "j", "--mount"]).arg(mount.place.mnt()).args(["--", "sleep", "60"]);
    let alone = Running::new(&mut command);
    wait_until("the job runs", || job(&mount, "show", &[]).code == Some(0));
    for verb in ["end", "stage-out", "teardown"] {
        job(&mount, verb, &[]).ok();
    }
    let of_job = value(&job(&mount, "show", &[]).ok());
    assert!(of_job["id"] == "j" && of_job["ended_unix"].is_null(), "{of_job}");
    drop(alone);
    for _ in 0..2 {
        begin(&mount, &["in/0"]);
        job(&mount, "stage-in", &["--wait", "60s"]).ok();
        job(&mount, "ready", &[]).ok();
    }
    // The end of a command that joins the job is not the end of the job.
    let mut command = std::process::Command::new(forebay());
    command.args(["run", "--job", "j", "--mount"]).arg(mount.place.mnt()).args(["--", "true"]);
    run(&mut command, COMMAND).ok();
    assert_eq!(leased(&mount, "in"), 1);
    (0..2).for_each(|_| _ = job(&mount, "start", &[]).ok());
    assert_eq!(phase(&mount), "running");
    job(&mount, "stage-in", &["--wait", "1s"]).ok();
    (0..2).for_each(|_| _ = job(&mount, "stage-out", &["--wait", "60s"]).ok());
    assert_eq!(phase(&mount), "done");
    // What comes too late is refused with the reason, and changes nothing.
    job(&mount, "start", &[]).refused(USAGE, &["done", "forebay job begin"]);
    (0..2).for_each(|_| _ = job(&mount, "teardown", &[]).ok());
    assert_eq!(phase(&mount), "done");
    // A job that is requeued begins again.
    begin(&mount, &["in/1"]);
    assert_eq!((phase(&mount).as_str(), shown(&mount)["attempt"].as_u64()), ("declared", Some(2)));
    job(&mount, "teardown", &[]).ok();
    assert_eq!((phase(&mount).as_str(), leased(&mount, "in")), ("cancelled", 0));
}

#[test]
fn a_job_starts_before_its_staging_has_ended_and_the_staging_goes_on() {
    let mount = slow();
    begin(&mount, &["in"]);
    job(&mount, "stage-in", &[]).refused(BUSY, &[]);
    job(&mount, "start", &[]).ok();
    job(&mount, "ready", &[]).refused(BUSY, &[]);
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    wait_until("all files are staged", || shown(&mount)["staged"]["files"] == 4);
    assert_eq!((phase(&mount).as_str(), leased(&mount, "in")), ("running", 4));
    job(&mount, "teardown", &[]).ok();
}

/// SEMANTICS 64: "The leases of an allocation end when its job ends, at the latest when the allocation is torn down."
#[test]
fn a_cancelled_staging_leaves_no_lease_behind() {
    let mount = slow();
    begin(&mount, &["in"]);
    job(&mount, "stage-in", &[]).refused(BUSY, &[]);
    job(&mount, "teardown", &[]).ok();
    assert_eq!(phase(&mount), "cancelled");
    // Longer than the staging would have taken.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!((leased(&mount, "in"), mount.status().leased_bytes), (0, 0));
}

#[test]
fn a_stage_that_fails_is_told_with_its_reason_and_can_be_repeated() {
    let mount = slow();
    begin(&mount, &["in/0", "in/new"]);
    let answer = job(&mount, "stage-in", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    assert!(value(&answer)["reason"].as_str().unwrap().contains("in/new"), "{answer}");
    job(&mount, "ready", &[]).refused(INCOMPLETE, &[]);
    fs::write(mount.pool("in/new"), "new").unwrap();
    job(&mount, "stage-in", &["--wait", "60s"]).ok();
    assert_eq!(leased(&mount, "in"), 2);
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let mount = Mount::new(Options { limit: Some("3M".into()), ..Options::default() });
    fill(&mount);
    begin(&mount, &["in"]);
    let answer = job(&mount, "stage-in", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    let reason = value(&answer)["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("4194304 bytes are to be staged"), "{reason}");
    // The job can run nevertheless: the mount serves it from the pool.
    job(&mount, "start", &[]).ok();
    assert_eq!(fs::read(mount.path("in/3")).unwrap(), content(3, 1 << 20));
    job(&mount, "end", &[]).ok();
}

/// SEMANTICS 63: "If the write-back of an allocation fails, its phase is `failed`, its reason names what is not in the
/// pool, and these files stay dirty."
#[test]
fn a_failed_write_back_keeps_what_the_job_wrote() {
    let mut server = Versitygw::start();
    let policy = "[default]\nflush = \"manual\"\n[pool]\ndeadline = \"2s\"\nretry = \"200ms\"\n";
    let mount = Mount::new(Options { remote: Some(server.remote()), ..Options::policy(policy) });
    job(&mount, "begin", &[]).ok();
    job(&mount, "start", &[]).ok();
    fs::write(mount.path("result"), "the result").unwrap();
    job(&mount, "end", &[]).ok();
    server.kill();
    let answer = job(&mount, "stage-out", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    let reason = value(&answer)["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("result") && reason.contains("not in the pool yet"), "{reason}");
    assert_eq!((phase(&mount).as_str(), status_of(&mount, "result").as_str()), ("failed", "dirty"));
    // A teardown does not give up data either.
    job(&mount, "teardown", &[]).refused(INCOMPLETE, &[]);
    server.resume();
    wait_until("the pool has the result", || {
        let answer = job(&mount, "stage-out", &["--wait", "60s"]);
        value(&answer)["phase"] == "done"
    });
    assert_eq!(server.remote().tree.read("result").unwrap(), b"the result");
}

#[test]
fn what_is_written_back_is_what_the_job_wrote_and_what_its_user_owns() {
    const USER: u32 = 65534;
    let mount = slow();
    let put = |name: &str, owner: u32| {
        fs::write(mount.path(name), name).unwrap();
        std::os::unix::fs::chown(mount.path(name), Some(owner), None).unwrap();
    };
    put("others", 0);
    // The job may change again what was not in the pool when it started.
    put("checkpoint", USER);
    job(&mount, "begin", &["--uid", "65534"]).ok();
    job(&mount, "start", &[]).ok();
    fs::create_dir(mount.path("results")).unwrap();
    put("results/a", USER);
    put("results/removed", USER);
    fs::remove_file(mount.path("results/removed")).unwrap();
    put("renamed-from", USER);
    fs::rename(mount.path("renamed-from"), mount.path("renamed")).unwrap();
    // A result that does not belong to the user.
    let mut command = std::process::Command::new(forebay());
    command.args(["run", "--job", "j", "--mount"]).arg(mount.place.mnt()).args(["--", "sh", "-c", "echo x > shared"]);
    run(command.current_dir(mount.place.mnt()), COMMAND).ok();
    job(&mount, "stage-out", &["--wait", "60s"]).ok();
    assert_eq!(phase(&mount), "done");
    for name in ["checkpoint", "results/a", "renamed"] {
        assert!(mount.pool(name).exists(), "{name}");
    }
    assert_eq!(fs::read_to_string(mount.pool("shared")).unwrap(), "x\n");
    assert!(!mount.pool("others").exists() && !mount.pool("results/removed").exists());
}

#[test]
fn a_declared_result_that_does_not_exist_is_told() {
    let mount = slow();
    let [result, other] = ["out", "other"].map(|name| mount.path(name).display().to_string());
    job(&mount, "begin", &["--stage-out", &result, "--stage-out", &other]).ok();
    job(&mount, "start", &[]).ok();
    fs::write(mount.path("other"), "there").unwrap();
    let answer = job(&mount, "stage-out", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    assert!(value(&answer)["reason"].as_str().unwrap().starts_with("1 not in the pool yet: out: "), "{answer}");
    assert_eq!(fs::read_to_string(mount.pool("other")).unwrap(), "there", "the rest arrives");
    fs::write(mount.path("out"), "late").unwrap();
    job(&mount, "stage-out", &["--wait", "60s"]).ok();
    assert_eq!(fs::read_to_string(mount.pool("out")).unwrap(), "late");
}

/// SEMANTICS 71: "A scratch directory stays until it is discarded, or until the allocation of its name is over."
#[test]
fn a_failed_write_back_frees_the_space_of_its_scratch_directory_but_no_file_in_it() {
    let options = Options { limit: Some("100M".into()), ..Options::policy("[default]\nflush = \"manual\"\n") };
    let mount = Mount::new(options);
    let none = mount.path("none").display().to_string();
    let create = |id: &str| scratch::scratch(&mount, "create", &["--job", id, "--size", "60MB"]);
    let fail = || {
        job(&mount, "begin", &["--stage-out", &none]).ok();
        let dir = create("j").ok().out.trim().to_owned();
        job(&mount, "start", &[]).ok();
        assert_ne!(create("other").code, Some(0), "there is no room for two");
        std::path::PathBuf::from(dir)
    };
    let dir = fail();
    job(&mount, "stage-out", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    assert_eq!(phase(&mount), "failed");
    assert!(scratch::listed(&mount).is_empty() && !dir.exists(), "it was empty");
    // One that is not empty may have what is to be committed before the write-back is repeated.
    let dir = fail();
    fs::write(dir.join("f"), "x").unwrap();
    let answer = job(&mount, "stage-out", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    assert!(value(&answer)["reason"].as_str().unwrap().contains("is not committed, and stays"), "{answer}");
    wait_until("its reservation has ended", || create("other").code == Some(0));
    assert_eq!(fs::read_to_string(dir.join("f")).unwrap(), "x");
    scratch::commit(&mount, &dir.join("f"), "none").ok();
    job(&mount, "stage-out", &["--wait", "60s"]).ok();
    assert_eq!(fs::read_to_string(mount.pool("none")).unwrap(), "x");
    assert!(!dir.exists());
}

#[test]
fn a_started_job_outlives_its_clients_and_the_daemon_and_is_learned() {
    let mount = Mount::new(Options::default());
    fill(&mount);
    job(&mount, "begin", &["--", "solver", "7"]).ok();
    job(&mount, "start", &[]).ok();
    let read = || {
        let mut command = std::process::Command::new(forebay());
        command.args(["run", "--job", "j", "--mount"]).arg(mount.place.mnt()).args(["--", "cat"]);
        run(command.arg(mount.path("in/2")), COMMAND).ok();
    };
    read();
    let of_job = || value(&job(&mount, "show", &[]).ok());
    assert_eq!((of_job()["ended_unix"].clone(), of_job()["bytes"].clone()), (Value::Null, (1 << 20).into()));
    let profiles = |mount: &Mount| mount.forebay(["--json", "profile", "list", "--mount"], &[&mount.place.mnt()]).ok();
    assert_eq!(profiles(&mount).out, "", "it goes on");
    job(&mount, "end", &[]).ok();
    assert!(of_job()["ended_unix"].is_u64());
    assert!(profiles(&mount).out.contains("solver #"), "{}", profiles(&mount));
    // A job that runs while its daemon dies goes on in the next daemon. It was requeued before its results were there.
    job(&mount, "begin", &["--requeues", "1", "--", "solver", "7"]).ok();
    job(&mount, "stage-in", &["--wait", "60s"]).ok();
    assert_eq!(leased(&mount, "in"), 1, "what the first run read");
    job(&mount, "start", &[]).ok();
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    assert_eq!((phase(&mount).as_str(), of_job()["ended_unix"].clone()), ("running", Value::Null));
    // And in the daemon after an unmount.
    mount.umount();
    mount.mount();
    assert_eq!((phase(&mount).as_str(), of_job()["ended_unix"].clone()), ("running", Value::Null));
    read();
    job(&mount, "end", &[]).ok();
    assert!(of_job()["ended_unix"].is_u64() && of_job()["interrupted"] == true);
}

#[test]
fn bad_arguments_are_refused_by_name() {
    let mount = slow();
    let outside = Path::new("/etc/passwd").display().to_string();
    job(&mount, "begin", &["--stage-in", &outside]).refused(3, &["/etc/passwd"]);
    job(&mount, "begin", &["--uid", "x"]).refused(USAGE, &["--uid"]);
    job(&mount, "ready", &["--wait", "never"]).refused(USAGE, &["--wait"]);
    assert_eq!(job(&mount, "start", &["--pid", "1", "--slurm-job", "2"]).refused(USAGE, &[]).out, "");
    let mut command = std::process::Command::new(forebay());
    command.args(["slurm", "prolog", "--mount"]).arg(mount.place.mnt()).env_remove("SLURM_JOB_ID");
    run(&mut command, COMMAND).refused(USAGE, &["SLURM_JOB_ID"]);
}

/// Messages escape these names in several ways.
#[test]
fn results_with_odd_names_are_written_back() {
    const USER: u32 = 65534;
    let mount = slow();
    job(&mount, "begin", &["--uid", "65534"]).ok();
    job(&mount, "start", &[]).ok();
    fs::create_dir(mount.path("a\"b")).unwrap();
    let odd = [&b"it's"[..], b"a\"b/c", b"line\nbreak", b"tab\t", b"back\\slash", b"\\x41", b"\xc3\xbc", b"\xff"];
    for name in odd.map(OsStr::from_bytes) {
        fs::write(mount.path(name), "1").unwrap();
        std::os::unix::fs::chown(mount.path(name), Some(USER), None).unwrap();
    }
    // Where a link leads does not matter.
    std::os::unix::fs::symlink("/no/such", mount.path("link")).unwrap();
    std::os::unix::fs::lchown(mount.path("link"), Some(USER), None).unwrap();
    // A result that does not belong to the user.
    let mut command = std::process::Command::new(forebay());
    command.args(["run", "--job", "j", "--mount"]).arg(mount.place.mnt()).args([
        "--",
        "sh",
        "-c",
        "echo x > gr\u{f6}\u{df}e",
    ]);
    run(command.current_dir(mount.place.mnt()), COMMAND).ok();
    job(&mount, "stage-out", &["--wait", "60s"]).ok();
    assert_eq!(phase(&mount), "done");
    for name in odd.map(OsStr::from_bytes) {
        assert!(mount.pool(name).exists(), "{}", name.as_bytes().escape_ascii());
    }
    assert!(fs::symlink_metadata(mount.pool("link")).is_ok());
    assert_eq!(fs::read_to_string(mount.pool("gr\u{f6}\u{df}e")).unwrap(), "x\n");
}

/// SEMANTICS 61: "A verb that comes too late is refused, and changes nothing."
#[test]
fn a_write_back_after_a_teardown_is_no_success() {
    let mount = slow();
    job(&mount, "begin", &[]).ok();
    job(&mount, "start", &[]).ok();
    fs::write(mount.path("result"), "1").unwrap();
    job(&mount, "teardown", &[]).ok();
    let answer = job(&mount, "stage-out", &["--wait", "60s"]).refused(INCOMPLETE, &[]);
    assert_eq!(value(&answer)["phase"], "cancelled");
    assert!(!mount.pool("result").exists());
}

/// Without `--mount`, a verb is for all mounts: one without a daemon may hold the results.
#[test]
fn a_mount_without_a_daemon_keeps_a_verb_from_success() {
    let (serves, dead, cached) = (slow(), Mount::manual(), Place::new());
    // No job writes at a cache node.
    let mut node = Node::of(&cached, &[]);
    node.signal(libc::SIGKILL);
    node.wait();
    // Only these three are registered for the commands of this script. Other tests run at the same time.
    let script = "mount --make-rprivate /
        mkdir \"$0/registry\" && mount --bind /run/forebay \"$0/registry\"
        mount -t tmpfs -o mode=755 tmpfs /run/forebay
        for at in \"$2\" \"$3\" \"$4\"; do
            mkdir -m 700 \"/run/forebay/$at\" && mount --bind \"$0/registry/$at\" \"/run/forebay/$at\"
        done
        exec \"$1\" job \"${@:5}\"";
    let all = |words: &[&str]| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "bash", "-euc", script]).arg(serves.place.at("")).arg(forebay());
        let registered = [serves.runtime(), dead.runtime(), Runtime::of(&node.path())];
        command.args(registered.map(|runtime| runtime.dir().file_name().unwrap().to_owned()));
        let answer = run(command.args(words), COMMAND);
        fs::remove_dir(serves.place.at("registry")).unwrap();
        answer
    };
    all(&["begin", "j"]).ok();
    all(&["end", "j"]).ok();
    dead.kill_all();
    for words in [&["stage-out", "j", "--wait", "60s"][..], &["teardown", "j"]] {
        all(words).refused(NO_DAEMON, &[&dead.place.mnt().display().to_string()]);
    }
    // A verb that confirms nothing goes on at the other mount, and notes what it leaves out.
    let place = dead.place.mnt().display().to_string();
    let remedy = format!("forebay umount {place}");
    for words in [&["begin", "k"][..], &["stage-in", "k", "--wait", "60s"], &["start", "k"]] {
        all(words).refused(0, &["left out", &remedy]);
    }
    all(&["ready", "k"]).refused(NO_DAEMON, &[&remedy]);
    // The mount without a daemon may know it.
    all(&["start", "unknown"]).refused(NO_DAEMON, &[&place]);
    all(&["begin", "l", "--stage-in", &format!("{place}/d")]).refused(NO_DAEMON, &[&place]);
    // What is left can still be processed by itself.
    job(&serves, "stage-out", &["--wait", "60s"]).ok();
    // The entry of a cache node that is dead is cleared.
    let cleared = || {
        let mut command = std::process::Command::new(forebay());
        run(command.arg("umount").arg(node.path()), COMMAND)
    };
    cleared().ok();
    cleared().refused(NO_DAEMON, &["is under no forebay mount"]);
}
