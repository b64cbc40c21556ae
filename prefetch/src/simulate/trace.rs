//! A trace: the requested contents in order, and their sizes.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

/// Requests in order. Contents are numbered from 0 in the order of their first requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<u32>,
    sizes: Vec<u64>,
}

impl Trace {
    /// Makes a trace of requests for keys with their sizes in bytes. Content has its largest requested size during the
    /// whole trace, so that every policy and every bound count the same bytes.
    ///
    /// # Errors
    /// There are 2^32 contents or more.
    pub fn new<K: Hash + Eq>(requests: impl IntoIterator<Item = (K, u64)>) -> Result<Self, TraceError> {
        let mut numbers = HashMap::new();
        let mut trace = Self::default();
        for (key, bytes) in requests {
            let next = u32::try_from(trace.sizes.len()).map_err(|_| TraceError::TooManyContents)?;
            let content = *numbers.entry(key).or_insert(next);
            if content == next {
                trace.sizes.push(bytes);
            }
            let size = &mut trace.sizes[content as usize];
            *size = (*size).max(bytes);
            trace.requests.push(content);
        }
        Ok(trace)
    }

    pub fn requests(&self) -> &[u32] {
        &self.requests
    }

    /// Returns the size of a content of [`Trace::requests`], in bytes.
    pub fn bytes(&self, content: u32) -> u64 {
        self.sizes[content as usize]
    }

    /// Returns the number of contents.
    pub fn contents(&self) -> usize {
        self.sizes.len()
    }

    /// The sum of the sizes of all contents.
    pub fn unique_bytes(&self) -> u128 {
        self.sizes.iter().map(|&bytes| u128::from(bytes)).sum()
    }

    /// The sum of the sizes of all requests.
    pub fn requested_bytes(&self) -> u128 {
        self.requests.iter().map(|&content| u128::from(self.bytes(content))).sum()
    }

    /// Returns the capacity of a cache for this share of the unique bytes, above 0 and up to 1; at least 1 byte.
    pub fn capacity_bytes(&self, fraction: f64) -> u64 {
        ((self.unique_bytes() as f64 * fraction).round() as u64).max(1)
    }

    /// Returns for each request the index of the next one for the same content; `u32::MAX`: there is none.
    pub(super) fn next_uses(&self) -> Vec<u32> {
        let mut next = vec![u32::MAX; self.contents()];
        let mut uses = vec![u32::MAX; self.requests.len()];
        for (at, &content) in self.requests.iter().enumerate().rev() {
            uses[at] = std::mem::replace(&mut next[content as usize], at as u32);
        }
        uses
    }
}

/// The reason why bytes are no trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceError {
    /// It has no requests.
    Empty,
    /// The length is not a whole number of records.
    Truncated {
        records: usize,
        left_over_bytes: usize,
    },
    /// The values of a record are impossible.
    Record {
        index: usize,
        why: String,
    },
    /// A line is not of the output of `forebay job show --json`.
    Line {
        number: usize,
        why: String,
    },
    TooManyContents,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "it has no requests"),
            Self::Truncated { records, left_over_bytes } => write!(
                f,
                "it ends within a record of 24 bytes: {left_over_bytes} bytes are left over after {records} records; \
                 is it cut short, or not in the oracleGeneral format?"
            ),
            Self::Record { index, why } => {
                write!(f, "record {index} is not one of the oracleGeneral format: {why}")
            }
            Self::Line { number, why } => {
                write!(f, "line {number} is not what `forebay job show --json ID` prints: {why}")
            }
            Self::TooManyContents => write!(f, "it has more than 4 billion contents or requests"),
        }
    }
}

impl std::error::Error for TraceError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_has_its_largest_size_all_the_time() {
        let trace = Trace::new([("a", 3), ("b", 2), ("a", 5)]).unwrap();
        assert_eq!((trace.requests(), trace.unique_bytes(), trace.requested_bytes()), (&[0, 1, 0][..], 7, 12));
        assert_eq!(trace.next_uses(), [2, u32::MAX, u32::MAX]);
        assert_eq!((trace.capacity_bytes(0.5), trace.capacity_bytes(0.0001)), (4, 1));
    }
}
