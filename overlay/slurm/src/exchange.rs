//! The exchange directory: what the controller and the nodes of a job tell each other, as files that both see.
//!
//! `job.ID/request.json` is written by the controller before the job has nodes, `job.ID/node.NAME.json` by each node.
//! Files are replaced as a whole. Readers accept only files of root and of the owner of the directory.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_api::{Failure, FailureKind};
use rustix::fs::{Mode, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::directives::StagingRequest;
use crate::outcome::JobOutcome;

/// Where the exchange directory is, unless Slurm's scripts name another one.
pub const EXCHANGE_DIR: &str = "/var/spool/forebay/slurm";
/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The most jobs whose missing results are kept.
const KEPT_MAX: usize = 256;
/// The most reasons of a node, and the most bytes of each.
const REASONS_MAX: usize = 32;
const REASON_BYTES_MAX: usize = 1024;
const REQUEST: &str = "request.json";
const OUTCOME: &str = "outcome.json";

/// What the controller tells the nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangedRequest {
    /// The name of this attempt: another one if the job is requeued.
    pub attempt: String,
    pub staging: StagingRequest,
    /// The number of the job in its array.
    #[serde(default)]
    pub array_index: Option<u64>,
}

/// How an attempt of a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ExchangedOutcome {
    attempt: String,
    outcome: JobOutcome,
}

/// How far a node is with a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeProgress {
    Staged,
    StageInFailed,
    /// All processes of the job are gone, and it depends on the outcome of the job what becomes of its results.
    Ended,
    /// All results are in the pool.
    WrittenBack,
    /// Something is not in the pool.
    ResultsMissing,
    /// The results were given up, as the job asked, or `scancel --hurry`.
    GivenUp,
}

impl NodeProgress {
    /// Returns whether the job has ended on the node.
    pub fn is_over(self) -> bool {
        matches!(self, Self::WrittenBack | Self::ResultsMissing | Self::GivenUp)
    }
}

/// What a node tells the controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    pub node: String,
    pub attempt: String,
    pub progress: NodeProgress,
    /// How many nodes the job has.
    pub nodes: usize,
    #[serde(default)]
    pub reasons: Vec<String>,
}

/// What a job left that is not in the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingResults {
    pub job: String,
    pub reasons: Vec<String>,
}

/// A directory that the controller and the nodes see.
#[derive(Debug, Clone)]
pub struct Exchange {
    dir: PathBuf,
    owner: u32,
}

impl Exchange {
    /// Returns `None` if there is no such directory.
    ///
    /// # Errors
    /// Another user may write to it.
    pub fn open(dir: &Path) -> Result<Option<Self>, Failure> {
        let found = match std::fs::symlink_metadata(dir) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::io(dir.display(), &error)),
        };
        let denied = |what: String, remedy: &str| Err(Failure::new(FailureKind::Denied, what).remedy(remedy));
        if !found.is_dir() {
            return denied(format!("{} is no directory", dir.display()), "name another directory by --exchange");
        }
        if found.mode() & 0o022 != 0 {
            return denied(format!("other users may write to {}", dir.display()), "chmod go-w");
        }
        Ok(Some(Self { dir: dir.to_owned(), owner: found.uid() }))
    }

    /// Makes the directory if it is missing.
    ///
    /// # Errors
    /// It cannot be made, or another user may write to it.
    pub fn create(dir: &Path) -> Result<Self, Failure> {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(dir);
        made.map_err(|e| Failure::io(dir.display(), &e))?;
        Self::open(dir)?.ok_or_else(|| Failure::new(FailureKind::Other, format!("{} is gone", dir.display())))
    }

    fn job_dir(&self, job: &str) -> PathBuf {
        self.dir.join(format!("job.{job}"))
    }

    fn kept(&self, job: &str) -> PathBuf {
        self.dir.join(format!("missing.{job}.json"))
    }

    /// # Errors
    /// It cannot be written.
    pub fn put_request(&self, job: &str, request: &ExchangedRequest) -> Result<(), Failure> {
        check_job(job)?;
        let dir = self.job_dir(job);
        match DirBuilder::new().mode(0o755).create(&dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(Failure::io(dir.display(), &error)),
            // Tasks look at it as their user.
            _ => std::fs::set_permissions(&dir, Permissions::from_mode(0o755))
                .and_then(|()| put(&dir, REQUEST, request))
                .map_err(|e| Failure::io(dir.display(), &e)),
        }
    }

    /// Returns `None` if the controller asks for nothing.
    ///
    /// # Errors
    /// There is a request that cannot be read, or that another user wrote.
    pub fn request(&self, job: &str) -> Result<Option<ExchangedRequest>, Failure> {
        check_job(job)?;
        let dir = self.job_dir(job);
        self.get(&dir.join(REQUEST))
    }

    /// Tells the nodes how an attempt ended. A job that is torn down is not told.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn put_outcome(&self, job: &str, attempt: &str, outcome: JobOutcome) -> Result<(), Failure> {
        check_job(job)?;
        let dir = self.job_dir(job);
        match put(&dir, OUTCOME, &ExchangedOutcome { attempt: attempt.to_owned(), outcome }) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            written => written.map_err(|e| Failure::io(dir.display(), &e)),
        }
    }

    /// Returns how an attempt ended, if the controller has told.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn outcome(&self, job: &str, attempt: &str) -> Result<Option<JobOutcome>, Failure> {
        check_job(job)?;
        let told: Option<ExchangedOutcome> = self.get(&self.job_dir(job).join(OUTCOME))?;
        Ok(told.filter(|told| told.attempt == attempt).map(|told| told.outcome))
    }

    /// A job that is torn down gets no report.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn put_report(&self, job: &str, report: &NodeReport) -> Result<(), Failure> {
        check_job(job)?;
        let node = &report.node;
        if node.is_empty()
            || node.starts_with('.')
            || !node.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        {
            return Err(Failure::usage("the name of this node has other characters than letters, digits and -_."));
        }
        let mut report = report.clone();
        shorten(&mut report.reasons);
        let dir = self.job_dir(job);
        match put(&dir, &format!("node.{node}.json"), &report) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            written => written.map_err(|e| Failure::io(dir.display(), &e)),
        }
    }

    /// Returns what the nodes have reported of an attempt, in the order of their names.
    ///
    /// # Errors
    /// A report cannot be read.
    pub fn reports(&self, job: &str, attempt: &str) -> Result<Vec<NodeReport>, Failure> {
        check_job(job)?;
        let dir = self.job_dir(job);
        let names = names(&dir).map_err(|e| Failure::io(dir.display(), &e))?;
        let mut reports = Vec::new();
        for name in names.iter().filter(|name| name.starts_with("node.") && name.ends_with(".json")) {
            let report: Option<NodeReport> = self.get(&dir.join(name))?;
            reports.extend(report.filter(|report| report.attempt == attempt));
        }
        Ok(reports)
    }

    /// Returns the jobs with a request.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn jobs(&self) -> Result<Vec<String>, Failure> {
        let names = names(&self.dir).map_err(|e| Failure::io(self.dir.display(), &e))?;
        let mut jobs: Vec<String> =
            names.iter().filter_map(|name| Some(name.strip_prefix("job.")?.to_owned())).collect();
        jobs.retain(|job| check_job(job).is_ok());
        jobs.sort_by_key(|job| (job.len(), job.clone()));
        Ok(jobs)
    }

    /// Keeps what a job left that is not in the pool, for those who look after it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep(&self, missing: &MissingResults) -> Result<(), Failure> {
        check_job(&missing.job)?;
        let mut missing = missing.clone();
        shorten(&mut missing.reasons);
        let failed = |e: &io::Error| Failure::io(self.dir.display(), e);
        let path = self.kept(&missing.job);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        put(&self.dir, &name, &missing).map_err(|e| failed(&e))?;
        let mut all = self.kept_names().map_err(|e| failed(&e))?;
        all.sort_by_key(|(job, _)| (job.len(), job.clone()));
        for (_, name) in all.iter().take(all.len().saturating_sub(KEPT_MAX)) {
            gone(std::fs::remove_file(self.dir.join(name))).map_err(|e| failed(&e))?;
        }
        Ok(())
    }

    fn kept_names(&self) -> io::Result<Vec<(String, String)>> {
        let of = |name: String| Some((name.strip_prefix("missing.")?.strip_suffix(".json")?.to_owned(), name));
        Ok(names(&self.dir)?.into_iter().filter_map(of).collect())
    }

    /// Returns what jobs left that is not in the pool.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn missing(&self) -> Result<Vec<MissingResults>, Failure> {
        let mut names = self.kept_names().map_err(|e| Failure::io(self.dir.display(), &e))?;
        names.sort_by_key(|(job, _)| (job.len(), job.clone()));
        let mut all = Vec::new();
        for (_, name) in names {
            all.extend(self.get(&self.dir.join(name))?);
        }
        Ok(all)
    }

    /// Forgets what a job left. An unknown job is no error.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn forget(&self, job: &str) -> Result<(), Failure> {
        check_job(job)?;
        gone(std::fs::remove_file(self.kept(job))).map_err(|e| Failure::io(self.dir.display(), &e))
    }

    /// Removes the request and the reports of a job. An unknown job is no error.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn remove(&self, job: &str) -> Result<(), Failure> {
        check_job(job)?;
        let dir = self.job_dir(job);
        // First, so that a node that still finds it has seen all reports.
        gone(std::fs::remove_file(dir.join(REQUEST))).map_err(|e| Failure::io(dir.display(), &e))?;
        // A node may write its report meanwhile.
        let mut removed = gone(std::fs::remove_dir_all(&dir));
        if removed.is_err() {
            removed = gone(std::fs::remove_dir_all(&dir));
        }
        removed.map_err(|e| Failure::io(dir.display(), &e))
    }

    fn get<T: DeserializeOwned>(&self, path: &Path) -> Result<Option<T>, Failure> {
        get(path, &[0, self.owner])
    }
}

/// Checks that a job is named by its number.
fn check_job(job: &str) -> Result<(), Failure> {
    match !job.is_empty() && job.len() <= 20 && job.bytes().all(|b| b.is_ascii_digit()) {
        true => Ok(()),
        false => Err(Failure::usage("a job of Slurm has a number")),
    }
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

/// Takes it for a success that there was nothing to remove.
///
/// # Errors
/// Any other error.
pub fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn shorten(reasons: &mut Vec<String>) {
    reasons.truncate(REASONS_MAX);
    for reason in reasons {
        let end = (0..=REASON_BYTES_MAX.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
        reason.truncate(end.unwrap_or_default());
    }
}

/// Replaces a file as a whole, and waits until it survives a power cut.
///
/// # Errors
/// Those of the file system.
pub fn put(dir: &Path, name: &str, value: &impl Serialize) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.{}", std::process::id()));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(&temporary, flags, Mode::from_raw_mode(0o644))?);
    let text = serde_json::to_vec(value)?;
    // Tasks read it as their user, whatever the umask of slurmd or slurmctld is.
    let readable = file.set_permissions(Permissions::from_mode(0o644));
    let written = readable.and_then(|()| file.write_all(&text)).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| std::fs::rename(&temporary, dir.join(name)));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed?;
    File::open(dir)?.sync_all()
}

/// Reads a file of one of these users. Returns `None` if there is none.
///
/// # Errors
/// It is no regular file, belongs to another user, is too large, or has other content.
pub fn get<T: DeserializeOwned>(path: &Path, owners: &[u32]) -> Result<Option<T>, Failure> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(Failure::io(path.display(), &error.into())),
        Ok(file) => File::from(file),
    };
    let found = file.metadata().map_err(|e| Failure::io(path.display(), &e))?;
    if !found.is_file() || !owners.contains(&found.uid()) || found.mode() & 0o022 != 0 {
        let what = format!("{} is no regular file of root or of the directory's owner alone", path.display());
        return Err(Failure::new(FailureKind::Denied, what));
    }
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut text).map_err(|e| Failure::io(path.display(), &e))?;
    let value = serde_json::from_slice(&text);
    value.map(Some).map_err(|e| Failure::new(FailureKind::Corrupt, format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn exchange() -> (tempfile::TempDir, Exchange) {
        let dir = tempfile::tempdir().unwrap();
        let exchange = Exchange::create(&dir.path().join("a/b")).unwrap();
        (dir, exchange)
    }

    fn request(attempt: &str) -> ExchangedRequest {
        ExchangedRequest { attempt: attempt.into(), staging: StagingRequest::default(), array_index: None }
    }

    fn report(node: &str, attempt: &str) -> NodeReport {
        NodeReport {
            node: node.into(),
            attempt: attempt.into(),
            progress: NodeProgress::Staged,
            nodes: 2,
            reasons: vec!["ä".repeat(2000)],
        }
    }

    #[test]
    fn nodes_report_to_the_attempt_that_they_served() {
        let (_dir, exchange) = exchange();
        assert_eq!(exchange.request("7").unwrap(), None);
        exchange.put_report("7", &report("n0", "x")).unwrap();
        assert!(exchange.jobs().unwrap().is_empty(), "a report makes no job");
        exchange.put_request("7", &request("x")).unwrap();
        exchange.put_report("7", &report("n2", "x")).unwrap();
        exchange.put_report("7", &report("n1", "x")).unwrap();
        exchange.put_report("7", &report("n3", "before")).unwrap();
        let nodes: Vec<String> = exchange.reports("7", "x").unwrap().into_iter().map(|report| report.node).collect();
        assert_eq!(nodes, ["n1", "n2"]);
        assert_eq!(exchange.jobs().unwrap(), ["7"]);
        assert_eq!(exchange.outcome("7", "x").unwrap(), None);
        exchange.put_outcome("7", "x", JobOutcome::Failed).unwrap();
        assert_eq!(exchange.outcome("7", "x").unwrap(), Some(JobOutcome::Failed));
        assert_eq!(exchange.outcome("7", "next").unwrap(), None, "it is of another attempt");
        assert_eq!(exchange.reports("7", "x").unwrap().len(), 2);
        exchange.remove("7").unwrap();
        exchange.remove("7").unwrap();
        exchange.put_outcome("7", "x", JobOutcome::GivenUp).unwrap();
        assert_eq!(std::fs::read_dir(&exchange.dir).unwrap().count(), 0);
    }

    #[test]
    fn what_another_user_may_write_is_refused() {
        let (_dir, exchange) = exchange();
        exchange.put_request("7", &request("x")).unwrap();
        let path = exchange.job_dir("7").join(REQUEST);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(exchange.request("7").unwrap_err().kind, FailureKind::Denied);
        let other = exchange.dir.join("other");
        std::fs::rename(&path, &other).unwrap();
        symlink(&other, &path).unwrap();
        assert!(exchange.request("7").is_err());
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(exchange.request("7").is_err());
        std::fs::set_permissions(&exchange.dir, PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(Exchange::open(&exchange.dir).unwrap_err().kind, FailureKind::Denied);
    }

    #[test]
    fn a_name_leads_to_no_other_directory() {
        let (_dir, exchange) = exchange();
        for job in ["", "..", "1/2", "a"] {
            assert!(exchange.request(job).is_err() && exchange.remove(job).is_err(), "{job}");
        }
        exchange.put_request("7", &request("x")).unwrap();
        assert!(exchange.put_report("7", &report("../n", "x")).is_err());
    }

    #[test]
    fn missing_results_are_kept_until_they_are_forgotten() {
        let (_dir, exchange) = exchange();
        for job in 1..=KEPT_MAX + 2 {
            exchange.keep(&MissingResults { job: job.to_string(), reasons: vec!["a".into()] }).unwrap();
        }
        let kept = exchange.missing().unwrap();
        assert_eq!((kept.len(), kept[0].job.as_str()), (KEPT_MAX, "3"));
        exchange.forget("3").unwrap();
        exchange.forget("3").unwrap();
        assert_eq!(exchange.missing().unwrap().len(), KEPT_MAX - 1);
    }
}
