//! Mounts a FUSE device at a directory, and unmounts it. These functions keep no state: one process can keep the device
//! that is returned, and another can serve it.

use std::ffi::CString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_backends::{Error, ErrorKind, Result, Side};
use rustix::fs::{Mode, OFlags};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};

use super::MountOptions;
use super::init::MAX_WRITE_BYTES;

/// The subtype that makes the type of the mount `fuse.forebay`.
const SUBTYPE: &str = "forebay";
/// The set-uid helper that mounts for users other than root.
const HELPER: &str = "fusermount3";

fn failed(error: io::Error, options: &MountOptions) -> Error {
    let at = options.mountpoint.display();
    let advice = match error.raw_os_error() {
        Some(libc::ENOTCONN) => format!("{at} is a dead FUSE mount; `fusermount3 -u {at}` removes it"),
        Some(libc::ENOENT) => format!("{at} does not exist, or /dev/fuse does not (module fuse)"),
        Some(libc::ENODEV) => "the kernel has no FUSE".to_owned(),
        _ => format!("mount at {at}"),
    };
    Error::io(error, Side::Kernel, advice)
}

/// Mounts at `options.mountpoint` and returns the device that serves the mount.
///
/// # Errors
/// Side `Kernel`: no FUSE, no privilege and no helper, or a mountpoint that is not a directory of the caller.
pub fn mount_device(options: &MountOptions) -> Result<OwnedFd> {
    if rustix::process::geteuid().is_root() {
        mount_as_root(options).map_err(|error| failed(error, options))
    } else {
        mount_by_helper(options)
    }
}

fn mount_as_root(options: &MountOptions) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
    // The flags are part of the mount call: flags that are added later would not hold for the first requests.
    let mut flags = options.flags;
    if options.read_only || options.immutable {
        flags |= MountFlags::RDONLY;
    }
    let mut terms = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,max_read={MAX_WRITE_BYTES}",
        device.as_raw_fd()
    );
    if options.allow_other {
        terms.push_str(",allow_other");
    }
    let terms = CString::new(terms)?;
    let kind = format!("fuse.{SUBTYPE}");
    rustix::mount::mount(options.fs_name.as_str(), &options.mountpoint, kind.as_str(), flags, terms.as_c_str())?;
    Ok(device)
}

/// A comma would end the option in the helper's list, a backslash is its escape.
fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace(',', "\\,")
}

fn mount_by_helper(options: &MountOptions) -> Result<OwnedFd> {
    let io = |error: io::Error| failed(error, options);
    let mut list = format!(
        "fsname={},subtype={SUBTYPE},default_permissions,max_read={MAX_WRITE_BYTES}",
        escaped(&options.fs_name)
    );
    if options.allow_other {
        list.push_str(",allow_other");
    }
    if options.read_only || options.immutable || options.flags.contains(MountFlags::RDONLY) {
        list.push_str(",ro");
    }
    // The helper sets `nosuid` and `nodev` itself.
    // It does not know `lazytime`, which only permits times to be written late; the daemon does not need that.
    for (name, flag) in [
        ("noexec", MountFlags::NOEXEC),
        ("noatime", MountFlags::NOATIME),
        ("sync", MountFlags::SYNCHRONOUS),
        ("dirsync", MountFlags::DIRSYNC),
    ] {
        if options.flags.contains(flag) {
            list.push(',');
            list.push_str(name);
        }
    }
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|error| io(error.into()))?;
    let mut helper = Command::new(HELPER);
    helper.args(["-o", &list, "--"]).arg(&options.mountpoint);
    helper.env("_FUSE_COMMFD", theirs.as_raw_fd().to_string());
    helper.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let inherited = theirs.as_raw_fd();
    // SAFETY: fcntl is async-signal-safe, and the descriptor is open in the child.
    unsafe {
        helper.pre_exec(move || {
            fcntl_setfd(BorrowedFd::borrow_raw(inherited), FdFlags::empty())?;
            Ok(())
        });
    }
    let child = helper.spawn().map_err(|error| io(error).context(format!("{HELPER} (package fuse3) does not run")))?;
    drop(theirs);
    let device = receive(ours.as_fd());
    let output = child.wait_with_output().map_err(io)?;
    match device {
        Ok(Some(device)) => Ok(device),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Error::new(ErrorKind::NotPermitted, Side::Kernel, format!("{HELPER} did not mount: {said}")))
        }
    }
}

/// Receives the descriptor that comes with one byte. Returns `None` if the helper gave up.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let device = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(device)
}

/// Unmounts. `lazy`: detaches the mount at once for new users, and for present users when they are done.
///
/// # Errors
/// `Busy` if files are open and `lazy` is false.
pub fn unmount(mountpoint: &Path, lazy: bool) -> Result<()> {
    let what = || format!("unmount {}", mountpoint.display());
    if rustix::process::geteuid().is_root() {
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        return rustix::mount::unmount(mountpoint, flags)
            .map_err(|error| Error::io(error.into(), Side::Kernel, what()));
    }
    let mut helper = Command::new(HELPER);
    helper.arg("-u").args(lazy.then_some("-z")).arg("--").arg(mountpoint);
    let output = helper.output().map_err(|error| Error::io(error, Side::Kernel, what()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let kind = if said.contains("busy") { ErrorKind::Busy } else { ErrorKind::NotPermitted };
    Err(Error::new(kind, Side::Kernel, format!("{}: {said}", what())))
}

/// Returns the device number of the mount as `major:minor`. Resolves only the parent directory: the mount may not
/// answer yet.
pub fn device_number(mountpoint: &Path) -> Option<String> {
    let want = mountpoint.parent()?.canonicalize().ok()?.join(mountpoint.file_name()?);
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    table.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let (number, at) = (fields.nth(2)?, fields.nth(1)?);
        (unescape(at) == want.as_os_str().as_bytes()).then(|| String::from_utf8_lossy(number).into_owned())
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &after[3..];
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountpoints_with_odd_names_are_found() {
        assert_eq!(unescape(br"/a\040b\134c"), b"/a b\\c");
        assert_eq!(unescape(br"/plain\x"), br"/plain\x");
        assert_eq!(escaped(r"a,b\c"), r"a\,b\\c");
    }

    #[test]
    fn the_device_number_of_a_mount_is_read_without_touching_it() {
        assert!(device_number(Path::new("/proc")).is_some_and(|number| number.contains(':')));
    }
}
