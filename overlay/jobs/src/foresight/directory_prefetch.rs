//! Predicts which directories a reader of a tree enters next, and stages their files.
//!
//! The opens of a reader predict the other files of the directory. If each directory has only a few files, that is too
//! late: the reader has left the directory before a prediction is possible. So directories are predicted in the same
//! way as files: to enter a directory counts as an open of it, in the directory above. The predicted directories are
//! listed, and their files are staged.
//!
//! A directory is listed, with lower priority than readers, only if it is predicted; never only because the reader left
//! it. The probability of a file follows from the share of the files of earlier directories that the reader opened.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::Arc;

use forebay_engine::{Ino, blocking};
use forebay_prefetch::online::{Online, OpenEvent, OpenedKind, ReaderId, Who};
use forebay_prefetch::plan::PROBABILITY_MIN;
use lru::LruCache;
use tokio::sync::Semaphore;

use super::access_predictor::{POOL_SHARE, PredictedFile, PrefetchPlan};
use crate::JobsInner;

/// Readers whose directories are remembered.
const WALKS_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);
/// Directories in which a reader may be at the same time, as the processes of one job are.
const RECENT_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(7);
/// Largest depth of a directory at which a reader is followed.
const DEPTH_MAX: usize = 64;
/// Files that are staged for one predicted directory. The reader needs long enough for these.
const FILES_MAX: usize = 128;
/// Directories that are listed for one predicted directory: itself, and directories below it.
const LISTINGS_MAX: usize = 16;
/// The least weight of the last directory in the share of files that a reader opens.
const SHARE_WEIGHT: f64 = 0.25;
/// Share of the fast pool for files of predicted directories. The same amount is left for predicted files.
const WALKS_SHARE: f64 = POOL_SHARE / 2.0;

/// A directory that a reader will probably enter.
#[derive(Debug)]
pub(super) struct NextDirectory {
    reader: Who,
    directory: Ino,
    /// The probability that one of its files is opened.
    probability: f64,
    why: String,
}

/// The position of a reader in the tree.
#[derive(Debug)]
struct ReaderWalk {
    /// The directories from the root to the reader's directory.
    way: Vec<Ino>,
    /// How many files the reader opened in each directory where it was recently.
    recent: LruCache<Ino, usize>,
    /// The share of a directory's files that the reader opens, and how many directories it is computed from.
    share: f64,
    noted: u32,
    /// Directories that are being staged for the reader.
    expected: HashSet<Ino>,
}

/// The positions of all readers.
#[derive(Debug)]
pub(super) struct Walks(LruCache<Who, ReaderWalk>);

impl Default for Walks {
    fn default() -> Self {
        Self(LruCache::new(WALKS_MAX))
    }
}

impl Walks {
    pub fn end(&mut self, reader: Who) {
        self.0.pop(&reader);
    }

    fn of(&mut self, reader: Who) -> &mut ReaderWalk {
        self.0.get_or_insert_mut(reader, ReaderWalk::default)
    }

    fn is_expected(&self, next: &NextDirectory) -> bool {
        self.0.peek(&next.reader).is_some_and(|walk| walk.expected.contains(&next.directory))
    }

    fn is_through(&mut self, next: &NextDirectory) {
        if let Some(walk) = self.0.peek_mut(&next.reader) {
            walk.expected.remove(&next.directory);
        }
    }
}

impl Default for ReaderWalk {
    fn default() -> Self {
        let recent = LruCache::new(RECENT_MAX);
        Self { way: Vec::new(), recent, share: 1.0, noted: 0, expected: HashSet::new() }
    }
}

impl ReaderWalk {
    fn is_in(&self, directory: Ino) -> bool {
        self.way.last() == Some(&directory)
    }

    /// Moves the reader to the last directory of `way`. Returns the directories that it enters, each with the one above
    /// it.
    fn go(&mut self, way: Vec<Ino>) -> Vec<(Ino, Ino)> {
        let known = self.way.iter().zip(&way).take_while(|(before, now)| before == now).count();
        let steps = way.windows(2).skip(known.saturating_sub(1)).map(|step| (step[0], step[1]));
        let entered: Vec<(Ino, Ino)> = steps.collect();
        entered.iter().for_each(|(_, directory)| _ = self.expected.remove(directory));
        self.way = way;
        entered
    }

    /// Counts an open. If the reader thereby left a directory for good, returns that directory and how many files it
    /// opened there.
    fn opens(&mut self, directory: Ino) -> Option<(Ino, usize)> {
        if let Some(opened) = self.recent.get_mut(&directory) {
            *opened += 1;
            return None;
        }
        self.recent.push(directory, 1)
    }

    /// Notes how many of a directory's files the reader opened. The first directories weigh as much as the initial
    /// estimate.
    fn note(&mut self, opened: usize, of: usize) {
        if of > 0 {
            self.noted += 1;
            let weight = f64::from(self.noted + 1).recip().max(SHARE_WEIGHT);
            self.share += ((opened as f64 / of as f64).min(1.0) - self.share) * weight;
        }
    }
}

impl JobsInner {
    /// Follows a reader after an open, and predicts which directories it enters next.
    pub(super) fn walk_on(&self, touch: &OpenEvent, online: &mut Online, next: &mut PrefetchPlan) {
        let (reader, directory) = (touch.reader.who, Ino(touch.directory));
        // Never locked during a look-up in the engine.
        let walks = &self.foresight.access_predictor.walks;
        let left = walks.lock().of(reader).opens(directory);
        let of = left.and_then(|(left, opened)| Some((opened, self.count_files(left, FILES_MAX)?)));
        if let Some((opened, files)) = of {
            walks.lock().of(reader).note(opened, files);
        }
        if walks.lock().of(reader).is_in(directory) {
            return;
        }
        let way = self.way_to(directory);
        let (entered, share) = {
            let mut walks = walks.lock();
            let walk = walks.of(reader);
            (walk.go(way), walk.share)
        };
        for (above, entered) in entered {
            let id = ReaderId { who: reader, opens: OpenedKind::Directories };
            let touch = OpenEvent { reader: id, directory: above.0, file: entered.0, at: touch.at };
            let suggestions =
                online.touched(&touch, &mut |number| self.subdirectories(Ino(number), &mut next.unlisted));
            for suggestion in suggestions {
                let probability = suggestion.probability * share;
                if probability < PROBABILITY_MIN {
                    online.not_staged(suggestion.file);
                    continue;
                }
                online.staged(suggestion.file);
                let directory = Ino(suggestion.file);
                walks.lock().of(reader).expected.insert(directory);
                let why = format!("of the next directory: {}", suggestion.why);
                next.directories.push(NextDirectory { reader, directory, probability, why });
            }
        }
    }

    /// Returns the directories from the root to this one. Empty if there are too many, or the directory has no name any
    /// more.
    fn way_to(&self, directory: Ino) -> Vec<Ino> {
        let mut way = vec![directory];
        let mut last = directory;
        while last != Ino::ROOT {
            match self.engine.directory_of(last).filter(|_| way.len() < DEPTH_MAX) {
                Some(parent) => last = parent,
                None => return Vec::new(),
            }
            way.push(last);
        }
        way.reverse();
        way
    }

    /// Stages the files of a directory and of the directories below it, as far as a reader will need them soon.
    pub(super) async fn bring_in_directory(self: Arc<Self>, next: NextDirectory, turns: &Arc<Semaphore>) {
        let predictor = &self.foresight.access_predictor;
        if !self.bring_in_below(&next, turns).await {
            predictor.not_brought_in(next.directory);
        }
        predictor.walks.lock().is_through(&next);
    }

    /// Returns whether any file is being staged or was resident.
    async fn bring_in_below(self: &Arc<Self>, next: &NextDirectory, turns: &Arc<Semaphore>) -> bool {
        let (mut left, mut room, mut is_any) = (vec![next.directory], FILES_MAX, false);
        for _ in 0..LISTINGS_MAX {
            let Some(directory) = left.pop() else { break };
            {
                let Ok(_turn) = turns.acquire().await else { break };
                // The reader may have entered the directory by now, or have ended.
                if !self.foresight.access_predictor.walks.lock().is_expected(next) {
                    break;
                }
                let inner = self.clone();
                if !matches!(blocking(move || Ok(inner.room_for_followed())).await, Ok(1..)) {
                    break;
                }
                if let Err(error) = self.engine.behind_readers(self.engine.list_ahead(directory)).await {
                    tracing::debug!(%error, %directory, "not listed ahead of its reader");
                    continue;
                }
            }
            let inner = self.clone();
            let (reader, probability, why) = (next.reader, next.probability, next.why.clone());
            let found = blocking(move || {
                let unlisted = &mut HashSet::new();
                let files = inner.siblings(directory, unlisted).unwrap_or_default();
                let files = files.into_iter().filter(|file| file.bytes > 0).take(room);
                let wanted: Vec<PredictedFile> =
                    files.map(|file| PredictedFile { ino: Ino(file.file), probability, why: why.clone() }).collect();
                let (wanted_count, mut taken) = (wanted.len(), 0);
                let admitted = inner.admit(reader, wanted, WALKS_SHARE, |_, is_taken| taken += usize::from(is_taken));
                let below = inner.subdirectories(directory, unlisted).unwrap_or_default();
                let below: Vec<Ino> = below.iter().take(LISTINGS_MAX).map(|below| Ino(below.file)).collect();
                Ok((admitted, wanted_count, taken, below))
            });
            let Ok((admitted, wanted, taken, below)) = found.await else { break };
            self.bring_in_files(admitted, turns);
            is_any |= taken > 0;
            room = room.saturating_sub(taken);
            if room == 0 || (wanted > 0 && taken == 0) {
                break;
            }
            left.extend(below.into_iter().rev());
        }
        is_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(numbers: &[u64]) -> Vec<Ino> {
        numbers.iter().copied().map(Ino).collect()
    }

    fn pairs(pairs: &[(u64, u64)]) -> Vec<(Ino, Ino)> {
        pairs.iter().map(|(above, below)| (Ino(*above), Ino(*below))).collect()
    }

    #[test]
    fn a_reader_enters_directories_and_comes_back() {
        let mut walk = ReaderWalk::default();
        assert_eq!(walk.go(way(&[1, 2, 3])), pairs(&[(1, 2), (2, 3)]));
        assert!(walk.is_in(Ino(3)));
        walk.expected.extend(way(&[4, 6]));
        assert_eq!(walk.go(way(&[1, 2, 4, 5])), pairs(&[(2, 4), (4, 5)]));
        assert_eq!(walk.expected, HashSet::from([Ino(6)]), "it has come there by itself");
        assert_eq!(walk.go(way(&[1, 2])), []);
        assert_eq!(walk.go(way(&[1])), []);
        assert_eq!(walk.go(vec![]), [], "its directory is unknown");
    }

    #[test]
    fn a_directory_is_left_when_other_directories_have_been_read_since() {
        let mut walk = ReaderWalk::default();
        // Several processes of one job.
        for _ in 0..10 {
            (0..8).for_each(|directory| assert_eq!(walk.opens(Ino(directory)), None));
        }
        assert_eq!(walk.opens(Ino(8)), Some((Ino(0), 10)));
        assert_eq!(walk.opens(Ino(8)), None);
    }

    #[test]
    fn a_reader_that_opens_few_files_of_each_directory_is_not_given_them_all() {
        let mut walk = ReaderWalk::default();
        (0..5).for_each(|_| walk.note(1, 20));
        assert!(walk.share < PROBABILITY_MIN, "{}", walk.share);
        walk.note(3, 0);
        (0..8).for_each(|_| walk.note(9, 9));
        assert!(walk.share > 0.85, "{}", walk.share);
    }

    #[test]
    fn what_a_reader_expects_ends_with_it() {
        let mut walks = Walks::default();
        let next = NextDirectory { reader: Who::Job(7), directory: Ino(3), probability: 1.0, why: String::new() };
        walks.of(Who::Job(7)).expected.insert(Ino(3));
        assert!(walks.is_expected(&next));
        walks.end(Who::Job(7));
        assert!(!walks.is_expected(&next));
        walks.of(Who::Job(7)).expected.insert(Ino(3));
        walks.is_through(&next);
        assert!(!walks.is_expected(&next));
    }
}
