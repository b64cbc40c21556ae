//! What is said over the control socket: one request line from the client, then reply lines until `end` or `error`.

use forebay_prefetch::profile::ProfileDocument;
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::foresight::{Explanation, ProfileSummary};
use crate::jobs::{JobFile, JobRequest, JobSummary, Sample};
use crate::operator::{
    DirtyFile, EvictRequest, FlushRequest, FsckReport, Listed, Progress, ReleaseRequest, StageRequest, Status,
};

/// What an operator asks of a daemon. Paths are relative to the mount, escaped as [`crate::paths::encode`] does.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    Status,
    Stage(StageRequest),
    Flush(FlushRequest),
    Evict(EvictRequest),
    Release(ReleaseRequest),
    /// What is not in the pool yet.
    Dirty,
    /// The residency of what lies at and below a path.
    Ls {
        path: String,
        recursive: bool,
    },
    Fsck {
        repair: bool,
    },
    /// Registers the one who asks as the owner of a job, which lasts as long as he does; or joins one.
    BeginJob(JobRequest),
    EndJob {
        id: String,
        /// It has not ended, but nobody looks any more.
        #[serde(default)]
        goes_on: bool,
    },
    /// All jobs that are known.
    Jobs,
    /// The newest job of this name, with its files.
    Job {
        id: String,
    },
    /// What jobs used up to now.
    Sample {
        /// When this will be asked again.
        #[serde(default)]
        interval_ms: u64,
    },
    /// Why a file is here, and what would evict it.
    Explain {
        path: String,
    },
    /// All profiles of jobs.
    Profiles,
    /// One of them, by its short name or its signature, with all that it says.
    Profile {
        profile: String,
    },
    /// Takes a profile in, in place of one of the same signature.
    ImportProfile(Box<ProfileDocument>),
    /// Gives a profile up; all of them where none is named.
    ForgetProfiles {
        profile: Option<String>,
    },
}

/// One line of the daemon's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "reply", content = "value", rename_all = "snake_case")]
pub enum Reply {
    Status(Box<Status>),
    Progress(Progress),
    /// Some of them: a long list comes in several lines.
    Dirty(Vec<DirtyFile>),
    Listed(Vec<Listed>),
    Fsck(FsckReport),
    Jobs(Vec<JobSummary>),
    /// Of the job that came before.
    JobFiles(Vec<JobFile>),
    Sample(Sample),
    Explanation(Box<Explanation>),
    Profiles(Vec<ProfileSummary>),
    Profile(Box<ProfileDocument>),
    /// How many were given up.
    Forgotten(u64),
    /// Nothing new, but the daemon is at work.
    Alive,
    /// The request was carried out, as far as the replies before say.
    End,
    Error(Failure),
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
