//! A bucket of an S3 server, or the part of one that begins with a prefix.
//!
//! Directories are keys that end with a slash, or what keys with a slash in them imply; which names stand for which
//! keys is in `s3/keys.rs`, where attributes are kept in `s3/metadata.rs`, what a URL may say in `s3/attach.rs`.
//! S3 has neither hard links nor ranged writes nor renames: links are refused, content is replaced as a whole, and a
//! rename is a copy on the server and a removal, written down first so that one that was cut off is finished.

mod api;
mod attach;
mod attributes;
mod client;
mod keys;
mod listing;
mod metadata;
mod probe;
mod reading;
mod rename;
mod upload;

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use lru::LruCache;
use parking_lot::Mutex;

use crate::{
    Attrs, Capabilities, ConditionalPut, Content, Error, ErrorKind, Expected, FileKind, Listing, Pieces, Pool,
    PoolPath, RenameMode, Result, SetAttrs, Side, Space, Stat, Time, Version,
};

pub use attach::{Environment, check, environment};

use api::Condition;
use client::{Client, Refusal};
use keys::Place;
use listing::Remembered;
use metadata::{Defaults, Meta, Object, implied_directory};
use probe::{Conditional, Heeded, Wanted};

/// Directories that are known to be there.
const KNOWN_DIRECTORIES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4_095);
/// How long one counts as there after it was seen.
const KNOWN_FOR: Duration = Duration::from_secs(5);
/// What a store without a size says: 1 PiB.
const SPACE_BYTES: u64 = 1 << 50;

/// A bucket, or what begins with a prefix in it.
pub struct S3Pool {
    bucket: Arc<Bucket>,
    capabilities: Capabilities,
    url: String,
}

/// What the parts of the pool share.
struct Bucket {
    client: Arc<Client>,
    /// What all keys begin with: empty, or with a slash at its end.
    root: String,
    defaults: Defaults,
    conditional: Conditional,
    directories: Mutex<LruCache<String, Instant>>,
    remembered: Remembered,
}

/// What is at a place.
enum Found {
    Nothing,
    /// Anything but a directory.
    Object(Object),
    /// With the object that stands for it, if there is one.
    Directory(Option<Object>),
}

impl S3Pool {
    /// Attaches a bucket by its URL, `s3://BUCKET[/PREFIX][?OPTION=VALUE&...]`; finds out which conditions the server
    /// heeds, by a scratch object; finishes the renames of this host that were cut off.
    ///
    /// # Errors
    /// `InvalidInput` for what is wrong in the URL or the environment; `NotFound` and `PermissionDenied` as the server
    /// says; `Unavailable` where it does not answer.
    pub async fn attach(url: &str, environment: &Environment) -> Result<Self> {
        let attached = attach::attach(url, environment)?;
        let what = || format!("attach {}", attached.url);
        let probed = probe::probe(&attached.client, &attached.root).await.map_err(|error| error.into_error(what()))?;
        let bucket = Bucket {
            client: attached.client,
            root: attached.root,
            defaults: attached.defaults,
            conditional: probed.conditional,
            directories: Mutex::new(LruCache::new(KNOWN_DIRECTORIES)),
            remembered: Remembered::new(),
        };
        let capabilities = Capabilities {
            local: false,
            symlinks: true,
            symlink_times: true,
            hard_links: false,
            special_files: true,
            xattrs: false,
            owners: true,
            rename: true,
            rename_exchange: false,
            renames_copy: true,
            streams: true,
            listed_contents: true,
            ranged_write: false,
            sparse: false,
            directory_versions: false,
            layouts: false,
            conditional_put: match probed.conditional.all() {
                true => ConditionalPut::Atomic,
                false => ConditionalPut::Checked,
            },
            time_granularity_ns: 1,
            name_max: keys::NAME_MAX as u32,
            read_only: probed.read_only,
        };
        let pool = Self { bucket: Arc::new(bucket), capabilities, url: attached.url };
        if !probed.read_only {
            rename::finish(&pool.bucket).await;
        }
        Ok(pool)
    }

    /// Requests that were sent again because the server or the way there failed.
    pub fn retried_requests(&self) -> u64 {
        self.bucket.client.retried.load(Ordering::Relaxed)
    }

    fn change<'a>(&'a self, what: &'a str, path: &'a PoolPath) -> Result<Op<'a>> {
        let op = self.op(what, path)?;
        if self.capabilities.read_only { Err(op.error(ErrorKind::ReadOnly)) } else { Ok(op) }
    }

    fn op<'a>(&'a self, what: &'a str, path: &'a PoolPath) -> Result<Op<'a>> {
        let error = |kind| Error::new(kind, Side::Pool, format!("{what} {path} in {}", self.bucket.name()));
        let place = keys::place_of(&self.bucket.root, path).map_err(error)?;
        Ok(Op { bucket: &self.bucket, what, path, place })
    }
}

/// One call of the pool: what it is about, and how its errors are told.
struct Op<'a> {
    bucket: &'a Arc<Bucket>,
    what: &'a str,
    path: &'a PoolPath,
    place: Place,
}

impl Op<'_> {
    fn error(&self, kind: ErrorKind) -> Error {
        Error::new(kind, Side::Pool, self.context())
    }

    fn context(&self) -> String {
        format!("{} {} in {}", self.what, self.path, self.bucket.name())
    }

    fn refused(&self, refusal: Refusal) -> Error {
        refusal.into_error(self.context())
    }

    /// What is there; an error where there is nothing.
    async fn find(&self) -> Result<Found> {
        match self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))? {
            Found::Nothing => Err(self.missing().await),
            found => Ok(found),
        }
    }

    /// Why there is nothing.
    async fn missing(&self) -> Error {
        match self.parent().await {
            Err(error) => error,
            Ok(()) => self.error(ErrorKind::NotFound),
        }
    }

    /// `NotFound` or `NotDirectory` where the directory that is to hold it is none.
    async fn parent(&self) -> Result<()> {
        let Some(parent) = self.path.parent() else { return Ok(()) };
        let mut absent = Vec::new();
        for path in std::iter::successors(Some(parent), PoolPath::parent) {
            let place = keys::place_of(&self.bucket.root, &path).map_err(|kind| self.error(kind))?;
            match self.bucket.is_directory(&place).await.map_err(|refusal| self.refused(refusal))? {
                Some(true) => break,
                Some(false) => return Err(self.error(ErrorKind::NotDirectory)),
                None => absent.push(path),
            }
        }
        if absent.is_empty() { Ok(()) } else { Err(self.error(ErrorKind::NotFound)) }
    }

    fn stat(&self, found: &Found) -> Option<Stat> {
        let defaults = &self.bucket.defaults;
        match found {
            Found::Nothing => None,
            Found::Object(object) => Some(object.stat(false, defaults)),
            Found::Directory(Some(marker)) => Some(marker.stat(true, defaults)),
            Found::Directory(None) => Some(implied_directory(defaults)),
        }
    }

    /// A condition where the server heeds it.
    fn condition<'c>(&self, expected: &Expected, there: Option<&'c Object>, heeded: Heeded) -> Condition<'c> {
        let wanted = match (expected, there) {
            (Expected::Absent, None) => Wanted::Absent,
            (Expected::Version(_) | Expected::Name(_), Some(object)) => Wanted::Same(object),
            // Whatever is there: but what somebody else makes of it afterwards is theirs.
            _ => return Condition::Seen(there),
        };
        wanted.heeded(heeded)
    }

    /// `Conflict` where what is there is not as expected. Directories are never.
    fn check(&self, expected: &Expected, found: &Found) -> Result<()> {
        let as_expected = match (expected, found) {
            (Expected::Anything, _) | (Expected::Absent, Found::Nothing) => true,
            (Expected::Version(version) | Expected::Name(version), Found::Object(object)) => {
                object.stat(false, &self.bucket.defaults).version.same_content(version)
            }
            _ => false,
        };
        if as_expected { Ok(()) } else { Err(self.error(ErrorKind::Conflict)) }
    }

    /// What `stat` says of an object that was just written: only the server knows when.
    async fn made(&self, key: &str, written: Object, directory: bool) -> Result<Stat> {
        let found = self.bucket.client.head(key).await.map_err(|refusal| self.refused(refusal))?;
        let object = found.filter(|found| found.meta.write == written.meta.write).unwrap_or(written);
        Ok(object.stat(directory, &self.bucket.defaults))
    }

    /// Makes an object where there is nothing.
    async fn make(&self, key: &str, kind: FileKind, body: Bytes, meta: Meta) -> Result<Stat> {
        if self.path.is_root() || self.place.shadowed {
            return Err(self.error(ErrorKind::Exists));
        }
        self.parent().await?;
        let there = self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))?;
        if !matches!(there, Found::Nothing) {
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
    fn name(&self) -> String {
        format!("s3://{}/{}", self.client.bucket, self.root)
    }

    async fn find(&self, place: &Place) -> Result<Found, Refusal> {
        let directory = place.directory();
        if place.is_root {
            return Ok(Found::Directory(self.client.head(&place.marker()).await?));
        }
        let (object, below) =
            tokio::try_join!(self.client.head(&place.key), self.client.list(&directory, false, None, 1))?;
        // The object that stands for a directory is a file only where it has content.
        let object = object.filter(|object| !place.key.ends_with('/') || object.size > 0);
        let is_directory = !below.objects.is_empty();
        Ok(match (is_directory, place.shadowed, object) {
            (true, true, Some(object)) | (false, false, Some(object)) => Found::Object(object),
            (true, false, _) => {
                let marked = below.objects.first().is_some_and(|first| first.key == directory);
                self.saw_directory(place);
                Found::Directory(if marked { self.client.head(&directory).await? } else { None })
            }
            _ => Found::Nothing,
        })
    }

    /// `None` where there is nothing.
    async fn is_directory(&self, place: &Place) -> Result<Option<bool>, Refusal> {
        let directory = place.directory();
        if place.is_root {
            return Ok(Some(true));
        }
        if self.directories.lock().get(&directory).is_some_and(|seen| seen.elapsed() < KNOWN_FOR) {
            return Ok(Some(true));
        }
        Ok(match self.find(place).await? {
            Found::Nothing => None,
            Found::Object(_) => Some(false),
            Found::Directory(_) => Some(true),
        })
    }

    fn saw_directory(&self, place: &Place) {
        self.directories.lock().put(place.directory(), Instant::now());
    }

    fn forget_directory(&self, directory: &str) {
        let mut known = self.directories.lock();
        let below: Vec<String> =
            known.iter().map(|(key, _)| key).filter(|key| key.starts_with(directory)).cloned().collect();
        for key in below {
            known.pop(&key);
        }
    }

    /// The directory that holds a key stays when the key goes, as its only one or not.
    async fn keep_directory_of(&self, key: &str) -> Result<(), Refusal> {
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
        let condition = Wanted::Absent.heeded(self.conditional.put);
        match self.client.put(directory, Bytes::new(), &meta, condition).await {
            // Another one was faster.
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

    async fn stat(&self, path: &PoolPath) -> Result<Stat> {
        let op = self.op("stat", path)?;
        let found = op.find().await?;
        op.stat(&found).ok_or_else(|| op.error(ErrorKind::NotFound))
    }

    async fn list(&self, path: &PoolPath) -> Result<Listing> {
        self.list_with_contents(path, 0).await
    }

    async fn list_with_contents(&self, path: &PoolPath, bytes: u64) -> Result<Listing> {
        let op = self.op("list", path)?;
        match op.find().await? {
            Found::Directory(_) => {
                Ok(listing::list(Arc::clone(&self.bucket), op.place.directory(), bytes, op.context()))
            }
            _ => Err(op.error(ErrorKind::NotDirectory)),
        }
    }

    async fn read(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Bytes> {
        self.op("read", path)?.read(version, range).await
    }

    async fn stream(&self, path: &PoolPath, version: &Version, range: Range<u64>) -> Result<Content> {
        self.op("read", path)?.stream(version, range).await
    }

    async fn readlink(&self, path: &PoolPath) -> Result<Vec<u8>> {
        let op = self.op("readlink", path)?;
        match op.find().await? {
            Found::Object(object) if object.stat(false, &self.bucket.defaults).kind == FileKind::Symlink => {
                op.content(&object).await.map(Vec::from)
            }
            _ => Err(op.error(ErrorKind::InvalidInput)),
        }
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
        op.put(size, content, attrs, expected).await
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
        // Before the look at what is to go: the less time between that and the removal, the better.
        self.bucket.keep_directory_of(&op.place.key).await.map_err(refused)?;
        let found = match op.find().await {
            Err(error) if error.is(ErrorKind::NotFound) && *expected == Expected::Absent => return Ok(()),
            answer => answer?,
        };
        let Found::Object(object) = &found else { return Err(op.error(ErrorKind::IsDirectory)) };
        op.check(expected, &found)?;
        self.bucket.client.delete(&op.place.key, Some(object)).await.map_err(refused)
    }

    async fn remove_dir(&self, path: &PoolPath) -> Result<()> {
        let op = self.change("rmdir", path)?;
        if path.is_root() {
            return Err(op.error(ErrorKind::Busy));
        }
        let Found::Directory(marker) = op.find().await? else { return Err(op.error(ErrorKind::NotDirectory)) };
        let (directory, refused) = (op.place.directory(), |refusal| op.refused(refusal));
        let below = self.bucket.client.list(&directory, false, None, 2).await.map_err(refused)?.objects;
        if below.iter().any(|listed| listed.key != directory || listed.size > 0) {
            return Err(op.error(ErrorKind::NotEmpty));
        }
        self.bucket.keep_directory_of(&directory).await.map_err(refused)?;
        self.bucket.forget_directory(&directory);
        self.bucket.client.delete(&directory, marker.as_ref()).await.map_err(refused)
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

    /// Every change is durable when it is answered: there is nothing left to do.
    async fn sync_dir(&self, path: &PoolPath) -> Result<()> {
        let op = self.op("sync", path)?;
        match self.bucket.is_directory(&op.place).await.map_err(|refusal| op.refused(refusal))? {
            Some(true) => Ok(()),
            Some(false) => Err(op.error(ErrorKind::NotDirectory)),
            None => Err(op.missing().await),
        }
    }

    /// A bucket has no size: what is said is large enough for everybody who asks first.
    async fn space(&self) -> Result<Space> {
        Ok(Space {
            total_bytes: SPACE_BYTES,
            free_bytes: SPACE_BYTES,
            available_bytes: SPACE_BYTES,
            total_files: u64::from(u32::MAX),
            free_files: u64::from(u32::MAX),
        })
    }
}
