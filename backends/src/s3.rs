//! A bucket of an S3 server, or the part of one that begins with a prefix.
//!
//! Directories are keys that end with a slash, or are implied by keys that contain a slash. `store/keys.rs` maps
//! names to keys, `store/metadata.rs` stores attributes, `s3/attach.rs` parses the URL. S3 has neither hard links nor
//! ranged writes nor renames: links are refused, content is replaced as a whole, and a rename is a copy on the server
//! followed by a removal. A rename is recorded first, so that an interrupted one can be finished.

mod access;
mod api;
mod attach;
mod attributes;
mod parts;
mod probe;
mod rename;
mod upload;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::store::conditions::Heeded;
use crate::store::{self, Bucket, StoreCall, StoredObject, client, keys, metadata, requests};
use crate::{
    Attrs, Capabilities, ConditionalPut, Content, ErrorKind, Expected, FileKind, Listing, ListingSupport, Objects,
    Part, Pieces, Pool, PoolPath, RenameMode, Renames, Result, SentPart, SetAttrs, Space, Stat, Time, Version,
    Versions, WorkProgress,
};

pub use crate::store::{Environment, environment};
pub use attach::check;

use api::Condition;
use client::StoreRefusal;
use metadata::{Meta, Object};
use probe::TargetCondition;

/// A bucket, or the part of one that begins with a prefix.
pub struct S3Pool {
    bucket: Arc<Bucket>,
    capabilities: Capabilities,
    url: String,
}

impl S3Pool {
    /// Attaches a bucket by its URL, `s3://BUCKET[/PREFIX][?OPTION=VALUE&...]`. Probes with a scratch object which
    /// conditions the server honours, and finishes the interrupted renames of this host.
    ///
    /// # Errors
    /// `InvalidInput` for a mistake in the URL or the environment; `NotFound` and `PermissionDenied` as the server
    /// reports; `Unavailable` if it does not answer.
    pub async fn attach(url: &str, environment: &Environment) -> Result<Self> {
        let attached = attach::attach(url, environment)?;
        let url = attached.url.clone();
        let mut bucket = attached.bucket();
        let probed = probe::probe(&bucket.client, &bucket.root).await;
        let probed = probed.map_err(|refusal| refusal.into_error(format!("attach {url}")))?;
        bucket.conditional = probed.conditional;
        let capabilities = Capabilities {
            local: false,
            read_only: probed.read_only,
            objects: Objects {
                symlinks: true,
                symlink_times: true,
                hard_links: false,
                special_files: true,
                xattrs: false,
                owners: true,
                sparse: false,
            },
            renames: Renames::ByCopies,
            listings: ListingSupport::AskEach,
            listed_contents: true,
            versions: Versions { confirmed_by_reads: true, alone: true, of_directories: false, outlive_mounts: false },
            streams: true,
            ranged_write: false,
            parts_ahead: Some(upload::PART_BYTES),
            conditional_put: match probed.conditional.all() {
                true => ConditionalPut::Atomic,
                false => ConditionalPut::Checked,
            },
            layouts: false,
            time_granularity_ns: 1,
            name_max: keys::NAME_MAX as u32,
            path_max: Some((keys::KEY_MAX - 1 - bucket.root.len()) as u32),
        };
        let pool = Self { bucket: Arc::new(bucket), capabilities, url };
        if !probed.read_only {
            rename::finish(&pool.bucket).await;
        }
        Ok(pool)
    }

    /// The same pool, whose calls will be given up at a deadline: while the server cannot be reached, they are retried for
    /// most of that time.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        self.bucket.client.outage.set_for(deadline);
        self
    }

    fn change<'a>(&'a self, what: &'a str, path: &'a PoolPath) -> Result<StoreCall<'a>> {
        let op = self.op(what, path)?;
        if self.capabilities.read_only { Err(op.error(ErrorKind::ReadOnly)) } else { Ok(op) }
    }

    fn op<'a>(&'a self, what: &'a str, path: &'a PoolPath) -> Result<StoreCall<'a>> {
        StoreCall::new(&self.bucket, what, path)
    }
}

impl StoreCall<'_> {
    /// The condition for the request, as far as the server honours conditions.
    fn condition<'c>(&self, expected: &Expected, there: Option<&'c Object>, heeded: Heeded) -> Condition<'c> {
        let wanted = match (expected, there) {
            (Expected::Absent, None) => TargetCondition::Absent,
            (Expected::Version(_) | Expected::Name(_), Some(object)) => TargetCondition::Same(object),
            // Any object may be replaced, but not what another client makes of it after this look.
            _ => return Condition::Seen(there),
        };
        wanted.heeded(heeded)
    }

    /// Fails with `Conflict` if the object found is not as expected. A directory never is.
    fn check(&self, expected: &Expected, found: &StoredObject) -> Result<()> {
        let as_expected = match (expected, found) {
            (Expected::Anything, _) | (Expected::Absent, StoredObject::Nothing) => true,
            (Expected::Version(version) | Expected::Name(version), StoredObject::Object(object)) => {
                object.stat(false, &self.bucket.defaults).version.same_content(version)
            }
            _ => false,
        };
        if as_expected { Ok(()) } else { Err(self.error(ErrorKind::Conflict)) }
    }

    /// The result of `stat` for an object that was just written; only the server knows the time.
    async fn made(&self, key: &str, written: Object, directory: bool) -> Result<Stat> {
        let found = self.bucket.client.head(key).await.map_err(|refusal| self.refused(refusal))?;
        let object = found.filter(|found| found.meta.write == written.meta.write).unwrap_or(written);
        Ok(object.stat(directory, &self.bucket.defaults))
    }

    /// Makes an object at a free key.
    async fn make(&self, key: &str, kind: FileKind, body: Bytes, meta: Meta) -> Result<Stat> {
        if self.path.is_root() || self.place.shadowed {
            return Err(self.error(ErrorKind::Exists));
        }
        self.parent().await?;
        let there = self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))?;
        if !matches!(there, StoredObject::Nothing) {
            return Err(self.error(ErrorKind::Exists));
        }
        let size = body.len() as u64;
        let condition = self.condition(&Expected::Absent, None, self.bucket.conditional.put);
        let etag = self.bucket.client.put(key, body, &meta, condition).await.map_err(|refusal| {
            match refusal.is(ErrorKind::Conflict) {
                true => self.error(ErrorKind::Exists),
                false => self.refused(refusal),
            }
        })?;
        let directory = kind == FileKind::Directory;
        if directory {
            self.bucket.saw_directory(&self.place);
        }
        self.made(key, Object::written_now(etag, size, meta), directory).await
    }
}

impl Bucket {
    /// Keeps the directory of a key alive when the key is removed, whether it is the directory's only key or not.
    async fn keep_directory_of(&self, key: &str) -> Result<(), StoreRefusal> {
        let Some(directory) = key.trim_end_matches('/').rfind('/').map(|at| &key[..=at]) else { return Ok(()) };
        if directory.len() <= self.root.len() {
            return Ok(());
        }
        let first = self.client.list(directory, false, None, 1).await?.objects;
        if first.is_empty() || first[0].key == directory {
            return Ok(());
        }
        let attrs = Attrs {
            mode: self.defaults.dir_mode,
            uid: self.defaults.uid,
            gid: self.defaults.gid,
            atime: Time::now(),
            mtime: Time::now(),
            xattrs: Vec::new(),
        };
        let meta = directory_meta(&attrs);
        let condition = TargetCondition::Absent.heeded(self.conditional.put);
        match self.client.put(directory, Bytes::new(), &meta, condition).await {
            // Another client was faster.
            Err(refusal) if refusal.is(ErrorKind::Conflict) => Ok(()),
            other => other.map(drop),
        }
    }
}

/// The metadata of the object that stands for a directory.
fn directory_meta(attrs: &Attrs) -> Meta {
    let mut meta = Meta::new(FileKind::Directory, 0, attrs, Time::now());
    let kind = http::HeaderValue::from_static("application/x-directory");
    meta.others.insert(http::header::CONTENT_TYPE, kind);
    meta
}

impl fmt::Debug for S3Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Pool").field("url", &self.url).finish_non_exhaustive()
    }
}

#[async_trait]
impl Pool for S3Pool {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn retried_requests(&self) -> u64 {
        self.bucket.client.retried.load(Ordering::Relaxed)
    }

    fn under_way(&self) -> Vec<WorkProgress> {
        self.bucket.moves.under_way()
    }

    fn check_path(&self, path: &PoolPath) -> Result<()> {
        let op = self.op("make", path)?;
        if op.place.shadowed {
            // The name stands for an object beside a directory of the same name. No new object can have it.
            return Err(op.error(ErrorKind::InvalidInput));
        }
        // Many servers store keys as files, whose names are limited.
        match op.place.key.split('/').any(|part| part.len() > keys::NAME_MAX) {
            true => Err(op.error(ErrorKind::NameTooLong)),
            false => Ok(()),
        }
    }

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        self.op("stat", path)?.look().await
    }

    async fn still_has(&self, path: &PoolPath, version: &Version) -> Result<bool> {
        self.op("stat", path)?.still_is(version).await
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        self.op("list", path)?.entries(0).await
    }

    async fn list_with_contents(&self, path: &PoolPath, bytes: u64) -> Result<Listing> {
        self.op("list", path)?.entries(bytes).await
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        self.op("read", path)?.read(version, range).await
    }

    async fn stream(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Content> {
        self.op("read", path)?.stream(version, range).await
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        self.op("readlink", path)?.target().await
    }

    async fn put(
        &self,
        path: &PoolPath,
        size: u64,
        content: Pieces<'_>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let op = self.change("put", path)?;
        if !attrs.xattrs.is_empty() {
            return Err(op.error(ErrorKind::Unsupported));
        }
        op.put(vec![Part::Here { len: size, content }], attrs, expected).await
    }

    async fn send_part(&self, name: &str, len: u64, content: Pieces<'_>) -> Result<SentPart> {
        self.change("send a part to", &PoolPath::root())?;
        self.bucket.send_part(name, len, content).await
    }

    async fn read_part(&self, part: &SentPart, range: Range<u64>) -> Result<Bytes> {
        self.bucket.read_part(part, range).await
    }

    async fn remove_part(&self, name: &str) -> Result<()> {
        self.change("remove a part from", &PoolPath::root())?;
        self.bucket.remove_part(name).await
    }

    async fn put_parts(
        &self,
        path: &PoolPath,
        parts: Vec<Part<'_>>,
        attrs: &Attrs,
        expected: &Expected,
    ) -> Result<Stat> {
        let op = self.change("put", path)?;
        if !attrs.xattrs.is_empty() {
            return Err(op.error(ErrorKind::Unsupported));
        }
        op.put(parts, attrs, expected).await
    }

    async fn write_at(&self, path: &PoolPath, _offset: u64, _data: Bytes) -> Result<Stat> {
        Err(self.change("write", path)?.error(ErrorKind::Unsupported))
    }

    async fn mkdir(&self, path: &PoolPath, attrs: &Attrs) -> Result<Stat> {
        let op = self.change("mkdir", path)?;
        if !attrs.xattrs.is_empty() {
            return Err(op.error(ErrorKind::Unsupported));
        }
        op.make(&op.place.directory(), FileKind::Directory, Bytes::new(), directory_meta(attrs)).await
    }

    async fn symlink(&self, path: &PoolPath, target: &[u8], attrs: &Attrs) -> Result<Stat> {
        let op = self.change("symlink", path)?;
        if target.is_empty() {
            return Err(op.error(ErrorKind::NotFound));
        }
        if target.len() as u64 > metadata::TARGET_BYTES_MAX {
            return Err(op.error(ErrorKind::NameTooLong));
        }
        let attrs = Attrs { mode: 0o777, ..attrs.clone() };
        let meta = Meta::new(FileKind::Symlink, 0, &attrs, Time::now());
        op.make(&op.place.key, FileKind::Symlink, Bytes::copy_from_slice(target), meta).await
    }

    async fn mknod(&self, path: &PoolPath, kind: FileKind, rdev: u64, attrs: &Attrs) -> Result<Stat> {
        let op = self.change("mknod", path)?;
        let rdev = match kind {
            FileKind::File | FileKind::Fifo | FileKind::Socket => 0,
            FileKind::CharDevice | FileKind::BlockDevice => rdev,
            FileKind::Directory | FileKind::Symlink => return Err(op.error(ErrorKind::InvalidInput)),
        };
        if !attrs.xattrs.is_empty() {
            return Err(op.error(ErrorKind::Unsupported));
        }
        op.make(&op.place.key, kind, Bytes::new(), Meta::new(kind, rdev, attrs, Time::now())).await
    }

    async fn link(&self, _existing: &PoolPath, new: &PoolPath) -> Result<Stat> {
        Err(self.change("link", new)?.error(ErrorKind::Unsupported))
    }

    async fn remove(&self, path: &PoolPath, expected: &Expected) -> Result<()> {
        let op = self.change("remove", path)?;
        if path.is_root() {
            return Err(op.error(ErrorKind::IsDirectory));
        }
        let refused = |refusal| op.refused(refusal);
        // Before the look at the object to be removed, to keep the time between that look and the removal short.
        self.bucket.keep_directory_of(&op.place.key).await.map_err(refused)?;
        let found = match op.find().await {
            Err(error) if error.is(ErrorKind::NotFound) && *expected == Expected::Absent => return Ok(()),
            answer => answer?,
        };
        let StoredObject::Object(object) = &found else { return Err(op.error(ErrorKind::IsDirectory)) };
        op.check(expected, &found)?;
        let condition = op.condition(expected, Some(object), self.bucket.conditional.delete);
        self.bucket.client.delete(&op.place.key, condition).await.map_err(refused)
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        let op = self.change("rmdir", path)?;
        if path.is_root() {
            return Err(op.error(ErrorKind::Busy));
        }
        let StoredObject::Directory(marker) = op.find().await? else { return Err(op.error(ErrorKind::NotDirectory)) };
        let (directory, refused) = (op.place.directory(), |refusal| op.refused(refusal));
        let below = self.bucket.client.list(&directory, false, None, 2).await.map_err(refused)?.objects;
        if below.iter().any(|listed| listed.key != directory || listed.size > 0) {
            return Err(op.error(ErrorKind::NotEmpty));
        }
        self.bucket.keep_directory_of(&directory).await.map_err(refused)?;
        self.bucket.forget_directory(&directory);
        self.bucket.client.delete(&directory, Condition::Seen(marker.as_ref())).await.map_err(refused)
    }

    async fn rename(&self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Result<Stat> {
        let what = format!("rename {from} to");
        let (target, source) = (self.change(&what, to)?, self.change("rename", from)?);
        if mode == RenameMode::Exchange {
            return Err(target.error(ErrorKind::Unsupported));
        }
        rename::rename(&source, &target, mode).await
    }

    async fn set_attrs(&self, path: &PoolPath, changes: &SetAttrs) -> Result<Stat> {
        self.change("set attributes of", path)?.set_attrs(changes).await
    }

    async fn xattrs(&self, path: &PoolPath) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        Err(self.op("list extended attributes of", path)?.error(ErrorKind::Unsupported))
    }

    async fn set_xattr(&self, path: &PoolPath, _name: &[u8], _value: &[u8]) -> Result<()> {
        Err(self.change("set an extended attribute of", path)?.error(ErrorKind::Unsupported))
    }

    async fn remove_xattr(&self, path: &PoolPath, _name: &[u8]) -> Result<()> {
        Err(self.change("remove an extended attribute of", path)?.error(ErrorKind::Unsupported))
    }

    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        self.op("sync", path)?.sync().await
    }

    async fn space(&self) -> Result<Space> {
        Ok(store::space())
    }
}
