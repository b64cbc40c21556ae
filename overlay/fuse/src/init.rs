//! Negotiates the features and limits of a mount with the kernel (INIT).

use std::fs;
use std::io;
use std::path::Path;

use fuser::{InitFlags, KernelConfig};
use serde::{Deserialize, Serialize};

/// Size of the largest READ or WRITE request.
pub const MAX_WRITE_BYTES: u32 = 1 << 20;
/// The kernel's readahead for cached opens. [`super::mount`] raises a second limit, in /sys.
pub const MAX_READAHEAD_BYTES: u32 = 1 << 20;
/// Readahead and asynchronous requests that may be pending at once.
const MAX_BACKGROUND: u16 = 64;

/// Name of the handshake's file in the state directory.
const FILE: &str = "handshake.json";

/// What the kernel offered in its INIT request. A process that takes the mount over needs it, since the kernel sends
/// INIT only once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handshake {
    pub major: u32,
    pub minor: u32,
    pub max_readahead_bytes: u32,
    /// `flags` and `flags2` of `struct fuse_init_in`, as one number.
    pub flags: u64,
}

impl Handshake {
    /// Writes the handshake into `state_dir`, atomically.
    pub fn save(&self, state_dir: &Path) -> io::Result<()> {
        let (path, new) = (state_dir.join(FILE), state_dir.join(format!("{FILE}.new")));
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, path)
    }

    /// Returns the handshake that a previous process saved in `state_dir`.
    ///
    /// # Errors
    /// `NotFound` if that process died before the mount was ready. The caller must unmount, and mount anew.
    pub fn load(state_dir: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(state_dir.join(FILE))?)?)
    }
}

/// The mount options on which the handshake depends.
#[derive(Debug, Clone, Copy)]
pub struct HandshakeOptions {
    pub passthrough: bool,
    /// Backing files may lie on a stacked file system such as overlayfs. The mount can then not be the lower layer of
    /// one.
    pub stacked_backing: bool,
    /// OPEN is answered with ENOSYS.
    pub no_open: bool,
    /// A change of an inode is durable before it is answered.
    pub sync: bool,
    /// A change of names is durable before it is answered.
    pub dirsync: bool,
}

/// Requests the features that the kernel offers and the daemon wants. Returns the offer, and whether passthrough is
/// agreed.
pub fn negotiate(config: &mut KernelConfig, terms: HandshakeOptions) -> (Handshake, bool) {
    let offered = config.capabilities();
    // fuser tells the limit only when it refuses a larger value.
    let limit = config.set_max_readahead(u32::MAX).err();
    let handshake = Handshake {
        major: config.kernel_abi().0,
        minor: config.kernel_abi().1,
        max_readahead_bytes: limit.unwrap_or(MAX_READAHEAD_BYTES),
        flags: offered.bits(),
    };
    for flag in wanted(terms).iter() {
        if config.add_capabilities(flag).is_err() {
            tracing::debug!(?flag, "the kernel does not offer this");
        }
    }
    let readahead = MAX_READAHEAD_BYTES.min(handshake.max_readahead_bytes).max(1);
    let refused = config.set_max_readahead(readahead).is_err()
        | config.set_max_write(MAX_WRITE_BYTES).is_err()
        | config.set_max_background(MAX_BACKGROUND).is_err();
    let passthrough = terms.passthrough && offered.contains(InitFlags::FUSE_PASSTHROUGH);
    let depth = if terms.stacked_backing { 2 } else { 1 };
    let refused = refused | (passthrough && config.set_max_stack_depth(depth).is_err());
    if refused {
        tracing::warn!("fuser refused a limit of the mount; its own default is used");
    }
    (handshake, passthrough)
}

/// Left out on purpose: WRITEBACK_CACHE (it costs a quarter to a half of the write rate, and programs get
/// acknowledgements for bytes that the daemon has not seen), POSIX_LOCKS and FLOCK_LOCKS (locks are local to the mount
/// and the kernel keeps them), SETXATTR_EXT and SECURITY_CTX (fuser does not read the longer requests that follow from
/// them), AUTO_INVAL_DATA (the daemon uses EXPLICIT_INVAL_DATA instead, and invalidates stale data itself).
fn wanted(terms: HandshakeOptions) -> InitFlags {
    let mut flags = InitFlags::FUSE_ASYNC_READ
        | InitFlags::FUSE_ASYNC_DIO
        | InitFlags::FUSE_ATOMIC_O_TRUNC
        | InitFlags::FUSE_BIG_WRITES
        | InitFlags::FUSE_CACHE_SYMLINKS
        | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP
        | InitFlags::FUSE_DONT_MASK
        | InitFlags::FUSE_DO_READDIRPLUS
        | InitFlags::FUSE_EXPLICIT_INVAL_DATA
        | InitFlags::FUSE_EXPORT_SUPPORT
        | InitFlags::FUSE_HANDLE_KILLPRIV_V2
        | InitFlags::FUSE_HAS_RESEND
        | InitFlags::FUSE_MAX_PAGES
        | InitFlags::FUSE_PARALLEL_DIROPS
        | InitFlags::FUSE_POSIX_ACL
        | InitFlags::FUSE_READDIRPLUS_AUTO;
    flags.set(InitFlags::FUSE_PASSTHROUGH, terms.passthrough);
    flags.set(InitFlags::FUSE_NO_OPEN_SUPPORT, terms.no_open);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_handshake_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let handshake = Handshake { major: 7, minor: 44, max_readahead_bytes: 131_072, flags: u64::MAX >> 20 };
        assert!(Handshake::load(dir.path()).is_err());
        handshake.save(dir.path()).unwrap();
        assert_eq!(Handshake::load(dir.path()).unwrap(), handshake);
    }
}
