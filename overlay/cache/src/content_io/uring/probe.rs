//! Checks whether io_uring works on this machine. Kernels without it, containers that filter it and sysctls that forbid
//! it refuse it in different ways, so the ring is tried on a file in memory.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::fs::{MemfdFlags, memfd_create};

use super::RingLimits;

const PATTERN: &[u8; 16] = b"forebay io_uring";

/// Returns a ring that has done a no-op, a write and a read. The error names the remedy.
pub(super) fn working_ring(limits: RingLimits) -> Result<IoUring, String> {
    let mut ring = IoUring::builder().dontfork().build(limits.entries).map_err(why_not)?;
    if !ring.params().is_feature_nodrop() {
        return Err("the kernel may drop io_uring completions (Linux 5.5 does not)".into());
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(why_not)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Nop::CODE];
    if !needed.iter().all(|code| probe.is_supported(*code)) {
        return Err("the kernel's io_uring has no read and write (Linux 5.6 has)".into());
    }
    round_trip(&mut ring).map_err(why_not)?;
    Ok(ring)
}

fn why_not(error: io::Error) -> String {
    let remedy = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "; see sysctl kernel.io_uring_disabled and the container's seccomp profile",
        Some(libc::ENOSYS) => "; the kernel has none, or a seccomp profile hides it",
        Some(libc::ENOMEM) => "; raise RLIMIT_MEMLOCK (Linux before 5.12)",
        _ => "",
    };
    format!("io_uring does not work on this machine: {error}{remedy}")
}

fn round_trip(ring: &mut IoUring) -> io::Result<()> {
    let file = memfd_create("forebay-probe", MemfdFlags::CLOEXEC)?;
    let fd = types::Fd(file.as_fd().as_raw_fd());
    // If a step fails, the kernel may still use the buffer, so it is leaked.
    let mut buffer = ManuallyDrop::new(vec![0u8; PATTERN.len()]);
    let len = PATTERN.len() as u32;
    one(ring, opcode::Nop::new().build())?;
    let written = one(ring, opcode::Write::new(fd, PATTERN.as_ptr(), len).offset(0).build())?;
    let read = one(ring, opcode::Read::new(fd, buffer.as_mut_ptr(), len).offset(0).build())?;
    let buffer = ManuallyDrop::into_inner(buffer);
    if written != len || read != len || buffer != PATTERN {
        return Err(io::Error::other("it returned other bytes than were written"));
    }
    Ok(())
}

/// Submits one entry and waits for its result.
fn one(ring: &mut IoUring, entry: squeue::Entry) -> io::Result<u32> {
    // SAFETY: the pattern is static, and the buffer is leaked unless the completion was seen. A stray operation can
    // harm no later user of the descriptor, because the ring is given up on errors.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    loop {
        match ring.submit_and_wait(1) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) => {
                if let Some(completion) = ring.completion().next() {
                    return u32::try_from(completion.result())
                        .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
                }
            }
        }
    }
}
