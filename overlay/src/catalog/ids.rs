//! Numbers that are given once, reserved in blocks so that giving one is not a write.

use forebay_backends::Result;
use parking_lot::Mutex;

use super::Catalog;

/// Numbers reserved by one write.
const BLOCK: u64 = 4096;

pub(super) struct IdAllocator {
    key: &'static str,
    first: u64,
    /// Next number and end of the reserved block.
    state: Mutex<(u64, u64)>,
}

impl IdAllocator {
    pub fn new(key: &'static str, first: u64) -> Self {
        Self { key, first, state: Mutex::new((0, 0)) }
    }

    pub fn next(&self, catalog: &Catalog) -> Result<u64> {
        let mut state = self.state.lock();
        if state.0 == state.1 {
            let start = catalog.meta::<u64>(self.key)?.unwrap_or(self.first);
            catalog.set_meta(self.key, &(start + BLOCK))?;
            // A number that a power cut takes back would name what it left behind, too.
            catalog.sync()?;
            *state = (start, start + BLOCK);
        }
        state.0 += 1;
        Ok(state.0 - 1)
    }
}
