//! The `/dev/fuse` end of a mount: ioctls and notifications that fuser does not offer.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use forebay_engine::Ino;

use super::iomode::Registrar;

/// `_IOW(229, 1, struct fuse_backing_map)`
const BACKING_OPEN: libc::c_ulong = 0x4010_e501;
/// `_IOW(229, 2, uint32_t)`
const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;

/// `FUSE_NOTIFY_INVAL_ENTRY`: a name is not valid any more.
const NOTIFY_INVAL_ENTRY: i32 = 3;
/// `FUSE_EXPIRE_ONLY`: the name may still be valid, and is looked up again. Linux 6.2.
const EXPIRE_ONLY: u32 = 1;
/// `FUSE_NOTIFY_RESEND`: the kernel sends requests again that were read but not answered. Linux 6.9.
const NOTIFY_RESEND: i32 = 7;
/// `FUSE_NOTIFY_INC_EPOCH`: no cached name is valid any more. Linux 6.16.
const NOTIFY_INC_EPOCH: i32 = 8;

#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

/// An open `/dev/fuse`, connected to a mount.
#[derive(Debug)]
pub struct FuseDevice(OwnedFd);

impl FuseDevice {
    pub fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Asks the kernel to resend the requests that a dead process read and did not answer.
    ///
    /// # Errors
    /// EINVAL before Linux 6.9: those requests hang until the mount is aborted.
    pub fn resend(&self) -> io::Result<()> {
        self.notify(NOTIFY_RESEND, &[])
    }

    /// Makes the kernel look up a name again, and keep it, with what is mounted there, if it still exists. Linux 6.2;
    /// before, the name is forgotten.
    pub fn expire_name(&self, parent: Ino, name: &[u8]) -> io::Result<()> {
        let length = u32::try_from(name.len()).map_err(io::Error::other)?;
        let mut body = parent.0.to_ne_bytes().to_vec();
        body.extend(length.to_ne_bytes());
        body.extend(EXPIRE_ONLY.to_ne_bytes());
        body.extend(name);
        // The kernel expects the NUL.
        body.push(0);
        self.notify(NOTIFY_INVAL_ENTRY, &body)
    }

    /// Makes the kernel look up every name again.
    ///
    /// # Errors
    /// EINVAL before Linux 6.16.
    pub fn forget_all_names(&self) -> io::Result<()> {
        self.notify(NOTIFY_INC_EPOCH, &[])
    }

    /// A notification is an answer to request 0: a header of 16 bytes with the code in place of an error.
    fn notify(&self, code: i32, body: &[u8]) -> io::Result<()> {
        let length = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(code.to_ne_bytes());
        message.extend([0; 8]);
        message.extend(body);
        rustix::io::write(&self.0, &message)?;
        Ok(())
    }
}

impl AsFd for FuseDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Registrar for FuseDevice {
    fn register(&self, file: &File) -> io::Result<u32> {
        let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: the kernel reads one `BackingMap`, and keeps a reference to the file, not to the descriptor.
        let id = unsafe { libc::ioctl(self.0.as_raw_fd(), BACKING_OPEN, &map) };
        u32::try_from(id).map_err(|_| io::Error::last_os_error())
    }

    fn unregister(&self, id: u32) {
        // SAFETY: the kernel reads four bytes.
        let rc = unsafe { libc::ioctl(self.0.as_raw_fd(), BACKING_CLOSE, &id) };
        if rc < 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(id, %error, "a backing id was already unknown to the kernel");
        }
    }
}
