//! How many large files are sent at the same time.
//!
//! Files that are sent at the same time share the pool's bandwidth, and their ends come late, all together. Only then the
//! fast pool has room again. So while room is short, few large files of a user are sent at a time: the first of them ends
//! early, and writers that wait for room go on after one file and not after sixteen. A file waits only for files that are
//! not much larger than itself, since only these end before it would.

use std::collections::HashSet;
use std::pin::pin;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{Inner, Ino};

/// Files of at least so many bytes count. Smaller ones end soon.
const LARGE_BYTES: u64 = 8 << 20;
/// While room is short. One file is not enough for pools whose single streams are slow.
const WHILE_ROOM_IS_SHORT: usize = 2;
/// Room is short while more than this share of the limit cannot be evicted, and while writers wait for room.
const SHORT_ABOVE: f64 = 0.75;
/// A file waits only for files of at most so many times its bytes.
const MUCH_LARGER: u64 = 4;
/// How often the limit is looked at without an upload that ends.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// If no upload ends for this long, one more file is sent.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// The large files that are being sent.
#[derive(Debug, Default)]
pub(crate) struct LargeUploads {
    running: Mutex<Vec<LargeFile>>,
    ended: Notify,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LargeFile {
    ino: Ino,
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
        let goes_first = |other: &&LargeFile| {
            other.owner == file.owner && other.ino != file.ino && other.bytes / MUCH_LARGER <= file.bytes
        };
        // Two steps may be about one file. Only one of them sends it.
        let first: HashSet<Ino> = running.iter().filter(goes_first).map(|other| other.ino).collect();
        (first.len() < at_once).then(|| {
            running.push(file);
            LargeUpload(self, file)
        })
    }
}

impl Inner {
    /// Waits until a file may be sent of which `bytes` are to be sent. `None`: it is not large, or it is gone. The caller
    /// holds no lock.
    pub(super) async fn turn_of_upload(&self, ino: Ino, bytes: u64) -> Option<LargeUpload<'_>> {
        if bytes < LARGE_BYTES {
            return None;
        }
        let owner = self.node(ino).ok()?.state.lock().record.uid;
        let (uploads, file) = (&self.flusher.large, LargeFile { ino, owner, bytes });
        let mut begun = Instant::now();
        loop {
            let mut ended = pin!(uploads.ended.notified());
            // What ends from now on is noticed.
            ended.as_mut().enable();
            let more = usize::from(begun.elapsed() >= WAIT_MAX);
            if let Some(turn) = uploads.begin(file, self.large_at_once().saturating_add(more)) {
                return Some(turn);
            }
            if tokio::time::timeout(LOOK_EVERY, ended).await.is_ok() {
                begun = Instant::now();
            }
        }
    }

    fn large_at_once(&self) -> usize {
        let budget = &self.store.budget;
        let held = budget.used().saturating_sub(self.space.evictor.evictable().bytes);
        let is_short = self.waiting_for_room() > 0 || held as f64 > budget.limit() as f64 * SHORT_ABOVE;
        if is_short { WHILE_ROOM_IS_SHORT } else { usize::MAX }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64, owner: u32, mib: u64) -> LargeFile {
        LargeFile { ino: Ino(ino), owner, bytes: mib << 20 }
    }

    #[test]
    fn a_turn_ends_with_its_guard() {
        let uploads = LargeUploads::default();
        let begin = |ino, at_once| uploads.begin(file(ino, 1, 64), at_once);
        let (first, second) = (begin(1, 2), begin(2, 2));
        assert!(first.is_some() && second.is_some() && begin(3, 2).is_none());
        // A lower limit ends no upload, and holds for the next one.
        drop(first);
        assert!(begin(3, 1).is_none());
        // Two steps about one file take one turn.
        let again = begin(2, 1);
        assert!(again.is_some() && begin(3, 2).is_some());
        drop((second, again));
        assert!(begin(3, 1).is_some());
        assert_eq!(*uploads.running.lock(), []);
    }

    #[test]
    fn a_file_waits_for_no_other_user_and_for_no_much_larger_file() {
        let uploads = LargeUploads::default();
        let _large = uploads.begin(file(1, 1, 100_000), 1).unwrap();
        let _other = uploads.begin(file(2, 2, 64), 1).unwrap();
        let _small = uploads.begin(file(3, 1, 64), 1).unwrap();
        assert!(uploads.begin(file(4, 1, 32), 1).is_none() && uploads.begin(file(5, 1, 100_000), 1).is_none());
        assert!(uploads.begin(file(6, 1, 15), 1).is_some());
    }
}
