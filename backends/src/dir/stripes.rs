//! What BeeGFS and Lustre say of where content lies: chunk size, number of targets, storage pool.
//!
//! All of it is optional. A client that does not know a call, an answer that contradicts itself, a file that may not be
//! opened: then nothing is known, and the pool is a directory like any other.
//!
//! Both file systems are asked through one trait (`calls::SystemCalls`), so that tests can answer byte by byte. What
//! is not known is `None`, and an impossible number is not believed.

mod beegfs;
mod calls;
mod lustre;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::{Error, ErrorKind, FileKind, Layout, PoolPath, Result, Side, Stripe};

use super::content;
use super::root::{Call, Root};
use super::stat::stat_fd;
pub(super) use calls::{Kernel, SystemCalls};

/// `f_type` of BeeGFS, which has kept the number that its predecessor had.
pub(super) const BEEGFS_MAGIC: u64 = 0x1983_0326;
pub(super) const LUSTRE_MAGIC: u64 = 0x0bd0_0bd0;

/// File systems that stripe files over servers, and say how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Striped {
    BeeGfs,
    Lustre,
}

impl Striped {
    pub fn name(self) -> &'static str {
        match self {
            Self::BeeGfs => "BeeGFS",
            Self::Lustre => "Lustre",
        }
    }

    /// The kind of file system that a mount says it is.
    fn of_type(fs_type: &str) -> Option<Self> {
        // A file system in user space names what it stands for behind a dot.
        match fs_type.strip_prefix("fuse.").unwrap_or(fs_type) {
            "beegfs" | "beegfs_nodev" => Some(Self::BeeGfs),
            "lustre" => Some(Self::Lustre),
            _ => None,
        }
    }

    fn of_magic(magic: u64) -> Option<Self> {
        match magic {
            BEEGFS_MAGIC => Some(Self::BeeGfs),
            LUSTRE_MAGIC => Some(Self::Lustre),
            _ => None,
        }
    }
}

/// The layouts of one pool's objects.
pub(super) struct Stripes {
    calls: Box<dyn SystemCalls>,
    pub(super) kind: Option<Striped>,
    /// The client is older than the call that tells the storage pool.
    lacks_entry_info: AtomicBool,
}

impl Stripes {
    pub(super) fn detect(calls: Box<dyn SystemCalls>, root: BorrowedFd<'_>) -> Self {
        let by_type = || calls.mount_type(root).and_then(|fs_type| Striped::of_type(&fs_type));
        let kind = calls.magic(root).ok().and_then(Striped::of_magic).or_else(by_type);
        Self { calls, kind, lacks_entry_info: AtomicBool::new(false) }
    }

    /// Refuses a root that is on another kind of file system than its URL says.
    pub(super) fn require(&self, wanted: Striped, root: BorrowedFd<'_>, path: &Path) -> Result<()> {
        if self.kind == Some(wanted) {
            return Ok(());
        }
        let (path, name) = (path.display(), wanted.name());
        let found = match self.calls.mount_type(root) {
            Some(fs_type) => format!("on {fs_type}"),
            None => "on something else".to_owned(),
        };
        Err(Error::new(
            ErrorKind::InvalidInput,
            Side::Application,
            format!("{path} is {found}, not on {name}: mount {name} there, or give the path alone to take it as it is"),
        ))
    }

    /// The layout of a file, or that which new files in a directory get. `None` where it cannot be known.
    pub(super) fn layout(&self, root: &Root, call: Call<'_>) -> Result<Option<Layout>> {
        let Some(kind) = self.kind else { return Ok(None) };
        let object = root.object(call.path).map_err(|errno| call.failed(errno))?;
        let is_dir = match stat_fd(&object).map_err(|errno| call.failed(errno))?.kind {
            FileKind::Directory => true,
            FileKind::File => false,
            _ => return Ok(None),
        };
        Ok(match kind {
            Striped::BeeGfs => match self.entry_info(root, call.path, is_dir) {
                Some(layout) => Some(layout),
                None if is_dir => None,
                None => self.of_file(&content::open_file(root, call, OFlags::RDONLY | OFlags::NOATIME)?.0),
            },
            Striped::Lustre if is_dir => {
                let dir = root.open_directory(call.path).map_err(|errno| call.failed(errno))?;
                self.of_file(&dir)
            }
            Striped::Lustre => self.of_file(&content::open_file(root, call, OFlags::RDONLY | OFlags::NOATIME)?.0),
        })
    }

    /// What is known of an open file without asking a server, as far as that goes.
    pub(super) fn of_file(&self, file: impl AsFd) -> Option<Layout> {
        match self.kind? {
            Striped::BeeGfs => {
                let mut answer = [0; beegfs::STRIPE_INFO_BYTES];
                self.calls.ioctl(file.as_fd(), beegfs::GET_STRIPE_INFO, &mut answer).ok()?;
                beegfs::stripe_info(&answer)
            }
            Striped::Lustre => {
                let mut value = vec![0; lustre::XATTR_MAX_BYTES];
                let length = self.calls.xattr(file.as_fd(), lustre::XATTR, &mut value).ok()?;
                lustre::layout(value.get(..length)?)
            }
        }
    }

    /// The stripe that a new file was given.
    pub(super) fn stripe_of(&self, file: impl AsFd) -> Option<Stripe> {
        self.of_file(file)?.stripe
    }

    /// What BeeGFS' metadata server says of an entry: the only call that names the storage pool. It is made on a
    /// directory that is open, about itself or about a name in it.
    fn entry_info(&self, root: &Root, path: &PoolPath, is_dir: bool) -> Option<Layout> {
        if self.lacks_entry_info.load(Ordering::Relaxed) {
            return None;
        }
        let (dir, name) = match is_dir {
            true => (root.open_directory(path).ok()?, &b""[..]),
            false => (root.open_directory(&path.parent()?).ok()?, path.name()?),
        };
        let mut argument = beegfs::entry_info_argument(name)?;
        match self.calls.ioctl(dir.as_fd(), beegfs::GET_ENTRY_INFO_V2, &mut argument[..]) {
            Ok(()) => beegfs::entry_info(&argument[..]),
            Err(Errno::NOTTY | Errno::NOSYS | Errno::OPNOTSUPP) => {
                self.lacks_entry_info.store(true, Ordering::Relaxed);
                None
            }
            Err(_) => None,
        }
    }
}

/// An integer in the byte order of this machine: as kernels hand structures to programs.
fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}
