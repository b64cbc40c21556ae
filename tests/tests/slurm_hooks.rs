//! Prolog, epilog and task-prolog by hand, in situations that Slurm seldom makes: what becomes of the results in the
//! scratch directory of a job.

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use forebay_tests::mount::{COMMAND, Mount};
use forebay_tests::process::{Answer, forebay, run, wait_until};
use forebay_tests::scratch::{job, listed, scratch};
use forebay_tests::servers::slurm::directives::{self, USER, names, script};
use serde_json::Value;

const NO_DAEMON: i32 = 3;
const BUSY: i32 = 6;
const RESULT: [&str; 2] =
    ["#DW fb scratch=16MiB profile=none", "#DW copy_out source=$DW_JOB_STRIPED/out destination=MOUNT/out"];

/// A node, its records, and the exchange directory. Its job has the number 7.
struct Node {
    mount: Mount,
}

impl Node {
    /// The controller has told what the job asks for.
    fn new(directives: &[&str]) -> Self {
        let mount = directives::mount(1, 100);
        chown(mount.path(""), Some(USER), None).unwrap();
        let node = Self { mount };
        node.request(directives);
        node
    }

    /// The controller tells what a job asks for.
    fn request(&self, directives: &[&str]) {
        let text = self.mount.place.at("script");
        fs::write(&text, script(&self.mount, directives, "true")).unwrap();
        let mut command = Command::new(forebay());
        command.args(["slurm", "bb", "data-in", "--exchange"]).arg(self.exchange()).arg("7").arg(text);
        run(&mut command, COMMAND).ok();
    }

    /// The controller tells how the job ended.
    fn ended(&self, outcome: &str) {
        let dir = self.exchange().join("job.7");
        let request: Value = serde_json::from_slice(&fs::read(dir.join("request.json")).unwrap()).unwrap();
        let outcome = serde_json::json!({ "attempt": request["attempt"], "outcome": outcome });
        fs::write(dir.join("outcome.json"), outcome.to_string()).unwrap();
    }

    /// The controller forgets the job.
    fn teardown(&self) {
        let mut command = Command::new(forebay());
        run(command.args(["slurm", "bb", "teardown", "--exchange"]).arg(self.exchange()).arg("7"), COMMAND).ok();
    }

    fn exchange(&self) -> PathBuf {
        self.mount.place.at("exchange")
    }

    fn records(&self) -> PathBuf {
        self.mount.place.at("records")
    }

    fn hook(&self, name: &str, variables: &[(&str, &str)]) -> Answer {
        let mut command = Command::new(forebay());
        command.args(["slurm", name, "--mount"]).arg(self.mount.place.mnt());
        command.arg("--exchange").arg(self.exchange()).arg("--records").arg(self.records());
        if name != "task-prolog" {
            command.args(["--within", "8s"]);
        }
        command.envs([("SLURM_JOB_ID", "7"), ("SLURM_JOB_UID", "65534"), ("SLURMD_NODENAME", "n1")]);
        command.env_remove("SLURM_JOB_RESTART_COUNT").env_remove("SLURM_NODELIST").env_remove("SLURM_JOB_NODELIST");
        run(command.envs(variables.iter().copied()), COMMAND)
    }

    /// The job has written a result. Returns its path.
    fn write(&self) -> PathBuf {
        let dir = fs::read_link(self.records().join("7.scratch")).unwrap();
        let result = dir.join("out");
        fs::write(&result, "result").unwrap();
        chown(&result, Some(USER), None).unwrap();
        result
    }

    fn report(&self) -> Value {
        serde_json::from_slice(&fs::read(self.exchange().join("job.7/node.n1.json")).unwrap()).unwrap()
    }

    fn committed(&self) -> String {
        assert!(listed(&self.mount).is_empty(), "{:?}", listed(&self.mount));
        assert_eq!(names(&self.records()), Vec::<String>::new());
        fs::read_to_string(self.mount.pool("out")).unwrap()
    }
}

/// SEMANTICS 82: "The results of a job are committed however the job ended."
#[test]
fn results_outlive_an_epilog_whose_daemon_is_dead_and_are_committed_by_the_next_one() {
    let node = Node::new(&RESULT);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    node.mount.kill_all();
    let answer = node.hook("epilog", &[]).refused(NO_DAEMON, &["SLURM_JOB_ID=7", "slurm epilog"]);
    assert!(answer.err.contains("job stage-out slurm-7"), "{answer}");
    node.mount.mount();
    job(&node.mount, "stage-out", "slurm-7", &["--wait", "60s"]);
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    node.hook("epilog", &[]).ok();
    assert_eq!(node.committed(), "result");
    assert_eq!(node.report()["progress"], "written-back");
}

/// SEMANTICS 71: "An allocation whose job names results in it keeps it, with what it occupies and without its reservation,
/// until they are committed or given up."
#[test]
fn results_outlive_an_epilog_that_knows_nothing_of_the_job() {
    let node = Node::new(&RESULT);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    // As after a restart of the machine.
    fs::remove_dir_all(node.records()).unwrap();
    node.mount.umount();
    node.mount.mount();
    for _ in 0..2 {
        let answer = node.hook("epilog", &[]).ok();
        assert!(answer.err.contains("is not committed, and stays"), "{answer}");
        assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    }
    job(&node.mount, "teardown", "slurm-7", &[]);
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    let kept = &listed(&node.mount)[0];
    assert!(kept["limit_bytes"].is_null(), "it holds what it occupies: {kept}");
    // The next daemon keeps it, too.
    sleep(Duration::from_millis(1_100));
    node.mount.umount();
    node.mount.mount();
    sleep(Duration::from_secs(1));
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    // Another job of this number does not get it, but the next attempt of the job begins anew.
    let begin = |more: &[&str]| {
        let mut command = Command::new(forebay());
        run(command.args(["job", "begin", "slurm-7", "--mount"]).arg(node.mount.place.mnt()).args(more), COMMAND)
    };
    begin(&[]).refused(BUSY, &["earlier job of this name"]);
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    begin(&["--requeues", "1"]).ok();
    assert!(!result.exists() && listed(&node.mount).is_empty());
}

/// SEMANTICS 82: "if that is not known, they stay in the scratch directory."
#[test]
fn an_epilog_that_is_repeated_discards_no_results_of_which_the_fate_is_unknown() {
    let node = Node::new(&[RESULT[0], RESULT[1], "#DW fb when=success"]);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    for _ in 0..2 {
        let answer = node.hook("epilog", &[]).ok();
        assert!(answer.err.contains("has not told how the job ended"), "{answer}");
        assert_eq!(fs::read_to_string(&result).unwrap(), "result");
        assert_eq!(node.report()["progress"], "results-missing");
    }
    assert_eq!(names(&node.records()), ["7.json"], "nothing else is kept of it");
    // The controller tells at last.
    node.ended("succeeded");
    node.hook("epilog", &[]).ok();
    assert_eq!(node.committed(), "result");
}

#[test]
fn a_repeated_epilog_destroys_a_persistent_directory_that_was_in_use() {
    let create = "#DW create_persistent name=set capacity=1MiB access_mode=private pool=forebay";
    let node = Node::new(&[RESULT[0], RESULT[1], "#DW fb when=success", create, "#DW destroy_persistent name=set"]);
    node.hook("prolog", &[]).ok();
    node.write();
    // Another job of the user asks for the same.
    fs::copy(node.records().join("7.json"), node.records().join("8.json")).unwrap();
    let answer = node.hook("epilog", &[]).ok();
    assert!(answer.err.contains("job 8 uses it"), "{answer}");
    assert_eq!(listed(&node.mount).len(), 2);
    fs::remove_file(node.records().join("8.json")).unwrap();
    node.ended("succeeded");
    node.hook("epilog", &[]).ok();
    wait_until("it is destroyed", || listed(&node.mount).is_empty());
    assert_eq!(node.committed(), "result");
}

#[test]
fn a_repeated_epilog_commits_what_is_left_and_names_nothing_else() {
    let second = "#DW copy_out source=$DW_JOB_STRIPED/more destination=MOUNT/taken";
    let node = Node::new(&[RESULT[0], RESULT[1], second]);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    let more = result.with_file_name("more");
    fs::create_dir(&more).unwrap();
    fs::write(more.join("f"), "f").unwrap();
    [&more, &more.join("f")].iter().for_each(|path| chown(path, Some(USER), None).unwrap());
    // A directory replaces no file.
    fs::write(node.mount.path("taken"), "before").unwrap();
    node.hook("epilog", &[]).ok();
    assert_eq!(node.report()["reasons"].as_array().unwrap().len(), 1, "{}", node.report());
    fs::remove_file(node.mount.path("taken")).unwrap();
    let answer = node.hook("epilog", &[]).ok();
    assert_eq!(node.report()["progress"], "written-back", "{answer}");
    assert_eq!(fs::read_to_string(node.mount.pool("taken/f")).unwrap(), "f");
    assert_eq!(node.committed(), "result");
}

#[test]
fn records_of_results_that_were_dealt_with_are_forgotten() {
    let node = Node::new(&[RESULT[0], RESULT[1], "#DW fb when=success"]);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    node.hook("epilog", &[]).ok();
    assert_eq!(names(&node.records()), ["7.json"]);
    scratch(&node.mount, "discard", &[result.parent().unwrap().to_str().unwrap()]).ok();
    node.hook("epilog", &[("SLURM_JOB_ID", "8")]).ok();
    assert_eq!(names(&node.records()), Vec::<String>::new());
}

/// SEMANTICS 71: "A scratch directory stays until it is discarded, or until the allocation of its name is over."
#[test]
fn a_failed_write_back_frees_the_space_of_a_job_without_results() {
    let node = Node::new(&["#DW fb scratch=16MiB profile=none stage_out=MOUNT/none"]);
    node.hook("prolog", &[]).ok();
    node.write();
    let answer = node.hook("epilog", &[]).ok();
    assert!(answer.err.contains("not in the pool yet: none"), "{answer}");
    assert!(listed(&node.mount).is_empty(), "{:?}", listed(&node.mount));
}

#[test]
fn tasks_do_not_run_if_their_stage_in_is_not_recorded_and_their_results_are_not_given_up() {
    let node = Node::new(&RESULT);
    node.hook("prolog", &[]).ok();
    assert!(node.hook("task-prolog", &[]).ok().out.contains("export FOREBAY_JOB_DIR="));
    let result = node.write();
    // As if the prolog could not store that it has ended.
    let path = node.records().join("7.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (record["is_staged"], record["scratch"]) = (false.into(), Value::Null);
    fs::write(&path, record.to_string()).unwrap();
    let refused = node.hook("task-prolog", &[]).out;
    assert!(refused.contains("print forebay: stage-in failed") && !refused.contains("export"), "{refused}");
    // Tasks of another attempt than that of the record do not run either.
    (record["is_staged"], record["request"]["attempt"]) = (true.into(), "before".into());
    fs::write(&path, record.to_string()).unwrap();
    let refused = node.hook("task-prolog", &[]).out;
    assert!(refused.contains("no prolog has run on this node"), "{refused}");
    let request: Value =
        serde_json::from_slice(&fs::read(node.exchange().join("job.7/request.json")).unwrap()).unwrap();
    (record["is_staged"], record["request"]["attempt"]) = (false.into(), request["attempt"].clone());
    fs::write(&path, record.to_string()).unwrap();
    let answer = node.hook("epilog", &[]).ok();
    assert!(answer.err.contains("the stage-in has failed"), "{answer}");
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    assert_eq!(node.report()["progress"], "results-missing");
}

/// The reports of a job that is torn down are gone, also those of a node that could not stage.
#[test]
fn a_node_that_cannot_tell_whether_the_job_ran_keeps_what_is_in_its_scratch_directory() {
    let two = [("SLURM_NODELIST", "n[1-2]")];
    let node = Node::new(&RESULT);
    node.hook("prolog", &two).ok();
    let result = node.write();
    node.teardown();
    let answer = node.hook("epilog", &two).ok();
    assert!(answer.err.contains("does not tell any more") && answer.err.contains("forebay scratch commit"), "{answer}");
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    assert!(!node.mount.path("out.n1").exists());
}

/// SEMANTICS 71: "An allocation whose job names results in it keeps it, with what it occupies and without its reservation,
/// until they are committed or given up."
///
/// Slurm gives the number of a job again when it has used all of them.
#[test]
fn a_job_that_gets_no_allocation_leaves_the_results_of_an_earlier_job_of_its_number() {
    let node = Node::new(&[RESULT[0], RESULT[1], "#DW fb when=success"]);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    node.hook("epilog", &[]).ok();
    let copy_in = "#DW copy_in source=MOUNT/in/0 destination=$DW_JOB_STRIPED/in";
    for outcome in [None, Some("given_up")] {
        node.teardown();
        if outcome.is_some() {
            // Before, it is in `staging-out`.
            job(&node.mount, "teardown", "slurm-7", &[]);
        }
        node.request(&[RESULT[0], RESULT[1], copy_in]);
        let answer = node.hook("prolog", &[]).ok();
        assert!(answer.err.contains("an earlier job of this name"), "{answer}");
        assert_eq!(node.report()["progress"], "stage-in-failed");
        if let Some(outcome) = outcome {
            node.ended(outcome);
        }
        let answer = node.hook("epilog", &[]).ok();
        assert_eq!(fs::read_to_string(&result).unwrap(), "result", "{answer}");
        assert_eq!(node.report()["progress"], "stage-in-failed", "it has no results");
    }
}

/// SEMANTICS 82: "The results of a job are committed however the job ended."
#[test]
fn results_at_a_mount_that_is_gone_are_missing() {
    let node = Node::new(&RESULT);
    node.hook("prolog", &[]).ok();
    let result = node.write();
    // As if this mount were another one than that with the scratch directory.
    let path = node.records().join("7.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (record["scratch_mount"], record["begun"]) = ("/gone".into(), serde_json::json!(["/gone"]));
    fs::write(&path, record.to_string()).unwrap();
    let answer = node.hook("epilog", &[]).ok();
    assert_eq!(node.report()["progress"], "results-missing", "{answer}");
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    assert!(names(&node.records()).contains(&"7.json".to_owned()), "the epilog can be repeated");
}

/// SEMANTICS 82: "The results of a job are committed however the job ended."
///
/// The controller forgets a job that has waited long enough for its epilogs.
#[test]
fn an_epilog_of_a_job_of_two_nodes_can_be_repeated_after_its_teardown() {
    let two = [("SLURM_NODELIST", "n[1-2]")];
    let node = Node::new(&[RESULT[0], RESULT[1], "#DW fb when=success"]);
    node.hook("prolog", &two).ok();
    node.write();
    let mut report = node.report();
    report["node"] = "n2".into();
    fs::write(node.exchange().join("job.7/node.n2.json"), report.to_string()).unwrap();
    node.ended("succeeded");
    node.mount.kill_all();
    node.hook("epilog", &two).refused(NO_DAEMON, &["SLURM_JOB_ID=7", "slurm epilog"]);
    node.teardown();
    node.mount.mount();
    let answer = node.hook("epilog", &two).ok();
    assert!(listed(&node.mount).is_empty(), "{answer}");
    assert_eq!(names(&node.records()), Vec::<String>::new());
    assert_eq!(fs::read_to_string(node.mount.pool("out.n1")).unwrap(), "result");
}

/// SEMANTICS 83: "Only `scancel --hurry` gives up results that are to be committed."
///
/// What an attempt wrote that is repeated is no result. Both are told only once.
#[test]
fn a_repeated_epilog_commits_nothing_of_an_attempt_that_was_interrupted_or_given_up() {
    for outcome in [None, Some("given_up")] {
        let node = Node::new(&RESULT);
        node.hook("prolog", &[]).ok();
        node.write();
        node.mount.kill_all();
        let variables = match outcome {
            None => vec![("SLURM_JOB_RESTART_COUNT", "1")],
            Some(outcome) => {
                node.ended(outcome);
                Vec::new()
            }
        };
        let answer = node.hook("epilog", &variables).refused(NO_DAEMON, &["gives it up"]);
        node.teardown();
        node.mount.mount();
        let repeated = node.hook("epilog", &[]).ok();
        assert!(!node.mount.path("out").exists(), "{outcome:?}: {answer}{repeated}");
        assert!(listed(&node.mount).is_empty(), "{outcome:?}: {answer}{repeated}");
        assert_eq!(names(&node.records()), Vec::<String>::new(), "{outcome:?}: {answer}{repeated}");
    }
}
