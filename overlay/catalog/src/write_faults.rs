//! Writes that fail on purpose, as on a full device; for tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{Error, ErrorKind, Result, Side};

/// The number that stands for all writes.
const ALL: u64 = u64::MAX;

/// Which write fails. Clones share the choice.
#[derive(Debug, Clone, Default)]
pub struct WriteFaults(Arc<AtomicU64>);

impl WriteFaults {
    /// Makes the write with this number fail, counted from 1, and no other one; 0: none.
    pub fn fail_write(&self, number: u64) {
        self.0.store(number, Ordering::Release);
    }

    /// Makes all writes fail from now on, until [`Self::fail_write`] says otherwise.
    pub fn fail_all(&self) {
        self.0.store(ALL, Ordering::Release);
    }

    /// Returns whether the write that was to fail has failed.
    pub fn has_failed(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Counts a write.
    ///
    /// # Errors
    /// `NoSpace` if this one is to fail.
    pub(super) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let one_less = |left: u64| if left == ALL { Some(ALL) } else { left.checked_sub(1) };
        match self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less) {
            Ok(1 | ALL) => {
                Err(Error::new(ErrorKind::NoSpace, Side::Cache, "write to the catalog: a test made it fail"))
            }
            _ => Ok(()),
        }
    }
}
