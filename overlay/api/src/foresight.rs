//! The types that describe what jobs will read: profiles, what is staged by them, and why a file is resident.

use forebay_prefetch::profile::ExpectedRead;
use forebay_prefetch::signature::Signature;
use serde::{Deserialize, Serialize};

use crate::operator::{ListedPath, TypedPath};

/// What was fetched for a job before it requested it, and how much of it was used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AheadReport {
    pub files: u64,
    pub bytes: u64,
    /// What the job used of this. Accuracy is its share.
    pub used_files: u64,
    pub used_bytes: u64,
    /// Bytes of the pool's files that the job used, that were predicted, and that were resident when the job ended.
    pub covered_bytes: u64,
    /// All bytes of the pool's files that the job used. Coverage is the share that was predicted.
    pub wanted_bytes: u64,
}

/// A profile in a listing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProfileSummary {
    /// Short, for command lines.
    pub id: String,
    pub signature: Signature,
    pub runs: u64,
    pub files: u64,
    pub encoded_bytes: u64,
    pub last_seen_unix: u64,
    /// The share of the staged bytes that was used, from 0 to 1. `None`: nothing was staged yet.
    pub accuracy: Option<f64>,
}

/// A file that would be staged, as `--dry-run` reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlannedFile {
    pub path: TypedPath,
    pub bytes: u64,
    /// The probability that the command reads it, from 0 to 1.
    pub probability: f64,
    pub why: String,
}

impl From<&ExpectedRead> for PlannedFile {
    fn from(expected: &ExpectedRead) -> Self {
        Self {
            path: expected.path.clone(),
            bytes: expected.bytes,
            probability: expected.probability,
            why: expected.why.to_string(),
        }
    }
}

/// The explanation of one file's state.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Explanation {
    #[serde(flatten)]
    pub file: ListedPath,
    /// Why it is resident, or not.
    pub why: String,
    /// What would evict it.
    pub goes: String,
    /// The jobs whose runs have read it, the most probable next reader first.
    pub read_by: Vec<ReaderJob>,
}

/// A job whose runs have read a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReaderJob {
    pub profile: String,
    pub signature: String,
    /// Remembered runs that used it.
    pub used: u32,
    pub seen: u32,
    /// The probability that the next run uses it, from 0 to 1.
    pub probability: f64,
    pub last_seen_unix: u64,
}
