//! Finds the processes of a job that another program started: cgroups, and among them Slurm's.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Failure;
use forebay_jobs::Members;
use forebay_system::process;

/// The mountpoint of cgroup hierarchies.
const CGROUPS: &str = "/sys/fs/cgroup";
const CGROUP2_MAGIC: i64 = 0x6367_7270;
/// The depth to which Slurm's cgroup of a job is searched: `system.slice/slurmstepd.scope/job_1` in version 2,
/// `memory/slurm_node/uid_0/job_1` in version 1.
const DEPTH: usize = 5;
/// How long the start of a program may take. It takes microseconds of processor time; on a busy node it waits for a
/// processor.
const BEGINNING_MAX: Duration = Duration::from_secs(2);
const BEGINNING_LOOK: Duration = Duration::from_millis(1);

/// Returns the members of a cgroup.
///
/// # Errors
/// It does not exist, is no cgroup, or is an empty one of version 1.
pub fn cgroup(dir: &Path) -> Result<Members, Failure> {
    let given = |e: &io::Error| Failure::given(format!("cgroup {}", dir.display()), e);
    let dir = dir.canonicalize().map_err(|e| given(&e))?;
    fs::metadata(dir.join("cgroup.procs")).map_err(|e| given(&e))?;
    let kind = rustix::fs::statfs(&dir).map_err(|e| given(&e.into()))?.f_type;
    if kind == CGROUP2_MAGIC {
        let id = fs::metadata(&dir).map_err(|e| given(&e))?.ino();
        return Ok(Members::Cgroup { id, path: below_root(&dir) });
    }
    let pids = processes(&dir);
    if pids.is_empty() {
        return Err(Failure::usage(format!("no process runs in cgroup {}", dir.display())));
    }
    Ok(Members::Processes(pids))
}

/// Returns the cgroup's name, as /proc/PID/cgroup has it.
fn below_root(dir: &Path) -> String {
    let is_root = |dir: &&Path| {
        // Only the root of the hierarchy has no type.
        !dir.join("cgroup.type").exists()
    };
    let root = dir.ancestors().find(is_root).unwrap_or(Path::new("/"));
    format!("/{}", dir.strip_prefix(root).unwrap_or(dir).display())
}

/// Returns the processes that are now in a cgroup or below it.
pub fn processes(dir: &Path) -> Vec<u32> {
    let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let mut pids: Vec<u32> = procs.lines().filter_map(|line| line.parse().ok()).collect();
    for child in fs::read_dir(dir).into_iter().flatten().flatten().filter(|c| c.path().is_dir()) {
        pids.extend(processes(&child.path()));
    }
    pids
}

/// Returns whether a cgroup, or one below it, has processes.
pub fn is_populated(dir: &Path) -> bool {
    let events = fs::read_to_string(dir.join("cgroup.events")).unwrap_or_default();
    events.lines().any(|line| line == "populated 1")
}

/// Returns what Slurm runs of a job on this node: its cgroup, or else the processes that have the job's number in their
/// environment.
///
/// # Errors
/// Neither exists.
pub fn job(id: &str) -> Result<(Members, Option<PathBuf>), Failure> {
    if let Some(dir) = find(Path::new(CGROUPS), &format!("job_{id}"), DEPTH) {
        return Ok((cgroup(&dir)?, Some(dir)));
    }
    let pids = with_environment(&format!("SLURM_JOB_ID={id}"));
    if pids.is_empty() {
        return Err(Failure::usage(format!("no process of Slurm's job {id} is on this node"))
            .remedy("its cgroup is looked for, and SLURM_JOB_ID in the environment of processes of this user"));
    }
    Ok((Members::Processes(pids), None))
}

/// Finds a directory of this name, at most `depth` levels down.
fn find(dir: &Path, name: &str, depth: usize) -> Option<PathBuf> {
    let below: Vec<PathBuf> = fs::read_dir(dir).ok()?.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    let found = below.iter().find(|dir| dir.file_name().is_some_and(|n| n == name));
    found.cloned().or_else(|| below.iter().filter(|_| depth > 1).find_map(|dir| find(dir, name, depth - 1)))
}

fn with_environment(variable: &str) -> Vec<u32> {
    let has = |pid: &u32| environment(*pid).split(|b| *b == 0).any(|line| line == variable.as_bytes());
    process::all().filter(|pid| *pid != std::process::id()).filter(has).collect()
}

/// Returns the environment of a process. If the process is just starting its program, waits for the new environment.
fn environment(pid: u32) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        let found = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        if !found.is_empty() || !process::has_environment(pid) || begun.elapsed() > BEGINNING_MAX {
            return found;
        }
        std::thread::sleep(BEGINNING_LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FailureKind;

    #[test]
    fn a_jobs_cgroup_is_found_in_either_version() {
        let dir = tempfile::tempdir().unwrap();
        let two = dir.path().join("system.slice/slurmstepd.scope/job_7/step_0");
        let one = dir.path().join("memory/slurm_node/uid_0/job_8/step_0");
        fs::create_dir_all(&two).unwrap();
        fs::create_dir_all(&one).unwrap();
        assert_eq!(find(dir.path(), "job_7", DEPTH), two.parent().map(Path::to_path_buf));
        assert_eq!(find(dir.path(), "job_8", DEPTH), one.parent().map(Path::to_path_buf));
        assert_eq!(find(dir.path(), "job_9", DEPTH), None);
    }

    #[test]
    fn a_cgroup_of_version_1_is_its_processes_and_those_below() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("step_0/task_0")).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        assert_eq!(cgroup(dir.path()).unwrap_err().kind, FailureKind::Usage, "it is empty");
        fs::write(dir.path().join("cgroup.procs"), "11\n12\n").unwrap();
        fs::write(dir.path().join("step_0/task_0/cgroup.procs"), "13\n").unwrap();
        assert_eq!(cgroup(dir.path()).unwrap(), Members::Processes(vec![11, 12, 13]));
        assert_eq!(cgroup(&dir.path().join("no")).unwrap_err().kind, FailureKind::Usage);
    }

    #[test]
    fn processes_are_found_by_their_environment() {
        let mut child = std::process::Command::new("sleep").arg("60").env("SLURM_JOB_ID", "f0rebay").spawn().unwrap();
        let found = job("f0rebay");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.unwrap(), (Members::Processes(vec![child.id()]), None));
        assert_eq!(job("none of that").unwrap_err().kind, FailureKind::Usage);
    }
}
