//! The state of one reader, over all directories.

use std::collections::VecDeque;
use std::time::Duration;

use super::accuracy::Accuracy;
use super::asked::AskedFor;
use super::epochs::Epochs;
use super::predictor::Predictor;
use super::sequence::Habit;

/// The most readers: jobs, and sessions outside of jobs. Each takes 1 KiB, without the files that it remembers, which
/// have a bound of their own.
pub(super) const READERS_MAX: usize = 256;

/// A further open of one of the last `SAME_OPEN_FILES` files within `SAME_OPEN` counts as the same open: programs stat
/// a file, close it and open it again, or read a configuration beside each file of a set.
const SAME_OPEN_FILES: usize = 4;

/// Files that were opened so recently are not suggested as associated files, even if they were not opened in this
/// epoch.
const RECENT_FILES: usize = 16;

const SAME_OPEN: Duration = Duration::from_secs(10);

/// The logical time of a reader has this many bits; its serial number is stored above them.
const CLOCK_BITS: u32 = 40;

/// A predictor with a smaller accuracy only probes: it makes one suggestion in `PROBE_TOUCHES` opens, to see whether it
/// has become better.
const ACCURACY_MIN: f64 = 0.25;
const PROBE_TOUCHES: u64 = 64;

/// A suggestion in the queue of those whose use is awaited.
#[derive(Debug, Clone, Copy)]
struct AwaitedSuggestion {
    file: u64,
    number: u64,
    /// The number of the reader's opens after which it was wasted.
    until: u64,
}

/// How far a predictor is trusted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trust {
    /// The share of its suggestions that is used.
    pub accuracy: f64,
    /// The number of suggestions that it may make now.
    pub most: usize,
    /// Its accuracy is too small: it only probes.
    pub probes: bool,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Reader {
    serial: u64,
    /// Opens, without those that count as the same open.
    touches: u64,
    recent: VecDeque<(u64, Duration)>,
    /// How the reader goes through the directory of its last open.
    pub habit: Option<Habit>,
    pub epochs: Epochs,
    accuracy: [Accuracy; 5],
    /// By predictor, the oldest first. Some may have been settled already.
    awaited: [VecDeque<AwaitedSuggestion>; 5],
    /// The length of each queue after its last purge of settled suggestions.
    kept: [usize; 5],
    outstanding: [usize; 5],
    probed: [u64; 5],
}

impl Reader {
    /// Returns a new reader. `serial` is different for each reader.
    pub fn new(serial: u64) -> Self {
        Self {
            serial,
            touches: 0,
            recent: VecDeque::with_capacity(RECENT_FILES),
            habit: None,
            epochs: Epochs::default(),
            accuracy: [Accuracy::of_reader(); 5],
            awaited: Default::default(),
            kept: [0; 5],
            outstanding: [0; 5],
            probed: [0; 5],
        }
    }

    /// Notes an open; false if it counts as the same as a previous one.
    pub fn touch(&mut self, file: u64, at: Duration) -> bool {
        let before = self.recent.iter().position(|(recent, _)| *recent == file);
        if before.is_none() && self.recent.len() == RECENT_FILES {
            self.recent.pop_front();
        }
        let files_since = before.map_or(RECENT_FILES, |before| self.recent.len() - before);
        let last = before.and_then(|before| self.recent.remove(before));
        self.recent.push_back((file, at));
        if files_since <= SAME_OPEN_FILES && last.is_some_and(|(_, last)| at.saturating_sub(last) <= SAME_OPEN) {
            return false;
        }
        self.touches += 1;
        self.epochs.touch(file);
        true
    }

    /// Returns whether the file is one of those that were opened last.
    pub fn is_recent(&self, file: u64) -> bool {
        self.recent.iter().any(|(recent, _)| *recent == file)
    }

    /// Returns the number of opens, without those that count as the same open.
    pub fn touches(&self) -> u64 {
        self.touches
    }

    /// Returns the logical time of the last open, far from that of all other readers.
    pub fn now(&self) -> u64 {
        self.serial << CLOCK_BITS | self.touches
    }

    /// Returns the trust in a predictor. `of_mount`: its accuracy over all readers, which is used until this reader has
    /// outcomes.
    pub fn trust(&self, predictor: Predictor, of_mount: f64) -> Trust {
        let at = predictor.index();
        let accuracy = self.accuracy[at].share(of_mount);
        let room = predictor.outstanding_max().saturating_sub(self.outstanding[at]);
        let probes = accuracy < ACCURACY_MIN;
        let most = match () {
            () if !probes => room,
            () if self.touches - self.probed[at] >= PROBE_TOUCHES => room.min(1),
            () => 0,
        };
        Trust { accuracy: accuracy.max(ACCURACY_MIN), most, probes }
    }

    /// Notes a suggestion that is awaited for this many opens.
    pub fn asked(&mut self, predictor: Predictor, file: u64, number: u64, touches: u64, asked: &AskedFor) {
        let at = predictor.index();
        self.outstanding[at] += 1;
        self.probed[at] = self.touches;
        if predictor == Predictor::Set {
            self.epochs.asked_rest();
        }
        let (awaited, kept) = (&mut self.awaited[at], &mut self.kept[at]);
        // Purges the settled ones once the queue has doubled since the last purge, so the work is at most that of the
        // insertions.
        if awaited.len() > 2 * *kept + 64 {
            awaited.retain(|awaited| asked.is(awaited.file, awaited.number));
            *kept = awaited.len();
        }
        awaited.push_back(AwaitedSuggestion { file, number, until: self.touches + touches });
    }

    /// Takes out one suggestion that was awaited for long enough.
    pub fn late(&mut self, asked: &AskedFor) -> Option<u64> {
        for awaited in &mut self.awaited {
            while let Some(&AwaitedSuggestion { file, number, until }) = awaited.front() {
                let is_outstanding = asked.is(file, number);
                if is_outstanding && until > self.touches {
                    break;
                }
                awaited.pop_front();
                if is_outstanding {
                    return Some(file);
                }
            }
        }
        None
    }

    /// A suggestion was used, or wasted. `was_refused`: the file was not fetched.
    pub fn settled(&mut self, predictor: Predictor, used: bool, was_refused: bool) {
        let at = predictor.index();
        if !was_refused {
            self.outstanding[at] = self.outstanding[at].saturating_sub(1);
        }
        match predictor {
            Predictor::Epoch => self.epochs.settled_next(used),
            Predictor::Set => self.epochs.settled_rest(used),
            _ => (),
        }
    }

    /// Notes numbers of used and of wasted suggestions.
    pub fn note(&mut self, predictor: Predictor, (used, wasted): (usize, usize)) {
        self.accuracy[predictor.index()].note(used, wasted);
    }

    /// A suggestion will not be fetched.
    pub fn refused(&mut self, predictor: Predictor) {
        let at = predictor.index();
        self.outstanding[at] = self.outstanding[at].saturating_sub(1);
        if predictor == Predictor::Set {
            self.epochs.refused_rest();
        }
    }

    /// Returns all files that it awaits, with the numbers of the suggestions. Some may have been settled already.
    pub fn into_awaited(self) -> impl Iterator<Item = (u64, u64)> {
        self.awaited.into_iter().flatten().map(|awaited| (awaited.file, awaited.number))
    }

    #[cfg(test)]
    pub fn outstanding(&self, predictor: Predictor) -> usize {
        self.outstanding[predictor.index()]
    }

    #[cfg(test)]
    pub fn awaited_len(&self) -> usize {
        self.awaited.iter().map(VecDeque::len).sum()
    }
}
