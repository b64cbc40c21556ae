//! Partial content that can take no more bytes: its content file is missing or too short, or its device is bypassed.

use std::sync::Arc;

use forebay_backends::Result;
use forebay_cache::is_device_error;

use crate::node::Node;
use crate::{Inner, Txn};

impl Inner {
    /// Gives up the bytes of a partial file whose content file cannot be used. They are fetched again, into another one.
    /// While chunks are being fetched, nothing is done: these chunks fail.
    pub(super) fn leave_unusable(&self, node: &Arc<Node>) -> Result<()> {
        let (id, error) = {
            let mut state = node.state.lock();
            if !state.record.file.is_partial() || !state.flights.is_empty() {
                return Ok(());
            }
            match self.partial_content(node.ino, &mut state) {
                Err(error) if is_device_error(error.errno()) => (state.record.file.content(), error),
                _ => return Ok(()),
            }
        };
        let mut txn = Txn::begin(self);
        let state = txn.state(node.ino)?;
        let file = state.record.file;
        let same = file.is_partial() && file.content() == id && state.flights.is_empty();
        // If another client replaced it, its bytes cannot be fetched again.
        if !same || !state.record.in_pool() || state.is_superseded() {
            return Ok(());
        }
        txn.give_up(node.ino)?;
        txn.commit()?;
        self.advisor().evicted(node.ino);
        tracing::warn!(%error, path = self.display(node.ino), "its content cannot be used; it is fetched again");
        Ok(())
    }
}
