//! The runs in which files were used, as bit masks: how predictable that was, and how probable the next use is.

use super::{all, weight};

/// The weight of an estimate from the frequency, in uses, against what followed on the same history before.
const PRIOR_USES: f64 = 4.0;

/// The share of an interrupted run's files that the run which it is compared with must have used, too.
const BEGUN_SHARE_MIN: f64 = 0.9;

/// The number of files for each mask. Bit 0 is the newest run.
#[derive(Clone)]
pub(super) struct Masks {
    counts: [u32; 256],
    /// A bit for each mask that occurs: most templates have one or two.
    present: [u64; 4],
    runs: usize,
}

impl Masks {
    pub fn new(runs: usize) -> Self {
        Self { counts: [0; 256], present: [0; 4], runs }
    }

    pub fn add(&mut self, mask: u8) {
        self.counts[usize::from(mask)] += 1;
        self.present[usize::from(mask / 64)] |= 1 << (mask % 64);
    }

    /// Sorts pairs of a key and runs, and counts each key once with all its runs.
    pub fn of_pairs(pairs: &mut [(u64, u8)], runs: usize) -> Self {
        pairs.sort_unstable_by_key(|(key, _)| *key);
        let mut masks = Self::new(runs);
        for same in pairs.chunk_by(|a, b| a.0 == b.0) {
            masks.add(same.iter().fold(0, |mask, (_, bits)| mask | bits));
        }
        masks
    }

    fn each(&self) -> Vec<(u8, f64)> {
        let mut out = Vec::with_capacity(8);
        for (begin, mut word) in [0, 64, 128, 192].into_iter().zip(self.present) {
            while word != 0 {
                let mask = begin + word.trailing_zeros() as u8;
                out.push((mask, f64::from(self.counts[usize::from(mask)])));
                word &= word - 1;
            }
        }
        out
    }

    /// Returns how well each run would have been predicted from those before it: the harmonic mean of coverage and
    /// accuracy (F1), 0 to 1; newer runs count more. `None` if no run with a predecessor used anything.
    pub fn score(&self) -> Option<f64> {
        let (mut sum, mut weights) = (0.0, 0.0);
        let each = self.each();
        for run in 0..self.runs.saturating_sub(1) {
            let (mut hit, mut expected, mut used) = (0.0, 0.0, 0.0);
            let before = weight(all(self.runs - run - 1));
            for &(mask, count) in &each {
                let probability = count * weight((u32::from(mask) >> (run + 1)) as u8) / before;
                let is_used = f64::from(mask >> run & 1);
                hit += probability * is_used;
                expected += probability;
                used += count * is_used;
            }
            if used > 0.0 {
                let weight = weight(1 << run);
                sum += weight * 2.0 * hit / (expected + used);
                weights += weight;
            }
        }
        (weights > 0.0).then(|| sum / weights)
    }

    /// Returns the run that was interrupted before it had read everything: it used less than half of what another run
    /// used, and hardly anything else. Such a run says nothing about the next one. If there are two such runs, the job
    /// is sometimes small, and none is returned.
    pub fn broken_off(&self) -> Option<usize> {
        let used = |runs: u8| -> f64 {
            self.each().into_iter().filter(|(mask, _)| mask & runs == runs).map(|(_, count)| count).sum()
        };
        let begun = |run: usize, of: usize| {
            let own = used(1 << run);
            own * 2.0 < used(1 << of) && used(1 << run | 1 << of) >= own * BEGUN_SHARE_MIN
        };
        let mut broken = (0..self.runs).filter(|run| (0..self.runs).any(|of| begun(*run, of)));
        let first = broken.next()?;
        broken.next().is_none().then_some(first)
    }

    /// Returns for a mask how probable the next use is: how often a use followed on the same last two runs. With little
    /// data, `prior` counts more.
    pub fn probability(&self, prior: impl Fn(u8) -> f64) -> impl Fn(u8) -> f64 {
        let mut followed = [(0.0, 0.0); 4];
        let each = self.each();
        for run in 0..self.runs.saturating_sub(2) {
            let weight = weight(1 << run);
            for &(mask, count) in &each {
                let (uses, of) = &mut followed[usize::from(mask >> (run + 1) & 3)];
                *uses += weight * count * f64::from(mask >> run & 1);
                *of += weight * count;
            }
        }
        move |mask| {
            let (uses, of) = followed[usize::from(mask & 3)];
            let prior = prior(mask);
            // A file that neither run used may be any of many older ones: its own frequency is a better estimate.
            if mask & 3 == 0 { prior } else { (uses + PRIOR_USES * prior) / (of + PRIOR_USES) }
        }
    }

    /// Returns the frequency of a mask, decayed by run. After two runs, files that are new in the second are trusted
    /// less, the more files of the first were not used again: new files probably behave alike.
    pub fn frequency(&self) -> impl Fn(u8) -> f64 {
        let count = |mask: u8| f64::from(self.counts[usize::from(mask)]);
        let first = count(0b10) + count(0b11);
        let transient = if self.runs == 2 && first > 0.0 { count(0b10) / first } else { 0.0 };
        let whole = weight(all(self.runs)).max(1.0);
        move |mask| {
            let trust = if mask == 1 { 1.0 - transient / 2.0 } else { 1.0 };
            weight(mask) / whole * trust
        }
    }
}

/// Returns a mask of the runs of `active` alone, with the other runs removed.
pub(super) fn compressed(mask: u8, active: u8) -> u8 {
    let (mut out, mut to) = (0, 0);
    for bit in (0..8).filter(|bit| active >> bit & 1 == 1) {
        out |= (mask >> bit & 1) << to;
        to += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masks(runs: usize, of: &[(u8, usize)]) -> Masks {
        let mut out = Masks::new(runs);
        of.iter().for_each(|(mask, count)| (0..*count).for_each(|_| out.add(*mask)));
        out
    }

    #[test]
    fn what_is_always_used_is_foreseen_and_what_never_comes_back_is_not() {
        assert_eq!(masks(4, &[(0b1111, 10)]).score(), Some(1.0));
        assert_eq!(masks(3, &[(0b001, 5), (0b010, 5), (0b100, 5)]).score(), Some(0.0));
        assert_eq!(masks(1, &[(1, 5)]).score(), None);
    }

    #[test]
    fn what_alternates_is_expected_in_turn() {
        let of = masks(8, &[(0b0101_0101, 50), (0b1010_1010, 50)]);
        let probability = of.probability(of.frequency());
        assert!(probability(0b0101_0101) < 0.2, "{}", probability(0b0101_0101));
        assert!(probability(0b1010_1010) > 0.8, "{}", probability(0b1010_1010));
    }

    #[test]
    fn what_is_new_is_expected_as_often_as_new_things_came_back() {
        let of = masks(4, &[(0b1111, 50), (0b0001, 50), (0b0010, 50), (0b0100, 50), (0b1000, 50)]);
        let probability = of.probability(of.frequency());
        assert!(probability(0b0001) < 0.1 && probability(0b1111) > 0.99);
    }

    #[test]
    fn one_run_that_read_the_beginning_of_another_broke_off() {
        assert_eq!(masks(3, &[(0b111, 5), (0b101, 95)]).broken_off(), Some(1));
        assert_eq!(masks(2, &[(0b11, 5), (0b10, 95)]).broken_off(), Some(0));
        assert_eq!(masks(3, &[(0b111, 5), (0b101, 4)]).broken_off(), None, "it had half");
        assert_eq!(masks(2, &[(0b01, 5), (0b10, 95)]).broken_off(), None, "it read something else");
        assert_eq!(masks(4, &[(0b1111, 5), (0b1010, 95)]).broken_off(), None, "the job is small at times");
    }

    #[test]
    fn compressed_masks_keep_the_order() {
        assert_eq!(compressed(0b1000_0010, 0b1010_0110), 0b1001);
        assert_eq!(compressed(0b1010_0110, 0b1010_0110), 0b1111);
    }
}
