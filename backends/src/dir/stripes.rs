//! What BeeGFS and Lustre report about the place of content: chunk size, number of targets, storage pool.
//!
//! All of it is optional. If the client does not know a call, or if an answer contradicts itself, there is no layout,
//! and the pool works like any other directory. A call that fails is an error: there may be a layout.
//!
//! All questions go through one trait (`calls::SystemCalls`), so that tests can answer byte by byte. A value that the file
//! system does not have is `None`, and an impossible number is ignored.

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
use super::root::{PathCall, RootDirectory};
use super::stat::stat_fd;
pub(super) use calls::{Kernel, SystemCalls};

/// `f_type` of BeeGFS, inherited from its predecessor.
pub(super) const BEEGFS_MAGIC: u64 = 0x1983_0326;
pub(super) const LUSTRE_MAGIC: u64 = 0x0bd0_0bd0;

/// File systems that stripe files over servers, and report the layout.
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

    /// The kind of file system, from the type of its mount.
    fn of_type(fs_type: &str) -> Option<Self> {
        // The type of a file system in user space names its kind after a dot.
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
    /// The client is too old for the call that returns the storage pool.
    lacks_entry_info: AtomicBool,
}

impl Stripes {
    pub(super) fn detect(calls: Box<dyn SystemCalls>, root: BorrowedFd<'_>) -> Self {
        let by_type = || calls.mount_type(root).and_then(|fs_type| Striped::of_type(&fs_type));
        let kind = calls.magic(root).ok().and_then(Striped::of_magic).or_else(by_type);
        Self { calls, kind, lacks_entry_info: AtomicBool::new(false) }
    }

    /// Refuses a root that is on a kind of file system other than its URL requires.
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

    /// The layout of a file, or of new files in a directory. `None` if the file system does not have any.
    ///
    /// # Errors
    /// Of the calls, also of the metadata server: the layout is not known.
    pub(super) fn layout(&self, root: &RootDirectory, call: PathCall<'_>) -> Result<Option<Layout>> {
        let Some(kind) = self.kind else { return Ok(None) };
        let object = root.object(call.path).map_err(|errno| call.failed(errno))?;
        let is_dir = match stat_fd(&object).map_err(|errno| call.failed(errno))?.kind {
            FileKind::Directory => true,
            FileKind::File => false,
            _ => return Ok(None),
        };
        let layout = match kind {
            Striped::BeeGfs => match self.entry_info(root, call.path, is_dir) {
                Ok(None) if !is_dir => {
                    self.of_file(&content::open_file(root, call, OFlags::RDONLY | OFlags::NOATIME)?.0)
                }
                Err(errno) if !is_dir => {
                    let file = content::open_file(root, call, OFlags::RDONLY | OFlags::NOATIME)?.0;
                    let stripes = self.of_file(&file).and_then(|told| told.ok_or(errno));
                    stripes.map(|layout| Some(Layout { is_storage_pool_untold: true, ..layout }))
                }
                told => told,
            },
            Striped::Lustre if is_dir => root.open_directory(call.path).and_then(|dir| self.of_file(&dir)),
            Striped::Lustre => self.of_file(&content::open_file(root, call, OFlags::RDONLY | OFlags::NOATIME)?.0),
        };
        layout.map_err(|errno| call.failed(errno))
    }

    /// The layout of an open file, as far as it is known without a call to a server.
    fn of_file(&self, file: impl AsFd) -> Result<Option<Layout>, Errno> {
        match self.kind {
            None => Ok(None),
            Some(Striped::BeeGfs) => {
                let mut answer = [0; beegfs::STRIPE_INFO_BYTES];
                // It tells no storage pool, so nothing depends on it but speed.
                let told = self.calls.ioctl(file.as_fd(), beegfs::GET_STRIPE_INFO, &mut answer);
                Ok(told.ok().and_then(|()| beegfs::stripe_info(&answer)))
            }
            Some(Striped::Lustre) => {
                let mut value = vec![0; lustre::XATTR_MAX_BYTES];
                match self.calls.xattr(file.as_fd(), lustre::XATTR, &mut value) {
                    Ok(length) => Ok(value.get(..length).and_then(lustre::layout)),
                    // The layout is longer than any that is read.
                    Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => Ok(None),
                    Err(errno) => Err(errno),
                }
            }
        }
    }

    /// The stripe of a new file.
    pub(super) fn stripe_of(&self, file: impl AsFd) -> Option<Stripe> {
        self.of_file(file).ok()??.stripe
    }

    /// Asks BeeGFS' metadata server about an entry: the only call that returns the storage pool. It is made on an
    /// open directory, about the directory itself or about a name in it.
    fn entry_info(&self, root: &RootDirectory, path: &PoolPath, is_dir: bool) -> Result<Option<Layout>, Errno> {
        if self.lacks_entry_info.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (dir, name) = match (is_dir, path.parent(), path.name()) {
            (true, ..) => (root.open_directory(path)?, &b""[..]),
            (false, Some(parent), Some(name)) => (root.open_directory(&parent)?, name),
            (false, ..) => return Ok(None),
        };
        let Some(mut argument) = beegfs::entry_info_argument(name) else { return Ok(None) };
        match self.calls.ioctl(dir.as_fd(), beegfs::GET_ENTRY_INFO_V2, &mut argument[..]) {
            Ok(()) if beegfs::is_refusal(&argument[..]) => Err(Errno::IO),
            Ok(()) => Ok(beegfs::entry_info(&argument[..])),
            Err(Errno::NOTTY | Errno::NOSYS | Errno::OPNOTSUPP) => {
                self.lacks_entry_info.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(errno) => Err(errno),
        }
    }
}

/// An integer in this machine's byte order, in which kernels pass structures to programs.
fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}
