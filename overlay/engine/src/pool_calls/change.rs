//! The daemon's own calls that change the pool.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use forebay_backends::{PoolPath, Result};
use forebay_catalog::ListingState;

use crate::{Inner, Ino, Txn};

/// Counts a pool call that changes the pool's copy of an inode, or a directory's names, as under way until it is
/// dropped.
pub(crate) struct PoolChange<'a> {
    inner: &'a Inner,
    inos: Vec<Ino>,
    moved: Vec<Ino>,
}

impl<'a> PoolChange<'a> {
    pub fn begin(inner: &'a Inner, inos: &[Ino]) -> Result<Self> {
        Self::begin_any(inner, inos, &[])
    }

    /// `moved`: the directories that the call moves, or replaces by another one. The paths of everything below them
    /// change.
    pub fn begin_any(inner: &'a Inner, inos: &[Ino], moved: &[Ino]) -> Result<Self> {
        let mut change = Self { inner, inos: Vec::new(), moved: moved.to_vec() };
        if !moved.is_empty() {
            let count = || _ = inner.pool_calls.dir_moves.0.fetch_add(1, Ordering::SeqCst);
            inner.pool_calls.watches.move_begins(moved, count);
        }
        // An inode that is listed twice counts one call.
        for ino in inos.iter().copied().collect::<HashSet<_>>() {
            inner.node(ino)?.state.lock().pool_calls.0 += 1;
            change.inos.push(ino);
        }
        Ok(change)
    }
}

impl Drop for PoolChange<'_> {
    fn drop(&mut self) {
        if !self.moved.is_empty() {
            let count = || _ = self.inner.pool_calls.dir_moves.1.fetch_add(1, Ordering::SeqCst);
            self.inner.pool_calls.watches.move_ended(&self.moved, count);
        }
        self.inner.pool_calls.watches.call_ended(&self.inos);
        for ino in &self.inos {
            let Ok(node) = self.inner.node(*ino) else { continue };
            let unlinked = {
                let mut state = node.state.lock();
                state.pool_calls.1 += 1;
                state.is_unlinked(*ino) && !state.is_deleted() && !state.opens.any()
            };
            if unlinked {
                let mut txn = Txn::begin(self.inner);
                if let Err(error) = txn.reap(*ino).and_then(|()| txn.commit()) {
                    tracing::error!(%error, %ino, "an inode without names is not removed before the next start");
                }
            }
        }
    }
}

impl Inner {
    /// Tells the other nodes of the cluster that the pool's object under a path has changed, or that the name has.
    pub(crate) fn announce(&self, path: &PoolPath) {
        if let Some(peers) = self.peers.get().filter(|_| !path.is_root()) {
            peers.announce(path);
        }
    }

    /// Tells them that an object has changed, by all of its known names in the pool.
    pub(crate) fn announce_object(&self, ino: Ino) {
        let (Some(_), Ok(node)) = (self.peers.get(), self.node(ino)) else { return };
        let names = node.state.lock().record.pool_links.clone();
        for (parent, name) in names {
            if let Ok(path) = self.pool_path_of(parent, &name) {
                self.announce(&path);
            }
        }
    }
}

/// Makes the next look at a directory ask the pool, however fresh its cached state is: the pool has more names there
/// than the catalog knew.
pub(crate) fn look_again(txn: &mut Txn<'_>, dir: Ino) -> Result<()> {
    txn.record(dir)?.listing = ListingState::Partly;
    txn.inner().pool_calls.watches.look_again(dir);
    let state = txn.state_at_once(dir)?;
    state.names.listed_at = None;
    state.names.negative.clear();
    Ok(())
}
