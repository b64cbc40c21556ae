//! Jobs on two nodes of a real Slurm. Each node has a fast pool and a mount of its own; the pool is the same.

use std::fs;

use forebay_api::operator::Status;
use forebay_tests::mount::{Mount, content};
use forebay_tests::servers::slurm::Slurm;
use forebay_tests::servers::slurm::directives::{self, names, script};
use serde_json::Value;

/// Slurm refuses burst buffers to root.
const USER: &[&str] = &["--uid=65534", "--nodes=2", "--ntasks-per-node=1"];
const NODES: [&str; 2] = ["n1", "n2"];
const FILES: u64 = 4;
const FILE_BYTES: u64 = 100_000;

/// The user of the jobs may write to the mount.
fn mount() -> Mount {
    let mount = directives::mount(FILES, FILE_BYTES as usize);
    std::os::unix::fs::chown(mount.pool(""), Some(directives::USER), None).unwrap();
    mount
}

/// Returns what the program under test shows of the mount on a node.
fn shown(mount: &Mount, slurm: &Slurm, node: &str, words: &[&str]) -> Value {
    let mnt = mount.place.mnt();
    let mut arguments: Vec<&str> = vec!["--json"];
    arguments.extend(words);
    arguments.push(mnt.to_str().unwrap());
    let mut here = std::process::Command::new(forebay_tests::process::forebay());
    let answer = match node {
        "n2" => slurm.on_second_node(&arguments),
        _ => forebay_tests::process::run(here.args(&arguments), forebay_tests::mount::COMMAND),
    };
    serde_json::from_str(answer.ok().out.trim()).unwrap_or(Value::Null)
}

fn no_scratch(mount: &Mount, slurm: &Slurm) {
    for node in NODES {
        assert_eq!(shown(mount, slurm, node, &["scratch", "list", "--mount"]), Value::Null);
    }
}

fn statuses(mount: &Mount, slurm: &Slurm) -> [Status; 2] {
    NODES.map(|node| serde_json::from_value(shown(mount, slurm, node, &["status"])["status"].take()).unwrap())
}

fn undrained(slurm: &Slurm) {
    slurm.wait_until_idle();
    for node in NODES {
        let state = slurm.field("node", node, "State");
        assert!(!state.contains("DRAIN"), "{node}: {state}\n{}", slurm.hooks());
    }
}

#[test]
fn a_job_is_staged_and_written_back_on_each_of_its_nodes() {
    let mount = mount();
    let slurm = Slurm::with_two_nodes(&mount.place, "20s");
    let directives = [
        "#DW jobdw pool=forebay type=scratch capacity=64MiB access_mode=private",
        "#DW stage_in type=directory source=MOUNT/in destination=$DW_JOB_STRIPED/in",
        "#DW stage_out type=directory source=$DW_JOB_STRIPED/out destination=MOUNT/out",
        "#DW fb stage_in=MOUNT/in profile=none",
    ];
    let commands = "srun sh -c 'mkdir $DW_JOB_STRIPED/out && cat $DW_JOB_STRIPED/in/* >$DW_JOB_STRIPED/out/all
        echo $SLURMD_NODENAME $FOREBAY_STAGED >$DW_JOB_STRIPED/out/node'";
    let job = slurm.submit(USER, &script(&mount, &directives, commands));
    slurm.completed(&job);
    slurm.wait("it is torn down", || names(&slurm.exchange()).is_empty());
    let all: Vec<u8> = (0..FILES).flat_map(|at| content(at, FILE_BYTES as usize)).collect();
    for node in NODES {
        let out = mount.pool(format!("out.{node}"));
        assert_eq!(fs::read(out.join("all")).unwrap(), all, "{}", slurm.log());
        let told = fs::read_to_string(out.join("node")).unwrap();
        assert_eq!(told, format!("{node} {}\n", FILES * FILE_BYTES));
    }
    assert!(!mount.pool("out").exists());
    for status in statuses(&mount, &slurm) {
        assert_eq!((status.counters.pool_read_bytes, status.leased_bytes), (FILES * FILE_BYTES, 0));
    }
    no_scratch(&mount, &slurm);
    undrained(&slurm);
    // A directory that each node has.
    let create =
        |access: &str| format!("#DW create_persistent name=set capacity=1MiB access_mode={access} pool=forebay");
    let job = slurm.submit(USER, &script(&mount, &[&create("striped")], "touch $FOREBAY_MOUNT/ran"));
    slurm.wait_for(&job, "FAILED");
    assert!(slurm.output(&job).contains("no directory can be striped over them"), "{}", slurm.output(&job));
    let write = "srun sh -c 'echo $SLURMD_NODENAME >$FOREBAY_PERSISTENT_set/node'";
    let job = slurm.submit(USER, &script(&mount, &[&create("private")], write));
    slurm.completed(&job);
    let directives = ["#DW persistentdw name=set", "#DW destroy_persistent name=set"];
    let job = slurm.submit(USER, &script(&mount, &directives, "srun sh -c 'cat $FOREBAY_PERSISTENT_set/node'"));
    slurm.completed(&job);
    let mut told: Vec<String> = slurm.output(&job).lines().map(Into::into).collect();
    told.sort();
    assert_eq!(told, ["n1", "n2"]);
    no_scratch(&mount, &slurm);
    undrained(&slurm);
}

/// Each task reads one file that all read, and one of its own: `in/part-0007` is that of task 7.
#[test]
fn the_tasks_of_an_array_are_staged_with_one_copy_for_each_node() {
    const TASKS: u64 = 20;
    const COMMON_BYTES: u64 = 4_000_000;
    let mount = mount();
    fs::write(mount.pool("in/common"), content(99, COMMON_BYTES as usize)).unwrap();
    let part = |at: u64| format!("in/part-{at:04}");
    (0..TASKS).for_each(|at| fs::write(mount.pool(part(at)), content(at, FILE_BYTES as usize)).unwrap());
    let slurm = Slurm::with_two_nodes(&mount.place, "20s");
    let commands = "cd $FOREBAY_MOUNT; cat in/common in/part-$(printf %04d $SLURM_ARRAY_TASK_ID) | wc -c";
    let run = || {
        slurm.on_second_node(&["evict", mount.place.mnt().to_str().unwrap()]).ok();
        mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
        let before = statuses(&mount, &slurm).map(|status| status.counters.pool_read_bytes);
        let options = ["--uid=65534", &format!("--array=0-{}", TASKS - 1)];
        let array = slurm.submit(&options, &script(&mount, &["#DW fb profile=auto"], commands));
        let left = || slurm.call("squeue", &["--noheader", "--array", "--jobs", &array]).out;
        for _ in 0..4 {
            // A round of the scheduler takes its time.
            let at_most = left().lines().count().saturating_sub(5);
            slurm.wait("some tasks have ended", || left().lines().count() <= at_most);
        }
        undrained(&slurm);
        let after = statuses(&mount, &slurm).map(|status| status.counters.pool_read_bytes);
        (array, [after[0] - before[0], after[1] - before[1]])
    };
    let (_, cold) = run();
    // Both nodes run tasks.
    assert!(cold.iter().all(|bytes| *bytes > COMMON_BYTES), "{cold:?}");
    let (array, warm) = run();
    for bytes in [cold, warm] {
        assert_eq!(bytes.iter().sum::<u64>(), 2 * COMMON_BYTES + TASKS * FILE_BYTES, "{bytes:?}\n{}", slurm.hooks());
    }
    // The tasks waited for nothing: what each of them reads was foreseen.
    let tasks = slurm.call("scontrol", &["--oneliner", "show", "job", &array]).ok().out;
    let field = |line: &str, name: &str| {
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_default().to_owned()
    };
    let mut seen = 0;
    for line in tasks.lines().filter(|line| !line.trim().is_empty()) {
        let (job, node) = (field(line, "JobId"), field(line, "NodeList"));
        let id = format!("slurm-{job}");
        let report = shown(&mount, &slurm, &node, &["job", "show", &id, "--mount"]);
        let files = report["files"].as_array().unwrap_or_else(|| panic!("{line}: {report}"));
        let inputs = files.iter().filter(|file| file["path"].as_str().unwrap().starts_with("in/"));
        let (read, waited) = inputs.fold((0, 0), |(read, waited), file| {
            (read + file["bytes"].as_u64().unwrap(), waited + file["pool_bytes"].as_u64().unwrap())
        });
        assert_eq!((read, waited), (COMMON_BYTES + FILE_BYTES, 0), "{line}: {report}");
        seen += 1;
    }
    assert_eq!(seen, TASKS, "{tasks}");
}
