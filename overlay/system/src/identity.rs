//! Users of the machine: their groups, and what they may do.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

/// Returns the primary group of a user, if the machine knows the user.
pub fn group_of(uid: u32) -> Option<u32> {
    Some(User::from_uid(Uid::from_raw(uid)).ok()??.gid.as_raw())
}

/// Returns the name of a user, if the machine knows the user.
pub fn name_of_user(uid: u32) -> Option<String> {
    Some(User::from_uid(Uid::from_raw(uid)).ok()??.name)
}

/// Returns the name of a group, if the machine knows the group.
pub fn name_of_group(gid: u32) -> Option<String> {
    Some(Group::from_gid(Gid::from_raw(gid)).ok()??.name)
}

/// Returns the number of a user, if the machine knows the name.
pub fn user_named(name: &str) -> Option<u32> {
    Some(User::from_name(name).ok()??.uid.as_raw())
}

/// Returns the number of a group, if the machine knows the name.
pub fn group_named(name: &str) -> Option<u32> {
    Some(Group::from_name(name).ok()??.gid.as_raw())
}

/// Returns the primary group and all groups with whose file access rights [`as_user`] acts for a user.
///
/// # Errors
/// Those of the user database.
pub fn groups_of(uid: u32) -> io::Result<Vec<u32>> {
    if uid == rustix::process::geteuid().as_raw() {
        let own = rustix::process::getgroups()?;
        return Ok(std::iter::once(rustix::process::getegid()).chain(own).map(rustix::process::Gid::as_raw).collect());
    }
    let (gid, groups) = registered_groups(uid)?;
    Ok(std::iter::once(gid).chain(groups).map(Gid::as_raw).collect())
}

fn registered_groups(uid: u32) -> io::Result<(Gid, Vec<Gid>)> {
    let user = User::from_uid(Uid::from_raw(uid)).map_err(io::Error::from)?;
    // A user without an entry has its number as its group, as Slurm and container engines do.
    let gid = user.as_ref().map_or(Gid::from_raw(uid), |user| user.gid);
    let groups = match user {
        Some(user) => {
            let name = std::ffi::CString::new(user.name)?;
            getgrouplist(&name, gid).map_err(io::Error::from)?
        }
        None => vec![gid],
    };
    Ok((gid, groups))
}

/// Does something with the file access rights of a user: those of its user id, and of all its groups. Runs in a thread
/// of its own, whose identity is changed (`setfsuid(2)`), so that the rest of the process keeps its rights.
///
/// # Errors
/// `PermissionDenied` if this process may not act for the user; what `act` returns.
pub fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    if uid == rustix::process::geteuid().as_raw() {
        return act();
    }
    let (gid, groups) = registered_groups(uid)?;
    let groups: Vec<libc::gid_t> = groups.into_iter().map(Gid::as_raw).collect();
    std::thread::scope(|scope| {
        let acting = scope.spawn(move || {
            // SAFETY: the raw call changes this thread alone, unlike that of the C library. It reads as many numbers as
            // the slice has.
            let set = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
            if set < 0 {
                return Err(io::Error::last_os_error());
            }
            nix::unistd::setfsgid(gid);
            nix::unistd::setfsuid(Uid::from_raw(uid));
            // The call returns the identity before it.
            if nix::unistd::setfsuid(Uid::from_raw(uid)).as_raw() != uid {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            act()
        });
        acting.join().unwrap_or_else(|_| Err(io::Error::other("the thread that acts for a user ended early")))
    })
}

/// Checks that this thread may make and remove names in a directory (`faccessat2(2)` with `AT_EACCESS`).
///
/// # Errors
/// `PermissionDenied` if it may not.
pub fn check_may_change(dir: impl AsFd) -> io::Result<()> {
    let (fd, wanted) = (dir.as_fd().as_raw_fd(), libc::W_OK | libc::X_OK);
    // SAFETY: reads the string, which ends with NUL. The C library's function compares other identities.
    let refused = unsafe { libc::syscall(libc::SYS_faccessat2, fd, c".".as_ptr(), wanted, libc::AT_EACCESS) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn another_users_rights_end_with_the_call() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let write = || std::fs::write(dir.path().join("a"), "");
        let check = || check_may_change(std::fs::File::open(dir.path())?);
        assert_eq!(as_user(65534, write).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(as_user(65534, check).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        write().unwrap();
        check().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(65534), None).unwrap();
        as_user(65534, check).unwrap();
        assert_eq!(group_of(0), Some(0));
        assert_eq!(groups_of(4_000_000).unwrap(), [4_000_000, 4_000_000]);
    }
}
