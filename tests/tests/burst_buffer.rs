//! Jobs with `#DW` directives on a real Slurm, with `burst_buffer.lua` of `packaging/slurm`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, content};
use forebay_tests::process::{forebay, run};
use forebay_tests::servers::slurm::Slurm;
use serde_json::Value;

const CALL: Duration = Duration::from_secs(60);
const FILES: u64 = 8;
const FILE_BYTES: usize = 100_000;
const JOBDW: &str = "#DW jobdw pool=forebay type=scratch capacity=64MiB access_mode=striped";

/// A mount in which nothing is flushed that no request asks for, and which all users see.
fn mount() -> Mount {
    let policy = "[default]\nflush = \"manual\"\n[prefetch]\nonline = false\n";
    let mount = Mount::new(Options { more: vec!["-o".into(), "allow_other".into()], ..Options::policy(policy) });
    // Other users pass through to their scratch directories.
    for above in mount.place.fast().ancestors().filter(|above| above.starts_with(std::env::temp_dir())).skip(1) {
        let mode = fs::metadata(above).unwrap().permissions().mode();
        fs::set_permissions(above, fs::Permissions::from_mode(mode | 0o001)).unwrap();
    }
    fs::create_dir(mount.pool("in")).unwrap();
    (0..FILES).for_each(|at| fs::write(mount.pool(format!("in/{at}")), content(at, FILE_BYTES)).unwrap());
    mount
}

fn slurm(mount: &Mount) -> Slurm {
    Slurm::with_burst_buffer(&mount.place, "20s")
}

/// Returns a script with these directives.
fn script(mount: &Mount, directives: &[&str], commands: &str) -> String {
    let at = mount.place.mnt().display().to_string();
    format!("{}\n{commands}", directives.join("\n")).replace("MOUNT", &at)
}

fn shown(mount: &Mount, job: &str) -> Value {
    let id = format!("slurm-{job}");
    let answer = mount.forebay(["--json", "job", "show", &id, "--mount"], &[&mount.place.mnt()]).ok();
    serde_json::from_str(&answer.out).unwrap()
}

fn undrained(slurm: &Slurm) {
    let (state, reason) = slurm.node();
    assert!(!state.contains("DRAIN"), "{state}: {reason}\n{}", slurm.hooks());
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Waits until the controller has torn down what a job had, and nothing is left of it.
fn nothing_left(slurm: &Slurm) {
    slurm.wait("the exchange directory is empty", || names(&slurm.exchange()).is_empty());
    let records = slurm.exchange().with_file_name("records");
    assert_eq!(names(&records), Vec::<String>::new());
}

fn scratch_dirs(mount: &Mount) -> String {
    run(Command::new(forebay()).args(["scratch", "list", "--mount"]).arg(mount.place.mnt()), CALL).ok().out
}

#[test]
fn a_job_is_staged_in_and_its_results_are_in_the_pool() {
    let mount = mount();
    std::os::unix::fs::chown(mount.path(""), Some(65534), None).unwrap();
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
    let job = slurm.submit(&["--uid=65534"], &script(&mount, &directives, commands));
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
