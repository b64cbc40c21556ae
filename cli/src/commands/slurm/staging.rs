//! What a job asks for by directives, on a node: found by the prolog, kept until the epilog.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, multi_mount, paths};
use forebay_slurm::directives::ScratchCopy;
use forebay_slurm::exchange::{ExchangedRequest, NodeProgress, NodeReport, get, gone, put};
use forebay_slurm::outcome::JobOutcome;
use forebay_slurm::{JobNode, MountShare, SlurmJob};
use forebay_system::identity;
use serde::{Deserialize, Serialize};

use super::bounded_exchange::{BoundedExchange, EXCHANGE_ANSWER};
use super::copies::{check_kind, copy_in};
use super::persistent;
use crate::args::HookArgs;
use crate::commands::scratch;

/// One thread at a time changes the record of the job.
static RECORD_LOCK: Mutex<()> = Mutex::new(());
/// How often an epilog looks whether the controller has told how the job ended.
const PAUSE: Duration = Duration::from_millis(100);

/// What becomes of the results of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResultsFate {
    /// They are committed.
    Kept,
    /// The job failed, and wants them only if it succeeds.
    Refused,
    /// `scancel --hurry`.
    GivenUp,
    /// It depends on the end of the job, which is not known.
    Unknown,
}

/// What a node keeps of a job with directives, from its prolog to its epilog.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeRecord {
    pub request: ExchangedRequest,
    /// The mount with the job's scratch directory.
    pub scratch_mount: Option<PathBuf>,
    pub scratch: Option<PathBuf>,
    /// Everything that the job needs at its start was there.
    pub is_staged: bool,
    /// How often the job had been requeued.
    pub requeues: u64,
    /// The user of the job.
    #[serde(default)]
    pub uid: u32,
    /// Results that are in the mount.
    #[serde(default)]
    pub committed: Vec<ScratchCopy>,
    /// An epilog has run, and results are still to be committed.
    #[serde(default)]
    pub is_over: bool,
    /// The name of this node in the job, and the number of its nodes: an epilog that is repeated by hand is not told.
    #[serde(default)]
    pub node: String,
    #[serde(default)]
    pub nodes: usize,
    /// The mounts at which the prolog began the allocation of the job. `None`: an earlier version kept the record.
    #[serde(default)]
    pub begun: Option<Vec<PathBuf>>,
    /// An epilog has seen that all other nodes of the job had staged.
    #[serde(default)]
    pub others_staged: bool,
    /// What an epilog has found out that becomes of the results.
    #[serde(default)]
    pub known_fate: Option<ResultsFate>,
    /// The job has begun anew after this attempt.
    #[serde(default)]
    pub is_interrupted: bool,
}

/// Whether the other nodes of a job could stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OtherNodes {
    Staged,
    Failed,
    /// The controller has forgotten the job.
    Unknown,
}

/// A job with directives, on this node.
#[derive(Debug, Clone)]
pub struct StagedJob {
    pub(super) job: SlurmJob,
    pub(super) node: JobNode,
    exchange: Option<BoundedExchange>,
    pub(super) records: PathBuf,
    pub record: NodeRecord,
}

fn node() -> JobNode {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    JobNode::of(|name| std::env::var(name).ok(), &host)
}

fn record_name(job: &SlurmJob) -> String {
    format!("{}.json", job.id)
}

/// Returns the file that tells the tasks of a job why they do not run.
fn refusal_path(records: &Path, job: &str) -> PathBuf {
    records.join(format!("{job}.refused"))
}

/// Returns the symbolic link to the scratch directory of a job.
fn scratch_link(records: &Path, job: &str) -> PathBuf {
    records.join(format!("{job}.scratch"))
}

impl StagedJob {
    /// Returns what the controller has written about a job. `None`: the job has no directives.
    pub fn requested(args: &HookArgs, job: &SlurmJob, entries: &[RegisteredMount]) -> Result<Option<Self>, Failure> {
        let Some(exchange) = BoundedExchange::open(&args.exchange.exchange, args.within)? else { return Ok(None) };
        let Some(request) = exchange.request(&job.id)? else { return Ok(None) };
        let needs_directory = request.staging.scratch_bytes.is_some() || request.staging.persistent.is_needed();
        let scratch_mount = if needs_directory { scratch_mount(&request, entries) } else { None };
        let node = node();
        let record = NodeRecord {
            request,
            scratch_mount,
            scratch: None,
            is_staged: false,
            requeues: job.requeues,
            uid: job.uid,
            committed: Vec::new(),
            is_over: false,
            node: node.name.clone(),
            nodes: node.nodes,
            begun: Some(Vec::new()),
            others_staged: false,
            known_fate: None,
            is_interrupted: false,
        };
        let records = args.records.records.clone();
        let staged = Self { job: job.clone(), node, exchange: Some(exchange), records, record };
        staged.store()?;
        Ok(Some(staged))
    }

    /// Returns what the prolog of this node has kept.
    pub fn kept(args: &HookArgs, job: &SlurmJob) -> Result<Option<Self>, Failure> {
        let records = args.records.records.clone();
        let owner = rustix::process::geteuid().as_raw();
        let Some(record) = get::<NodeRecord>(&records.join(record_name(job)), &[owner])? else { return Ok(None) };
        let node = match std::env::var_os("SLURMD_NODENAME") {
            None if record.nodes > 0 => JobNode { name: record.node.clone(), nodes: record.nodes },
            _ => node(),
        };
        // The results are written back, also if nobody can be told.
        let exchange = BoundedExchange::open(&args.exchange.exchange, args.within).ok().flatten();
        Ok(Some(Self { job: job.clone(), node, exchange, records, record }))
    }

    fn store(&self) -> Result<(), Failure> {
        make_records(&self.records)?;
        let put = put(&self.records, &record_name(&self.job), &self.record);
        put.map_err(|e| Failure::io(self.records.display(), &e))
    }

    /// Returns what the job asks of one mount.
    pub fn share(&self, entry: &RegisteredMount) -> MountShare {
        let staging = &self.record.request.staging;
        let below = |paths: &mut dyn Iterator<Item = PathBuf>| {
            let places = paths.filter_map(|path| multi_mount::places(&path).ok()).flatten();
            places.filter(|place| place.entry.mountpoint() == entry.mountpoint()).map(|place| place.inner).collect()
        };
        let mut outputs = staging.stage_out.iter().map(PathBuf::from).collect::<Vec<_>>();
        if !outputs.is_empty() {
            outputs.extend(staging.copy_out.iter().map(|copy| self.destination(copy)));
        }
        MountShare {
            stage_in: below(&mut staging.stage_in.iter().map(PathBuf::from)),
            stage_out: below(&mut outputs.into_iter()),
            views: below(&mut staging.views.iter().map(PathBuf::from)),
            groups: Vec::new(),
            profile: staging.profile.clone(),
            lease_secs: staging.lease_secs,
            has_results: self.has_results() && self.has_scratch_at(entry),
            has_scratch: staging.scratch_bytes.is_some() && self.has_scratch_at(entry),
        }
    }

    /// Returns whether the job leaves results in its scratch directory.
    pub fn has_results(&self) -> bool {
        let staging = &self.record.request.staging;
        staging.scratch_bytes.is_some() && !staging.copy_out.is_empty()
    }

    /// Returns whether the scratch directory of the job is at this mount.
    pub fn has_scratch_at(&self, entry: &RegisteredMount) -> bool {
        self.record.scratch_mount.as_deref() == Some(entry.mountpoint())
    }

    /// Returns how long this node waits before it begins to stage: the nodes of a job, and the tasks of an array, do not
    /// all ask the pool at the same moment.
    pub fn jitter(&self, most_ms: u64) -> Duration {
        let request = &self.record.request;
        let is_one_of_many = self.node.nodes > 1 || request.array_index.is_some();
        let salt = paths::stable_hash(format!("{}@{}", self.job.id, self.node.name).as_ref());
        Duration::from_millis(if is_one_of_many { salt % most_ms } else { 0 })
    }

    /// Returns what becomes of the results. Waits until then for the controller, if that depends on the end of the job.
    pub fn fate(&self, until: Instant) -> ResultsFate {
        let request = &self.record.request;
        let told = || self.exchange.as_ref().and_then(|e| e.outcome(&self.job.id, &request.attempt).ok().flatten());
        let known = self.record.known_fate;
        if known == Some(ResultsFate::GivenUp) || told() == Some(JobOutcome::GivenUp) {
            return ResultsFate::GivenUp;
        }
        if !self.record.is_staged || self.is_interrupted() {
            return ResultsFate::Kept;
        }
        if let Some(known) = known {
            return known;
        }
        if !request.staging.needs_outcome() {
            return ResultsFate::Kept;
        }
        if self.job.wait_status.is_some_and(|status| status != 0) {
            return ResultsFate::Refused;
        }
        // Then it may have been cancelled.
        if self.report(NodeProgress::Ended, Vec::new()).is_err() {
            return ResultsFate::Unknown;
        }
        loop {
            match told() {
                Some(JobOutcome::Succeeded) => return ResultsFate::Kept,
                Some(JobOutcome::Failed) => return ResultsFate::Refused,
                Some(JobOutcome::GivenUp) => return ResultsFate::GivenUp,
                None if Instant::now() >= until => return ResultsFate::Unknown,
                None => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Returns why paths to stage are in no mount of this node.
    pub fn strange_paths(&self) -> Vec<String> {
        let staging = &self.record.request.staging;
        let all = staging.stage_in.iter().chain(&staging.stage_out);
        all.filter_map(|path| multi_mount::places(Path::new(path)).err().map(|failure| failure.what)).collect()
    }

    /// Creates the scratch directory of the job, and copies into it what the job asks for, with the rights of its user.
    pub fn fill_scratch(&mut self, entry: &RegisteredMount, until: Instant) -> Result<(), Failure> {
        let staging = &self.record.request.staging;
        let Some(bytes) = staging.scratch_bytes else { return Ok(()) };
        let dir = scratch::create_for(entry, self.job.allocation(), self.job.uid, bytes)?;
        let link = scratch_link(&self.records, &self.job.id);
        let failed = |e: io::Error| Failure::io(link.display(), &e);
        gone(std::fs::remove_file(&link)).map_err(failed)?;
        symlink(&dir, &link).map_err(failed)?;
        for copy in &staging.copy_in {
            let into = dir.join(&copy.scratch);
            let copied = identity::as_user(self.job.uid, || copy_in(copy, &dir, &into, until));
            copied.map_err(|e| Failure::io(format!("user {} cannot copy {}", self.job.uid, copy.path), &e))?;
        }
        self.record.scratch = Some(dir);
        Ok(())
    }

    /// Returns whether the scratch directory has nothing that could be a result.
    pub fn has_empty_scratch(&self) -> bool {
        let entries = self.record.scratch.as_ref().map(std::fs::read_dir);
        entries.is_some_and(|entries| entries.is_ok_and(|mut entries| entries.next().is_none()))
    }

    /// Takes results of the scratch directory into the mount. Returns what could not be.
    pub fn commit(&mut self, entry: &RegisteredMount) -> Vec<String> {
        // A requeued job begins anew: half a result is none.
        if self.is_interrupted() {
            return Vec::new();
        }
        if self.record.scratch.is_none() && self.record.request.staging.scratch_bytes.is_some() {
            // The prolog has not recorded it.
            match scratch::find(entry, &self.job.allocation(), self.job.uid) {
                Ok(found) => self.record.scratch = found,
                Err(failure) => return vec![failure.what],
            }
        }
        let Some(dir) = self.record.scratch.clone() else { return Vec::new() };
        let kept = |why: &str| vec![format!("{}: not committed, because {why}", dir.display())];
        // No task runs after a stage-in that failed. If one began before, what it wrote is not given up without a word.
        let may_have_results = !self.has_empty_scratch() && self.record.request.staging.copy_in.is_empty();
        if !self.record.is_staged {
            return if may_have_results { kept("the stage-in has failed") } else { Vec::new() };
        }
        match self.other_nodes() {
            OtherNodes::Failed if may_have_results => return kept("another node could not stage"),
            OtherNodes::Unknown if !self.has_empty_scratch() => {
                return kept("the controller does not tell any more whether each node could stage");
            }
            OtherNodes::Failed | OtherNodes::Unknown => return Vec::new(),
            OtherNodes::Staged => {}
        }
        let committed = |copy: &ScratchCopy| {
            let from = dir.join(&copy.scratch);
            let from = if copy.scratch.is_empty() { dir.clone() } else { from };
            check_kind(&from, copy.kind).map_err(|e| Failure::given(from.display(), &e))?;
            // As a copy would: the job may have run before.
            scratch::commit_tree(&from, &self.destination(copy), scratch::Existing::Merge)?;
            // If this fails, an epilog that is repeated names the result as missing.
            let _ = self.change_record(|record| record.committed.push(copy.clone()));
            Ok::<(), Failure>(())
        };
        let copies = self.record.request.staging.copy_out.iter();
        let left = copies.filter(|copy| !self.record.committed.contains(copy));
        left.filter_map(|copy| Some(format!("{}: {}", copy.path, committed(copy).err()?.what))).collect()
    }

    /// Changes the record of the job on this node. One that is gone stays away.
    fn change_record(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<(), Failure> {
        let _lock = RECORD_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let name = record_name(&self.job);
        let owner = rustix::process::geteuid().as_raw();
        let Some(mut record) = get::<NodeRecord>(&self.records.join(&name), &[owner])? else { return Ok(()) };
        change(&mut record);
        put(&self.records, &name, &record).map_err(|e| Failure::io(self.records.display(), &e))
    }

    /// Returns where a result goes. The nodes of a job do not replace each other's results.
    fn destination(&self, copy: &ScratchCopy) -> PathBuf {
        let plain = copy.path.trim_end_matches('/');
        if self.node.nodes > 1 { format!("{plain}.{}", self.node.name).into() } else { plain.into() }
    }

    /// Returns whether the job has not started, because another node could not stage.
    fn other_nodes(&self) -> OtherNodes {
        let Some(exchange) = self.exchange.as_ref().filter(|_| !self.record.others_staged) else {
            return OtherNodes::Staged;
        };
        let attempt = &self.record.request.attempt;
        let reports = exchange.reports(&self.job.id, attempt).unwrap_or_default();
        // Read after the reports, because it is removed before them.
        let request = exchange.request(&self.job.id);
        let is_forgotten = request.is_ok_and(|known| known.is_none_or(|known| known.attempt != *attempt));
        match reports.iter().any(|report| report.progress == NodeProgress::StageInFailed) {
            true => OtherNodes::Failed,
            false if is_forgotten && self.node.nodes > 1 => OtherNodes::Unknown,
            false => OtherNodes::Staged,
        }
    }

    /// Tells the tasks and the controller how the stage-in ended. What cannot be recorded as staged has failed.
    pub fn staged(&mut self, mut reasons: Vec<String>) -> Result<(), Failure> {
        let refusal = refusal_path(&self.records, &self.job.id);
        if reasons.is_empty() {
            self.record.is_staged = true;
            let cleared = gone(std::fs::remove_file(&refusal)).map_err(|e| Failure::io(refusal.display(), &e));
            let recorded = cleared.and_then(|()| self.store_again());
            reasons.extend(recorded.err().map(|failure| format!("it cannot be recorded: {}", failure.what)));
        }
        if reasons.is_empty() {
            return self.report(NodeProgress::Staged, reasons);
        }
        self.record.is_staged = false;
        // Each of the three keeps the tasks from running.
        let refused = write_for_tasks(&refusal, &reasons.join("; ")).map_err(|e| Failure::io(refusal.display(), &e));
        let recorded = self.store_again();
        self.report(NodeProgress::StageInFailed, reasons).and(refused).and(recorded)
    }

    /// Tells the controller how the write-back ended. `keeps_results`: some may be in the scratch directory.
    pub fn written_back(&self, fate: ResultsFate, reasons: Vec<String>, keeps_results: bool) -> Result<(), Failure> {
        match (self.record.is_staged || keeps_results, reasons.is_empty()) {
            // Its report of the stage-in says why.
            (false, _) => Ok(()),
            (true, true) if matches!(fate, ResultsFate::Refused | ResultsFate::GivenUp) => {
                self.report(NodeProgress::GivenUp, reasons)
            }
            (true, true) => self.report(NodeProgress::WrittenBack, reasons),
            (true, false) => self.report(NodeProgress::ResultsMissing, reasons),
        }
    }

    /// Forgets the job.
    pub fn forget(&self) -> Result<(), Failure> {
        let record = self.records.join(record_name(&self.job));
        {
            let _lock = RECORD_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
            gone(std::fs::remove_file(&record)).map_err(|e| Failure::io(record.display(), &e))?;
        }
        self.unlink_all()
    }

    /// Keeps the record of a job whose results are still to be committed, so that its epilog can be repeated. Nothing else
    /// is left of the job. `is_destroyed`: the persistent directories that it wanted removed have been.
    pub fn retain(&self, is_destroyed: bool) -> Result<(), Failure> {
        self.change_record(|record| {
            record.is_over = true;
            // It uses them no more.
            let persistent = &mut record.request.staging.persistent;
            (persistent.create, persistent.uses) = Default::default();
            if is_destroyed {
                persistent.destroy.clear();
            }
        })?;
        self.unlink_all()
    }

    /// Removes what the tasks of the job have seen.
    fn unlink_all(&self) -> Result<(), Failure> {
        let id = &self.job.id;
        for path in [scratch_link(&self.records, id), refusal_path(&self.records, id)] {
            gone(std::fs::remove_file(&path)).map_err(|e| Failure::io(path.display(), &e))?;
        }
        self.unlink_persistent()
    }

    fn report(&self, progress: NodeProgress, reasons: Vec<String>) -> Result<(), Failure> {
        let Some(exchange) = &self.exchange else { return Ok(()) };
        exchange.put_report(
            &self.job.id,
            NodeReport {
                node: self.node.name.clone(),
                attempt: self.record.request.attempt.clone(),
                progress,
                nodes: self.node.nodes,
                reasons,
            },
        )
    }
}

/// What the tasks of a job are told.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TaskView {
    pub scratch: Option<PathBuf>,
    /// The persistent directories of the job, with their names.
    pub persistent: Vec<(String, PathBuf)>,
    /// Bytes that the prolog fetched. `None`: the staging had not ended.
    pub staged_bytes: Option<u64>,
    /// Why they do not run.
    pub refused: Option<String>,
}

/// Returns what the prolog has left for the tasks of a job.
pub fn task_view(exchange: &Path, records: &Path, job: &str) -> TaskView {
    let is_roots = |path: &Path| std::fs::symlink_metadata(path).is_ok_and(|found| found.uid() == 0);
    let exchange = BoundedExchange::open(exchange, EXCHANGE_ANSWER).ok().flatten();
    let request = exchange.as_ref().and_then(|exchange| exchange.request(job).ok().flatten());
    let needs_staging = request.as_ref().is_some_and(|request| request.staging.needs_staging());
    let needed = request.as_ref().filter(|_| needs_staging);
    let is_staged = match needed.map_or(Ok(true), |request| recorded_as_staged(records, job, &request.attempt)) {
        Ok(is_staged) => is_staged,
        Err(why) => return TaskView { refused: Some(why), ..TaskView::default() },
    };
    // The prologs of all nodes end before the first task begins.
    let reports = exchange.zip(request).and_then(|(exchange, request)| exchange.reports(job, &request.attempt).ok());
    let mut failed = reports.into_iter().flatten().filter(|report| report.progress == NodeProgress::StageInFailed);
    if let Some(report) = failed.next() {
        let why = format!("{} could not stage: {}", report.node, report.reasons.join("; "));
        return TaskView { refused: Some(why), ..TaskView::default() };
    }
    if job.is_empty() || !job.bytes().all(|b| b.is_ascii_digit()) || !is_roots(records) {
        return TaskView::default();
    }
    let (link, refusal) = (scratch_link(records, job), refusal_path(records, job));
    let scratch = is_roots(&link).then(|| std::fs::read_link(&link).ok()).flatten();
    let why = || std::fs::read_to_string(&refusal).unwrap_or_else(|error| format!("{}: {error}", refusal.display()));
    let refused = is_roots(&refusal).then(why);
    let unstaged = || (!is_staged).then(|| "its stage-in has not ended on this node".to_owned());
    let refused = refused.or_else(unstaged);
    // To Slurm, a line break would begin another command.
    let is_plain = |dir: &PathBuf| dir.to_str().is_some_and(|text| !text.contains(char::is_control));
    let mut persistent = persistent::task_dirs(records, job, is_roots);
    persistent.retain(|(_, dir)| is_plain(dir));
    let count = staged_path(records, job);
    let staged_bytes = is_roots(&count).then(|| std::fs::read_to_string(&count).ok()?.trim().parse().ok()).flatten();
    TaskView { scratch: scratch.filter(is_plain), persistent, staged_bytes, refused }
}

/// Returns whether a prolog has staged all that an attempt of a job needs on this node.
///
/// # Errors
/// Why that is not known.
fn recorded_as_staged(records: &Path, job: &str, attempt: &str) -> Result<bool, String> {
    // Only root writes to the directory.
    let record: Option<NodeRecord> = get(&records.join(format!("{job}.json")), &[0]).map_err(|failure| failure.what)?;
    match record {
        Some(record) if record.request.attempt == attempt && !record.is_over => Ok(record.is_staged),
        // slurmd runs no prolog for a job that returns to its node at once.
        _ => Err("no prolog has run on this node".into()),
    }
}

/// Removes the records of jobs that are over and whose scratch directories are gone: their results were dealt with.
pub fn forget_settled(records: &Path) {
    let owner = rustix::process::geteuid().as_raw();
    for name in names_of(records).unwrap_or_default().iter().filter(|name| name.ends_with(".json")) {
        let path = records.join(name);
        let Ok(Some(record)) = get::<NodeRecord>(&path, &[owner]) else { continue };
        let is_gone = |dir: PathBuf| std::fs::symlink_metadata(dir).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        if record.is_over && record.scratch.is_none_or(is_gone) {
            // The next epilog tries again.
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Returns why the tasks of a job with directives do not run: its prolog has kept nothing of what the job asks for, and this
/// node does not see it either.
pub fn unseen(exchange: &Path, records: &Path, job: &str) -> Option<String> {
    let of_prolog = get::<NodeRecord>(&records.join(format!("{job}.json")), &[0]).ok().flatten();
    // That of a job that is over is of an earlier attempt.
    if let Some(record) = of_prolog.filter(|record| !record.is_over) {
        let lacks = record.request.staging.needs_staging() && !record.is_staged;
        return lacks.then(|| "this node has not staged what the job asks for".to_owned());
    }
    let why = match BoundedExchange::open(exchange, EXCHANGE_ANSWER).and_then(|found| match found {
        Some(found) => Ok((true, found.request(job)?)),
        None => Ok((false, None)),
    }) {
        Ok((_, Some(_))) => return None,
        Ok((true, None)) => format!("{} has no request of the job", exchange.display()),
        Ok((false, None)) => format!("{} does not exist", exchange.display()),
        Err(failure) => failure.what,
    };
    Some(format!("this node does not see what the job asks for: {why}"))
}

/// Writes a file that tasks read as their user, whatever the umask of slurmd is.
fn write_for_tasks(path: &Path, text: &str) -> io::Result<()> {
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o644))
}

/// Returns the file that tells the tasks of a job how much was staged.
fn staged_path(records: &Path, job: &str) -> PathBuf {
    records.join(format!("{job}.staged"))
}

/// Tells the tasks of a job how many bytes were staged on this node. `None`: the staging has not ended.
pub fn note_staged(records: &Path, job: &str, bytes: Option<u64>) -> Result<(), Failure> {
    let Some(bytes) = bytes else { return forget_staged(records, job) };
    let path = staged_path(records, job);
    make_records(records)?;
    write_for_tasks(&path, &format!("{bytes}\n")).map_err(|e| Failure::io(path.display(), &e))
}

/// Forgets it at the end of the job.
pub fn forget_staged(records: &Path, job: &str) -> Result<(), Failure> {
    let path = staged_path(records, job);
    gone(std::fs::remove_file(&path)).map_err(|e| Failure::io(path.display(), &e))
}

fn make_records(records: &Path) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::io(records.display(), &e);
    DirBuilder::new().recursive(true).mode(0o755).create(records).map_err(failed)?;
    std::fs::set_permissions(records, Permissions::from_mode(0o755)).map_err(failed)
}

/// Returns the names in the directory of records.
pub fn names_of(records: &Path) -> Result<Vec<String>, Failure> {
    let failed = |e: io::Error| Failure::io(records.display(), &e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(records).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    Ok(names)
}

/// The mount that gets results of the scratch directory, or else the one that has what is copied into it.
fn scratch_mount(request: &ExchangedRequest, entries: &[RegisteredMount]) -> Option<PathBuf> {
    let staging = &request.staging;
    let mut paths = staging.copy_out.iter().chain(&staging.copy_in).map(|copy| Path::new(&copy.path));
    let of = |path: &Path| {
        let around = entries.iter().filter(|entry| path.starts_with(entry.mountpoint()));
        around.max_by_key(|entry| entry.mountpoint().as_os_str().len())
    };
    let entry = paths.find_map(of).or(entries.first())?;
    Some(entry.mountpoint().to_owned())
}

mod noted;
#[cfg(test)]
mod tests;
