//! One reader in one directory: which files it has opened, and how.

use std::collections::HashSet;

use super::listing::{DirectoryListing, NOTHING};
use super::sequence::{Habit, Sequence};
use super::siblings;

/// The most pairs of reader and directory, 4 KiB each.
pub(super) const TRACKS_MAX: usize = 4096;

/// The most opened files that all tracks remember, at most 18 bytes each: 18 MiB.
pub(super) const TOUCHED_MAX: usize = 1 << 20;

/// Consecutive opens of already opened files that begin a new pass over the directory. If files are drawn with
/// repetition, three in a row occur only when most of the directory was opened, and then they do no harm.
const PASS_REPEATS: u32 = 3;

/// The most kinds of files that are distinguished in one directory.
const KINDS_MAX: usize = 16;

/// Positions that are searched for each wanted sibling, and in addition.
const LOOKS: usize = 2;
const LOOKS_BESIDES: usize = 16;

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Track {
    /// Files that were opened in this pass.
    touched: HashSet<u64>,
    repeats: u32,
    /// The reader's opens, in any directory, when this pass began.
    begun: u64,
    pub sequence: Sequence,
    /// The first file in this directory, and the reader's habit from the previous one, until there is a listing.
    entered: Option<(u64, Habit)>,
    /// Opens in this pass since there is a listing; `in_order`: those of them that continued a stream.
    listed: usize,
    in_order: usize,
    /// How many of them would have continued a stream if the files had been opened in no order.
    by_chance: f64,
    /// Files that were opened in this pass, by kind.
    kinds: Vec<(u16, u32)>,
    version: u64,
    /// Where the search for untouched siblings continues.
    cursor: u32,
    /// Siblings that were suggested and are outstanding.
    outstanding: usize,
    /// Siblings of this pass that were wasted.
    wasted: usize,
    /// Used siblings that were not yet reported.
    used: usize,
    /// Recently refused siblings. Each open forgives one; until then they limit the suggestions to a caller that has no
    /// room.
    refused: usize,
}

/// The expectation for the siblings of a directory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Others {
    pub opened: u32,
    pub of: usize,
    pub probability: f64,
    /// How many more may be suggested.
    pub wanted: usize,
}

impl Track {
    pub fn touched_count(&self) -> usize {
        self.touched.len()
    }

    pub fn is_touched(&self, file: u64) -> bool {
        self.touched.contains(&file)
    }

    /// Notes that the reader begins this directory with this file, after it went through another one.
    pub fn enter(&mut self, file: u64, habit: Habit) {
        self.entered = Some((file, habit));
    }

    /// Returns whether it is still open if the reader goes on as in the previous directory.
    pub fn is_entered(&self) -> bool {
        self.entered.is_some()
    }

    /// Notes an open; true if it continued a stream. `now`: the reader's opens, in any directory.
    pub fn touch(&mut self, file: u64, listing: Option<&DirectoryListing>, now: u64) -> bool {
        self.refused = self.refused.saturating_sub(1);
        if self.touched.contains(&file) {
            self.repeats += 1;
            if self.repeats < PASS_REPEATS {
                return false;
            }
            self.begin_pass();
        }
        self.repeats = 0;
        if self.touched.is_empty() {
            self.begun = now;
        }
        self.touched.insert(file);
        let Some(listing) = listing else {
            self.sequence.touched_unlisted(file);
            return false;
        };
        self.count(file, listing);
        if listing.position(file).is_some() {
            self.listed += 1;
            self.by_chance += self.sequence.follows_by_chance(listing);
        }
        let follows = self.sequence.touched(file, listing, self.entered.take());
        self.in_order += usize::from(follows);
        follows
    }

    /// Forgets what was opened, but not the sequence, whose position stays valid.
    fn begin_pass(&mut self) {
        self.touched = HashSet::new();
        (self.listed, self.in_order, self.by_chance, self.wasted, self.repeats) = (0, 0, 0.0, 0, 0);
        self.kinds.clear();
    }

    fn count(&mut self, file: u64, listing: &DirectoryListing) {
        if self.version != listing.version {
            self.version = listing.version;
            let mut kinds = Vec::new();
            // In the order of the listing, so that the selection of kinds is deterministic.
            let mut positions: Vec<i64> = self.touched.iter().filter_map(|file| listing.position(*file)).collect();
            positions.sort_unstable();
            positions.iter().for_each(|at| count_kind(&mut kinds, listing.get(*at).map(|(_, kind)| kind)));
            self.kinds = kinds;
        } else {
            count_kind(&mut self.kinds, listing.kind(file));
        }
    }

    /// Returns whether more than half of the opens that chance does not explain continued a stream (the kappa of
    /// Cohen). In a small directory, every file is near some stream.
    fn is_in_order(&self) -> bool {
        let unexplained = self.listed as f64 - self.by_chance;
        self.listed == 0 || (unexplained > 0.0 && self.in_order as f64 - self.by_chance >= 0.5 * unexplained)
    }

    /// Returns the expectation for the unopened files. `None` if a stream explains the opens, or if no file is left.
    /// `accuracy`: the share of such suggestions that is used.
    pub fn others(&self, listing: &DirectoryListing, accuracy: f64) -> Option<Others> {
        let known = self.kinds.iter().filter(|(kind, opened)| *kind != NOTHING && *opened >= siblings::OPENED_MIN);
        let (opened, of) = known.fold((0, 0), |(opened, of), kind| (opened + kind.1, of + listing.of_kind(kind.0)));
        if opened == 0 || of <= opened as usize || self.is_in_order() {
            return None;
        }
        let probability = siblings::probability(opened, of, accuracy);
        let allowed = siblings::allowed(probability, u64::from(opened), siblings::FOR_EACH_OPENED_MAX);
        let left = (of - opened as usize).saturating_sub(self.outstanding + self.wasted);
        let wanted = allowed.saturating_sub(self.outstanding + self.wasted + self.refused).min(left);
        Some(Others { opened, of, probability, wanted })
    }

    /// Returns how many of the reader's opens, in any directory, it takes to open this many files in this directory.
    pub fn opens_for(&self, files: usize, now: u64) -> u64 {
        let opened = self.touched.len().max(1) as u64;
        files as u64 * ((now - self.begun) / opened + 1)
    }

    /// Returns at most `wanted` files of the opened kinds that are `free`, from where the last search stopped.
    pub fn untouched(&mut self, listing: &DirectoryListing, wanted: usize, free: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut found = Vec::new();
        if wanted == 0 {
            return found;
        }
        let looks = (LOOKS * wanted + LOOKS_BESIDES).min(listing.len());
        for _ in 0..looks {
            let Some((file, kind)) = listing.get(i64::from(self.cursor)) else {
                self.cursor = 0;
                continue;
            };
            self.cursor += 1;
            let is_wanted = self.kinds.iter().any(|(of, opened)| *of == kind && *opened >= siblings::OPENED_MIN);
            if kind != NOTHING && is_wanted && !self.touched.contains(&file) && free(file) {
                found.push(file);
                if found.len() == wanted {
                    break;
                }
            }
        }
        found
    }

    /// A sibling was suggested.
    pub fn asked(&mut self) {
        self.outstanding += 1;
    }

    /// A suggested sibling was used, or wasted. Returns numbers of used and wasted ones only after a waste: as long as
    /// all settled ones were used, many of the outstanding ones may still be wasted.
    pub fn settled(&mut self, used: bool) -> Option<(usize, usize)> {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.used += usize::from(used);
        self.wasted += usize::from(!used);
        (!used).then(|| (std::mem::take(&mut self.used), 1))
    }

    /// Returns the number of used siblings that were not reported.
    pub fn used_untold(&self) -> usize {
        self.used
    }

    /// A suggested sibling will not be fetched.
    pub fn refused(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.refused += 1;
    }
}

fn count_kind(kinds: &mut Vec<(u16, u32)>, kind: Option<u16>) {
    let Some(kind) = kind else { return };
    if let Some((_, opened)) = kinds.iter_mut().find(|(known, _)| *known == kind) {
        *opened += 1;
    } else if kinds.len() < KINDS_MAX {
        kinds.push((kind, 1));
    }
}
