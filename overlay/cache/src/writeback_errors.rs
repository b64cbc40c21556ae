//! Content files and the errors of their write-back to the device.
//!
//! The kernel reports a failed write-back to each descriptor once, and its pages count as clean from then on
//! (`errseq_t`, Documentation/core-api/errseq.rst of Linux). All parts of the daemon share one descriptor. So one
//! caller asks at a time, and a caller that gets an error records it before the next caller can take the absence of an
//! error for success.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use forebay_backends::{Error, Result, Side};
use parking_lot::Mutex;

use crate::external_writers::is_open_elsewhere;
use crate::group_commit::{GroupCommit, ServedTurns};

/// A content file that is open in the daemon, for reading and writing.
#[derive(Debug)]
pub struct Content {
    pub id: u64,
    pub file: Arc<File>,
    /// This descriptor was opened when the file was created, so it gets every write-back error of the file.
    pub since_made: bool,
    /// Calls of [`Self::sync`], of data alone and of data with metadata.
    commits: [GroupCommit; 2],
    /// Locked during a call to the kernel.
    served: Mutex<[ServedTurns; 2]>,
}

impl Content {
    pub fn new(id: u64, file: File, since_made: bool) -> Self {
        Self { id, file: Arc::new(file), since_made, commits: Default::default(), served: Mutex::default() }
    }

    /// Truncates the file to `size` bytes if it is longer. Returns whether it was.
    pub fn cut(&self, size: u64) -> Result<bool> {
        let failed = |e| Error::io(e, Side::Cache, "cut a content file");
        let longer = self.file.metadata().map_err(failed)?.len() > size;
        if longer {
            self.file.set_len(size).map_err(failed)?;
        }
        Ok(longer)
    }

    /// Makes what was written durable: `fdatasync` if `data_only`, else `fsync`. One of several waiting callers does it
    /// for all. `failed` is called before any other caller asks. Blocks.
    pub fn sync(&self, data_only: bool, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        let kind = usize::from(!data_only);
        let turn = self.commits[kind].ask();
        let mut served = self.served.lock();
        if self.commits[kind].begin(turn, &served[kind]).is_none() {
            return Ok(());
        }
        let waiting = self.commits.each_ref().map(GroupCommit::waiting);
        let synced = if data_only { self.file.sync_data() } else { self.file.sync_all() };
        match &synced {
            // A sync with metadata serves the callers that asked for data alone, too.
            Ok(()) => served.iter_mut().zip(waiting).take(kind + 1).for_each(|(served, callers)| served.serve(callers)),
            Err(error) => failed(error),
        }
        synced
    }

    /// Makes the content durable, with its times, and tells its own errors from those of the file system: `fsync` also reports
    /// what the device refused of metadata that is not of this file, such as a block of its directory. `failed` is called
    /// if data of the file was lost, as in [`Self::sync`]. Returns the error of the file system, if there is one: the
    /// content is whole then, and may not be durable. Blocks.
    pub fn sync_apart(&self, failed: impl FnOnce(&io::Error)) -> io::Result<Option<io::Error>> {
        let _one_at_a_time = self.served.lock();
        let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: takes numbers. No bytes: until the end of the file.
        let rc = unsafe { libc::sync_file_range(self.file.as_raw_fd(), 0, 0, flags) };
        if rc != 0 {
            let error = io::Error::last_os_error();
            failed(&error);
            return Err(error);
        }
        match self.file.sync_all() {
            Ok(()) => Ok(None),
            // A program may have written it since.
            Err(error) if is_open_elsewhere(&self.file) => {
                failed(&error);
                Err(error)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    /// Starts the write-back of all dirty pages, and does not wait for its end. May block for as long as the device takes to
    /// accept the requests. A failure is reported later, as any failed write-back.
    pub fn start_write_back(&self) {
        // SAFETY: takes numbers. No bytes: until the end of the file.
        _ = unsafe { libc::sync_file_range(self.file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }

    /// Reports a failed write-back that was not yet reported. Writes nothing, and waits for no write-back. Waits only
    /// for another caller that is syncing, because the kernel may be reporting the error to that caller.
    pub fn check_written_back(&self, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        let _one_at_a_time = self.served.lock();
        self.ask(failed)
    }

    /// Like [`Self::check_written_back`], but does not wait: if another caller is syncing, that caller records the
    /// error.
    pub fn glance_written_back(&self, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        match self.served.try_lock() {
            Some(_one_at_a_time) => self.ask(failed),
            None => Ok(()),
        }
    }

    /// Returns whether a caller is syncing it, or asking for errors.
    pub fn is_asked(&self) -> bool {
        self.served.is_locked()
    }

    fn ask(&self, failed: impl FnOnce(&io::Error)) -> io::Result<()> {
        // A range that no file has contains nothing to wait for, but the call still returns the error.
        let (offset, bytes) = (i64::MAX - 1, 1);
        // SAFETY: takes numbers.
        let rc =
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WAIT_BEFORE) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // Errors of the call itself: it is not allowed, or does not exist.
        if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::ESPIPE)) {
            return Ok(());
        }
        failed(&error);
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        // A sync of this file fails for each caller.
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
