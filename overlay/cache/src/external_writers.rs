//! Who else can change a content file: programs that it was passed through to, and mappings that outlive their opens.
//!
//! A shared mapping of a file that is passed through belongs to the content file: the kernel tells of the close, and
//! never of the stores that come after it. Such a file is not clean before the mapping is gone.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Whether anybody but this descriptor has the file open or mapped. By a lease for writing, which the kernel gives only
/// where nobody has (`fcntl(2)`, `F_SETLEASE`), and which is given back at once. `false` where the file system has no
/// leases.
pub fn is_held(file: &File) -> bool {
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

/// Who opens a file while there is a lease for a moment makes the kernel ask for it back by a signal, which would end
/// the process.
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
        assert!(!is_held(&file));
        let other = open().unwrap();
        assert!(is_held(&file));
        // SAFETY: a new mapping, which is not touched.
        let mapped =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_WRITE, libc::MAP_SHARED, other.as_raw_fd(), 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        drop(other);
        assert!(is_held(&file));
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(mapped, 4096) };
        assert!(!is_held(&file));
    }
}
