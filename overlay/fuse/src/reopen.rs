//! Files that a previous process opened and that the kernel still holds open.
//!
//! The engine must know of these files, or it would evict their content. They are opened again in the engine, in the
//! background, since the pool may not answer. A release that arrives before its open is remembered.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_engine::{Ino, Overlay};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::iomode::InheritedOpens;

/// Files that are opened again at the same time.
const PARALLEL: usize = 64;

/// Counts the inherited opens of each inode, for reading and for writing. A count is negative if releases came first.
#[derive(Default)]
pub struct InheritedCounts {
    balance: Mutex<HashMap<(Ino, bool), i64>>,
}

/// Returns the flags under which the engine knows an inherited open.
fn flags(writable: bool) -> i32 {
    if writable { libc::O_RDWR } else { libc::O_RDONLY }
}

impl InheritedCounts {
    /// Handles the release of a file that a previous process opened.
    pub fn release(&self, overlay: &Overlay, ino: Ino, writable: bool) {
        if self.add(ino, writable, -1) >= 0 {
            overlay.release(ino, flags(writable));
        }
    }

    /// Opens all of `opens` again. Returns when each was tried.
    pub async fn reopen(self: Arc<Self>, overlay: Overlay, opens: Vec<InheritedOpens>) {
        let permits = Arc::new(Semaphore::new(PARALLEL));
        let tasks = opens.into_iter().map(|open| {
            let (this, overlay, permits) = (Arc::clone(&self), overlay.clone(), Arc::clone(&permits));
            async move {
                let _permit = permits.acquire().await;
                let writers = (0..open.writers).map(|_| true);
                for writable in (0..open.readers).map(|_| false).chain(writers) {
                    this.reopen_one(&overlay, open.ino, writable).await;
                }
                overlay.inherited(open.ino);
            }
        });
        futures::future::join_all(tasks).await;
    }

    async fn reopen_one(&self, overlay: &Overlay, ino: Ino, writable: bool) {
        match overlay.open_inherited(ino, flags(writable)).await {
            Ok(()) if self.add(ino, writable, 1) > 0 => {}
            Ok(()) => overlay.release(ino, flags(writable)),
            Err(error) => tracing::warn!(%ino, %error, "a file that is open in the mount could not be opened again"),
        }
    }

    fn add(&self, ino: Ino, writable: bool, by: i64) -> i64 {
        let mut balance = self.balance.lock();
        let entry = balance.entry((ino, writable)).or_default();
        *entry += by;
        *entry
    }
}
