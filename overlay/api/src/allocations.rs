//! Allocations: what a batch job holds at a mount, from before its first process until its results are in the pool.

use forebay_prefetch::signature::Invocation;
use serde::{Deserialize, Serialize};

use crate::jobs::Members;
use crate::operator::TypedPath;

/// How far an allocation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum AllocationPhase {
    /// Known, and nothing is done yet.
    Declared,
    /// Files are being fetched and leased.
    StagingIn,
    /// Everything that was requested is resident and leased.
    Ready,
    /// The processes of the job run, and are observed.
    Running,
    /// The job is over, and what it wrote is not in the pool yet.
    StagingOut,
    Done,
    Failed,
    Cancelled,
}

impl AllocationPhase {
    /// Returns the name in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Declared => "declared",
            Self::StagingIn => "staging-in",
            Self::Ready => "ready",
            Self::Running => "running",
            Self::StagingOut => "staging-out",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Files and bytes that were moved for an allocation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TransferCounts {
    pub files: u64,
    pub bytes: u64,
    /// Files that could not be moved.
    pub failed: u64,
}

/// An allocation as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Allocation {
    /// The name of its job, and the owner of its leases.
    pub id: String,
    pub uid: u32,
    pub phase: AllocationPhase,
    /// Why it failed, or what is short although it did not fail.
    pub reason: Option<String>,
    /// From 1; a job that is requeued begins the next one.
    pub attempt: u32,
    /// How often the scheduler had requeued the job when this attempt began.
    #[serde(default)]
    pub requeues: u64,
    /// Staging goes on; the job may have started meanwhile.
    #[serde(default)]
    pub is_staging: bool,
    /// The write-back was asked for, and goes on.
    #[serde(default)]
    pub is_writing_back: bool,
    /// Seconds since 1970.
    pub begun_unix: u64,
    /// When it entered its phase, in seconds since 1970.
    pub since_unix: u64,
    pub command: String,
    pub stage_in: Vec<TypedPath>,
    pub stage_out: Vec<TypedPath>,
    /// What was fetched for it.
    pub staged: TransferCounts,
    /// What was written back for it.
    pub flushed: TransferCounts,
    /// It is over, and its scratch directory stays with what may be results that were not committed.
    #[serde(default)]
    pub keeps_results: bool,
}

impl Allocation {
    /// Returns whether staging or the write-back has begun, or is about to, and has not ended.
    pub fn is_at_work(&self) -> bool {
        self.is_staging || self.is_writing_back
    }
}

/// What an allocation is begun with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AllocationRequest {
    /// The user of the job; only root may name another user. `None`: the user of the client.
    #[serde(default)]
    pub uid: Option<u32>,
    /// All groups of this user: only what the user may read is staged, and written back by `stage_out`. `None`: the
    /// daemon's rights count.
    #[serde(default)]
    pub groups: Option<Vec<u32>>,
    /// Files, directories and globs to stage before the job starts.
    #[serde(default)]
    pub stage_in: Vec<TypedPath>,
    /// What must be in the pool before the allocation is done. Empty: what the job wrote, and what its
    /// user owns.
    #[serde(default)]
    pub stage_out: Vec<TypedPath>,
    /// How the job is started: what earlier runs read is staged as well, and this run is learned.
    #[serde(default)]
    pub invocation: Option<Invocation>,
    /// Seconds until the leases end, whatever becomes of the job. `None`: they end with the job.
    #[serde(default)]
    pub lease_secs: Option<u64>,
    /// How often the scheduler has requeued the job. A larger number than that of the known attempt begins the next
    /// attempt, in whatever phase the known one is.
    #[serde(default)]
    pub requeues: u64,
    /// The job leaves results in its scratch directory that are to be committed. Until a verb says that they are settled,
    /// only the next attempt of a requeued job removes a directory with something in it.
    #[serde(default)]
    pub has_results: bool,
}

/// What is to be done with an allocation. Each verb may be repeated, and may arrive in any order that the retries of a
/// scheduler produce.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "verb", rename_all = "snake_case")]
pub enum AllocationVerb {
    Begin(AllocationRequest),
    /// Begins to stage. Returns when the staging has ended, or after this many milliseconds.
    StageIn {
        wait_ms: u64,
    },
    /// Waits until staging or the write-back has ended, for this many milliseconds at most.
    Ready {
        wait_ms: u64,
    },
    /// The processes of the job are about to run.
    Start {
        members: Members,
    },
    /// The processes of the job have ended.
    End,
    /// Begins to write back. Returns when that has ended, or after this many milliseconds.
    StageOut {
        wait_ms: u64,
        /// The results in the scratch directory are committed or given up: the directory is removed with what is left in
        /// it when the write-back has ended, also if that failed.
        #[serde(default)]
        is_settled: bool,
    },
    /// Ends everything that the allocation holds. What is not in the pool yet stays dirty and is flushed by policy.
    Teardown {
        /// The results in the scratch directory are given up.
        #[serde(default)]
        gives_up_results: bool,
    },
    Show,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_are_readable_json() {
        let verb: AllocationVerb = serde_json::from_str(r#"{"verb":"begin","stage_in":["a"]}"#).unwrap();
        let request = AllocationRequest { stage_in: vec!["a".into()], ..AllocationRequest::default() };
        assert_eq!(verb, AllocationVerb::Begin(request));
        let verb: AllocationVerb = serde_json::from_str(r#"{"verb":"stage_out","wait_ms":5}"#).unwrap();
        assert_eq!(verb, AllocationVerb::StageOut { wait_ms: 5, is_settled: false });
        // As clients sent it before it had a field.
        let verb: AllocationVerb = serde_json::from_str(r#"{"verb":"teardown"}"#).unwrap();
        assert_eq!(verb, AllocationVerb::Teardown { gives_up_results: false });
    }

    #[test]
    fn phases_have_one_name() {
        for phase in [AllocationPhase::StagingIn, AllocationPhase::Cancelled] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }
}
