//! Epochs of fetched content. After a power cut, content that was fetched in an epoch is trusted only if the epoch was
//! closed. The fast pool is synced before an epoch is closed.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::Result;
use parking_lot::Mutex;

use super::boot::boot_id;
use super::{Catalog, Durability};

/// The epochs of a catalog.
#[derive(Debug)]
pub(super) struct EpochNumbers {
    /// The present epoch. The catalog has this number or a greater one, so that no epoch after a power cut has it, too.
    present: AtomicU64,
    /// Held while another epoch begins or is closed.
    turn: Mutex<()>,
    /// Epochs that ended in a power cut: from..=to.
    dead: Vec<(u64, u64)>,
}

impl EpochNumbers {
    pub fn at(present: u64) -> Self {
        Self { present: AtomicU64::new(present), turn: Mutex::default(), dead: Vec::new() }
    }
}

impl Catalog {
    /// Begins an epoch. Epochs that were open when the machine lost power are dead: content that was fetched in them
    /// may not be on the disk.
    pub(super) fn start_epoch(&mut self, durability: Durability) -> Result<()> {
        let boot = boot_id();
        // In tests that simulate power cuts, each start follows one.
        let boot = if durability == Durability::SyncedOnly { format!("{:x}", rand::random::<u64>()) } else { boot };
        let last = self.meta::<u64>("epoch")?.unwrap_or(0);
        let closed = self.meta::<u64>("closed_epoch")?.unwrap_or(0);
        self.epochs.dead = self.meta("dead_epochs")?.unwrap_or_default();
        if self.meta::<String>("boot")?.is_some_and(|b| b != boot) && closed < last {
            self.epochs.dead.push((closed + 1, last));
            self.set_meta("dead_epochs", &self.epochs.dead)?;
        }
        self.set_meta("boot", &boot)?;
        self.set_meta("epoch", &(last + 1))?;
        *self.epochs.present.get_mut() = last + 1;
        self.sync()
    }

    /// Returns the present epoch. It never becomes less while the catalog is open.
    pub fn epoch(&self) -> u64 {
        self.epochs.present.load(Ordering::Acquire)
    }

    /// Begins a new epoch and returns the previous one. The caller syncs the fast pool, then calls
    /// [`Self::close_epoch`] with it.
    ///
    /// # Errors
    /// Those of the catalog. Then the epoch goes on.
    pub fn next_epoch(&self) -> Result<u64> {
        let _alone = self.epochs.turn.lock();
        let last = self.epoch();
        // First: a number that the catalog does not have would be given again after a power cut.
        self.set_meta("epoch", &(last + 1))?;
        self.epochs.present.store(last + 1, Ordering::Release);
        Ok(last)
    }

    /// Records that the content of an epoch and of those before it is on the disk.
    pub fn close_epoch(&self, epoch: u64) -> Result<()> {
        let _alone = self.epochs.turn.lock();
        // Another caller may have closed a later one meanwhile.
        if epoch <= self.closed_epoch()? {
            return Ok(());
        }
        self.set_meta("closed_epoch", &epoch)
    }

    fn closed_epoch(&self) -> Result<u64> {
        Ok(self.meta("closed_epoch")?.unwrap_or(0))
    }

    /// Returns whether content that was fetched in an epoch is certainly on the disk.
    pub fn is_closed(&self, epoch: u64) -> Result<bool> {
        Ok(epoch <= self.closed_epoch()? && !self.is_dead(epoch))
    }

    pub fn has_dead_epochs(&self) -> bool {
        !self.epochs.dead.is_empty()
    }

    /// Returns whether content that was fetched in this epoch may have been lost in a power cut.
    pub fn is_dead(&self, epoch: u64) -> bool {
        self.epochs.dead.iter().any(|(from, to)| (*from..=*to).contains(&epoch))
    }
}

#[cfg(test)]
mod tests {
    use super::super::WriteFaults;
    use super::*;

    #[test]
    fn an_epoch_that_is_not_recorded_does_not_begin() {
        let dir = tempfile::tempdir().unwrap();
        let faults = WriteFaults::default();
        let open = || Catalog::open(&dir.path().join("catalog"), Durability::SyncedOnly).unwrap();
        let catalog = open().with_faults(faults.clone());
        let first = catalog.epoch();
        faults.fail_write(1);
        catalog.next_epoch().unwrap_err();
        assert_eq!(catalog.epoch(), first);
        // Content that is fetched now is lost in the power cut.
        let fetched_in = catalog.epoch();
        catalog.sync().unwrap();
        drop(catalog);
        let catalog = open();
        assert!(catalog.is_dead(fetched_in) && catalog.epoch() > fetched_in, "{fetched_in}");
    }

    #[test]
    fn epochs_that_begin_at_the_same_time_are_recorded_in_their_order() {
        const CALLERS: u64 = 8;
        const EPOCHS: u64 = 50;
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let first = catalog.epoch();
        std::thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| {
                    for _ in 0..EPOCHS {
                        let last = catalog.next_epoch().unwrap();
                        let recorded: u64 = catalog.meta("epoch").unwrap().unwrap();
                        assert!(recorded > last, "{recorded} after {last}");
                        catalog.close_epoch(last).unwrap();
                        assert!(catalog.is_closed(last).unwrap());
                    }
                });
            }
        });
        assert_eq!(catalog.epoch(), first + CALLERS * EPOCHS);
        assert_eq!(catalog.meta("epoch").unwrap(), Some(catalog.epoch()));
        assert!(catalog.is_closed(catalog.epoch() - 1).unwrap() && !catalog.is_closed(catalog.epoch()).unwrap());
    }
}
