//! Readers that go through a tree: which directories come next, and what is in them.
//!
//! What a reader opens tells of the other files of its directory. Where directories have a few files each that is too
//! late: the reader is through with one before anything is known of it. So directories are told as files are: to enter one
//! is to open it, in the directory above. Those that come next are listed, and their files are brought in.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use forebay_prefetch::online::{Online, Touch};
use forebay_prefetch::plan::PROBABILITY_MIN;
use lru::LruCache;
use tokio::sync::Semaphore;

use super::following::{Next, Wanted};
use crate::Ino;
use crate::engine::{Inner, blocking};

/// Set in the number of a reader of directories.
pub(super) const WALK: u64 = 1 << 33;
/// Set in the number of a directory of which the directories are meant, not the files.
const DIRECTORIES: u64 = 1 << 63;
/// Readers whose way is known.
const WALKS_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);
/// Directories on the way to a file, at most; what is deeper is not told.
const DEPTH_MAX: usize = 64;
/// Files that are brought in because one directory comes next, and directories that are listed for that: itself, and what
/// is below it. More than that it takes long enough to go through.
const FILES_MAX: usize = 128;
const LISTINGS_MAX: usize = 16;
/// How much the last directory says of the share of the files that a reader opens.
const SHARE_WEIGHT: f64 = 0.25;

/// A directory that a reader will probably enter.
#[derive(Debug)]
pub(super) struct NextDirectory {
    reader: u64,
    directory: Ino,
    /// That one of its files is opened.
    probability: f64,
    why: String,
}

/// Where a reader is.
#[derive(Debug)]
struct Walk {
    /// The directories on its way, from the root on, and how many files it has opened in each.
    way: Vec<(Ino, usize)>,
    /// Of the files of a directory that it enters, those that it opens.
    share: f64,
}

/// What a step of a reader changes.
#[derive(Debug, Default, PartialEq)]
struct Step {
    /// Each with the one that it was entered from.
    entered: Vec<(Ino, Ino)>,
    /// With the files that were opened there.
    left: Vec<(Ino, usize)>,
}

/// The ways of all readers.
#[derive(Debug)]
pub(super) struct Walks(LruCache<u64, Walk>);

impl Default for Walks {
    fn default() -> Self {
        Self(LruCache::new(WALKS_MAX))
    }
}

impl Walks {
    pub fn end(&mut self, reader: u64) {
        self.0.pop(&reader);
    }

    fn of(&mut self, reader: u64) -> &mut Walk {
        self.0.get_or_insert_mut(reader, || Walk { way: Vec::new(), share: 1.0 })
    }
}

impl Walk {
    fn is_in(&self, directory: Ino) -> bool {
        self.way.last().is_some_and(|(last, _)| *last == directory)
    }

    /// A file was opened in the directory at the end of a way.
    fn go(&mut self, way: &[Ino]) -> Step {
        let known = self.way.iter().zip(way).take_while(|((before, _), now)| before == *now).count();
        let mut step = Step { left: self.way.split_off(known), ..Step::default() };
        step.left.retain(|(_, opened)| *opened > 0);
        for at in known..way.len() {
            if let Some(above) = at.checked_sub(1) {
                step.entered.push((way[above], way[at]));
            }
            self.way.push((way[at], 0));
        }
        self.opened();
        step
    }

    fn opened(&mut self) {
        if let Some((_, opened)) = self.way.last_mut() {
            *opened += 1;
        }
    }

    /// It has opened so many of the files of a directory.
    fn note(&mut self, opened: usize, of: usize) {
        if of > 0 {
            let share = (opened as f64 / of as f64).min(1.0);
            self.share += (share - self.share) * SHARE_WEIGHT;
        }
    }
}

impl Inner {
    /// A reader opened a file: what follows from it for the directories that it goes through.
    pub(super) fn walk_on(
        &self,
        reader: u64,
        directory: Ino,
        at: Duration,
        walks: &mut Walks,
        online: &mut Online,
        next: &mut Next,
    ) {
        let walk = walks.of(reader);
        if walk.is_in(directory) {
            return walk.opened();
        }
        let step = walk.go(&self.way_to(directory));
        for (left, opened) in step.left {
            if let Some(files) = self.siblings(left, &mut next.unlisted) {
                walk.note(opened, files.len());
            }
        }
        for (above, entered) in step.entered {
            let touch = Touch { reader: reader | WALK, directory: above.0 | DIRECTORIES, file: entered.0, at };
            let suggestions = online
                .touched(&touch, &mut |number| self.subdirectories(Ino(number & !DIRECTORIES), &mut next.unlisted));
            for suggestion in suggestions {
                let probability = suggestion.probability * walk.share;
                if probability < PROBABILITY_MIN {
                    online.not_staged(suggestion.file);
                    continue;
                }
                online.staged(suggestion.file);
                let why = format!("of its directory: {}", suggestion.why);
                next.directories.push(NextDirectory { reader, directory: Ino(suggestion.file), probability, why });
            }
        }
    }

    /// The directories from the root to this one.
    fn way_to(&self, directory: Ino) -> Vec<Ino> {
        let above = |ino: &Ino| self.node(*ino).ok()?.state.lock().record.links.first().map(|(parent, _)| *parent);
        let up = std::iter::successors(Some(directory), |ino| (*ino != Ino::ROOT).then(|| above(ino)).flatten());
        let mut way: Vec<Ino> = up.take(DEPTH_MAX).collect();
        way.reverse();
        way
    }

    /// Brings in the files of a directory and of what is below it, as far as a reader will come soon.
    pub(super) async fn bring_in_directory(self: Arc<Self>, next: NextDirectory, turns: &Arc<Semaphore>) {
        let (mut left, mut files) = (vec![next.directory], FILES_MAX);
        for _ in 0..LISTINGS_MAX {
            let Some(directory) = left.pop() else { return };
            {
                let Ok(_turn) = turns.acquire().await else { return };
                let _turn = self.turns.ahead().await;
                if let Err(error) = self.ensure_listed(directory).await {
                    tracing::debug!(%error, "{} is not listed ahead of its reader", self.display(directory));
                    continue;
                }
            }
            let (inner, reader) = (self.clone(), next.reader);
            let wanted = (next.probability, next.why.clone(), files);
            let found = blocking(move || Ok(inner.admit_directory(reader, directory, wanted))).await;
            let Ok((admitted, below)) = found else { return };
            files = files.saturating_sub(admitted.len());
            self.bring_in_files(admitted, turns);
            if files == 0 {
                return;
            }
            left.extend(below.into_iter().take(LISTINGS_MAX).rev());
        }
    }

    /// The files of a directory that are to be brought in, and the directories in it, by their names.
    fn admit_directory(
        &self,
        reader: u64,
        directory: Ino,
        (probability, why, most): (f64, String, usize),
    ) -> (Vec<super::following::Admitted>, Vec<Ino>) {
        let unlisted = &mut Default::default();
        let files = self.siblings(directory, unlisted).unwrap_or_default();
        let wanted = files.iter().filter(|file| file.bytes > 0).take(most);
        let wanted = wanted.map(|file| Wanted { ino: Ino(file.file), probability, why: why.clone() });
        let admitted = self.admit(reader, wanted.collect(), |_, _| ());
        let below = self.subdirectories(directory, unlisted).unwrap_or_default();
        (admitted, below.iter().map(|below| Ino(below.file)).collect())
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
    fn a_reader_enters_directories_and_leaves_them() {
        let mut walks = Walks::default();
        let walk = walks.of(7);
        assert_eq!(walk.go(&way(&[1, 2, 3])), Step { entered: pairs(&[(1, 2), (2, 3)]), left: vec![] });
        assert!(walk.is_in(Ino(3)));
        walk.opened();
        let step = walk.go(&way(&[1, 2, 4, 5]));
        assert_eq!(step, Step { entered: pairs(&[(2, 4), (4, 5)]), left: vec![(Ino(3), 2)] });
        let up = walk.go(&way(&[1, 2]));
        assert_eq!(up, Step { entered: vec![], left: vec![(Ino(5), 1)] }, "nothing was opened in 4");
        assert_eq!(walk.go(&way(&[1])).left, [(Ino(2), 1)]);
    }

    #[test]
    fn who_opens_one_of_many_is_not_given_them_all() {
        let mut walks = Walks::default();
        let walk = walks.of(7);
        (0..8).for_each(|_| walk.note(1, 20));
        assert!(walk.share < PROBABILITY_MIN, "{}", walk.share);
        walk.note(3, 0);
        (0..8).for_each(|_| walk.note(9, 9));
        assert!(walk.share > 0.85, "{}", walk.share);
        walks.end(7);
        assert_eq!(walks.of(7).share, 1.0);
    }
}
