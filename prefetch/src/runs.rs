//! Detects a set that is read over and over, each content once in an epoch.
//!
//! It is not necessary to learn when each content is used again: whatever the order, content that was not used in this
//! epoch is used before content that was. A *run* is a sequence of uses without a repetition. An epoch is a run that is
//! longer than the number of resident contents, so that the cache gains nothing from recency, and that is followed by a
//! run over the same contents.

/// A run ends when more than one in this many of its uses repeats a recent use: at most this share of hits may be lost
/// to the assumption that a run uses nothing twice.
const REPETITIONS_ONE_IN: u64 = 100;

/// A run goes over the contents of the previous one if at most one in this many uses is of other content.
const STRANGERS_ONE_IN: u64 = 8;

/// Uses after which the first epoch that is like its predecessor is recognised; later epochs are trusted from their
/// first use on. Runs of a few uses occur everywhere.
const KNOWN_USES: u64 = 6;

/// The current run and the previous one. Times are counts of uses.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    begun: u64,
    repetitions: u64,
    /// Uses in this run of content that was used in the previous one.
    returned: u64,
    before_begun: u64,
    before_length: u64,
    /// The previous run went over the contents of its own predecessor.
    before_returned: bool,
}

/// The position of content in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// Used neither in this epoch nor in the last one: no longer part of the set.
    Stale,
    /// Used in this epoch: all other contents are used before it.
    Used,
    /// Used in the last epoch, and not yet in this one.
    Pinned,
}

impl Runs {
    /// Notes that content that was used at `used_at` is used again now.
    pub fn used_again(&mut self, used_at: u64, now: u64) {
        let length = now - self.begun;
        if used_at < self.begun {
            self.returned += u64::from(used_at >= self.before_begun);
        } else if used_at + 1 >= now {
            self.returned += 1; // a file that is opened twice in a row
        } else if (now - used_at) * 2 > length {
            self.end(now);
        } else {
            self.repetitions += 1;
            if self.repetitions * REPETITIONS_ONE_IN > length {
                self.end(now);
            }
        }
    }

    fn end(&mut self, now: u64) {
        let (before_length, before_returned) = (now - self.begun, self.is_known(now) && self.goes_over_the_same(now));
        *self =
            Self { begun: now, repetitions: 0, returned: 1, before_begun: self.begun, before_length, before_returned };
    }

    /// Returns whether this run is an epoch of a set of which only `residents` contents are resident.
    pub fn is_epoch(&self, now: u64, residents: usize) -> bool {
        let known = self.before_returned || self.is_known(now);
        self.before_length > residents as u64 && known && self.goes_over_the_same(now)
    }

    /// Returns the time at which this run began.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns the time at which the previous run began.
    pub fn before_begun(&self) -> u64 {
        self.before_begun
    }

    fn is_known(&self, now: u64) -> bool {
        now - self.begun >= KNOWN_USES
    }

    fn goes_over_the_same(&self, now: u64) -> bool {
        let length = now - self.begun;
        length.saturating_sub(self.returned) * STRANGERS_ONE_IN <= length
    }

    pub fn standing(&self, used_at: u64) -> Standing {
        match used_at {
            _ if used_at < self.before_begun => Standing::Stale,
            _ if used_at < self.begun => Standing::Pinned,
            _ => Standing::Used,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn runs(uses: impl IntoIterator<Item = u64>) -> (Runs, u64) {
        let (mut runs, mut used_at, mut now) = (Runs::default(), HashMap::new(), 0);
        for key in uses {
            if let Some(before) = used_at.insert(key, now) {
                runs.used_again(before, now);
            }
            now += 1;
        }
        (runs, now)
    }

    #[test]
    fn an_epoch_begins_with_the_first_content_that_comes_back() {
        let (runs, now) = runs((0..100).chain(0..30));
        assert!(runs.is_epoch(now, 50) && !runs.is_epoch(now, 100));
        assert_eq!(runs.standing(99), Standing::Pinned);
        assert_eq!(runs.standing(100), Standing::Used);
    }

    #[test]
    fn a_scan_is_no_epoch_and_neither_is_what_is_used_soon_again() {
        let (scan, now) = runs(0..1000);
        assert!(!scan.is_epoch(now, 50));
        let (local, now) = runs((0..1000u64).map(|at| at.saturating_sub(at % 3 * 10)));
        assert!(!local.is_epoch(now, 50));
    }
}
