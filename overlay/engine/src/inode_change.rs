//! One change of the records of one inode that no name shows: its content and its leases.
//!
//! It needs the lock of the inode alone. A change of names, or of several inodes, is a [`crate::Txn`].

use std::ops::Range;

use forebay_backends::Result;
use forebay_cache::ContentId;
use forebay_catalog::{Batch, Catalog, ContentRecord, FileState, InodeRecord, Leases};

use crate::Ino;
use crate::node::NodeState;

/// A change that is being collected. [`InodeChange::commit`] writes it as one batch, and then makes it visible. If it is
/// dropped before, or cannot be written, the inode keeps the records that the catalog has.
pub(crate) struct InodeChange<'a> {
    catalog: &'a Catalog,
    ino: Ino,
    state: &'a mut NodeState,
    batch: Batch<'a>,
    file: Option<FileState>,
    leases: Option<Leases>,
    saves_count: bool,
    /// The record of the valid bytes in memory has a chunk that the catalog does not have. The byte count from before.
    bytes_before_chunk: Option<u64>,
}

impl<'a> InodeChange<'a> {
    pub fn begin(catalog: &'a Catalog, ino: Ino, state: &'a mut NodeState) -> Self {
        Self {
            catalog,
            ino,
            state,
            batch: catalog.batch(),
            file: None,
            leases: None,
            saves_count: false,
            bytes_before_chunk: None,
        }
    }

    /// Adds a fetched chunk to the valid bytes of a content file. Returns the record with the chunk.
    ///
    /// The record can be large, so it is changed in place. If the change is not written, it is read from the catalog
    /// again.
    pub fn add_chunk(
        &mut self,
        id: ContentId,
        chunk: u32,
        range: Range<u64>,
        checksum: u32,
        (epoch, occupied): (u64, u64),
    ) -> Result<&ContentRecord> {
        let residency = self.state.residency(self.catalog)?;
        self.bytes_before_chunk.get_or_insert(residency.bytes);
        residency.landed(chunk, range, checksum);
        // The bytes that it has already may be of a later epoch than these: all of them are trusted only with the last one.
        residency.epoch = residency.epoch.max(epoch);
        residency.bytes = occupied;
        self.batch.put_chunk(id, residency, chunk);
        Ok(residency)
    }

    /// Records that all bytes are valid.
    pub fn complete(&mut self) -> Result<()> {
        let file = self.state.record.file.complete()?;
        let record = InodeRecord { file, ..self.state.record.clone() };
        self.batch.put_inode(self.ino, &record, self.state.indexed_dirty);
        self.file = Some(file);
        Ok(())
    }

    /// Saves the byte count of the content.
    pub fn save_count(&mut self) -> Result<()> {
        if let Some(id) = self.state.record.file.content() {
            self.batch.put_content(id, self.state.residency(self.catalog)?);
            self.saves_count = true;
        }
        Ok(())
    }

    pub fn set_leases(&mut self, leases: Leases) {
        self.batch.put_leases(self.ino, &leases);
        self.leases = Some(leases);
    }

    pub fn commit(mut self) -> Result<()> {
        self.catalog.write(std::mem::replace(&mut self.batch, self.catalog.batch()))?;
        self.bytes_before_chunk = None;
        if let Some(file) = self.file {
            self.state.record.file = file;
            if let Some(residency) = &mut self.state.residency {
                residency.completed();
            }
        }
        if let Some(leases) = self.leases.take() {
            self.state.leases = leases;
        }
        self.state.count_unsaved &= !self.saves_count;
        Ok(())
    }
}

impl Drop for InodeChange<'_> {
    fn drop(&mut self) {
        let Some(bytes) = self.bytes_before_chunk else { return };
        self.state.residency = None;
        // The space budget counts these bytes, which can be more than the catalog knows.
        if let Ok(residency) = self.state.residency(self.catalog) {
            residency.bytes = bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_cache::CHUNK_BYTES;
    use forebay_catalog::{Durability, LeaseRecord};

    use super::*;
    use crate::node::NodeTable;
    use crate::node::tests::file_of_pool;

    const INO: Ino = Ino(1000);
    const ID: ContentId = ContentId(7);

    /// A chunk that lands late may have taken its epoch before another one that landed first.
    #[test]
    fn content_belongs_to_the_last_epoch_of_its_chunks() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let mut batch = catalog.batch();
        let file = FileState::absent().begin_fetch(ID).unwrap();
        batch.put_inode(INO, &InodeRecord { file, ..file_of_pool(2 * CHUNK_BYTES) }, false);
        batch.put_content(ID, &ContentRecord::empty(INO, 1));
        catalog.write(batch).unwrap();
        let node = NodeTable::default().get(&catalog, INO, |_| Ok(())).unwrap().unwrap();
        let mut state = node.state.lock();
        for (chunk, epoch) in [(0, 2), (1, 1)] {
            let start = u64::from(chunk) * CHUNK_BYTES;
            let mut change = InodeChange::begin(&catalog, INO, &mut state);
            change.add_chunk(ID, chunk, start..start + CHUNK_BYTES, 1, (epoch, start + CHUNK_BYTES)).unwrap();
            change.commit().unwrap();
            assert_eq!(catalog.content(ID).unwrap().unwrap().epoch, 2);
        }
    }

    #[test]
    fn a_change_that_is_not_written_is_not_visible() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let mut batch = catalog.batch();
        let file = FileState::absent().begin_fetch(ID).unwrap();
        batch.put_inode(INO, &InodeRecord { file, ..file_of_pool(2 * CHUNK_BYTES) }, false);
        batch.put_content(ID, &ContentRecord::empty(INO, 1));
        catalog.write(batch).unwrap();
        let node = NodeTable::default().get(&catalog, INO, |_| Ok(())).unwrap().unwrap();
        let mut state = node.state.lock();
        let mut leases = Leases::default();
        leases.grant(LeaseRecord { owner: "job 1".into(), expires_unix: None, bytes: 1 }, 1);

        let mut change = InodeChange::begin(&catalog, INO, &mut state);
        change.add_chunk(ID, 0, 0..CHUNK_BYTES, 1, (1, CHUNK_BYTES)).unwrap();
        change.commit().unwrap();
        state.residency(&catalog).unwrap().bytes += 4096;
        for written in [false, true] {
            let mut change = InodeChange::begin(&catalog, INO, &mut state);
            change.add_chunk(ID, 1, CHUNK_BYTES..2 * CHUNK_BYTES, 2, (2, 2 * CHUNK_BYTES)).unwrap();
            change.complete().unwrap();
            change.set_leases(leases.clone());
            if written {
                change.commit().unwrap();
            } else {
                drop(change);
            }
            let stored = catalog.inode(INO).unwrap().unwrap();
            assert_eq!((state.record.file, state.record.file.is_whole()), (stored.file, written));
            assert_eq!((&state.leases, state.leases.is_empty()), (&catalog.leases_of(INO).unwrap(), !written));
            let residency = state.residency(&catalog).unwrap();
            let expected = if written { (0, 2, 2 * CHUNK_BYTES) } else { (CHUNK_BYTES, 1, CHUNK_BYTES + 4096) };
            assert_eq!((residency.extents().bytes(), residency.epoch, residency.bytes), expected);
        }
    }
}
