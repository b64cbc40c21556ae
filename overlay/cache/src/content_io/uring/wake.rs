//! How callers wake the ring's thread: an eventfd that the ring itself reads.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) struct Wake {
    eventfd: File,
    /// The eventfd has been written to and the thread has not looked into its inbox since: no need to write again.
    pending: AtomicBool,
}

impl Wake {
    pub fn new() -> io::Result<Self> {
        // Blocking: of a non-blocking one the ring would not wait for the number, but answer EAGAIN.
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self { eventfd: unsafe { File::from_raw_fd(fd) }, pending: AtomicBool::new(false) })
    }

    /// Makes the thread look into its inbox. To be called after something was put there.
    ///
    /// The swaps here and in [`Wake::acknowledge`] are ordered: either the thread's comes later, and it sees what was
    /// put into the inbox before ours; or ours comes later, and we write.
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

    /// The thread says that it will now look into its inbox, until it finds it empty.
    pub fn acknowledge(&self) {
        self.pending.swap(false, Ordering::AcqRel);
    }

    pub fn raw_fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }
}
