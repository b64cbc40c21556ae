//! `forebay observe`

use std::path::PathBuf;
use std::time::Duration;

use forebay_overlay::control::signals::Held;
use forebay_overlay::control::{Failure, slurm};
use forebay_overlay::jobs::{JobRequest, Members};
use forebay_overlay::process::{self, Process};

use crate::args;
use crate::exit::Exit;
use crate::output::Output;
use crate::registration::{self, Registration};
use crate::values::counted;

/// How often it is looked whether somebody is left.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub fn run(args: args::Observe, output: &Output) -> Result<Exit, Failure> {
    let signals = Held::new(&Held::ASK_TO_END).map_err(|e| Failure::io("cannot wait for signals", &e))?;
    let (members, cgroup) = match (args.cgroup, &args.slurm_job) {
        (Some(dir), _) => (slurm::cgroup(&dir)?, Some(dir)),
        (None, Some(id)) => slurm::job(id)?,
        (None, None) => (Members::Processes(args.pid), None),
    };
    let (command, mut watched) = match &members {
        Members::Processes(pids) => {
            (format!("{} that ran already", counted(pids.len() as u64, "process tree")), Watched::Tree(look(pids)?))
        }
        _ => ("a cgroup".into(), Watched::Cgroup(cgroup.unwrap_or_default())),
    };
    let name = args.job.or_else(|| args.slurm_job.map(|id| format!("slurm-{id}")));
    let request = JobRequest { id: registration::name(name), command, invocation: None, prefetch: false, members };
    let registered = Registration::new(registration::mounts(args.mount.as_deref())?, &request, output)?;
    output.note(format!("forebay: job {} is observed; Ctrl-C ends that", request.id));
    while watched.is_left() && signals.wait(Some(LOOK_EVERY)).is_none() {}
    registered.end(output);
    Ok(Exit::Done)
}

/// Who is waited for.
enum Watched {
    /// Those that were alive at the last look.
    Tree(Vec<Process>),
    Cgroup(PathBuf),
}

impl Watched {
    fn is_left(&mut self) -> bool {
        match self {
            Self::Cgroup(dir) => slurm::is_populated(dir),
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
