//! Files that the kernel holds open since before this daemon.

use forebay_backends::{Result, Time};

use super::super::{Ino, Overlay};
use super::open::writes;
use crate::node::WrittenPast;

impl Overlay {
    /// The kernel holds these files open since before this daemon, and each is about to be opened again: until then what
    /// another client appended to them is brought in as if they were open.
    pub fn expect_inherited(&self, inos: impl Iterator<Item = Ino>) {
        self.inner.inherited.lock().extend(inos);
    }

    /// All opens of a file were tried again.
    pub fn inherited(&self, ino: Ino) {
        self.inner.inherited.lock().remove(&ino);
    }

    /// Opens a file again that the kernel holds since before this daemon: what writes it may write past us.
    pub async fn open_inherited(&self, ino: Ino, flags: i32) -> Result<()> {
        self.open_file(ino, flags).await?;
        if writes(flags) {
            let node = self.inner.node(ino)?;
            let mut state = node.state.lock();
            // What was written before is not known: no content has this size.
            let unknown = (state.record.mode & 0o6000 != 0).then(|| (u64::MAX, Time::default()));
            state.written_past = Some(WrittenPast { set_id_since: unknown });
        }
        Ok(())
    }
}
