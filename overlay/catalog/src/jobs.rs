//! Ended and running jobs, stored as JSON, so that other versions of this program can read the records. Beside them, the
//! files that never go to the pool and that a job uses: those are removed after the job.

use std::collections::{BTreeMap, HashSet};

use forebay_backends::Result;
use forebay_prefetch::signature::Invocation;
use serde::{Deserialize, Serialize};

use super::{Batch, Catalog, Ino, boot_id, cf, corrupt};
use forebay_api::jobs::{JobFile, JobSummary};
use forebay_system::process::Process;

/// The most jobs that are kept, newest first.
const JOBS_MAX: usize = 1000;
/// The most bytes of file lists that are kept for those jobs.
const JOBS_BYTES: u64 = 256 << 20;

/// The number of a job, ascending in the order in which jobs began.
pub type JobSerial = u64;

/// The record of a job without its files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobHead {
    pub summary: JobSummary,
    /// The processes that began the job: it runs as long as one of them lives.
    pub clients: Vec<Process>,
    /// The cgroups of version 2 that belong to the job, as the inode numbers of their directories.
    pub cgroup_ids: Vec<u64>,
    /// Size of the encoded list of its files.
    pub files_bytes: u64,
    #[serde(default)]
    pub invocation: Option<Invocation>,
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the end of the job must still end the leases in its name; `false` once they are ended.
    #[serde(default)]
    pub ends_leases: bool,
    /// An allocation holds the job: it lasts until the allocation ends it, without a client.
    #[serde(default)]
    pub is_held: bool,
    /// The number of the Slurm job whose steps belong to the job.
    #[serde(default)]
    pub slurm_job: Option<String>,
    /// The boot of the machine in which its processes live. Empty: an earlier version made the record.
    #[serde(default)]
    pub boot: String,
}

impl JobHead {
    /// Returns whether the machine was restarted after the record: then no client, process or cgroup of the job is left,
    /// whatever has its number or name now.
    pub fn is_of_earlier_boot(&self) -> bool {
        !self.boot.is_empty() && self.boot != boot_id()
    }

    /// Records that the job lives now.
    pub fn note_boot(&mut self) {
        self.boot = boot_id();
    }

    /// Returns whether a process lives that began the job.
    pub fn has_client(&self) -> bool {
        !self.is_of_earlier_boot() && self.clients.iter().any(Process::is_alive)
    }
}

/// A file of the overlay that a job used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOfJob {
    pub ino: Ino,
    /// The job made it, or wrote to it.
    pub is_changed: bool,
}

/// The key of the record that a job uses a local file, or that it made or wrote one.
const USED: u8 = b'l';
const CHANGED: u8 = b'w';

fn key(kind: u8, serial: JobSerial) -> Vec<u8> {
    [[kind].as_slice(), &serial.to_be_bytes()].concat()
}

impl Catalog {
    /// Visits all kept jobs, the oldest first.
    pub fn jobs(&self, mut each: impl FnMut(JobSerial, JobHead) -> Result<bool>) -> Result<()> {
        self.scan(cf::JOBS, b"h", |key, value| {
            let Some(serial) = key.strip_prefix(b"h") else { return Ok(false) };
            let serial = super::id_of(serial)?;
            self.readable_job(serial, value).map_or(Ok(true), |head| each(serial, head))
        })
    }

    /// Returns the highest number of a job that has a record, also if only another version can read the record.
    pub fn newest_job(&self) -> Result<Option<JobSerial>> {
        let mut newest = None;
        self.scan(cf::JOBS, b"h", |key, _| {
            let Some(serial) = key.strip_prefix(b"h") else { return Ok(false) };
            newest = Some(super::id_of(serial)?);
            Ok(true)
        })?;
        Ok(newest)
    }

    /// Returns a record. One that only another version can read counts as absent: it must not keep other jobs from running.
    /// The log names each such record once.
    fn readable_job(&self, serial: JobSerial, value: &[u8]) -> Option<JobHead> {
        let head = serde_json::from_slice(value);
        if let Err(error) = &head
            && self.unreadable_jobs.lock().insert(serial)
        {
            tracing::warn!(%error, "the record of job {serial} is not understood");
        }
        head.ok()
    }

    pub fn job_files(&self, serial: JobSerial) -> Result<Vec<JobFile>> {
        let value = self.db.get_pinned_cf(self.family(cf::JOBS)?, key(b'f', serial));
        let Some(value) = value.map_err(|e| super::failed("read the catalog", e))? else { return Ok(Vec::new()) };
        serde_json::from_slice(&value).map_err(|e| corrupt(cf::JOBS).with_source(e))
    }

    /// Stores a job and, if given, the files that it used; then deletes the oldest ended jobs that exceed the limits.
    pub fn put_job(&self, serial: JobSerial, head: &mut JobHead, files: Option<&[JobFile]>) -> Result<()> {
        let batch = self.job_batch(serial, head, files)?;
        self.write(batch)?;
        self.prune_jobs()
    }

    /// Like [`Self::put_job`], for a job that is not observed any more, and whose processes go on. By the same change, the
    /// local files that were recorded for it are forgotten: they are not to be removed.
    pub fn put_unseen_job(&self, serial: JobSerial, head: &mut JobHead, files: Option<&[JobFile]>) -> Result<()> {
        let mut batch = self.job_batch(serial, head, files)?;
        self.forget_local_files_by(&mut batch, serial)?;
        self.write(batch)?;
        self.prune_jobs()
    }

    fn job_batch(&self, serial: JobSerial, head: &mut JobHead, files: Option<&[JobFile]>) -> Result<Batch<'_>> {
        let text = |e: serde_json::Error| corrupt(cf::JOBS).with_source(e);
        let mut batch = self.batch();
        if let Some(files) = files {
            let files = serde_json::to_vec(files).map_err(text)?;
            head.files_bytes = files.len() as u64;
            batch.put_raw(cf::JOBS, &key(b'f', serial), &files);
        }
        batch.put_raw(cf::JOBS, &key(b'h', serial), &serde_json::to_vec(head).map_err(text)?);
        Ok(batch)
    }

    /// Records that a job uses a file that never goes to the pool. That the job changed it is a key of its own, so that no
    /// later record of a use takes it back.
    pub fn put_local_file(&self, job: JobSerial, file: FileOfJob) -> Result<()> {
        let mut batch = self.batch();
        for kind in [Some(USED), file.is_changed.then_some(CHANGED)].into_iter().flatten() {
            batch.put_raw(cf::JOBS, &[key(kind, job).as_slice(), &file.ino.0.to_be_bytes()].concat(), b"");
        }
        self.write(batch)
    }

    /// Returns the files that were recorded for all jobs.
    pub fn local_files(&self) -> Result<BTreeMap<JobSerial, Vec<FileOfJob>>> {
        let changed: HashSet<(JobSerial, Ino)> = self.files_by_job(CHANGED)?.into_iter().collect();
        let mut files: BTreeMap<JobSerial, Vec<FileOfJob>> = BTreeMap::new();
        for (job, ino) in self.files_by_job(USED)? {
            let is_changed = changed.contains(&(job, ino));
            files.entry(job).or_default().push(FileOfJob { ino, is_changed });
        }
        Ok(files)
    }

    fn files_by_job(&self, kind: u8) -> Result<Vec<(JobSerial, Ino)>> {
        let mut files = Vec::new();
        self.scan(cf::JOBS, &[kind], |key, _| {
            let Some((job, ino)) = key.strip_prefix(&[kind]).and_then(|ids| ids.split_at_checked(8)) else {
                return Ok(false);
            };
            files.push((super::id_of(job)?, Ino(super::id_of(ino)?)));
            Ok(true)
        })?;
        Ok(files)
    }

    /// Forgets the files that were recorded for a job.
    pub fn forget_local_files(&self, job: JobSerial) -> Result<()> {
        let mut batch = self.batch();
        self.forget_local_files_by(&mut batch, job)?;
        if batch.is_empty() { Ok(()) } else { self.write(batch) }
    }

    fn forget_local_files_by(&self, batch: &mut Batch<'_>, job: JobSerial) -> Result<()> {
        for kind in [USED, CHANGED] {
            let prefix = key(kind, job);
            self.scan(cf::JOBS, &prefix, |key, _| {
                let is_of_job = key.starts_with(&prefix);
                if is_of_job {
                    batch.delete_raw(cf::JOBS, key);
                }
                Ok(is_of_job)
            })?;
        }
        Ok(())
    }

    fn prune_jobs(&self) -> Result<()> {
        let mut kept = Vec::new();
        self.jobs(|serial, head| {
            kept.push((serial, head.summary.ended_unix.is_some(), head.files_bytes));
            Ok(true)
        })?;
        let mut batch = self.batch();
        let (mut jobs, mut bytes) = (0, 0);
        for (serial, ended, files_bytes) in kept.into_iter().rev() {
            (jobs, bytes) = (jobs + 1, bytes + files_bytes);
            if ended && jobs > 1 && (jobs > JOBS_MAX || bytes > JOBS_BYTES) {
                batch.delete_raw(cf::JOBS, &key(b'h', serial));
                batch.delete_raw(cf::JOBS, &key(b'f', serial));
            }
        }
        if batch.is_empty() { Ok(()) } else { self.write(batch) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;
    use forebay_api::jobs::Traffic;

    fn head(id: &str, ended_unix: Option<u64>) -> JobHead {
        let summary = JobSummary {
            id: id.into(),
            uid: 0,
            command: String::new(),
            begun_unix: 1,
            ended_unix,
            processes: Vec::new(),
            cgroups: Vec::new(),
            observer: Default::default(),
            reads_unseen: false,
            missing: Vec::new(),
            interrupted: false,
            file_count: 0,
            omitted_files: 0,
            ahead: None,
            traffic: Traffic::default(),
        };
        let (clients, cgroup_ids) = (Vec::new(), Vec::new());
        JobHead {
            summary,
            clients,
            cgroup_ids,
            files_bytes: 0,
            invocation: None,
            prefetch: false,
            ends_leases: false,
            is_held: false,
            slurm_job: None,
            boot: String::new(),
        }
    }

    #[test]
    fn the_newest_thousand_are_kept_and_those_that_run() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let file =
            JobFile { path: "a".into(), first_use_rank: 1, traffic: Traffic::default(), in_pool: false, parts: None };
        for serial in 1..=JOBS_MAX as u64 + 3 {
            let ended = if serial == 1 { None } else { Some(2) };
            catalog.put_job(serial, &mut head(&serial.to_string(), ended), Some(std::slice::from_ref(&file))).unwrap();
        }
        let mut serials = Vec::new();
        catalog
            .jobs(|serial, head| {
                assert_eq!(head.summary.id, serial.to_string());
                serials.push(serial);
                Ok(true)
            })
            .unwrap();
        assert_eq!(serials[..2], [1, 4], "the first runs");
        assert_eq!(serials.len(), JOBS_MAX + 1);
        assert_eq!(catalog.job_files(4).unwrap(), [file]);
        assert!(catalog.job_files(3).unwrap().is_empty());
    }

    #[test]
    fn files_are_recorded_and_forgotten_for_each_job() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let file = |ino, is_changed| FileOfJob { ino: Ino(ino), is_changed };
        for (job, ino, is_changed) in [(1, 7, false), (2, 8, true), (2, 7, false), (2, 8, false), (256, 9, false)] {
            catalog.put_local_file(job, file(ino, is_changed)).unwrap();
        }
        catalog.put_job(2, &mut head("2", None), None).unwrap();
        let known = |job: JobSerial| catalog.local_files().unwrap().remove(&job);
        assert_eq!(
            [known(1), known(2), known(3)],
            [Some(vec![file(7, false)]), Some(vec![file(7, false), file(8, true)]), None]
        );
        catalog.forget_local_files(2).unwrap();
        assert_eq!([known(1), known(2), known(256)], [Some(vec![file(7, false)]), None, Some(vec![file(9, false)])]);
        catalog.put_unseen_job(1, &mut head("1", Some(2)), None).unwrap();
        assert_eq!([known(1), known(256)], [None, Some(vec![file(9, false)])], "its processes go on");
        let mut jobs = 0;
        let all = catalog.jobs(|_, _| {
            jobs += 1;
            Ok(true)
        });
        assert_eq!(all.map(|()| jobs).unwrap(), 2);
    }

    #[test]
    fn a_record_that_cannot_be_read_hides_no_other_job() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        catalog.put_job(1, &mut head("1", Some(2)), None).unwrap();
        let mut batch = catalog.batch();
        batch.put_raw(cf::JOBS, &key(b'h', 2), b"{\"of\": \"another version\"}");
        catalog.write(batch).unwrap();
        catalog.put_job(3, &mut head("3", Some(2)), None).unwrap();
        let mut serials = Vec::new();
        let all = catalog.jobs(|serial, _| {
            serials.push(serial);
            Ok(true)
        });
        all.unwrap();
        assert_eq!(serials, [1, 3]);
        let mut batch = catalog.batch();
        batch.put_raw(cf::JOBS, &key(b'h', 7), b"{}");
        catalog.write(batch).unwrap();
        catalog.put_local_file(9, FileOfJob { ino: Ino(1), is_changed: true }).unwrap();
        assert_eq!(catalog.newest_job().unwrap(), Some(7));
    }
}
