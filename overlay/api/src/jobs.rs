//! The types that describe jobs, in the control socket and in the catalog.

use forebay_prefetch::signature::Invocation;
use forebay_system::process::Process;
use serde::{Deserialize, Serialize};

use crate::foresight::AheadReport;
use crate::operator::TypedPath;

/// The processes that belong to a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Members {
    /// The requesting process, and all processes that it starts.
    Caller,
    /// These processes, and their descendants, present and future.
    Processes(Vec<u32>),
    /// The processes in a cgroup of version 2, and below it.
    Cgroup {
        /// The inode number of its directory.
        id: u64,
        /// Path below the root of the hierarchy, with a leading slash.
        path: String,
    },
    /// The processes of the steps of a Slurm job, present and future.
    SlurmSteps {
        /// The number of the job.
        job: String,
    },
}

/// A job to register.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobRequest {
    /// The name of the job. A request with the name of a running job joins it.
    pub id: String,
    pub command: String,
    /// How the job was started, if known: what is learned from it applies to jobs that are started in the same way.
    #[serde(default)]
    pub invocation: Option<Invocation>,
    /// Whether files that it will probably read are fetched before it requests them.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the leases in its name end with the job: not if the job is only a part of what the name stands for.
    #[serde(default)]
    pub ends_leases: bool,
    pub members: Members,
}

/// The most bytes of a job's name.
const ID_BYTES: usize = 128;

/// Checks whether a string is a valid name of a job.
///
/// # Errors
/// The reason why it is not.
pub fn check_id(id: &str) -> Result<(), String> {
    let plain = |c: char| !c.is_control() && !c.is_whitespace();
    match () {
        () if id.is_empty() => Err("a job needs a name".into()),
        () if id.len() > ID_BYTES => Err(format!("the name of a job has {ID_BYTES} bytes at most")),
        () if !id.chars().all(plain) => Err("the name of a job has no spaces and no control characters".into()),
        () => Ok(()),
    }
}

/// Counts of opens and bytes. Bytes are counted by pages, and never beyond the end of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Traffic {
    pub opens: u64,
    /// Bytes read; `cache_bytes`, `fast_bytes` and `pool_bytes` say where they came from, and add up to it.
    #[serde(rename = "bytes")]
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub cache_bytes: u64,
    pub fast_bytes: u64,
    /// Read through the daemon, which fetched them or had only part of the file, or read from the pool directly.
    pub pool_bytes: u64,
}

impl Traffic {
    /// Replaces `old`, which was counted before, by `new`.
    pub fn replace(&mut self, old: &Self, new: &Self) {
        let swap = |sum: &mut u64, old: u64, new: u64| *sum = sum.saturating_add(new).saturating_sub(old);
        swap(&mut self.opens, old.opens, new.opens);
        swap(&mut self.read_bytes, old.read_bytes, new.read_bytes);
        swap(&mut self.written_bytes, old.written_bytes, new.written_bytes);
        swap(&mut self.cache_bytes, old.cache_bytes, new.cache_bytes);
        swap(&mut self.fast_bytes, old.fast_bytes, new.fast_bytes);
        swap(&mut self.pool_bytes, old.pool_bytes, new.pool_bytes);
    }

    /// Returns the difference from `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = *self;
        difference.replace(earlier, &Self::default());
        difference
    }
}

/// The parts of a file that were used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UsedParts {
    /// Bytes of one part. The last of 256 parts also covers everything beyond it.
    pub part_bytes: u64,
    /// Numbers of parts and ranges of them, from 0: `0-3,7`.
    pub read: String,
    pub written: String,
}

/// A job's use of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobFile {
    /// Relative to the mount, or to the pool if `in_pool`: its current path, or the one at its first use.
    pub path: TypedPath,
    /// From 1, in the order of first uses.
    pub first_use_rank: u64,
    #[serde(flatten)]
    pub traffic: Traffic,
    /// It was read in the pool's own directory, without the mount.
    #[serde(default)]
    pub in_pool: bool,
    /// `None` if it was only opened.
    #[serde(default)]
    pub parts: Option<UsedParts>,
}

/// A job, and the totals of what it used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobSummary {
    pub id: String,
    pub uid: u32,
    pub command: String,
    /// Seconds since 1970.
    pub begun_unix: u64,
    /// `None` while it runs.
    pub ended_unix: Option<u64>,
    /// The processes that belonged to it, each with its descendants.
    pub processes: Vec<Process>,
    /// The cgroups that belonged to it, as paths below the root of the hierarchy.
    pub cgroups: Vec<String>,
    pub observer: ObserverKind,
    /// What could not be observed.
    pub missing: Vec<String>,
    /// Some reads could not be observed.
    #[serde(default)]
    pub reads_unseen: bool,
    /// The daemon or the process that began the job died while it ran: earlier counts are missing.
    pub interrupted: bool,
    /// Files that the report lists.
    pub file_count: u64,
    /// Files that are not listed, and count only in the totals; a lower bound.
    pub omitted_files: u64,
    /// What was fetched before the job requested it. `None`: nothing was to be fetched ahead.
    #[serde(default)]
    pub ahead: Option<AheadReport>,
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// All counts up to one moment, by job.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sample {
    /// Milliseconds since the daemon began to count.
    pub at_ms: u64,
    pub jobs: Vec<JobSample>,
    /// Traffic that belongs to no job.
    pub others: Traffic,
    pub observer: ObserverStatus,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobSample {
    pub id: String,
    pub uid: u32,
    pub files: u64,
    pub traffic: Traffic,
}

/// The means by which the use of files is observed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ObserverKind {
    /// Only requests that reach the daemon.
    #[default]
    Requests,
    /// Also programs in the kernel.
    Ebpf,
}

impl ObserverKind {
    /// Returns the name in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Ebpf => "ebpf",
        }
    }
}

/// The state of the observer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ObserverStatus {
    pub kind: ObserverKind,
    /// The reason why it is not eBPF.
    pub why: Option<String>,
    /// The observer is not needed: nothing is observed now, so nothing is slowed down.
    #[serde(default)]
    pub rests: bool,
    /// What cannot be observed.
    pub missing: Vec<String>,
    /// Uses of files for which there was no room, since the start.
    pub dropped_uses: u64,
    /// Paths that were not reported, since the start.
    pub dropped_paths: u64,
    /// Processes that should have belonged to a job, since the start.
    pub dropped_processes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_counts_leave_the_rest_of_the_sum() {
        let of = |read_bytes, cache_bytes| Traffic { read_bytes, cache_bytes, ..Traffic::default() };
        let mut sum = of(100, 60);
        sum.replace(&of(40, 40), &of(50, 20));
        assert_eq!(sum, of(110, 40));
        assert_eq!(sum.since(&of(100, 60)), of(10, 0), "a rate is never below zero");
    }

    #[test]
    fn names_of_jobs_are_one_word() {
        assert!(check_id("slurm-1234_7").is_ok() && check_id("größe/3").is_ok());
        assert!(check_id("").is_err() && check_id("a b").is_err() && check_id("a\x1b").is_err());
        assert!(check_id(&"a".repeat(129)).is_err());
    }

    #[test]
    fn a_file_of_a_report_has_the_promised_names() {
        let traffic = Traffic { opens: 2, read_bytes: 5, ..Traffic::default() };
        let file = JobFile { path: "a".into(), first_use_rank: 1, traffic, in_pool: false, parts: None };
        let value = serde_json::to_value(&file).unwrap();
        assert_eq!((&value["path"], &value["bytes"], &value["opens"]), (&"a".into(), &5.into(), &2.into()));
        assert_eq!(value["first_use_rank"], 1);
        assert_eq!(serde_json::from_value::<JobFile>(value).unwrap(), file);
    }
}
