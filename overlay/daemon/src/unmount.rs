//! Taking one mount away, with its daemon.

use std::path::Path;
use std::time::{Duration, Instant};

use super::registry::{Entry, Phase};
use super::{Failure, FailureKind, limits, mounts, supervisor};

/// Unmounts. A mount in use is refused with the names of those who use it, unless it is `lazy`.
pub fn detach(mountpoint: &Path, lazy: bool) -> Result<(), Failure> {
    take_away(mountpoint, lazy).map_err(|e| supervisor::refused(mountpoint, e))
}

/// Takes a mount away. `lazy` detaches it at once and lets those who use it finish. A mount that someone else took
/// away meanwhile is as good.
///
/// Blocks while the kernel writes back what it still holds: never call it on the thread that serves the mount.
pub fn take_away(mountpoint: &Path, lazy: bool) -> forebay_backends::Result<()> {
    match forebay_fuse::unmount(mountpoint, lazy) {
        Err(_) if !mounts::is_ours(mountpoint) => Ok(()),
        outcome => outcome,
    }
}

/// Waits until the daemon of what was unmounted has written its catalog and ended, so that the fast pool can be used
/// again at once.
pub fn settle(entry: &Entry, lazy: bool) -> Result<(), Failure> {
    if !has_ended(entry, if lazy { limits::STOP_LAZY } else { limits::STOP }) {
        if lazy {
            return Ok(());
        }
        let pid = entry.state.supervisor.pid;
        let what = format!("unmounted, but the daemon (pid {pid}) has not ended yet");
        let remedy = format!("its log says more: {}", entry.runtime.log().display());
        return Err(Failure::new(FailureKind::Busy, what).remedy(remedy));
    }
    entry.runtime.remove();
    Ok(())
}

/// Whether the daemon of what was unmounted ends within this time.
fn has_ended(entry: &Entry, within: Duration) -> bool {
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

/// Whether a mount is gone and its daemon ends now: `umount(8)` does not wait for it. One that is just starting is not
/// mounted yet.
pub fn is_over(entry: &Entry) -> bool {
    let mountpoint = entry.mountpoint();
    let processes = [Some(entry.state.supervisor), entry.state.worker];
    let mounted = || {
        mounts::is_ours(mountpoint)
            || processes.iter().flatten().any(|process| mounts::is_ours_for(process.pid, mountpoint))
    };
    let is_ending = entry.state.phase != Phase::Starting && !mounted();
    is_ending && has_ended(entry, limits::STOP) && !mounts::is_ours(mountpoint)
}
