//! A cache of the names that were looked up last. A program that creates a file looks the name up first, more than
//! once, and the database takes longest for a name that does not exist.

use std::hash::{BuildHasher, RandomState};

use forebay_backends::Result;
use parking_lot::Mutex;

use super::NameRecord;

/// Number of slots. A name has one slot, by its hash, and is forgotten when another name takes the slot. The number
/// exceeds the number of threads that create files.
const SLOTS: usize = 64;

pub(super) struct RecentNames {
    slots: [Mutex<RecentSlot>; SLOTS],
    hashed: RandomState,
}

#[derive(Default)]
struct RecentSlot {
    /// Changes of all names that hash to this slot.
    changes: u64,
    known: Option<(Box<[u8]>, NameRecord)>,
}

impl RecentNames {
    pub fn new() -> Self {
        Self { slots: std::array::from_fn(|_| Mutex::default()), hashed: RandomState::new() }
    }

    fn slot(&self, key: &[u8]) -> &Mutex<RecentSlot> {
        &self.slots[self.hashed.hash_one(key) as usize % SLOTS]
    }

    /// Returns the cached record of a name. On a miss, calls `read` and caches the result, unless the name was changed
    /// during the read.
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn get(&self, key: &[u8], read: impl FnOnce() -> Result<NameRecord>) -> Result<NameRecord> {
        let changes = {
            let slot = self.slot(key).lock();
            match &slot.known {
                Some((known, record)) if **known == *key => return Ok(record.clone()),
                _ => slot.changes,
            }
        };
        let record = read()?;
        let mut slot = self.slot(key).lock();
        if slot.changes == changes {
            slot.known = Some((key.into(), record.clone()));
        }
        Ok(record)
    }

    /// Forgets a name. To be called after the name was changed, and before the change is acknowledged.
    pub fn forget(&self, key: &[u8]) {
        let mut slot = self.slot(key).lock();
        slot.changes += 1;
        slot.known = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ino;

    fn record(ino: u64) -> NameRecord {
        NameRecord { pool: Some(Ino(ino)), ..NameRecord::default() }
    }

    #[test]
    fn what_is_known_is_not_read_again_until_it_changes() {
        let names = RecentNames::new();
        assert_eq!(names.get(b"a", || Ok(record(1))).unwrap(), record(1));
        assert_eq!(names.get(b"a", || panic!("read again")).unwrap(), record(1));
        names.forget(b"a");
        assert_eq!(names.get(b"a", || Ok(record(2))).unwrap(), record(2));
    }

    #[test]
    fn what_was_read_before_a_change_is_not_known_after_it() {
        let names = RecentNames::new();
        let before = names.get(b"a", || {
            names.forget(b"a");
            Ok(record(1))
        });
        assert_eq!(before.unwrap(), record(1));
        assert_eq!(names.get(b"a", || Ok(record(2))).unwrap(), record(2));
    }

    #[test]
    fn names_that_have_one_place_are_told_apart() {
        let names = RecentNames::new();
        for name in 0..1000_u64 {
            names.get(&name.to_be_bytes(), || Ok(record(name))).unwrap();
        }
        for name in 0..1000_u64 {
            assert_eq!(names.get(&name.to_be_bytes(), || Ok(record(name))).unwrap(), record(name));
        }
    }
}
