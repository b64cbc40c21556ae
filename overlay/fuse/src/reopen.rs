//! Files that a previous process opened and the kernel still holds.
//!
//! The engine must know of them, or it would take their content away. They are opened again on its side, in the
//! background, since the pool may not answer; a release that comes first is remembered.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_engine::{Ino, Overlay};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::iomode::Inherited;

/// Opens that are made again at once.
const PARALLEL: usize = 64;

/// How many adopted opens there are of an inode, for writing or not; negative where releases came first.
#[derive(Default)]
pub struct Adopted {
    balance: Mutex<HashMap<(Ino, bool), i64>>,
}

/// The flags under which the engine knows an adopted open.
fn flags(writable: bool) -> i32 {
    if writable { libc::O_RDWR } else { libc::O_RDONLY }
}

impl Adopted {
    /// The kernel closed a file that a previous process opened.
    pub fn release(&self, overlay: &Overlay, ino: Ino, writable: bool) {
        if self.add(ino, writable, -1) >= 0 {
            overlay.release(ino, flags(writable));
        }
    }

    /// Opens again all of `opens`; returns when that is tried.
    pub async fn adopt(self: Arc<Self>, overlay: Overlay, opens: Vec<Inherited>) {
        let permits = Arc::new(Semaphore::new(PARALLEL));
        let tasks = opens.into_iter().map(|open| {
            let (this, overlay, permits) = (Arc::clone(&self), overlay.clone(), Arc::clone(&permits));
            async move {
                let _permit = permits.acquire().await;
                let writers = (0..open.writers).map(|_| true);
                for writable in (0..open.readers).map(|_| false).chain(writers) {
                    this.adopt_one(&overlay, open.ino, writable).await;
                }
                overlay.inherited(open.ino);
            }
        });
        futures::future::join_all(tasks).await;
    }

    async fn adopt_one(&self, overlay: &Overlay, ino: Ino, writable: bool) {
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
