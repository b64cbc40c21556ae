//! What was suggested and has neither been used nor wasted.

use std::collections::HashMap;

use super::{Predictor, ReaderId};

/// Suggestions of the whole mount that may be outstanding: a set of so many files can be on its way at once. Each takes
/// 120 bytes with its place in its reader's queue, 15 MiB at most.
pub(super) const ASKED_MAX: usize = 1 << 17;

/// One suggestion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub reader: ReaderId,
    /// In which directory the pattern is, for the predictors that go by directories.
    pub directory: u64,
    pub predictor: Predictor,
    /// Of which of its streams, for [`Predictor::Sequence`].
    pub stream: u32,
    /// Tells it from later ones for the same file.
    pub number: u64,
    pub state: State,
}

/// How far the caller is with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It has said nothing yet.
    Said,
    /// It brought the file in: [`super::Online::staged`].
    Staged,
    /// It did not: [`super::Online::not_staged`]. Whether the file is used is still of interest.
    Refused,
}

/// All suggestions, by file.
#[derive(Debug, Default)]
pub(super) struct AskedFor {
    files: HashMap<u64, Asked>,
    number: u64,
}

impl AskedFor {
    pub fn contains(&self, file: u64) -> bool {
        self.files.contains_key(&file)
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn get_mut(&mut self, file: u64) -> Option<&mut Asked> {
        self.files.get_mut(&file)
    }

    /// Whether this is the suggestion that is outstanding for the file.
    pub fn is(&self, file: u64, number: u64) -> bool {
        self.files.get(&file).is_some_and(|asked| asked.number == number)
    }

    pub fn remove(&mut self, file: u64) -> Option<Asked> {
        self.files.remove(&file)
    }

    /// Puts a suggestion in, and gives it its number.
    pub fn insert(&mut self, file: u64, asked: Asked) -> u64 {
        self.number += 1;
        self.files.insert(file, Asked { number: self.number, ..asked });
        self.number
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Asked)> {
        self.files.iter().map(|(file, asked)| (*file, asked))
    }
}
