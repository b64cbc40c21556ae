//! The predictors, as far as they are treated alike, and the reasons that they give.

use std::fmt;

use super::{association, sequence};

/// The predictor that made a suggestion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Predictor {
    /// The order of names in a directory.
    Sequence,
    /// Other files of a directory.
    Siblings,
    /// Files that were opened together before.
    Association,
    /// The order of the last epoch.
    Epoch,
    /// The remaining files of a set, in no order.
    Set,
}

impl Predictor {
    /// All predictors. If two expect a file with the same probability, the first one counts.
    pub const ALL: [Self; 5] = [Self::Sequence, Self::Epoch, Self::Association, Self::Set, Self::Siblings];

    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// Returns the share of its suggestions that is assumed to be used before there are outcomes: slightly less than
    /// the patterns of the tests show.
    pub(super) fn assumed_accuracy(self) -> f64 {
        match self {
            Self::Sequence | Self::Epoch => 0.9,
            Self::Set => 0.8,
            Self::Association => 0.7,
            Self::Siblings => 0.5,
        }
    }

    /// Returns the most outstanding suggestions for one reader. Siblings and sets have a bound of their own, in
    /// proportion to the opened files.
    pub(super) fn outstanding_max(self) -> usize {
        match self {
            Self::Sequence | Self::Epoch => sequence::OUTSTANDING_MAX,
            Self::Association => association::OUTSTANDING_MAX,
            Self::Siblings | Self::Set => usize::MAX,
        }
    }

    /// Returns whether it predicts when a file is opened, and not only that it is.
    pub(super) fn is_ordered(self) -> bool {
        matches!(self, Self::Sequence | Self::Epoch | Self::Association)
    }
}

/// The reason for a suggestion. In the texts, "it" is the file that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// `steps` steps after it, each of `stride` positions in the natural order of the directory; backward if negative.
    Sequence { steps: u32, stride: i64 },
    /// Its reader has opened `opened` of the `of` files of the directory, in no order.
    Siblings { opened: u32, of: usize },
    /// It was opened soon after the opened file this many times.
    Association { times: u32 },
    /// It is this many places after the opened file in the last epoch.
    Epoch { places: u32 },
    /// It was opened in the last epoch, and not yet in this one.
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
                write!(f, "its reader reads the directory: {opened} of {of} files so far")
            }
            Self::Association { times: 1 } => write!(f, "was opened after it once"),
            Self::Association { times } => write!(f, "was opened after it {times} times"),
            Self::Epoch { places: 1 } => write!(f, "next in the order of the epoch before"),
            Self::Epoch { places } => {
                write!(f, "the {} after it in the order of the epoch before", Ordinal(places.into()))
            }
            Self::Set => write!(f, "is the rest of a set that its reader reads again"),
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
        assert_eq!(siblings, "its reader reads the directory: 20 of 100 files so far");
    }

    #[test]
    fn every_predictor_is_listed_once() {
        let mut indices = Predictor::ALL.map(Predictor::index);
        indices.sort_unstable();
        assert_eq!(indices, [0, 1, 2, 3, 4]);
    }
}
