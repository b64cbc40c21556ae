//! Stores through shared mappings.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// A shared mapping of a file whose descriptor is closed.
pub struct Mapped(*mut u8, usize);

impl Mapped {
    /// Maps the first `len` bytes of a file.
    pub fn of(path: &Path, len: usize) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of the whole file.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self(at.cast(), len)
    }

    /// Changes a byte.
    pub fn store(&self, at: usize, byte: u8) {
        assert!(at < self.1);
        // SAFETY: inside the mapping.
        unsafe { self.0.add(at).write_volatile(byte) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping that `of` made.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}
