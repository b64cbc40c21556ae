//! Wakes the ring's thread through an eventfd that the ring itself reads.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) struct Wake {
    eventfd: File,
    /// The eventfd was written and the thread has not read its inbox since, so no further write is needed.
    pending: AtomicBool,
}

impl Wake {
    pub fn new() -> io::Result<Self> {
        // Blocking, because a ring does not wait for a non-blocking eventfd, but returns EAGAIN.
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self { eventfd: unsafe { File::from_raw_fd(fd) }, pending: AtomicBool::new(false) })
    }

    /// Makes the thread read its inbox. To be called after an operation was sent to the inbox.
    ///
    /// The swaps in this function and in [`Wake::acknowledge`] have one order. If the thread's swap is later, the
    /// thread sees the operation that was sent before. If this swap is later, this function writes to the eventfd.
    pub fn signal(&self) -> io::Result<()> {
        if self.pending.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let written = (&self.eventfd).write_all(&1u64.to_ne_bytes());
        if written.is_err() {
            self.pending.store(false, Ordering::Release);
        }
        written
    }

    /// Announces that the thread will now read its inbox until it is empty.
    pub fn acknowledge(&self) {
        self.pending.swap(false, Ordering::AcqRel);
    }

    pub fn raw_fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }
}
