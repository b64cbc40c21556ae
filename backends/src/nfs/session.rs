//! The state that all calls of one pool share: the server, the root, the handles, the limits; and the lookup of a
//! path's handle.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use nfs3_client::nfs3_types::nfs3::{
    GETATTR3args, LOOKUP3args, Nfs3Option, SETATTR3args, diropargs3, fattr3, nfs_fh3, nfsstat3,
};
use parking_lot::Mutex;
use tokio::sync::{OwnedMutexGuard, Semaphore};

use crate::abandoned::AbandonedChanges;
use crate::{Capabilities, Error, ErrorKind, FileKind, Identity, PoolPath, Result, Side, Stat};

use super::attributes::{AttributeChange, FoundObject, option, stat_of};
use super::calls::RpcClient;
use super::credentials::Owner;
use super::failure::{NfsCall, NfsFailure, Outcome};
use super::handles::{Directory, Handles};
use super::limits::{MAX_CHANGES, PUBLISH_LOCKS};
use super::url::ExportLocation;

pub(super) struct Session {
    pub(super) calls: RpcClient,
    pub(super) handles: Handles,
    pub(super) location: ExportLocation,
    pub(super) sizes: Sizes,
    pub(super) can: Capabilities,
    /// The pool's root directory.
    root: Mutex<Arc<Directory>>,
    /// The number of the file system that contains the root.
    root_fsid: u64,
    publishing: [Arc<tokio::sync::Mutex<()>>; PUBLISH_LOCKS],
    changes: Arc<Semaphore>,
    pub(super) abandoned: Arc<AbandonedChanges>,
}

/// The most bytes of one READ and WRITE, and the largest file, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) read_bytes: u32,
    pub(super) write_bytes: u32,
    pub(super) file_bytes: u64,
}

/// A name in a directory.
#[derive(Debug, Clone)]
pub(super) struct DirectoryName {
    pub(super) dir: Arc<Directory>,
    pub(super) name: Vec<u8>,
}

impl DirectoryName {
    pub(super) fn args(&self) -> diropargs3<'_> {
        diropargs3 { dir: self.dir.handle.clone(), name: self.name[..].into() }
    }
}

/// Fails with `NOENT` if the object found is not the one that the path must name: the required object is gone. The
/// operations that follow use the handle of the checked object.
fn check_identity(path: &PoolPath, found: Option<Identity>) -> Outcome<()> {
    match (path.object(), found) {
        (Some(meant), Some(found)) if !found.is_same(meant) => Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOENT)),
        _ => Ok(()),
    }
}

/// A directory, and whether its handle came from the cache.
struct Reached {
    dir: Arc<Directory>,
    cached: bool,
}

impl Session {
    pub(super) fn new(
        calls: RpcClient,
        location: ExportLocation,
        (root, root_fsid): (Directory, u64),
        sizes: Sizes,
        can: Capabilities,
    ) -> Self {
        Self {
            calls,
            handles: Handles::new(),
            location,
            sizes,
            can,
            root: Mutex::new(Arc::new(root)),
            root_fsid,
            publishing: std::array::from_fn(|_| Arc::default()),
            changes: Arc::new(Semaphore::new(MAX_CHANGES)),
            abandoned: Arc::default(),
        }
    }

    pub(super) fn check(&self, call: NfsCall<'_>) -> Result<()> {
        call.check_names(self.can.name_max)
    }

    /// A valid answer that no server should give to this call.
    pub(super) fn wrong(&self, call: NfsCall<'_>, why: &str) -> NfsFailure {
        call.refused(ErrorKind::Os(libc::EIO), &format!("{}: {why}", self.location.url()))
    }

    pub(super) fn stat_of(&self, raw: &fattr3) -> Stat {
        stat_of(raw, self.root_fsid)
    }

    /// Runs a change to its end, even if the caller is dropped: otherwise half of it would be left.
    pub(super) async fn to_the_end<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let stopped = |why| Error::new(ErrorKind::Unavailable, Side::Pool, format!("{}: {why}", self.location.url()));
        let permit = Arc::clone(&self.changes).acquire_owned().await.map_err(|_| stopped("the pool is closed"))?;
        let task = async move {
            let answer = change.await;
            drop(permit);
            answer
        };
        let task = tokio::spawn(task.boxed());
        task.await.map_err(|failure| stopped("its task ended").with_source(failure))?
    }

    /// Like [`Self::to_the_end`], for a change of these names. If the caller is dropped, the names are not looked at until
    /// the change has ended.
    pub(super) async fn changing<T: Send + 'static>(
        &self,
        names: Vec<PoolPath>,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (_caller, work) = self.abandoned.begin(names);
        let change = async move {
            let answer = change.await;
            // Before the caller has the answer.
            drop(work);
            answer
        };
        self.to_the_end(change).await
    }

    /// Takes the lock of the writers of `path` in this process.
    pub(super) async fn turn(&self, path: &PoolPath) -> OwnedMutexGuard<()> {
        let mut hasher = DefaultHasher::new();
        path.hash(&mut hasher);
        let turn = &self.publishing[hasher.finish() as usize % PUBLISH_LOCKS];
        Arc::clone(turn).lock_owned().await
    }

    fn root(&self) -> Arc<Directory> {
        Arc::clone(&self.root.lock())
    }

    /// The directory at `path`, looked up name by name from the nearest known one. `NOTDIR` if a name on the way is
    /// not a directory; a symlink is not one.
    async fn reach(&self, path: &PoolPath) -> Outcome<Reached> {
        let forgettings = self.handles.forgettings();
        let mut known = path.clone();
        let mut found = None;
        while let (None, Some(parent)) = (&found, known.parent()) {
            found = self.handles.directory(&known);
            if found.is_none() {
                known = parent;
            }
        }
        let cached = found.is_some();
        let mut dir = found.unwrap_or_else(|| self.root());
        for name in path.components().skip(known.components().count()) {
            let object = self.look(&DirectoryName { dir, name: name.to_vec() }).await?;
            if object.stat.kind != FileKind::Directory {
                return Err(NfsFailure::Status(nfsstat3::NFS3ERR_NOTDIR));
            }
            known = known.join(name);
            dir = Arc::new(Directory::new(object.handle, &object.stat));
            self.handles.keep_directory(known.clone(), Arc::clone(&dir), forgettings);
        }
        Ok(Reached { dir, cached })
    }

    /// Works in the directory at `path`. If its cached handle is outdated, works once more in the directory that is
    /// at the path now.
    pub(super) async fn in_directory<'s, T>(
        &'s self,
        path: &PoolPath,
        work: impl Fn(Arc<Directory>) -> BoxFuture<'s, Outcome<T>> + Send + Sync,
    ) -> Outcome<T> {
        let (reached, answer) = self.attempt(path, &work).await;
        let Err(failure) = answer else { return answer };
        if failure.is_stale() {
            self.handles.forget_way(path);
            self.check_root().await?;
            return self.attempt(path, &work).await.1;
        }
        // A name that is missing in the cached directory may exist in the directory that is at this path now.
        let missing = failure.is(nfsstat3::NFS3ERR_NOENT) || failure.is(nfsstat3::NFS3ERR_NOTDIR);
        if missing && reached.as_ref().is_none_or(|reached| reached.cached) && !path.is_root() {
            self.handles.forget_way(path);
            let again = self.reach(path).await?;
            if reached.is_none_or(|reached| reached.dir.handle != again.dir.handle) {
                check_identity(path, again.dir.identity)?;
                return work(again.dir).await;
            }
        }
        Err(failure)
    }

    async fn attempt<'s, T>(
        &'s self,
        path: &PoolPath,
        work: &(impl Fn(Arc<Directory>) -> BoxFuture<'s, Outcome<T>> + Send + Sync),
    ) -> (Option<Reached>, Outcome<T>) {
        match self.reach(path).await {
            Ok(reached) => {
                let answer = match check_identity(path, reached.dir.identity) {
                    Ok(()) => work(Arc::clone(&reached.dir)).await,
                    Err(failure) => Err(failure),
                };
                (Some(reached), answer)
            }
            Err(failure) => (None, Err(failure)),
        }
    }

    /// Like [`Self::in_directory`], with the last name of `path`; `path` is not the root.
    pub(super) async fn in_slot<'s, T>(
        &'s self,
        path: &PoolPath,
        work: impl Fn(DirectoryName) -> BoxFuture<'s, Outcome<T>> + Send + Sync,
    ) -> Outcome<T> {
        let (Some(parent), Some(name)) = (path.parent(), path.name()) else {
            return Err(NfsFailure::Status(nfsstat3::NFS3ERR_INVAL));
        };
        self.in_directory(&parent, |dir| work(DirectoryName { dir, name: name.to_vec() })).await
    }

    /// The object at `path`; a symlink is not followed.
    pub(super) async fn object(&self, path: &PoolPath) -> Outcome<FoundObject> {
        if !path.is_root() {
            let found = self.in_slot(path, |slot| Box::pin(async move { self.look(&slot).await })).await?;
            check_identity(path, found.stat.version.identity())?;
            return Ok(found);
        }
        let found = |dir: Arc<Directory>| {
            Box::pin(async move {
                let stat = self.attributes(&dir.handle, &[dir.owner]).await?;
                let handle = dir.handle.clone();
                if dir.owner != Owner::from(&stat) {
                    *self.root.lock() = Arc::new(Directory::new(handle.clone(), &stat));
                }
                Ok(FoundObject { handle, stat })
            }) as BoxFuture<'_, _>
        };
        self.in_directory(path, found).await
    }

    /// The directory at `path`.
    pub(super) async fn directory(&self, path: &PoolPath) -> Outcome<Arc<Directory>> {
        // Requests its attributes, because the handle may come from the cache.
        let checked = |dir: Arc<Directory>| {
            Box::pin(async move {
                self.attributes(&dir.handle, &[dir.owner]).await?;
                Ok(dir)
            }) as BoxFuture<'_, _>
        };
        self.in_directory(path, checked).await
    }

    pub(super) async fn look(&self, slot: &DirectoryName) -> Outcome<FoundObject> {
        let found = self.calls.call(&LOOKUP3args { what: slot.args() }, &[slot.dir.owner]).await?;
        let stat = match option(found.obj_attributes) {
            Some(raw) => self.stat_of(&raw),
            None => self.attributes(&found.object, &[slot.dir.owner]).await?,
        };
        Ok(FoundObject { handle: found.object, stat })
    }

    pub(super) async fn attributes(&self, object: &nfs_fh3, owners: &[Owner]) -> Outcome<Stat> {
        let found = self.calls.call(&GETATTR3args { object: object.clone() }, owners).await?;
        Ok(self.stat_of(&found.obj_attributes))
    }

    /// Sets the attributes of an object, in a second step those that the first step did not set: a server may drop
    /// set-id bits when the owner changes, or change the times when the size does.
    pub(super) async fn settle(
        &self,
        object: &nfs_fh3,
        owners: &[Owner],
        wanted: &AttributeChange,
        now: Option<Stat>,
    ) -> Outcome<Stat> {
        let mut missing = now.as_ref().map_or_else(|| wanted.clone(), |now| wanted.missing_in(now));
        let mut stat = now;
        for _ in 0..2 {
            if missing.is_nothing() {
                break;
            }
            let after = self.change(object, owners, &missing).await?;
            missing = wanted.missing_in(&after);
            stat = Some(after);
        }
        match stat {
            Some(stat) => Ok(stat),
            None => self.attributes(object, owners).await,
        }
    }

    async fn change(&self, object: &nfs_fh3, owners: &[Owner], wanted: &AttributeChange) -> Outcome<Stat> {
        let args = SETATTR3args { object: object.clone(), new_attributes: wanted.raw(), guard: Nfs3Option::None };
        let changed = self.calls.call(&args, owners).await?;
        match option(changed.obj_wcc.after) {
            Some(raw) => Ok(self.stat_of(&raw)),
            None => self.attributes(object, owners).await,
        }
    }

    /// Distinguishes a lost pool from a lost directory. A directory that replaced the root is not the pool: it must
    /// be opened as a new pool.
    async fn check_root(&self) -> Outcome<()> {
        let root = self.root();
        match self.attributes(&root.handle, &[root.owner]).await {
            Err(failure) if failure.is_stale() => {
                let why = format!(
                    "{}: its root was removed, or is exported in another way; open it anew",
                    self.location.url()
                );
                Err(NfsFailure::Told(Error::new(ErrorKind::Unavailable, Side::Pool, why)))
            }
            answer => answer.map(drop),
        }
    }
}
