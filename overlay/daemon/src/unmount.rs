//! Unmounts one mount, and waits for its daemon.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_backends::{Error, Side};
use forebay_system::bind;

use super::registry::{Phase, RegisteredMount};
use super::{Failure, FailureKind, limits, mounts, supervisor, view_mounts};

/// Unmounts, with the views below it. If the mount is in use and `lazy` is false, fails with the names of the processes that use it.
pub fn detach(mountpoint: &Path, lazy: bool) -> Result<(), Failure> {
    view_mounts::detach_below(mountpoint, lazy)?;
    take_away(mountpoint, lazy).map_err(|e| supervisor::refused(mountpoint, e))
}

/// Unmounts. `lazy` detaches the mount at once and lets present users finish. Succeeds if another process unmounted it
/// meanwhile.
///
/// Blocks while the kernel writes back what it still holds. Must not be called on the thread that serves the mount.
pub fn take_away(mountpoint: &Path, lazy: bool) -> forebay_backends::Result<()> {
    let own = mounts::at(mountpoint).ok().flatten().filter(|at| at.fs_type == mounts::FS_TYPE);
    let unmounted = match own {
        // Users may own directories above it.
        Some(at) if rustix::process::geteuid().is_root() => {
            bind::detach(&at, lazy).map_err(|e| Error::io(e, Side::Kernel, format!("unmount {}", mountpoint.display())))
        }
        _ => forebay_fuse::unmount(mountpoint, lazy),
    };
    match unmounted {
        Err(_) if !mounts::is_ours(mountpoint) => Ok(()),
        outcome => outcome,
    }
}

/// Waits until the daemon of an unmounted mount has written its catalog and ended, so that the fast pool can be used
/// again at once.
pub fn settle(entry: &RegisteredMount, lazy: bool) -> Result<(), Failure> {
    if !has_ended(entry, if lazy { limits::STOP_LAZY } else { limits::STOP }) {
        if lazy {
            return Ok(());
        }
        let pid = entry.state.supervisor.pid;
        let what = format!("unmounted, but the daemon (pid {pid}) has not ended yet");
        let remedy = format!("its log says more: {}", entry.runtime.log().display());
        return Err(Failure::new(FailureKind::Busy, what).remedy(remedy));
    }
    entry.runtime.remove_if_over(&entry.state);
    Ok(())
}

/// Returns whether the daemon of an unmounted mount ends within this time.
fn has_ended(entry: &RegisteredMount, within: Duration) -> bool {
    const PAUSE: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + within;
    while entry.supervisor_alive() || entry.worker_alive() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// Returns whether a mount is gone and its daemon is ending: `umount(8)` does not wait for the daemon. A mount that is
/// just starting is not mounted yet, so it does not count.
pub fn is_over(entry: &RegisteredMount) -> bool {
    let mountpoint = entry.mountpoint();
    let processes = [Some(entry.state.supervisor), entry.state.worker];
    let mounted = || {
        mounts::is_ours(mountpoint)
            || processes.iter().flatten().any(|process| mounts::is_ours_for(process.pid, mountpoint))
    };
    let is_ending = entry.state.phase != Phase::Starting && !mounted();
    is_ending && has_ended(entry, limits::STOP) && !mounts::is_ours(mountpoint)
}
