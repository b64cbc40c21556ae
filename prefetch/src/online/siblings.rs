//! A reader opens more and more files of a directory, in no order: how many of the other files to fetch.

/// The most outstanding suggestions for each file that the reader has opened. More would save little: with four, the
/// whole rest of a directory is suggested once a fifth of it was opened. The bound limits the waste to four times what
/// is read, even if the strongest evidence is wrong.
pub(super) const FOR_EACH_OPENED_MAX: f64 = 4.0;

/// Files of a kind that must be opened before the other files of this kind are suggested: one `index.json` among the
/// images says nothing about other such files.
pub(super) const OPENED_MIN: u32 = 3;

/// Returns the probability that an unopened file will be opened, if `opened` of the `of` files were opened; both are at
/// least 1.
///
/// How many files a reader will open in the end is not known, and no order of magnitude is more probable than another:
/// after k opens, the chance that it opens more than x is (k/x)^a, up to all of them. `a` is 1 without experience, and
/// smaller if such suggestions were used: it is the odds that one is wasted. The remaining files are all alike. So each
/// has the probability of the expected share of them that is opened: the integral of (k/x)^a from k to `of`, divided by
/// `of` - k.
pub(super) fn probability(opened: u32, of: usize, accuracy: f64) -> f64 {
    let (opened, of) = (f64::from(opened), of as f64);
    if of <= opened {
        return 0.0;
    }
    let exponent = (1.0 - accuracy) / accuracy.max(f64::MIN_POSITIVE);
    let integral = if (exponent - 1.0).abs() < 1e-6 {
        opened * (of / opened).ln()
    } else {
        (of * (opened / of).powf(exponent) - opened) / (1.0 - exponent)
    };
    (integral / (of - opened)).clamp(0.0, 1.0)
}

/// Returns how many suggestions may be outstanding or wasted, if `opened` files were opened and each suggestion is used
/// with this probability. If the probability is right, at most as many are wasted as the reader opens. The result is at
/// most `for_each` for each opened file.
pub(super) fn allowed(probability: f64, opened: u64, for_each: f64) -> usize {
    let odds = probability / (1.0 - probability).max(f64::MIN_POSITIVE);
    (odds.min(for_each) * opened as f64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_of_a_directory_was_opened_the_more_probable_are_its_other_files() {
        let shares: Vec<f64> = [5, 20, 200, 1000, 1999].iter().map(|k| probability(*k, 2000, 0.5)).collect();
        assert!(shares.is_sorted(), "{shares:?}");
        assert!(shares[0] < 0.02 && shares[3] > 0.65 && shares[4] > 0.99, "{shares:?}");
        assert_eq!(probability(10, 10, 0.5), 0.0);
        // The two forms of the integral meet.
        assert!((probability(100, 2000, 0.5) - probability(100, 2000, 0.5001)).abs() < 1e-3);
    }

    #[test]
    fn experience_makes_bold_or_shy() {
        assert!(probability(5, 2000, 0.95) > 0.7);
        assert!(probability(500, 2000, 0.1) < 0.05);
        assert!((0..=1000).all(|a| (0.0..=1.0).contains(&probability(7, 900, f64::from(a) / 1000.0))));
    }

    #[test]
    fn what_may_be_wasted_is_in_proportion_to_what_was_opened() {
        assert_eq!(allowed(0.5, 100, FOR_EACH_OPENED_MAX), 100);
        assert_eq!(allowed(0.25, 90, FOR_EACH_OPENED_MAX), 30);
        assert_eq!(allowed(1.0, 100, FOR_EACH_OPENED_MAX), 400);
    }
}
