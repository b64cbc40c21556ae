//! One reader in one directory: what it has opened there, and how.

use std::collections::HashSet;

use super::listing::{Listing, NOTHING};
use super::sequence::{Habit, Sequence};
use super::siblings;

/// Readers in directories that are kept, 4 KiB each.
pub(super) const TRACKS_MAX: usize = 4096;

/// Opened files that all of them may remember, 18 bytes each at most: 18 MiB.
pub(super) const TOUCHED_MAX: usize = 1 << 20;

/// Opens of what was opened before, one after the other, that begin a new pass over the directory. Where files are
/// drawn with repetition, three in a row come when most of it was opened, and then no harm is done.
const PASS_REPEATS: u32 = 3;

/// Kinds of files that are told apart in one directory.
const KINDS_MAX: usize = 16;

/// Positions that are looked at for untouched siblings for each one that is wanted, and besides.
const LOOKS: usize = 2;
const LOOKS_BESIDES: usize = 16;

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Track {
    /// In this pass.
    touched: HashSet<u64>,
    repeats: u32,
    /// Opens of its reader, anywhere, when this pass began.
    begun: u64,
    pub sequence: Sequence,
    /// Its first file, and how its reader went through the directory before, until there is a listing.
    entered: Option<(u64, Habit)>,
    /// Opens in this pass since there is a listing; and of those, the ones that continued a stream.
    listed: usize,
    in_order: usize,
    /// How many of them would have, had the files been opened in no order.
    by_chance: f64,
    /// Files that were opened in this pass, by kind.
    kinds: Vec<(u16, u32)>,
    version: u64,
    /// Where the search for untouched siblings goes on.
    cursor: u32,
    /// Siblings that were suggested and are outstanding.
    outstanding: usize,
    /// Of those of this pass: wasted.
    wasted: usize,
    /// Used, and not yet told.
    used: usize,
    /// Refused lately: one is forgiven with every open, so that a caller that has no room is not asked for ever more.
    refused: usize,
}

/// What the siblings of a directory are worth.
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

    /// The reader begins here with this file, after it went through another directory.
    pub fn enter(&mut self, file: u64, habit: Habit) {
        self.entered = Some((file, habit));
    }

    /// Whether it is still to be seen if the reader goes on as before.
    pub fn is_entered(&self) -> bool {
        self.entered.is_some()
    }

    /// Notes an open; true if it continued a stream. `now`: opens of its reader, anywhere.
    pub fn touch(&mut self, file: u64, listing: Option<&Listing>, now: u64) -> bool {
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

    /// Forgets what was opened. Of the sequence nothing: it is where it is.
    fn begin_pass(&mut self) {
        self.touched = HashSet::new();
        (self.listed, self.in_order, self.by_chance, self.wasted, self.repeats) = (0, 0, 0.0, 0, 0);
        self.kinds.clear();
    }

    fn count(&mut self, file: u64, listing: &Listing) {
        if self.version != listing.version {
            self.version = listing.version;
            let mut kinds = Vec::new();
            // In the order of the listing, so that it is the same each time which kinds are told apart.
            let mut positions: Vec<i64> = self.touched.iter().filter_map(|file| listing.position(*file)).collect();
            positions.sort_unstable();
            positions.iter().for_each(|at| count_kind(&mut kinds, listing.get(*at).map(|(_, kind)| kind)));
            self.kinds = kinds;
        } else {
            count_kind(&mut self.kinds, listing.kind(file));
        }
    }

    /// Whether more than half of the opens for which chance does not account continued a stream (the kappa of Cohen).
    /// In a small directory everything is near some stream.
    fn is_in_order(&self) -> bool {
        let unexplained = self.listed as f64 - self.by_chance;
        self.listed == 0 || (unexplained > 0.0 && self.in_order as f64 - self.by_chance >= 0.5 * unexplained)
    }

    /// What to think of the files that were not opened. `None` where a stream explains what was, or nothing is left.
    /// `accuracy`: what share of such suggestions is used.
    pub fn others(&self, listing: &Listing, accuracy: f64) -> Option<Others> {
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

    /// Opens of its reader, anywhere, that it takes to open so many files here.
    pub fn opens_for(&self, files: usize, now: u64) -> u64 {
        let opened = self.touched.len().max(1) as u64;
        files as u64 * ((now - self.begun) / opened + 1)
    }

    /// At most `wanted` files of the kinds that were opened, of those that are `free`, from where it stopped last.
    pub fn untouched(&mut self, listing: &Listing, wanted: usize, free: impl Fn(u64) -> bool) -> Vec<u64> {
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

    /// A sibling that was suggested was used, or wasted. Says how many were used and wasted if that tells something:
    /// while all are used that have been settled, the others may be so many that will not be.
    pub fn settled(&mut self, used: bool) -> Option<(usize, usize)> {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.used += usize::from(used);
        self.wasted += usize::from(!used);
        (!used).then(|| (std::mem::take(&mut self.used), 1))
    }

    /// Siblings that were used, of which nothing was told.
    pub fn used_untold(&self) -> usize {
        self.used
    }

    /// A sibling that was suggested will not be brought in.
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
