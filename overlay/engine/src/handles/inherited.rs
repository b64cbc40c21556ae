//! Files that the kernel has held open since before this daemon started.

use forebay_backends::Result;

use super::super::{Ino, Overlay, is_writable};
use crate::set_id::UNKNOWN;

impl Overlay {
    /// Declares files that the kernel has held open since before this daemon started. Each is about to be opened again.
    /// Until then they count as open: data that another client appended to them is fetched.
    pub fn expect_inherited(&self, inos: impl Iterator<Item = Ino>) {
        self.inner.mount.inherited.lock().extend(inos);
    }

    /// Ends the declaration of a file, after all of its opens were tried again.
    pub fn inherited(&self, ino: Ino) {
        self.inner.mount.inherited.lock().remove(&ino);
    }

    /// Opens again a file that the kernel has held open since before this daemon started. A writer may write past the
    /// daemon.
    pub async fn open_inherited(&self, ino: Ino, flags: i32) -> Result<()> {
        self.open_file(ino, flags).await?;
        if is_writable(flags) {
            let node = self.inner.node(ino)?;
            let mut state = node.state.lock();
            // It is not known whether the file was written before.
            let unknown = (state.record.mode & 0o6000 != 0).then_some(UNKNOWN);
            // The kernel never writes the content file of a spilled file.
            if !state.record.file.is_spilled() {
                state.bypass.open();
                state.bypass.note_set_id(unknown);
            }
        }
        Ok(())
    }
}
