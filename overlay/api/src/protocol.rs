//! The messages of the control socket: one request line from the client, then reply lines until `end` or `error`.

use forebay_backends::decorators::MetricsSnapshot;
use forebay_prefetch::profile::ProfileDocument;
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::allocations::{Allocation, AllocationVerb};
use crate::foresight::{Explanation, ProfileSummary};
use crate::jobs::{JobFile, JobRequest, JobSummary, Sample};
use crate::operator::{
    DirtyFile, EvictRequest, FlushRequest, FsckReport, ListedPath, Overview, Progress, ReleaseRequest, StageRequest,
    Status,
};
use crate::peers::PeersStatus;
use crate::policy::{PolicyEffect, PolicyExplanation, PolicyVerb};
use crate::quotas::{QuotaReport, QuotaVerb};
use crate::scratch::{CommitReport, ScratchDir, ScratchVerb};
use crate::views::{View, ViewChanges, ViewVerb};

/// A request to the daemon. Paths are relative to the mount, escaped as [`crate::paths::encode`] does.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    Status,
    /// Returns the status and the oldest dirty files as of the last count: at a low cost, however many files are dirty.
    Overview,
    Stage(StageRequest),
    Flush(FlushRequest),
    Evict(EvictRequest),
    Release(ReleaseRequest),
    /// Lists what is not in the pool yet.
    Dirty,
    /// Lists the residency of the objects at and below a path.
    Ls {
        path: String,
        recursive: bool,
    },
    Fsck {
        repair: bool,
    },
    /// Registers the client as the owner of a job, which lasts as long as the client; or joins a running job.
    BeginJob(JobRequest),
    EndJob {
        id: String,
        /// The job goes on, but is no longer observed.
        #[serde(default)]
        goes_on: bool,
    },
    /// Lists all known jobs.
    Jobs,
    /// Returns the newest job of this name, with its files.
    Job {
        id: String,
    },
    /// Carries out a verb of an allocation, and returns the allocation; nothing if there is none.
    Allocation {
        id: String,
        #[serde(flatten)]
        verb: AllocationVerb,
    },
    /// Lists all known allocations.
    Allocations,
    Scratch(ScratchVerb),
    View(ViewVerb),
    Policy(PolicyVerb),
    Quota(QuotaVerb),
    /// Returns what jobs have used so far.
    Sample {
        /// The time until the client's next request of this kind.
        #[serde(default)]
        interval_ms: u64,
    },
    /// Returns the members of the cluster, and what they gave each other.
    Peers,
    /// Returns the calls to the pool since the start, with their latencies.
    PoolCalls,
    /// Explains why a file is resident, and what would evict it.
    Explain {
        path: String,
    },
    /// Lists all profiles of jobs.
    Profiles,
    /// Returns a profile, given by its short name or its signature, with its whole content.
    Profile {
        profile: String,
    },
    /// Imports a profile, which replaces one with the same signature.
    ImportProfile(Box<ProfileDocument>),
    /// Deletes a profile; all of them if none is named.
    ForgetProfiles {
        profile: Option<String>,
    },
}

/// One line of the daemon's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "reply", content = "value", rename_all = "snake_case")]
pub enum Reply {
    Status(Box<Status>),
    Overview(Box<Overview>),
    Progress(Progress),
    /// A part of the list: a long list takes several lines.
    Dirty(Vec<DirtyFile>),
    Listed(Vec<ListedPath>),
    Fsck(FsckReport),
    Jobs(Vec<JobSummary>),
    /// Files of the job in the reply before.
    JobFiles(Vec<JobFile>),
    Allocations(Vec<Allocation>),
    Scratch(Vec<ScratchDir>),
    Committed(CommitReport),
    Views(Vec<View>),
    ViewChanges(ViewChanges),
    PolicyExplanation(PolicyExplanation),
    PolicyEffect(Box<PolicyEffect>),
    Quotas(Box<QuotaReport>),
    Sample(Sample),
    Peers(Box<PeersStatus>),
    PoolCalls(Box<MetricsSnapshot>),
    Explanation(Box<Explanation>),
    Profiles(Vec<ProfileSummary>),
    Profile(Box<ProfileDocument>),
    /// The number of deleted profiles.
    Forgotten(u64),
    /// Nothing new, but the daemon is working.
    Alive,
    /// The request was carried out, as far as the previous replies say.
    End,
    Error(Failure),
}

// The code for JSON is generated in this crate, and not again in each crate that sends or reads a message: it was a fifth
// of the code of `overlay/daemon`.

fn line_of(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

impl Request {
    /// The request as a line of JSON, with its end.
    ///
    /// # Errors
    /// Never for what [`Request::from_line`] has read.
    pub fn to_line(&self) -> serde_json::Result<Vec<u8>> {
        line_of(self)
    }

    /// # Errors
    /// The line is no request that this version knows.
    pub fn from_line(line: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(line)
    }
}

impl Reply {
    /// The reply as a line of JSON, with its end.
    ///
    /// # Errors
    /// Never for what [`Reply::from_line`] has read.
    pub fn to_line(&self) -> serde_json::Result<Vec<u8>> {
        line_of(self)
    }

    /// # Errors
    /// The line is no reply that this version knows.
    pub fn from_line(line: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_readable_json() {
        let request: Request = serde_json::from_str(r#"{"op":"ls","path":"a","recursive":true}"#).unwrap();
        assert!(matches!(request, Request::Ls { recursive: true, .. }));
        assert_eq!(serde_json::to_string(&Request::Status).unwrap(), r#"{"op":"status"}"#);
    }

    #[test]
    fn a_failure_keeps_its_kind_and_remedy_on_the_way() {
        let failure = Failure::usage("no").remedy("yes");
        let line = serde_json::to_string(&Reply::Error(failure.clone())).unwrap();
        let Reply::Error(back) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!(back, failure);
    }
}
