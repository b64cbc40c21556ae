//! The entries of a directory, page by page.
//!
//! A listing contains the size and ETag of an object, but not its attributes. Each object's attributes are requested,
//! many at a time. An answer is reused while size, ETag and time stay the same, unless the time is so recent that a
//! later change may have left it the same. A caller that also wants contents gets those of small objects in the same
//! answers as their attributes.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, future, stream};
use lru::LruCache;
use parking_lot::Mutex;

use crate::{DirEntry, ErrorKind, FileKind, LISTED_CONTENT_BYTES, Listing, Result, Stat, Time};

use super::Bucket;
use super::bounds::{EMPTY_PAGES, WAITING_KEYS};
use super::client::StoreRefusal;
use super::keys::{self, ObjectPlace};
use super::metadata::{Defaults, Meta, Object, implied_directory};
use super::requests::{ListedObject, garbled};

/// Keys in one page: the most that S3 returns.
const PAGE_KEYS: usize = 1_000;
/// Objects whose attributes are requested concurrently.
const ASKED_AT_ONCE: usize = 32;
/// Objects whose attributes are cached.
const REMEMBERED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(16_383);
/// Stands for the version id of an object whose attributes could not be read.
const LISTED_ALONE: &str = "listed-alone";
/// Servers report times in seconds, and the clocks of their machines may differ a little.
const YOUNG_SECS: i64 = 5;
/// The modes, for the daemon's user, of what may have attributes that could not be read.
const UNKNOWN_FILE: u32 = 0o400;
const UNKNOWN_DIRECTORY: u32 = 0o500;

/// The cached attributes of objects, each for one state of its object.
pub(crate) struct Remembered(Mutex<LruCache<String, Object>>);

impl Remembered {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(LruCache::new(REMEMBERED)))
    }

    fn get(&self, listed: &ListedObject) -> Option<Object> {
        let mut objects = self.0.lock();
        let known = objects.get(&listed.key)?;
        let same = (&known.etag, known.size, known.last_modified) == (&listed.etag, listed.size, listed.last_modified)
            && known.revision == listed.revision;
        same.then(|| known.clone())
    }

    fn put(&self, key: &str, object: &Object) {
        // Both times are by the server's clock, if it tells the time.
        let now = if object.asked_at_secs == 0 { Time::now().secs } else { object.asked_at_secs };
        if object.last_modified.secs < now.saturating_sub(YOUNG_SECS) {
            self.0.lock().put(key.to_owned(), object.clone());
        }
    }
}

/// A future entry.
enum Child {
    Object(Vec<u8>, ListedObject, ObjectRequest),
    Directory(Vec<u8>, String),
}

/// What to request for an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectRequest {
    Attributes,
    Content,
}

/// A directory that is being listed.
struct DirectoryWalk {
    bucket: Arc<Bucket>,
    /// The prefix of the keys.
    directory: String,
    token: Option<String>,
    /// Bytes of contents that the listing may still include.
    contents_bytes: u64,
    /// Objects, by the part of their key, whose name may still turn out to be that of a directory not listed yet.
    waiting: BTreeMap<String, ListedObject>,
    /// Successive pages without an entry.
    empty_pages: u32,
    done: bool,
}

/// `context` names the listed directory, for errors.
pub(crate) fn list(bucket: Arc<Bucket>, directory: String, contents_bytes: u64, context: String) -> Listing {
    let (waiting, empty_pages) = (BTreeMap::new(), 0);
    let asked = Arc::clone(&bucket);
    let walk = DirectoryWalk { bucket, directory, token: None, contents_bytes, waiting, empty_pages, done: false };
    let children = stream::try_unfold(walk, |mut walk| async move {
        if walk.done {
            return Ok(None);
        }
        let children = walk.children().await?;
        Ok(Some((children, walk)))
    });
    let ask = move |child| {
        let bucket = Arc::clone(&asked);
        async move { entry(&bucket, child).await }
    };
    ask_each(children, ask, context)
}

/// The entries of a listing, requested concurrently and returned as they arrive. The time limit for a part of a
/// listing then covers one request, not all requests for a page of the server. `context` is for errors.
pub(super) fn ask_each<C, A>(
    listed: impl Stream<Item = Result<Vec<C>, StoreRefusal>> + Send + 'static,
    ask: impl Fn(C) -> A + Send + 'static,
    context: String,
) -> Listing
where
    C: Send + 'static,
    A: Future<Output = Result<Option<DirEntry>, StoreRefusal>> + Send + 'static,
{
    listed
        .map_ok(|found| {
            // An empty page of the server is passed on, too, so that the next page gets its own time limit.
            let nothing = found.is_empty().then_some(None);
            stream::iter(found.into_iter().map(Some).chain(nothing).map(Ok))
        })
        .try_flatten()
        .map_ok(move |child| match child {
            Some(child) => ask(child).left_future(),
            None => future::ready(Ok(None)).right_future(),
        })
        .try_buffer_unordered(ASKED_AT_ONCE)
        .try_ready_chunks(PAGE_KEYS)
        .map_ok(|entries| entries.into_iter().flatten().collect())
        .map_err(move |refused| refused.1.into_error(&context))
        .boxed()
}

impl DirectoryWalk {
    /// The children in the next page of keys, except objects whose name is not certain yet.
    async fn children(&mut self) -> Result<Vec<Child>, StoreRefusal> {
        let client = &self.bucket.client;
        let page = client.list(&self.directory, true, self.token.as_deref(), PAGE_KEYS).await?;
        self.empty_pages = if page.objects.is_empty() && page.prefixes.is_empty() { self.empty_pages + 1 } else { 0 };
        if self.empty_pages > EMPTY_PAGES || self.waiting.len() > WAITING_KEYS {
            return Err(garbled("a listing that leads to no end"));
        }
        self.done = page.next.is_none();
        self.token = page.next;
        let part = |key: &str| key.strip_prefix(&self.directory).map(|rest| rest.trim_end_matches('/').to_owned());
        let last_object = page.objects.last().map(|listed| listed.key.clone());
        let reached = last_object.max(page.prefixes.last().cloned()).unwrap_or_default();

        let mut children = Vec::new();
        let mut directories = BTreeSet::new();
        for prefix in page.prefixes {
            // `a//` is the empty part, in the directory `a`.
            let Some(part) = prefix.strip_prefix(&self.directory).and_then(|rest| rest.strip_suffix('/')) else {
                continue;
            };
            directories.insert(part.to_owned());
            self.show(part, keys::name_of(part), |name| Child::Directory(name, prefix.clone()), &mut children);
        }
        for listed in page.objects {
            let Some(part) = part(&listed.key) else { continue };
            // The object that stands for the directory itself is an entry only if it has content.
            if listed.key != self.directory || listed.size > 0 {
                self.waiting.insert(part, listed);
            }
        }
        for (part, listed) in std::mem::take(&mut self.waiting) {
            if listed.folder && directories.contains(&part) {
                continue;
            } else if directories.contains(&part) {
                let wanted = self.wanted(&listed);
                self.show(&part, keys::shadowed_name(&part), |name| Child::Object(name, listed, wanted), &mut children);
            } else if !self.done && reached <= format!("{}{part}/", self.directory) {
                self.waiting.insert(part, listed);
            } else if listed.folder {
                let key = format!("{}{part}/", self.directory);
                self.show(&part, keys::name_of(&part), |name| Child::Directory(name, key), &mut children);
            } else {
                let wanted = self.wanted(&listed);
                self.show(&part, keys::name_of(&part), |name| Child::Object(name, listed, wanted), &mut children);
            }
        }
        Ok(children)
    }

    /// What to request for an object. An empty object has no content to request.
    fn wanted(&mut self, listed: &ListedObject) -> ObjectRequest {
        let fits = (1..=self.contents_bytes.min(LISTED_CONTENT_BYTES)).contains(&listed.size);
        if !fits || keys::is_unspeakable(&listed.key) {
            return ObjectRequest::Attributes;
        }
        self.contents_bytes -= listed.size;
        ObjectRequest::Content
    }

    fn show(&self, part: &str, name: Option<Vec<u8>>, child: impl FnOnce(Vec<u8>) -> Child, to: &mut Vec<Child>) {
        if keys::is_reserved(part) {
            return;
        }
        match name {
            Some(name) => to.push(child(name)),
            None => {
                let key = format!("{}{part}", self.directory);
                tracing::warn!(
                    bucket = self.bucket.client.bucket,
                    key,
                    "not shown: no file name can stand for this key"
                );
            }
        }
    }
}

/// `None` if the object vanished meanwhile.
async fn entry(bucket: &Bucket, child: Child) -> Result<Option<DirEntry>, StoreRefusal> {
    match child {
        Child::Directory(name, key) => {
            let marker = match keys::is_unspeakable(&key) {
                true => Ok(None),
                false => bucket.client.head(&key).await,
            };
            let stat = match marker {
                Ok(Some(marker)) => marker.stat(true, &bucket.defaults),
                Err(refusal) if is_of_one_object(&refusal) => {
                    is_still_listed(bucket, &key).await?;
                    unknown_directory(&bucket.defaults)
                }
                Err(refusal) => return Err(refusal),
                Ok(None) if is_empty(bucket, &key).await? => return Ok(None),
                Ok(None) => implied_directory(&bucket.defaults),
            };
            Ok(Some(DirEntry::new(name, stat)))
        }
        Child::Object(name, listed, ObjectRequest::Content) => match with_content(bucket, &listed).await? {
            Some((object, content)) => {
                let stat = object.stat(false, &bucket.defaults);
                // The target of a symlink is not the content of a file.
                let content = (stat.kind == FileKind::File).then_some(content);
                Ok(Some(DirEntry { name, stat, content }))
            }
            None => Ok(object(bucket, listed)
                .await?
                .map(|object| DirEntry::new(name, object.stat(false, &bucket.defaults)))),
        },
        Child::Object(name, listed, ObjectRequest::Attributes) => {
            Ok(object(bucket, listed).await?.map(|object| DirEntry::new(name, object.stat(false, &bucket.defaults))))
        }
    }
}

/// Whether no key begins with a prefix that a listing contained.
async fn is_empty(bucket: &Bucket, prefix: &str) -> Result<bool, StoreRefusal> {
    let client = &bucket.client;
    if !client.dialect.tells_empty_prefixes() {
        return Ok(false);
    }
    match client.list(prefix, false, None, 1).await {
        Ok(page) => Ok(page.objects.is_empty()),
        Err(refusal) if is_of_one_object(&refusal) => is_still_listed(bucket, prefix).await.map(|()| false),
        Err(refusal) => Err(refusal),
    }
}

/// Fails if the listing that contained a key or prefix is refused by now. A prefix of its own may always be refused.
async fn is_still_listed(bucket: &Bucket, key: &str) -> Result<(), StoreRefusal> {
    let directory = key.strip_suffix('/').unwrap_or(key).rfind('/').map_or("", |at| &key[..=at]);
    bucket.client.list(directory, true, None, 1).await.map(drop)
}

/// `None` if the object is another one by now.
async fn with_content(bucket: &Bucket, listed: &ListedObject) -> Result<Option<(Object, Bytes)>, StoreRefusal> {
    match bucket.client.get(&listed.key, &listed.etag, 0..listed.size).await {
        // Not every server checks the condition.
        Ok((object, content)) if (&object.etag, object.size) == (&listed.etag, listed.size) => {
            bucket.remembered.put(&listed.key, &object);
            Ok(Some((object, content)))
        }
        Ok(_) => Ok(None),
        Err(refusal)
            if refusal.is(ErrorKind::Conflict) || refusal.is(ErrorKind::NotFound) || refusal.is_behind_the_end() =>
        {
            Ok(None)
        }
        // The attributes of an archived object can be read.
        Err(refusal) if is_of_one_object(&refusal) => Ok(None),
        Err(refusal) => Err(refusal),
    }
}

/// Whether a refusal may concern one object alone: the bucket answers. Only a listing tells whether all requests are
/// refused, for example because the credentials have expired.
pub(super) fn is_of_one_object(refusal: &StoreRefusal) -> bool {
    !refusal.is(ErrorKind::Unavailable) && !refusal.is(ErrorKind::Timeout)
}

/// The result of `stat` for an object or a directory, from a listing alone; `None` if nothing is there.
pub(super) async fn stat_as_listed(bucket: &Bucket, place: &ObjectPlace) -> Result<Option<Stat>, StoreRefusal> {
    let (client, directory) = (&bucket.client, place.directory());
    let (first, below) =
        tokio::try_join!(client.list(&place.key, false, None, 1), client.list(&directory, false, None, 1))?;
    if !below.objects.is_empty() && !place.shadowed {
        return Ok(Some(match client.head(&place.marker()).await {
            Ok(Some(marker)) => marker.stat(true, &bucket.defaults),
            Ok(None) => implied_directory(&bucket.defaults),
            Err(refusal) if is_of_one_object(&refusal) => unknown_directory(&bucket.defaults),
            Err(refusal) => return Err(refusal),
        }));
    }
    let listed = first.objects.into_iter().find(|listed| listed.key == place.key && !listed.folder);
    Ok(listed.map(|listed| as_listed(listed, &bucket.defaults).stat(false, &bucket.defaults)))
}

/// `None` if the object is gone.
async fn object(bucket: &Bucket, listed: ListedObject) -> Result<Option<Object>, StoreRefusal> {
    if let Some(object) = bucket.remembered.get(&listed) {
        return Ok(Some(object));
    }
    if keys::is_unspeakable(&listed.key) {
        // An object that a URL cannot name can only be shown.
        return Ok(Some(as_listed(listed, &bucket.defaults)));
    }
    let asked = match bucket.client.head(&listed.key).await {
        Err(refusal) if is_of_one_object(&refusal) => {
            is_still_listed(bucket, &listed.key).await?;
            return Ok(Some(as_listed(listed, &bucket.defaults)));
        }
        answer => answer?,
    };
    if asked.is_none() {
        // An answer to HEAD does not say whether it is the bucket that is missing.
        is_still_listed(bucket, &listed.key).await?;
    }
    if let Some(object) = &asked {
        bucket.remembered.put(&listed.key, object);
    }
    Ok(asked)
}

/// An object known only from the listing. Its version differs from that of a `HEAD`: if a later `HEAD` is answered,
/// the attributes count as changed. In a store whose attributes count, the
/// object's own are unknown: only the daemon's user may open it.
fn as_listed(listed: ListedObject, defaults: &Defaults) -> Object {
    let ListedObject { etag, size, last_modified, revision, .. } = listed;
    let version_id = LISTED_ALONE.to_owned();
    let (uid, gid) = own_ids();
    let meta = match defaults.believed {
        true => Meta {
            mode: Some(FileKind::File.mode_bits() | UNKNOWN_FILE),
            uid: Some(uid),
            gid: Some(gid),
            ..Meta::default()
        },
        false => Meta::default(),
    };
    Object { etag, version_id, size, last_modified, asked_at_secs: 0, revision, meta }
}

/// The result of `stat` for a directory whose attributes could not be read.
fn unknown_directory(defaults: &Defaults) -> Stat {
    let implied = implied_directory(defaults);
    let (uid, gid) = own_ids();
    if defaults.believed { Stat { mode: UNKNOWN_DIRECTORY, uid, gid, ..implied } } else { implied }
}

fn own_ids() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}
