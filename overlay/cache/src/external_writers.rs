//! Finds out whether a program can still change a content file: through a passthrough open, or through a mapping that
//! outlives its open.
//!
//! A shared mapping of a file in passthrough mode maps the content file: the kernel reports the close, but never the
//! stores after it. Such a file is not clean before the mapping is gone.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Returns whether any other descriptor or mapping of the file exists. Takes a lease for writing, which the kernel
/// grants only if none exists (`fcntl(2)`, `F_SETLEASE`), and returns it at once. `false` if the file system has no
/// leases.
pub fn is_open_elsewhere(file: &File) -> bool {
    let set = |lease: libc::c_int| {
        // SAFETY: takes numbers.
        let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, lease) };
        if rc < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    match set(libc::F_WRLCK) {
        Ok(()) => {
            let _ = set(libc::F_UNLCK);
            false
        }
        Err(error) => error.raw_os_error() == Some(libc::EAGAIN),
    }
}

/// Ignores SIGIO. If a program opens the file during the short lease, the kernel asks for the lease by this signal,
/// which would end the daemon.
pub fn ignore_lease_breaks() {
    // SAFETY: SIGIO is used for nothing else.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_holds_a_file_after_its_descriptor_is_closed() {
        ignore_lease_breaks();
        let dir = tempfile::tempdir().unwrap();
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(dir.path().join("a"));
        let file = open().unwrap();
        file.set_len(4096).unwrap();
        assert!(!is_open_elsewhere(&file));
        let other = open().unwrap();
        assert!(is_open_elsewhere(&file));
        // SAFETY: a new mapping, which is not accessed.
        let mapped =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_WRITE, libc::MAP_SHARED, other.as_raw_fd(), 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        drop(other);
        assert!(is_open_elsewhere(&file));
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(mapped, 4096) };
        assert!(!is_open_elsewhere(&file));
    }
}
