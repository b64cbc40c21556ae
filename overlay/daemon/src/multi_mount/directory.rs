//! The directory of a mixed root. It holds the names of the pools; nothing else can be created in it.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use forebay_system::bind;
use forebay_system::mounts::MountEntry;
use rustix::mount::MountFlags;

use super::super::{Failure, FailureKind, limits, mounts, supervisor};
use super::MultiMountRoot;

/// The source that `mount` and `df` show.
const SOURCE: &str = "forebay";
const FS_TYPE: &str = "tmpfs";
/// All users may list it; each pool has its own permissions.
const MODE: u32 = 0o755;
/// Inodes of the tmpfs beside those of the names: that of the root directory, and some that the kernel may count.
const SPARE_INODES: usize = 8;

/// Returns whether the roots of this user are file systems of their own.
pub(super) fn is_own_mount() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns whether the tmpfs of a mixed root is mounted at this place.
pub(super) fn is_mounted(mountpoint: &Path) -> bool {
    mount_at(mountpoint).is_some()
}

fn mount_at(mountpoint: &Path) -> Option<MountEntry> {
    mounts::at(mountpoint).ok().flatten().filter(|at| at.fs_type == FS_TYPE && at.source == SOURCE)
}

/// Creates the directory with the names. After a failure the caller removes with [`remove`] what was created.
pub(super) fn make(root: &MultiMountRoot) -> Result<(), Failure> {
    let place = &root.mountpoint;
    let failed = |e: io::Error| Failure::io(format!("cannot make the mixed root {}", place.display()), &e);
    let restricted = MountFlags::NOSUID | MountFlags::NODEV;
    let terms = format!(
        "size={},nr_inodes={},mode={MODE:o}",
        limits::MIXED_ROOT_BYTES,
        root.pools.len().saturating_add(SPARE_INODES)
    );
    if is_own_mount() {
        let terms = std::ffi::CString::new(terms.as_str()).map_err(|e| failed(e.into()))?;
        rustix::mount::mount(SOURCE, place, FS_TYPE, restricted, terms.as_c_str()).map_err(|e| failed(e.into()))?;
    }
    for name in &root.pools {
        match DirBuilder::new().mode(MODE).create(place.join(name)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !is_own_mount() => {}
            outcome => outcome.map_err(failed)?,
        }
    }
    if is_own_mount() {
        rustix::mount::mount_remount(place, restricted | MountFlags::RDONLY, terms.as_str())
            .map_err(|e| failed(e.into()))?;
    }
    Ok(())
}

/// Removes the directory.
///
/// # Errors
/// `Busy` if it is in use and `lazy` is false.
pub(super) fn remove(root: &MultiMountRoot, lazy: bool) -> Result<(), Failure> {
    let place = &root.mountpoint;
    if let Some(at) = mount_at(place) {
        return match bind::detach(&at, lazy) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(supervisor::in_use(place)),
            // Another process unmounted it meanwhile; that is no failure.
            Err(_) if !is_mounted(place) => Ok(()),
            outcome => outcome.map_err(|e| Failure::io(format!("cannot unmount {}", place.display()), &e)),
        };
    }
    for name in &root.made {
        let dir = place.join(name);
        match std::fs::remove_dir(&dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", dir.display());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Fails if a directory holds anything but directories of the names: it would stay visible beside the pools.
pub(super) fn refuse_content(mountpoint: &Path, pools: &[String]) -> Result<(), Failure> {
    let place = mountpoint.display();
    let entries = std::fs::read_dir(mountpoint).map_err(|e| Failure::io(format!("mountpoint {place}"), &e))?;
    for entry in entries.flatten() {
        let known = pools.iter().any(|name| entry.file_name() == name.as_str());
        if !known || !entry.file_type().is_ok_and(|t| t.is_dir()) {
            return Err(Failure::new(
                FailureKind::Usage,
                format!("mountpoint {place} is not empty: {}", entry.file_name().display()),
            )
            .remedy("without privileges a mixed root is your own directory: give an empty one"));
        }
    }
    Ok(())
}
