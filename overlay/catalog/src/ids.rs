//! Unique numbers, reserved in blocks so that giving one out needs no write.

use forebay_backends::Result;
use parking_lot::Mutex;

use super::Catalog;

/// Numbers reserved by one write.
const BLOCK: u64 = 65_536;

pub(super) struct IdAllocator {
    key: &'static str,
    first: u64,
    /// The next number, and the end of the reserved range.
    state: Mutex<(u64, u64)>,
    /// Held during a reservation; the remaining numbers are given out meanwhile.
    reserving: Mutex<()>,
}

impl IdAllocator {
    pub fn new(key: &'static str, first: u64) -> Self {
        Self { key, first, state: Mutex::new((0, 0)), reserving: Mutex::new(()) }
    }

    pub fn next(&self, catalog: &Catalog) -> Result<u64> {
        loop {
            if let Some(number) = self.take() {
                return Ok(number);
            }
            self.reserve(catalog, 1)?;
        }
    }

    /// Reserves more numbers when half a block is used up, so that a caller does not wait for the disk. Blocks.
    pub fn refill(&self, catalog: &Catalog) -> Result<()> {
        self.reserve(catalog, BLOCK / 2)
    }

    fn take(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let (next, end) = *state;
        (next < end).then(|| {
            state.0 += 1;
            next
        })
    }

    /// Makes sure that at least `least` numbers are left. Other callers may take some of them.
    fn reserve(&self, catalog: &Catalog, least: u64) -> Result<()> {
        let _alone = self.reserving.lock();
        let left = |(next, end): (u64, u64)| end - next;
        if left(*self.state.lock()) >= least {
            return Ok(());
        }
        let start = catalog.meta::<u64>(self.key)?.unwrap_or(self.first);
        catalog.set_meta(self.key, &(start + BLOCK))?;
        // If a power cut undid the reservation, its numbers would be given out again, and would also name what they
        // named before.
        catalog.sync()?;
        let mut state = self.state.lock();
        if left(*state) == 0 {
            state.0 = start;
        }
        state.1 = start + BLOCK;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;

    #[test]
    fn each_number_is_given_once_whoever_reserves() {
        const EACH: u64 = BLOCK;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog");
        let catalog = Catalog::open(&path, Durability::Process).unwrap();
        let ids = IdAllocator::new("some", 5);
        let mut given: Vec<u64> = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| (0..EACH).map(|_| ids.next(&catalog).unwrap()).collect::<Vec<_>>()))
                .collect();
            (0..20).for_each(|_| ids.refill(&catalog).unwrap());
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        given.sort_unstable();
        // No number is given twice, and none is skipped. A new allocator begins after the reserved numbers.
        assert_eq!(given, (5..5 + 3 * EACH).collect::<Vec<_>>());
        let reserved = catalog.meta::<u64>("some").unwrap().unwrap();
        assert!((5 + 3 * EACH..=5 + 5 * EACH).contains(&reserved), "{reserved}");
        assert_eq!(IdAllocator::new("some", 5).next(&catalog).unwrap(), reserved);
    }
}
