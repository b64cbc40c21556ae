//! Unmounts a mixed root.

use std::path::{Path, PathBuf};

use forebay_system::terminal::visible;

use super::super::registry::RegisteredMount;
use super::super::{Failure, FailureKind, mounts, supervisor, unmount};
use super::{MultiMountRoot, directory};

/// Fails if anything in the root is in use, as far as this user can see. So either all pools are unmounted or none.
pub fn refuse_in_use(root: &MultiMountRoot) -> Result<(), Failure> {
    if !mounts::holders(&root.mountpoint, 1).is_empty() {
        return Err(nothing_was_done(supervisor::in_use(&root.mountpoint)));
    }
    let pools: Vec<PathBuf> = root.pools.iter().map(|name| root.path_of(name)).collect();
    let mounted = mounts::list().map_err(|e| Failure::io("the list of mounts", &e))?;
    let is_inner = |place: &Path| !pools.iter().any(|p| p == place) && pools.iter().any(|p| place.starts_with(p));
    match mounted.iter().find(|m| is_inner(&m.mountpoint)) {
        Some(inner) => {
            let place = visible(&inner.mountpoint.to_string_lossy());
            let failure = Failure::new(FailureKind::Busy, format!("another file system is mounted at {place}"));
            Err(nothing_was_done(failure.remedy(format!("umount {place}"))))
        }
        None => Ok(()),
    }
}

fn nothing_was_done(failure: Failure) -> Failure {
    Failure { what: format!("{}; nothing was unmounted", failure.what), ..failure }
}

/// Unmounts all pools and the root, and returns when their daemons have ended.
///
/// # Errors
/// `Busy` if something is in use: then nothing was unmounted. If a pool came into use only during the call, the pools
/// before it are unmounted, and another call unmounts the rest.
pub fn umount(root: &MultiMountRoot, lazy: bool) -> Result<(), Failure> {
    if !lazy {
        refuse_in_use(root)?;
    }
    let entries: Vec<RegisteredMount> = root.mounts().into_iter().filter_map(|(_, entry)| entry).collect();
    let mut gone: Vec<&str> = Vec::new();
    for name in root.pools.iter().rev() {
        let place = root.path_of(name);
        if mounts::is_ours(&place) {
            unmount::detach(&place, lazy).map_err(|failure| after(&gone, failure))?;
            gone.push(name);
        }
    }
    directory::remove(root, lazy)?;
    for entry in &entries {
        unmount::settle(entry, lazy)?;
    }
    root.runtime().remove();
    Ok(())
}

/// Adds to a failure the pools that were unmounted before it.
fn after(gone: &[&str], failure: Failure) -> Failure {
    match gone {
        [] => nothing_was_done(failure),
        gone => Failure { what: format!("{}; unmounted before it: {}", failure.what, gone.join(", ")), ..failure },
    }
}

/// Removes what was created of a root that cannot be mounted as a whole.
pub(super) fn give_up(root: &MultiMountRoot) {
    let entries: Vec<RegisteredMount> = root.mounts().into_iter().filter_map(|(_, entry)| entry).collect();
    for name in root.pools.iter().rev() {
        let place = root.path_of(name);
        if mounts::is_ours(&place)
            && let Err(error) = unmount::take_away(&place, true)
        {
            tracing::error!("cannot unmount {}: {error}", place.display());
        }
    }
    for entry in &entries {
        if let Err(failure) = unmount::settle(entry, false) {
            tracing::error!("{}: {failure}", entry.mountpoint().display());
        }
    }
    if let Err(failure) = directory::remove(root, true) {
        tracing::error!("{failure}");
    }
    root.runtime().remove();
}
