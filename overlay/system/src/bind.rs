//! Bind mounts: a tree of one file system, shown read-only at a place in another one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_change, move_mount, open_tree,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// The user namespace that owns a namespace (`ioctl_ns(2)`).
const NS_GET_USERNS: libc::c_ulong = 0xb701;

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

    /// Attaches it over an open place, in the mount namespace of this thread.
    pub fn attach(self, place: impl AsFd) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(&self.0, "", place, "", flags)?)
    }
}

/// Detaches what is mounted at a path. `lazy`: also if it is in use; its present users keep what they have open.
///
/// # Errors
/// `ResourceBusy` if it is in use and `lazy` is false.
pub fn detach(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    Ok(rustix::mount::unmount(mountpoint, flags | UnmountFlags::NOFOLLOW)?)
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
