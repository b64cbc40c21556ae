//! The mounts of views: clients make them, because a daemon that is confined mounts nothing.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_api::views::View;
use forebay_system::bind::{self, DetachedMount};
use forebay_system::mounts::{self, MountEntry};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::mount::MountFlags;

use crate::registry::RegisteredMount;
use crate::{Failure, FailureKind, paths};

/// Returns the path at which a view is mounted.
pub fn place(entry: &RegisteredMount, view: &View) -> PathBuf {
    let inner = paths::decode(&view.path).unwrap_or_default();
    entry.mountpoint().join(std::ffi::OsStr::from_bytes(&inner))
}

/// Returns whether a view is mounted at its place, in this process's namespace.
pub fn is_mounted(entry: &RegisteredMount, view: &View) -> bool {
    let all = mounts::list().unwrap_or_default();
    let place = place(entry, view);
    mounts::that_show(&all, Path::new(&view.tree)).iter().any(|at| at.mountpoint == place)
}

/// A view that this process has mounted.
#[must_use]
pub struct AttachedView {
    /// The number of the mount. `None`: it was mounted already.
    mount: Option<u64>,
    place: PathBuf,
    mountpoint: PathBuf,
    namespace_of: Option<u32>,
}

impl AttachedView {
    /// Takes the mount away again. Its tree may be gone, so it is known by its number.
    ///
    /// # Errors
    /// It stays mounted.
    pub fn take_away(self) -> Result<(), Failure> {
        let Some(id) = self.mount else { return Ok(()) };
        let failed = |e: io::Error| Failure::given(format!("unmount {}", self.place.display()), &e);
        match self.namespace_of {
            Some(pid) => {
                let away = || bind::detach_in_namespace(&self.place, id);
                let is_away = bind::in_namespace_of(pid, &self.mountpoint, away).map_err(failed)?;
                // Directories above it may have been renamed. The namespace of a process that has ended is gone.
                let stays = !is_away && mounts::list_of(pid).is_ok_and(|all| all.iter().any(|at| at.id == id));
                if stays { Err(failed(io::ErrorKind::ResourceBusy.into())) } else { Ok(()) }
            }
            None => {
                let all = mounts::list().map_err(failed)?;
                all.iter().find(|at| at.id == id).map_or(Ok(()), |at| bind::detach(at, true)).map_err(failed)
            }
        }
    }
}

/// Mounts a view over its path, read-only: for all, or only in the mount namespace of a process. One that is mounted
/// already stays.
pub fn attach(entry: &RegisteredMount, view: &View, namespace_of: Option<u32>) -> Result<AttachedView, Failure> {
    let place = place(entry, view);
    let refused = |error: io::Error| Failure::given(format!("cannot mount {} at {}", view.id, place.display()), &error);
    let mountpoint = entry.mountpoint();
    let attached =
        |mount| AttachedView { mount, place: place.clone(), mountpoint: mountpoint.to_owned(), namespace_of };
    let flags = mounts::at(mountpoint).map_err(refused)?.map_or(MountFlags::empty(), |at| at.flags);
    // Seen from here: in another namespace, anything may be there.
    let device = || Ok(rustix::fs::stat(mountpoint)?.st_dev);
    if namespace_of.is_none() && is_mounted(entry, view) {
        return Ok(attached(None));
    }
    if let Some(pid) = namespace_of {
        bind::check_apart(pid).map_err(|e| {
            Failure::usage(e.to_string()).remedy(
                "start the job with its own: JobContainerType=job_container/tmpfs in Slurm, else unshare --mount",
            )
        })?;
    }
    let mount = DetachedMount::of(Path::new(&view.tree), flags).map_err(refused)?;
    let (id, device) = (mount.id().map_err(refused)?, device().map_err(refused)?);
    let attach = || attach_here(mount, mountpoint, &place, (device, view.ino));
    match namespace_of {
        None => attach().map_err(refused)?,
        Some(pid) => bind::in_namespace_of(pid, mountpoint, attach).map_err(refused)?,
    }
    Ok(attached(Some(id)))
}

/// Attaches a mount at a place that must be this inode of this device.
fn attach_here(mount: DetachedMount, mountpoint: &Path, place: &Path, inode: (u64, u64)) -> io::Result<()> {
    learn_names(mountpoint, place);
    let at = bind::open_place(place)?;
    let stat = rustix::fs::fstat(&at)?;
    if (stat.st_dev, stat.st_ino) != inode {
        return Err(io::Error::other("another file or mount is there by now: end the view, and make it again"));
    }
    mount.attach(at)
}

/// Makes the kernel ask for what it needs to find a place below a mount. It may keep these answers while the view lasts,
/// so that the place is found even if no daemon answers.
fn learn_names(mountpoint: &Path, place: &Path) {
    let below = place.ancestors().take_while(|path| path.starts_with(mountpoint));
    for path in below.collect::<Vec<_>>().into_iter().rev() {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
        let _ = statx(rustix::fs::CWD, path, flags, StatxFlags::BASIC_STATS);
        let _ = rustix::fs::lgetxattr(path, "system.posix_acl_access", &mut [0u8; 1024][..]);
    }
}

/// Detaches the mounts of a view in this process's namespace.
///
/// # Errors
/// `Busy`, with the processes that use it, if `lazy` is false.
pub fn detach(view: &View, lazy: bool) -> Result<(), Failure> {
    let all = mounts::list().map_err(|e| Failure::io("the list of mounts", &e))?;
    mounts::that_show(&all, Path::new(&view.tree)).into_iter().try_for_each(|at| detach_one(at, lazy))
}

/// Detaches the mounts of all views below a mount. Returns where they were.
pub fn detach_below(mountpoint: &Path, lazy: bool) -> Result<Vec<PathBuf>, Failure> {
    let all = mounts::list().map_err(|e| Failure::io("the list of mounts", &e))?;
    let views = all.iter().rev().filter(|at| is_view(&at.root) && is_below(mountpoint, &at.mountpoint));
    views.map(|at| detach_one(at, lazy).map(|()| at.mountpoint.clone())).collect()
}

fn is_below(mountpoint: &Path, place: &Path) -> bool {
    place != mountpoint && place.starts_with(mountpoint)
}

/// Returns whether a directory is the tree of a view, by its path in its file system.
fn is_view(root: &Path) -> bool {
    let mut parts = root.iter().rev();
    let has = |part: Option<&std::ffi::OsStr>, name: &str| part.is_some_and(|part| part == name);
    has(parts.next(), "top")
        && parts.next().is_some_and(|id| id.as_bytes().starts_with(b"view-"))
        && has(parts.next(), "views")
        && has(parts.next(), "content")
}

fn detach_one(at: &MountEntry, lazy: bool) -> Result<(), Failure> {
    match bind::detach(at, lazy) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(in_use(&at.mountpoint)),
        Err(error) => Err(Failure::given(format!("unmount {}", at.mountpoint.display()), &error)),
        Ok(()) => Ok(()),
    }
}

fn in_use(place: &Path) -> Failure {
    const SHOWN: usize = 5;
    let holders: Vec<String> = mounts::holders(place, SHOWN).iter().map(ToString::to_string).collect();
    let who = if holders.is_empty() { "a process that this user may not see".into() } else { holders.join(", ") };
    Failure::new(FailureKind::Busy, format!("the view at {} is in use by {who}", place.display()))
        .remedy("end them, or use --lazy: they keep what they have open")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_is_known_by_its_path() {
        assert!(is_view(Path::new("/nvme/fast/content/views/view-12/top")));
        assert!(!is_view(Path::new("/nvme/fast/content/views/other/top")));
        assert!(!is_view(Path::new("/srv/views/view-12/top")));
        assert!(!is_view(Path::new("/")));
    }
}
