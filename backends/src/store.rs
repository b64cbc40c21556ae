//! Stores of objects behind HTTP: what the buckets of S3 and Google, Azure's containers and web servers have in
//! common, and the pool over the read-only ones.
//!
//! Directories are keys that end with a slash, or are implied by keys that contain a slash. `store/keys.rs` maps
//! names to keys, `store/metadata.rs` stores attributes. Each kind of store has a [`Dialect`] for its differences. A
//! web server has no keys, but paths and pages that name them: `store/web.rs`.

pub(crate) mod attach;
mod azure;
mod bounds;
pub(crate) mod client;
pub(crate) mod conditions;
pub(crate) mod dialect;
mod google;
pub(crate) mod keys;
pub(crate) mod listing;
pub(crate) mod metadata;
pub(crate) mod moves;
mod read_only;
mod reading;
pub(crate) mod requests;
mod web;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;

use crate::{Error, ErrorKind, FileKind, Listing, PoolPath, Result, Side, Space, Stat, Version};

pub use attach::{Environment, environment, no_http_client};
pub use read_only::{StorePool, check};

use client::{Client, StoreRefusal};
use conditions::Conditional;
use keys::ObjectPlace;
use listing::Remembered;
use metadata::{Defaults, Object, implied_directory};
use moves::Moves;
use web::Web;

/// Directories that are known to exist.
const KNOWN_DIRECTORIES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4_095);
/// How long a directory counts as existing after it was seen.
const KNOWN_FOR: Duration = Duration::from_secs(5);
/// The size that is reported for a store without a size: 1 PiB.
const SPACE_BYTES: u64 = 1 << 50;

/// A bucket, the part of one that begins with a prefix, or the part of a web server below a path.
pub(crate) struct Bucket {
    pub(crate) client: Arc<Client>,
    /// The name for people, for errors.
    pub(crate) name: String,
    /// The prefix of all keys: empty, or with a slash at its end.
    pub(crate) root: String,
    pub(crate) defaults: Defaults,
    /// Which conditions on changes the store honours.
    pub(crate) conditional: Conditional,
    /// Renames in progress.
    pub(crate) moves: Moves,
    /// Finds names in stores without keys.
    pub(crate) web: Option<Web>,
    directories: Mutex<LruCache<String, Instant>>,
    remembered: Remembered,
}

/// What is stored at a place.
pub(crate) enum StoredObject {
    Nothing,
    /// Anything but a directory.
    Object(Object),
    /// With the object that stands for the directory, if there is one.
    Directory(Option<Object>),
}

/// One call of the pool: its object, and the context of its errors.
pub(crate) struct StoreCall<'a> {
    pub(crate) bucket: &'a Arc<Bucket>,
    pub(crate) what: &'a str,
    pub(crate) path: &'a PoolPath,
    pub(crate) place: ObjectPlace,
}

impl<'a> StoreCall<'a> {
    /// # Errors
    /// `InvalidInput` and `NameTooLong` for paths at which the store can have nothing.
    pub(crate) fn new(bucket: &'a Arc<Bucket>, what: &'a str, path: &'a PoolPath) -> Result<Self> {
        let error = |kind| Error::new(kind, Side::Pool, format!("{what} {path} in {}", bucket.name));
        let place = bucket.place_of(path).map_err(error)?;
        Ok(Self { bucket, what, path, place })
    }
}

impl StoreCall<'_> {
    pub(crate) fn error(&self, kind: ErrorKind) -> Error {
        Error::new(kind, Side::Pool, self.context())
    }

    pub(crate) fn context(&self) -> String {
        format!("{} {} in {}", self.what, self.path, self.bucket.name)
    }

    pub(crate) fn refused(&self, refusal: StoreRefusal) -> Error {
        refusal.into_error(self.context())
    }

    /// Finds the object or directory at the place; fails if there is nothing.
    pub(crate) async fn find(&self) -> Result<StoredObject> {
        match self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))? {
            StoredObject::Nothing => Err(self.missing().await),
            found => Ok(found),
        }
    }

    /// The error for a place with nothing at it.
    pub(crate) async fn missing(&self) -> Error {
        match self.parent().await {
            Err(error) => error,
            Ok(()) => self.error(ErrorKind::NotFound),
        }
    }

    /// Fails with `NotFound` or `NotDirectory` if the parent is not a directory.
    pub(crate) async fn parent(&self) -> Result<()> {
        let Some(parent) = self.path.parent() else { return Ok(()) };
        let mut absent = Vec::new();
        for path in std::iter::successors(Some(parent), PoolPath::parent) {
            let place = self.bucket.place_of(&path).map_err(|kind| self.error(kind))?;
            match self.bucket.is_directory(&place).await.map_err(|refusal| self.refused(refusal))? {
                Some(true) => break,
                Some(false) => return Err(self.error(ErrorKind::NotDirectory)),
                None => absent.push(path),
            }
        }
        if absent.is_empty() { Ok(()) } else { Err(self.error(ErrorKind::NotFound)) }
    }

    pub(crate) fn stat(&self, found: &StoredObject) -> Option<Stat> {
        let defaults = &self.bucket.defaults;
        match found {
            StoredObject::Nothing => None,
            StoredObject::Object(object) => Some(object.stat(false, defaults)),
            StoredObject::Directory(Some(marker)) => Some(marker.stat(true, defaults)),
            StoredObject::Directory(None) => Some(implied_directory(defaults)),
        }
    }

    /// Fails with `Busy` if a directory is being renamed from or to the place.
    pub(crate) fn not_moving(&self) -> Result<()> {
        self.bucket.moves.open_at(&self.place.directory()).map_or(Ok(()), |said| Err(self.busy(&said)))
    }

    fn busy(&self, said: &str) -> Error {
        Error::new(ErrorKind::Busy, Side::Pool, format!("{}: {said}", self.context()))
    }

    /// The result of `stat`.
    ///
    /// # Errors
    /// `Busy` for the target of a rename of a directory that is not finished.
    pub(crate) async fn look(&self) -> Result<Stat> {
        if let Some(said) = self.bucket.moves.open_to(&self.place.directory()) {
            return Err(self.busy(&said));
        }
        match self.bucket.find(&self.place).await {
            Ok(StoredObject::Nothing) => Err(self.missing().await),
            Ok(found) => self.stat(&found).ok_or_else(|| self.error(ErrorKind::NotFound)),
            // An object that may not be read is shown with the attributes from its directory's listing.
            Err(refusal) if self.bucket.web.is_none() && listing::is_of_one_object(&refusal) => {
                match listing::stat_as_listed(self.bucket, &self.place).await {
                    Ok(Some(stat)) => Ok(stat),
                    _ => Err(self.refused(refusal)),
                }
            }
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    /// Whether the object is still of that version, in one request. A listing would also tell whether keys begin with
    /// its key and a slash, but costs twelve times as much.
    pub(crate) async fn still_is(&self, version: &Version) -> Result<bool> {
        let ObjectPlace { key, shadowed, is_root } = &self.place;
        if self.bucket.web.is_some() || *shadowed || *is_root || key.ends_with('/') {
            return Ok(false);
        }
        let object = self.bucket.client.head(key).await.map_err(|refusal| self.refused(refusal))?;
        let object = object.filter(|object| !object.meta.folder);
        Ok(object.is_some_and(|object| object.stat(false, &self.bucket.defaults).version == *version))
    }

    /// The entries of a directory, with the contents of small files, of at most `contents_bytes` in all.
    pub(crate) async fn entries(&self, contents_bytes: u64) -> Result<Listing> {
        let StoredObject::Directory(_) = self.find().await? else { return Err(self.error(ErrorKind::NotDirectory)) };
        let (bucket, directory, context) = (Arc::clone(self.bucket), self.place.directory(), self.context());
        match &self.bucket.web {
            Some(_) => web::list(bucket, directory, context).await,
            None => Ok(listing::list(bucket, directory, contents_bytes, context)),
        }
    }

    /// The target of a symlink.
    pub(crate) async fn target(&self) -> Result<Vec<u8>> {
        match self.find().await? {
            StoredObject::Object(object) if object.stat(false, &self.bucket.defaults).kind == FileKind::Symlink => {
                self.content(&object).await.map(Vec::from)
            }
            _ => Err(self.error(ErrorKind::InvalidInput)),
        }
    }

    /// Every change is durable when it is answered, so a directory needs no sync.
    pub(crate) async fn sync(&self) -> Result<()> {
        match self.bucket.is_directory(&self.place).await.map_err(|refusal| self.refused(refusal))? {
            Some(true) => Ok(()),
            Some(false) => Err(self.error(ErrorKind::NotDirectory)),
            None => Err(self.missing().await),
        }
    }
}

impl Bucket {
    pub(crate) fn new(client: Arc<Client>, name: String, root: String, defaults: Defaults) -> Self {
        Self {
            client,
            name,
            root,
            defaults,
            conditional: Conditional::default(),
            moves: Moves::default(),
            web: None,
            directories: Mutex::new(LruCache::new(KNOWN_DIRECTORIES)),
            remembered: Remembered::new(),
        }
    }

    fn place_of(&self, path: &PoolPath) -> Result<ObjectPlace, ErrorKind> {
        match &self.web {
            Some(_) => web::place_of(path),
            None => keys::place_of(&self.root, path),
        }
    }

    pub(crate) async fn find(&self, place: &ObjectPlace) -> Result<StoredObject, StoreRefusal> {
        if let Some(web) = &self.web {
            return web.find(&self.client, place).await;
        }
        let directory = place.directory();
        if place.is_root {
            let marker = self.client.head(&place.marker()).await?;
            if marker.is_none() {
                // An answer to HEAD does not say whether it is the bucket that is missing.
                self.client.list(&directory, false, None, 1).await?;
            }
            return Ok(StoredObject::Directory(marker));
        }
        let unspeakable = keys::is_unspeakable(&place.key);
        let (object, below) = if unspeakable {
            // No request can name the directory, but listings can name what is below it.
            let below = self.client.list(&directory, false, None, 1).await?;
            match below.objects.is_empty() {
                true => (self.client.head(&place.key).await?, below),
                false => (None, below),
            }
        } else {
            tokio::try_join!(self.client.head(&place.key), self.client.list(&directory, false, None, 1))?
        };
        if object.as_ref().is_some_and(|object| object.meta.folder) && below.objects.is_empty() {
            return Ok(StoredObject::Directory(None));
        }
        // An object whose key ends with a slash is a file only if it has content.
        let object = object.filter(|object| !object.meta.folder && (!place.key.ends_with('/') || object.size > 0));
        let is_directory = !below.objects.is_empty();
        Ok(match (is_directory, place.shadowed, object) {
            (true, true, Some(object)) | (false, false, Some(object)) => StoredObject::Object(object),
            (true, false, _) => {
                let marked = below.objects.first().is_some_and(|first| first.key == directory);
                self.saw_directory(place);
                StoredObject::Directory(if marked && !unspeakable { self.client.head(&directory).await? } else { None })
            }
            _ => StoredObject::Nothing,
        })
    }

    /// `None` if there is nothing.
    pub(crate) async fn is_directory(&self, place: &ObjectPlace) -> Result<Option<bool>, StoreRefusal> {
        let directory = place.directory();
        if place.is_root {
            return Ok(Some(true));
        }
        if self.directories.lock().get(&directory).is_some_and(|seen| seen.elapsed() < KNOWN_FOR) {
            return Ok(Some(true));
        }
        Ok(match self.find(place).await? {
            StoredObject::Nothing => None,
            StoredObject::Object(_) => Some(false),
            StoredObject::Directory(_) => Some(true),
        })
    }

    pub(crate) fn saw_directory(&self, place: &ObjectPlace) {
        self.directories.lock().put(place.directory(), Instant::now());
    }

    pub(crate) fn forget_directory(&self, directory: &str) {
        let mut known = self.directories.lock();
        let below: Vec<String> =
            known.iter().map(|(key, _)| key).filter(|key| key.starts_with(directory)).cloned().collect();
        for key in below {
            known.pop(&key);
        }
    }
}

/// A store has no size. The reported size is large enough for every program that checks it first.
pub(crate) fn space() -> Space {
    Space {
        total_bytes: SPACE_BYTES,
        free_bytes: SPACE_BYTES,
        available_bytes: SPACE_BYTES,
        total_files: u64::from(u32::MAX),
        free_files: u64::from(u32::MAX),
    }
}
