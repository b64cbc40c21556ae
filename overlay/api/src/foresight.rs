//! What operators are shown of what jobs will read: profiles, what is staged by them, and why a file is here.

use forebay_prefetch::profile::Expected;
use forebay_prefetch::signature::Signature;
use serde::{Deserialize, Serialize};

use crate::operator::{Listed, TypedPath};

/// What was brought in for a job before it asked, and what became of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AheadReport {
    pub files: u64,
    pub bytes: u64,
    /// Of these, what the job used. Accuracy is their share.
    pub used_files: u64,
    pub used_bytes: u64,
    /// Of the pool's files that the job used, those that were foreseen and were here when it ended.
    pub covered_bytes: u64,
    /// All that it used of the pool's files. Coverage is the share that was foreseen.
    pub wanted_bytes: u64,
}

/// A profile, as it is listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileSummary {
    /// Short, for command lines.
    pub id: String,
    pub signature: Signature,
    pub runs: u64,
    pub files: u64,
    pub encoded_bytes: u64,
    pub last_seen_unix: u64,
    /// The share of what was staged that was used, from 0 to 1. `None`: nothing was staged yet.
    pub accuracy: Option<f64>,
}

/// A file that is going to be staged, as `--dry-run` tells it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Wanted {
    pub path: TypedPath,
    pub bytes: u64,
    /// That the command reads it, from 0 to 1.
    pub probability: f64,
    pub why: String,
}

impl From<&Expected> for Wanted {
    fn from(expected: &Expected) -> Self {
        Self {
            path: expected.path.clone(),
            bytes: expected.bytes,
            probability: expected.probability,
            why: expected.why.to_string(),
        }
    }
}

/// What is known of one file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Explanation {
    #[serde(flatten)]
    pub file: Listed,
    /// Why it is here, or not.
    pub why: String,
    /// What would evict it.
    pub goes: String,
    /// The jobs whose runs have read it, the most probable first.
    pub read_by: Vec<Reader>,
}

/// A job whose runs have read a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reader {
    pub profile: String,
    pub signature: String,
    /// Runs that used it, of those that are remembered.
    pub used: u32,
    pub seen: u32,
    /// That the next run does, from 0 to 1.
    pub probability: f64,
    pub last_seen_unix: u64,
}
