//! What makes two jobs "the same job again": the user, the program and the shape of its arguments, without what changes
//! from run to run. The changing parts are kept separately, as parameters, so that a profile can find out which paths
//! follow them.

pub(crate) mod calendar;
mod command;
pub(crate) mod digits;
mod parameters;
mod shape;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

pub use calendar::Unit;
pub use parameters::{PARAMETERS_MAX, Parameter, ParameterPlace, Parameters};

/// The most bytes of a signature: the rest is replaced by a checksum.
pub const SIGNATURE_BYTES_MAX: usize = 256;

/// The most words of a command line that are used, and the most bytes of each. `xargs` and globs make lines of 10^5
/// words, and a script may be a single word; the first ones identify the job.
pub(crate) const WORDS_MAX: usize = 1024;
pub(crate) const WORD_BYTES_MAX: usize = 1024;

/// How a job was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Invocation {
    /// The user id.
    pub user: u32,
    /// The account that the batch system charges, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// The command line, with the command itself as the first word.
    #[serde(default)]
    pub words: Vec<String>,
    /// `SLURM_ARRAY_TASK_ID`, for a task of an array.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array_index: Option<u64>,
}

impl Invocation {
    /// Returns what this job has in common with its other runs.
    pub fn signature(&self) -> Signature {
        let bounded = self.bounded();
        let command = command::CommandLine::of(&bounded.words);
        let mut text = format!("{} {}", self.user, shape::name(bounded.account.as_deref().unwrap_or("-")));
        for word in command.shape() {
            text.push(' ');
            text.push_str(&word);
        }
        Signature(shape::bounded(text, SIGNATURE_BYTES_MAX))
    }

    /// Returns what distinguishes this run from other runs: the numbers and dates among its arguments, and the array
    /// index.
    pub fn parameters(&self) -> Parameters {
        Parameters::of(command::CommandLine::of(&self.bounded().words).words, self.array_index)
    }

    /// Cuts the invocation to the used part: two invocations with the same used part have the same signature.
    pub(crate) fn bounded(&self) -> Cow<'_, Self> {
        let fits = |word: &String| word.len() <= WORD_BYTES_MAX;
        if self.words.len() <= WORDS_MAX && self.words.iter().chain(&self.account).all(fits) {
            return Cow::Borrowed(self);
        }
        let cut = |word: &String| {
            let end = (0..=WORD_BYTES_MAX.min(word.len())).rev().find(|at| word.is_char_boundary(*at));
            word[..end.unwrap_or(0)].to_owned()
        };
        let words = self.words.iter().take(WORDS_MAX).map(cut).collect();
        Cow::Owned(Self { words, account: self.account.as_ref().map(cut), ..*self })
    }
}

/// The identity of a job: user, account, program, script and the shape of the arguments, as readable text: `1000 -
/// python3 train.py --epochs=# data/part-#`. At most [`SIGNATURE_BYTES_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Signature(String);

impl Signature {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns eight hexadecimal digits (CRC-32C of the text), which name it on a command line.
    pub fn id(&self) -> String {
        format!("{:08x}", crc32c::crc32c(self.0.as_bytes()))
    }

    /// Estimates how probable it is that a job of one signature reads what a job of the other reads, 0 to 1: 1 for the
    /// same signature, 0 for another program. The estimate uses the text alone. It chooses the profile for a job that
    /// has none.
    pub fn similarity(&self, other: &Self) -> f64 {
        shape::similarity(&self.0, &other.0)
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
