//! Names that were looked up last. Who makes a file has looked for its name first, more than once, and a name that is
//! nowhere is what the database takes longest to say.

use std::hash::{BuildHasher, RandomState};

use forebay_backends::Result;
use parking_lot::Mutex;

use super::NameRecord;

/// Each name has one of them, and is forgotten where another name takes it. More than there are threads that make files.
const PLACES: usize = 64;

pub(super) struct RecentNames {
    places: [Mutex<Place>; PLACES],
    hashed: RandomState,
}

#[derive(Default)]
struct Place {
    /// Changes of names that have this place.
    changes: u64,
    known: Option<(Box<[u8]>, NameRecord)>,
}

impl RecentNames {
    pub fn new() -> Self {
        Self { places: std::array::from_fn(|_| Mutex::default()), hashed: RandomState::new() }
    }

    fn place(&self, key: &[u8]) -> &Mutex<Place> {
        &self.places[self.hashed.hash_one(key) as usize % PLACES]
    }

    /// What is known of a name, or else what `read` finds, which is known from now on, unless the name was changed while
    /// it was read.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn get(&self, key: &[u8], read: impl FnOnce() -> Result<NameRecord>) -> Result<NameRecord> {
        let changes = {
            let place = self.place(key).lock();
            match &place.known {
                Some((known, record)) if **known == *key => return Ok(record.clone()),
                _ => place.changes,
            }
        };
        let record = read()?;
        let mut place = self.place(key).lock();
        if place.changes == changes {
            place.known = Some((key.into(), record.clone()));
        }
        Ok(record)
    }

    /// To be called after a change of a name, and before its end is told to anybody.
    pub fn forget(&self, key: &[u8]) {
        let mut place = self.place(key).lock();
        place.changes += 1;
        place.known = None;
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
