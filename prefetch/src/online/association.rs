//! Files that are opened together now and then, in any directories and in any order of names.
//!
//! After "MITHRIL: Mining Sporadic Associations for Cache Prefetching" (Yang, Karimi, Sæmundsson, Wildani, Vigfusson,
//! SoCC 2017): the last opens of files that are neither rare nor frequent are recorded, and mined now and then for
//! files whose opens occur together. The differences: opens are counted per reader, so that simultaneous opens of two
//! readers do not mix; a pair has a direction, and a probability, which is the share of the opens of the first that the
//! second follows; and mining does not wait until the table is full, which a quiet mount may never reach.

use lru::LruCache;

/// Opens of a file from which on it is mined, and up to which: MITHRIL's R and S. With two, files that are read in a
/// random order are often near each other both times. A file that is opened more than eight times in so short a time is
/// resident anyway. Eight opens fit one cache line of a processor.
const SUPPORT_MIN: usize = 3;
const SUPPORT_MAX: usize = 8;

/// Opens by the same reader within which the second file follows the first: the lookahead range of MITHRIL, which is 20
/// to 100 for its block traces.
const LOOKAHEAD: u64 = 32;

/// Files whose opens are recorded, 128 bytes each: 1 MiB.
pub(super) const ROWS_MAX: usize = 8192;

/// Recorded files that trigger mining, and opens that trigger it with fewer files. The latter is never less than the
/// number of such files, so that an open costs no more than the comparison of one of them with its neighbours.
const MINED_MAX: usize = 512;
const MINED_AFTER_TOUCHES: u64 = 256;

/// Files that have followers, about 300 bytes each with them: 5 MiB.
pub(super) const LEADERS_MAX: usize = 1 << 14;

/// Followers of one file. MITHRIL has two or three; a source file includes more headers than that.
pub(super) const FOLLOWERS_MAX: usize = 8;

/// The share of a file's opens that a follower must follow.
const PROBABILITY_MIN: f64 = 0.5;

/// The most outstanding suggestions of one reader. The followers of all files that were opened within the lookahead
/// range are a multiple of the range, but most of them are the same files.
pub(super) const OUTSTANDING_MAX: usize = 4 * LOOKAHEAD as usize;

/// Opens by its reader after which a suggestion was wrong.
pub(super) const AWAITED_TOUCHES: u64 = 4 * LOOKAHEAD;

/// The last opens of a file.
#[derive(Debug, Clone, Copy, Default)]
struct RecentOpens {
    /// In logical time, which starts for each reader at a value far from those of all other readers. Ascending.
    at: [u64; SUPPORT_MAX],
    opens: usize,
}

impl RecentOpens {
    /// Inserts an open in order: opens of several readers arrive in any order.
    fn add(&mut self, at: u64) {
        let place = self.times().partition_point(|before| *before <= at);
        self.at.copy_within(place..self.opens, place + 1);
        self.at[place] = at;
        self.opens += 1;
    }

    fn times(&self) -> &[u64] {
        &self.at[..self.opens]
    }
}

/// A file that follows another one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Follower {
    pub file: u64,
    /// How often that was seen when it was last mined.
    pub times: u32,
    /// The share of the opens of the first that it followed.
    pub probability: f64,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Association {
    rows: LruCache<u64, RecentOpens>,
    /// Rows with enough opens; an estimate, since the table may have dropped some.
    ready: usize,
    touches_since: u64,
    /// For each file its followers, the last mined first.
    leaders: LruCache<u64, Vec<Follower>>,
}

impl Association {
    pub fn new() -> Self {
        Self { rows: LruCache::unbounded(), ready: 0, touches_since: 0, leaders: LruCache::unbounded() }
    }

    /// Records an open at the logical time `at`.
    pub fn record(&mut self, file: u64, at: u64) {
        let row = self.rows.get_or_insert_mut(file, RecentOpens::default);
        if row.opens == SUPPORT_MAX {
            // Too frequent. Its mined followers stay.
            *row = RecentOpens::default();
            self.ready = self.ready.saturating_sub(1);
        }
        row.add(at);
        self.ready += usize::from(row.opens == SUPPORT_MIN);
        if self.rows.len() > ROWS_MAX {
            self.rows.pop_lru();
        }
        self.touches_since += 1;
        if self.ready >= MINED_MAX {
            self.mine();
            let mined: Vec<u64> = self.ready_rows().map(|(file, _)| file).collect();
            for file in mined {
                self.rows.pop(&file);
            }
            self.ready = 0;
        } else if self.ready > 1 && self.touches_since >= MINED_AFTER_TOUCHES.max(self.ready as u64) {
            self.mine();
        }
    }

    fn ready_rows(&self) -> impl Iterator<Item = (u64, RecentOpens)> {
        self.rows.iter().filter(|(_, row)| row.opens >= SUPPORT_MIN).map(|(file, row)| (*file, *row))
    }

    /// Finds followers. As in MITHRIL, two files are compared if their first opens are near each other. They are also
    /// compared if their last opens are, so that one separate open does not hide a pair.
    fn mine(&mut self) {
        self.touches_since = 0;
        let mut rows: Vec<(u64, RecentOpens)> = self.ready_rows().collect();
        self.ready = rows.len();
        for end in [0, 1] {
            let near = |row: &RecentOpens| if end == 0 { row.at[0] } else { row.at[row.opens - 1] };
            rows.sort_unstable_by_key(|(file, row)| (near(row), *file));
            for (at, (first, row)) in rows.iter().enumerate() {
                let after = &rows[at + 1..];
                let within = after.partition_point(|(_, other)| near(other) - near(row) <= LOOKAHEAD);
                // From far to near, so that the nearest followers stay.
                for (second, other) in after[..within].iter().rev() {
                    self.compare((*first, row), (*second, other));
                    self.compare((*second, other), (*first, row));
                }
            }
        }
    }

    fn compare(&mut self, (first, row): (u64, &RecentOpens), (second, other): (u64, &RecentOpens)) {
        let times = followed(row.times(), other.times());
        let probability = times as f64 / row.opens as f64;
        if times >= SUPPORT_MIN && probability >= PROBABILITY_MIN {
            self.pair(first, Follower { file: second, times: times as u32, probability });
        }
    }

    fn pair(&mut self, first: u64, follower: Follower) {
        let followers = self.leaders.get_or_insert_mut(first, Vec::new);
        followers.retain(|known| known.file != follower.file);
        followers.insert(0, follower);
        followers.truncate(FOLLOWERS_MAX);
        if self.leaders.len() > LEADERS_MAX {
            self.leaders.pop_lru();
        }
    }

    /// Returns the files that are opened after this one.
    pub fn followers(&mut self, file: u64) -> &[Follower] {
        self.leaders.get(&file).map_or(&[], Vec::as_slice)
    }

    /// Returns the numbers of rows and of files with followers.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        (self.rows.len(), self.leaders.len())
    }
}

/// Returns how many of the `first` have one of the `second` soon after them. Both ascend.
fn followed(first: &[u64], second: &[u64]) -> usize {
    let mut next = 0;
    let follows = |at: &&u64| {
        while second.get(next).is_some_and(|other| other <= at) {
            next += 1;
        }
        second.get(next).is_some_and(|other| other - **at <= LOOKAHEAD)
    };
    first.iter().filter(follows).count()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::seq::SliceRandom;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Records opens one after the other.
    fn record(association: &mut Association, clock: &mut u64, files: impl IntoIterator<Item = u64>) {
        for file in files {
            *clock += 1;
            association.record(file, *clock);
        }
    }

    #[test]
    fn what_was_opened_together_three_times_is_associated() {
        let (mut association, mut clock) = (Association::new(), 0);
        for round in 0..4 {
            record(&mut association, &mut clock, [1, 2, 3]);
            record(&mut association, &mut clock, (0..80).map(|at| 1000 + round * 100 + at));
        }
        let followers: Vec<u64> = association.followers(1).iter().map(|follower| follower.file).collect();
        assert!(followers.contains(&2) && followers.contains(&3), "{followers:?}");
        assert_eq!(association.followers(3), []);
        assert_eq!(association.followers(1000), []);
    }

    #[test]
    fn what_is_near_by_chance_is_not() {
        let (mut association, mut clock) = (Association::new(), 0);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut files: Vec<u64> = (0..2000).collect();
        for _ in 0..6 {
            files.shuffle(&mut random);
            record(&mut association, &mut clock, files.iter().copied());
        }
        let pairs: usize = (0..2000).map(|file| association.followers(file).len()).sum();
        assert!(pairs < 200, "{pairs} pairs of 2,000 files that are read in random orders");
    }

    #[test]
    fn opens_of_different_readers_are_far_from_each_other() {
        let mut association = Association::new();
        for round in 0..400 {
            association.record(1, round);
            association.record(2, (1 << 40) + round);
        }
        assert_eq!(association.followers(1), []);
    }

    #[test]
    fn the_second_follows_the_first_and_not_the_other_way_round() {
        assert_eq!(followed(&[1, 100, 200], &[2, 132, 233]), 2);
        assert_eq!(followed(&[2, 132], &[1, 100]), 0);
        assert_eq!(followed(&[], &[1]), 0);
    }

    #[test]
    fn tables_are_bounded() {
        let (mut association, mut clock) = (Association::new(), 0);
        for _ in 0..4 {
            for base in 0..300u64 {
                (0..3).for_each(|_| record(&mut association, &mut clock, (0..100).map(|at| base * 100 + at)));
            }
        }
        let (rows, leaders) = association.counts();
        assert!(rows <= ROWS_MAX && leaders <= LEADERS_MAX && leaders > LEADERS_MAX / 2, "{rows} {leaders}");
    }
}
