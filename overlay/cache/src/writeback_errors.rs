//! Content files on their way to the device.
//!
//! A write-back that fails is told to each descriptor once, and its pages count as clean from then on (`errseq_t`,
//! Documentation/core-api/errseq.rst of Linux). All of us share one descriptor, so one asks at a time, and whoever is told
//! notes it before the next one can take silence for success.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{Error, Result, Side};
use parking_lot::Mutex;

/// A content file that is open in the daemon, for reading and writing.
#[derive(Debug)]
pub struct Content {
    pub id: u64,
    pub file: Arc<File>,
    /// It was opened when it was made: whatever was not written back since then, it is told of.
    pub since_made: bool,
    /// Calls of [`Self::sync`], of data alone and of all,
    asked: [AtomicU64; 2],
    /// and how many of them were served. Locked while the kernel is asked.
    served: Mutex<[u64; 2]>,
}

impl Content {
    pub fn new(id: u64, file: File, since_made: bool) -> Self {
        Self { id, file: Arc::new(file), since_made, asked: Default::default(), served: Mutex::default() }
    }

    /// Cuts the file off behind `size` bytes, where it is longer. Whether it was.
    pub fn cut(&self, size: u64) -> Result<bool> {
        let failed = |e| Error::io(e, Side::Cache, "cut a content file");
        let longer = self.file.metadata().map_err(failed)?.len() > size;
        if longer {
            self.file.set_len(size).map_err(failed)?;
        }
        Ok(longer)
    }

    /// Makes what was written durable: `fdatasync` if `data_only`, else `fsync`. Of several that wait at the same time one
    /// does it for all. `failed` is told before anybody else asks. Blocks.
    pub fn sync(&self, data_only: bool, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        let kind = usize::from(!data_only);
        let mine = self.asked[kind].fetch_add(1, Ordering::SeqCst) + 1;
        let mut served = self.served.lock();
        if served[kind] >= mine {
            return Ok(());
        }
        let covers = self.asked.each_ref().map(|asked| asked.load(Ordering::SeqCst));
        let synced = if data_only { self.file.sync_data() } else { self.file.sync_all() };
        match &synced {
            Ok(()) => served[..=kind].copy_from_slice(&covers[..=kind]),
            Err(error) => failed(error),
        }
        synced
    }

    /// Whether a write-back failed that nobody was told of. Writes nothing, and waits for no write-back, but for who is
    /// just syncing: for it may be he who is told.
    pub fn check_written_back(&self, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        let _one_at_a_time = self.served.lock();
        self.ask(failed)
    }

    /// The same without waiting: where somebody is just syncing, he notes what he is told.
    pub fn glance_written_back(&self, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        match self.served.try_lock() {
            Some(_one_at_a_time) => self.ask(failed),
            None => Ok(()),
        }
    }

    /// Whether somebody is just syncing it, or being told.
    pub fn is_asked(&self) -> bool {
        self.served.is_locked()
    }

    fn ask(&self, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        // Of a range that no file has, there is nothing to wait for, but the error is told.
        let (offset, bytes) = (i64::MAX - 1, 1);
        // SAFETY: takes numbers.
        let rc =
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WAIT_BEFORE) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // Of the call: it is not allowed, or there is none.
        if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::ESPIPE)) {
            return Ok(());
        }
        failed(&error);
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn what_did_not_fail_is_no_error() {
        let content = Content::new(1, tempfile::tempfile().unwrap(), true);
        let never = |error: &io::Error| panic!("{error}");
        for data_only in [true, false, true] {
            rustix::io::pwrite(&content.file, b"abc", 5).unwrap();
            content.check_written_back(never).unwrap();
            content.glance_written_back(never).unwrap();
            content.sync(data_only, never).unwrap();
        }
    }

    #[test]
    fn whoever_fails_has_noted_it_before_the_next_one_asks() {
        // Cannot be synced: each is told.
        let content = Content::new(1, File::open("/dev/null").unwrap(), true);
        let noted = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let note = |_: &io::Error| _ = noted.fetch_add(1, Ordering::SeqCst);
                    assert!(content.sync(true, note).is_err(), "somebody's failure was taken for success");
                });
            }
        });
        assert_eq!(noted.load(Ordering::SeqCst), 8);
    }
}
