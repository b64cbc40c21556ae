//! What operators are shown of jobs: the words of the control socket, and of the catalog.

use forebay_prefetch::signature::Invocation;
use forebay_system::process::Process;
use serde::{Deserialize, Serialize};

use crate::foresight::AheadReport;
use crate::operator::TypedPath;

/// What a job is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Members {
    /// The process that asks, and all that it starts.
    Caller,
    /// These processes, what they started, and what they start.
    Processes(Vec<u32>),
    /// What runs in a cgroup of version 2, and below it.
    Cgroup {
        /// The inode of its directory.
        id: u64,
        /// Below the root of the hierarchy, with a slash first.
        path: String,
    },
}

/// A job to register.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRequest {
    /// Who asks for one that runs already joins it.
    pub id: String,
    pub command: String,
    /// How it was started, where that is known: what is learned from it is for those that are started likewise.
    #[serde(default)]
    pub invocation: Option<Invocation>,
    /// Whether what it will probably read is brought in before it asks.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the leases of its name end with it: not where it is only a part of what that names.
    #[serde(default)]
    pub ends_leases: bool,
    pub members: Members,
}

/// Bytes that the name of a job has at most.
const ID_BYTES: usize = 128;

/// Whether a job may be called so.
///
/// # Errors
/// Why not.
pub fn check_id(id: &str) -> Result<(), String> {
    let plain = |c: char| !c.is_control() && !c.is_whitespace();
    match () {
        () if id.is_empty() => Err("a job needs a name".into()),
        () if id.len() > ID_BYTES => Err(format!("the name of a job has {ID_BYTES} bytes at most")),
        () if !id.chars().all(plain) => Err("the name of a job has no spaces and no control characters".into()),
        () => Ok(()),
    }
}

/// How often and how much. Bytes are counted by pages, and never beyond the end of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub opens: u64,
    /// Bytes read; the next three say where they came from, and add up to it.
    #[serde(rename = "bytes")]
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub cache_bytes: u64,
    pub fast_bytes: u64,
    /// Through the daemon, which had them from the pool or had only part of the file; or from the pool itself.
    pub pool_bytes: u64,
}

impl Traffic {
    /// Counts `new` instead of `old`, which was counted before.
    pub fn replace(&mut self, old: &Self, new: &Self) {
        let swap = |sum: &mut u64, old: u64, new: u64| *sum = (*sum + new).saturating_sub(old);
        swap(&mut self.opens, old.opens, new.opens);
        swap(&mut self.read_bytes, old.read_bytes, new.read_bytes);
        swap(&mut self.written_bytes, old.written_bytes, new.written_bytes);
        swap(&mut self.cache_bytes, old.cache_bytes, new.cache_bytes);
        swap(&mut self.fast_bytes, old.fast_bytes, new.fast_bytes);
        swap(&mut self.pool_bytes, old.pool_bytes, new.pool_bytes);
    }

    /// What came since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = *self;
        difference.replace(earlier, &Self::default());
        difference
    }
}

/// Which parts of a file were used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// Bytes of one part. The last of 256 stands for all beyond it as well.
    pub part_bytes: u64,
    /// Numbers of parts and ranges of them, from 0: `0-3,7`.
    pub read: String,
    pub written: String,
}

/// A job's use of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFile {
    /// Relative to the mount, or to the pool where `in_pool`: as it is called now, or was when it was used first.
    pub path: TypedPath,
    /// From 1, in the order of first uses.
    pub first_use_rank: u64,
    #[serde(flatten)]
    pub traffic: Traffic,
    /// It was read in the pool's own directory, past the mount.
    #[serde(default)]
    pub in_pool: bool,
    /// `None` where it was opened alone.
    #[serde(default)]
    pub parts: Option<Parts>,
}

/// What a job is, and what it used in all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSummary {
    pub id: String,
    pub uid: u32,
    pub command: String,
    /// Seconds since 1970.
    pub begun_unix: u64,
    /// `None`: it runs.
    pub ended_unix: Option<u64>,
    /// Processes that it was made of, each with its descendants.
    pub processes: Vec<Process>,
    /// Cgroups that it was made of, below the root of the hierarchy.
    pub cgroups: Vec<String>,
    pub observer: ObserverKind,
    /// What could not be seen.
    pub missing: Vec<String>,
    /// Some reads could not be seen.
    #[serde(default)]
    pub reads_unseen: bool,
    /// The daemon died while the job ran, or who began it did: what was counted before is missing.
    pub interrupted: bool,
    /// Files that are told of.
    pub file_count: u64,
    /// Files beyond those, which are in the sums only; at least so many.
    pub omitted_files: u64,
    /// What was brought in before it asked. `None`: nothing was to be.
    #[serde(default)]
    pub ahead: Option<AheadReport>,
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// All that was counted up to a moment, by job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sample {
    /// Since the daemon began to count.
    pub at_ms: u64,
    pub jobs: Vec<JobSample>,
    /// Of no job.
    pub others: Traffic,
    pub observer: ObserverStatus,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobSample {
    pub id: String,
    pub uid: u32,
    pub files: u64,
    pub traffic: Traffic,
}

/// By what the use of files is seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObserverKind {
    /// Only requests that reach the daemon.
    #[default]
    Requests,
    /// Programs in the kernel, too.
    Ebpf,
}

impl ObserverKind {
    /// As the JSON output has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Ebpf => "ebpf",
        }
    }
}

/// Who sees what jobs use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObserverStatus {
    pub kind: ObserverKind,
    /// Why it is not eBPF.
    pub why: Option<String>,
    /// Nobody needs it: nothing is observed now, and so nothing is slowed down.
    #[serde(default)]
    pub rests: bool,
    /// What cannot be seen.
    pub missing: Vec<String>,
    /// Since the start: uses of files for which there was no room,
    pub dropped_uses: u64,
    /// paths that were not told,
    pub dropped_paths: u64,
    /// and processes that should have belonged to a job.
    pub dropped_processes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_are_replaced_leave_the_others() {
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
