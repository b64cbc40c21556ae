//! The record of the valid bytes of a content file. The catalog stores a head, and the checksums of the chunks in
//! groups, so that the bytes written for one more chunk do not grow with the file.

use std::ops::Range;

use forebay_backends::Result;
use serde::{Deserialize, Serialize};

use super::records::encode;
use super::{Batch, Catalog, cf, decoded, id_of};
use crate::Ino;
use forebay_cache::{CHUNK_BYTES, ContentId, ExtentSet};

/// Chunks in a group. The first group is stored in the head: most files have no other group.
const GROUP_CHUNKS: u32 = 64;

/// The record of which bytes of a content file are valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentRecord {
    pub ino: Ino,
    /// Bytes that the content file is known to occupy.
    pub bytes: u64,
    /// The last epoch in which bytes were fetched into the content file; see `Catalog::epoch`.
    pub epoch: u64,
    /// Valid ranges of a partial file; empty if all bytes are valid or the content is dirty.
    extents: ExtentSet,
    checksums: Checksums,
    /// The number of groups that the catalog may have.
    groups: u32,
}

/// CRC32C of fetched chunks, ascending by chunk number. For a partial file: all of them; otherwise only those of the
/// first group.
type Checksums = Vec<(u32, u32)>;

/// The part of the record that is stored under the content id.
#[derive(Serialize, Deserialize)]
struct Head {
    ino: Ino,
    bytes: u64,
    epoch: u64,
    groups: u32,
    first: Checksums,
}

impl ContentRecord {
    /// Returns the record of a content file that has no valid bytes.
    pub fn empty(ino: Ino, epoch: u64) -> Self {
        Self { ino, bytes: 0, epoch, extents: ExtentSet::default(), checksums: Checksums::new(), groups: 1 }
    }

    pub fn extents(&self) -> &ExtentSet {
        &self.extents
    }

    /// Records that a chunk was fetched.
    pub fn landed(&mut self, chunk: u32, range: Range<u64>, checksum: u32) {
        self.extents.insert(range);
        match self.checksums.binary_search_by_key(&chunk, |(known, _)| *known) {
            Ok(at) => self.checksums[at].1 = checksum,
            Err(at) => self.checksums.insert(at, (chunk, checksum)),
        }
        self.groups = self.groups.max(chunk / GROUP_CHUNKS + 1);
    }

    /// Forgets the chunk that contains the old end of the file, `size`, before the file grows. If this chunk was
    /// fetched, it holds only a part of its future bytes.
    pub fn forget_short_chunk(&mut self, size: u64) -> Option<u32> {
        let chunk = u32::try_from(size / CHUNK_BYTES).ok()?;
        if size.is_multiple_of(CHUNK_BYTES) || self.checksums.last().is_none_or(|(last, _)| *last != chunk) {
            return None;
        }
        self.checksums.pop();
        self.extents.truncate(u64::from(chunk) * CHUNK_BYTES);
        Some(chunk)
    }

    /// Records that all chunks were fetched and are in the catalog.
    pub fn completed(&mut self) {
        self.extents = ExtentSet::default();
        self.checksums.truncate(self.group(0).len());
        self.checksums.shrink_to_fit();
    }

    fn group(&self, group: u32) -> &[(u32, u32)] {
        let first = self.checksums.partition_point(|(chunk, _)| chunk / GROUP_CHUNKS < group);
        let end = self.checksums.partition_point(|(chunk, _)| chunk / GROUP_CHUNKS <= group);
        &self.checksums[first..end]
    }

    fn of(head: Head) -> Self {
        let Head { ino, bytes, epoch, groups, first } = head;
        Self { ino, bytes, epoch, extents: ExtentSet::default(), checksums: first, groups }
    }
}

pub(super) fn decode_head(bytes: &[u8]) -> Result<ContentRecord> {
    Ok(ContentRecord::of(decoded(cf::RESIDENCY, bytes)?))
}

impl Catalog {
    /// Returns the head, without the valid ranges and the checksums of further groups, which only partial files need.
    pub fn content(&self, id: ContentId) -> Result<Option<ContentRecord>> {
        Ok(self.get(cf::RESIDENCY, &id.0.to_be_bytes())?.map(ContentRecord::of))
    }

    /// Returns the record of a partial file of `size` bytes, with its valid ranges.
    pub fn partial_content(&self, id: ContentId, size: u64) -> Result<Option<ContentRecord>> {
        let Some(mut record) = self.content(id)? else { return Ok(None) };
        record.checksums = self.checksums(id, &record)?;
        for (chunk, _) in &record.checksums {
            let start = u64::from(*chunk) * CHUNK_BYTES;
            record.extents.insert(start..size.min(start + CHUNK_BYTES));
        }
        Ok(Some(record))
    }

    /// Visits the content files of a device, which is the first byte of their ids.
    pub fn contents_on(
        &self,
        device: usize,
        mut each: impl FnMut(ContentId, ContentRecord) -> Result<bool>,
    ) -> Result<()> {
        let Ok(device) = u8::try_from(device) else { return Ok(()) };
        self.scan(cf::RESIDENCY, &[device], |key, value| match key.first() {
            Some(first) if *first == device => each(ContentId(id_of(key)?), decode_head(value)?),
            _ => Ok(false),
        })
    }

    /// Returns the CRC32C of one fetched chunk; `None` if it was not fetched, or was changed since.
    pub fn checksum(&self, id: ContentId, record: &ContentRecord, chunk: u32) -> Result<Option<u32>> {
        let of = |some: &[(u32, u32)]| {
            some.binary_search_by_key(&chunk, |(known, _)| *known).ok().and_then(|at| some.get(at)).map(|(_, sum)| *sum)
        };
        let known = of(&record.checksums);
        if known.is_some() || chunk < GROUP_CHUNKS || chunk / GROUP_CHUNKS >= record.groups {
            return Ok(known);
        }
        let group: Option<Checksums> = self.get(cf::CHUNKS, &group_key(id, chunk / GROUP_CHUNKS))?;
        Ok(group.and_then(|group| of(&group)))
    }

    /// Returns the CRC32C of each fetched chunk, ascending by chunk number.
    pub fn checksums(&self, id: ContentId, record: &ContentRecord) -> Result<Vec<(u32, u32)>> {
        let mut checksums = record.group(0).to_vec();
        for group in 1..record.groups {
            let some: Option<Checksums> = self.get(cf::CHUNKS, &group_key(id, group))?;
            checksums.extend(some.unwrap_or_default());
        }
        Ok(checksums)
    }
}

impl Batch<'_> {
    pub fn put_content(&mut self, id: ContentId, record: &ContentRecord) {
        let ContentRecord { ino, bytes, epoch, groups, .. } = *record;
        let head = Head { ino, bytes, epoch, groups, first: record.group(0).to_vec() };
        self.put_raw(cf::RESIDENCY, &id.0.to_be_bytes(), &encode(&head));
    }

    /// Writes the head, and the group of a chunk that was just fetched.
    pub fn put_chunk(&mut self, id: ContentId, record: &ContentRecord, chunk: u32) {
        let group = chunk / GROUP_CHUNKS;
        if group > 0 {
            self.put_raw(cf::CHUNKS, &group_key(id, group), &encode(&record.group(group).to_vec()));
        }
        self.put_content(id, record);
    }

    /// Writes the head after bytes other than fetched ones were written to the content file: the checksums are dropped.
    pub fn put_unproven_content(&mut self, id: ContentId, record: &mut ContentRecord) {
        self.delete_groups(id, record);
        record.checksums = Checksums::new();
        record.groups = 1;
        self.put_content(id, record);
    }

    /// Writes the record of whole content that was in another content file, with its checksums.
    pub fn put_moved_content(&mut self, from: ContentId, to: ContentId, record: &ContentRecord) -> Result<()> {
        for group in 1..record.groups {
            if let Some(some) = self.catalog.get::<Checksums>(cf::CHUNKS, &group_key(from, group))? {
                self.put_raw(cf::CHUNKS, &group_key(to, group), &encode(&some));
            }
        }
        self.put_content(to, record);
        Ok(())
    }

    pub fn delete_content(&mut self, id: ContentId) {
        // If the record cannot be read, its groups stay in the catalog. Nothing reads them.
        if let Ok(Some(record)) = self.catalog.content(id) {
            self.delete_groups(id, &record);
        }
        self.delete_raw(cf::RESIDENCY, &id.0.to_be_bytes());
        self.delete_spilled(id);
        self.forget_losses_of(id);
    }

    fn delete_groups(&mut self, id: ContentId, record: &ContentRecord) {
        for group in 1..record.groups {
            self.delete_raw(cf::CHUNKS, &group_key(id, group));
        }
    }
}

fn group_key(id: ContentId, group: u32) -> Vec<u8> {
    [id.0.to_be_bytes().as_slice(), &group.to_be_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;

    #[test]
    fn what_is_written_for_a_chunk_does_not_grow_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let (id, other, size) = (ContentId(7), ContentId(8), 3_000 * CHUNK_BYTES - 5);
        let mut record = ContentRecord::empty(Ino(2), 1);
        let mut most_bytes = 0;
        for chunk in (0..3_000).rev().filter(|chunk| chunk % 7 != 3) {
            let start = u64::from(chunk) * CHUNK_BYTES;
            record.landed(chunk, start..size.min(start + CHUNK_BYTES), u32::MAX - chunk);
            let mut batch = catalog.batch();
            batch.put_chunk(id, &record, chunk);
            batch.put_chunk(other, &record, chunk);
            most_bytes = most_bytes.max(batch.inner.size_in_bytes());
            catalog.write(batch).unwrap();
        }
        assert!(most_bytes < 2 * 2_048, "{most_bytes}");
        let read = catalog.partial_content(id, size).unwrap().unwrap();
        assert_eq!(read, record, "a partial file is known by its chunks");
        assert_eq!(read.extents().missing(0..size).len(), 429);
        let all = read.checksums.clone();
        record.completed();
        let mut batch = catalog.batch();
        batch.put_content(id, &record);
        catalog.write(batch).unwrap();
        assert_eq!(catalog.content(id).unwrap().unwrap(), record);
        assert_eq!(catalog.checksums(id, &record).unwrap(), all);
        let one = |chunk| catalog.checksum(id, &record, chunk).unwrap();
        assert!(
            all.iter().all(|(chunk, sum)| one(*chunk) == Some(*sum)) && one(3).is_none() && one(2_999 + 64).is_none()
        );
        // All groups of `id` are deleted, and those of `other` stay.
        let mut batch = catalog.batch();
        batch.delete_content(id);
        catalog.write(batch).unwrap();
        let mut left = 0;
        catalog
            .scan(cf::CHUNKS, b"", |key, _| {
                left += 1;
                assert!(key.starts_with(&other.0.to_be_bytes()), "{key:?}");
                Ok(true)
            })
            .unwrap();
        assert_eq!(left, 2_999 / GROUP_CHUNKS);
        let mut record = catalog.content(other).unwrap().unwrap();
        let mut batch = catalog.batch();
        batch.put_unproven_content(other, &mut record);
        catalog.write(batch).unwrap();
        assert_eq!(catalog.checksums(other, &record).unwrap(), []);
        catalog.scan(cf::CHUNKS, b"", |key, _| panic!("{key:?}")).unwrap();
    }

    #[test]
    fn the_chunk_in_which_a_file_ended_is_forgotten_when_it_grows() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        for chunks in [1, 2, 64, 65, 66] {
            let (id, size) = (ContentId(chunks), chunks * CHUNK_BYTES - 5);
            let mut record = ContentRecord::empty(Ino(2), 1);
            for chunk in (0..chunks).filter(|chunk| chunk % 3 != 1 || chunk + 1 == chunks) {
                let start = chunk * CHUNK_BYTES;
                record.landed(chunk as u32, start..size.min(start + CHUNK_BYTES), 7);
                let mut batch = catalog.batch();
                batch.put_chunk(id, &record, chunk as u32);
                catalog.write(batch).unwrap();
            }
            let last = chunks as u32 - 1;
            assert_eq!(record.forget_short_chunk(size), Some(last));
            assert_eq!(record.forget_short_chunk(size), None);
            let start = u64::from(last) * CHUNK_BYTES;
            assert_eq!(record.extents().missing(start..size), std::slice::from_ref(&(start..size)));
            assert_eq!(record.clone().forget_short_chunk(start), None, "it ends with a chunk");
            let mut batch = catalog.batch();
            batch.put_chunk(id, &record, last);
            catalog.write(batch).unwrap();
            assert_eq!(catalog.partial_content(id, size + 100).unwrap().unwrap(), record, "{chunks} chunks");
        }
    }
}
