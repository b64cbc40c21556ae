//! Detects that a reader goes over a set again: in the order of the last epoch, or in another order.
//!
//! The detection is the one of the eviction by epochs ([`crate::runs`]), applied to each reader and to the files that
//! it opens.

use std::collections::{HashMap, VecDeque};

use super::sequence::{Window, goes_on};
use super::siblings;
use crate::runs::{Runs, Standing};

/// The most opens of one reader that are remembered: this epoch and the previous one. If a set has more than half as
/// many files, its repetition is not detected.
pub(super) const LOG_MAX: usize = 1 << 18;

/// The same for all readers together: 8 bytes for each open, and at most 34 for the file, 42 MiB.
pub(super) const LOGS_MAX: usize = 1 << 20;

/// A smaller set is read in the time that a suggestion takes.
const SET_MIN: usize = 8;

/// Places by which a file may be out of turn and still be in the order of the last epoch: workers of a loader overtake
/// each other, as in a sequence.
const SLACK: u64 = 8;

/// The weight of the last open in the share of opens that are in order, and the share from which on the order counts as
/// the same: six of six opens, or nearly all of many.
const ORDER_LAST: f64 = 0.25;
const ORDER_MIN: f64 = 0.75;

/// This many consecutive opens of files that were already opened in this epoch may begin another epoch. If fewer such
/// opens occur between other opens, the file is a configuration or similar, which is read every few steps and is no
/// part of the set.
const REPEATS: usize = 3;

/// The most suggestions of files of a set that may be outstanding or wasted, for each file that was opened in this
/// epoch. All of these files were used in the last epoch, so this is bolder than for siblings.
const FOR_EACH_OPENED_MAX: f64 = 16.0;

/// Places of the last epoch that are searched for each wanted file, and in addition.
const LOOKS: usize = 2;
const LOOKS_BESIDES: usize = 16;

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    runs: Runs,
    /// Counts opens, except those that are no part of a set.
    clock: u64,
    /// The last consecutive opens of files that were already opened in this epoch; they are not in the log.
    repeated: Vec<u64>,
    /// The opened files, from the time `clock - log.len()` on.
    log: VecDeque<u64>,
    /// The last open of each of these files.
    touched_at: HashMap<u64, u64>,
    /// The reader's position in the last epoch.
    frontier: Option<u64>,
    /// The share of opens in the order of the last epoch; older opens count less.
    in_order: f64,
    window: Window,
    /// Where in the last epoch the search for files that were not opened in this one continues.
    cursor: u64,
    /// Files of the set that were suggested out of order: the outstanding ones, and the wasted ones of this epoch.
    outstanding: usize,
    wasted: usize,
    /// Recently refused suggestions: each open forgives one.
    refused: usize,
}

/// A file that comes next in the order of the last epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Again {
    pub file: u64,
    /// Places after the file that was opened.
    pub ahead: u32,
    pub probability: f64,
}

impl Epochs {
    pub fn log_len(&self) -> usize {
        self.log.len()
    }

    /// Notes an open.
    pub fn touch(&mut self, file: u64) {
        self.refused = self.refused.saturating_sub(1);
        if self.is_touched(file) {
            self.repeated.push(file);
            if self.repeated.len() == REPEATS {
                std::mem::take(&mut self.repeated).into_iter().for_each(|file| self.log(file));
            }
        } else {
            self.repeated.clear();
            self.log(file);
        }
    }

    fn log(&mut self, file: u64) {
        if let Some(before) = self.touched_at.insert(file, self.clock) {
            let begun = self.runs.begun();
            self.runs.used_again(before, self.clock);
            if self.runs.begun() != begun {
                self.begin();
            }
            if self.runs.standing(before) == Standing::Pinned {
                self.advance(before);
            }
        }
        self.log.push_back(file);
        self.clock += 1;
        self.forget_old();
    }

    fn begin(&mut self) {
        self.frontier = None;
        self.cursor = self.runs.before_begun();
        self.wasted = 0;
    }

    /// Notes the open of a file that the last epoch had at time `before`.
    fn advance(&mut self, before: u64) {
        if let Some(frontier) = self.frontier {
            let in_order = before.abs_diff(frontier + 1) <= SLACK;
            self.in_order += ORDER_LAST * (f64::from(u8::from(in_order)) - self.in_order);
            self.frontier = Some(if in_order { frontier.max(before) } else { before });
        } else {
            self.frontier = Some(before);
        }
    }

    fn forget_old(&mut self) {
        while let Some(&file) = self.log.front() {
            let at = self.clock - self.log.len() as u64;
            if at >= self.runs.before_begun() && self.log.len() <= LOG_MAX {
                break;
            }
            self.log.pop_front();
            if self.touched_at.get(&file) == Some(&at) {
                self.touched_at.remove(&file);
            }
        }
    }

    /// Returns whether the file was opened in this epoch.
    pub fn is_touched(&self, file: u64) -> bool {
        self.touched_at.get(&file).is_some_and(|at| self.runs.standing(*at) == Standing::Used)
    }

    /// Returns whether the reader goes over a set again.
    pub fn is_epoch(&self) -> bool {
        self.runs.is_epoch(self.clock, SET_MIN)
    }

    pub fn is_in_order(&self) -> bool {
        self.in_order >= ORDER_MIN
    }

    fn opened(&self) -> u64 {
        self.clock - self.runs.begun()
    }

    /// Returns the file that was opened at this time of the last epoch, if it was not opened in this one.
    fn left(&self, at: u64) -> Option<u64> {
        if at >= self.runs.begun() {
            return None;
        }
        let first = self.clock - self.log.len() as u64;
        let file = *self.log.get(usize::try_from(at.checked_sub(first)?).ok()?)?;
        (!self.is_touched(file)).then_some(file)
    }

    /// Returns the next files, if the reader follows the order of the last epoch. `accuracy`: the share of these
    /// suggestions that is used.
    pub fn next(&self, accuracy: f64) -> Vec<Again> {
        let Some(frontier) = self.frontier.filter(|_| self.is_epoch() && self.is_in_order()) else { return Vec::new() };
        let again = |ahead: i64| {
            let file = self.left(frontier + ahead as u64)?;
            Some(Again { file, ahead: ahead as u32, probability: accuracy * goes_on(self.opened(), ahead) })
        };
        (1..=self.window.files(accuracy)).filter_map(again).collect()
    }

    /// Returns at most `most` files of the set that were not opened in this epoch and are `free`, if the order is
    /// another one.
    pub fn rest(&mut self, accuracy: f64, most: usize, free: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut found = Vec::new();
        if !self.is_epoch() || self.is_in_order() {
            return found;
        }
        let (first, end) = (self.runs.before_begun(), self.runs.begun());
        let asked = self.outstanding + self.wasted;
        let left = ((end - first).saturating_sub(self.opened()) as usize).saturating_sub(asked);
        let allowed = siblings::allowed(accuracy, self.opened(), FOR_EACH_OPENED_MAX);
        let wanted = allowed.saturating_sub(asked + self.refused).min(left).min(most);
        let looks = if wanted == 0 { 0 } else { (LOOKS * wanted + LOOKS_BESIDES).min((end - first) as usize) };
        for _ in 0..looks {
            if found.len() == wanted {
                break;
            }
            if !(first..end).contains(&self.cursor) {
                self.cursor = first;
            }
            if let Some(file) = self.left(self.cursor).filter(|file| free(*file)) {
                found.push(file);
            }
            self.cursor += 1;
        }
        found
    }

    /// Returns the number of opens after which a suggestion out of order was wasted: two epochs.
    pub fn awaited_touches(&self) -> u64 {
        2 * (self.runs.begun() - self.runs.before_begun()).max(SET_MIN as u64)
    }

    /// A suggestion in the order of the last epoch was used, or wasted.
    pub fn settled_next(&mut self, used: bool) {
        self.window.note(used);
    }

    /// A file was suggested out of order.
    pub fn asked_rest(&mut self) {
        self.outstanding += 1;
    }

    /// A suggestion out of order was used, or wasted.
    pub fn settled_rest(&mut self, used: bool) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.wasted += usize::from(!used);
    }

    /// A suggestion out of order will not be fetched.
    pub fn refused_rest(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.refused += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(files: impl IntoIterator<Item = u64>) -> Epochs {
        let mut epochs = Epochs::default();
        files.into_iter().for_each(|file| epochs.touch(file));
        epochs
    }

    fn files(again: Vec<Again>) -> Vec<u64> {
        again.into_iter().map(|again| again.file).collect()
    }

    #[test]
    fn the_same_order_again_is_followed() {
        let mut epochs = epochs((0..100).chain(0..10));
        assert_eq!(files(epochs.next(0.9)), [10, 11]);
        assert!(epochs.rest(0.9, 100, |_| true).is_empty());
    }

    #[test]
    fn workers_that_overtake_each_other_keep_the_order() {
        let jitter = |at: u64| at / 4 * 4 + (at % 4) * 3 % 4;
        let epochs = epochs((0..100).chain((0..40).map(jitter)));
        assert!(epochs.is_in_order());
        assert_eq!(files(epochs.next(0.9)), [40, 41]);
    }

    #[test]
    fn of_a_reshuffled_set_what_is_left_may_come() {
        let mut epochs = epochs((0..100).chain((0..20).map(|at| at * 37 % 100)));
        assert_eq!(epochs.next(0.9), []);
        let rest = epochs.rest(0.8, 1000, |file| file != 1);
        assert_eq!(rest.len(), 79, "80 files are left, and four for each opened one are allowed");
        assert!(!rest.contains(&1) && !rest.contains(&37) && rest.contains(&2));
    }

    #[test]
    fn what_is_opened_all_the_time_is_no_part_of_the_set() {
        let with_configuration = |at: u64| [at * 37 % 500].into_iter().chain(at.is_multiple_of(7).then_some(999));
        let mut epochs = epochs((0..500).chain((0..100).flat_map(with_configuration)));
        assert!(epochs.is_epoch());
        assert!(!epochs.rest(0.8, 1000, |_| true).contains(&999));
    }

    #[test]
    fn a_small_set_is_a_set() {
        let mut epochs = epochs((0..4).flat_map(|_| 0..20));
        (0..4).for_each(|file| epochs.touch(file));
        assert_eq!(files(epochs.next(0.9)), [4, 5]);
    }

    #[test]
    fn a_first_epoch_says_nothing() {
        let mut epochs = epochs(0..100);
        assert!(epochs.next(0.9).is_empty() && epochs.rest(0.9, 10, |_| true).is_empty());
    }

    #[test]
    fn the_log_is_bounded() {
        let epochs = epochs(0..LOG_MAX as u64 + 100);
        assert_eq!((epochs.log.len(), epochs.touched_at.len()), (LOG_MAX, LOG_MAX));
    }
}
