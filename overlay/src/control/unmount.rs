//! Taking one mount away, with its daemon.

use std::path::Path;
use std::time::{Duration, Instant};

use super::registry::Entry;
use super::{Failure, FailureKind, limits, mounts, supervisor};

/// Unmounts. A mount in use is refused with the names of those who use it, unless it is `lazy`.
pub fn detach(mountpoint: &Path, lazy: bool) -> Result<(), Failure> {
    mounts::unmount(mountpoint, lazy).map_err(|e| supervisor::refused(mountpoint, e))
}

/// Waits until the daemon of what was unmounted has written its catalog and ended, so that the fast pool can be used
/// again at once.
pub fn settle(entry: &Entry, lazy: bool) -> Result<(), Failure> {
    const PAUSE: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + if lazy { limits::STOP_LAZY } else { limits::STOP };
    while entry.supervisor_alive() || entry.worker_alive() {
        if Instant::now() >= deadline {
            if lazy {
                return Ok(());
            }
            let pid = entry.state.supervisor.pid;
            return Err(Failure::new(
                FailureKind::Busy,
                format!("unmounted, but the daemon (pid {pid}) has not ended yet"),
            )
            .remedy(format!("its log says more: {}", entry.runtime.log().display())));
        }
        std::thread::sleep(PAUSE);
    }
    entry.runtime.remove();
    Ok(())
}
