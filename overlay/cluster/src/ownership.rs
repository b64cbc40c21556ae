//! Rendezvous hashing with bounded load: which members own a range of a file.
//!
//! Each member has a score for each range, and the members with the highest scores own it. A member that joins takes
//! exactly the ranges for which its score is the highest, and those of a member that leaves go to the next ones.
//!
//! Many small files spread well by their number alone. The ranges of one big file are few for each member, and all are
//! wanted at once: there, the spread of a random choice would let the unluckiest owner decide how long a job takes to
//! start. So no member is the first owner of more than [`LOAD_BOUND`] times its share of one file; a range above that goes
//! to the next score. The ranges are dealt out in their order, so every node that knows the members and the length of
//! the file deals the same way.

use smallvec::SmallVec;
use twox_hash::XxHash3_64;

use crate::members::{Roster, Seat};

/// Bytes of a file that have owners of their own.
pub const RANGE_BYTES: u64 = 64 << 20;

/// Owners of one range: the first one fetches it, the others stand in for it in their order.
pub const RANKS: usize = 3;

/// The members that are ranked for a range: the owners, and those that come next. While members change, the next ones are
/// asked what they have before the pool is read.
pub const RANKED: usize = 8;

/// The most ranges of a file that a member owns first, as a multiple of its even share; at least one.
pub const LOAD_BOUND: f64 = 1.25;

/// The most ranges of a file that are dealt out: 4 TiB. With so many, the scores alone spread them well, and any user can make
/// a sparse file that is larger. All nodes must have the same number.
pub const DEALT_MAX: u64 = 1 << 16;

/// The most scores that are computed to deal out one file: some 50 ms of one core. A file with more ranges, for its number
/// of members, has its first owners by the score alone.
const SCORES_MAX: u64 = 1 << 24;

/// The ranked members of a range as seats of a roster. The first [`RANKS`] own it, in this order.
pub type Ranked = SmallVec<[Seat; RANKED]>;

/// Returns the owners among the ranked members of a range.
pub fn owners_of(ranked: &[Seat]) -> &[Seat] {
    &ranked[..ranked.len().min(RANKS)]
}

/// A file of a pool, the same on every node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileKey(u64);

impl FileKey {
    /// `pool` names the pool in the same way on every node, such as its URL.
    pub fn of(pool: &str, path: &[u8]) -> Self {
        Self(XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(pool.as_bytes()), path))
    }
}

/// A range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RangeKey {
    pub file: FileKey,
    /// The range begins at this multiple of [`RANGE_BYTES`].
    pub index: u64,
}

impl RangeKey {
    pub(crate) fn stable_hash(self) -> u64 {
        XxHash3_64::oneshot_with_seed(self.file.0, &self.index.to_le_bytes())
    }
}

/// Returns the number of ranges of a file; 1 for an empty one.
pub fn ranges_of(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(RANGE_BYTES).max(1)
}

/// Returns the range in which a byte is.
pub fn range_of(offset: u64) -> u64 {
    offset / RANGE_BYTES
}

/// The owners of the ranges of one file among the eligible members of one roster.
#[derive(Debug, Clone)]
pub struct FileOwners {
    file: FileKey,
    ranges: u64,
    eligible: Vec<Seat>,
    /// One entry for each range, or none: then the scores alone decide.
    dealt: Vec<Ranked>,
}

impl FileOwners {
    /// `ranges` is the number of ranges of the version of the file that is asked for.
    pub fn of(roster: &Roster, eligible: Vec<Seat>, file: FileKey, ranges: u64) -> Self {
        let mut owners = Self { file, ranges, eligible, dealt: Vec::new() };
        let count = owners.eligible.len() as u64;
        if (2..=DEALT_MAX).contains(&ranges) && count > 1 && ranges.saturating_mul(count) <= SCORES_MAX {
            owners.deal(roster);
        }
        owners
    }

    /// Returns the most ranges of this file that one member owns first; `None`: not bounded.
    pub fn most_owned(&self) -> Option<u64> {
        (!self.dealt.is_empty()).then(|| most_owned(self.ranges, self.eligible.len()))
    }

    /// Returns the ranked members of a range; fewer than [`RANKED`] if there are fewer members.
    pub fn ranked(&self, roster: &Roster, index: u64) -> Ranked {
        match self.dealt.get(index as usize) {
            Some(ranked) => ranked.clone(),
            None => ranked(roster, &self.eligible, RangeKey { file: self.file, index }.stable_hash()),
        }
    }

    fn deal(&mut self, roster: &Roster) {
        let most = most_owned(self.ranges, self.eligible.len());
        let mut owned = vec![0; roster.len()];
        for index in 0..self.ranges {
            let hash = RangeKey { file: self.file, index }.stable_hash();
            let mut owners = ranked(roster, &self.eligible, hash);
            let has_room = |seat: &Seat| owned[*seat as usize] < most;
            match owners.iter().position(has_room) {
                // The others keep their order behind the first one.
                Some(at) => owners[..=at].rotate_right(1),
                None => {
                    let roomy = self.eligible.iter().copied().filter(has_room);
                    // There is always one: together, the bounds are more than all ranges.
                    if let Some(first) = roomy.max_by_key(|seat| (score(roster.hash_of(*seat), hash), *seat)) {
                        owners.insert(0, first);
                        owners.truncate(RANKED);
                    }
                }
            }
            if let Some(first) = owners.first() {
                owned[*first as usize] += 1;
            }
            self.dealt.push(owners);
        }
    }
}

fn most_owned(ranges: u64, members: usize) -> u64 {
    ((ranges as f64 * LOAD_BOUND / members as f64).ceil() as u64).max(1)
}

fn score(node: u64, key: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(key, &node.to_le_bytes())
}

/// Returns the members with the highest scores, the highest first.
fn ranked(roster: &Roster, eligible: &[Seat], key: u64) -> Ranked {
    let mut best: SmallVec<[(u64, Seat); RANKED + 1]> = SmallVec::new();
    for &seat in eligible {
        let this = (score(roster.hash_of(seat), key), seat);
        if best.len() == RANKED && best.last().is_some_and(|last| this < *last) {
            continue;
        }
        let at = best.partition_point(|other| *other > this);
        best.insert(at, this);
        best.truncate(RANKED);
    }
    best.into_iter().map(|(_, seat)| seat).collect()
}
