//! Mounts a mixed root: all of its pools, or none.

use std::thread;

use super::super::supervisor::{self, Ready};
use super::super::{Failure, FailureKind};
use super::check::{label, prepare};
use super::table::within;
use super::{MultiMountPlan, MultiMountRoot, directory, umount};

/// Mounts all pools at the same time, since each may have to wait for its own server. Returns when all pools serve. If
/// one fails, the other pools are unmounted again.
///
/// # Errors
/// Why the first pool, in the order of the file, failed, with its name. Nothing is mounted then.
pub fn mount(plan: &MultiMountPlan) -> Result<(MultiMountRoot, Vec<Ready>), Failure> {
    let mut root = plan.root.clone();
    let runtime = root.runtime();
    let lock = runtime.claim()?;
    // Another process may have mounted the root since the check.
    if root.is_served() {
        return Err(root.is_here());
    }
    prepare(plan).inspect_err(|_| runtime.remove())?;
    runtime.clear();
    if !directory::is_own_mount() {
        root.made = root.pools.iter().filter(|name| !root.path_of(name).exists()).cloned().collect();
    }
    // Before anything is mounted: if this process is interrupted, `forebay umount` can remove what it left.
    let outcome = root
        .save()
        .map_err(|e| Failure::io(format!("cannot write down the mixed root in {}", runtime.dir().display()), &e))
        .and_then(|()| directory::make(&root))
        .and_then(|()| all_or_the_first_failure(plan));
    if outcome.is_err() {
        umount::give_up(&root);
    }
    drop(lock);
    outcome.map(|ready| (root, ready))
}

fn all_or_the_first_failure(plan: &MultiMountPlan) -> Result<Vec<Ready>, Failure> {
    let named: Vec<_> = plan.root.pools.iter().zip(&plan.pools).collect();
    thread::scope(|scope| {
        let launched: Vec<_> =
            named.iter().map(|(name, pool)| (name, scope.spawn(|| supervisor::launch(&pool.config)))).collect();
        // Wait for all threads, so that no pool is still being mounted when the other pools are unmounted.
        let outcomes: Vec<_> = launched
            .into_iter()
            .map(|(name, thread)| {
                let outcome =
                    thread.join().unwrap_or_else(|_| Err(Failure::new(FailureKind::Other, "a thread panicked")));
                outcome.map_err(|failure| within(&label(&plan.root.file, name), failure))
            })
            .collect();
        outcomes.into_iter().collect()
    })
}
