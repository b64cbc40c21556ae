//! Finds programs that run from the mount.
//!
//! The kernel refuses writers of a running program. But with FUSE an open truncates by itself, and the kernel checks
//! `O_RDONLY | O_TRUNC` only after the open: by then the program is empty, and the processes that run it are killed.

use std::fs;
use std::path::Path;

use forebay_engine::Ino;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::mountpoint::device_number;

/// Returns whether a process runs the program in an inode of the mount.
pub fn is_running(mountpoint: &Path, ino: Ino) -> bool {
    let (Some(device), Ok(processes)) = (device_number(mountpoint), fs::read_dir("/proc")) else { return false };
    processes.flatten().any(|process| {
        // Without a request to the mount, which this daemon would have to answer.
        let known = statx(CWD, process.path().join("exe"), AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        known.is_ok_and(|exe| exe.stx_ino == ino.0 && format!("{}:{}", exe.stx_dev_major, exe.stx_dev_minor) == device)
    })
}
