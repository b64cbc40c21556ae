//! Runs a mixed root in the foreground, as a service manager expects it.

use std::io;

use futures::FutureExt;
use tokio::signal::unix::{SignalKind, signal};

use super::super::registry::Process;
use super::super::supervisor::{Ready, Signals};
use super::super::{Failure, FailureKind};
use super::{MultiMountPlan, MultiMountRoot, directory, mount, umount};

/// Mounts, and returns when all pools are unmounted. `on_ready` is called once, when all pools serve. The first signal
/// unmounts all pools, unless one is in use, which the log says; the second detaches them.
pub fn keep(plan: &MultiMountPlan, on_ready: &dyn Fn(&[Ready])) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::io("cannot stay in the foreground", &e);
    let rt = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let task = async {
        // Before the first daemon is started, so that no end of a daemon is missed and no signal leaves a partial root.
        let mut ends = signal(SignalKind::child()).map_err(failed)?;
        let mut signals = Signals::new().map_err(failed)?;
        let plan = plan.clone();
        let mounting = tokio::task::spawn_blocking(move || mount(&plan));
        let (root, ready) =
            mounting.await.map_err(|e| Failure::new(FailureKind::Other, format!("mounting panicked: {e}")))??;
        let supervisors: Vec<Process> = ready.iter().map(|r| Process::of(r.pid)).collect();
        // A working directory would keep its file system busy for as long as the mount lives.
        std::env::set_current_dir("/").map_err(failed)?;
        on_ready(&ready);
        let mut asked = 0;
        while supervisors.iter().any(Process::is_alive) {
            tokio::select! {
                _ = ends.recv() => {}
                () = signals.stop() => {
                    asked += 1;
                    let (root, lazy) = (root.clone(), asked > 1);
                    tokio::task::spawn_blocking(move || end(&root, lazy));
                }
            }
        }
        // If the pools were unmounted one by one, the root still exists.
        if MultiMountRoot::at(&root.mountpoint).is_some() {
            directory::remove(&root, asked > 1)?;
            root.runtime().remove();
        }
        Ok(())
    };
    rt.block_on(task.boxed_local())
}

fn end(root: &MultiMountRoot, lazy: bool) {
    match umount(root, lazy) {
        Ok(()) => tracing::info!("{} is unmounted", root.mountpoint.display()),
        Err(failure) => tracing::error!("{failure}"),
    }
}
