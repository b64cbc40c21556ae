//! The content of a file in memory: extents with holes between them.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;

use crate::Piece;

/// Bytes by offset. Holes take no memory, whatever the size.
#[derive(Debug, Clone, Default)]
pub(super) struct MemoryContent {
    size: u64,
    /// Neither empty nor overlapping, all below `size`.
    extents: BTreeMap<u64, Bytes>,
}

impl MemoryContent {
    /// `pieces` must not overlap and must end within `size`.
    pub(super) fn from_pieces(size: u64, pieces: Vec<Piece>) -> Self {
        let extents = pieces.into_iter().filter(|p| !p.data.is_empty()).map(|p| (p.offset, p.data)).collect();
        Self { size, extents }
    }

    /// What is not a hole.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.extents.iter().map(|(offset, data)| Piece { offset: *offset, data: data.clone() })
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes held, holes not counted.
    pub(super) fn held_bytes(&self) -> u64 {
        self.extents.values().map(|data| data.len() as u64).sum()
    }

    pub(super) fn read(&self, range: Range<u64>) -> Bytes {
        let end = range.end.min(self.size);
        if range.start >= end {
            return Bytes::new();
        }
        // The usual read lies within one extent and copies nothing.
        if let Some((at, data)) = self.extents.range(..=range.start).next_back() {
            let from = (range.start - at) as usize;
            let to = (end - at) as usize;
            if to <= data.len() {
                return data.slice(from..to);
            }
        }
        let mut out = vec![0; (end - range.start) as usize];
        for (at, data) in self.overlapping(range.start..end) {
            let from = range.start.max(at);
            let to = end.min(at + data.len() as u64);
            out[(from - range.start) as usize..(to - range.start) as usize]
                .copy_from_slice(&data[(from - at) as usize..(to - at) as usize]);
        }
        out.into()
    }

    pub(super) fn write(&mut self, offset: u64, data: Bytes) {
        let end = offset + data.len() as u64;
        if !data.is_empty() {
            self.punch(offset..end);
            self.extents.insert(offset, data);
        }
        self.size = self.size.max(end);
    }

    pub(super) fn truncate(&mut self, size: u64) {
        if size < self.size {
            self.punch(size..self.size);
        }
        self.size = size;
    }

    fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Bytes)> {
        let first = self.extents.range(..range.start).next_back().map_or(range.start, |(at, _)| *at);
        self.extents
            .range(first..range.end)
            .filter(move |(at, data)| **at + data.len() as u64 > range.start)
            .map(|(at, data)| (*at, data.clone()))
    }

    fn punch(&mut self, range: Range<u64>) {
        let hit: Vec<_> = self.overlapping(range.clone()).collect();
        for (at, data) in hit {
            self.extents.remove(&at);
            let end = at + data.len() as u64;
            if at < range.start {
                self.extents.insert(at, data.slice(..(range.start - at) as usize));
            }
            if end > range.end {
                self.extents.insert(range.end, data.slice((range.end - at) as usize..));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Write(u64, Vec<u8>),
        Truncate(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..200_u64, prop::collection::vec(1..255_u8, 0..60)).prop_map(|(at, data)| Op::Write(at, data)),
            (0..260_u64).prop_map(Op::Truncate),
        ]
    }

    proptest! {
        #[test]
        fn content_equals_a_plain_vector(ops in prop::collection::vec(op(), 0..40), at in 0..300_u64, len in 0..300_u64) {
            let mut content = MemoryContent::default();
            let mut model = Vec::new();
            for op in ops {
                match op {
                    Op::Write(at, data) => {
                        let end = at as usize + data.len();
                        model.resize(model.len().max(end), 0);
                        model[at as usize..end].copy_from_slice(&data);
                        content.write(at, data.into());
                    }
                    Op::Truncate(size) => {
                        model.resize(size as usize, 0);
                        content.truncate(size);
                    }
                }
                prop_assert_eq!(content.size(), model.len() as u64);
                prop_assert_eq!(&content.read(0..u64::MAX)[..], &model[..]);
            }
            let from = (at as usize).min(model.len());
            let to = (at.saturating_add(len) as usize).min(model.len()).max(from);
            prop_assert_eq!(&content.read(at..at + len)[..], &model[from..to]);
        }
    }
}
