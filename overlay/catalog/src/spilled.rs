//! Spilled ranges: bytes of dirty content that were sent to the pool as parts ahead of the file, because the fast pool
//! has no room for them. The content file has holes there.
//!
//! A part is listed as *leaving* before it is sent, and again when no range uses it any more; a background task removes
//! leaving parts from the pool. So each part in the pool is listed here at all times: by a range, or as leaving.

use std::ops::Range;

use forebay_backends::{Result, SentPart};
use forebay_cache::ContentId;
use serde::{Deserialize, Serialize};

use super::records::encode;
use super::{Batch, Catalog, cf};

/// A range of a content file whose bytes are in a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpilledRange {
    /// Offset in bytes from the start of the content. The part has the length.
    pub offset: u64,
    pub part: SentPart,
}

impl SpilledRange {
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.part.len
    }

    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.offset < range.end && range.start < self.range().end
    }
}

/// The spilled ranges of a content file: ascending, and without overlaps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spilled(Vec<SpilledRange>);

impl Spilled {
    pub fn ranges(&self) -> &[SpilledRange] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the bytes in all ranges.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|spilled| spilled.part.len).sum()
    }

    /// Returns the ranges that overlap with `range`.
    pub fn in_range(&self, range: &Range<u64>) -> impl Iterator<Item = &SpilledRange> {
        let range = range.clone();
        self.0.iter().filter(move |spilled| spilled.overlaps(&range))
    }

    /// Adds a range, which overlaps with no other.
    pub fn insert(&mut self, spilled: SpilledRange) {
        let at = self.0.partition_point(|other| other.offset < spilled.offset);
        debug_assert!(self.in_range(&spilled.range()).next().is_none(), "spilled twice: {spilled:?}");
        self.0.insert(at, spilled);
    }

    /// Removes the ranges that `leaves` names, and returns them.
    pub fn remove(&mut self, leaves: impl Fn(&SpilledRange) -> bool) -> Vec<SpilledRange> {
        let (leaving, staying) = std::mem::take(&mut self.0).into_iter().partition(leaves);
        self.0 = staying;
        leaving
    }
}

fn content_key(id: ContentId) -> Vec<u8> {
    [b"c".as_slice(), &id.0.to_be_bytes()].concat()
}

fn leaving_key(name: &str) -> Vec<u8> {
    [b"l", name.as_bytes()].concat()
}

impl Catalog {
    /// Returns the spilled ranges of a content file; none for most.
    pub fn spilled(&self, id: ContentId) -> Result<Spilled> {
        Ok(self.get(cf::SPILLED, &content_key(id))?.unwrap_or_default())
    }

    /// Returns up to `most` names of parts that are to be removed from the pool, in order: those after the name `after`.
    pub fn leaving_parts(&self, after: &str, most: usize) -> Result<Vec<String>> {
        let mut names = Vec::new();
        self.scan(cf::SPILLED, &[b"l", after.as_bytes()].concat(), |key, _| {
            if key.get(1..) == Some(after.as_bytes()) {
                return Ok(true);
            }
            if key.first() != Some(&b'l') || names.len() >= most {
                return Ok(false);
            }
            names.push(String::from_utf8_lossy(&key[1..]).into_owned());
            Ok(true)
        })?;
        Ok(names)
    }

    /// Wakes the task that removes leaving parts.
    pub fn announce_leaving_parts(&self) {
        self.parts_leave.notify_one();
    }

    /// Waits until a part may have to be removed. Returns at once if that was announced since the last call. For one
    /// task.
    pub async fn until_parts_leave(&self) {
        self.parts_leave.notified().await;
    }
}

impl Batch<'_> {
    /// Sets the spilled ranges of a content file. The caller ends that the parts of new ranges are leaving.
    pub fn put_spilled(&mut self, id: ContentId, spilled: &Spilled) {
        match spilled.is_empty() {
            true => self.delete_raw(cf::SPILLED, &content_key(id)),
            false => self.put_raw(cf::SPILLED, &content_key(id), &encode(spilled)),
        }
    }

    /// Lists a part as leaving.
    pub fn put_leaving_part(&mut self, name: &str) {
        self.parts_leave = true;
        self.put_raw(cf::SPILLED, &leaving_key(name), &[]);
    }

    /// Forgets that a part is leaving: the pool no longer has it, or a range uses it.
    pub fn delete_leaving_part(&mut self, name: &str) {
        self.delete_raw(cf::SPILLED, &leaving_key(name));
    }

    /// The content file is removed: all of its parts leave.
    pub(super) fn delete_spilled(&mut self, id: ContentId) {
        // If the record cannot be read, its parts stay in the pool.
        let Ok(spilled) = self.catalog.spilled(id) else { return };
        for range in spilled.ranges() {
            self.put_leaving_part(&range.part.name);
        }
        if !spilled.is_empty() {
            self.delete_raw(cf::SPILLED, &content_key(id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;

    fn part(name: &str, len: u64) -> SentPart {
        SentPart { name: name.into(), len, tag: "t".into() }
    }

    #[test]
    fn each_part_is_in_a_range_or_leaving() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let id = ContentId(7);
        let write = |change: &dyn Fn(&mut Batch<'_>)| {
            let mut batch = catalog.batch();
            change(&mut batch);
            catalog.write(batch).unwrap();
        };
        let leaving = || catalog.leaving_parts("", 10).unwrap();
        write(&|batch| ["a", "b", "c"].iter().for_each(|name| batch.put_leaving_part(name)));
        assert_eq!(leaving(), ["a", "b", "c"]);
        assert_eq!(catalog.leaving_parts("", 2).unwrap(), ["a", "b"]);
        assert_eq!(catalog.leaving_parts("a", 1).unwrap(), ["b"]);
        let mut spilled = Spilled::default();
        spilled.insert(SpilledRange { offset: 10, part: part("b", 5) });
        spilled.insert(SpilledRange { offset: 0, part: part("a", 10) });
        write(&|batch| {
            batch.put_spilled(id, &spilled);
            ["a", "b"].iter().for_each(|name| batch.delete_leaving_part(name));
        });
        assert_eq!((leaving(), catalog.spilled(id).unwrap()), (vec!["c".into()], spilled.clone()));
        assert_eq!((spilled.bytes(), spilled.ranges()[1].range()), (15, 10..15));
        let named = |range| spilled.in_range(&range).map(|s| s.part.name.as_str()).collect::<String>();
        assert_eq!([named(0..10), named(9..11), named(10..15), named(15..20)], ["a", "ab", "b", ""]);
        write(&|batch| batch.delete_leaving_part("c"));
        write(&|batch| batch.delete_content(id));
        assert_eq!((leaving(), catalog.spilled(id).unwrap()), (vec!["a".into(), "b".into()], Spilled::default()));
    }
}
