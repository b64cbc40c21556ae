//! `forebay slurm`: what slurmd runs at the beginning and the end of a job.

mod bounded_exchange;
mod burst_buffer;
mod copies;
mod persistent;
mod staging;

use std::cell::Cell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use forebay_api::allocations::{AllocationPhase, AllocationVerb};
use forebay_api::operator::UserGroups;
use forebay_api::views::ViewRequest;
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, FailureKind, client};
use forebay_slurm::directives::PERSISTENT_VARIABLES;
use forebay_slurm::exchange::EXCHANGE_DIR;
use forebay_slurm::site::{self, Finding, Site};
use forebay_slurm::{JobRemains, MountShare, SlurmJob};
use forebay_system::{identity, mounts};

use self::bounded_exchange::{BoundedExchange, EXCHANGE_ANSWER};
use self::staging::{ResultsFate, StagedJob, TaskView};
use super::allocation::send;
use super::view;
use crate::args::{HookArgs, SlurmCommand};
use crate::exit::Exit;
use crate::output::Output;
use crate::values::shown;
use crate::{registration, targets};

/// Time that is left to a daemon for its last answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a daemon that has not finished in time may take to show that it lives.
const SIGN_OF_LIFE: Duration = Duration::from_secs(3);

/// Nodes that read the same begin within this time, and not all at once.
const JITTER_MS: u64 = 500;

/// Why results that are wanted only from a job that succeeds stay where they are.
const NO_OUTCOME: &str = "the controller has not told how the job ended: its results stay in the scratch directory";

/// What `burst_buffer.lua` sets for a job with directives, to the number of the job.
const DIRECTIVES_VARIABLE: &str = "FOREBAY_DIRECTIVES";

/// The largest file that is read as a script.
const SCRIPT_BYTES: u64 = 1 << 20;

pub fn run(command: &SlurmCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        SlurmCommand::Prolog(args) => prolog(args, output),
        SlurmCommand::Epilog(args) => epilog(args, output),
        SlurmCommand::Bb { command } => burst_buffer::run(command, output),
        SlurmCommand::Install { scripts } => {
            let scripts = scripts.display().to_string();
            output.line(site::lines(&scripts).trim_end());
            output.line("# For #DW directives, with burst_buffer.lua and burst_buffer.conf of this directory beside slurm.conf:");
            site::DIRECTIVE_LINES.lines().for_each(|line| output.line(format!("#{line}")));
            Ok(Exit::Done)
        }
        SlurmCommand::Check => check(output),
        SlurmCommand::TaskProlog { mount, exchange, records } => {
            let job = std::env::var("SLURM_JOB_ID").unwrap_or_default();
            let mut view = staging::task_view(&exchange.exchange, &records.records, &job);
            if view.refused.is_none() && std::env::var(DIRECTIVES_VARIABLE).is_ok_and(|of| of == job) {
                view.refused = staging::unseen(&exchange.exchange, &records.records, &job);
            }
            task_prolog(mount.as_deref(), &view, output)
        }
    }
}

/// Stages what a job asks for by directives, and what earlier runs of it read.
fn prolog(args: &HookArgs, output: &Output) -> Result<Exit, Failure> {
    let (begun, mut job) = (Instant::now(), SlurmJob::of(|name| std::env::var(name).ok())?);
    let entries = entries(args)?;
    let found = StagedJob::requested(args, &job, &entries);
    // Without a record of the prolog, the tasks of a job that needs its stage-in do not run.
    let staged = found.unwrap_or_else(|failure| {
        output.note(format!("forebay: {}: what it asks for is not known: {}", job.allocation(), failure.what));
        None
    });
    if let Some(staged) = &staged {
        job.array_index = job.array_index.or(staged.record.request.array_index);
        std::thread::sleep(staged.jitter(JITTER_MS).min(args.within / 4));
    }
    let asked = staged.clone();
    let staged_bytes = Arc::new(StagedBytes::default());
    let counted = staged_bytes.clone();
    let mounts = entries.len() as u64;
    let outcome = at_mounts(&job, entries.clone(), begun, args.within, output, move |job, entry, until| {
        let mut share = asked.as_ref().map(|staged| staged.share(entry)).unwrap_or_default();
        let unknown = match identity::groups_of(job.uid) {
            Ok(groups) => {
                share.groups = groups;
                None
            }
            Err(error) => Some(format!("the groups of user {} are not known: {error}", job.uid)),
        };
        let mut begun = forebay_slurm::prolog(job, &share, until, |verb| {
            let (id, begins) = (job.allocation(), matches!(verb, AllocationVerb::Begin(_)));
            let answer = send(entry, &id, verb)?;
            // A job that is about to start has not ended, and a requeue begins another attempt.
            if begins && answer.as_ref().is_some_and(|known| known.phase == AllocationPhase::StagingOut) {
                let what = format!(
                    "an earlier job of this name is not written back: `forebay job stage-out {id}` does it, `forebay job \
                     teardown {id}` ends it"
                );
                return Err(Failure::new(FailureKind::Busy, what));
            }
            if let (true, Some(staged)) = (begins, &asked) {
                staged.note_begun(entry)?;
            }
            Ok(answer)
        })?;
        if !share.needs_allocation()
            && let Some(refused) = begun.not_begun
        {
            return Ok(vec![HookNote::Unneeded(refused)]);
        }
        begun.notes.extend(unknown);
        if let Some(bytes) = begun.staged_bytes {
            counted.bytes.fetch_add(bytes, Ordering::Relaxed);
            counted.mounts.fetch_add(1, Ordering::Release);
        }
        let is_whole = begun.notes.is_empty() && begun.not_begun.is_none();
        let mut notes = if is_whole { views(job, &share, entry) } else { short(begun.notes) };
        notes.extend(begun.not_begun.map(HookNote::NotBegun));
        Ok(notes)
    });
    let is_whole = staged_bytes.mounts.load(Ordering::Acquire) == mounts;
    let bytes = is_whole.then(|| staged_bytes.bytes.load(Ordering::Relaxed));
    if let Err(failure) = staging::note_staged(&args.records.records, &job.id, bytes) {
        output.note(format!("forebay: {}: tasks do not get FOREBAY_STAGED: {}", job.allocation(), failure.what));
    }
    if let Some(mut staged) = staged {
        let staging = &staged.record.request.staging;
        let is_reason = |note: &&HookNote| match note {
            // What the profile names is staged as far as possible.
            HookNote::Short(_) => !staging.stage_in.is_empty(),
            // Nothing would stage what it names, remove its scratch directory, or write back what it declares.
            HookNote::NotBegun(_) => true,
            HookNote::NoView(_) | HookNote::Unneeded(_) => false,
        };
        let mut reasons: Vec<String> = match &outcome {
            Ok(notes) => notes.iter().filter(is_reason).map(HookNote::to_string).collect(),
            Err(failure) => vec![failure.what.clone()],
        };
        reasons.extend(strange_paths(&staged, (begun + args.within).saturating_duration_since(Instant::now())));
        if reasons.is_empty() {
            reasons.extend(staged.scratch_refusal());
        }
        if reasons.is_empty() {
            let left = (begun + args.within).saturating_duration_since(Instant::now());
            reasons.extend(make_directories(&mut staged, &entries, left).err().map(|failure| failure.what));
        }
        reasons.iter().for_each(|why| output.note(format!("forebay: {}: stage-in: {why}", job.allocation())));
        if let Err(failure) = staged.staged(reasons) {
            output.note(format!("forebay: {}: the controller is not told: {}", job.allocation(), failure.what));
        }
    }
    outcome.map(|_| Exit::Done)
}

/// What a prolog or an epilog did not do, although it did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
enum HookNote {
    /// Something that the job asks for is short.
    Short(String),
    /// A path is read through the mount instead of a view: the job runs all the same.
    NoView(String),
    /// The mount has refused the allocation of the job.
    NotBegun(String),
    /// A mount at which the job names nothing has refused its allocation: the job runs all the same.
    Unneeded(String),
}

impl fmt::Display for HookNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short(what) | Self::NotBegun(what) | Self::Unneeded(what) => f.write_str(what),
            Self::NoView(why) => write!(f, "no view: {why}"),
        }
    }
}

fn short(notes: Vec<String>) -> Vec<HookNote> {
    notes.into_iter().map(HookNote::Short).collect()
}

/// What was staged for a job on this node.
#[derive(Default)]
struct StagedBytes {
    bytes: AtomicU64,
    /// Mounts whose staging has ended.
    mounts: AtomicU64,
}

/// Shows what a job asks for as views. Returns why it will be read through the mount instead.
fn views(job: &SlurmJob, share: &MountShare, entry: &RegisteredMount) -> Vec<HookNote> {
    let not_shown = |path: &String| {
        let request = ViewRequest {
            path: path.clone(),
            job: Some(job.allocation()),
            lease_secs: share.lease_secs,
            user: Some(UserGroups { uid: job.uid, groups: share.groups.clone() }),
            ..ViewRequest::default()
        };
        view::of_job(entry, &request).err().map(|failure| HookNote::NoView(failure.what))
    };
    share.views.iter().filter_map(not_shown).collect()
}

/// Returns why paths to stage are in no mount of this node. A look at a path on another file system may never end, so it
/// gets this time at most.
fn strange_paths(staged: &StagedJob, left: Duration) -> Vec<String> {
    let (done, answers) = channel();
    let staged = staged.clone();
    std::thread::spawn(move || done.send(staged.strange_paths()));
    answers.recv_timeout(left).unwrap_or_else(|_| vec!["the paths to stage: not looked up in time".to_owned()])
}

/// Creates the directories of a job, and fills its scratch directory, for this time at most.
fn make_directories(staged: &mut StagedJob, entries: &[RegisteredMount], left: Duration) -> Result<(), Failure> {
    let staging = &staged.record.request.staging;
    if staging.scratch_bytes.is_none() && !staging.persistent.is_needed() {
        return Ok(());
    }
    let mount = staged.record.scratch_mount.as_deref();
    let entry = entries.iter().find(|entry| Some(entry.mountpoint()) == mount).cloned();
    let entry = entry.ok_or_else(|| Failure::new(FailureKind::NoDaemon, "no mount for a scratch directory"))?;
    let (done, answers) = channel();
    let (mut filled, until) = (staged.clone(), Instant::now() + left.saturating_sub(ANSWER));
    let entries = entries.to_vec();
    std::thread::spawn(move || {
        let made = filled.open_persistent(&entry, &entries);
        let outcome = made.and_then(|()| filled.fill_scratch(&entry, until));
        // If the time is up, no one waits for the answer.
        let _ = done.send(outcome.map(|()| filled));
    });
    *staged =
        answers.recv_timeout(left).map_err(|_| Failure::new(FailureKind::Other, "the time for copying is up"))??;
    Ok(())
}

/// Commits what a job asks for by directives, and writes back what it wrote.
fn epilog(args: &HookArgs, output: &Output) -> Result<Exit, Failure> {
    let (begun, job) = (Instant::now(), SlurmJob::of(|name| std::env::var(name).ok())?);
    let entries = entries(args)?;
    let (mut staged, is_known) = match StagedJob::kept(args, &job) {
        Ok(staged) => (staged, true),
        Err(failure) => {
            let id = job.allocation();
            output.note(format!(
                "forebay: {id}: what it asked for is not known: {}; its scratch directory stays (`forebay scratch list`)",
                failure.what
            ));
            (None, false)
        }
    };
    // The controller tells soon, or not at all.
    let fate = staged.as_ref().map_or(ResultsFate::Kept, |staged| staged.fate(begun + args.within / 2));
    if let Some(staged) = staged.as_mut().filter(|staged| staged.has_results())
        && let Err(failure) = staged.note_known(fate)
    {
        output.note(format!("forebay: {}: {}", job.allocation(), failure.what));
    }
    let asked = staged.clone();
    let is_settled = Arc::new(AtomicBool::new(false));
    let settled = is_settled.clone();
    let outcome = at_mounts(&job, entries.clone(), begun, args.within, output, move |job, entry, until| {
        let is_refused = Cell::new(false);
        let send = |verb| {
            let settles = matches!(verb, AllocationVerb::StageOut { .. } | AllocationVerb::Teardown { .. });
            let answer = send(entry, &job.allocation(), verb);
            is_refused.set(is_refused.get() || (settles && answer.is_err()));
            answer
        };
        let has_begun = asked.as_ref().is_some_and(|staged| staged.has_begun_at(entry));
        let mut here = asked.clone().filter(|staged| has_begun && staged.has_scratch_at(entry));
        if fate == ResultsFate::GivenUp && !has_begun {
            return Ok(Vec::new());
        }
        if fate == ResultsFate::GivenUp {
            let notes = forebay_slurm::give_up(send)?;
            settled.fetch_or(here.is_some() && !is_refused.get(), Ordering::Release);
            return Ok(short(notes));
        }
        // Before the commit, which may take longer than this hook: then the leases and the observation of the job have
        // ended, and its scratch directory stays.
        let mut notes = match (is_known, &here) {
            (true, None) => Vec::new(),
            _ => forebay_slurm::end(send)?,
        };
        let refused = match fate {
            ResultsFate::Kept => here.as_mut().map_or_else(Vec::new, |staged| staged.commit(entry)),
            ResultsFate::Unknown => here.iter().map(|_| NO_OUTCOME.to_owned()).collect(),
            ResultsFate::Refused | ResultsFate::GivenUp => Vec::new(),
        };
        let remains = JobRemains { has_begun, is_settled: has_begun && refused.is_empty() };
        // The allocation waits for results that were not committed.
        let keeps_scratch =
            !is_known || (!refused.is_empty() && here.as_ref().is_some_and(|staged| !staged.has_empty_scratch()));
        notes.extend(refused);
        if !keeps_scratch {
            notes.extend(forebay_slurm::epilog(job, remains, until, send)?);
            settled.fetch_or(here.is_some() && !is_refused.get(), Ordering::Release);
        }
        Ok(short(notes))
    });
    if let Err(failure) = staging::forget_staged(&args.records.records, &job.id) {
        output.note(format!("forebay: {}: {}", job.allocation(), failure.what));
    }
    let mut remedy = None;
    if let Some(staged) = staged {
        let keeps_results = staged.may_have_results() && !is_settled.load(Ordering::Acquire);
        let mut reasons: Vec<String> = match &outcome {
            Ok(notes) => notes.iter().map(HookNote::to_string).collect(),
            Err(failure) => vec![failure.what.clone()],
        };
        let mut is_destroyed = false;
        if outcome.is_ok() {
            let kept = destroy(&staged, entries, (begun + args.within).saturating_duration_since(Instant::now()));
            kept.iter().for_each(|why| output.note(format!("forebay: {}: {why}", job.allocation())));
            is_destroyed = kept.is_empty();
            reasons.extend(kept);
        }
        if fate == ResultsFate::Refused {
            output.note(format!("forebay: {}: it failed: its results are given up (when=success)", job.allocation()));
        }
        // Without its record, an epilog that is repeated does not know what to commit.
        let kept = match keeps_results && staged.record.is_staged {
            true => staged.retain(is_destroyed),
            false => staged.forget(),
        };
        if let Err(failure) = kept {
            output.note(format!("forebay: {}: {}", job.allocation(), failure.what));
        }
        if keeps_results && reasons.is_empty() && matches!(fate, ResultsFate::Kept | ResultsFate::Unknown) {
            // The mount with the scratch directory is gone.
            reasons.push(staged.remedy(fate));
        }
        if let Err(failure) = staged.written_back(fate, reasons, keeps_results && outcome.is_ok()) {
            output.note(format!("forebay: {}: the controller is not told: {}", job.allocation(), failure.what));
        }
        remedy = keeps_results.then(|| staged.remedy(fate));
    }
    staging::forget_settled(&args.records.records);
    if let (Some(remedy), Ok(_)) = (&remedy, &outcome) {
        output.note(format!("forebay: {}: {remedy}", job.allocation()));
    }
    outcome.map(|_| Exit::Done).map_err(|mut failure| {
        failure.remedy = failure.remedy.into_iter().chain(remedy).reduce(|all, next| format!("{all}\n       {next}"));
        failure
    })
}

/// Removes the persistent directories that a job wants removed, for this time at most. Returns why some stay.
fn destroy(staged: &StagedJob, entries: Vec<RegisteredMount>, left: Duration) -> Vec<String> {
    if staged.record.request.staging.persistent.destroy.is_empty() {
        return Vec::new();
    }
    let (done, answers) = channel();
    let staged = staged.clone();
    // If the time is up, no one waits for the answer.
    std::thread::spawn(move || done.send(staged.destroy_persistent(&entries)));
    answers.recv_timeout(left).unwrap_or_else(|_| vec!["destroy_persistent: not finished in time".to_owned()])
}

/// Returns the mounts that a prolog or an epilog works at.
fn entries(args: &HookArgs) -> Result<Vec<RegisteredMount>, Failure> {
    let entries: Vec<RegisteredMount> = match &args.mount {
        Some(path) => targets::meant(Some(path))?.into_iter().map(|place| place.entry).collect(),
        None => registration::job_mounts(),
    };
    if entries.is_empty() {
        return Err(Failure::new(FailureKind::NoDaemon, "there is no forebay mount on this node")
            .remedy("mount it before slurmd starts: systemctl enable --now forebay@..., or /etc/fstab"));
    }
    Ok(entries)
}

/// Does this at all mounts of this user at the same time. What is short, or takes too long, is noted and is no failure: a
/// failure drains the node. A daemon that is dead, or does not answer, is one. Returns the notes.
fn at_mounts<F>(
    job: &SlurmJob,
    entries: Vec<RegisteredMount>,
    begun: Instant,
    within: Duration,
    output: &Output,
    act: F,
) -> Result<Vec<HookNote>, Failure>
where
    F: Fn(&SlurmJob, &RegisteredMount, Instant) -> Result<Vec<HookNote>, Failure> + Clone + Send + 'static,
{
    let (done, answers) = channel();
    for entry in &entries {
        let (done, job, entry, act) = (done.clone(), job.clone(), entry.clone(), act.clone());
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
    let mut told = Vec::new();
    while !waits.is_empty() {
        match answers.recv_timeout((begun + within).saturating_duration_since(Instant::now())) {
            Ok((entry, outcome)) => {
                waits.retain(|waiting| waiting.mountpoint() != entry.mountpoint());
                match outcome {
                    Ok(notes) => {
                        for what in &notes {
                            let place = entry.mountpoint().display();
                            output.note(format!("forebay: {} at {place}: {what}", job.allocation()));
                        }
                        told.extend(notes);
                    }
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
                    told.push(HookNote::Short(format!("{place}: not finished in time")));
                }
                break;
            }
        }
    }
    broken.map_or(Ok(told), Err)
}

fn dead(entry: &RegisteredMount, job: &SlurmJob) -> Failure {
    let failure = client::dead(entry);
    let mount = failure.remedy.clone().unwrap_or_default();
    failure.remedy(format!("{mount}\n       then: forebay job stage-out {}; resume the node", job.allocation()))
}

/// Prints what Slurm adds to the environment of tasks. Runs as the user of the job.
fn task_prolog(mount: Option<&Path>, view: &TaskView, output: &Output) -> Result<Exit, Failure> {
    if let Some(why) = &view.refused {
        output.line(format!("print forebay: stage-in failed, and the job does not run: {}", shown(why)));
        return Ok(Exit::Incomplete);
    }
    if let Some(dir) = &view.scratch {
        for name in ["FOREBAY_JOB_DIR", "DW_JOB_STRIPED", "DW_JOB_PRIVATE"] {
            output.line(format!("export {name}={}", dir.display()));
        }
    }
    for (name, dir) in &view.persistent {
        for prefix in PERSISTENT_VARIABLES {
            output.line(format!("export {prefix}{name}={}", dir.display()));
        }
    }
    if let Some(bytes) = view.staged_bytes {
        output.line(format!("export FOREBAY_STAGED={bytes}"));
    }
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
    let site = Site::parse(&String::from_utf8_lossy(&answer.stdout));
    let mut findings = site.findings(scripts);
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
    if site.has_directives() {
        let dir = exchange_of(&site);
        let found = BoundedExchange::open(&dir, EXCHANGE_ANSWER).and_then(|found| {
            found.ok_or_else(|| {
                let what =
                    format!("{} does not exist: jobs with #DW directives do not run on this node", dir.display());
                Failure::new(FailureKind::Missing, what)
                    .remedy("mount the file system that the controller and the nodes share")
            })
        });
        if let Err(failure) = found {
            let remedy = failure.remedy.unwrap_or_default();
            findings.push(Finding { what: failure.what, remedy });
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
    if !site.has_directives() && !output.json {
        output.line("jobs cannot use #DW directives: BurstBufferType= is not set (optional)");
    }
    Ok(if findings.is_empty() { Exit::Done } else { Exit::Incomplete })
}

/// Returns the exchange directory that the prolog of a site looks into.
fn exchange_of(site: &Site) -> PathBuf {
    let texts = site.values("Prolog").iter().filter_map(|setting| scripts(setting));
    let mut named = texts.filter_map(|text| {
        let mut words = text.split_whitespace().skip_while(|word| *word != "--exchange");
        words.nth(1).map(PathBuf::from)
    });
    named.next().unwrap_or_else(|| EXCHANGE_DIR.into())
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
