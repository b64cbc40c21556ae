//! Scratch directories: plain directories on the devices of the fast pool, for what a job writes at the device's own
//! speed. Their users reach them without the daemon. `detached` takes trees out of them, into the content store.
//!
//! A device has three directories for them: `scratch/ID` are the directories of users, `commits/N` are trees that are
//! being taken into the content store, and `discarded/N` are trees that are being removed. Only the daemon's user
//! reaches the last two.

mod detached;
mod limit;
mod prune;
mod tree;
mod walk;

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

use forebay_backends::{Error, ErrorKind, Result, Side};

use crate::{ContentStore, Device};
pub use detached::DetachedTree;
pub use limit::{Seal, count};
pub use rustix::fs::FileType;
pub use tree::{TreeEntry, TreeKind};
pub(crate) use tree::{TreeXattrs, kind_of, names_of, open_below, stat_of, xattr_names};
pub(crate) use walk::{WalkStep, walk};

const SCRATCH: &str = "scratch";
const DISCARDED: &str = "discarded";
/// Other users may pass through a directory, and not list it.
const PASSABLE: u32 = 0o711;

/// What became of a discarded tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// One of its files is removed, which occupied so many bytes.
    Freed(u64),
    Gone,
    /// A part of it cannot be removed.
    Stopped,
}

impl ContentStore {
    /// Returns the path of a scratch directory.
    ///
    /// # Errors
    /// `Corrupt` if there is no such device.
    pub fn scratch_path(&self, device: usize, id: &str) -> Result<PathBuf> {
        Ok(self.numbered_device(device)?.path.join(SCRATCH).join(id))
    }

    pub(crate) fn numbered_device(&self, device: usize) -> Result<&Device> {
        self.known_device(device).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, Side::Cache, format!("fast-pool device {device} was not given (--fast)"))
        })
    }

    /// Makes a scratch directory for a user, or checks the one that is there.
    ///
    /// # Errors
    /// `NotPermitted` if the user cannot reach it, because a directory above it is closed to other users.
    pub fn make_scratch(&self, device: usize, id: &str, (uid, gid): (u32, u32)) -> Result<PathBuf> {
        let (path, device) = (self.scratch_path(device, id)?, self.numbered_device(device)?);
        let failed = |what: &Path, e: io::Error| Error::io(e, Side::Cache, what.display().to_string());
        if uid != rustix::process::geteuid().as_raw() {
            for above in device.path.ancestors() {
                let meta = fs::symlink_metadata(above).map_err(|e| failed(above, e))?;
                if above != device.path && meta.mode() & 0o001 == 0 {
                    let what = format!(
                        "{}: user {uid} cannot pass through it to a scratch directory: chmod o+x, or give another --fast",
                        above.display()
                    );
                    return Err(Error::new(ErrorKind::NotPermitted, Side::Application, what));
                }
            }
            // The directories in it are closed to other users.
            let open =
                |dir: &Path| fs::set_permissions(dir, Permissions::from_mode(PASSABLE)).map_err(|e| failed(dir, e));
            make_dir(&device.path.join(SCRATCH), PASSABLE)?;
            open(&device.path)?;
            open(&device.path.join(SCRATCH))?;
        } else {
            make_dir(&device.path.join(SCRATCH), 0o700)?;
        }
        make_dir(&path, 0o700)?;
        lchown(&path, Some(uid), Some(gid)).map_err(|e| failed(&path, e))?;
        Ok(path)
    }

    /// Takes a scratch directory away from its user. [`Self::remove_discarded`] removes it. A missing one is no error.
    pub fn discard_scratch(&self, device: usize, id: &str, number: u64) -> Result<()> {
        let dir = self.numbered_device(device)?.path.join(DISCARDED);
        make_dir(&dir, 0o700)?;
        let (from, to) = (self.scratch_path(device, id)?, dir.join(number.to_string()));
        match fs::rename(&from, &to) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(e, Side::Cache, format!("discard {}", from.display())))
            }
            _ => Ok(()),
        }
    }

    /// Returns the scratch directories on all devices: the device, the name, and the user and group.
    pub fn scratch_dirs(&self) -> Vec<(usize, String, (u32, u32))> {
        let mut all = Vec::new();
        for at in self.devices() {
            let Ok(dirs) = fs::read_dir(at.path.join(SCRATCH)) else { continue };
            // Without following a link.
            for (dir, meta) in dirs.flatten().filter_map(|dir| dir.metadata().ok().map(|meta| (dir, meta))) {
                if let (true, Ok(id)) = (meta.is_dir(), dir.file_name().into_string()) {
                    all.push((at.number, id, (meta.uid(), meta.gid())));
                }
            }
        }
        all
    }

    /// Takes away all scratch directories that are not known. `number` gives each a new number.
    pub fn discard_unknown_scratch(
        &self,
        is_known: impl Fn(usize, &str) -> bool,
        number: impl Fn() -> Result<u64>,
    ) -> Result<()> {
        for at in self.devices() {
            let Ok(dirs) = fs::read_dir(at.path.join(SCRATCH)) else { continue };
            for dir in dirs.flatten() {
                let name = dir.file_name();
                if let Some(id) = name.to_str().filter(|id| !is_known(at.number, id)) {
                    self.discard_scratch(at.number, id, number()?)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the trees that were discarded and are not removed yet: their devices and numbers.
    pub fn discarded(&self) -> Vec<(usize, u64)> {
        let mut found = Vec::new();
        for device in self.devices() {
            let Ok(trees) = fs::read_dir(device.path.join(DISCARDED)) else { continue };
            let numbers = trees.flatten().filter_map(|tree| tree.file_name().to_str()?.parse().ok());
            found.extend(numbers.map(|number| (device.number, number)));
        }
        found
    }

    /// Returns the bytes that a discarded tree occupies, as far as it can be read. Blocks.
    pub fn count_discarded(&self, (device, number): (usize, u64)) -> u64 {
        let Ok(device) = self.numbered_device(device) else { return 0 };
        count(&device.path.join(DISCARDED).join(number.to_string()), Seal::Keep).unwrap_or(0)
    }

    /// Removes all trees that were discarded. Tells the device and the number of each, and what became of it. Blocks.
    ///
    /// # Errors
    /// The first tree that cannot be removed. The others are removed all the same.
    pub fn remove_discarded(&self, mut told: impl FnMut((usize, u64), Removal)) -> Result<()> {
        let mut removed = Ok(());
        for device in self.devices() {
            let dir = device.path.join(DISCARDED);
            let Ok(base) = fs::File::open(&dir) else { continue };
            let base = std::os::fd::OwnedFd::from(base);
            for name in tree::names_of(&base).unwrap_or_default() {
                let failed = |e: io::Error| {
                    Err(Error::io(e, Side::Cache, format!("remove {} in {}", name.escape_ascii(), dir.display())))
                };
                let number: Option<u64> = std::str::from_utf8(&name).ok().and_then(|name| name.parse().ok());
                let mut tell = |what| number.into_iter().for_each(|number| told((device.number, number), what));
                match prune::prune(&base, &name, prune::Prune::Everything, |bytes| tell(Removal::Freed(bytes))) {
                    Ok(true) => tell(Removal::Gone),
                    stopped => {
                        tell(Removal::Stopped);
                        let why = stopped.err().unwrap_or_else(|| io::ErrorKind::DirectoryNotEmpty.into());
                        removed = removed.and(failed(why));
                    }
                }
            }
        }
        removed
    }
}

fn make_dir(path: &Path, mode: u32) -> Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::io(e, Side::Cache, format!("make {}", path.display())))
        }
        _ => Ok(()),
    }
}
