//! Bind mounts: a tree of one file system, shown read-only at a place in another one.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_change, move_mount, open_tree,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::mounts::{self, MountEntry};

/// The user namespace that owns a namespace (`ioctl_ns(2)`).
const NS_GET_USERNS: libc::c_ulong = 0xb701;

/// How often the place of a mount is looked up again, because directories above it were renamed meanwhile.
const DETACH_ATTEMPTS: usize = 16;

/// Opens the place that a mount will cover. A symbolic link is not followed.
pub fn open_place(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// A read-only mount of a tree that is attached nowhere yet. It is gone when this is dropped.
pub struct DetachedMount(OwnedFd);

impl DetachedMount {
    /// Makes a read-only mount of `tree`, with some of these flags: `NOSUID`, `NODEV`, `NOEXEC`, `NOATIME`. It has them
    /// before anybody sees it.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_SYS_ADMIN; `Unsupported` before Linux 5.12.
    pub fn of(tree: &Path, flags: MountFlags) -> io::Result<Self> {
        let open =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        let mount = open_tree(CWD, tree, open)?;
        let known = [
            (MountFlags::NOSUID, libc::MOUNT_ATTR_NOSUID),
            (MountFlags::NODEV, libc::MOUNT_ATTR_NODEV),
            (MountFlags::NOEXEC, libc::MOUNT_ATTR_NOEXEC),
        ];
        let set =
            known.iter().filter(|(flag, _)| flags.contains(*flag)).fold(libc::MOUNT_ATTR_RDONLY, |all, (_, a)| all | a);
        let times =
            if flags.contains(MountFlags::NOATIME) { libc::MOUNT_ATTR_NOATIME } else { libc::MOUNT_ATTR_RELATIME };
        let attr = libc::mount_attr {
            attr_set: set | times,
            attr_clr: libc::MOUNT_ATTR__ATIME,
            propagation: libc::MS_PRIVATE,
            userns_fd: 0,
        };
        // SAFETY: reads the string, which ends with NUL, and one `mount_attr`, whose size is given.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                mount.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                &raw const attr,
                size_of::<libc::mount_attr>(),
            )
        };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(mount)) }
    }

    /// Returns the number of the mount, which stays the same when it is attached.
    ///
    /// # Errors
    /// `Unsupported` if neither the kernel nor `/proc` tells it.
    pub fn id(&self) -> io::Result<u64> {
        mount_id(&self.0, "")?.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Attaches it over an open place, in the mount namespace of this thread.
    pub fn attach(self, place: impl AsFd) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(&self.0, "", place, "", flags)?)
    }
}

/// Detaches a mount of [`mounts::list`], and no other one. `lazy`: also if it is in use; its present users keep what they
/// have open. One that is gone meanwhile is no error.
///
/// Users who own a directory above a mount may replace it by a symbolic link at any moment, and then its path leads to
/// another mount. So no link is followed, and the mount is known by its number.
///
/// # Errors
/// `ResourceBusy` if it is in use and `lazy` is false, or if it is covered by another mount.
pub fn detach(at: &MountEntry, lazy: bool) -> io::Result<()> {
    let mut place = at.mountpoint.clone();
    let mut last = None;
    for _ in 0..DETACH_ATTEMPTS {
        match detach_at(&place, at.id, lazy) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // It is not there any more, or this process may not unmount it.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => last = Some(e),
            Err(e) => return Err(e),
        }
        let is_same = |now: &MountEntry| (now.id, &now.device, &now.root) == (at.id, &at.device, &at.root);
        match mounts::list()?.into_iter().find(is_same) {
            // A directory above it has another name by now.
            Some(now) => place = now.mountpoint,
            None => return Ok(()),
        }
    }
    let what = format!("{}: another mount covers it, or directories above it are renamed", place.display());
    Err(last.unwrap_or_else(|| io::Error::new(io::ErrorKind::ResourceBusy, what)))
}

/// Detaches the mount with this number, if a path leads to it without symbolic links. Returns whether it did.
fn detach_at(place: &Path, id: u64, lazy: bool) -> io::Result<bool> {
    let Some((above, name)) = parent_of(place) else { return Ok(false) };
    let Some(parent) = open_exactly(above)? else { return Ok(false) };
    if lazy {
        // The open mount itself: what its path leads to meanwhile does not matter. A mount that is in use because it is
        // open here is detached all the same.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mount = match rustix::fs::openat(&parent, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
            opened => opened?,
        };
        if mount_id(&mount, "")? != Some(id) {
            return Ok(false);
        }
        rustix::mount::unmount(own_path(&mount), UnmountFlags::DETACH)?;
        return Ok(true);
    }
    if mount_id(&parent, name)? != Some(id) {
        return Ok(false);
    }
    rustix::mount::unmount(own_path(&parent).join(name), UnmountFlags::NOFOLLOW)?;
    Ok(true)
}

/// Detaches the mount with this number from a place, in a thread that [`in_namespace_of`] made. `/proc` may show other
/// processes there. Returns whether it was there.
pub fn detach_in_namespace(place: &Path, id: u64) -> io::Result<bool> {
    let Some((above, name)) = parent_of(place) else { return Ok(false) };
    let Some(parent) = open_exactly(above)? else { return Ok(false) };
    if mount_id(&parent, name)? != Some(id) {
        return Ok(false);
    }
    // The working directory is this thread's own.
    rustix::process::fchdir(&parent)?;
    unmounted(rustix::mount::unmount(name, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW))
}

fn parent_of(place: &Path) -> Option<(&Path, &OsStr)> {
    Some((place.parent()?, place.file_name()?))
}

/// Opens a directory whose path has no symbolic links. `None` if there is none at this moment.
fn open_exactly(path: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = match rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Before Linux 5.6; or in a container whose filter does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => open_by_steps(path),
        opened => opened,
    };
    match opened {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

/// The same, one name after the other.
fn open_by_steps(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut names = path.components();
    let first = names.next().map_or(OsStr::new("."), |name| name.as_os_str());
    let mut dir = rustix::fs::open(first, flags, Mode::empty())?;
    for name in names {
        dir = rustix::fs::openat(&dir, name.as_os_str(), flags, Mode::empty())?;
    }
    Ok(dir)
}

/// Returns the number of the mount that is seen at a name in a directory; an empty name stands for the open file itself.
/// The file system is asked for nothing: it may not answer, or may refuse to answer root.
fn mount_id(dir: impl AsFd, name: impl AsRef<OsStr>) -> io::Result<Option<u64>> {
    let (dir, name) = (dir.as_fd(), name.as_ref());
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    // The kernel gives the number always, since Linux 5.8.
    match rustix::fs::statx(dir, name, flags, StatxFlags::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        stat => {
            let stat = stat?;
            if stat.stx_mask & StatxFlags::MNT_ID.bits() != 0 {
                return Ok(Some(stat.stx_mnt_id));
            }
            // Before Linux 5.8.
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match name.is_empty() {
                true => shown_mount_id(dir),
                false => shown_mount_id(rustix::fs::openat(dir, name, flags, Mode::empty())?),
            }
        }
    }
}

/// Returns the number of the mount of an open file, as `/proc` shows it.
fn shown_mount_id(file: impl AsFd) -> io::Result<Option<u64>> {
    let shown = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    Ok(shown.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok()))
}

/// The path of an open file, whatever becomes of its names.
fn own_path(file: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()).into()
}

/// `Ok(false)`: it is not mounted there any more.
fn unmounted(result: rustix::io::Result<()>) -> io::Result<bool> {
    match result {
        Err(Errno::INVAL | Errno::NOENT) => Ok(false),
        result => Ok(result.map(|()| true)?),
    }
}

/// Does something in the mount namespace of a process, in a thread of its own. What is mounted below `keep_apart` from
/// then on does not reach other namespaces.
///
/// # Errors
/// `PermissionDenied` without CAP_SYS_ADMIN; what `act` returns.
pub fn in_namespace_of<T: Send>(
    pid: u32,
    keep_apart: &Path,
    act: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let namespace = File::open(format!("/proc/{pid}/ns/mnt"))?;
    std::thread::scope(|scope| {
        let acting = scope.spawn(move || {
            // A thread that shares its root and working directory with others cannot change its namespace.
            // SAFETY: only the root and the working directory of this thread are no longer shared.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
            mount_change(keep_apart, MountPropagationFlags::DOWNSTREAM)?;
            act()
        });
        acting.join().unwrap_or_else(|_| Err(io::Error::other("the thread in another namespace ended early")))
    })
}

/// Checks that a process has a mount namespace of its own, and one that only root can change: the owner of a namespace can
/// make the mounts in it writable.
///
/// # Errors
/// `InvalidInput` with the reason.
pub fn check_apart(pid: u32) -> io::Result<()> {
    let refused = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, format!("process {pid} {why}")));
    let namespace = File::open(format!("/proc/{pid}/ns/mnt"))?;
    if namespace.metadata()?.ino() == std::fs::metadata("/proc/self/ns/mnt")?.ino() {
        return refused("sees the same mounts as all: it has no mount namespace of its own");
    }
    // SAFETY: the request takes no argument, and returns a new descriptor.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS) };
    if owner < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: nobody else has the descriptor.
    let owner = File::from(unsafe { OwnedFd::from_raw_fd(owner) });
    match owner.metadata()?.ino() == std::fs::metadata("/proc/self/ns/user")?.ino() {
        true => Ok(()),
        false => refused("has a mount namespace that belongs to a user, who could make the view writable"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_opened_step_by_step_without_links() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::os::unix::fs::symlink(root.join("a"), root.join("link")).unwrap();
        let found = File::from(open_by_steps(&root.join("a/b")).unwrap());
        assert_eq!(found.metadata().unwrap().ino(), root.join("a/b").metadata().unwrap().ino());
        for missing in ["link", "link/b", "none"] {
            let refused = open_by_steps(&root.join(missing)).unwrap_err();
            assert!(matches!(refused, Errno::NOENT | Errno::NOTDIR | Errno::LOOP), "{missing}: {refused}");
        }
    }

    #[test]
    fn the_number_of_a_mount_is_the_same_in_proc() {
        for path in ["/", "/proc"] {
            let file = File::open(path).unwrap();
            assert_eq!(shown_mount_id(&file).unwrap(), mount_id(&file, "").unwrap(), "{path}");
        }
    }
}
