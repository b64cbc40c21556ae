//! The directory of a mixed root: it holds the names of the pools, and nothing else can be put there.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags};

use super::super::{Failure, FailureKind, limits, mounts, supervisor};
use super::Root;

/// What `mount` and `df` show as the source.
const SOURCE: &str = "forebay";
const FS_TYPE: &str = "tmpfs";
/// Everybody may look; the pools say themselves who may do what in them.
const MODE: u32 = 0o755;
/// Inodes of the tmpfs beside those of the names: its own, and some that the kernel may count.
const SPARE_INODES: usize = 8;

/// Whether this user's roots are file systems of their own.
pub(super) fn is_own_mount() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether the tmpfs of a mixed root is mounted here.
pub(super) fn is_mounted(mountpoint: &Path) -> bool {
    let found = mounts::at(mountpoint).ok().flatten();
    found.is_some_and(|m| m.fs_type == FS_TYPE && m.source == SOURCE)
}

/// Makes the directory with the names. What was made of it before a failure is for [`remove`].
pub(super) fn make(root: &Root) -> Result<(), Failure> {
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

/// Takes the directory away.
///
/// # Errors
/// `Busy` where somebody uses it and it is not `lazy`.
pub(super) fn remove(root: &Root, lazy: bool) -> Result<(), Failure> {
    let place = &root.mountpoint;
    if is_mounted(place) {
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::NOFOLLOW };
        return match rustix::mount::unmount(place, flags) {
            Err(rustix::io::Errno::BUSY) => Err(supervisor::in_use(place)),
            // Somebody else took it away meanwhile, which is as good.
            Err(_) if !is_mounted(place) => Ok(()),
            outcome => outcome.map_err(|e| Failure::io(format!("cannot unmount {}", place.display()), &e.into())),
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

/// Refuses a directory that holds anything but directories of the names: it would stay in sight beside the pools.
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
