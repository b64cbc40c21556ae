//! What becomes of the results of jobs with `#DW` directives, and directories that outlive their jobs, on a real Slurm.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_tests::mount::Mount;
use forebay_tests::servers::slurm::Slurm;
use forebay_tests::servers::slurm::directives::{self, names, scratch_dirs, script, shown};

const FILE_BYTES: usize = 100_000;
/// Slurm refuses burst buffers to root.
const USER: &[&str] = &["--uid=65534"];
const SCRATCH: &str = "#DW jobdw pool=forebay type=scratch capacity=64MiB access_mode=private";
const RESULT: &str = "#DW copy_out source=$DW_JOB_STRIPED/out destination=MOUNT/out";

/// The user of the jobs may write to the mount.
fn mount() -> Mount {
    let mount = directives::mount(4, FILE_BYTES);
    std::os::unix::fs::chown(mount.path(""), Some(directives::USER), None).unwrap();
    mount
}

fn slurm(mount: &Mount) -> Slurm {
    Slurm::with_burst_buffer(&mount.place, "20s")
}

/// Waits until the controller has torn down what a job had, and nothing is left of it.
fn nothing_left(slurm: &Slurm) {
    slurm.wait("the exchange directory is empty", || names(&slurm.exchange()).is_empty());
    slurm.wait_until_idle();
    let records = slurm.exchange().with_file_name("records");
    assert_eq!(names(&records), Vec::<String>::new());
    let state = slurm.node().0;
    assert!(!state.contains("DRAIN"), "{state}\n{}", slurm.hooks());
}

/// SEMANTICS 82: "The results of a job are committed however the job ended. With `when=success` they are committed only
/// if its script ended with exit code 0; if that is not known, they stay in the scratch directory."
///
/// To an epilog, a job that was cancelled has the status of one that succeeded.
#[test]
fn results_that_only_success_makes_good_are_given_up_by_a_failed_job() {
    let mount = mount();
    let slurm = slurm(&mount);
    let directives = [SCRATCH, RESULT, "#DW fb when=success"];
    let commands = |end: &str| format!("echo $SLURM_JOB_ID >$DW_JOB_STRIPED/out; echo x >$FOREBAY_MOUNT/log; {end}");
    let failed = slurm.submit(USER, &script(&mount, &directives, &commands("exit 3")));
    slurm.wait_for(&failed, "FAILED");
    nothing_left(&slurm);
    assert!(!mount.path("out").exists() && scratch_dirs(&mount).is_empty(), "{}", slurm.hooks());
    assert!(slurm.hooks().contains("its results are given up (when=success)"), "{}", slurm.hooks());
    assert_eq!(fs::read_to_string(mount.pool("log")).unwrap(), "x\n", "what it wrote to the mount is written back");
    let cancelled = slurm.submit(USER, &script(&mount, &directives, &commands("touch $FOREBAY_MOUNT/ran; sleep 600")));
    slurm.wait("the job runs", || mount.path("ran").exists());
    slurm.call("scancel", &[&cancelled]).ok();
    slurm.wait_for(&cancelled, "CANCELLED");
    nothing_left(&slurm);
    assert!(!mount.path("out").exists() && scratch_dirs(&mount).is_empty(), "{}", slurm.hooks());
    let good = slurm.submit(USER, &script(&mount, &directives, &commands("exit 0")));
    slurm.completed(&good);
    nothing_left(&slurm);
    assert_eq!(fs::read_to_string(mount.pool("out")).unwrap(), format!("{good}\n"), "{}", slurm.hooks());
    // The default: results are moved however the job ended.
    let failed = slurm.submit(USER, &script(&mount, &[SCRATCH, RESULT], &commands("exit 3")));
    slurm.wait_for(&failed, "FAILED");
    nothing_left(&slurm);
    assert_eq!(fs::read_to_string(mount.pool("out")).unwrap(), format!("{failed}\n"));
}

/// SEMANTICS 82: "if that is not known, they stay in the scratch directory."
#[test]
fn results_stay_if_it_is_not_known_how_the_job_ended() {
    let mount = mount();
    let mut slurm = slurm(&mount);
    let directives = [SCRATCH, RESULT, "#DW fb when=success"];
    let commands =
        "echo x >$DW_JOB_STRIPED/out; touch $FOREBAY_MOUNT/ran; while [ -e $FOREBAY_MOUNT/ran ]; do sleep .1; done";
    let job = slurm.submit(USER, &script(&mount, &directives, commands));
    slurm.wait("the job runs", || mount.path("ran").exists());
    slurm.store(&job);
    // The plugin never begins its part.
    slurm.hold("data-out");
    fs::remove_file(mount.path("ran")).unwrap();
    slurm.wait("the epilog has ended", || slurm.hooks().contains("has not told how the job ended"));
    slurm.release("data-out");
    slurm.wait_for(&job, "COMPLETED");
    slurm.wait("it is told", || slurm.line(&job, "SystemComment").contains("stay in the scratch directory"));
    let dir = scratch_dirs(&mount).split(": ").next().unwrap().to_owned();
    assert_eq!(fs::read_to_string(Path::new(&dir).join("out")).unwrap(), "x\n");
    slurm.kill_controller();
}

/// SEMANTICS 83: "Only `scancel --hurry` gives up results that are to be committed. What the job wrote to the mount is
/// kept even then."
#[test]
fn only_a_hurried_cancel_gives_up_results() {
    let mount = mount();
    let slurm = slurm(&mount);
    // Slurm kills it some seconds after the cancel: until then, the plugin has been told.
    let commands = "trap '' TERM; echo part >$DW_JOB_STRIPED/out; echo x >$FOREBAY_MOUNT/log; touch $FOREBAY_MOUNT/ran
        while true; do sleep .1; done";
    let job = slurm.submit(USER, &script(&mount, &[SCRATCH, RESULT], commands));
    slurm.wait("the job runs", || mount.path("ran").exists());
    slurm.call("scancel", &["--hurry", &job]).ok();
    slurm.wait_for(&job, "CANCELLED");
    nothing_left(&slurm);
    assert!(!mount.path("out").exists(), "{}", slurm.hooks());
    assert_eq!(scratch_dirs(&mount), "");
    assert_eq!(fs::read_to_string(mount.path("log")).unwrap(), "x\n", "files of the mount are never given up");
    assert_eq!(mount.status().leased_bytes, 0);
    fs::remove_file(mount.path("ran")).unwrap();
    // Without a hurry, the same job keeps them.
    let job = slurm.submit(USER, &script(&mount, &[SCRATCH, RESULT], commands));
    slurm.wait("the job runs", || mount.path("ran").exists());
    slurm.call("scancel", &[&job]).ok();
    slurm.wait("its result is in the pool", || mount.pool("out").exists());
    nothing_left(&slurm);
}

#[test]
fn a_job_that_runs_out_of_time_keeps_its_results() {
    let mount = mount();
    let slurm = slurm(&mount);
    let commands = "echo part >$DW_JOB_STRIPED/out; echo x >$FOREBAY_MOUNT/log; touch $FOREBAY_MOUNT/ran; sleep 600";
    let job = slurm.submit(&["--uid=65534", "--time=5"], &script(&mount, &[SCRATCH, RESULT], commands));
    slurm.wait("the job runs", || mount.path("ran").exists());
    // In place of five minutes.
    slurm.call("scontrol", &["update", &format!("JobId={job}"), "EndTime=now"]).ok();
    slurm.wait_for(&job, "TIMEOUT");
    nothing_left(&slurm);
    for (file, bytes) in [("out", "part\n"), ("log", "x\n")] {
        assert_eq!(fs::read_to_string(mount.pool(file)).unwrap(), bytes, "{}", slurm.hooks());
    }
    assert_eq!((scratch_dirs(&mount), mount.status().leased_bytes), (String::new(), 0));
    slurm.wait_until_idle();
}

#[test]
fn tasks_are_told_how_much_was_staged() {
    let mount = mount();
    let slurm = slurm(&mount);
    let commands = "echo \"<$FOREBAY_STAGED>\"; cat $FOREBAY_MOUNT/in/* >/dev/null";
    let directives = ["#DW fb stage_in=MOUNT/in profile=none"];
    for staged in [4 * FILE_BYTES, 0] {
        let job = slurm.submit(USER, &script(&mount, &directives, commands));
        slurm.completed(&job);
        assert_eq!(slurm.output(&job), format!("<{staged}>\n"), "{}", slurm.log());
    }
    nothing_left(&slurm);
}

#[test]
fn jobs_with_one_profile_name_are_runs_of_one_job() {
    let mount = mount();
    let slurm = slurm(&mount);
    let dirs: [PathBuf; 2] = ["one", "two"].map(|name| mount.place.at(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let staged = |dir: &Path, profile: &str| {
        mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
        let chdir = format!("--chdir={}", dir.display());
        let directive = format!("#DW fb profile={profile}");
        let job =
            slurm.submit(&["--uid=65534", &chdir], &script(&mount, &[&directive], "cat $FOREBAY_MOUNT/in/* | wc -c"));
        slurm.completed(&job);
        assert_eq!(slurm.output(&job).trim(), (4 * FILE_BYTES).to_string());
        shown(&mount, &job)["allocation"]["staged"]["bytes"].as_u64().unwrap()
    };
    assert_eq!(staged(&dirs[0], "train50"), 0);
    assert_eq!(staged(&dirs[1], "train50"), 4 * FILE_BYTES as u64, "another directory, and the same name");
    assert_eq!(staged(&dirs[0], "train51"), 0, "another name");
    assert_eq!(staged(&dirs[0], "none"), 0);
    nothing_left(&slurm);
}

/// SEMANTICS 84: "A persistent directory belongs to one user and one node. It is there until a job of its user destroys
/// it, and is not destroyed while another job uses it."
#[test]
fn a_persistent_directory_outlives_its_job_and_is_its_users_alone() {
    let mount = mount();
    let slurm = slurm(&mount);
    let create = "#DW create_persistent name=set capacity=16MiB access_mode=private type=scratch pool=forebay";
    let commands = "echo kept >$FOREBAY_PERSISTENT_set/file; [ $DW_PERSISTENT_STRIPED_set = $FOREBAY_PERSISTENT_set ]";
    let job = slurm.submit(USER, &script(&mount, &[create], commands));
    slurm.completed(&job);
    nothing_left(&slurm);
    assert!(scratch_dirs(&mount).contains("persistent-65534-set"), "{}", scratch_dirs(&mount));
    // It is not created again. It stays while another job on the node uses it.
    let uses = ["#DW persistentdw name=set"];
    let waits = "cat $FOREBAY_PERSISTENT_set/file; touch $FOREBAY_MOUNT/ran; while [ -e $FOREBAY_MOUNT/ran ]; do sleep .1; done";
    let user = slurm.submit(USER, &script(&mount, &uses, waits));
    slurm.wait("the job runs", || mount.path("ran").exists());
    let other = slurm.submit(&["--uid=1"], &script(&mount, &uses, "true"));
    slurm.wait_for(&other, "FAILED");
    assert!(slurm.output(&other).contains("no such directory of user 1:"), "{}", slurm.output(&other));
    let destroys = ["#DW destroy_persistent name=set"];
    let job = slurm.submit(USER, &script(&mount, &destroys, "true"));
    slurm.wait_for(&job, "COMPLETED");
    slurm.wait("it is told", || slurm.line(&job, "SystemComment").contains(&format!("job {user} uses it")));
    fs::remove_file(mount.path("ran")).unwrap();
    slurm.completed(&user);
    assert_eq!(slurm.output(&user), "kept\n");
    let job = slurm.submit(USER, &script(&mount, &destroys, "true"));
    slurm.completed(&job);
    slurm.wait("it is gone", || scratch_dirs(&mount).is_empty());
    // A job that needs it does not start.
    let job = slurm.submit(USER, &script(&mount, &uses, "touch $FOREBAY_MOUNT/started"));
    slurm.wait_for(&job, "FAILED");
    assert!(slurm.output(&job).contains("node n1 has no such directory of user 65534"), "{}", slurm.output(&job));
    assert!(!mount.path("started").exists());
}
