//! How many readers and writers have a file open.

use std::sync::atomic::{AtomicU64, Ordering};

/// The opens of one file. A change that the daemon makes for a request counts as a writer while it is under way.
#[derive(Debug, Default)]
pub(crate) struct FileOpens {
    readers: u32,
    writers: u32,
    changes: u32,
    /// Opens by programs that are not counted yet.
    opening: u32,
    direct: bool,
    bypasses: bool,
    passes: bool,
}

impl FileOpens {
    /// Counts an open by a program. `direct`: for direct I/O. `all`: the opens of all files.
    pub fn add(&mut self, write: bool, direct: bool, all: &AtomicU64) {
        *self.count(write) += 1;
        self.direct |= write && direct;
        all.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends an open with the same access. An open that was not counted belonged to an earlier daemon and is ignored.
    pub fn remove(&mut self, write: bool, all: &AtomicU64) {
        let count = self.count(write);
        if *count > 0 {
            *count -= 1;
            all.fetch_sub(1, Ordering::Relaxed);
        }
        self.forget_writers();
    }

    pub fn begin_opening(&mut self) {
        self.opening += 1;
    }

    pub fn end_opening(&mut self) {
        debug_assert!(self.opening > 0, "an open ended that had not begun");
        self.opening = self.opening.saturating_sub(1);
    }

    /// Whether a program is about to have the file open.
    pub fn is_opening(&self) -> bool {
        self.opening > 0
    }

    /// Notes that this daemon let a writer write without it.
    pub fn note_bypass(&mut self) {
        self.bypasses = true;
    }

    /// Whether this daemon let a writer write without it, and there has been a writer ever since. The kernel may be about
    /// to open the content file for it.
    pub fn may_bypass(&self) -> bool {
        self.bypasses
    }

    /// Notes that this daemon let a program read or write without it.
    pub fn note_passthrough(&mut self) {
        self.passes = true;
    }

    /// Whether this daemon let a program read or write without it, and the file was open ever since. The kernel may be
    /// about to open the content file for it.
    pub fn may_pass_through(&self) -> bool {
        self.passes || self.bypasses
    }

    pub fn begin_change(&mut self) {
        self.changes += 1;
    }

    pub fn end_change(&mut self) {
        debug_assert!(self.changes > 0, "a change ended that had not begun");
        self.changes = self.changes.saturating_sub(1);
        self.forget_writers();
    }

    /// Whether the daemon changes the file for a request just now.
    pub fn is_changing(&self) -> bool {
        self.changes > 0
    }

    pub fn has_writer(&self) -> bool {
        self.writers + self.changes > 0
    }

    pub fn any(&self) -> bool {
        self.readers > 0 || self.has_writer()
    }

    /// Whether a writer has it open for direct I/O. Such a write may still be under way when the file's times no longer
    /// change.
    pub fn writes_direct(&self) -> bool {
        self.direct
    }

    /// Forgets what was known of writers if none is left.
    fn forget_writers(&mut self) {
        self.direct &= self.has_writer();
        self.bypasses &= self.has_writer();
        self.passes &= self.any();
    }

    fn count(&mut self, write: bool) -> &mut u32 {
        if write { &mut self.writers } else { &mut self.readers }
    }
}
