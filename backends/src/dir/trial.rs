//! Which extended attributes the file system accepts: tried on a file without a name.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags, fsetxattr, openat, unlinkat};
use rustix::io::Errno;

use crate::unfinished::unique_name;
use crate::{Error, ErrorKind, Result};

use super::root::{PathCall, RootDirectory};

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
/// The most bytes that one attribute takes in addition to its name and value: file systems that keep all attributes
/// in one block store a record for each.
const RECORD_BYTES: usize = 64;

/// The results so far.
#[derive(Debug, Default)]
pub(super) struct Trials {
    /// One object can have so many bytes of user attributes: more are tried, fewer are not tried again.
    proven_bytes: AtomicUsize,
}

impl Trials {
    /// Fails with the first attribute that one object cannot have together with those before it.
    pub(super) fn check(&self, root: &RootDirectory, call: PathCall<'_>, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let of_users = xattrs.iter().all(|(name, _)| name.len() > 5 && name.starts_with(b"user."));
        let bytes: usize = xattrs.iter().map(|(name, value)| name.len() + value.len() + RECORD_BYTES).sum();
        if xattrs.is_empty() || (of_users && bytes <= self.proven_bytes.load(Ordering::Relaxed)) {
            return Ok(());
        }
        // If no file can be made, the flush will find out.
        let Ok(file) = unnamed(root) else { return Ok(()) };
        for (name, value) in xattrs {
            // A file has no default ACL; the rules for both ACLs are the same.
            let tried = if name == DEFAULT_ACL { ACCESS_ACL } else { name };
            match fsetxattr(&file, tried, value, XattrFlags::empty()) {
                Err(errno) if ErrorKind::from_errno(errno.raw_os_error()).refuses_attribute() => {
                    return Err(refused(call.failed(errno), name));
                }
                Ok(()) | Err(_) => {}
            }
        }
        if of_users {
            self.proven_bytes.fetch_max(bytes, Ordering::Relaxed);
        }
        Ok(())
    }
}

pub(super) fn refused(error: Error, name: &[u8]) -> Error {
    error.context(format!("extended attribute {}", name.escape_ascii())).of_attribute(name)
}

fn unnamed(root: &RootDirectory) -> rustix::io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    match openat(root.fd(), c".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        Ok(file) => return Ok(file),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
        Err(errno) => return Err(errno),
    }
    let name = unique_name();
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(root.fd(), &name[..], flags, mode)?;
    unlinkat(root.fd(), &name[..], AtFlags::empty())?;
    Ok(file)
}
