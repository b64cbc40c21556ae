//! Jobs with `#DW` directives on a real Slurm, with `burst_buffer.lua` of `packaging/slurm`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use forebay_tests::mount::{Mount, content};
use forebay_tests::process::{forebay, run};
use forebay_tests::servers::slurm::directives::{self, names, scratch_dirs, script, shown};
use forebay_tests::servers::slurm::{Slurm, version};

const CALL: Duration = Duration::from_secs(180);
const FILES: u64 = 8;
const FILE_BYTES: usize = 100_000;
/// Slurm refuses burst buffers to root.
const USER: &[&str] = &["--uid=65534"];
const JOBDW: &str = "#DW jobdw pool=forebay type=scratch capacity=64MiB access_mode=striped";

/// The user of the jobs may write to the mount.
fn mount() -> Mount {
    let mount = directives::mount(FILES, FILE_BYTES);
    std::os::unix::fs::chown(mount.path(""), Some(directives::USER), None).unwrap();
    mount
}

fn slurm(mount: &Mount) -> Slurm {
    Slurm::with_burst_buffer(&mount.place, "20s")
}

fn undrained(slurm: &Slurm) {
    let (state, reason) = slurm.node();
    assert!(!state.contains("DRAIN"), "{state}: {reason}\n{}", slurm.hooks());
}

/// Waits until the controller has torn down what a job had, and nothing is left of it.
fn nothing_left(slurm: &Slurm) {
    slurm.wait("the exchange directory is empty", || names(&slurm.exchange()).is_empty());
    let records = slurm.exchange().with_file_name("records");
    assert_eq!(names(&records), Vec::<String>::new());
}

#[test]
fn a_job_is_staged_in_and_its_results_are_in_the_pool() {
    let mount = mount();
    let slurm = slurm(&mount);
    let pool = slurm.call("scontrol", &["show", "burstbuffer"]).ok().out;
    assert!(pool.contains("forebay"), "{pool}");
    let directives = [
        JOBDW,
        "#DW stage_in type=directory source=MOUNT/in destination=$DW_JOB_STRIPED/in",
        "#DW stage_out type=directory source=$DW_JOB_STRIPED/out destination=MOUNT/out",
        "#DW fb stage_in=MOUNT/in profile=none",
    ];
    let commands = "set -e; cd $DW_JOB_STRIPED; [ $PWD = $FOREBAY_JOB_DIR ]; mkdir out; cat in/* | sha256sum >out/sum
        cat in/* >out/all; cat $FOREBAY_MOUNT/in/0 >/dev/null";
    let job = slurm.submit(USER, &script(&mount, &directives, commands));
    slurm.completed(&job);
    let all: Vec<u8> = (0..FILES).flat_map(|at| content(at, FILE_BYTES)).collect();
    assert_eq!(fs::read(mount.pool("out/all")).unwrap(), all, "{}", slurm.log());
    assert_eq!(fs::read_to_string(mount.pool("out/sum")).unwrap().len(), 68);
    let report = shown(&mount, &job);
    assert_eq!(report["allocation"]["staged"]["files"], FILES, "{report}");
    assert_eq!(report["allocation"]["phase"], "done", "{report}");
    nothing_left(&slurm);
    assert_eq!(scratch_dirs(&mount), "");
    undrained(&slurm);
}

#[test]
fn a_job_reads_its_view_which_ends_with_it() {
    let mount = mount();
    // A view that all see takes the owner.
    std::os::unix::fs::chown(mount.pool("in"), Some(directives::USER), None).unwrap();
    let slurm = slurm(&mount);
    let commands = "grep -c ' MOUNT/in ro' /proc/self/mountinfo; cat MOUNT/in/* >MOUNT/copy
        ! touch MOUNT/in/new 2>/dev/null";
    let job = slurm.submit(USER, &script(&mount, &["#DW fb view=MOUNT/in"], commands));
    slurm.completed(&job);
    assert_eq!(slurm.output(&job).trim(), "1", "{}", slurm.log());
    let all: Vec<u8> = (0..FILES).flat_map(|at| content(at, FILE_BYTES)).collect();
    assert_eq!(fs::read(mount.pool("copy")).unwrap(), all);
    // What it read in the view was seen.
    let report = shown(&mount, &job);
    let read = |name: &str| {
        let files = report["files"].as_array().unwrap_or_else(|| panic!("{report}"));
        files.iter().find(|file| file["path"] == name).map_or(0, |file| file["bytes"].as_u64().unwrap())
    };
    assert!((0..FILES).all(|at| read(&format!("in/{at}")) >= FILE_BYTES as u64), "{report}");
    let views = run(Command::new(forebay()).args(["view", "list"]).arg(mount.place.mnt()), CALL).ok().out;
    assert_eq!(views, "");
    fs::write(mount.path("in/new"), "x").unwrap();
    // A view that cannot be made does not keep the job from running.
    let writer = fs::File::options().append(true).open(mount.path("in/1")).unwrap();
    let job = slurm.submit(USER, &script(&mount, &["#DW fb view=MOUNT/in"], "cat $FOREBAY_MOUNT/in/0 | wc -c"));
    slurm.completed(&job);
    drop(writer);
    assert_eq!(slurm.output(&job).trim(), FILE_BYTES.to_string(), "{}", slurm.log());
    undrained(&slurm);
}

/// Holds jobs whose tasks are refused.
fn hold_refused(mount: &Mount, slurm: &Slurm) {
    let config = mount.place.at("slurm/slurm.conf");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{text}RequeueExitHold=79\n")).unwrap();
    slurm.call("scontrol", &["reconfigure"]).ok();
}

/// SECURITY 21: "What is staged for a job is what its user may read, with its groups."
///
/// SECURITY 22: "A view that a job of Slurm asks for, and that all on the node see, is laid only over a file or a
/// directory that the job's user owns."
#[test]
fn a_job_stages_and_shows_no_more_than_its_user_may() {
    const OTHER: u32 = 1;
    let mount = mount();
    std::os::unix::fs::chown(mount.pool("in"), Some(OTHER), None).unwrap();
    let slurm = slurm(&mount);
    hold_refused(&mount, &slurm);
    // The job may read the directory. Its owner can go on writing to it.
    let commands = "grep -c ' MOUNT/in ' /proc/self/mountinfo; touch $FOREBAY_MOUNT/runs
        while [ -e $FOREBAY_MOUNT/runs ]; do sleep .1; done; cat MOUNT/in/0 | wc -c";
    let job = slurm.submit(USER, &script(&mount, &["#DW fb view=MOUNT/in profile=none"], commands));
    slurm.wait("the job runs", || mount.path("runs").exists());
    fs::write(mount.path("in/new"), "x").unwrap();
    fs::remove_file(mount.path("runs")).unwrap();
    slurm.completed(&job);
    assert_eq!(slurm.output(&job).split_whitespace().collect::<Vec<_>>(), ["0", &FILE_BYTES.to_string()]);
    let said = slurm.hooks();
    assert!(said.contains("no view: ") && said.contains("it belongs to user 1"), "{said}");
    // Now the job may not read it.
    fs::set_permissions(mount.path("in"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    for directive in ["#DW fb view=MOUNT/in", "#DW fb stage_in=MOUNT/in/0"] {
        let job = slurm.submit(USER, &script(&mount, &[directive], "touch $FOREBAY_MOUNT/ran"));
        slurm.wait("the job is held", || slurm.job(&job) == "SPECIAL_EXIT");
        assert!(slurm.output(&job).contains("user 65534 may not"), "{}\n{}", slurm.output(&job), slurm.hooks());
        assert_eq!(shown(&mount, &job)["allocation"]["staged"]["files"], 0);
        slurm.call("scancel", &[&job]).ok();
    }
    assert!(!mount.path("ran").exists());
    slurm.wait_until_idle();
    undrained(&slurm);
}

/// The file system with the exchange directory is not mounted on the node.
#[test]
fn a_job_does_not_run_on_a_node_that_does_not_see_what_it_asks_for() {
    let mount = mount();
    let slurm = slurm(&mount);
    hold_refused(&mount, &slurm);
    let replace = |name: &str, what: &str, by: &str| {
        let path = mount.place.at("slurm").join(name);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(what), "{text}");
        fs::write(&path, text.replace(what, by)).unwrap();
    };
    let exchange = format!("--exchange {}", slurm.exchange().display());
    ["prolog", "epilog", "task-prolog"].iter().for_each(|hook| replace(hook, &exchange, &format!("{exchange}-unseen")));
    replace("burst_buffer.lua", "data_out_wait = \"60s\"", "data_out_wait = \"3s\"");
    let job = slurm.submit(USER, &script(&mount, &[JOBDW], "touch $FOREBAY_MOUNT/ran"));
    slurm.wait("the job is held", || slurm.job(&job) == "SPECIAL_EXIT");
    assert!(slurm.output(&job).contains("does not see what the job asks for"), "{}", slurm.log());
    assert!(!mount.path("ran").exists());
    slurm.wait("the controller tells", || slurm.line(&job, "SystemComment").contains("no node has reported"));
    slurm.call("scancel", &[&job]).ok();
    // Other jobs run, also one that a job with directives has submitted.
    let inherited = format!("--export=ALL,FOREBAY_DIRECTIVES={job}");
    let plain = slurm.submit(&["--uid=65534", &inherited], &script(&mount, &[], "touch $FOREBAY_MOUNT/ran"));
    slurm.completed(&plain);
    assert!(mount.path("ran").exists());
    undrained(&slurm);
}

/// What the hooks and the controller say, without Slurm.
#[test]
fn a_request_that_no_node_has_seen_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("script"), "#!/bin/sh\n#DW fb scratch=1MiB\n").unwrap();
    let bb = |words: &[&str], exchange: &str, more: &[&Path]| {
        let mut command = Command::new(forebay());
        run(command.args(["slurm", "bb"]).args(words).arg("--exchange").arg(at(exchange)).arg("17").args(more), CALL)
    };
    bb(&["data-in"], "seen", &[&at("script")]).ok();
    let out = bb(&["data-out", "--wait", "1s"], "seen", &[]).refused(1, &[]).out;
    assert!(out.contains("no node has reported") && out.contains("seen"), "{out}");
    let task = |exchange: &str, of: &str| {
        let mut command = Command::new(forebay());
        command.args(["slurm", "task-prolog", "--records"]).arg(at("records")).arg("--exchange").arg(at(exchange));
        run(command.env("SLURM_JOB_ID", "18").env("FOREBAY_DIRECTIVES", of), CALL)
    };
    fs::create_dir(at("empty")).unwrap();
    for exchange in ["empty", "none"] {
        let refused = task(exchange, "18").refused(1, &[]);
        assert!(refused.out.contains("does not see what the job asks for"), "{refused}");
        assert!(refused.out.contains(exchange), "{refused}");
        assert!(!task(exchange, "17").ok().out.contains("does not run"), "it is another job's");
    }
    fs::create_dir(at("records")).unwrap();
    let record = |is_staged: bool| {
        let request = serde_json::json!({ "attempt": "a", "staging": { "scratch_bytes": 1 } });
        let record = serde_json::json!({
            "request": request, "scratch_mount": null, "scratch": null, "is_staged": is_staged, "requeues": 0
        });
        fs::write(at("records/18.json"), record.to_string()).unwrap();
    };
    record(true);
    assert!(!task("none", "18").ok().out.contains("does not run"), "its prolog has seen it");
    record(false);
    task("none", "18").refused(1, &["has not staged what the job asks for"]);
}

#[test]
fn a_directive_that_makes_no_sense_is_refused_at_the_submission() {
    let mount = mount();
    let slurm = slurm(&mount);
    let directives = ["#DW jodbw type=scratch"];
    let refused = slurm.try_submit(USER, &script(&mount, &directives, "true"));
    assert_ne!(refused.code, Some(0));
    assert!(refused.err.contains("line 2") && refused.err.contains("did you mean `jobdw`?"), "{refused}");
    let refused = slurm.try_submit(USER, &script(&mount, &["#DW fb policy=mine"], "true"));
    assert!(refused.err.contains("not there yet"), "{refused}");
    nothing_left(&slurm);
    let check = run(slurm.command(forebay()).args(["slurm", "check"]), CALL);
    assert!(!check.out.contains("burst_buffer") && !check.out.contains("BurstBufferType"), "{check}");
    fs::remove_file(mount.place.at("slurm/burst_buffer.conf")).unwrap();
    run(slurm.command(forebay()).args(["slurm", "check"]), CALL).refused(1, &["burst_buffer.conf beside slurm.conf"]);
}

#[test]
fn a_job_whose_input_is_missing_waits_and_names_it() {
    let mount = mount();
    let slurm = slurm(&mount);
    let job = slurm.submit(USER, &script(&mount, &["#DW fb stage_in=MOUNT/none"], "true"));
    slurm
        .wait("the job is held with its reason", || slurm.line(&job, "SystemComment").contains("/none does not exist"));
    slurm.wait_for(&job, "PENDING");
    slurm.call("scancel", &[&job]).ok();
    slurm.wait_for(&job, "CANCELLED");
    nothing_left(&slurm);
    undrained(&slurm);
}

#[test]
fn a_job_whose_stage_in_fails_does_not_run_and_is_held() {
    let mount = mount();
    let slurm = slurm(&mount);
    hold_refused(&mount, &slurm);
    // A file is asked for, and it is a directory.
    let directives = [JOBDW, "#DW stage_in type=file source=MOUNT/in destination=$DW_JOB_STRIPED/a"];
    let job = slurm.submit(USER, &script(&mount, &directives, "touch $FOREBAY_MOUNT/ran"));
    slurm.wait("the job is held", || slurm.job(&job) == "SPECIAL_EXIT");
    slurm.wait_until_idle();
    assert!(slurm.output(&job).contains("it is no file"), "{}\n{}", slurm.output(&job), slurm.log());
    assert!(!mount.path("ran").exists(), "{}", slurm.log());
    let reason = slurm.line(&job, "SystemComment");
    assert!(reason.contains("stage-in failed, and the job did not run"), "{reason}\n{}", slurm.log());
    undrained(&slurm);
    slurm.call("scancel", &[&job]).ok();
    // The controller does not know what a glob stands for.
    let job = slurm.submit(USER, &script(&mount, &["#DW fb stage_in=MOUNT/none/*.x"], "touch $FOREBAY_MOUNT/ran"));
    slurm.wait("the job is held", || slurm.job(&job) == "SPECIAL_EXIT");
    assert!(slurm.output(&job).contains("none"), "{}", slurm.output(&job));
    assert!(!mount.path("ran").exists(), "{}", slurm.log());
    // A scratch directory that does not fit.
    let job = slurm.submit(USER, &script(&mount, &["#DW fb scratch=900TiB"], "touch $FOREBAY_MOUNT/ran"));
    slurm.wait("the job is held", || slurm.job(&job) == "SPECIAL_EXIT");
    assert!(!mount.path("ran").exists(), "{}", slurm.log());
    slurm.call("scancel", &["--user=nobody"]).ok();
    slurm.wait_until_idle();
    undrained(&slurm);
    nothing_left(&slurm);
    assert_eq!(scratch_dirs(&mount), "");
}

#[test]
fn results_that_cannot_be_committed_stay_and_are_named() {
    let mount = mount();
    fs::write(mount.path("taken"), "before").unwrap();
    let slurm = slurm(&mount);
    let directives = [
        "#DW fb scratch=64MiB profile=none",
        "#DW copy_out source=$DW_JOB_STRIPED/out destination=MOUNT/taken",
        "#DW copy_out source=$DW_JOB_STRIPED/good destination=MOUNT/good",
    ];
    // A directory replaces no file.
    let job =
        slurm.submit(USER, &script(&mount, &directives, "cd $DW_JOB_STRIPED; mkdir out; echo x >out/x; echo y >good"));
    slurm.completed(&job);
    // Slurm shows the status to all users.
    let status = || slurm.call("scontrol", &["show", "bbstat"]).ok().out;
    slurm.wait("it is told", || status().contains("results are not in the pool"));
    assert!(!status().contains("/taken"), "{}", status());
    let mut all = slurm.command(forebay());
    let all = run(all.args(["slurm", "bb", "status", "--exchange"]).arg(slurm.exchange()), CALL).ok().out;
    assert!(all.contains("/taken") && !all.contains("/good"), "{all}");
    assert!(slurm.line(&job, "SystemComment").contains("/taken"), "{}", slurm.line(&job, "SystemComment"));
    slurm.wait("the job is torn down", || names(&slurm.exchange()) == [format!("missing.{job}.json")]);
    slurm.completed(&job);
    undrained(&slurm);
    // Nothing is lost.
    let dir = scratch_dirs(&mount).split(": ").next().unwrap().to_owned();
    assert_eq!(fs::read_to_string(Path::new(&dir).join("out/x")).unwrap(), "x\n");
    assert_eq!(fs::read_to_string(mount.path("good")).unwrap(), "y\n");
    mount.forebay(["scratch", "commit"], &[&Path::new(&dir).join("out"), &mount.path("out")]).ok();
    mount
        .forebay(["job", "stage-out", &format!("slurm-{job}"), "--wait", "60s", "--mount"], &[&mount.place.mnt()])
        .ok();
    assert_eq!(fs::read_to_string(mount.pool("out/x")).unwrap(), "x\n");
    assert_eq!(scratch_dirs(&mount), "");
    // A job that has written nothing holds no space.
    let empty = slurm.submit(USER, &script(&mount, &directives, "exit 3"));
    slurm.wait_for(&empty, "FAILED");
    slurm.wait("it is named", || status().contains(&format!("job {empty}: results are not in the pool")));
    slurm.wait_until_idle();
    assert_eq!(scratch_dirs(&mount), "");
    let mut forget = slurm.command(forebay());
    forget.args(["slurm", "bb", "status", "--forget", &empty, "--exchange"]).arg(slurm.exchange());
    run(&mut forget, CALL).ok();
    let mut forget = slurm.command(forebay());
    forget.args(["slurm", "bb", "status", "--forget", &job, "--exchange"]).arg(slurm.exchange());
    run(&mut forget, CALL).ok();
    nothing_left(&slurm);
}

/// The results of the second run replace those of the first. Other files stay.
#[test]
fn a_job_that_runs_again_replaces_its_results() {
    let mount = mount();
    let slurm = slurm(&mount);
    let directives = [
        JOBDW,
        "#DW stage_out type=directory source=$DW_JOB_STRIPED/out destination=MOUNT/out",
        "#DW copy_out source=$DW_JOB_STRIPED/log destination=MOUNT/log",
        "#DW fb profile=none stage_out=MOUNT/out",
    ];
    for run in ["first", "second"] {
        let commands =
            format!("set -e; cd $DW_JOB_STRIPED; mkdir -p out/deep; echo {run} | tee log out/deep/result >out/{run}");
        let job = slurm.submit(USER, &script(&mount, &directives, &commands));
        slurm.completed(&job);
        assert_eq!(fs::read_to_string(mount.pool("out/deep/result")).unwrap(), format!("{run}\n"), "{}", slurm.log());
        assert_eq!(fs::read_to_string(mount.pool("log")).unwrap(), format!("{run}\n"));
        if run == "first" {
            fs::write(mount.path("out/deep/foreign"), "stays").unwrap();
        }
    }
    let mut results = [names(&mount.pool("out")), names(&mount.path("out/deep"))];
    results.iter_mut().for_each(|names| names.sort());
    assert_eq!(results[0], ["deep", "first", "second"]);
    assert_eq!(results[1], ["foreign", "result"], "no conflicts");
    assert_eq!(fs::read_to_string(mount.path("out/deep/foreign")).unwrap(), "stays");
    nothing_left(&slurm);
    assert_eq!(scratch_dirs(&mount), "");
    undrained(&slurm);
}

/// Waits until nothing is left of a job that was cancelled before it ran. Slurm may kill the teardown, together with
/// what it kills of the job. The next controller runs what it has not seen end.
fn torn_down(slurm: &mut Slurm, job: &str, is_gone: impl Fn(&Slurm) -> bool) {
    let is_killed = |slurm: &Slurm| slurm.log().contains(&format!("teardown for JobId={job} terminated by slurmctld"));
    slurm.wait("the teardown has ended", || is_gone(slurm) || is_killed(slurm));
    if !is_gone(slurm) {
        println!("Slurm killed the teardown of {job}");
        slurm.stop_controller();
        slurm.start_controller();
        slurm.wait("nothing is left of the job", || is_gone(slurm));
    }
}

#[test]
fn a_job_that_is_cancelled_leaves_nothing() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    let directives = [JOBDW, "#DW stage_out type=file source=$DW_JOB_STRIPED/part destination=MOUNT/part"];
    let commands = "echo part >$DW_JOB_STRIPED/part; touch $FOREBAY_MOUNT/ran; sleep 600";
    let running = slurm.submit(&["--uid=65534", "-n", "2"], &script(&mount, &directives, commands));
    slurm.wait("the job runs", || mount.path("ran").exists());
    let pending = slurm.submit(&["--uid=65534", "-n", "2"], &script(&mount, &directives, commands));
    slurm.wait("the next one is staged in", || names(&slurm.exchange()).len() == 2);
    slurm.call("scancel", &[&pending]).ok();
    torn_down(&mut slurm, &pending, |slurm| names(&slurm.exchange()).len() == 1);
    slurm.call("scancel", &[&running]).ok();
    slurm.wait_for(&running, "CANCELLED");
    slurm.wait_until_idle();
    // What a job has written is its result, also if it is cancelled.
    slurm.wait("its result is in the pool", || mount.pool("part").exists());
    nothing_left(&slurm);
    assert_eq!(scratch_dirs(&mount), "");
    undrained(&slurm);
}

/// The epilog of the first attempt commits no half result.
#[test]
fn a_requeued_job_begins_anew() {
    let mount = mount();
    let slurm = slurm(&mount);
    let directives = [JOBDW, "#DW stage_out type=directory source=$DW_JOB_STRIPED/out destination=MOUNT/out"];
    let commands = "cd $DW_JOB_STRIPED || exit 9; mkdir out; echo $SLURM_RESTART_COUNT >out/attempt
        [ $SLURM_RESTART_COUNT ] && exit 0; touch $FOREBAY_MOUNT/first; sleep 600";
    let job = slurm.submit(&["--uid=65534", "--requeue"], &script(&mount, &directives, commands));
    slurm.wait("the job runs", || mount.path("first").exists());
    slurm.call("scontrol", &["requeue", &job]).ok();
    slurm.wait_until_idle();
    assert!(!mount.path("out").exists());
    slurm.completed(&job);
    assert_eq!(fs::read_to_string(mount.pool("out/attempt")).unwrap(), "1\n", "{}", slurm.log());
    nothing_left(&slurm);
    undrained(&slurm);
}

#[test]
fn a_controller_that_is_killed_finds_its_jobs_with_directives_again() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    let directives = [JOBDW, "#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=MOUNT/a-$SLURM"];
    assert_ne!(slurm.try_submit(USER, &script(&mount, &directives, "true")).code, Some(0));
    let directives = [JOBDW, "#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=MOUNT/a"];
    let commands =
        "date >$DW_JOB_STRIPED/a; touch $FOREBAY_MOUNT/ran; while [ -e $FOREBAY_MOUNT/ran ]; do sleep .1; done";
    let running = slurm.submit(&["--uid=65534", "-n", "2"], &script(&mount, &directives, commands));
    slurm.wait("the job runs", || mount.path("ran").exists());
    let queued =
        slurm.submit(&["--uid=65534", "-n", "2"], &script(&mount, &["#DW fb stage_in=MOUNT/in"], "ls $FOREBAY_MOUNT"));
    slurm.wait("the next one is staged in", || names(&slurm.exchange()).len() == 2);
    slurm.store(&running);
    slurm.kill_controller();
    fs::remove_file(mount.path("ran")).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    slurm.start_controller();
    slurm.wait_for(&running, "COMPLETED");
    assert!(mount.pool("a").exists(), "{}", slurm.hooks());
    slurm.call("scancel", &[&queued]);
    nothing_left(&slurm);
    undrained(&slurm);
}

/// Slurm forgets a burst buffer that it has not stored yet, and the job waits until it is cancelled.
#[test]
fn a_controller_that_is_killed_in_a_stage_in_begins_it_again() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    slurm.hold("data-in");
    let directives = [
        JOBDW,
        "#DW stage_in type=directory source=MOUNT/in destination=$DW_JOB_STRIPED/in",
        "#DW stage_out type=file source=$DW_JOB_STRIPED/all destination=MOUNT/all",
    ];
    let job = slurm.submit(USER, &script(&mount, &directives, "cd $DW_JOB_STRIPED && cat in/* >all"));
    slurm.wait("its stage-in has begun", || slurm.is_held("data-in"));
    slurm.store_burst_buffer();
    slurm.kill_controller();
    slurm.release("data-in");
    slurm.start_controller();
    // If Slurm has stored that the job is in its stage-in, the job waits for two minutes. Else it begins at once.
    let mut is_told = false;
    slurm.wait("it runs", || {
        if slurm.field("job", &job, "Reason") == "BeginTime" && !is_told {
            slurm.call("scontrol", &["update", &format!("jobid={job}"), "starttime=now"]).ok();
            is_told = true;
        }
        slurm.job(&job) == "COMPLETED"
    });
    slurm.completed(&job);
    let all: Vec<u8> = (0..FILES).flat_map(|at| content(at, FILE_BYTES)).collect();
    assert_eq!(fs::read(mount.pool("all")).unwrap(), all, "{}", slurm.log());
    nothing_left(&slurm);
    undrained(&slurm);
}

#[test]
fn a_job_that_is_cancelled_in_its_stage_in_leaves_nothing() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    slurm.hold("data-in");
    let job = slurm.submit(USER, &script(&mount, &[JOBDW], "touch $FOREBAY_MOUNT/ran"));
    slurm.wait("its stage-in has begun", || slurm.is_held("data-in"));
    assert_eq!(slurm.job(&job), "PENDING");
    slurm.call("scancel", &[&job]).ok();
    slurm.wait_for(&job, "CANCELLED");
    slurm.release("data-in");
    let buffers = |slurm: &Slurm| slurm.call("scontrol", &["show", "burstbuffer"]).ok().out;
    torn_down(&mut slurm, &job, |slurm| !buffers(slurm).contains("JobID="));
    // A stage-in that has outlived its job would write now.
    std::thread::sleep(Duration::from_secs(1));
    nothing_left(&slurm);
    assert!(!mount.path("ran").exists());
    undrained(&slurm);
}

/// The number of arguments that Slurm 22.05 and Slurm 24.11 give to each function of the plugin. `None`: not called.
const CALLS: [(&str, Option<usize>, usize); 13] = [
    ("job_process", Some(1), 4),
    ("pools", Some(0), 0),
    ("setup", Some(6), 7),
    ("data_in", Some(2), 5),
    ("test_data_in", None, 5),
    ("real_size", Some(1), 4),
    ("paths", Some(3), 6),
    ("pre_run", Some(2), 5),
    ("post_run", Some(2), 5),
    ("data_out", Some(2), 5),
    ("test_data_out", None, 5),
    ("job_teardown", Some(3), 5),
    ("get_status", Some(0), 2),
];

/// A version between the two may give more than the older one.
#[test]
fn each_function_of_the_plugin_gets_what_the_version_gives() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    let is_24_11 = version() >= (24, 11);
    slurm.rewrite_submissions();
    // `job_submit.lua` adds `pool=`, and makes a directive of `#FB`.
    let directives = ["#FB stage_in=MOUNT/in", "#DW jobdw type=scratch capacity=64MiB access_mode=striped"];
    let job = slurm.submit(USER, &script(&mount, &directives, "cd $DW_JOB_STRIPED && echo $PWD"));
    slurm.completed(&job);
    assert!(slurm.output(&job).starts_with('/'), "{}", slurm.output(&job));
    assert_eq!(shown(&mount, &job)["allocation"]["staged"]["files"], FILES);
    nothing_left(&slurm);
    slurm.call("scontrol", &["show", "bbstat"]).ok();
    let calls = slurm.plugin_calls();
    for (name, before, since) in CALLS {
        let wanted = if is_24_11 { Some(since) } else { before };
        let is_right = wanted.is_none_or(|wanted| calls.get(name).is_some_and(|given| *given >= wanted));
        assert!(is_right, "{name}: {wanted:?} of {calls:?}");
    }
    let shown = slurm.call("scontrol", &["show", "burstbuffer"]).ok().out;
    assert_eq!(shown.lines().any(|line| line.trim() == "PollInterval=1"), is_24_11, "{shown}");
    undrained(&slurm);
}

/// The scripts of `packaging/slurm`, without Slurm.
#[test]
fn the_shim_quotes_what_slurm_gives_it() {
    let packaged = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/slurm");
    let program = "slurm = { SUCCESS = 0, ERROR = -1, log_info = function() end }
        local bb = dofile('burst_buffer.lua')
        bb.settings.forebay = 'echo'
        local status, text = bb.forebay('x', [[a'b; exit 3]], '$HOME `id`')
        assert(status == 0 and text == [[slurm bb x a'b; exit 3 $HOME `id`]], text)
        bb.settings.forebay = 'false'
        assert(slurm_bb_job_process('x') == -1 and slurm_bb_job_process('x', '1', '1', {}) == -1)
        assert(slurm_bb_setup() == 0)
        local path = os.tmpname()
        assert(slurm_bb_paths(17, 'script', path) == 0)
        assert(io.open(path):read('*a') == 'FOREBAY_DIRECTIVES=17\\n')
        os.remove(path)
        assert(slurm_bb_paths(17, 'script', '/none/path') == -1)
        local submit = dofile('job_submit.lua')
        local script = '#!/bin/sh\\n#FB stage_in=/a\\n\\n#DW jobdw capacity=1G\\necho\\n#FB x'
        local wanted = '#!/bin/sh\\n#DW fb stage_in=/a\\n\\n#DW jobdw pool=forebay capacity=1G\\necho\\n#FB x'
        assert(submit.rewritten(script) == wanted, submit.rewritten(script))
        assert(submit.rewritten(wanted) == wanted)
        assert(slurm_job_submit({}) == 0)";
    run(Command::new("lua5.4").arg("-e").arg(program).current_dir(packaged), CALL).ok();
}
