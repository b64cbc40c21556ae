//! Outstanding suggestions: neither used nor wasted so far.

use std::collections::HashMap;

use super::{Predictor, ReaderId};

/// The most outstanding suggestions of the whole mount: a set of this many files can be on its way at once. Each takes
/// 120 bytes with its place in its reader's queue, 15 MiB at most.
pub(super) const ASKED_MAX: usize = 1 << 17;

/// One suggestion.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrackedSuggestion {
    pub reader: ReaderId,
    /// The directory of the pattern, for predictors that work by directory.
    pub directory: u64,
    pub predictor: Predictor,
    /// The stream, for [`Predictor::Sequence`].
    pub stream: u32,
    /// Distinguishes it from later suggestions of the same file.
    pub number: u64,
    pub state: SuggestionState,
}

/// The caller's answer to a suggestion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SuggestionState {
    /// No answer yet.
    Said,
    /// The caller fetched the file: [`super::Online::staged`].
    Staged,
    /// The caller did not fetch it: [`super::Online::not_staged`]. Whether the file is used still counts.
    Refused,
}

/// All suggestions, by file.
#[derive(Debug, Default)]
pub(super) struct AskedFor {
    files: HashMap<u64, TrackedSuggestion>,
    number: u64,
}

impl AskedFor {
    pub fn contains(&self, file: u64) -> bool {
        self.files.contains_key(&file)
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn get_mut(&mut self, file: u64) -> Option<&mut TrackedSuggestion> {
        self.files.get_mut(&file)
    }

    /// Returns whether this is the outstanding suggestion for the file.
    pub fn is(&self, file: u64, number: u64) -> bool {
        self.files.get(&file).is_some_and(|asked| asked.number == number)
    }

    pub fn remove(&mut self, file: u64) -> Option<TrackedSuggestion> {
        self.files.remove(&file)
    }

    /// Adds a suggestion, and returns its number.
    pub fn insert(&mut self, file: u64, asked: TrackedSuggestion) -> u64 {
        self.number += 1;
        self.files.insert(file, TrackedSuggestion { number: self.number, ..asked });
        self.number
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = (u64, &TrackedSuggestion)> {
        self.files.iter().map(|(file, asked)| (*file, asked))
    }
}
