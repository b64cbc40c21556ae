//! The system calls that return layouts. Tests replace them, because real answers need a cluster.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{fgetxattr, fstatfs};
use rustix::io::Errno;

/// An ioctl whose argument is a structure of a fixed size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IoctlRequest {
    pub(crate) opcode: rustix::ioctl::Opcode,
    pub(crate) bytes: usize,
}

pub(crate) trait SystemCalls: Send + Sync + 'static {
    /// The magic number of the kind of file system.
    fn magic(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<u64>;

    /// The type with which the file system was mounted.
    fn mount_type(&self, fd: BorrowedFd<'_>) -> Option<String>;

    /// Passes `argument` to the file system, which may write its answer into it.
    fn ioctl(&self, fd: BorrowedFd<'_>, request: IoctlRequest, argument: &mut [u8]) -> rustix::io::Result<()>;

    /// Reads an extended attribute into `value` and returns its length.
    fn xattr(&self, fd: BorrowedFd<'_>, name: &CStr, value: &mut [u8]) -> rustix::io::Result<usize>;
}

/// The kernel of this machine.
#[derive(Debug)]
pub(crate) struct Kernel;

impl SystemCalls for Kernel {
    fn magic(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<u64> {
        // The kernel's types differ between machines; the magic numbers have 32 bits.
        Ok(fstatfs(fd)?.f_type as u64 & 0xffff_ffff)
    }

    fn mount_type(&self, fd: BorrowedFd<'_>) -> Option<String> {
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
        let mount = about.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
        let mounts = std::fs::read("/proc/self/mountinfo").ok()?;
        type_of(&String::from_utf8_lossy(&mounts), mount)
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: IoctlRequest, argument: &mut [u8]) -> rustix::io::Result<()> {
        if argument.len() < request.bytes {
            return Err(Errno::INVAL);
        }
        // SAFETY: only this call uses the argument, any bytes are valid in it, and it is as long as the request says
        // that the file system reads and writes.
        let answer = unsafe { libc::ioctl(fd.as_raw_fd(), request.opcode as _, argument.as_mut_ptr()) };
        match answer {
            -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
            _ => Ok(()),
        }
    }

    fn xattr(&self, fd: BorrowedFd<'_>, name: &CStr, value: &mut [u8]) -> rustix::io::Result<usize> {
        fgetxattr(fd, name, value)
    }
}

/// The type in a mount's line: the first field after the lone dash.
fn type_of(mountinfo: &str, mount: &str) -> Option<String> {
    let line = mountinfo.lines().find(|line| line.split(' ').next() == Some(mount))?;
    Some(line.split(' ').skip_while(|field| *field != "-").nth(1)?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_of_a_mount_is_found_by_its_number() {
        let mounts = "36 35 98:0 / /a rw master:1 - ext4 /dev/sda rw\n\
                      360 35 0:44 / /mnt/b rw,noatime - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf\n";
        assert_eq!(type_of(mounts, "360").as_deref(), Some("beegfs"));
        assert_eq!(type_of(mounts, "36").as_deref(), Some("ext4"));
        assert_eq!(type_of(mounts, "3"), None);
    }

    #[test]
    fn the_kernel_of_this_machine_is_asked() {
        use std::os::fd::AsFd;
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = std::fs::File::open(dir.path()).unwrap();
        assert_eq!(Kernel.magic(file.as_fd()), Ok(0x0102_1994));
        assert_eq!(Kernel.mount_type(file.as_fd()).as_deref(), Some("tmpfs"));
        let request = IoctlRequest { opcode: rustix::ioctl::opcode::read::<[u8; 12]>(b'f', 25), bytes: 12 };
        assert_eq!(Kernel.ioctl(file.as_fd(), request, &mut [0; 12]), Err(Errno::NOTTY));
        assert_eq!(Kernel.ioctl(file.as_fd(), request, &mut [0; 11]), Err(Errno::INVAL));
        assert!(Kernel.xattr(file.as_fd(), c"lustre.lov", &mut [0; 64]).is_err());
    }
}
