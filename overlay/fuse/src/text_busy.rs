//! Programs that run from the mount.
//!
//! The kernel lets nobody write to them, but it finds out about `O_RDONLY | O_TRUNC` only after an open that truncates,
//! as those of FUSE do: by then the program is empty, and who runs it is killed.

use std::fs;
use std::path::Path;

use forebay_engine::Ino;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::mountpoint::device_number;

/// Whether a process runs the program that an inode of the mount is.
pub fn is_running(mountpoint: &Path, ino: Ino) -> bool {
    let (Some(device), Ok(processes)) = (device_number(mountpoint), fs::read_dir("/proc")) else { return false };
    processes.flatten().any(|process| {
        // Without a question to the mount, which we would have to answer.
        let known = statx(CWD, process.path().join("exe"), AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        known.is_ok_and(|exe| exe.stx_ino == ino.0 && format!("{}:{}", exe.stx_dev_major, exe.stx_dev_minor) == device)
    })
}
