//! The predictors, as far as the arbiter treats them alike; and what they say of a file.

use std::fmt;

use super::{association, sequence};

/// Where a suggestion comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Predictor {
    /// The order of names in a directory.
    Sequence,
    /// Other files of a directory.
    Siblings,
    /// What was opened together before.
    Association,
    /// The order of the last epoch.
    Epoch,
    /// What is left of a set, in no order.
    Set,
}

impl Predictor {
    /// All of them. Where two expect a file with the same probability, the first is believed.
    pub const ALL: [Self; 5] = [Self::Sequence, Self::Epoch, Self::Association, Self::Set, Self::Siblings];

    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// What share of its suggestions is used, as long as it is not known: what the patterns of the tests show of each,
    /// less a little.
    pub(super) fn assumed_accuracy(self) -> f64 {
        match self {
            Self::Sequence | Self::Epoch => 0.9,
            Self::Set => 0.8,
            Self::Association => 0.7,
            Self::Siblings => 0.5,
        }
    }

    /// Suggestions for one reader that may be outstanding. Siblings and sets have their own bound, which is in
    /// proportion to what was opened.
    pub(super) fn outstanding_max(self) -> usize {
        match self {
            Self::Sequence | Self::Epoch => sequence::OUTSTANDING_MAX,
            Self::Association => association::OUTSTANDING_MAX,
            Self::Siblings | Self::Set => usize::MAX,
        }
    }

    /// Whether it says when a file is opened, and not only that it is.
    pub(super) fn is_ordered(self) -> bool {
        matches!(self, Self::Sequence | Self::Epoch | Self::Association)
    }
}

/// Why a file is expected. "It" is the file that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// So many steps after it, of so many positions each in the natural order of the directory; back if negative.
    Sequence { steps: u32, stride: i64 },
    /// Its reader has opened so many of so many files of the directory, in no order.
    Siblings { opened: u32, of: usize },
    /// It was opened soon after it so many times.
    Association { times: u32 },
    /// So many places after it in the last epoch.
    Epoch { places: u32 },
    /// It was opened in the last epoch, and not yet in this.
    Set,
}

impl Why {
    pub fn predictor(self) -> Predictor {
        match self {
            Self::Sequence { .. } => Predictor::Sequence,
            Self::Siblings { .. } => Predictor::Siblings,
            Self::Association { .. } => Predictor::Association,
            Self::Epoch { .. } => Predictor::Epoch,
            Self::Set => Predictor::Set,
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Sequence { steps, stride } => {
                let (step, side) = (stride.unsigned_abs(), if stride < 0 { "before" } else { "after" });
                let place = u64::from(steps) * step;
                write!(f, "the {} {side} it in the order of the directory", Ordinal(place))?;
                if step > 1 { write!(f, ", of which its reader opens every {}", Ordinal(step)) } else { Ok(()) }
            }
            Self::Siblings { opened, of } => {
                write!(f, "its reader goes through the directory: {opened} of {of} so far")
            }
            Self::Association { times: 1 } => write!(f, "was opened after it once"),
            Self::Association { times } => write!(f, "was opened after it {times} times"),
            Self::Epoch { places: 1 } => write!(f, "next in the order of the epoch before"),
            Self::Epoch { places } => {
                write!(f, "the {} after it in the order of the epoch before", Ordinal(places.into()))
            }
            Self::Set => write!(f, "is left of the set that its reader goes over again"),
        }
    }
}

struct Ordinal(u64);

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match (self.0 % 10, self.0 % 100) {
            (1, tens) if tens != 11 => "st",
            (2, tens) if tens != 12 => "nd",
            (3, tens) if tens != 13 => "rd",
            _ => "th",
        };
        write!(f, "{}{suffix}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_sentences() {
        let sequence = |steps, stride| Why::Sequence { steps, stride }.to_string();
        assert_eq!(sequence(3, 1), "the 3rd after it in the order of the directory");
        assert_eq!(sequence(11, -1), "the 11th before it in the order of the directory");
        let strided = "the 8th after it in the order of the directory, of which its reader opens every 4th";
        assert_eq!(sequence(2, 4), strided);
        assert_eq!(Why::Association { times: 22 }.to_string(), "was opened after it 22 times");
        assert_eq!(Why::Epoch { places: 2 }.to_string(), "the 2nd after it in the order of the epoch before");
        let siblings = Why::Siblings { opened: 20, of: 100 }.to_string();
        assert_eq!(siblings, "its reader goes through the directory: 20 of 100 so far");
    }

    #[test]
    fn every_predictor_is_listed_once() {
        let mut indices = Predictor::ALL.map(Predictor::index);
        indices.sort_unstable();
        assert_eq!(indices, [0, 1, 2, 3, 4]);
    }
}
