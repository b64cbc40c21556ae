//! What is valid in a content file. The catalog has a head of it, and the checksums of its chunks in groups, so that what
//! is written for one more chunk does not grow with the file.

use std::ops::Range;

use forebay_backends::Result;
use serde::{Deserialize, Serialize};

use super::records::encode;
use super::{Batch, Catalog, cf, decoded};
use crate::Ino;
use forebay_cache::{CHUNK_BYTES, ContentId, ExtentSet};

/// The first group is in the head: most files have no other.
const GROUP_CHUNKS: u32 = 64;

/// What is valid in a content file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentRecord {
    pub ino: Ino,
    /// Bytes that it is known to occupy.
    pub bytes: u64,
    /// The epoch in which bytes were fetched into it last; see `Catalog::epoch`.
    pub epoch: u64,
    /// Valid ranges of a partial file; empty where all is valid or the content is dirty.
    extents: ExtentSet,
    checksums: Checksums,
    /// Groups that the catalog may have.
    groups: u32,
}

/// CRC32C of fetched chunks, by chunk number, ascending: of a partial file all of them, else those of the first group.
type Checksums = Vec<(u32, u32)>;

/// As the catalog has it.
#[derive(Serialize, Deserialize)]
struct Head {
    ino: Ino,
    bytes: u64,
    epoch: u64,
    groups: u32,
    first: Checksums,
}

impl ContentRecord {
    /// Of a content file with nothing in it.
    pub fn empty(ino: Ino, epoch: u64) -> Self {
        Self { ino, bytes: 0, epoch, extents: ExtentSet::default(), checksums: Checksums::new(), groups: 1 }
    }

    pub fn extents(&self) -> &ExtentSet {
        &self.extents
    }

    /// A chunk has come.
    pub fn landed(&mut self, chunk: u32, range: Range<u64>, checksum: u32) {
        self.extents.insert(range);
        match self.checksums.binary_search_by_key(&chunk, |(known, _)| *known) {
            Ok(at) => self.checksums[at].1 = checksum,
            Err(at) => self.checksums.insert(at, (chunk, checksum)),
        }
        self.groups = self.groups.max(chunk / GROUP_CHUNKS + 1);
    }

    /// The file grows beyond `size`, which ends within this chunk: the chunk, where it is here, is only a part of what it
    /// is to be.
    pub fn forget_short_chunk(&mut self, size: u64) -> Option<u32> {
        let chunk = u32::try_from(size / CHUNK_BYTES).ok()?;
        if size.is_multiple_of(CHUNK_BYTES) || self.checksums.last().is_none_or(|(last, _)| *last != chunk) {
            return None;
        }
        self.checksums.pop();
        self.extents.truncate(u64::from(chunk) * CHUNK_BYTES);
        Some(chunk)
    }

    /// All chunks have come, and are in the catalog.
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
    /// Without what only partial files need.
    pub fn content(&self, id: ContentId) -> Result<Option<ContentRecord>> {
        Ok(self.get(cf::RESIDENCY, &id.0.to_be_bytes())?.map(ContentRecord::of))
    }

    /// The same of a partial file of `size` bytes, with its valid ranges.
    pub fn partial_content(&self, id: ContentId, size: u64) -> Result<Option<ContentRecord>> {
        let Some(mut record) = self.content(id)? else { return Ok(None) };
        record.checksums = self.checksums(id, &record)?;
        for (chunk, _) in &record.checksums {
            let start = u64::from(*chunk) * CHUNK_BYTES;
            record.extents.insert(start..size.min(start + CHUNK_BYTES));
        }
        Ok(Some(record))
    }

    /// CRC32C of each fetched chunk, by chunk number, ascending.
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

    /// The same, where a chunk has landed.
    pub fn put_chunk(&mut self, id: ContentId, record: &ContentRecord, chunk: u32) {
        let group = chunk / GROUP_CHUNKS;
        if group > 0 {
            self.put_raw(cf::CHUNKS, &group_key(id, group), &encode(&record.group(group).to_vec()));
        }
        self.put_content(id, record);
    }

    /// The same, where other bytes came into the content file than were fetched.
    pub fn put_unproven_content(&mut self, id: ContentId, record: &mut ContentRecord) {
        self.delete_groups(id, record);
        record.checksums = Checksums::new();
        record.groups = 1;
        self.put_content(id, record);
    }

    pub fn delete_content(&mut self, id: ContentId) {
        // Of a record that cannot be read, groups stay that nobody ever asks for.
        if let Ok(Some(record)) = self.catalog.content(id) {
            self.delete_groups(id, &record);
        }
        self.delete_raw(cf::RESIDENCY, &id.0.to_be_bytes());
        if let Some(lost) = self.catalog.lost(id) {
            self.forget_lost(id, &lost);
        }
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
        // Nothing of it stays, and all of the other.
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
