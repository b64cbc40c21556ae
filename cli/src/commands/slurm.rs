//! `forebay slurm`: what slurmd runs at the beginning and the end of a job.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, FailureKind, client};
use forebay_slurm::SlurmJob;
use forebay_slurm::site::{self, Finding, Site};
use forebay_system::mounts;

use super::allocation::send;
use crate::args::{HookArgs, SlurmCommand};
use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::shown;

/// Time that is left to a daemon for its last answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a daemon that has not finished in time may take to show that it lives.
const SIGN_OF_LIFE: Duration = Duration::from_secs(3);

/// The largest file that is read as a script.
const SCRIPT_BYTES: u64 = 1 << 20;

pub fn run(command: &SlurmCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        SlurmCommand::Prolog(args) => at_mounts(args, output, |job, entry, until| {
            forebay_slurm::prolog(job, until, |verb| send(entry, &job.allocation(), verb))
        }),
        SlurmCommand::Epilog(args) => at_mounts(args, output, |job, entry, until| {
            forebay_slurm::epilog(job, until, |verb| send(entry, &job.allocation(), verb))
        }),
        SlurmCommand::Install { scripts } => {
            output.line(site::lines(&scripts.display().to_string()).trim_end());
            Ok(Exit::Done)
        }
        SlurmCommand::Check => check(output),
        SlurmCommand::TaskProlog { mount } => task_prolog(mount.as_deref(), output),
    }
}

/// Does this at all mounts of this user at the same time. What is short, or takes too long, is noted and is no failure: a
/// failure drains the node. A daemon that is dead, or does not answer, is one.
fn at_mounts<F>(args: &HookArgs, output: &Output, act: F) -> Result<Exit, Failure>
where
    F: Fn(&SlurmJob, &RegisteredMount, Instant) -> Result<Vec<String>, Failure> + Copy + Send + 'static,
{
    let job = SlurmJob::of(|name| std::env::var(name).ok())?;
    let (begun, within) = (Instant::now(), args.within);
    let entries = match &args.mount {
        Some(path) => targets::meant(Some(path))?.into_iter().map(|place| place.entry).collect(),
        None => registry::entries(),
    };
    if entries.is_empty() {
        return Err(Failure::new(FailureKind::NoDaemon, "there is no forebay mount on this node")
            .remedy("mount it before slurmd starts: systemctl enable --now forebay@..., or /etc/fstab"));
    }
    let (done, answers) = channel();
    for entry in &entries {
        let (done, job, entry) = (done.clone(), job.clone(), entry.clone());
        std::thread::spawn(move || {
            let outcome = match entry.supervisor_alive() || entry.worker_alive() {
                true => act(&job, &entry, begun + within.saturating_sub(ANSWER)),
                false => Err(dead(&entry, &job)),
            };
            // If the time is up, nobody waits for the answer.
            let _ = done.send((entry, outcome));
        });
    }
    drop(done);
    let mut waits: Vec<RegisteredMount> = entries;
    let mut broken = None;
    while !waits.is_empty() {
        match answers.recv_timeout((begun + within).saturating_duration_since(Instant::now())) {
            Ok((entry, outcome)) => {
                waits.retain(|waiting| waiting.mountpoint() != entry.mountpoint());
                match outcome {
                    Ok(notes) => notes.iter().for_each(|what| {
                        output.note(format!(
                            "forebay: {} at {}: {what}",
                            job.allocation(),
                            entry.mountpoint().display()
                        ));
                    }),
                    Err(failure) => broken = Some(failure),
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let checks = waits.into_iter().map(|entry| {
                    let place = entry.mountpoint().display().to_string();
                    (place, std::thread::spawn(move || client::is_alive(&entry, SIGN_OF_LIFE)))
                });
                for (place, check) in checks.collect::<Vec<_>>() {
                    if !check.join().unwrap_or(false) {
                        let what = format!("the daemon of {place} has not answered for {} s", within.as_secs());
                        return Err(Failure::new(FailureKind::NoDaemon, what)
                            .remedy("check its fast pool: `forebay doctor`, `dmesg`; then resume the node"));
                    }
                    output.note(format!("forebay: {} at {place}: not finished in time", job.allocation()));
                }
                break;
            }
        }
    }
    broken.map_or(Ok(Exit::Done), Err)
}

fn dead(entry: &RegisteredMount, job: &SlurmJob) -> Failure {
    let failure = client::dead(entry);
    let mount = failure.remedy.clone().unwrap_or_default();
    failure.remedy(format!("{mount}\n       then: forebay job stage-out {}; resume the node", job.allocation()))
}

/// Prints what Slurm adds to the environment of tasks. Runs as the user of the job.
fn task_prolog(mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let all = mounts::list().map_err(|e| Failure::io("cannot list the mounts", &e))?;
    // Any user can mount, but only root's mount is meant for all.
    let mut ours = all.iter().filter(|mount| mount.is_roots()).map(|mount| mount.mountpoint.as_path());
    let Some(mountpoint) = mount.or_else(|| ours.next()) else { return Ok(Exit::Done) };
    let text = mountpoint.display().to_string();
    // To Slurm, a line break would begin another command.
    if !text.contains(char::is_control) {
        output.line(format!("export FOREBAY_MOUNT={text}"));
    }
    Ok(Exit::Done)
}

fn check(output: &Output) -> Result<Exit, Failure> {
    let answer = std::process::Command::new("scontrol").args(["show", "config"]).output();
    let answer =
        answer.map_err(|e| Failure::new(FailureKind::Missing, format!("scontrol: {e}")).remedy("install Slurm"))?;
    if !answer.status.success() {
        let why = String::from_utf8_lossy(&answer.stderr).trim().to_owned();
        return Err(Failure::new(FailureKind::Missing, format!("scontrol show config: {why}"))
            .remedy("run it where slurmctld answers"));
    }
    let mut findings = Site::parse(&String::from_utf8_lossy(&answer.stdout)).findings(scripts);
    let mut finding = |what: String, remedy: &str| findings.push(Finding { what, remedy: remedy.into() });
    let entries = registry::entries();
    if entries.is_empty() {
        finding("there is no forebay mount on this node".into(), "mount it before slurmd starts");
    }
    for entry in &entries {
        let place = entry.mountpoint().display();
        if !entry.supervisor_alive() {
            finding(format!("the daemon of {place} is not running: no job starts"), &entry.state.command);
        }
        if !entry.state.config.allow_other {
            finding(format!("only root sees {place}: jobs of other users do not"), "mount it with -o allow_other");
        }
    }
    for Finding { what, remedy } in &findings {
        match output.json {
            true => output.json(&serde_json::json!({ "what": what, "remedy": remedy })),
            false => output.line(format!("{}\n  try: {}", shown(what), shown(remedy))),
        }
    }
    if findings.is_empty() && !output.json {
        output.line("Slurm runs forebay for each job on this node");
    }
    Ok(if findings.is_empty() { Exit::Done } else { Exit::Incomplete })
}

/// Returns the text of the scripts that a setting names: one file, or all that a glob matches.
fn scripts(setting: &str) -> Option<String> {
    let path = Path::new(setting);
    let files: Vec<PathBuf> = match path.file_name() {
        Some(name) if name == "*" => {
            std::fs::read_dir(path.parent()?).ok()?.flatten().map(|entry| entry.path()).collect()
        }
        _ => vec![path.to_owned()],
    };
    // A script is short. What is larger is none.
    let read = |file: &PathBuf| {
        let is_script = std::fs::metadata(file).is_ok_and(|file| file.is_file() && file.len() < SCRIPT_BYTES);
        is_script.then(|| std::fs::read(file).ok()).flatten()
    };
    let texts: Vec<Vec<u8>> = files.iter().filter_map(read).collect();
    (!texts.is_empty()).then(|| String::from_utf8_lossy(&texts.concat()).into_owned())
}
