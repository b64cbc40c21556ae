//! Jobs of a real Slurm, with the scripts of `packaging/slurm`.

use std::fs;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place, content};
use forebay_tests::process::wait_until;
use forebay_tests::servers::Server;
use forebay_tests::servers::s3::Versitygw;
use forebay_tests::servers::slurm::Slurm;
use serde_json::Value;

const CALL: Duration = Duration::from_secs(180);
const FILES: u64 = 24;
const FILE_BYTES: u64 = 100_000;

/// A job that reads all files below `in`, and writes their sum to `result-NUMBER`.
const READS: &str = "set -e; cd $FOREBAY_MOUNT; cat in/* | sha256sum > result-$SLURM_JOB_ID";

fn fill(mount: &Mount) {
    fs::create_dir(mount.pool("in")).unwrap();
    (0..FILES).for_each(|at| fs::write(mount.pool(format!("in/{at}")), content(at, FILE_BYTES as usize)).unwrap());
}

/// Policy, so that nothing is fetched ahead of readers that are not jobs, and nothing is flushed that no request asks
/// for.
const POLICY: &str = "[default]\nflush = \"manual\"\n[prefetch]\nonline = false\n";

fn mount() -> Mount {
    // Tasks of all users see it.
    let mount = Mount::new(Options { more: vec!["-o".into(), "allow_other".into()], ..Options::policy(POLICY) });
    fill(&mount);
    mount
}

fn slurm(mount: &Mount) -> Slurm {
    Slurm::start(&mount.place, "20s")
}

fn shown(mount: &Mount, job: &str) -> Value {
    let id = format!("slurm-{job}");
    let answer = mount.forebay(["--json", "job", "show", &id, "--mount"], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).unwrap()
}

fn phase(mount: &Mount, job: &str) -> String {
    shown(mount, job)["allocation"]["phase"].as_str().unwrap().to_owned()
}

/// Returns the sums over all files that a job read below `in`: bytes, and bytes that it had to wait for.
fn read(report: &Value) -> (u64, u64) {
    let inputs =
        report["files"].as_array().unwrap().iter().filter(|file| file["path"].as_str().unwrap().starts_with("in/"));
    inputs.fold((0, 0), |(read, pool), file| {
        (read + file["bytes"].as_u64().unwrap(), pool + file["pool_bytes"].as_u64().unwrap())
    })
}

fn undrained(slurm: &Slurm) {
    let (state, reason) = slurm.node();
    assert!(!state.contains("DRAIN"), "{state}: {reason}\n{}", slurm.hooks());
}

#[test]
fn the_second_submission_is_staged_before_it_starts() {
    let mount = mount();
    let slurm = slurm(&mount);
    let first = slurm.submit(&["--uid=65534"], READS);
    // A job of another user has no right to write here.
    slurm.wait_for(&first, "FAILED");
    slurm.wait_until_idle();
    std::os::unix::fs::chown(mount.path(""), Some(65534), None).unwrap();
    let first = slurm.submit(&["--uid=65534"], READS);
    slurm.completed(&first);
    let cold = shown(&mount, &first);
    assert_eq!(cold["observer"], "ebpf");
    assert_eq!(read(&cold).0, FILES * FILE_BYTES, "{cold}");
    assert!(read(&cold).1 > 0, "the first run waits for the pool: {cold}");
    mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    let second = slurm.submit(&["--uid=65534"], READS);
    slurm.completed(&second);
    let warm = shown(&mount, &second);
    assert_eq!(read(&warm), (FILES * FILE_BYTES, 0), "{warm}");
    assert_eq!(warm["allocation"]["staged"]["bytes"], FILES * FILE_BYTES, "{warm}");
    // The results are in the pool when the node is free again.
    for job in [&first, &second] {
        assert_eq!(phase(&mount, job), "done");
        let sum = fs::read_to_string(mount.pool(format!("result-{job}"))).unwrap();
        assert!(sum.ends_with("  -\n") && sum.len() == 68, "{sum}");
    }
    assert_eq!(mount.status().leased_bytes, 0);
    undrained(&slurm);
}

/// SEMANTICS 65: "The first request that a process of a Slurm job sends to the mount makes the process's step a part of
/// the job, if the job's allocation has started."
#[test]
fn all_steps_of_a_job_are_observed_and_no_process_beside_it() {
    let mount = mount();
    let slurm = slurm(&mount);
    let script = "cat $FOREBAY_MOUNT/in/1 >/dev/null; srun cat $FOREBAY_MOUNT/in/2 >/dev/null
        setsid sh -c 'cat $FOREBAY_MOUNT/in/3 >/dev/null; touch $FOREBAY_MOUNT/detached' & sleep 1
        touch $FOREBAY_MOUNT/waits; while [ -e $FOREBAY_MOUNT/waits ]; do sleep .1; done";
    let job = slurm.submit(&[], script);
    slurm.wait("the job waits", || mount.path("waits").exists() && mount.path("detached").exists());
    fs::read(mount.path("in/4")).unwrap();
    fs::remove_file(mount.path("waits")).unwrap();
    slurm.completed(&job);
    let report = shown(&mount, &job);
    let files = report["files"].as_array().unwrap();
    let mut inputs: Vec<&str> = files.iter().filter_map(|file| file["path"].as_str()?.strip_prefix("in/")).collect();
    inputs.sort_unstable();
    assert_eq!(inputs, ["1", "2", "3"], "{report}");
}

#[test]
fn a_cancelled_job_keeps_its_data_and_no_lease() {
    let mount = mount();
    let slurm = slurm(&mount);
    let first = slurm.submit(&[], READS);
    slurm.completed(&first);
    let script = format!("{READS}; echo part > part; sleep 600");
    let job = slurm.submit(&[], &script);
    slurm.wait("the job has written", || mount.path("part").exists());
    assert_eq!(phase(&mount, &job), "running");
    assert!(mount.status().leased_bytes >= FILES * FILE_BYTES);
    slurm.call("scancel", &[&job]).ok();
    slurm.wait_for(&job, "CANCELLED");
    slurm.wait_until_idle();
    assert_eq!((phase(&mount, &job).as_str(), mount.status().leased_bytes), ("done", 0));
    assert!(mount.pool("part").exists(), "{}\n{}", shown(&mount, &job), mount.log());
    assert_eq!(fs::read_to_string(mount.pool("part")).unwrap(), "part\n");
    undrained(&slurm);
}

#[test]
fn a_requeued_job_begins_a_new_attempt() {
    let mount = mount();
    let slurm = slurm(&mount);
    let script = format!("[ $SLURM_RESTART_COUNT ] && {{ {READS}; exit 0; }}; touch $FOREBAY_MOUNT/first; sleep 600");
    let job = slurm.submit(&["--requeue"], &script);
    slurm.wait("the job runs", || mount.path("first").exists());
    slurm.call("scontrol", &["requeue", &job]).ok();
    slurm.wait_until_idle();
    // Slurm begins it again when its credential has expired. Before that, slurmd would not run the prolog again.
    slurm.completed(&job);
    let report = shown(&mount, &job);
    assert_eq!(
        (report["allocation"]["attempt"].as_u64(), phase(&mount, &job).as_str()),
        (Some(2), "done"),
        "{}\n{}",
        slurm.log(),
        mount.log()
    );
    assert!(mount.pool(format!("result-{job}")).exists());
    undrained(&slurm);
}

/// The pool is an S3 server, which is killed in each phase.
#[test]
fn a_pool_that_is_gone_drains_no_node_and_loses_nothing() {
    let mut server = Versitygw::start();
    (0..FILES).for_each(|at| _ = server.curl(&["-X", "PUT", "-d", &at.to_string()], &format!("in/{at}")));
    let policy = format!("{POLICY}[pool]\ndeadline = \"2s\"\nretry = \"200ms\"\n");
    let mount = Mount::new(Options { remote: Some(server.remote()), ..Options::policy(&policy) });
    let slurm = Slurm::start(&mount.place, "8s");
    // While the pool is gone, a new name can be created where all names are known.
    let job = slurm.submit(&[], &format!("ls $FOREBAY_MOUNT; {READS}"));
    slurm.completed(&job);
    // In the prolog: the job starts, and reads what is resident.
    server.kill();
    let job = slurm.submit(&[], READS);
    slurm.completed(&job);
    let dirty = format!("result-{job}");
    assert!(!fs::read(mount.path(&dirty)).unwrap().is_empty());
    assert_eq!(phase(&mount, &job), "failed");
    assert!(slurm.hooks().contains(&dirty), "the epilog names it: {}", slurm.hooks());
    undrained(&slurm);
    // While a job runs.
    server.resume();
    let script = format!("{READS}; touch ran; while [ -e ran ]; do sleep .1; done; echo more > more");
    let job = slurm.submit(&[], &script);
    slurm.wait("the job runs", || mount.path("ran").exists());
    server.kill();
    fs::remove_file(mount.path("ran")).unwrap();
    slurm.completed(&job);
    assert_eq!((phase(&mount, &job).as_str(), fs::read(mount.path("more")).unwrap()), ("failed", b"more\n".to_vec()));
    undrained(&slurm);
    server.resume();
    wait_until("the pool answers", || mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]).code == Some(0));
    for name in [dirty.as_str(), "more"] {
        assert_eq!(server.remote().tree.read(name).unwrap(), fs::read(mount.path(name)).unwrap());
    }
}

#[test]
fn a_full_fast_pool_drains_no_node() {
    let mount = Mount::new(Options { limit: Some("2M".into()), ..Options::policy(POLICY) });
    fill(&mount);
    let slurm = slurm(&mount);
    for _ in 0..2 {
        let job = slurm.submit(&[], READS);
        slurm.completed(&job);
        assert!(mount.pool(format!("result-{job}")).exists());
    }
    undrained(&slurm);
}

#[test]
fn a_daemon_that_is_killed_in_each_phase_goes_on() {
    let options = Options { throttle: Some("1MiB/s,1ms".into()), ..Options::policy(POLICY) };
    let mount = Mount::new(options);
    fill(&mount);
    let slurm = slurm(&mount);
    let job = slurm.submit(&[], READS);
    slurm.completed(&job);
    let kill = || {
        let old = mount.worker();
        mount.kill_worker();
        mount.wait_for_other_worker(old);
    };
    mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    let script =
        format!("{READS}; head -c 3000000 /dev/urandom > large; touch ran; while [ -e ran ]; do sleep .1; done");
    let job = slurm.submit(&[], &script);
    let id = format!("slurm-{job}");
    let knows = || mount.forebay(["job", "ready", &id, "--mount"], &[&mount.place.mnt()]).code == Some(6);
    slurm.wait("it is staged in", knows);
    kill();
    slurm.wait("the job runs", || mount.path("ran").exists());
    kill();
    let large = fs::read(mount.path("large")).unwrap();
    fs::remove_file(mount.path("ran")).unwrap();
    slurm.wait("it is staged out", || phase(&mount, &job) == "staging-out");
    kill();
    slurm.completed(&job);
    slurm.wait("the results are in the pool", || phase(&mount, &job) == "done");
    assert_eq!(fs::read(mount.pool("large")).unwrap(), large);
    undrained(&slurm);
}

#[test]
fn a_controller_that_is_killed_finds_its_jobs_again() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    let script = format!("{READS}; touch ran; while [ -e ran ]; do sleep .1; done");
    let job = slurm.submit(&[], &script);
    slurm.wait("the job runs", || mount.path("ran").exists());
    slurm.store(&job);
    slurm.kill_controller();
    fs::remove_file(mount.path("ran")).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    slurm.start_controller();
    slurm.completed(&job);
    assert_eq!(phase(&mount, &job), "done");
    undrained(&slurm);
}

#[test]
fn a_node_whose_daemon_is_dead_is_drained_and_its_job_waits() {
    let mount = mount();
    let slurm = slurm(&mount);
    mount.kill_all();
    let job = slurm.submit(&[], READS);
    slurm.wait("the node is drained", || slurm.node().0.contains("DRAIN"));
    assert!(slurm.hooks().contains("is not running"), "{}", slurm.hooks());
    slurm.wait_for(&job, "PENDING");
    mount.mount();
    slurm.call("scontrol", &["update", "nodename=n1", "state=resume"]).ok();
    slurm.call("scontrol", &["release", &job]).ok();
    slurm.completed(&job);
    assert!(mount.pool(format!("result-{job}")).exists());
}

#[test]
fn a_daemon_that_hangs_is_a_broken_node_and_is_not_waited_for() {
    let mount = Mount::new(Options::policy(POLICY));
    let worker = rustix::process::Pid::from_raw(mount.worker().pid as i32).unwrap();
    rustix::process::kill_process(worker, rustix::process::Signal::STOP).unwrap();
    let mut command = std::process::Command::new(forebay_tests::process::forebay());
    command.args(["slurm", "prolog", "--within", "3s", "--mount"]).arg(mount.place.mnt());
    command.envs([("SLURM_JOB_ID", "1"), ("SLURM_JOB_UID", "0")]);
    let answer = forebay_tests::process::run(&mut command, Duration::from_secs(60));
    rustix::process::kill_process(worker, rustix::process::Signal::CONT).unwrap();
    answer.refused(3, &["has not answered"]);
}

/// The exchange directory lies on a file system that has stopped to answer.
#[test]
fn an_exchange_directory_that_does_not_answer_breaks_no_node() {
    let mount = Mount::new(Options::policy(POLICY));
    let shared = Mount::new(Options::policy(POLICY));
    let (exchange, records, script) = (shared.path("exchange"), mount.place.at("records"), mount.place.at("script"));
    fs::write(&script, "#!/bin/sh\n#DW fb profile=none\n").unwrap();
    let call = |job: &str, words: &[&str]| {
        let mut command = std::process::Command::new(forebay_tests::process::forebay());
        command.arg("slurm").args(words).arg("--exchange").arg(&exchange);
        command.envs([("SLURM_JOB_ID", job), ("SLURM_JOB_UID", "0"), ("FOREBAY_DIRECTIVES", job)]);
        command
    };
    let hook = |job: &str, name: &str| {
        let mut command = call(job, &[name, "--within", "3s"]);
        command.arg("--mount").arg(mount.place.mnt()).arg("--records").arg(&records);
        forebay_tests::process::run(&mut command, CALL)
    };
    forebay_tests::process::run(call("17", &["bb", "data-in"]).arg("17").arg(&script), CALL).ok();
    hook("17", "prolog").ok();
    assert!(records.join("17.json").exists());
    let worker = rustix::process::Pid::from_raw(shared.worker().pid as i32).unwrap();
    rustix::process::kill_process(worker, rustix::process::Signal::STOP).unwrap();
    let (prolog, epilog) = (hook("18", "prolog"), hook("17", "epilog"));
    let mut task = call("18", &["task-prolog"]);
    let task = forebay_tests::process::run(task.arg("--records").arg(&records), CALL);
    rustix::process::kill_process(worker, rustix::process::Signal::CONT).unwrap();
    assert!(prolog.err.contains("what it asks for is not known"), "{prolog}");
    prolog.ok();
    epilog.ok();
    task.refused(1, &["does not see what the job asks for", "has not answered"]);
    assert!(!records.join("17.json").exists());
}

#[test]
fn a_node_without_a_mount_tells_what_is_missing() {
    let place = Place::new();
    let mut command = std::process::Command::new(forebay_tests::process::forebay());
    command.args(["slurm", "prolog", "--mount"]).arg(place.mnt());
    command.envs([("SLURM_JOB_ID", "1"), ("SLURM_JOB_UID", "0")]);
    forebay_tests::process::run(&mut command, Duration::from_secs(60)).refused(3, &["forebay mount"]);
}

#[test]
fn a_sites_configuration_is_checked() {
    let mount = Mount::new(Options::policy(POLICY));
    let slurm = slurm(&mount);
    let check =
        || forebay_tests::process::run(slurm.command(forebay_tests::process::forebay()).args(["slurm", "check"]), CALL);
    let place = mount.place.mnt().display().to_string();
    let answer = check().refused(1, &["BatchStartTimeout=10", "allow_other", &place]);
    assert!(!answer.out.contains("prolog="), "{answer}");
    let config = mount.place.at("slurm/slurm.conf");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("PrologFlags=Alloc\n", "BatchStartTimeout=30\n").replace("Epilog=", "#")).unwrap();
    slurm.call("scontrol", &["reconfigure"]).ok();
    let answer = check().refused(1, &["Epilog= is not set", "PrologFlags= lacks Alloc"]);
    assert!(!answer.out.contains("BatchStartTimeout"), "{answer}");
    // What `install` prints is what `check` wants.
    let mut command = std::process::Command::new(forebay_tests::process::forebay());
    let lines =
        forebay_tests::process::run(command.args(["slurm", "install", "--scripts"]).arg(mount.place.at("slurm")), CALL)
            .ok();
    let text: String = text
        .lines()
        .filter(|line| !line.contains("rolog") && !line.contains("pilog="))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(&config, format!("{text}{}", lines.out)).unwrap();
    slurm.call("scontrol", &["reconfigure"]).ok();
    let answer = check();
    assert!(!answer.out.contains("rolog") && !answer.out.contains("Timeout"), "{answer}");
}
