//! What a job asks for by directives, on a node: found by the prolog, kept until the epilog.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, multi_mount, paths};
use forebay_slurm::directives::{ScratchCopy, SourceKind};
use forebay_slurm::exchange::{Exchange, ExchangedRequest, NodeProgress, NodeReport, get, gone, put};
use forebay_slurm::outcome::JobOutcome;
use forebay_slurm::{JobNode, MountShare, SlurmJob};
use forebay_system::identity;
use serde::{Deserialize, Serialize};

use super::persistent;
use crate::args::HookArgs;
use crate::commands::scratch;

/// The deepest directory that is copied.
const DEPTH_MAX: usize = 128;
/// How often an epilog looks whether the controller has told how the job ended.
const PAUSE: Duration = Duration::from_millis(100);

/// What becomes of the results of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

/// A job with directives, on this node.
#[derive(Debug, Clone)]
pub struct StagedJob {
    pub(super) job: SlurmJob,
    pub(super) node: JobNode,
    exchange: Option<Exchange>,
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
        let Some(exchange) = Exchange::open(&args.exchange.exchange)? else { return Ok(None) };
        let Some(request) = exchange.request(&job.id)? else { return Ok(None) };
        let needs_directory = request.staging.scratch_bytes.is_some() || request.staging.persistent.is_needed();
        let scratch_mount = if needs_directory { scratch_mount(&request, entries) } else { None };
        let record = NodeRecord {
            request,
            scratch_mount,
            scratch: None,
            is_staged: false,
            requeues: job.requeues,
            uid: job.uid,
        };
        let records = args.records.records.clone();
        let staged = Self { job: job.clone(), node: node(), exchange: Some(exchange), records, record };
        staged.store()?;
        Ok(Some(staged))
    }

    /// Returns what the prolog of this node has kept.
    pub fn kept(args: &HookArgs, job: &SlurmJob) -> Result<Option<Self>, Failure> {
        let records = args.records.records.clone();
        let owner = rustix::process::geteuid().as_raw();
        let Some(record) = get(&records.join(record_name(job)), &[owner])? else { return Ok(None) };
        // The results are written back, also if nobody can be told.
        let exchange = Exchange::open(&args.exchange.exchange).ok().flatten();
        Ok(Some(Self { job: job.clone(), node: node(), exchange, records, record }))
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
            profile: staging.profile.clone(),
            lease_secs: staging.lease_secs,
        }
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
        let is_over = !self.record.is_staged || self.job.requeues > self.record.requeues;
        if told() == Some(JobOutcome::GivenUp) {
            return ResultsFate::GivenUp;
        }
        if is_over || !request.staging.needs_outcome() {
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
    pub fn commit(&self) -> Vec<String> {
        let Some(dir) = self.record.scratch.as_ref().filter(|_| self.record.is_staged) else { return Vec::new() };
        // A requeued job begins anew: half a result is none. Its epilog knows of the requeue.
        if self.job.requeues > self.record.requeues {
            return Vec::new();
        }
        if self.has_failed_elsewhere() {
            // Tasks do not run then. If one began before, what it wrote is not given up without a word.
            let may_have_results = !self.has_empty_scratch() && self.record.request.staging.copy_in.is_empty();
            let why = format!("{}: not committed, because another node could not stage", dir.display());
            return if may_have_results { vec![why] } else { Vec::new() };
        }
        let committed = |copy: &ScratchCopy| {
            let from = dir.join(&copy.scratch);
            let from = if copy.scratch.is_empty() { dir.clone() } else { from };
            check_kind(&from, copy.kind).map_err(|e| Failure::given(from.display(), &e))?;
            // As a copy would: the job may have run before.
            scratch::commit_tree(&from, &self.destination(copy), scratch::Existing::Merge)
        };
        let copies = self.record.request.staging.copy_out.iter();
        copies.filter_map(|copy| Some(format!("{}: {}", copy.path, committed(copy).err()?.what))).collect()
    }

    /// Returns where a result goes. The nodes of a job do not replace each other's results.
    fn destination(&self, copy: &ScratchCopy) -> PathBuf {
        let plain = copy.path.trim_end_matches('/');
        if self.node.nodes > 1 { format!("{plain}.{}", self.node.name).into() } else { plain.into() }
    }

    /// Returns whether the job has not started, because another node could not stage.
    fn has_failed_elsewhere(&self) -> bool {
        let reports = self.exchange.as_ref().and_then(|e| e.reports(&self.job.id, &self.record.request.attempt).ok());
        reports.is_some_and(|all| all.iter().any(|report| report.progress == NodeProgress::StageInFailed))
    }

    /// Tells the controller how the stage-in ended.
    pub fn staged(&mut self, reasons: Vec<String>) -> Result<(), Failure> {
        self.record.is_staged = reasons.is_empty();
        self.store()?;
        let refusal = refusal_path(&self.records, &self.job.id);
        let told = match reasons.is_empty() {
            true => gone(std::fs::remove_file(&refusal)),
            false => write_for_tasks(&refusal, &reasons.join("; ")),
        };
        told.map_err(|e| Failure::io(refusal.display(), &e))?;
        let progress = if reasons.is_empty() { NodeProgress::Staged } else { NodeProgress::StageInFailed };
        self.report(progress, reasons)
    }

    /// Tells the controller how the write-back ended, and forgets the job.
    pub fn written_back(&self, fate: ResultsFate, reasons: Vec<String>) -> Result<(), Failure> {
        let told = match (self.record.is_staged, reasons.is_empty()) {
            // Its report of the stage-in says why.
            (false, _) => Ok(()),
            (true, true) if matches!(fate, ResultsFate::Refused | ResultsFate::GivenUp) => {
                self.report(NodeProgress::GivenUp, reasons)
            }
            (true, true) => self.report(NodeProgress::WrittenBack, reasons),
            (true, false) => self.report(NodeProgress::ResultsMissing, reasons),
        };
        let id = &self.job.id;
        let refusal = refusal_path(&self.records, id);
        for path in [self.records.join(record_name(&self.job)), scratch_link(&self.records, id), refusal] {
            gone(std::fs::remove_file(&path)).map_err(|e| Failure::io(path.display(), &e))?;
        }
        self.unlink_persistent()?;
        told
    }

    fn report(&self, progress: NodeProgress, reasons: Vec<String>) -> Result<(), Failure> {
        let Some(exchange) = &self.exchange else { return Ok(()) };
        exchange.put_report(
            &self.job.id,
            &NodeReport {
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
    let exchange = Exchange::open(exchange).ok().flatten();
    let request = exchange.as_ref().and_then(|exchange| exchange.request(job).ok().flatten());
    let needs_staging = request.as_ref().is_some_and(|request| request.staging.needs_staging());
    if needs_staging && std::fs::symlink_metadata(records.join(format!("{job}.json"))).is_err() {
        // slurmd runs no prolog for a job that returns to its node at once.
        return TaskView { refused: Some("no prolog has run on this node".into()), ..TaskView::default() };
    }
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
    // To Slurm, a line break would begin another command.
    let is_plain = |dir: &PathBuf| dir.to_str().is_some_and(|text| !text.contains(char::is_control));
    let mut persistent = persistent::task_dirs(records, job, is_roots);
    persistent.retain(|(_, dir)| is_plain(dir));
    let count = staged_path(records, job);
    let staged_bytes = is_roots(&count).then(|| std::fs::read_to_string(&count).ok()?.trim().parse().ok()).flatten();
    TaskView { scratch: scratch.filter(is_plain), persistent, staged_bytes, refused }
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

fn check_kind(path: &Path, kind: Option<SourceKind>) -> io::Result<()> {
    let found = std::fs::symlink_metadata(path)?;
    match kind {
        Some(SourceKind::File) if !found.is_file() => Err(io::Error::other("it is no file")),
        Some(SourceKind::Directory) if !found.is_dir() => Err(io::Error::other("it is no directory")),
        _ => Ok(()),
    }
}

/// Copies a file or a directory to `into`, which lies below `dir`. A directory gets its content.
fn copy_in(copy: &ScratchCopy, dir: &Path, into: &Path, until: Instant) -> io::Result<()> {
    let source = Path::new(&copy.path);
    let found = std::fs::metadata(source)?;
    match copy.kind {
        Some(SourceKind::File) if !found.is_file() => return Err(io::Error::other("it is no file")),
        Some(SourceKind::Directory) if !found.is_dir() => return Err(io::Error::other("it is no directory")),
        _ => {}
    }
    let above = if found.is_dir() { Some(into) } else { into.parent() };
    if let Some(above) = above.filter(|above| above.starts_with(dir)) {
        std::fs::create_dir_all(above)?;
    }
    match (found.is_dir(), source.file_name()) {
        (true, _) => copy_tree(source, into, until, 0),
        (false, Some(name)) if into.is_dir() => copy_file(source, &into.join(name), until),
        (false, _) => copy_file(source, into, until),
    }
}

fn copy_tree(from: &Path, into: &Path, until: Instant, depth: usize) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Err(io::Error::other(format!("{} is deeper than {DEPTH_MAX} directories", from.display())));
    }
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (source, target, kind) = (entry.path(), into.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            std::fs::create_dir_all(&target)?;
            copy_tree(&source, &target, until, depth + 1)?;
        } else if kind.is_symlink() {
            gone(std::fs::remove_file(&target))?;
            symlink(std::fs::read_link(&source)?, &target)?;
        } else if kind.is_file() {
            copy_file(&source, &target, until)?;
        } else {
            return Err(io::Error::other(format!("{} is a special file", source.display())));
        }
    }
    Ok(())
}

fn copy_file(from: &Path, into: &Path, until: Instant) -> io::Result<()> {
    if Instant::now() >= until {
        return Err(io::Error::new(io::ErrorKind::TimedOut, format!("the time is up before {}", from.display())));
    }
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", from.display()));
    std::fs::copy(from, into).map_err(named)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use forebay_slurm::directives::{DirectoryAccess, PersistentDir, PersistentRequest, StagingRequest};

    use super::*;

    /// A job whose prolog has begun, and has not ended.
    fn begun(id: &str, uid: u32, persistent: PersistentRequest, records: &Path) -> StagedJob {
        let variable = |name: &str| match name {
            "SLURM_JOB_ID" => Some(id.to_owned()),
            "SLURM_JOB_UID" => Some(uid.to_string()),
            _ => None,
        };
        let job = SlurmJob::of(variable).unwrap();
        let staging = StagingRequest { persistent, ..StagingRequest::default() };
        let record = NodeRecord {
            request: ExchangedRequest { attempt: "1".into(), staging, array_index: None },
            scratch_mount: None,
            scratch: None,
            is_staged: false,
            requeues: 0,
            uid,
        };
        let node = JobNode::of(|_| None, "n1");
        let staged = StagedJob { job, node, exchange: None, records: records.to_owned(), record };
        staged.store().unwrap();
        staged
    }

    /// SEMANTICS 84: "A persistent directory belongs to one user and one node. It is there until a job of its user destroys
    /// it, and is not destroyed while another job uses it."
    ///
    /// The prolog of the other job may still copy when the first job ends.
    #[test]
    fn a_job_whose_prolog_has_not_ended_uses_its_persistent_directories() {
        let records = tempfile::tempdir().unwrap();
        let destroys = PersistentRequest { destroy: vec!["set".into(), "new".into()], ..PersistentRequest::default() };
        let ends = begun("1", 65534, destroys, records.path());
        let uses = PersistentRequest { uses: vec!["set".into()], ..PersistentRequest::default() };
        begun("2", 1, uses.clone(), records.path());
        assert_eq!(ends.other_user_of(&"set".to_owned()).unwrap(), None, "that of another user");
        begun("3", 65534, uses, records.path());
        let new = PersistentDir { name: "new".into(), bytes: 1, access: DirectoryAccess::Private };
        begun("4", 65534, PersistentRequest { create: vec![new], ..PersistentRequest::default() }, records.path());
        assert_eq!(ends.other_user_of(&"set".to_owned()).unwrap().as_deref(), Some("3"));
        assert_eq!(ends.other_user_of(&"new".to_owned()).unwrap().as_deref(), Some("4"));
        assert_eq!(ends.other_user_of(&"old".to_owned()).unwrap(), None);
        let told = ends.destroy_persistent(&[]);
        assert!(told.is_empty(), "a job that was not staged destroys nothing: {told:?}");
    }
}
