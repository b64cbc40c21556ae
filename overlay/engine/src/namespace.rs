//! Names: looked up, created, removed, moved. Every change is one batch: the new names, the inodes, and what the pool
//! must be told.

mod create;
mod depth;
mod directory;
mod graft;
mod handles;
mod order;
mod remove;
mod rename;

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, RESERVED_PREFIX, Result, Side};
use forebay_catalog::{Catalog, InodeRecord};
use forebay_system::clock::stamp_now;
use parking_lot::Mutex;

use super::coherence::PAUSE;
use super::pool_calls::OWN_CHANGES;
use super::{Entry, Inner, Ino, Lookup, Overlay, Txn};
pub use directory::Arrivals;
pub(crate) use directory::Ask;
pub(crate) use graft::{Graft, GraftPoint, kinds_differ};
pub(crate) use order::NamesState;
pub use order::{DirOrder, Placed};

/// The longest name that Linux accepts, in bytes.
const NAME_MAX: usize = 255;
/// The longest target of a symlink, in bytes: `PATH_MAX` without its NUL.
const TARGET_MAX: usize = libc::PATH_MAX as usize - 1;

/// What is known of all names.
pub(crate) struct Namespace {
    /// Held by [`Txn`] while it changes names.
    pub changes: Arc<Mutex<()>>,
    hash: order::NameHash,
    deepest: depth::Deepest,
}

impl Namespace {
    pub fn of(catalog: &Catalog) -> Result<Self> {
        Ok(Self { changes: Arc::default(), hash: order::NameHash::of(catalog)?, deepest: depth::Deepest::of(catalog)? })
    }
}

impl Overlay {
    /// Looks up a name in a directory.
    pub async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Lookup> {
        let inner = &self.inner;
        for _ in 0..3 {
            let Some(ino) = inner.find(parent, name).await? else {
                let ttl = inner.ttl_of_absence(&*inner.node(parent)?, name);
                return Ok(Lookup::Negative { ttl });
            };
            match inner.counted_entry(ino) {
                // Removed between the two steps.
                Err(e) if e.is(ErrorKind::Stale) => {}
                other => return other.map(Lookup::Found),
            }
        }
        Err(Error::new(ErrorKind::Stale, Side::Application, "the name changes all the time"))
    }

    /// Gives back lookups that were counted.
    pub fn forget(&self, ino: Ino, count: u64) {
        self.inner.forget(ino, count);
    }

    /// Returns the attributes of an inode that a listing named; counts one lookup.
    pub async fn entry(&self, ino: Ino) -> Result<Entry> {
        self.inner.counted_entry(ino)
    }

    /// Returns the target of a symlink.
    ///
    /// # Errors
    /// `Corrupt` if what the pool has cannot be a target.
    pub async fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        let inner = &self.inner;
        let node = inner.node(ino)?;
        let mut left = OWN_CHANGES;
        loop {
            let known = inner.known(&node);
            {
                let state = node.state.lock();
                if state.record.kind != FileKind::Symlink {
                    return Err(Error::new(ErrorKind::InvalidInput, Side::Application, "not a symlink"));
                }
                if let Some(target) = &state.record.target {
                    return Ok(target.to_vec());
                }
            }
            let target = inner.ask_of(ino, |path| async move { inner.pool.readlink(&path).await }).await?;
            if !(1..=TARGET_MAX).contains(&target.len()) || target.contains(&0) {
                let what = format!("{}: {} bytes that are no symlink's target", inner.display(ino), target.len());
                return Err(Error::new(ErrorKind::Corrupt, Side::Pool, what));
            }
            {
                let mut txn = Txn::begin(inner);
                let (asked, version) = &known;
                if txn.believes(ino, *asked)? && txn.record(ino)?.version == *version {
                    txn.record(ino)?.target = Some(target.as_slice().into());
                    txn.commit()?;
                    return Ok(target);
                }
            }
            left -= 1;
            if left == 0 || !known.0.is_quiet() {
                // It may be older than the record, and is not recorded.
                return Ok(target);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Returns the inode that a path of the mount names. No lookup is counted.
    ///
    /// # Errors
    /// `NotFound` with the path.
    pub async fn resolve(&self, path: &PoolPath) -> Result<Ino> {
        let mut at = Ino::ROOT;
        for name in path.components() {
            match self.lookup(at, name).await.map_err(|e| e.context(path))? {
                Lookup::Found(entry) => {
                    self.forget(entry.attr.ino, 1);
                    at = entry.attr.ino;
                }
                Lookup::Negative { .. } => {
                    return Err(Error::new(ErrorKind::NotFound, Side::Application, path.to_string()));
                }
            }
        }
        Ok(at)
    }
}

impl Inner {
    pub(super) fn counted_entry(&self, ino: Ino) -> Result<Entry> {
        // The lookup is counted first: from now on the inode stays, or the code below finds that it is gone.
        self.table.count_lookup(ino);
        let entry = self.live_entry(ino);
        if entry.is_err() {
            self.forget(ino, 1);
        }
        entry
    }

    /// Subtracts lookups that the kernel has forgotten. Reaps an inode that stayed only for the kernel.
    fn forget(&self, ino: Ino, count: u64) {
        let stayed_for_kernel = self.table.forget(ino, count);
        if self.table.has_forgotten_many() {
            // Wakes the task that gives memory back.
            self.catalog.announce_change();
        }
        if !stayed_for_kernel {
            return;
        }
        let mut txn = Txn::begin(self);
        match txn.reap(ino).and_then(|()| txn.commit()) {
            // It is gone already.
            Err(error) if error.is(ErrorKind::Stale) => {}
            Err(error) => tracing::error!(%error, %ino, "an inode without names is not removed before the next start"),
            Ok(()) => {}
        }
    }

    fn live_entry(&self, ino: Ino) -> Result<Entry> {
        let node = self.node(ino)?;
        let ttl = self.ttl_of(&node);
        let attr = self.attr_of(&node)?;
        if node.state.lock().is_deleted() {
            return Err(Error::new(ErrorKind::Stale, Side::Application, format!("inode {ino} was deleted")));
        }
        Ok(Entry { attr, ttl })
    }

    /// Checks that a name may be given to a new entry of a directory.
    fn check_new_name(&self, parent: Ino, name: &[u8]) -> Result<()> {
        self.check_writable()?;
        self.check_name_alone(name)?;
        self.check_depth_in(parent, name)?;
        if self.pool.capabilities().path_max.is_some()
            && let Some(parent) = self.overlay_path(parent)
        {
            return self.pool.check_path(&parent.join(name));
        }
        Ok(())
    }

    /// Checks a new name, wherever it is.
    pub(crate) fn check_name_alone(&self, name: &[u8]) -> Result<()> {
        self.check_name(name)?;
        let bad = |why: &str| {
            Err(Error::new(ErrorKind::InvalidInput, Side::Application, format!("{}: {why}", name.escape_ascii())))
        };
        if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
            return bad("not a file name");
        }
        if name.len() > NAME_MAX {
            return Err(Error::new(ErrorKind::NameTooLong, Side::Application, "a name of more than 255 bytes"));
        }
        if name.starts_with(RESERVED_PREFIX) {
            return bad("names that start with .forebay~ are reserved for unfinished uploads");
        }
        Ok(())
    }
}

impl Txn<'_> {
    /// Returns the record of a directory that may be changed.
    fn live_dir(&mut self, ino: Ino) -> Result<&mut InodeRecord> {
        let record = self.record(ino)?;
        if record.kind != FileKind::Directory {
            return Err(Error::new(ErrorKind::NotDirectory, Side::Application, format!("inode {ino}")));
        }
        if record.links.is_empty() && ino != Ino::ROOT {
            return Err(Error::new(ErrorKind::NotFound, Side::Application, "the directory was removed"));
        }
        Ok(record)
    }

    /// Updates a directory whose names changed: its times, and `subdirs` more or fewer directories in it.
    pub(crate) fn touch_dir(&mut self, ino: Ino, subdirs: i32) -> Result<()> {
        let record = self.record(ino)?;
        let now = stamp_now();
        (record.mtime, record.ctime) = (now, now);
        record.dirty.times = true;
        record.dir_nlink = record.dir_nlink.saturating_add_signed(subdirs);
        Ok(())
    }
}

pub(super) fn exists(name: &[u8]) -> Error {
    Error::new(ErrorKind::Exists, Side::Application, name.escape_ascii().to_string())
}

pub(super) fn not_found(name: &[u8]) -> Error {
    Error::new(ErrorKind::NotFound, Side::Application, name.escape_ascii().to_string())
}
