//! Sets of byte ranges: which parts of a content file are valid.

use std::ops::Range;

/// Disjoint, ascending, non-adjacent ranges of bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtentSet(Vec<(u64, u64)>);

impl ExtentSet {
    /// Adds a range; touching ranges become one.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|(_, end)| *end < range.start);
        let last = self.0.partition_point(|(start, _)| *start <= range.end);
        let (mut start, mut end) = (range.start, range.end);
        if first < last {
            start = start.min(self.0[first].0);
            end = end.max(self.0[last - 1].1);
        }
        self.0.splice(first..last, [(start, end)]);
    }

    /// The parts of `range` that are not in the set, ascending.
    pub fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let first = self.0.partition_point(|(_, end)| *end <= range.start);
        for (start, end) in &self.0[first..] {
            if *start >= range.end {
                break;
            }
            if *start > at {
                gaps.push(at..*start);
            }
            at = at.max(*end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    pub fn contains(&self, range: Range<u64>) -> bool {
        if range.is_empty() {
            return true;
        }
        let at = self.0.partition_point(|(_, end)| *end <= range.start);
        self.0.get(at).is_some_and(|(start, end)| *start <= range.start && range.end <= *end)
    }

    /// Takes out all bytes from `end` on.
    pub fn truncate(&mut self, end: u64) {
        self.0.retain(|(start, _)| *start < end);
        if let Some((_, last)) = self.0.last_mut() {
            *last = end.min(*last);
        }
    }

    /// Returns the end of the last range; 0 if the set is empty.
    pub fn end(&self) -> u64 {
        self.0.last().map_or(0, |(_, end)| *end)
    }

    /// The ranges of the set, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(start, end)| *start..*end)
    }

    /// Bytes in the set.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_like_a_bitmap(ranges in prop::collection::vec((0u64..200, 0u64..40), 0..40), probe in (0u64..200, 0u64..60)) {
            let mut set = ExtentSet::default();
            let mut bitmap = [false; 300];
            for (start, len) in ranges {
                set.insert(start..start + len);
                bitmap[start as usize..(start + len) as usize].fill(true);
            }
            prop_assert!(set.0.windows(2).all(|w| w[0].1 < w[1].0), "{set:?}");
            prop_assert_eq!(set.bytes(), bitmap.iter().filter(|b| **b).count() as u64);
            prop_assert_eq!(set.end(), bitmap.iter().rposition(|b| *b).map_or(0, |last| last as u64 + 1));
            let range = probe.0..probe.0 + probe.1;
            let gaps = set.missing(range.clone());
            let mut gap_map = [false; 300];
            for gap in &gaps {
                gap_map[gap.start as usize..gap.end as usize].fill(true);
            }
            for at in range.clone() {
                prop_assert_eq!(gap_map[at as usize], !bitmap[at as usize]);
            }
            prop_assert_eq!(set.contains(range), gaps.is_empty());
            set.truncate(probe.0);
            bitmap[probe.0 as usize..].fill(false);
            let mut left = [false; 300];
            set.ranges().for_each(|range| left[range.start as usize..range.end as usize].fill(true));
            prop_assert_eq!(left, bitmap);
        }
    }
}
