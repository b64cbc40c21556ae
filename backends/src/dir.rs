//! A directory as a pool, on a local file system or on one that the kernel has mounted (NFS, BeeGFS, Lustre).
//!
//! All paths are resolved beneath a handle to the root, and never through a symlink. Work on a file system that is
//! not local runs on blocking threads, whose number is bounded. If the root vanishes, calls fail with `Unavailable`,
//! never with `NotFound`.
//!
//! A file with several hard links is replaced in place, so that its other names keep naming it. This is the one `put`
//! that is not atomic for programs which read the pool directly; [`Pool::read`] returns `Stale`.
//!
//! On kernels before 6.13, two changes within one tick of the clock (up to 10 ms) may leave equal times: see
//! [`Capabilities::time_granularity_ns`].
//!
//! In versions, the root's own device has the number 0, so that versions outlive a mount; see `dir/device.rs`.

mod attrs;
mod content;
mod device;
mod fds;
mod listing;
mod names;
mod probe;
mod publish;
mod root;
mod staging;
mod stat;
mod stripes;
#[cfg(test)]
mod tests;
mod threads;
mod trial;
mod upload;

use std::fmt;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use rustix::fs::{OFlags, fstatvfs, fsync, ftruncate, readlinkat};
use rustix::io::Errno;
use tokio::sync::Semaphore;

use crate::{
    Attrs, Capabilities, Error, ErrorKind, Expected, FileKind, Layout, Listing, Pieces, Pool, PoolPath, RenameMode,
    Result, SetAttrs, Side, Space, Stat, Version,
};

use crate::abandoned::{AbandonedChanges, ChangeWork};

use attrs::AttributeTarget;
use fds::{OpenFiles, OpenWriters};
use listing::OpenListing;
use probe::Abilities;
use publish::Publish;
use root::{PathCall, RootDirectory};
use staging::TempFile;
use stat::{stat_fd, stat_name};
pub use stripes::Striped;
use stripes::{Kernel, Stripes, SystemCalls};
pub use threads::MAX_BLOCKING_CALLS;
use trial::{Trials, refused};

/// An unfinished file younger than this may belong to a live writer on another node.
const SWEEP_AGE: Duration = Duration::from_secs(24 * 3600);
const PUBLISH_LOCKS: usize = 64;
/// Stands for the root's device in versions. The kernel gives no file system the number 0.
const ROOT_DEVICE: u64 = 0;

/// A pool in a directory.
pub struct DirPool {
    shared: Arc<Shared>,
    permits: Arc<Semaphore>,
}

struct Shared {
    root: RootDirectory,
    abilities: Abilities,
    stripes: Stripes,
    files: Arc<OpenFiles>,
    writers: OpenWriters,
    trials: Trials,
    abandoned: Arc<AbandonedChanges>,
    /// Serializes writers of one name within this process, by the hash of the path.
    publishing: [Mutex<()>; PUBLISH_LOCKS],
}

impl fmt::Debug for DirPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirPool").field("root", &self.shared.root.path()).finish_non_exhaustive()
    }
}

impl DirPool {
    /// Opens the directory `root` and probes what its file system can do. The probe creates two small temporary files
    /// in a writable root. May block.
    pub fn open(root: &Path) -> Result<Self> {
        Self::with_calls(root, None, Box::new(Kernel))
    }

    /// Like [`Self::open`], for a directory that must be on this kind of file system.
    pub fn open_striped(root: &Path, kind: Striped) -> Result<Self> {
        Self::with_calls(root, Some(kind), Box::new(Kernel))
    }

    fn with_calls(root: &Path, kind: Option<Striped>, calls: Box<dyn SystemCalls>) -> Result<Self> {
        let root = RootDirectory::open(root)?;
        let stripes = Stripes::detect(calls, root.fd());
        if let Some(kind) = kind {
            stripes.require(kind, root.fd(), root.path())?;
        }
        let abilities = probe::probe(root.fd(), stripes.kind).map_err(|errno| {
            let what = format!("find out what the file system of {} can do", root.path().display());
            Error::os(errno.raw_os_error(), Side::Pool, what)
        })?;
        let publishing = std::array::from_fn(|_| Mutex::new(()));
        let shared = Shared {
            root,
            abilities,
            stripes,
            files: Arc::new(OpenFiles::new()),
            writers: OpenWriters::default(),
            trials: Trials::default(),
            abandoned: Arc::default(),
            publishing,
        };
        Ok(Self { shared: Arc::new(shared), permits: Arc::new(Semaphore::new(threads::blocking_calls())) })
    }

    /// The directory, absolute.
    pub fn root(&self) -> &Path {
        self.shared.root.path()
    }

    /// Removes the unfinished files of writers that died more than a day ago from one directory, and returns their
    /// number. The pool never calls this itself.
    pub async fn sweep(&self, path: &PoolPath) -> Result<u64> {
        let path = path.clone();
        self.blocking(move |pool| listing::sweep(&pool.root, pool.root.call("sweep", &path), SWEEP_AGE, true)).await
    }

    async fn next_page(
        &self,
        path: PoolPath,
        mut listing: OpenListing,
    ) -> Result<Option<(Vec<crate::DirEntry>, OpenListing)>> {
        self.blocking(move |pool| {
            let Some(mut page) = listing.next_page(&pool.root, pool.root.call("list", &path))? else { return Ok(None) };
            for entry in &mut page {
                entry.stat = pool.outward(entry.stat.clone());
            }
            Ok(Some((page, listing)))
        })
        .await
    }

    fn handle(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), permits: Arc::clone(&self.permits) }
    }
}

impl Shared {
    /// The last step of a `put`, under the lock of the path.
    fn publish(
        &self,
        staging: TempFile,
        path: &PoolPath,
        size: u64,
        attrs: &Attrs,
        expected: &Expected,
        change: &ChangeWork,
    ) -> Result<Stat> {
        let call = self.root.call("put", path);
        let Some(name) = path.name() else { return Err(call.failed(Errno::ISDIR)) };
        let may_chown = self.abilities.public.objects.owners;
        staging.finish(call, size, attrs, may_chown)?;
        let _turn = self.turn(path);
        if change.is_abandoned() {
            return Err(call.error(ErrorKind::Timeout, "it was given up before it had its name"));
        }
        let (rename_noreplace, rename_exchange) =
            (self.abilities.rename_noreplace, self.abilities.public.renames.exchange());
        let publish = Publish { call, name, attrs, may_chown, rename_noreplace, rename_exchange };
        let stat = publish.run(staging, expected)?;
        if let Expected::Version(replaced) | Expected::Name(replaced) = expected {
            self.forget_object(replaced);
        }
        Ok(stat)
    }

    fn set_attrs(&self, call: PathCall<'_>, changes: &SetAttrs) -> Result<Stat> {
        if changes.only_if.is_some() {
            let now = self.with_object(call, |_, object| stat_fd(object))?;
            if !changes.applies_to(&self.outward(now).version) {
                return Err(call.error(ErrorKind::Busy, "another client writes it"));
            }
        }
        if let Some(size) = changes.size {
            let (file, _) = content::open_file(&self.root, call, OFlags::WRONLY)?;
            ftruncate(&file, size).and_then(|()| fsync(&file)).map_err(|errno| call.failed(errno))?;
            if let (0, Some(object)) = (size, call.path.object()) {
                self.writers.forget(object);
            }
        }
        self.with_object(call, |target, object| {
            target.change(changes, self.abilities.public.objects.owners)?;
            target.sync()?;
            stat_fd(object)
        })
    }

    fn with_object<T>(
        &self,
        call: PathCall<'_>,
        work: impl FnOnce(&AttributeTarget<'_>, std::os::fd::BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> Result<T> {
        let object = self.root.object(call.path).map_err(|errno| call.failed(errno))?;
        let kind = stat_fd(&object).map_err(|errno| call.failed(errno))?.kind;
        work(&AttributeTarget::handle(object.as_fd(), kind), object.as_fd()).map_err(|errno| call.failed(errno))
    }

    fn require(&self, able: bool, call: PathCall<'_>, why: &str) -> Result<()> {
        call.check_names()?;
        if able { Ok(()) } else { Err(call.error(ErrorKind::Unsupported, why)) }
    }

    /// Whether an object with these attributes may have this name.
    fn check_new(&self, call: PathCall<'_>, attrs: &Attrs) -> Result<()> {
        if attrs.xattrs.is_empty() { call.check_names() } else { self.require_xattrs(call) }
    }

    fn require_xattrs(&self, call: PathCall<'_>) -> Result<()> {
        self.require(self.abilities.public.objects.xattrs, call, "its file system has no extended attributes")
    }
}

#[async_trait]
impl Pool for DirPool {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.abilities.public
    }

    fn url(&self) -> String {
        format!("file://{}", self.shared.root.path().display())
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        let path = path.clone();
        self.cheap(move |pool| {
            let call = pool.root.call("stat", &path);
            call.check_names()?;
            if pool.abandoned.may_change(&path) {
                return Err(call.error(ErrorKind::Busy, "a call that was not answered in time may still change it"));
            }
            if path.is_root() {
                return stat_fd(pool.root.fd()).map(|stat| pool.outward(stat)).map_err(|errno| call.failed(errno));
            }
            let (dir, name) = pool.root.slot(&path).map_err(|errno| call.failed(errno))?;
            stat_name(&dir, name).map(|stat| pool.outward(stat)).map_err(|errno| call.failed(errno))
        })
        .await
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        let wanted = path.clone();
        let open = self.blocking(move |pool| {
            let call = pool.root.call("list", &wanted);
            call.check_names()?;
            OpenListing::open(&pool.root, call)
        });
        let state = (self.handle(), path.clone(), open.await?);
        let pages = stream::try_unfold(state, |(pool, path, open)| async move {
            let next = pool.next_page(path.clone(), open).await?;
            Ok(next.map(|(page, open)| (page, (pool, path, open))))
        });
        Ok(pages.boxed())
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        let (path, version) = (path.clone(), self.shared.inward(version));
        let reading = self.blocking(move |pool| {
            let call = pool.root.call("read", &path);
            call.check_names()?;
            let (data, opened) = content::read(&pool.root, &pool.files, call, &version, range)?;
            if let Some(file) = opened {
                pool.files.keep(version, file);
            }
            Ok(data)
        });
        reading.await
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        let path = path.clone();
        self.cheap(move |pool| {
            let call = pool.root.call("readlink", &path);
            call.check_names()?;
            let slot = pool.root.slot(&path);
            let (dir, name) =
                slot.map_err(|errno| call.failed(if errno == Errno::BUSY { Errno::INVAL } else { errno }))?;
            let target = readlinkat(&dir, name, Vec::new()).map_err(|errno| call.failed(errno))?;
            Ok(target.into_bytes())
        })
        .await
    }

    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        self.upload(path, size, content, attrs, expected).await
    }

    async fn write_at(&self, path: &PoolPath, offset: u64, data: Bytes) -> Result<Stat> {
        let path = path.clone();
        self.blocking(move |pool| {
            let call = pool.root.call("write", &path);
            call.check_names()?;
            let _turn = pool.turn(&path);
            content::write_at(&pool.root, &pool.writers, call, offset, &data).map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn sync_file(&self, path: &PoolPath) -> Result<()> {
        let path = path.clone();
        self.blocking(move |pool| {
            let _turn = pool.turn(&path);
            content::sync(&pool.root, &pool.writers, pool.root.call("sync", &path))
        })
        .await
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat> {
        let (path, attrs) = (path.clone(), attrs.clone());
        self.changing(vec![path.clone()], move |pool| {
            let call = pool.root.call("mkdir", &path);
            pool.check_new(call, &attrs)?;
            names::make(&pool.root, call, &pool.abilities, names::mkdir, FileKind::Directory, &attrs)
                .map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat> {
        let (path, target, attrs) = (path.clone(), target.to_vec(), attrs.clone());
        self.changing(vec![path.clone()], move |pool| {
            let call = pool.root.call("symlink", &path);
            pool.check_new(call, &attrs)?;
            pool.require(pool.abilities.public.objects.symlinks, call, "its file system has no symlinks")?;
            let make = |dir: &root::Dir<'_>, name: &[u8]| names::symlink(&target, dir, name);
            names::make(&pool.root, call, &pool.abilities, make, FileKind::Symlink, &attrs)
                .map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat> {
        let (path, attrs) = (path.clone(), attrs.clone());
        self.changing(vec![path.clone()], move |pool| {
            let call = pool.root.call("mknod", &path);
            pool.check_new(call, &attrs)?;
            // Fifos and sockets need no privilege.
            let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
            let able = pool.abilities.public.objects.special_files || !device;
            pool.require(able, call, "device files need CAP_MKNOD and a file system that has them")?;
            let make = |dir: &root::Dir<'_>, name: &[u8]| names::mknod(kind, rdev, dir, name);
            names::make(&pool.root, call, &pool.abilities, make, kind, &attrs).map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        let (existing, new) = (existing.clone(), new.clone());
        self.changing(vec![new.clone()], move |pool| {
            pool.root.call("link", &existing).check_names()?;
            let call = pool.root.call("link", &new);
            pool.require(pool.abilities.public.objects.hard_links, call, "its file system has no hard links")?;
            names::link(&pool.root, call, &existing, &pool.abilities).map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        let (path, expected) = (path.clone(), self.shared.inward_expected(expected));
        self.changing(vec![path.clone()], move |pool| {
            let call = pool.root.call("remove", &path);
            call.check_names()?;
            if let Some(removed) = names::remove(&pool.root, call, &expected)? {
                pool.forget_object(&removed.version);
            }
            Ok(())
        })
        .await
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        let path = path.clone();
        self.changing(vec![path.clone()], move |pool| {
            let call = pool.root.call("rmdir", &path);
            call.check_names()?;
            match names::remove_dir(&pool.root, call) {
                // A killed writer may have left an unfinished file, which listings do not show.
                Err(e)
                    if e.is(ErrorKind::NotEmpty) && listing::sweep_before_removal(&pool.root, call, SWEEP_AGE)? > 0 =>
                {
                    names::remove_dir(&pool.root, call)
                }
                outcome => outcome,
            }
        })
        .await
    }

    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        let (from, to) = (from.clone(), to.clone());
        self.changing(vec![from.clone(), to.clone()], move |pool| {
            let call = pool.root.call("rename", &from);
            call.check_names()?;
            pool.root.call("rename to", &to).check_names()?;
            names::rename(&pool.root, call, &to, mode, &pool.abilities).map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        let (path, changes) = (path.clone(), changes.clone());
        self.blocking(move |pool| {
            let call = pool.root.call("set attributes of", &path);
            call.check_names()?;
            let _turn = changes.size.map(|_| pool.turn(&path));
            pool.set_attrs(call, &changes).map(|stat| pool.outward(stat))
        })
        .await
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let path = path.clone();
        self.cheap(move |pool| {
            let call = pool.root.call("list extended attributes of", &path);
            pool.require_xattrs(call)?;
            pool.with_object(call, |target, _| target.xattrs())
        })
        .await
    }

    async fn set_xattr(&self, path: &PoolPath, name: &[u8], value: &[u8]) -> Result<()> {
        let (path, name, value) = (path.clone(), name.to_vec(), value.to_vec());
        self.blocking(move |pool| {
            let call = pool.root.call("set an extended attribute of", &path);
            pool.require_xattrs(call)?;
            let set =
                |target: &AttributeTarget<'_>, _: std::os::fd::BorrowedFd<'_>| match target.set_xattr(&name, &value) {
                    Ok(()) => target.sync().map(|()| None),
                    Err(errno) if ErrorKind::from_errno(errno.raw_os_error()).refuses_attribute() => Ok(Some(errno)),
                    Err(errno) => Err(errno),
                };
            match pool.with_object(call, set)? {
                Some(errno) => Err(refused(call.failed(errno), &name)),
                None => Ok(()),
            }
        })
        .await
    }

    async fn check_xattrs(&self, _kind: FileKind, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let xattrs = xattrs.to_vec();
        self.cheap(move |pool| {
            let root = PoolPath::root();
            pool.trials.check(&pool.root, pool.root.call("try on a new file in", &root), &xattrs)
        })
        .await
    }

    async fn remove_xattr(&self, path: &PoolPath, name: &[u8]) -> Result<()> {
        let (path, name) = (path.clone(), name.to_vec());
        self.blocking(move |pool| {
            let call = pool.root.call("remove an extended attribute of", &path);
            pool.require_xattrs(call)?;
            pool.with_object(call, |target, _| target.remove_xattr(&name).and_then(|()| target.sync()))
        })
        .await
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        let path = path.clone();
        self.blocking(move |pool| {
            let call = pool.root.call("sync", &path);
            call.check_names()?;
            let dir = pool.root.open_directory(&path).map_err(|errno| call.failed(errno))?;
            match fsync(&dir) {
                // The file system has nothing to sync for a directory.
                Ok(()) | Err(Errno::INVAL) => Ok(()),
                Err(errno) => Err(call.failed(errno)),
            }
        })
        .await
    }

    async fn sweep_unfinished(&self, dir: &PoolPath, writers: &[String]) -> Result<u64> {
        let (dir, writers) = (dir.clone(), writers.to_vec());
        self.blocking(move |pool| listing::sweep_of(&pool.root, pool.root.call("sweep", &dir), &writers)).await
    }

    async fn abandoned(&self, dir: &PoolPath, remove: bool) -> Result<u64> {
        let dir = dir.clone();
        self.blocking(move |pool| listing::sweep(&pool.root, pool.root.call("sweep", &dir), SWEEP_AGE, remove)).await
    }

    async fn space(&self) -> Result<Space> {
        self.blocking(|pool| {
            let root = PoolPath::root();
            let call = pool.root.call("query the space of", &root);
            let vfs = fstatvfs(pool.root.fd()).map_err(|errno| call.failed(errno))?;
            Ok(Space {
                total_bytes: vfs.f_blocks.saturating_mul(vfs.f_frsize),
                free_bytes: vfs.f_bfree.saturating_mul(vfs.f_frsize),
                available_bytes: vfs.f_bavail.saturating_mul(vfs.f_frsize),
                total_files: vfs.f_files,
                free_files: vfs.f_ffree,
            })
        })
        .await
    }
    async fn layout(&self, path: &PoolPath) -> Result<Option<Layout>> {
        if self.shared.stripes.kind.is_none() {
            return Ok(None);
        }
        let path = path.clone();
        self.blocking(move |pool| {
            let call = pool.root.call("query the layout of", &path);
            call.check_names()?;
            pool.stripes.layout(&pool.root, call)
        })
        .await
    }
}
