//! The messages of the control socket: one request line from the client, then reply lines until `end` or `error`.
//!
//! # Versions
//!
//! A client and a daemon may be of different versions of the program: a mount outlives an upgrade. A request says which
//! [`API_VERSION`] its client knows, and a daemon of another one refuses it, with both versions and the remedy. A request
//! that does not say it, for example of a script, is read as one of the daemon's version.
//!
//! A client ignores fields that it does not know, and a daemon does, too (but a profile has a version of its own, and no
//! unknown fields). So the version stays the same for
//!
//! * a new request, and a new reply to a new request: a daemon that does not know the request says of which version of the
//!   program it is;
//! * a new field that may be absent (`#[serde(default)]`), and whose absence means what was so before;
//! * a new kind of failure: an older client takes it for [`FailureKind::Other`](crate::FailureKind::Other).
//!
//! It is raised by
//!
//! * a field, a request or a reply that is removed or renamed, or has another type, unit or meaning;
//! * a new field of a request that must be there;
//! * a new reply to a request that exists, and a new value of an enum in such a reply.
//!
//! In every version, a request has the fields `api`, `program` and `op`, and [`Reply::Error`] has the fields of
//! [`Failure`]: so each client understands why it is refused.
//!
//! `docs/api.schema.json` is the JSON schema of these types, made by the test `schema`.

use forebay_backends::decorators::MetricsSnapshot;
use forebay_prefetch::profile::ProfileDocument;
use serde::{Deserialize, Serialize};

use crate::allocations::{Allocation, AllocationVerb};
use crate::foresight::{Explanation, ProfileSummary};
use crate::jobs::{JobFile, JobRequest, JobSummary, Sample};
use crate::operator::{
    DirtyFile, EvictRequest, FlushRequest, FsckReport, ListedPath, Overview, Progress, ReleaseRequest, StageRequest,
    Status, TypedPath,
};
use crate::peers::PeersStatus;
use crate::policy::{PolicyEffect, PolicyExplanation, PolicyVerb};
use crate::quotas::{QuotaReport, QuotaVerb};
use crate::scratch::{CommitReport, ScratchDir, ScratchVerb};
use crate::views::{View, ViewChanges, ViewVerb};
use crate::{Failure, FailureKind};

/// The version of the requests and replies. The head of this module says what raises it.
pub const API_VERSION: u32 = 1;

/// The version of this program.
const PROGRAM: &str = env!("CARGO_PKG_VERSION");

/// A line from a client: a request, and who sends it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RequestLine<R = Request> {
    #[serde(flatten)]
    pub sender: RequestSender,
    #[serde(flatten)]
    pub request: R,
}

/// The client that sends a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RequestSender {
    /// The version of the API that the client knows. Absent: that of the daemon.
    #[serde(default)]
    pub api: Option<u32>,
    /// The version of the client's program, for messages.
    #[serde(default)]
    pub program: Option<String>,
}

impl RequestSender {
    /// This program.
    fn this() -> Self {
        Self { api: Some(API_VERSION), program: Some(PROGRAM.into()) }
    }

    /// Fails if the client knows another version of the API than this program, which is the daemon.
    fn check(&self) -> Result<(), Failure> {
        let Some(api) = self.api.filter(|api| *api != API_VERSION) else { return Ok(()) };
        let client = self.program.as_ref().map_or_else(String::new, |program| format!(" (forebay {program})"));
        let what = format!(
            "the client{client} uses version {api} of the API, and the daemon (forebay {PROGRAM}) version {API_VERSION}"
        );
        Err(Failure::new(FailureKind::Other, what).remedy(match &self.program {
            Some(program) => remedy_for(program, PROGRAM),
            None => format!("send requests of version {API_VERSION}"),
        }))
    }

    /// The failure for a request that the daemon cannot read, although its version is right.
    fn not_understood(&self, error: &serde_json::Error) -> Failure {
        let failure = |by: String| Failure::usage(format!("the request is not understood{by}: {error}"));
        match self.program.as_deref() {
            Some(program) if program != PROGRAM => {
                failure(format!(" (it is of forebay {program}, and the daemon is forebay {PROGRAM})"))
                    .remedy(remedy_for(program, PROGRAM))
            }
            _ => failure(String::new()),
        }
    }
}

/// What to do if a client and a daemon, of these versions of the program, do not understand each other.
pub fn remedy_for(client: &str, daemon: &str) -> String {
    format!(
        "run the command with forebay {daemon}; or `umount --flush` with forebay {daemon}, and mount again with forebay \
         {client}"
    )
}

/// Returns the failure for a reply that this program, the client, cannot read. `daemon`: the daemon's version.
pub fn reply_not_understood(daemon: &str, error: &serde_json::Error) -> Failure {
    let what = format!("the answer of the daemon (forebay {daemon}) is not understood by forebay {PROGRAM}: {error}");
    let failure = Failure::new(FailureKind::Other, what);
    if daemon == PROGRAM { failure } else { failure.remedy(remedy_for(PROGRAM, daemon)) }
}

/// A request to the daemon. Paths are relative to the mount, escaped as [`crate::paths::encode`] does.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// Returns the path of what a path names, after its symbolic links.
    Resolve {
        path: TypedPath,
    },
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "reply", content = "value", rename_all = "snake_case")]
pub enum Reply {
    Status(Box<Status>),
    Overview(Box<Overview>),
    Progress(Progress),
    /// A part of the list: a long list takes several lines.
    Dirty(Vec<DirtyFile>),
    Resolved(TypedPath),
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
    /// The request as a line of JSON, with its sender and its end.
    ///
    /// # Errors
    /// Never for what [`Request::from_line`] has read.
    pub fn to_line(&self) -> serde_json::Result<Vec<u8>> {
        line_of(&RequestLine { sender: RequestSender::this(), request: self })
    }

    /// # Errors
    /// The line is of a client with another [`API_VERSION`], or is no request that this program knows.
    pub fn from_line(line: &[u8]) -> Result<Self, Failure> {
        // Before the rest of the line: a request of another version may look different.
        let sender: RequestSender =
            serde_json::from_slice(line).map_err(|e| RequestSender::default().not_understood(&e))?;
        sender.check()?;
        let line: RequestLine = serde_json::from_slice(line).map_err(|e| sender.not_understood(&e))?;
        Ok(line.request)
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

    /// Sends a request as a client with these lines in front of it.
    fn sent(sender: &str, request: &str) -> Result<Request, Failure> {
        Request::from_line(format!("{{{sender}{}\n", request.trim_start_matches('{')).as_bytes())
    }

    #[test]
    fn a_client_of_another_version_is_told_both_versions_and_the_remedy() {
        let failure = sent(r#""api":7,"program":"9.8","#, r#"{"op":"dance"}"#).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Other);
        let (what, remedy) = (failure.what, failure.remedy.unwrap());
        for part in ["version 7", "version 1", "forebay 9.8", &format!("forebay {PROGRAM}")] {
            assert!(what.contains(part), "{part}: {what}");
        }
        assert!(remedy.contains("forebay 9.8") && remedy.contains("mount again"), "{remedy}");
        assert!(sent(r#""api":0,"#, r#"{"op":"status"}"#).unwrap_err().remedy.unwrap().contains("version 1"));
        assert!(matches!(sent(r#""api":1,"program":"9.8","#, r#"{"op":"status"}"#), Ok(Request::Status)));
        assert!(matches!(sent("", r#"{"op":"status","later":[1]}"#), Ok(Request::Status)), "a script, and a new field");
    }

    #[test]
    fn a_request_of_a_newer_program_is_refused_with_both_versions() {
        let failure = sent(r#""api":1,"program":"9.8","#, r#"{"op":"dance"}"#).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Usage);
        assert!(failure.what.contains("forebay 9.8") && failure.what.contains("dance"), "{failure}");
        assert!(failure.remedy.is_some());
        let own = format!(r#""api":1,"program":"{PROGRAM}","#);
        assert_eq!(sent(&own, r#"{"op":"dance"}"#).unwrap_err().remedy, None, "no other version would know it");
        assert!(Request::from_line(b"[]\n").is_err() && Request::from_line(b"\n").is_err());
    }

    #[test]
    fn every_shape_of_request_arrives_as_it_was_sent() {
        let shapes = [
            r#"{"op":"overview"}"#,
            r#"{"op":"ls","path":"a","recursive":true}"#,
            r#"{"op":"flush","paths":["a"],"wait":true,"dry_run":false}"#,
            r#"{"op":"allocation","id":"a","verb":"stage_in","wait_ms":18446744073709551615}"#,
            r#"{"op":"view","view":"end","id":"view-1"}"#,
            r#"{"op":"scratch","scratch":"merge","id":"a","path":"","parent_ino":1,"name":"o","groups":[5]}"#,
            r#"{"op":"begin_job","id":"a","command":"c","members":{"processes":[1]}}"#,
            r#"{"op":"import_profile","version":1,"example":{"user":0,"words":["a"]}}"#,
            r#"{"op":"forget_profiles","profile":null}"#,
        ];
        for text in shapes {
            let request = sent("", text).unwrap();
            let line = request.to_line().unwrap();
            let told: serde_json::Value = serde_json::from_slice(&line).unwrap();
            assert_eq!((&told["api"], &told["program"]), (&API_VERSION.into(), &PROGRAM.into()), "{text}");
            let back = Request::from_line(&line).unwrap();
            assert_eq!(format!("{back:?}"), format!("{request:?}"));
        }
    }

    #[test]
    fn a_kind_of_failure_that_is_not_known_yet_is_another_failure() {
        let line = br#"{"reply":"error","value":{"kind":"on_fire","what":"no","remedy":null,"more":1}}"#;
        let Ok(Reply::Error(failure)) = Reply::from_line(line) else { panic!() };
        assert_eq!(failure, Failure::new(FailureKind::Other, "no"));
    }

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
