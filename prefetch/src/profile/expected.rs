//! What a prediction says, and why.

use std::fmt;

use super::Parts;

/// A path that a job is expected to read.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    pub path: String,
    /// The size of the file, or what it probably is.
    pub bytes: u64,
    /// In the order of first uses, from 1.
    pub rank: u32,
    /// 0 to 1.
    pub probability: f64,
    /// `None`: all of it.
    pub parts: Option<Parts>,
    pub why: Reason,
}

/// Why a path is expected. `used` of the `seen` runs that are remembered used it, or what stands for it.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    /// Runs used this path.
    Replayed { used: u32, seen: u32 },
    /// Runs used paths that this one follows from: `from` is the last of them, `by` what it moved with, as `argument
    /// 2`, `array index`, `date, +1 day`, `counter, +1`.
    Moved { from: String, by: String, used: u32, seen: u32 },
    /// Runs of a similar job used it.
    Similar { signature: String, used: u32, seen: u32 },
}

impl Reason {
    /// Runs that used the path or what stands for it, and runs that are remembered.
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
