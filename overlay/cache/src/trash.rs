//! Removes content files that no record names any more, in the background, so that no caller waits for it.
//!
//! A file is removed only when a power cut cannot restore the record that named it: it may be the only copy of
//! acknowledged data.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use forebay_backends::{Error, Result, Side};
use parking_lot::{Condvar, Mutex};

use crate::{ContentId, ContentStore};

/// The thread that removes content files. A file that it did not get to becomes an orphan, which the sweep after the
/// next start finds.
#[derive(Debug)]
pub struct Trash {
    sender: Option<Sender<(ContentId, u64)>>,
    pending: Arc<(Mutex<TrashBacklog>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

/// Files that were discarded and are not removed yet.
#[derive(Debug, Default)]
struct TrashBacklog {
    files: u64,
    bytes: u64,
}

impl Trash {
    /// Starts the thread. `settle` returns when the deletions of records are durable.
    pub fn start(store: Arc<ContentStore>, settle: impl Fn() -> Result<()> + Send + 'static) -> Result<Self> {
        let (sender, receiver) = channel();
        let pending = Arc::new((Mutex::new(TrashBacklog::default()), Condvar::new()));
        let seen = pending.clone();
        let thread = std::thread::Builder::new()
            .name("forebay-trash".into())
            .spawn(move || run(&store, &settle, &receiver, &seen))
            .map_err(|e| Error::io(e, Side::Cache, "start the thread that removes content files"))?;
        Ok(Self { sender: Some(sender), pending, thread: Some(thread) })
    }

    /// Removes a content file soon. `bytes`: the space that is accounted for it.
    pub fn discard(&self, content: ContentId, bytes: u64) {
        if let Some(sender) = &self.sender {
            let mut pending = self.pending.0.lock();
            if sender.send((content, bytes)).is_ok() {
                pending.files += 1;
                pending.bytes += bytes;
            }
        }
    }

    /// Returns the bytes of files that were discarded and are still counted as used.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.0.lock().bytes
    }

    /// Waits until all files that were discarded before are removed, and their space is free.
    pub fn drain(&self) {
        let mut pending = self.pending.0.lock();
        while pending.files > 0 {
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

/// Files that are removed after one sync.
const BATCH: usize = 4096;

fn run(
    store: &ContentStore,
    settle: &impl Fn() -> Result<()>,
    receiver: &Receiver<(ContentId, u64)>,
    pending: &(Mutex<TrashBacklog>, Condvar),
) {
    while let Ok(first) = receiver.recv() {
        let batch: Vec<_> = std::iter::once(first).chain(receiver.try_iter()).take(BATCH).collect();
        match settle() {
            Ok(()) => batch.iter().for_each(|(content, bytes)| remove(store, *content, *bytes)),
            Err(error) => tracing::error!(%error, "content files are not removed before the next sweep"),
        }
        {
            let mut pending = pending.0.lock();
            pending.files -= batch.len() as u64;
            pending.bytes -= batch.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
        pending.1.notify_all();
    }
}

fn remove(store: &ContentStore, content: ContentId, bytes: u64) {
    if let Err(error) = store.remove_content(content, bytes) {
        tracing::warn!(%error, "a content file is not removed before the next sweep");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_bytes_are_pending_until_their_records_are_durable() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap());
        let (sync, synced) = channel::<()>();
        let trash = Trash::start(store, move || synced.recv().map_err(|_| unreachable!())).unwrap();
        trash.discard(ContentId(7), 100);
        trash.discard(ContentId(8), 20);
        assert_eq!(trash.pending_bytes(), 120);
        // The second file may be removed after another sync.
        (0..2).for_each(|_| sync.send(()).unwrap());
        trash.drain();
        assert_eq!(trash.pending_bytes(), 0);
        drop(trash);
    }
}
