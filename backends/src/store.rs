//! Stores of objects behind HTTP: what S3's buckets, Google's, Azure's containers and web servers have in common, and the
//! pool over those that are only read.
//!
//! Directories are keys that end with a slash, or what keys with a slash in them imply; which names stand for which keys
//! is in `store/keys.rs`, where attributes are kept in `store/metadata.rs`. What the kinds of stores do differently is a
//! [`Dialect`] each. A web server has no keys, but paths and pages that name them: `store/web.rs`.

pub(crate) mod attach;
mod azure;
mod bounds;
pub(crate) mod client;
pub(crate) mod dialect;
mod google;
pub(crate) mod keys;
pub(crate) mod listing;
pub(crate) mod metadata;
mod read_only;
mod reading;
pub(crate) mod requests;
mod web;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;

use crate::s3::Conditional;
use crate::s3::moves::Moves;
use crate::{Error, ErrorKind, FileKind, Listing, PoolPath, Result, Side, Space, Stat, Version};

pub use attach::{Environment, environment};
pub use read_only::{StorePool, check};

use client::{Client, Refusal};
use keys::Place;
use listing::Remembered;
use metadata::{Defaults, Object, implied_directory};
use web::Web;

/// Directories that are known to be there.
const KNOWN_DIRECTORIES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4_095);
/// How long one counts as there after it was seen.
const KNOWN_FOR: Duration = Duration::from_secs(5);
/// What a store without a size says: 1 PiB.
const SPACE_BYTES: u64 = 1 << 50;

/// A bucket, what begins with a prefix in one, or what is below a path of a web server.
pub(crate) struct Bucket {
    pub(crate) client: Arc<Client>,
    /// As a person would name it, for errors.
    pub(crate) name: String,
    /// What all keys begin with: empty, or with a slash at its end.
    pub(crate) root: String,
    pub(crate) defaults: Defaults,
    /// What the store heeds of conditions on changes.
    pub(crate) conditional: Conditional,
    /// Renames that are being carried out.
    pub(crate) moves: Moves,
    /// How names are found where there are no keys.
    pub(crate) web: Option<Web>,
    directories: Mutex<LruCache<String, Instant>>,
    remembered: Remembered,
}

/// What is at a place.
pub(crate) enum Found {
    Nothing,
    /// Anything but a directory.
    Object(Object),
    /// With the object that stands for it, if there is one.
    Directory(Option<Object>),
}

/// One call of the pool: what it is about, and how its errors are told.
pub(crate) struct Op<'a> {
    pub(crate) bucket: &'a Arc<Bucket>,
    pub(crate) what: &'a str,
    pub(crate) path: &'a PoolPath,
    pub(crate) place: Place,
}

impl<'a> Op<'a> {
    /// # Errors
    /// `InvalidInput` and `NameTooLong` for paths that the store can have nothing at.
    pub(crate) fn new(bucket: &'a Arc<Bucket>, what: &'a str, path: &'a PoolPath) -> Result<Self> {
        let error = |kind| Error::new(kind, Side::Pool, format!("{what} {path} in {}", bucket.name));
        let place = bucket.place_of(path).map_err(error)?;
        Ok(Self { bucket, what, path, place })
    }
}

impl Op<'_> {
    pub(crate) fn error(&self, kind: ErrorKind) -> Error {
        Error::new(kind, Side::Pool, self.context())
    }

    pub(crate) fn context(&self) -> String {
        format!("{} {} in {}", self.what, self.path, self.bucket.name)
    }

    pub(crate) fn refused(&self, refusal: Refusal) -> Error {
        refusal.into_error(self.context())
    }

    /// What is there; an error where there is nothing.
    pub(crate) async fn find(&self) -> Result<Found> {
        match self.bucket.find(&self.place).await.map_err(|refusal| self.refused(refusal))? {
            Found::Nothing => Err(self.missing().await),
            found => Ok(found),
        }
    }

    /// Why there is nothing.
    pub(crate) async fn missing(&self) -> Error {
        match self.parent().await {
            Err(error) => error,
            Ok(()) => self.error(ErrorKind::NotFound),
        }
    }

    /// `NotFound` or `NotDirectory` where the directory that is to hold it is none.
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

    pub(crate) fn stat(&self, found: &Found) -> Option<Stat> {
        let defaults = &self.bucket.defaults;
        match found {
            Found::Nothing => None,
            Found::Object(object) => Some(object.stat(false, defaults)),
            Found::Directory(Some(marker)) => Some(marker.stat(true, defaults)),
            Found::Directory(None) => Some(implied_directory(defaults)),
        }
    }

    /// What `stat` says of it.
    pub(crate) async fn look(&self) -> Result<Stat> {
        match self.bucket.find(&self.place).await {
            Ok(Found::Nothing) => Err(self.missing().await),
            Ok(found) => self.stat(&found).ok_or_else(|| self.error(ErrorKind::NotFound)),
            // An object that may not be asked about is shown as its directory's listing has it.
            Err(refusal) if self.bucket.web.is_none() && listing::is_of_one_object(&refusal) => {
                match listing::stat_as_listed(self.bucket, &self.place).await {
                    Ok(Some(stat)) => Ok(stat),
                    _ => Err(self.refused(refusal)),
                }
            }
            Err(refusal) => Err(self.refused(refusal)),
        }
    }

    /// Whether there is an object of that version, in one request. A listing, which would tell whether keys begin with
    /// its own and a slash, is charged like twelve of them.
    pub(crate) async fn still_is(&self, version: &Version) -> Result<bool> {
        let Place { key, shadowed, is_root } = &self.place;
        if self.bucket.web.is_some() || *shadowed || *is_root || key.ends_with('/') {
            return Ok(false);
        }
        let object = self.bucket.client.head(key).await.map_err(|refusal| self.refused(refusal))?;
        let object = object.filter(|object| !object.meta.folder);
        Ok(object.is_some_and(|object| object.stat(false, &self.bucket.defaults).version == *version))
    }

    /// The entries of a directory, with small files of so many bytes in all.
    pub(crate) async fn entries(&self, contents_bytes: u64) -> Result<Listing> {
        let Found::Directory(_) = self.find().await? else { return Err(self.error(ErrorKind::NotDirectory)) };
        let (bucket, directory, context) = (Arc::clone(self.bucket), self.place.directory(), self.context());
        match &self.bucket.web {
            Some(_) => web::list(bucket, directory, context).await,
            None => Ok(listing::list(bucket, directory, contents_bytes, context)),
        }
    }

    /// The target of a symlink.
    pub(crate) async fn target(&self) -> Result<Vec<u8>> {
        match self.find().await? {
            Found::Object(object) if object.stat(false, &self.bucket.defaults).kind == FileKind::Symlink => {
                self.content(&object).await.map(Vec::from)
            }
            _ => Err(self.error(ErrorKind::InvalidInput)),
        }
    }

    /// Every change is durable when it is answered: there is nothing left to do for a directory.
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

    fn place_of(&self, path: &PoolPath) -> Result<Place, ErrorKind> {
        match &self.web {
            Some(_) => web::place_of(path),
            None => keys::place_of(&self.root, path),
        }
    }

    pub(crate) async fn find(&self, place: &Place) -> Result<Found, Refusal> {
        if let Some(web) = &self.web {
            return web.find(&self.client, place).await;
        }
        let directory = place.directory();
        if place.is_root {
            return Ok(Found::Directory(self.client.head(&place.marker()).await?));
        }
        let unspeakable = keys::is_unspeakable(&place.key);
        let (object, below) = if unspeakable {
            // No request can name it, but listings can name what is below it.
            let below = self.client.list(&directory, false, None, 1).await?;
            match below.objects.is_empty() {
                true => (self.client.head(&place.key).await?, below),
                false => (None, below),
            }
        } else {
            tokio::try_join!(self.client.head(&place.key), self.client.list(&directory, false, None, 1))?
        };
        if object.as_ref().is_some_and(|object| object.meta.folder) && below.objects.is_empty() {
            return Ok(Found::Directory(None));
        }
        // The object that stands for a directory is a file only where it has content.
        let object = object.filter(|object| !object.meta.folder && (!place.key.ends_with('/') || object.size > 0));
        let is_directory = !below.objects.is_empty();
        Ok(match (is_directory, place.shadowed, object) {
            (true, true, Some(object)) | (false, false, Some(object)) => Found::Object(object),
            (true, false, _) => {
                let marked = below.objects.first().is_some_and(|first| first.key == directory);
                self.saw_directory(place);
                Found::Directory(if marked && !unspeakable { self.client.head(&directory).await? } else { None })
            }
            _ => Found::Nothing,
        })
    }

    /// `None` where there is nothing.
    pub(crate) async fn is_directory(&self, place: &Place) -> Result<Option<bool>, Refusal> {
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

    pub(crate) fn saw_directory(&self, place: &Place) {
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

/// A store has no size: what is said is large enough for everybody who asks first.
pub(crate) fn space() -> Space {
    Space {
        total_bytes: SPACE_BYTES,
        free_bytes: SPACE_BYTES,
        available_bytes: SPACE_BYTES,
        total_files: u64::from(u32::MAX),
        free_files: u64::from(u32::MAX),
    }
}
