//! Predicts what readers will open next from what they open while they run: the online source of the planner.
//!
//! Four kinds of patterns are known: the order of names in a directory ([`sequence`]), a directory that is read in no
//! order ([`siblings`]), files that are opened together now and then ([`association`]), and sets that are read over and
//! over ([`epochs`]). This module combines their suggestions. A predictor is trusted by the share of its suggestions
//! that was used: by this reader, or by all readers if this one has no outcomes yet. A predictor that is nearly always
//! wrong only probes now and then.
//!
//! All memory is bounded: the entry that was not used for longest is forgotten. The bounds are constants in the
//! modules, with the size of an entry: [`reader::READERS_MAX`], [`track::TRACKS_MAX`] and [`track::TOUCHED_MAX`],
//! [`listing::DIRECTORIES_MAX`] and [`listing::LISTED_MAX`], [`epochs::LOGS_MAX`], [`asked::ASKED_MAX`],
//! [`association::ROWS_MAX`] and [`association::LEADERS_MAX`]. Together they take at most 120 MiB, if a mount reaches
//! every bound. A job that reads a set of 2,000 files in one directory takes 1 MiB.

mod accuracy;
mod asked;
mod association;
mod candidates;
mod epochs;
mod listing;
mod natural;
mod predictor;
mod reader;
mod sequence;
mod siblings;
#[cfg(test)]
mod tests;
mod track;

use std::sync::Arc;
use std::time::Duration;

use lru::LruCache;

pub use predictor::{Predictor, Why};

use accuracy::Accuracy;
use asked::{AskedFor, SuggestionState, TrackedSuggestion};
use association::Association;
use candidates::{Sources, SuggestionCandidate};
use listing::{DirectoryListing, ListingCache};
use reader::Reader;
use track::Track;

/// The most suggestions for one open: as many as the caller can begin before the next open.
pub const SUGGESTIONS_MAX: usize = 64;

/// Files that a reader opens in a directory before its listing is requested: an order is recognised after three steps.
/// A reader that may continue as in the previous directory needs the listing at once.
const LISTING_TOUCHES: usize = 3;

/// The job or session whose opens are one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Who {
    /// A job, by its number while it runs.
    Job(u32),
    /// A session (one terminal, one service) outside of jobs, by its process number; 0 if that is not known.
    Session(u32),
}

/// The kind of opened objects. Entering a directory counts as opening it, in its parent directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OpenedKind {
    Files,
    Directories,
}

/// A reader of files, or of directories: each has its own patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReaderId {
    pub who: Who,
    pub opens: OpenedKind,
}

/// A file that was opened for reading, or a directory that was entered.
#[derive(Debug, Clone, Copy)]
pub struct OpenEvent {
    pub reader: ReaderId,
    /// The inode number of the directory that it was opened in.
    pub directory: u64,
    /// The inode number of the file, or of the directory that was entered.
    pub file: u64,
    /// The time since any fixed moment.
    pub at: Duration,
}

/// A file of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sibling {
    pub name: Box<str>,
    /// The inode number.
    pub file: u64,
    /// Its size. Empty files are never suggested.
    pub bytes: u64,
}

/// A file that the reader will probably open.
#[derive(Debug, Clone, PartialEq)]
pub struct Suggestion {
    /// The inode number.
    pub file: u64,
    /// From 0 to 1.
    pub probability: f64,
    pub why: Why,
}

/// The state of all readers of a mount; see the head of the file. Deterministic: the same calls give the same
/// suggestions. The caller locks. Only forgetting a reader, as [`Online::ended`] does, takes time in proportion to the
/// state.
#[derive(Debug)]
pub struct Online {
    readers: LruCache<ReaderId, Reader>,
    readers_made: u64,
    /// Opens that all readers together remember.
    logged: usize,
    /// By reader and directory.
    tracks: LruCache<(ReaderId, u64), Track>,
    /// Files that all tracks together remember.
    touched: usize,
    listings: ListingCache,
    association: Association,
    asked: AskedFor,
    /// By predictor, over all readers.
    accuracy: [Accuracy; 5],
}

/// The context of an open.
struct OpenContext {
    listing: Option<Arc<DirectoryListing>>,
    follows: bool,
}

impl Default for Online {
    fn default() -> Self {
        Self::new()
    }
}

impl Online {
    pub fn new() -> Self {
        Self {
            readers: LruCache::unbounded(),
            readers_made: 0,
            logged: 0,
            tracks: LruCache::unbounded(),
            touched: 0,
            listings: ListingCache::new(),
            association: Association::new(),
            asked: AskedFor::default(),
            accuracy: [Accuracy::of_mount(); 5],
        }
    }

    /// Notes an open, and returns the files that will probably be opened next, the most probable first: at most
    /// [`SUGGESTIONS_MAX`], none twice while it is outstanding, and none that this reader has opened in this epoch or
    /// in this pass over the directory. An associated file may have been opened before, but not just now.
    ///
    /// `listing` returns the files of a directory, or its subdirectories if the reader opens directories, in any order.
    /// It is called at most once, for the directory of the open, and only if the reader has opened some files there and
    /// the known listing is missing or lacks the file. If it returns `None`, only suggestions that need no listing are
    /// made.
    ///
    /// Answer each suggestion with [`Online::staged`] or [`Online::not_staged`].
    pub fn touched(
        &mut self,
        touch: &OpenEvent,
        listing: &mut dyn FnMut(u64) -> Option<Vec<Sibling>>,
    ) -> Vec<Suggestion> {
        self.settle(touch.file, true);
        let Some(opened) = self.open(touch, listing) else { return Vec::new() };
        let candidates = self.candidates(touch, &opened);
        let suggestions = self.suggest(touch, candidates);
        while let Some(late) = self.readers.peek_mut(&touch.reader).and_then(|reader| reader.late(&self.asked)) {
            self.settle(late, false);
        }
        suggestions
    }

    /// The file was fetched, or was resident.
    pub fn staged(&mut self, file: u64) {
        if let Some(asked) = self.asked.get_mut(file).filter(|asked| asked.state == SuggestionState::Said) {
            asked.state = SuggestionState::Staged;
        }
    }

    /// The file will not be fetched: there is no room, or other files go first. This does not count as waste.
    pub fn not_staged(&mut self, file: u64) {
        let Some(asked) = self.asked.get_mut(file).filter(|asked| asked.state != SuggestionState::Refused) else {
            return;
        };
        let (reader, directory, predictor) = (asked.reader, asked.directory, asked.predictor);
        if predictor.is_ordered() {
            // The suggestion stays, since it costs nothing to see whether the file is opened when it was expected.
            asked.state = SuggestionState::Refused;
        } else {
            self.asked.remove(file);
        }
        if let Some(reader) = self.readers.peek_mut(&reader) {
            reader.refused(predictor);
        }
        if let (Predictor::Siblings, Some(track)) = (predictor, self.tracks.peek_mut(&(reader, directory))) {
            track.refused();
        }
    }

    /// The file was evicted unused, or the job for which it was fetched ended without using it.
    pub fn wasted(&mut self, file: u64) {
        self.settle(file, false);
    }

    /// The job or session will open nothing more. Files that were fetched for it and not used were wasted.
    pub fn ended(&mut self, who: Who) {
        for opens in [OpenedKind::Files, OpenedKind::Directories] {
            let reader = ReaderId { who, opens };
            if let Some(known) = self.readers.pop(&reader) {
                self.forget(reader, known, true);
            }
        }
    }

    /// Settles the suggestion for this file, if there is one: it was used or wasted.
    fn settle(&mut self, file: u64, used: bool) {
        let Some(asked) = self.asked.remove(file) else { return };
        if let Some(reader) = self.readers.peek_mut(&asked.reader) {
            reader.settled(asked.predictor, used, asked.state == SuggestionState::Refused);
        }
        let mut outcomes = Some((usize::from(used), usize::from(!used)));
        if let Some(track) = self.tracks.peek_mut(&(asked.reader, asked.directory)) {
            match asked.predictor {
                Predictor::Sequence => track.sequence.settled(asked.stream, used),
                Predictor::Siblings => outcomes = track.settled(used),
                _ => (),
            }
        }
        if let Some(outcomes) = outcomes {
            self.note(asked.reader, asked.predictor, outcomes);
        }
    }

    /// Notes numbers of used and of wasted suggestions.
    fn note(&mut self, reader: ReaderId, predictor: Predictor, outcomes: (usize, usize)) {
        self.accuracy[predictor.index()].note(outcomes.0, outcomes.1);
        if let Some(reader) = self.readers.peek_mut(&reader) {
            reader.note(predictor, outcomes);
        }
    }

    /// Releases all state that belongs to a reader.
    fn forget(&mut self, id: ReaderId, reader: Reader, has_ended: bool) {
        self.logged -= reader.epochs.log_len();
        let (mut used_siblings, mut wasted) = (0, [0; 5]);
        for (file, suggestion) in reader.into_awaited() {
            if !self.asked.is(file, suggestion) {
                continue;
            }
            if let Some(asked) =
                self.asked.remove(file).filter(|asked| has_ended && asked.state == SuggestionState::Staged)
            {
                wasted[asked.predictor.index()] += 1;
            }
        }
        let tracks: Vec<(ReaderId, u64)> = self.tracks.iter().map(|(key, _)| *key).filter(|key| key.0 == id).collect();
        for key in tracks {
            let Some(track) = self.tracks.pop(&key) else { continue };
            self.touched -= track.touched_count();
            used_siblings += track.used_untold();
        }
        for predictor in Predictor::ALL {
            let used = if predictor == Predictor::Siblings { used_siblings } else { 0 };
            self.accuracy[predictor.index()].note(used, wasted[predictor.index()]);
        }
    }

    /// Forgets the reader that was silent for longest; false if there is only one.
    fn forget_oldest_reader(&mut self) -> bool {
        if self.readers.len() < 2 {
            return false;
        }
        let Some((id, reader)) = self.readers.pop_lru() else { return false };
        self.forget(id, reader, false);
        true
    }

    /// Notes an open. `None` if it counts as the same as a previous one.
    fn open(&mut self, touch: &OpenEvent, ask: &mut dyn FnMut(u64) -> Option<Vec<Sibling>>) -> Option<OpenContext> {
        let (readers_made, file) = (&mut self.readers_made, touch.file);
        let reader = self.readers.get_or_insert_mut(touch.reader, || {
            *readers_made += 1;
            Reader::new(*readers_made)
        });
        let logged = reader.epochs.log_len();
        let is_new = reader.touch(file, touch.at);
        self.logged = self.logged + reader.epochs.log_len() - logged;
        let (now, touches) = (reader.now(), reader.touches());
        while self.readers.len() > reader::READERS_MAX || self.logged > epochs::LOGS_MAX {
            if !self.forget_oldest_reader() {
                break;
            }
        }
        if !is_new {
            return None;
        }
        let track = self.tracks.get_or_insert_mut((touch.reader, touch.directory), Track::default);
        let touched = track.touched_count();
        let habit = self.readers.peek_mut(&touch.reader).and_then(|reader| reader.habit.take());
        if let Some(habit) = habit.filter(|_| touched == 0) {
            track.enter(file, habit);
        }
        let is_known = touched + usize::from(!track.is_touched(file)) >= LISTING_TOUCHES || track.is_entered();
        let listing = if is_known { self.listings.get((touch.directory, touch.reader.opens), file, ask) } else { None };
        let follows = track.touch(file, listing.as_deref(), touches);
        if let (Some(reader), Some(listing)) = (self.readers.peek_mut(&touch.reader), &listing) {
            reader.habit = track.sequence.habit(listing).filter(|_| follows);
        }
        self.touched = self.touched + track.touched_count() - touched;
        self.forget_tracks();
        if !follows {
            self.association.record(file, now);
        }
        Some(OpenContext { listing, follows })
    }

    fn forget_tracks(&mut self) {
        while self.tracks.len() > track::TRACKS_MAX || self.touched > track::TOUCHED_MAX {
            let Some((_, track)) = self.tracks.pop_lru() else { break };
            self.touched -= track.touched_count();
        }
    }

    fn candidates(&mut self, touch: &OpenEvent, opened: &OpenContext) -> Vec<SuggestionCandidate> {
        let Some(reader) = self.readers.peek_mut(&touch.reader) else { return Vec::new() };
        let Some(track) = self.tracks.peek_mut(&(touch.reader, touch.directory)) else { return Vec::new() };
        let (association, asked, accuracy) = (&mut self.association, &self.asked, &self.accuracy);
        let sources = Sources { reader, track, association, asked, accuracy };
        sources.candidates(touch.file, opened.listing.as_deref(), opened.follows)
    }

    /// Turns the best candidates into suggestions.
    fn suggest(&mut self, touch: &OpenEvent, mut candidates: Vec<SuggestionCandidate>) -> Vec<Suggestion> {
        let probability = |candidate: &SuggestionCandidate| candidate.suggestion.probability;
        candidates.sort_by(|a, b| probability(b).total_cmp(&probability(a)));
        while self.asked.len() + SUGGESTIONS_MAX > asked::ASKED_MAX && self.forget_oldest_reader() {}
        let room = (asked::ASKED_MAX - self.asked.len()).min(SUGGESTIONS_MAX);
        let mut suggestions = Vec::with_capacity(room.min(candidates.len()));
        for candidate in candidates {
            if suggestions.len() < room && !self.asked.contains(candidate.suggestion.file) {
                self.ask(touch, &candidate);
                suggestions.push(candidate.suggestion);
            }
        }
        suggestions
    }

    fn ask(&mut self, touch: &OpenEvent, candidate: &SuggestionCandidate) {
        let (file, predictor) = (candidate.suggestion.file, candidate.suggestion.why.predictor());
        let (directory, stream) = (touch.directory, candidate.stream);
        let asked = TrackedSuggestion {
            reader: touch.reader,
            directory,
            predictor,
            stream,
            number: 0,
            state: SuggestionState::Said,
        };
        let number = self.asked.insert(file, asked);
        if let Some(reader) = self.readers.peek_mut(&touch.reader) {
            reader.asked(predictor, file, number, candidate.awaited_touches, &self.asked);
        }
        if let (Predictor::Siblings, Some(track)) = (predictor, self.tracks.peek_mut(&(touch.reader, directory))) {
            track.asked();
        }
    }
}
