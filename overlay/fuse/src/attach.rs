//! Starts a fuser session on a device, with or without an INIT handshake of the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use fuser::{Config, Filesystem, Session, SessionACL};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::device::FuseDevice;
use super::init::Handshake;

/// Whether the kernel still waits for the answer to INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attach {
    /// The mount is new: its INIT request is waiting.
    Fresh,
    /// A previous process answered INIT and died. It left its handshake and the table of open modes in the state
    /// directory.
    Again(Handshake),
}

const INIT_OPCODE: u32 = 26;
const HEADER_BYTES: usize = 40;
const INIT_BYTES: usize = 64;
/// `FUSE_INIT_EXT`: the upper half of the flags is valid.
const INIT_EXT: u64 = 1 << 30;

/// Begins a session on `device` with `threads` threads.
pub fn session<F: Filesystem>(fs: F, device: &FuseDevice, attach: Attach, threads: usize) -> io::Result<Session<F>> {
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    // If the process that cloned a descriptor dies, the queue of that descriptor is lost with the requests in it.
    config.clone_fd = false;
    // The kernel checks which users may access the mount (allow_other); fuser need not check again.
    let acl = SessionACL::All;
    match attach {
        Attach::Fresh => Session::from_fd(fs, device.as_fd().try_clone_to_owned()?, acl, config),
        Attach::Again(handshake) => take_over(fs, device, &handshake, acl, config),
    }
}

/// fuser requires a handshake. This function writes an INIT request to a socket, with the values that the kernel sent
/// to the previous process. Once fuser has answered it, the device replaces the socket under the same descriptor
/// number.
fn take_over<F: Filesystem>(
    fs: F,
    device: &FuseDevice,
    handshake: &Handshake,
    acl: SessionACL,
    config: Config,
) -> io::Result<Session<F>> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::write(&ours, &init_request(handshake))?;
    let session = Session::from_fd(fs, theirs, acl, config)?;
    // fuser's answer is in the socket; the kernel must not get it.
    drop(ours);
    replace(&session, device)?;
    // Before the first thread reads: all requests that are unanswered now were read by the dead process.
    if let Err(error) = device.resend() {
        tracing::warn!(%error, "the kernel can't repeat the requests that were lost with the previous process");
    }
    Ok(session)
}

fn replace(socket: &impl AsFd, device: &FuseDevice) -> io::Result<()> {
    let (from, to) = (device.as_fd().as_raw_fd(), socket.as_fd().as_raw_fd());
    loop {
        // SAFETY: both descriptors are open, and the session goes on owning the number `to`.
        if unsafe { libc::dup3(from, to, libc::O_CLOEXEC) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) {
            return Err(error);
        }
    }
}

/// `struct fuse_in_header` and `struct fuse_init_in`.
fn init_request(handshake: &Handshake) -> [u8; HEADER_BYTES + INIT_BYTES] {
    let mut request = [0; HEADER_BYTES + INIT_BYTES];
    let mut put = |at: usize, value: u32| request[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    let flags = handshake.flags | INIT_EXT;
    put(0, (HEADER_BYTES + INIT_BYTES) as u32);
    put(4, INIT_OPCODE);
    put(8, 1);
    put(HEADER_BYTES, handshake.major);
    put(HEADER_BYTES + 4, handshake.minor);
    put(HEADER_BYTES + 8, handshake.max_readahead_bytes);
    put(HEADER_BYTES + 12, flags as u32);
    put(HEADER_BYTES + 16, (flags >> 32) as u32);
    request
}
