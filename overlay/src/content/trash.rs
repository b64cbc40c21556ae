//! Content files that no record names any more are removed here, so that nobody waits for it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use forebay_backends::{Error, Result, Side};
use parking_lot::{Condvar, Mutex};

use super::ContentStore;
use crate::catalog::ContentId;

/// The thread that removes content files. A file that it did not come to is an orphan, which the sweep after
/// the next start finds.
#[derive(Debug)]
pub struct Trash {
    sender: Option<Sender<(ContentId, u64)>>,
    pending: Arc<(Mutex<u64>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Trash {
    pub fn start(store: Arc<ContentStore>) -> Result<Self> {
        let (sender, receiver) = channel();
        let pending = Arc::new((Mutex::new(0), Condvar::new()));
        let seen = pending.clone();
        let thread = std::thread::Builder::new()
            .name("forebay-trash".into())
            .spawn(move || run(&store, &receiver, &seen))
            .map_err(|e| Error::io(e, Side::Cache, "start the thread that removes content files"))?;
        Ok(Self { sender: Some(sender), pending, thread: Some(thread) })
    }

    /// Removes a content file soon. `bytes`: what it is accounted with.
    pub fn discard(&self, content: ContentId, bytes: u64) {
        if let Some(sender) = &self.sender {
            *self.pending.0.lock() += 1;
            if sender.send((content, bytes)).is_err() {
                *self.pending.0.lock() -= 1;
            }
        }
    }

    /// Returns when everything that was discarded before is removed: the space is free then.
    pub fn drain(&self) {
        let mut pending = self.pending.0.lock();
        while *pending > 0 {
            self.pending.1.wait(&mut pending);
        }
    }
}

impl Drop for Trash {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(store: &ContentStore, receiver: &Receiver<(ContentId, u64)>, pending: &(Mutex<u64>, Condvar)) {
    while let Ok((content, bytes)) = receiver.recv() {
        match store.remove(content) {
            Ok(()) => store.budget.account(bytes, 0),
            Err(error) => tracing::warn!(%error, "content file stays until the next sweep"),
        }
        *pending.0.lock() -= 1;
        pending.1.notify_all();
    }
}
