//! How many large files are sent at the same time.
//!
//! Files that are sent at the same time share the pool's bandwidth, and their ends come late, all together. Only then the
//! fast pool has room again. So while room is short, few large files of a user are sent at a time: the first of them ends
//! early, and writers that wait for room go on after one file and not after sixteen. A file waits only for files that are
//! not much larger than itself, since only these end before it would, and not for long.

use std::pin::pin;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::CONCURRENCY;
use crate::Inner;

/// Files of at least so many bytes count. Smaller ones end soon.
const LARGE_BYTES: u64 = 8 << 20;
/// While writers wait for room. One file is not enough for pools whose single streams are slow.
const WHILE_WRITERS_WAIT: usize = 2;
/// While less than half of the fast pool may still become dirty.
const WHILE_ROOM_IS_SHORT: usize = 4;
/// A file waits only for files of at most so many times its bytes.
const MUCH_LARGER: u64 = 4;
/// How often the limit is looked at without an upload that ends.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A file waits no longer than this.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// The large files that are being sent.
#[derive(Debug, Default)]
pub(crate) struct LargeUploads {
    running: Mutex<Vec<LargeFile>>,
    ended: Notify,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LargeFile {
    owner: u32,
    bytes: u64,
}

/// The turn of a large file.
pub(super) struct LargeUpload<'a>(&'a LargeUploads, LargeFile);

impl Drop for LargeUpload<'_> {
    fn drop(&mut self) {
        {
            let mut running = self.0.running.lock();
            if let Some(at) = running.iter().position(|file| *file == self.1) {
                running.swap_remove(at);
            }
        }
        self.0.ended.notify_waiters();
    }
}

impl LargeUploads {
    fn begin(&self, file: LargeFile, at_once: usize) -> Option<LargeUpload<'_>> {
        let mut running = self.running.lock();
        let goes_first = |other: &&LargeFile| other.owner == file.owner && other.bytes / MUCH_LARGER <= file.bytes;
        (running.iter().filter(goes_first).count() < at_once).then(|| {
            running.push(file);
            LargeUpload(self, file)
        })
    }
}

impl Inner {
    /// Waits until a file of that many bytes may be sent. `None`: it is not large. The caller holds no lock.
    pub(super) async fn turn_of_upload(&self, owner: u32, bytes: u64) -> Option<LargeUpload<'_>> {
        if bytes < LARGE_BYTES {
            return None;
        }
        let (uploads, file, begun) = (&self.flusher.large, LargeFile { owner, bytes }, Instant::now());
        loop {
            let mut ended = pin!(uploads.ended.notified());
            // What ends from now on is noticed.
            ended.as_mut().enable();
            let at_once = if begun.elapsed() < WAIT_MAX { self.large_at_once() } else { usize::MAX };
            if let Some(turn) = uploads.begin(file, at_once) {
                return Some(turn);
            }
            _ = tokio::time::timeout(LOOK_EVERY, ended).await;
        }
    }

    fn large_at_once(&self) -> usize {
        if self.waiting_for_room() > 0 {
            return WHILE_WRITERS_WAIT;
        }
        let budget = &self.store.budget;
        let taken = budget.used().saturating_add(budget.reserved());
        let dirty = taken.saturating_sub(self.space.evictor.evictable().bytes);
        if dirty > budget.limit() / 2 { WHILE_ROOM_IS_SHORT } else { CONCURRENCY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(owner: u32, mib: u64) -> LargeFile {
        LargeFile { owner, bytes: mib << 20 }
    }

    #[test]
    fn a_turn_ends_with_its_guard() {
        let uploads = LargeUploads::default();
        let begin = |at_once| uploads.begin(file(1, 64), at_once);
        let (first, second) = (begin(2), begin(2));
        assert!(first.is_some() && second.is_some() && begin(2).is_none());
        // A lower limit ends no upload, and holds for the next one.
        drop(first);
        assert!(begin(1).is_none());
        drop(second);
        assert!(begin(1).is_some());
        assert_eq!(*uploads.running.lock(), []);
    }

    #[test]
    fn a_file_waits_for_no_other_user_and_for_no_much_larger_file() {
        let uploads = LargeUploads::default();
        let _large = uploads.begin(file(1, 100_000), 1).unwrap();
        let _other = uploads.begin(file(2, 64), 1).unwrap();
        let _small = uploads.begin(file(1, 64), 1).unwrap();
        assert!(uploads.begin(file(1, 32), 1).is_none() && uploads.begin(file(1, 100_000), 1).is_none());
        assert!(uploads.begin(file(1, 15), 1).is_some());
    }
}
