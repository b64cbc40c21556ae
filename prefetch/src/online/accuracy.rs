//! The share of a predictor's suggestions that was used; older outcomes count less.

/// The weight of an outcome after the next one, for one reader: about the last 33 outcomes count.
const KEPT_OF_READER: f64 = 0.97;

/// The same for the mount, which has many readers.
const KEPT_OF_MOUNT: f64 = 0.995;

/// The number of outcomes for which the assumed accuracy counts.
const ASSUMED_OUTCOMES: f64 = 4.0;

/// Outcomes of one predictor's suggestions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Accuracy {
    used: f64,
    settled: f64,
    kept: f64,
}

impl Accuracy {
    pub fn of_reader() -> Self {
        Self { used: 0.0, settled: 0.0, kept: KEPT_OF_READER }
    }

    pub fn of_mount() -> Self {
        Self { used: 0.0, settled: 0.0, kept: KEPT_OF_MOUNT }
    }

    /// Notes how many suggestions were used, and how many wasted, at the same time.
    pub fn note(&mut self, used: usize, wasted: usize) {
        if used + wasted == 0 {
            return;
        }
        let outcomes = (used + wasted) as f64;
        let kept = self.kept.powf(outcomes);
        // The weight of this many outcomes, one after the other.
        let weight = (1.0 - kept) / (1.0 - self.kept);
        self.used = self.used * kept + weight * used as f64 / outcomes;
        self.settled = self.settled * kept + weight;
    }

    /// Returns the share that is used, which is `assumed` before there are outcomes. Above 0 and below 1 if `assumed`
    /// is.
    pub fn share(&self, assumed: f64) -> f64 {
        (self.used + ASSUMED_OUTCOMES * assumed) / (self.settled + ASSUMED_OUTCOMES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_assumed_gives_way_to_outcomes_and_the_old_to_the_new() {
        let mut accuracy = Accuracy::of_reader();
        assert_eq!(accuracy.share(0.8), 0.8);
        (0..200).for_each(|_| accuracy.note(1, 0));
        assert!(accuracy.share(0.1) > 0.89);
        (0..200).for_each(|_| accuracy.note(0, 1));
        assert!(accuracy.share(0.9) < 0.12);
        accuracy.note(500, 500);
        assert!((accuracy.share(0.5) - 0.5).abs() < 1e-6);
    }
}
