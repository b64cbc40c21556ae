//! One change of the overlay. The batch also maintains the index of intents, so that no change can forget it.

use std::collections::BTreeSet;

use rocksdb::WriteBatch;

use super::lost_contents::Forgotten;
use super::records::{InodeRecord, Leases, NameRecord, encode};
use super::{Catalog, Intent, cf, name_key};
use crate::Ino;

pub struct Batch<'a> {
    pub(super) catalog: &'a Catalog,
    pub(super) inner: WriteBatch,
    /// Content whose loss records are forgotten when this batch is written.
    pub(super) forgotten: Vec<Forgotten>,
    /// Keys of the names that this batch changes.
    pub(super) names: Vec<Vec<u8>>,
    /// Users for whom this batch adds entries to the queue.
    pub(super) queued_for: BTreeSet<u32>,
    /// Parts are to be removed from the pool after this batch.
    pub(super) parts_leave: bool,
}

impl<'a> Batch<'a> {
    pub(super) fn new(catalog: &'a Catalog) -> Self {
        let (forgotten, names, queued_for) = Default::default();
        Self { catalog, inner: WriteBatch::default(), forgotten, names, queued_for, parts_leave: false }
    }

    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Sets the record of a name. `was` is the record that it replaces; `user` is the user who made the change.
    pub fn put_name(&mut self, parent: Ino, name: &[u8], was: &NameRecord, record: &NameRecord, user: u32) {
        let key = name_key(parent, name);
        if record.is_empty() {
            self.delete_raw(cf::NAMES, &key);
        } else {
            self.put_raw(cf::NAMES, &key, &encode(record));
        }
        self.names.push(key);
        self.mark(&Intent::Name(parent, name.into()), was.differs(), record.differs(), user);
    }

    /// Sets an inode's record. `was_dirty`: whether the record that it replaces was dirty.
    pub fn put_inode(&mut self, ino: Ino, record: &InodeRecord, was_dirty: bool) {
        self.put_raw(cf::INODES, &ino.0.to_be_bytes(), &encode(record));
        self.mark(&Intent::Inode(ino), was_dirty, record.is_dirty(), record.uid);
    }

    pub fn delete_inode(&mut self, ino: Ino, was_dirty: bool) {
        self.delete_raw(cf::INODES, &ino.0.to_be_bytes());
        self.mark(&Intent::Inode(ino), was_dirty, false, 0);
    }

    pub fn put_leases(&mut self, ino: Ino, leases: &Leases) {
        match leases.is_empty() {
            true => self.delete_leases(ino),
            false => self.put_raw(cf::LEASES, &ino.0.to_be_bytes(), &encode(leases)),
        }
    }

    pub fn delete_leases(&mut self, ino: Ino) {
        self.delete_raw(cf::LEASES, &ino.0.to_be_bytes());
    }

    pub fn put_object(&mut self, identity: &[u8], ino: Ino) {
        self.put_raw(cf::OBJECTS, identity, &encode(&ino));
    }

    pub fn delete_object(&mut self, identity: &[u8]) {
        self.delete_raw(cf::OBJECTS, identity);
    }

    /// Sets a single fact with the same batch.
    pub fn put_meta<T: serde::Serialize>(&mut self, key: &str, value: &T) {
        self.put_raw(cf::META, key.as_bytes(), &encode(value));
    }

    fn mark(&mut self, intent: &Intent, was: bool, is: bool, user: u32) {
        match (was, is) {
            (false, true) => self.enter_queue(user, intent),
            (true, false) => self.delete_raw(cf::INTENTS, &intent.encode()),
            _ => {}
        }
    }

    pub(super) fn put_raw(&mut self, family: &str, key: &[u8], value: &[u8]) {
        if let Ok(family) = self.catalog.family(family) {
            self.inner.put_cf(family, key, value);
        }
    }

    pub(super) fn delete_raw(&mut self, family: &str, key: &[u8]) {
        if let Ok(family) = self.catalog.family(family) {
            self.inner.delete_cf(family, key);
        }
    }
}

impl Catalog {
    /// Returns the number of the last change. It grows with each change.
    pub fn last_change(&self) -> u64 {
        self.db.latest_sequence_number()
    }
}
