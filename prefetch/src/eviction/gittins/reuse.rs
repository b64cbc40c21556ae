//! Estimates when content is used again, from the past of similar content.
//!
//! For each class of contents and each bucket of ages, it counts how many reached the bucket unused, and how many of
//! them were used in it. This is the estimator of Kaplan and Meier (1958). It also counts content that has not been
//! used *yet*, so it follows a change at once. A class with little data leans on a more general one: a class on all
//! contents with its interval, these on all contents, and these on the assumption that recency is worth something.

/// Buckets of ages. Their bounds grow by half an octave, so the last is at 2^26 uses.
pub(super) const BUCKETS: usize = 52;

/// The upper bounds of the buckets, in uses of any content.
pub(super) const BOUNDS: [u64; BUCKETS] = bounds();

const fn bounds() -> [u64; BUCKETS] {
    let mut bounds = [0; BUCKETS];
    let mut bucket = 0;
    while bucket < BUCKETS {
        let octave = bucket / 2;
        bounds[bucket] = if bucket % 2 == 0 { 2 << octave } else { 3 << octave };
        bucket += 1;
    }
    bounds
}

/// Octaves of the smoothed interval between two uses; 0: used once.
const INTERVALS: usize = 32;

/// Classes by number of uses: 1, 2, 3-4, 5-8, 9-32, more.
const FREQUENCIES: usize = 6;

const CLASSES: usize = INTERVALS * FREQUENCIES;

/// A class leans on the more general one as if it had this many observations of it.
const LEAN: f64 = 16.0;

/// The chance of a use within half an octave of ages, before anything is known. It is the same for each bucket, so the
/// chance per use falls with the age, and the order is that of LRU.
const CHANCE_UNKNOWN: f64 = 0.1;

/// The indices are recomputed after a sixteenth of all uses, within these bounds.
const RENEWAL_USES: (u64, u64) = (16, 4096);

/// All counts are halved after this many uses, or after `HALF_LIFE_EACH` for each known content if that is more.
const HALF_LIFE_USES: u64 = 1 << 17;
const HALF_LIFE_EACH: u64 = 8;

/// Fixed point of a smoothed interval: eighths of an octave.
const OCTAVE: u8 = 8;

/// The past of one content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Past {
    /// In eighths of an octave; 0: used once.
    interval: u8,
    /// Saturating.
    uses: u8,
}

impl Past {
    pub const fn once() -> Self {
        Self { interval: 0, uses: 1 }
    }

    /// Returns the past after another use, `age` uses of any content after the last one; at least 1.
    pub fn again(self, age: u64) -> Self {
        let octave = (u64::BITS - age.leading_zeros()).min(INTERVALS as u32 - 1) as u8 * OCTAVE;
        let interval = match self.interval {
            0 => octave,
            // The new interval counts for a quarter, in logarithms, so that one odd interval does not change the class.
            before => ((3 * u16::from(before) + u16::from(octave)) / 4) as u8,
        };
        Self { interval, uses: self.uses.saturating_add(1) }
    }

    fn class(self) -> usize {
        let frequency = match self.uses {
            0 | 1 => 0,
            2 => 1,
            3..=4 => 2,
            5..=8 => 3,
            9..=32 => 4,
            _ => 5,
        };
        usize::from(self.interval / OCTAVE) * FREQUENCIES + frequency
    }
}

type Row = [f64; BUCKETS];

/// Counts by bucket.
#[derive(Debug, Clone)]
struct BucketCounts {
    reached: Row,
    used: Row,
}

impl BucketCounts {
    const NONE: Self = Self { reached: [0.0; BUCKETS], used: [0.0; BUCKETS] };

    fn add(&mut self, other: &Self) {
        self.reached.iter_mut().zip(&other.reached).for_each(|(sum, count)| *sum += count);
        self.used.iter_mut().zip(&other.used).for_each(|(sum, count)| *sum += count);
    }

    /// Returns the chance of a use in each bucket for content that reaches it. `general` counts as `lean` observations.
    fn chances(&self, general: &Row, lean: f64) -> Row {
        std::array::from_fn(|b| ((self.used[b] + lean * general[b]) / (self.reached[b] + lean)).min(1.0))
    }
}

/// The index at the two ends of each bucket.
#[derive(Debug, Clone)]
struct Index {
    begin: Row,
    end: Row,
    /// It was computed at least once.
    is_known: bool,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Reuse {
    counts: Vec<BucketCounts>,
    indices: Vec<Index>,
    /// For all contents of an interval; used for classes without data at the last renewal.
    general: Vec<Index>,
    /// For all contents; used for intervals without data.
    of_all: Index,
    renew_at: u64,
    halved_at: u64,
}

impl Reuse {
    pub fn new() -> Self {
        Self {
            counts: vec![BucketCounts::NONE; CLASSES],
            indices: vec![Index::UNKNOWN; CLASSES],
            general: vec![Index::UNKNOWN; INTERVALS],
            of_all: Index::UNKNOWN,
            renew_at: RENEWAL_USES.0,
            halved_at: 0,
        }
    }

    /// Notes that content of this past was not used up to the age at which the bucket begins.
    pub fn reached(&mut self, past: Past, bucket: usize) {
        self.counts[past.class()].reached[bucket] += 1.0;
    }

    /// Notes that content of this past was used in this bucket.
    pub fn used(&mut self, past: Past, bucket: usize) {
        self.counts[past.class()].used[bucket] += 1.0;
    }

    /// Advances the time: `clock` in uses, `contents` is the number of known contents.
    pub fn tick(&mut self, clock: u64, contents: usize) {
        if clock < self.renew_at {
            return;
        }
        self.renew_at = clock + (clock / 16).clamp(RENEWAL_USES.0, RENEWAL_USES.1);
        if clock - self.halved_at > HALF_LIFE_USES.max(HALF_LIFE_EACH * contents as u64) {
            self.halved_at = clock;
            for counts in &mut self.counts {
                counts.reached.iter_mut().chain(&mut counts.used).for_each(|count| *count /= 2.0);
            }
        }
        // No content is older than the clock.
        let buckets = BOUNDS.partition_point(|&bound| bound <= clock) + 2;
        self.renew(buckets.min(BUCKETS));
    }

    fn renew(&mut self, buckets: usize) {
        let mut all = BucketCounts::NONE;
        self.counts.iter().for_each(|counts| all.add(counts));
        let doubt = |counts: &BucketCounts| std::array::from_fn(|bucket| 1.0 / (counts.reached[bucket] + LEAN));
        let doubt_of_all = doubt(&all);
        let all = all.chances(&[CHANCE_UNKNOWN; BUCKETS], 1.0);
        self.of_all.renew(&all, &doubt_of_all, buckets);
        for interval in 0..INTERVALS {
            let classes = interval * FREQUENCIES..(interval + 1) * FREQUENCIES;
            let mut of_interval = BucketCounts::NONE;
            self.counts[classes.clone()].iter().for_each(|counts| of_interval.add(counts));
            let general = of_interval.chances(&all, LEAN);
            if of_interval.reached[0] > 0.0 {
                self.general[interval].renew(&general, &doubt(&of_interval), buckets);
            }
            for class in classes {
                let counts = &self.counts[class];
                if counts.reached[0] > 0.0 {
                    self.indices[class].renew(&counts.chances(&general, LEAN), &doubt(counts), buckets);
                }
            }
        }
    }

    /// Returns the index of content with this past, bucket and age, per use. Finite, and not negative.
    pub fn index(&self, past: Past, bucket: usize, age: u64) -> f64 {
        let class = past.class();
        let known = [&self.indices[class], &self.general[class / FREQUENCIES]].into_iter().find(|index| index.is_known);
        let index = known.unwrap_or(&self.of_all);
        let begin = bucket.checked_sub(1).map_or(0, |before| BOUNDS[before]);
        let share = (age.saturating_sub(begin) as f64 / (BOUNDS[bucket] - begin) as f64).min(1.0);
        index.begin[bucket] + share * (index.end[bucket] - index.begin[bucket])
    }
}

impl Index {
    const UNKNOWN: Self = Self { begin: [0.0; BUCKETS], end: [0.0; BUCKETS], is_known: false };

    /// Computes the index from the chance of each bucket, for the first `buckets` of them.
    ///
    /// The index is the highest ratio of uses to the time that the space is held, over all times at which one might
    /// evict: Gittins, "Bandit processes and dynamic allocation indices", Journal of the Royal Statistical Society B
    /// 41(2), 1979. If the chance falls with the age, the index is the current chance, so that the order is that of
    /// LRU. If content is used again after a known time, the index grows as that time comes nearer, so that the newest
    /// goes first.
    fn renew(&mut self, chances: &Row, doubt: &Row, buckets: usize) {
        self.is_known = true;
        let width = |bucket: usize| (BOUNDS[bucket] - if bucket == 0 { 0 } else { BOUNDS[bucket - 1] }) as f64;
        for first in 0..buckets {
            let (mut uses, mut time, mut left, mut best) = (0.0, 0.0, 1.0, 0.0f64);
            for (bucket, chance) in chances.iter().enumerate().take(buckets).skip(first) {
                uses += left * chance;
                // A use in a bucket is taken to be in its middle.
                time += left * width(bucket) * (1.0 - chance / 2.0);
                left *= 1.0 - chance;
                best = best.max(uses / time);
            }
            self.begin[first] = best;
        }
        for bucket in 0..buckets {
            // If most contents are used in a bucket, one that is still unused at its end is due now.
            let due = chances[bucket] / width(bucket) / (1.0 - chances[bucket] + doubt[bucket]);
            self.end[bucket] = due.max(self.begin[(bucket + 1).min(buckets - 1)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index_of(chances: Row) -> Index {
        let mut index = Index::UNKNOWN;
        index.renew(&chances, &[0.01; BUCKETS], BUCKETS);
        index
    }

    #[test]
    fn where_chances_fall_with_age_the_oldest_is_worth_least() {
        let index = index_of([0.3; BUCKETS]);
        // The first bucket is wider than the second, so it is left out.
        assert!(index.begin[1..].is_sorted_by(|a, b| a >= b), "{:?}", index.begin);
    }

    #[test]
    fn where_content_comes_back_after_a_known_time_the_newest_is_worth_least() {
        let mut chances = [0.0; BUCKETS];
        chances[20] = 1.0;
        let index = index_of(chances);
        assert!(index.begin[..=20].is_sorted() && index.end[20] > index.begin[20]);
    }

    #[test]
    fn a_class_that_is_new_is_worth_what_those_like_it_are() {
        let mut reuse = Reuse::new();
        let known = (0..4).fold(Past::once(), |past, _| past.again(12));
        for _ in 0..50 {
            (0..=5).for_each(|bucket| reuse.reached(known, bucket));
            reuse.used(known, 5);
        }
        reuse.tick(1000, 50);
        let used_more = (0..4).fold(known, |past, _| past.again(12));
        let (of_known, of_new) = (reuse.index(known, 3, 5), reuse.index(used_more, 3, 5));
        assert!(known.class() != used_more.class() && of_new > 0.8 * of_known, "{of_new} {of_known}");
        let other = Past::once().again(1 << 20);
        assert!(reuse.index(other, 3, 5) > 0.0);
    }

    #[test]
    fn bounds_grow_by_half_octaves() {
        assert_eq!(BOUNDS[..6], [2, 3, 4, 6, 8, 12]);
        assert!(BOUNDS.is_sorted());
    }

    #[test]
    fn one_odd_interval_does_not_make_another_content() {
        let regular = (0..4).fold(Past::once(), |past, _| past.again(1000));
        assert_eq!(regular.again(4000).interval / OCTAVE, regular.interval / OCTAVE);
    }
}
