//! The results of a prediction, with reasons.

use std::fmt;

use super::Parts;

/// A path that a job is expected to read.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedRead {
    pub path: String,
    /// The size of the file, or an estimate.
    pub bytes: u64,
    /// In the order of first uses, from 1.
    pub rank: u32,
    /// 0 to 1.
    pub probability: f64,
    /// `None`: the whole file.
    pub parts: Option<Parts>,
    pub why: Reason,
}

/// The reason why a path is expected. `used` of the `seen` remembered runs used it, or the path that it follows from.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    /// Runs used this path.
    Replayed { used: u32, seen: u32 },
    /// Runs used paths from which this one follows: `from` is the last of them; `by` is what it moved with, such as
    /// `argument 2`, `array index`, `date, +1 day`, `counter, +1`.
    Moved { from: String, by: String, used: u32, seen: u32 },
    /// Runs of a similar job used it.
    Similar { signature: String, used: u32, seen: u32 },
}

impl Reason {
    /// Returns the number of runs that used the path or the one that it follows from, and the number of remembered
    /// runs.
    pub fn runs(&self) -> (u32, u32) {
        match self {
            Self::Replayed { used, seen } | Self::Moved { used, seen, .. } | Self::Similar { used, seen, .. } => {
                (*used, *seen)
            }
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replayed { used, seen } => write!(f, "used in {used} of the last {seen} runs"),
            Self::Moved { from, by, used, seen } => {
                write!(f, "moved from {from} by {by}, as in {used} of the last {seen} runs")
            }
            Self::Similar { signature, used, seen } => {
                write!(f, "used in {used} of the last {seen} runs of the similar job {signature}")
            }
        }
    }
}
