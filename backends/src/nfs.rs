//! An NFS version 3 export as a pool, accessed from user space: for nodes that have not mounted it.
//!
//! Names are byte strings. Calls are made by path: the handles of directories are kept only briefly (see `limits`),
//! and are looked up again if the server no longer knows them. No path goes through a symlink.
//!
//! **Durability.** Content is written without waiting for the server's disk and then committed. If a server restarts
//! in between, the content that it lost is sent again. The protocol makes names and attributes durable before the
//! server answers, so there is nothing to sync.
//!
//! **Broken connections.** Calls that can be repeated without harm are retried for some seconds. If the answer to a
//! change of names was lost, the pool looks the names up and sends only what was not done. A call without any answer
//! fails with `Timeout`, a call that finds no server with `Unavailable`.
//!
//! **Rights.** Calls use AUTH_SYS, which the server trusts: a client that can send packets from a trusted address can
//! pose as any user. Calls are made with the ids of this process. If this process is root and the server denies that,
//! as with root squash, they are made as the owner of the object, or of its directory. Some things stay impossible
//! then: objects of root, and objects accessible to a group alone, are out of reach; no object can be given to
//! another owner (`Capabilities::owners`); device files cannot be created; and an object created for a user in a
//! directory that only that user's group may write to belongs to the directory's owner.
//!
//! **Not atomic.** A version is checked right before it is replaced (`ConditionalPut::Checked`), and so is the new
//! name of a rename that must not replace. `Absent` is atomic. A file with several hard links is replaced in place; a
//! crash in the middle leaves it torn, and this protocol has no way to mark it as torn.
//!
//! **Directories that other clients move.** A handle follows its directory. If another client moves a directory away
//! and puts another one in its place, calls may still reach the first for a second (`DIRECTORY_TTL`), as with every
//! NFS client that keeps handles. A removed directory is noticed at once.
//!
//! **Servers that cache.** Versions are what the server reports. A server that caches the attributes of files, and
//! whose files change without its knowledge, reports such changes late. nfs-ganesha caches by default
//! (`Attr_Expiration_Time`).
//!
//! Times range from 1970 to 2106; a time outside becomes the nearest of these. Some servers, nfs-ganesha among them,
//! do not set the times of symlinks.

mod attributes;
mod calls;
mod connections;
mod credentials;
mod failure;
mod handles;
mod limits;
mod listing;
mod making;
mod mount;
mod names;
mod open;
mod publish;
mod reading;
mod reply;
mod session;
mod slots;
mod staging;
mod upload;
mod url;
mod wire;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use nfs3_client::nfs3_types::nfs3::FSSTAT3args;

use crate::pieces::PieceOrder;
use crate::{
    Attrs, Capabilities, ErrorKind, Expected, FileKind, Listing, Piece, Pieces, Pool, PoolPath, RenameMode, Result,
    SetAttrs, Space, Stat, Version,
};

use attributes::length_of;
use credentials::Owner;
use failure::NfsCall;
use listing::Sweep;
use making::NewObject;
use publish::Publication;
use reading::check_kind;
use session::Session;
use staging::NfsTempFile;
use upload::NfsUpload;

pub use limits::MAX_CONNECTIONS;

/// A pool on an NFS server.
pub struct NfsPool {
    session: Arc<Session>,
}

/// Checks that a URL can name a pool, without contacting a server.
///
/// # Errors
/// `InvalidInput`, with the reason.
pub fn check(url: &str) -> Result<()> {
    url::ExportLocation::parse(url).map(drop)
}

impl fmt::Debug for NfsPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NfsPool").field("url", &self.url()).finish_non_exhaustive()
    }
}

impl NfsPool {
    /// Mounts `nfs://server/export?nfsport=N&mountport=N` and probes what the server can do. The probe creates a
    /// small temporary file in a writable export. `export` may be a directory in an export. The NFS port is 2049
    /// unless the URL gives one; the mount port is the one that the server's portmapper reports, unless the URL gives
    /// one.
    ///
    /// Fails with `InvalidInput` for an invalid URL, `NotFound` or `PermissionDenied` if the server has no such
    /// export or denies it to this client, `Unavailable` or `Timeout` if it does not answer.
    pub async fn open(url: &str) -> Result<Self> {
        Ok(Self { session: Arc::new(Session::open(url).await?) })
    }

    /// The same pool, whose calls will be given up at a deadline: while the server cannot be reached, they are retried for
    /// most of that time.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        self.session.calls.outage().set_for(deadline);
        self
    }

    /// Removes the unfinished files of writers that died more than a day ago from one directory, and returns their
    /// number. The pool never calls this itself.
    pub async fn sweep(&self, path: &PoolPath) -> Result<u64> {
        self.session.sweep(path, &[], Sweep::Old).await
    }

    fn no_xattrs<T>(&self, call: NfsCall<'_>) -> Result<T> {
        self.session.check(call)?;
        Err(call.error(ErrorKind::Unsupported, "NFS version 3 has no extended attributes"))
    }

    /// Whether an object with these attributes may have this name.
    fn check_new(&self, call: NfsCall<'_>, attrs: &Attrs) -> Result<()> {
        if attrs.xattrs.is_empty() { self.session.check(call) } else { self.no_xattrs(call) }
    }

    /// Makes an object on a separate task, which continues if the caller is dropped.
    async fn make(&self, what: &'static str, path: &PoolPath, attrs: &Attrs, new: NewObject) -> Result<Stat> {
        self.check_new(NfsCall::new(what, path), attrs)?;
        let (session, names) = (Arc::clone(&self.session), vec![path.clone()]);
        let (path, attrs) = (path.clone(), attrs.clone());
        let change = async move { session.make(what, &path, &new, &attrs).await };
        self.session.changing(names, change).await
    }
}

#[async_trait]
impl Pool for NfsPool {
    fn capabilities(&self) -> &Capabilities {
        &self.session.can
    }

    fn url(&self) -> String {
        self.session.location.url()
    }

    fn retried_requests(&self) -> u64 {
        self.session.calls.retries()
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        let call = NfsCall::new("stat", path);
        self.session.check(call)?;
        if self.session.abandoned.may_change(path) {
            return Err(call.error(ErrorKind::Busy, "a call that was not answered in time may still change it"));
        }
        self.session.object(path).await.map(|found| found.stat).map_err(|failure| call.failed(failure))
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        self.session.list(path).await
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        self.session.read(path, version, range).await
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        self.session.readlink(path).await
    }

    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        mut content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let call = NfsCall::new("put", path);
        self.check_new(call, attrs)?;
        if path.is_root() {
            return Err(call.error(ErrorKind::IsDirectory, "it is the pool's root"));
        }
        if size > self.session.sizes.file_bytes {
            return Err(call.error(ErrorKind::TooLarge, "the server has no files of that size"));
        }
        let mut order = PieceOrder::new(size);
        // On a separate task: if it were cancelled half way, it would leave a file that nothing tracks.
        let creation = NfsTempFile::create(Arc::clone(&self.session), path.clone(), Owner::from(attrs));
        let mut staging = self.session.to_the_end(creation).await?;
        while let Some(piece) = content.next().await {
            let piece = piece?;
            order.check(&piece)?;
            staging.upload.push(call, piece).await.map_err(|failure| call.failed(failure))?;
        }
        let finished = staging.finish(call, size, attrs).await.map_err(|failure| call.failed(failure))?.version;
        let (path, attrs, expected) = (path.clone(), attrs.clone(), expected.clone());
        let turn = self.session.turn(&path).await;
        let (_caller, change) = self.session.abandoned.begin(vec![path.clone()]);
        let publication = Publication { path, size, attrs, expected, finished, change };
        self.session.to_the_end(publication.run(staging, turn)).await
    }

    async fn write_at(&self, path: &PoolPath, offset: u64, data: Bytes) -> Result<Stat> {
        let (session, path) = (Arc::clone(&self.session), path.clone());
        let change = async move {
            let call = NfsCall::new("write", &path);
            session.check(call)?;
            // A call that its caller has given up keeps its turn, so that it does not come after later writes.
            let _turn = session.turn(&path).await;
            let found = session.object(&path).await.map_err(|failure| call.failed(failure))?;
            check_kind(call, &found.stat)?;
            if offset.checked_add(data.len() as u64).is_none_or(|end| end > session.sizes.file_bytes) {
                return Err(call.error(ErrorKind::TooLarge, "the server has no files of that size"));
            }
            let owners = vec![Owner::from(&found.stat)];
            let mut upload = NfsUpload::new(Arc::clone(&session), found.handle.clone(), owners.clone());
            let written = async {
                upload.push(call, Piece { offset, data }).await?;
                upload.finish(call).await?;
                session.attributes(&found.handle, &owners).await
            };
            written.await.map_err(|failure| call.failed(failure))
        };
        self.session.to_the_end(change).await
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat> {
        self.make("mkdir", path, attrs, NewObject::Directory).await
    }

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat> {
        let call = NfsCall::new("symlink", path);
        if !self.session.can.objects.symlinks {
            return Err(call.error(ErrorKind::Unsupported, "the server's file system has no symlinks"));
        }
        self.make("symlink", path, attrs, NewObject::Symlink(target.to_vec())).await
    }

    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat> {
        let call = NfsCall::new("mknod", path);
        match kind {
            FileKind::Directory | FileKind::Symlink => {
                Err(call.error(ErrorKind::InvalidInput, "this kind is made by other calls"))
            }
            // Fifos and sockets need no privilege.
            FileKind::CharDevice | FileKind::BlockDevice if !self.session.can.objects.special_files => {
                Err(call.error(ErrorKind::Unsupported, "device files need root's rights on the server"))
            }
            FileKind::File => self.make("mknod", path, attrs, NewObject::File).await,
            special => self.make("mknod", path, attrs, NewObject::Special(special, rdev)).await,
        }
    }

    async fn link(&self, existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        let (session, existing, new) = (Arc::clone(&self.session), existing.clone(), new.clone());
        self.session.changing(vec![new.clone()], async move { session.link(&existing, &new).await }).await
    }

    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        let (session, path, expected) = (Arc::clone(&self.session), path.clone(), expected.clone());
        self.session.changing(vec![path.clone()], async move { session.remove(&path, &expected).await }).await
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        let (session, path) = (Arc::clone(&self.session), path.clone());
        self.session.changing(vec![path.clone()], async move { session.remove_dir(&path).await }).await
    }

    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        let (session, from, to) = (Arc::clone(&self.session), from.clone(), to.clone());
        let names = vec![from.clone(), to.clone()];
        self.session.changing(names, async move { session.rename(&from, &to, mode).await }).await
    }

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        let (session, path, changes) = (Arc::clone(&self.session), path.clone(), changes.clone());
        let change = async move {
            let _turn = match changes.size {
                Some(_) => Some(session.turn(&path).await),
                None => None,
            };
            session.set_attrs(&path, &changes).await
        };
        self.session.to_the_end(change).await
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        self.no_xattrs(NfsCall::new("list extended attributes of", path))
    }

    async fn set_xattr(&self, path: &PoolPath, _name: &[u8], _value: &[u8]) -> Result<()> {
        self.no_xattrs(NfsCall::new("set an extended attribute of", path))
    }

    async fn remove_xattr(&self, path: &PoolPath, _name: &[u8]) -> Result<()> {
        self.no_xattrs(NfsCall::new("remove an extended attribute of", path))
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        let call = NfsCall::new("sync", path);
        self.session.check(call)?;
        // The server made the names durable before it answered. Only check that the directory exists.
        self.session.directory(path).await.map(drop).map_err(|failure| call.failed(failure))
    }

    async fn sweep_unfinished(&self, dir: &PoolPath, writers: &[String]) -> Result<u64> {
        self.session.sweep(dir, writers, Sweep::Old).await
    }

    async fn abandoned(&self, dir: &PoolPath, remove: bool) -> Result<u64> {
        self.session.sweep(dir, &[], if remove { Sweep::Old } else { Sweep::CountOld }).await
    }

    async fn space(&self) -> Result<Space> {
        let root = PoolPath::root();
        let call = NfsCall::new("query the space of", &root);
        let stat = async {
            let dir = self.session.directory(&root).await?;
            self.session.calls.call(&FSSTAT3args { fsroot: dir.handle.clone() }, &[dir.owner]).await
        };
        let stat = stat.await.map_err(|failure| call.failed(failure))?;
        Ok(Space {
            total_bytes: length_of(stat.tbytes),
            free_bytes: length_of(stat.fbytes),
            available_bytes: length_of(stat.abytes),
            total_files: length_of(stat.tfiles),
            free_files: length_of(stat.ffiles),
        })
    }
}
