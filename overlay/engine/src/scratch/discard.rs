//! The end of scratch directories.

use forebay_api::scratch::ScratchDir;
use forebay_backends::{Error, Result, Side};
use forebay_cache::ContentNumbers;

use super::{ScratchUse, TakenScratch};
use crate::{Inner, Overlay};

impl Overlay {
    /// Removes a scratch directory with everything in it. An unknown one is no error. Blocks.
    ///
    /// # Errors
    /// `Busy` while it is being committed.
    pub fn discard_scratch(&self, id: &str) -> Result<()> {
        if !self.inner.scratch.known.lock().contains_key(id) {
            return Ok(());
        }
        let taken = self.inner.take_scratch(id, ScratchUse::Change)?;
        self.inner.discard_taken(&taken)
    }

    /// Removes a scratch directory that has nothing in it. Otherwise it stays and is returned, and its reservation ends. An
    /// unknown one is no error. Blocks.
    ///
    /// # Errors
    /// `Busy` while it is being committed.
    pub fn discard_empty_scratch(&self, id: &str) -> Result<Option<ScratchDir>> {
        if !self.inner.scratch.known.lock().contains_key(id) {
            return Ok(None);
        }
        // A commit takes the files away, and brings them back if it fails.
        let taken = self.inner.take_scratch(id, ScratchUse::Change)?;
        if self.inner.is_empty(&taken)? {
            self.inner.discard_taken(&taken)?;
            return Ok(None);
        }
        self.unreserve_scratch(id)?;
        self.inner.shown_scratch(id, None)
    }

    /// Ends the reservation of a scratch directory in which no job writes any more: it counts with what it occupies. An
    /// unknown one is no error. Blocks.
    ///
    /// # Errors
    /// The catalog cannot record it.
    pub fn unreserve_scratch(&self, id: &str) -> Result<()> {
        let inner = &self.inner;
        let mut all = inner.scratch.known.lock();
        let Some(limit) = all.get_mut(id).and_then(|known| known.record.limit_bytes.take()) else { return Ok(()) };
        if let Err(error) = inner.save_scratch(&all) {
            if let Some(known) = all.get_mut(id) {
                known.record.limit_bytes = Some(limit);
            }
            return Err(error);
        }
        // The next count charges it anew.
        inner.scratch.bell.notify_one();
        Ok(())
    }
}

impl Inner {
    /// Whether a scratch directory has nothing in it. One whose file system is not mounted may have.
    fn is_empty(&self, taken: &TakenScratch) -> Result<bool> {
        if !self.is_scratch_there(&taken.id, &taken.record) {
            return Ok(false);
        }
        let path = self.store.scratch_path(taken.record.device, &taken.id)?;
        let first = std::fs::read_dir(&path).and_then(|mut entries| entries.next().transpose());
        first.map(|first| first.is_none()).map_err(|e| Error::io(e, Side::Cache, path.display().to_string()))
    }

    fn discard_taken(&self, taken: &TakenScratch) -> Result<()> {
        let id = &taken.id;
        // Immutable files cannot be removed.
        let is_there = self.is_scratch_there(id, &taken.record);
        if is_there {
            self.unseal(id, &taken.record)?;
        }
        let number = self.catalog.new_content()?.0;
        let mut all = self.scratch.known.lock();
        let Some(known) = all.remove(id) else { return Ok(()) };
        let device = known.record.device;
        // Until the files are removed, the device has them. What was reserved beyond them is free at once. A tree that was
        // not counted yet is counted by the loop that removes it.
        let kept_bytes = if is_there { known.used_bytes.min(known.charged_bytes) } else { 0 };
        if kept_bytes > 0 {
            self.scratch.discarded.lock().insert((device, number), kept_bytes);
        }
        // Before the directory goes: one that is not there at the next start is missing, and not discarded.
        let removed = self.save_scratch(&all).and_then(|()| match is_there {
            true => self.store.discard_scratch(device, id, number),
            false => Ok(()),
        });
        if removed.is_err() {
            self.scratch.discarded.lock().remove(&(device, number));
        }
        if let Err(error) = removed {
            all.insert(id.to_owned(), known);
            self.save_scratch(&all)?;
            return Err(error);
        }
        self.charge_owner_of_scratch(id, None);
        drop(all);
        self.store.account_on(device, known.charged_bytes, kept_bytes);
        // The loop removes the files.
        self.scratch.bell.notify_one();
        Ok(())
    }
}
