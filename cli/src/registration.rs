//! A job that is registered with the daemons of several mounts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_api::jobs::{JobRequest, JobSummary, ObserverKind};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, FailureKind, client, paths};
use forebay_prefetch::signature::Invocation;

use crate::output::Output;
use crate::targets;
use crate::values::{bytes, counted, files, shown};

/// A job that this process registered. It ends with the process at the latest.
#[derive(Debug)]
pub struct Registration {
    id: String,
    entries: Vec<RegisteredMount>,
}

/// The mounts that jobs are registered with: the given one, or all that are served and that this user has access to.
pub fn mounts(mount: Option<&Path>) -> Result<Vec<RegisteredMount>, Failure> {
    let mut entries = all_mounts(mount)?;
    if mount.is_none() {
        entries.retain(|entry| !entry.is_dead());
    }
    some(entries)
}

/// The same with mounts whose daemons are dead: for a verb whose success says that nothing is left to be done anywhere. A
/// dead cache node holds nothing of a job: it is left out.
pub fn all_mounts(mount: Option<&Path>) -> Result<Vec<RegisteredMount>, Failure> {
    some(match mount {
        Some(path) => targets::meant(Some(path))?.into_iter().map(|place| place.entry).collect(),
        None => job_mounts(),
    })
}

/// Returns all registered mounts at which a job may have left something to be done.
pub fn job_mounts() -> Vec<RegisteredMount> {
    let mut entries = registry::entries();
    entries.retain(|entry| !(entry.is_dead() && entry.is_cache_node()));
    entries
}

fn some(entries: Vec<RegisteredMount>) -> Result<Vec<RegisteredMount>, Failure> {
    if entries.is_empty() {
        return Err(Failure::new(FailureKind::NoDaemon, "there is no forebay mount that is served")
            .remedy("forebay mount URL MOUNTPOINT --fast DIR"));
    }
    Ok(entries)
}

impl Registration {
    /// Registers a job with each of them.
    ///
    /// # Errors
    /// If all daemons refused, the last refusal. If some did, their refusals are printed as notes.
    pub fn new(entries: Vec<RegisteredMount>, request: &JobRequest, output: &Output) -> Result<Self, Failure> {
        let mut registered = Self { id: request.id.clone(), entries: Vec::new() };
        let mut refused: Vec<Failure> = Vec::new();
        for entry in entries {
            match jobs(&entry, &Request::BeginJob(request.clone())) {
                Ok(begun) => {
                    let others =
                        begun.iter().filter(|job| request.invocation.is_some() && job.command != request.command);
                    others.for_each(|job| output.note(joined(&entry, job)));
                    registered.entries.push(entry);
                }
                Err(failure) => refused.push(failure),
            }
        }
        let all_refused = registered.entries.is_empty();
        let last = if all_refused { refused.pop() } else { None };
        refused.iter().for_each(|failure| output.note(format!("forebay: not observed: {failure}")));
        last.map_or(Ok(registered), Err)
    }

    /// Ends the job and prints what it used on standard error, because standard output belongs to the command.
    /// `goes_on`: the job has not ended, but is no longer observed.
    pub fn end(self, goes_on: bool, output: &Output) {
        for entry in &self.entries {
            let request = Request::EndJob { id: self.id.clone(), goes_on };
            match jobs(entry, &request).map(|mut jobs| jobs.pop()) {
                Ok(Some(job)) => output.note(told(entry, &job, output)),
                Ok(None) => {}
                Err(failure) => output.note(format!("forebay: {failure}")),
            }
        }
    }
}

fn joined(entry: &RegisteredMount, job: &JobSummary) -> String {
    format!(
        "forebay: a job {} at {} runs already: {}. This command joins it, and nothing is staged ahead for it. To start \
         another job, give another --job",
        shown(&job.id),
        entry.mountpoint().display(),
        shown(&job.command),
    )
}

fn told(entry: &RegisteredMount, job: &JobSummary, output: &Output) -> String {
    let mountpoint = entry.mountpoint();
    if output.json {
        return serde_json::json!({ "mountpoint": mountpoint, "job": job }).to_string();
    }
    let JobSummary { traffic, .. } = job;
    let seen = if job.observer == ObserverKind::Ebpf { "" } else { " (without eBPF: only requests to the daemon)" };
    let ahead = match &job.ahead {
        Some(ahead) if ahead.files > 0 => {
            format!(
                "; staged ahead: {}, {}, {} of it used",
                files(ahead.files),
                bytes(ahead.bytes),
                bytes(ahead.used_bytes)
            )
        }
        _ => String::new(),
    };
    format!(
        "forebay: job {} at {}: {}, {} read, {} written, {}{ahead}{seen}",
        shown(&job.id),
        mountpoint.display(),
        files(job.file_count + job.omitted_files),
        bytes(traffic.read_bytes),
        bytes(traffic.written_bytes),
        counted(traffic.opens, "open"),
    )
}

/// The invocation by which this process would start a command; it selects the profile.
pub fn invocation(command: &[OsString]) -> Invocation {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let own = rustix::process::getuid().as_raw();
    Invocation {
        // A prolog runs as root, on behalf of the job's user.
        user: number("SLURM_JOB_UID").filter(|_| own == 0).map_or(own, |user: u64| user as u32),
        account: variable("SLURM_JOB_ACCOUNT"),
        words: command.iter().map(|word| paths::encode(word.as_bytes())).collect(),
        array_index: number("SLURM_ARRAY_TASK_ID"),
    }
}

/// The jobs in a daemon's answer.
pub fn jobs(entry: &RegisteredMount, request: &Request) -> Result<Vec<JobSummary>, Failure> {
    let mut all = Vec::new();
    for reply in client::call(entry, request)? {
        if let Reply::Jobs(jobs) = reply? {
            all.extend(jobs);
        }
    }
    Ok(all)
}

/// The variable that tells a command of `run` the name of its job.
pub const JOB_VARIABLE: &str = "FOREBAY_JOB";

/// The name of a job: the given one, or else Slurm's, or a new one. Also returns whether the whole job of that name
/// ends with this process: under Slurm, this may be only a part of the job.
pub fn name(given: Option<String>) -> (String, bool) {
    let new = || format!("run-{}-{}", registry::now_unix(), std::process::id());
    match (given, slurm_name()) {
        (Some(given), _) => (given, true),
        (None, Some(slurm)) => (slurm, false),
        (None, None) => (new(), true),
    }
}

fn slurm_name() -> Option<String> {
    variable("SLURM_JOB_ID").map(|id| forebay_slurm::job_name(&id))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The owner of the leases: the job of the surrounding `run`, if that job runs at the mount, or else the second
/// value.
pub fn owner(given: Option<String>) -> (Option<String>, String) {
    let user = || format!("user:{}", rustix::process::getuid().as_raw());
    match given {
        Some(given) => (None, given),
        None => (variable(JOB_VARIABLE), slurm_name().unwrap_or_else(user)),
    }
}
