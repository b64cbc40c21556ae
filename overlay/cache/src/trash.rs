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

/// What was discarded, and how much of it is done. Files are removed in the order in which they were discarded.
#[derive(Debug, Default)]
struct TrashBacklog {
    discarded_files: u64,
    /// Files that were removed, or that are left to the next sweep.
    done_files: u64,
    /// Bytes of files that are not done.
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
                pending.discarded_files += 1;
                pending.bytes += bytes;
            }
        }
    }

    /// Returns the bytes of files that were discarded and are still counted as used.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.0.lock().bytes
    }

    /// Waits until all files that were discarded before are removed, and their space is free. Does not wait for files
    /// that are discarded meanwhile.
    pub fn drain(&self) {
        let mut pending = self.pending.0.lock();
        let until = pending.discarded_files;
        while pending.done_files < until {
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
            pending.done_files += batch.len() as u64;
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
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;

    /// Files after which the test gives up.
    const DISCARDS: u64 = 60_000;

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

    #[test]
    fn drain_does_not_wait_for_what_is_discarded_later() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap());
        let settle = || {
            std::thread::sleep(Duration::from_millis(5));
            Ok(())
        };
        let trash = Trash::start(store, settle).unwrap();
        let (drained, discards) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Each file is discarded while an earlier one waits: the backlog is never empty.
                while !drained.load(Ordering::Relaxed) && discards.load(Ordering::Relaxed) < DISCARDS {
                    trash.discard(ContentId(discards.fetch_add(1, Ordering::Relaxed)), 1);
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            while discards.load(Ordering::Relaxed) < 10 {
                std::thread::yield_now();
            }
            (0..3).for_each(|_| trash.drain());
            drained.store(true, Ordering::Relaxed);
        });
        assert!(discards.into_inner() < DISCARDS, "the calls ended only when no file was discarded any more");
    }
}
