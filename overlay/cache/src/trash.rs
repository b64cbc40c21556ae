//! Removes content files that no record names any more, in the background, so that no caller waits for it.
//!
//! A file is removed only when a power cut cannot restore the record that named it: it may be the only copy of
//! acknowledged data.
//!
//! A file that cannot be removed, because the catalog cannot be synced or its device fails, is counted as used until that
//! works.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
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
    /// Files that were removed, or that could not be removed at the first attempt.
    done_files: u64,
    /// Bytes of files that are not done.
    bytes: u64,
}

impl Trash {
    /// Starts the thread. `settle` returns when the deletions of records are durable.
    pub fn start(store: Arc<ContentStore>, settle: impl Fn() -> Result<()> + Send + 'static) -> Result<Self> {
        Self::start_with(store, settle, AGAIN)
    }

    /// The same. `again`: the pause between two attempts to remove the files that could not be removed.
    fn start_with(
        store: Arc<ContentStore>,
        settle: impl Fn() -> Result<()> + Send + 'static,
        again: Duration,
    ) -> Result<Self> {
        let (sender, receiver) = channel();
        let pending = Arc::new((Mutex::new(TrashBacklog::default()), Condvar::new()));
        let seen = pending.clone();
        let thread = std::thread::Builder::new()
            .name("forebay-trash".into())
            .spawn(move || run(&store, &settle, (&receiver, again), &seen))
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

    /// Returns the bytes of files that were discarded, are still counted as used, and soon are not.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.0.lock().bytes
    }

    /// Waits until all files that were discarded before are removed, and their space is free. Does not wait for files
    /// that are discarded meanwhile, nor for those that cannot be removed at the first attempt.
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
/// The first pause between two attempts to remove what could not be removed. It doubles after an attempt that removed
/// nothing.
const AGAIN: Duration = Duration::from_secs(10);
/// The longest such pause.
const AGAIN_MAX: Duration = Duration::from_secs(600);
/// How many such files are remembered, at 16 bytes each. Others are left to the sweep after the next start.
const LEFT_MAX: usize = 1 << 20;

fn run(
    store: &ContentStore,
    settle: &impl Fn() -> Result<()>,
    (receiver, again): (&Receiver<(ContentId, u64)>, Duration),
    pending: &(Mutex<TrashBacklog>, Condvar),
) {
    let mut left: Vec<(ContentId, u64)> = Vec::new();
    let (mut tried, mut pause) = (Instant::now(), again);
    loop {
        let first = match left.is_empty() {
            true => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => receiver.recv_timeout(pause.saturating_sub(tried.elapsed())),
        };
        let first = match first {
            Ok(first) => Some(first),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let batch: Vec<_> = first.into_iter().chain(receiver.try_iter()).take(BATCH).collect();
        let is_due = !left.is_empty() && tried.elapsed() >= pause;
        let was_empty = left.is_empty();
        let settled = settle();
        let (mut failed, mut failed_devices) = (None, BTreeSet::new());
        // What is new comes first: callers wait for it.
        let before = std::mem::take(&mut left);
        for (content, bytes) in &batch {
            let removed = settled.as_ref().map_err(again_later).and_then(|()| remove(store, *content, *bytes));
            if let Err(error) = removed {
                left.push((*content, *bytes));
                failed = Some(error);
            }
        }
        {
            let mut pending = pending.0.lock();
            pending.done_files += batch.len() as u64;
            pending.bytes -= batch.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
        pending.1.notify_all();
        let (tries, mut rest) = if is_due { (before, Vec::new()) } else { (Vec::new(), before) };
        let mut removed_any = false;
        for (content, bytes) in tries {
            // A device that fails may take long to refuse each file.
            if failed_devices.contains(&store.device_of(content)) {
                rest.push((content, bytes));
                continue;
            }
            match settled.as_ref().map_err(again_later).and_then(|()| remove(store, content, bytes)) {
                Ok(()) => removed_any = true,
                Err(error) => {
                    failed_devices.insert(store.device_of(content));
                    // The next attempt begins with another file of the device.
                    left.push((content, bytes));
                    failed = Some(error);
                }
            }
        }
        rest.append(&mut left);
        left = rest;
        if let Some(error) = failed {
            tracing::error!(%error, files = left.len(), "content files cannot be removed; it is tried again");
        }
        left.truncate(LEFT_MAX);
        if is_due {
            pause = if removed_any { again } else { (pause * 2).min(AGAIN_MAX) };
        }
        if was_empty {
            pause = again;
        }
        if is_due || was_empty {
            tried = Instant::now();
        }
    }
}

/// The error of a sync, for each file that waits for it.
fn again_later(error: &Error) -> Error {
    Error::new(error.kind(), Side::Cache, error.to_string())
}

fn remove(store: &ContentStore, content: ContentId, bytes: u64) -> Result<()> {
    match store.remove_content(content, bytes) {
        // Its device is not there, and its bytes do not count. If the device comes back, the sweep finds the file.
        Err(error) if error.is(ErrorKind::Corrupt) => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
    fn what_could_not_be_removed_is_removed_later() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(ContentStore::open(&[dir.path().to_owned()], Some(1 << 30)).unwrap());
        let (blocked, files) = (ContentId(7), [7, 8].map(ContentId));
        // A directory in its place cannot be removed as a file.
        let in_place = store.path(blocked).unwrap();
        std::fs::create_dir_all(&in_place).unwrap();
        drop(store.create(files[1]).unwrap());
        store.budget.account(0, 120);
        let synced = AtomicU64::new(0);
        let settle = move || match synced.fetch_add(1, Ordering::Relaxed) {
            0 => Err(Error::os(libc::EIO, Side::Cache, "the first sync")),
            _ => Ok(()),
        };
        let trash = Trash::start_with(store.clone(), settle, Duration::from_millis(5)).unwrap();
        trash.discard(files[0], 100);
        trash.drain();
        trash.discard(files[1], 20);
        trash.drain();
        assert_eq!(trash.pending_bytes(), 0);
        let wait_for = |used| {
            let begun = Instant::now();
            while store.budget.used() != used {
                assert!(begun.elapsed() < Duration::from_secs(60), "{} bytes are used", store.budget.used());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_for(100);
        std::fs::remove_dir(&in_place).unwrap();
        wait_for(0);
        assert!(store.path(files[1]).is_ok_and(|path| !path.exists()));
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
