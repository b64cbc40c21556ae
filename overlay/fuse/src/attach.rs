//! A fuser session on a device, with or without a handshake of the kernel's.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use fuser::{Config, Filesystem, Session, SessionACL};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::device::Device;
use super::init::Handshake;

/// Whether the kernel has still to be greeted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attach {
    /// The mount is new: its INIT request is waiting.
    Fresh,
    /// A previous process answered INIT, and died. It left its handshake, and open modes in the state directory.
    Again(Handshake),
}

const INIT_OPCODE: u32 = 26;
const HEADER_BYTES: usize = 40;
const INIT_BYTES: usize = 64;
/// `FUSE_INIT_EXT`: the upper half of the flags is valid.
const INIT_EXT: u64 = 1 << 30;

/// Begins a session on `device` with `threads` threads.
pub fn session<F: Filesystem>(fs: F, device: &Device, attach: Attach, threads: usize) -> io::Result<Session<F>> {
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    // The queue of a cloned descriptor dies with the process that cloned it, and with it the requests in it.
    config.clone_fd = false;
    // Who may use the mount is the kernel's to check (allow_other); fuser need not check again.
    let acl = SessionACL::All;
    match attach {
        Attach::Fresh => Session::from_fd(fs, device.as_fd().try_clone_to_owned()?, acl, config),
        Attach::Again(handshake) => take_over(fs, device, &handshake, acl, config),
    }
}

/// fuser insists on a handshake. It is given one over a socket with what the kernel said to our predecessor;
/// then the device takes the place of the socket under the same number.
fn take_over<F: Filesystem>(
    fs: F,
    device: &Device,
    handshake: &Handshake,
    acl: SessionACL,
    config: Config,
) -> io::Result<Session<F>> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::write(&ours, &init_request(handshake))?;
    let session = Session::from_fd(fs, theirs, acl, config)?;
    // The answer went into the socket; nobody needs it.
    drop(ours);
    replace(&session, device)?;
    // Before the first thread reads: what is unanswered now was read by the dead process.
    if let Err(error) = device.resend() {
        tracing::warn!(%error, "the kernel can't repeat the requests that were lost with the previous process");
    }
    Ok(session)
}

fn replace(socket: &impl AsFd, device: &Device) -> io::Result<()> {
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
