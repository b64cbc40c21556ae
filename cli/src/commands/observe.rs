//! `forebay observe`

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use forebay_api::jobs::{JobRequest, Members};
use forebay_daemon::signals::Held;
use forebay_daemon::{Failure, process_discovery};
use forebay_prefetch::signature::Invocation;
use forebay_system::process::{self, Process};

use crate::args;
use crate::exit::Exit;
use crate::output::Output;
use crate::registration::{self, Registration};
use crate::values::counted;

/// The interval between checks for remaining processes.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub fn run(args: args::ObserveArgs, output: &Output) -> Result<Exit, Failure> {
    let signals = Held::new(&Held::ASK_TO_END).map_err(|e| Failure::io("cannot wait for signals", &e))?;
    let (members, cgroup) = match (args.cgroup, &args.slurm_job) {
        (Some(dir), _) => (process_discovery::cgroup(&dir)?, Some(dir)),
        (None, Some(id)) => process_discovery::job(id)?,
        (None, None) => (Members::Processes(args.pid), None),
    };
    let first = match (&members, &cgroup) {
        (Members::Processes(pids), _) => pids.first().copied(),
        (_, Some(dir)) => process_discovery::processes(dir).first().copied(),
        _ => None,
    };
    let invocation = (!args.command.is_empty()).then(|| run_of(&args.command, first));
    let (what, mut watched) = match &members {
        Members::Processes(pids) => (
            format!("{} that ran already", counted(pids.len() as u64, "process tree")),
            ObservedProcesses::Tree(look(pids)?),
        ),
        _ => ("a cgroup".into(), ObservedProcesses::Cgroup(cgroup.unwrap_or_default())),
    };
    let name = args.job.or_else(|| args.slurm_job.map(|id| forebay_slurm::job_name(&id)));
    let (id, ends_leases) = registration::name(name);
    let request = JobRequest {
        id,
        command: invocation.as_ref().map_or(what, |invocation| invocation.words.join(" ")),
        prefetch: invocation.is_some() && !args.no_prefetch,
        invocation,
        ends_leases,
        members,
    };
    let registered = Registration::new(registration::mounts(args.mount.as_deref())?, &request, output)?;
    output.note(format!("forebay: job {} is observed; Ctrl-C ends that", request.id));
    let mut told_to_end = false;
    while watched.is_left() && !told_to_end {
        told_to_end = signals.wait(Some(LOOK_EVERY)).is_some();
    }
    registered.end(told_to_end && watched.is_left(), output);
    Ok(Exit::Done)
}

/// The invocation that the observed processes belong to. If the caller is root, its user is the owner of these
/// processes.
fn run_of(command: &[OsString], first: Option<u32>) -> Invocation {
    let invocation = registration::invocation(command);
    let owner = first.and_then(|pid| fs::metadata(format!("/proc/{pid}")).ok()).map(|process| process.uid());
    let is_root = rustix::process::getuid().is_root();
    Invocation { user: owner.filter(|_| is_root).unwrap_or(invocation.user), ..invocation }
}

/// The processes that are waited for.
enum ObservedProcesses {
    /// Those that were alive at the last check.
    Tree(Vec<Process>),
    Cgroup(PathBuf),
}

impl ObservedProcesses {
    fn is_left(&mut self) -> bool {
        match self {
            Self::Cgroup(dir) => process_discovery::is_populated(dir),
            Self::Tree(alive) => {
                let pids: Vec<u32> = alive.iter().filter(|process| process.is_alive()).map(|p| p.pid).collect();
                *alive = process::tree(&pids);
                !alive.is_empty()
            }
        }
    }
}

fn look(pids: &[u32]) -> Result<Vec<Process>, Failure> {
    for pid in pids {
        if process::tree(&[*pid]).is_empty() {
            return Err(Failure::usage(format!("process {pid} does not exist")));
        }
    }
    Ok(process::tree(pids))
}
