//! Plays opens, and counts the outcomes of the suggestions.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use super::super::*;

/// One open: reader, directory, file.
pub type Open = (u64, u64, u64);

/// Directories with their files.
#[derive(Default)]
pub struct Tree {
    pub directories: HashMap<u64, Vec<Sibling>>,
}

impl Tree {
    /// Adds a directory with `files` files named `part-<number>.bin`, whose inode numbers start at `first`.
    pub fn with(mut self, directory: u64, first: u64, files: u64) -> Self {
        let name = |at: u64| format!("part-{at}.bin").into();
        let siblings = (0..files).map(|at| Sibling { name: name(at), file: first + at, bytes: 100 }).collect();
        self.directories.insert(directory, siblings);
        self
    }
}

/// The outcomes.
#[derive(Debug, Default, Clone)]
pub struct Score {
    pub opens: usize,
    pub covered: usize,
    pub suggested: usize,
    pub used: usize,
    pub listings: usize,
    pub by_predictor: HashMap<Predictor, (usize, usize)>,
}

impl Score {
    /// Returns the share of opens whose file was suggested before.
    pub fn coverage(&self) -> f64 {
        self.covered as f64 / self.opens.max(1) as f64
    }

    /// Returns the share of suggestions that were used.
    pub fn accuracy(&self) -> f64 {
        if self.suggested == 0 { 1.0 } else { self.used as f64 / self.suggested as f64 }
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (coverage, accuracy) = (100.0 * self.coverage(), 100.0 * self.accuracy());
        write!(f, "{:6} {coverage:8.1}% {accuracy:8.1}% {:9} {:8}", self.opens, self.suggested, self.listings)?;
        for predictor in Predictor::ALL {
            if let Some((suggested, used)) = self.by_predictor.get(&predictor) {
                write!(f, "  {predictor:?} {used}/{suggested}")?;
            }
        }
        Ok(())
    }
}

/// A mount in which everything that is suggested is fetched.
#[derive(Default)]
pub struct Play {
    pub online: Online,
    pub tree: Tree,
    pub score: Score,
    pub suggested: HashMap<u64, Predictor>,
    pub seconds: u64,
}

impl Play {
    pub fn on(tree: Tree) -> Self {
        Self { tree, ..Self::default() }
    }

    pub fn open(&mut self, (reader, directory, file): Open) -> Vec<Suggestion> {
        self.seconds += 1;
        self.score.opens += 1;
        if let Some(predictor) = self.suggested.remove(&file) {
            self.score.covered += 1;
            self.score.used += 1;
            self.score.by_predictor.entry(predictor).or_default().1 += 1;
        }
        let touch = OpenEvent { reader: reader_of(reader), directory, file, at: Duration::from_secs(self.seconds) };
        let (tree, listings) = (&self.tree, &mut self.score.listings);
        let suggestions = self.online.touched(&touch, &mut |directory| {
            *listings += 1;
            tree.directories.get(&directory).cloned()
        });
        for suggestion in &suggestions {
            self.score.suggested += 1;
            self.score.by_predictor.entry(suggestion.why.predictor()).or_default().0 += 1;
            self.suggested.insert(suggestion.file, suggestion.why.predictor());
            self.online.staged(suggestion.file);
        }
        check(&self.online, reader_of(reader), &suggestions);
        suggestions
    }

    pub fn all(mut self, opens: impl IntoIterator<Item = Open>) -> Self {
        opens.into_iter().for_each(|open| drop(self.open(open)));
        self
    }

    pub fn files(&mut self, open: Open) -> Vec<u64> {
        self.open(open).into_iter().map(|suggestion| suggestion.file).collect()
    }
}

/// Returns a reader of files, by its number in a test.
pub fn reader_of(number: u64) -> ReaderId {
    ReaderId { who: who(number), opens: OpenedKind::Files }
}

pub fn who(number: u64) -> Who {
    Who::Session(number as u32)
}

/// Checks what holds after every open.
pub fn check(online: &Online, reader: ReaderId, suggestions: &[Suggestion]) {
    assert!(suggestions.len() <= SUGGESTIONS_MAX);
    assert!(suggestions.is_sorted_by(|a, b| a.probability >= b.probability), "the best first");
    assert!(suggestions.iter().all(|suggestion| (0.0..=1.0).contains(&suggestion.probability)));
    let files: HashSet<u64> = suggestions.iter().map(|suggestion| suggestion.file).collect();
    assert_eq!(files.len(), suggestions.len(), "none twice");
    let known = online.readers.peek(&reader).unwrap();
    for suggestion in suggestions {
        let is_touched = match suggestion.why.predictor() {
            Predictor::Association => known.is_recent(suggestion.file),
            _ => known.epochs.is_touched(suggestion.file),
        };
        assert!(!is_touched, "{suggestion:?} was opened in this pass");
    }
    for predictor in [Predictor::Sequence, Predictor::Epoch, Predictor::Association] {
        assert!(known.outstanding(predictor) <= predictor.outstanding_max(), "{predictor:?}");
    }
}

/// Checks what always holds, and takes long to check.
pub fn check_bounds(online: &Online) {
    assert!(online.readers.len() <= reader::READERS_MAX);
    assert_eq!(online.logged, online.readers.iter().map(|(_, reader)| reader.epochs.log_len()).sum::<usize>());
    assert!(online.logged <= epochs::LOGS_MAX);
    assert!(online.tracks.len() <= track::TRACKS_MAX);
    assert_eq!(online.touched, online.tracks.iter().map(|(_, track)| track.touched_count()).sum::<usize>());
    assert!(online.touched <= track::TOUCHED_MAX);
    let (directories, listed) = online.listings.counts();
    assert!(directories <= listing::DIRECTORIES_MAX && listed <= listing::LISTED_MAX);
    let (rows, leaders) = online.association.counts();
    assert!(rows <= association::ROWS_MAX && leaders <= association::LEADERS_MAX);
    assert!(online.asked.len() <= asked::ASKED_MAX);
    for (number, reader) in online.readers.iter() {
        let mine = |predictor| {
            let is_mine = |asked: &TrackedSuggestion| {
                (asked.reader, asked.predictor) == (*number, predictor) && asked.state != SuggestionState::Refused
            };
            online.asked.iter().filter(|(_, asked)| is_mine(asked)).count()
        };
        for predictor in Predictor::ALL {
            assert_eq!(reader.outstanding(predictor), mine(predictor), "{predictor:?} of {number:?}");
        }
    }
    let awaited: usize = online.readers.iter().map(|(_, reader)| reader.awaited_len()).sum();
    assert!(awaited <= 2 * asked::ASKED_MAX + 5 * 65 * reader::READERS_MAX);
}
