//! Samples in pairs, and their statistics.

use crate::{Result, interrupt};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Native,
    Mount,
}

/// Rates of both sides, one of each side per pair. More is better.
#[derive(Debug, Clone, Default)]
pub struct Series {
    pub native: Vec<f64>,
    pub mount: Vec<f64>,
}

/// Median and extremes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Series {
    /// Returns the spread of the ratios mount / native of the pairs.
    pub fn ratio(&self) -> Spread {
        spread(self.mount.iter().zip(&self.native).map(|(mount, native)| mount / native).collect())
    }
}

pub fn spread(mut values: Vec<f64>) -> Spread {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        return Spread { median: f64::NAN, min: f64::NAN, max: f64::NAN };
    }
    let median = if n % 2 == 1 { values[n / 2] } else { f64::midpoint(values[n / 2 - 1], values[n / 2]) };
    Spread { median, min: values[0], max: values[n - 1] }
}

/// Takes `pairs` samples of each side. Each pair begins with the side that ended the previous pair, so that a drift of
/// the machine favours neither side. `sample` gets the side and the number of the pair, and returns a rate.
pub fn alternate(pairs: usize, mut sample: impl FnMut(Side, usize) -> Result<f64>) -> Result<Series> {
    let mut series = Series::default();
    for pair in 0..pairs {
        let order = if pair % 2 == 0 { [Side::Native, Side::Mount] } else { [Side::Mount, Side::Native] };
        for side in order {
            interrupt::check()?;
            let rate = sample(side, pair)?;
            match side {
                Side::Native => series.native.push(rate),
                Side::Mount => series.mount.push(rate),
            }
        }
    }
    Ok(series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_ratios_within_pairs() {
        let series = Series { native: vec![1.0, 10.0, 100.0], mount: vec![0.5, 9.0, 100.0] };
        assert_eq!(series.ratio(), Spread { median: 0.9, min: 0.5, max: 1.0 });
    }

    #[test]
    fn an_even_number_has_the_middle_of_two() {
        assert_eq!(spread(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }

    #[test]
    fn sides_take_turns() {
        let mut order = Vec::new();
        alternate(2, |side, _| {
            order.push(side);
            Ok(1.0)
        })
        .unwrap();
        assert_eq!(order, [Side::Native, Side::Mount, Side::Mount, Side::Native]);
    }
}
