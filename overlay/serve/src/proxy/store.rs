//! Responses on the fast pool. Each is a file: the body, then the head.
//!
//! The files lie in directories like the paths of their URLs, so that one part of a site can be purged, and is seen on the
//! page. A name ends in `@` and the hash of the whole URL.
//!
//! If responses of a URL vary by headers of the request, the file of the URL only tells by which ones, and the responses are
//! beside it. Their hashes include what the request said, and the time at which the first of them came: if the URL's file is
//! removed, none of them is found again.

use std::hash::Hasher;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use forebay_backends::{PoolPath, Result};
use forebay_engine::{NewFile, Overlay, ServedFile};
use http::{HeaderMap, HeaderName};
use lru::LruCache;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use twox_hash::XxHash3_64;

use super::freshness::{Freshness, FreshnessOptions};
use super::head::{Head, boot_id, said_of};
use crate::content::lendable;
use crate::transport::{Mapped, MappedOwner};

/// The most responses that stay open although no client reads them: each holds a descriptor, and is not evicted.
const OPEN_MAX: usize = 1024;
/// The share of the fast pool that they may hold.
const OPEN_SHARE: u64 = 8;
/// How long a response stays open after its last use.
const IDLE: Duration = Duration::from_secs(10);
/// The largest response that is kept, as a share of the fast pool.
const LARGEST_SHARE: u64 = 4;
/// Longer parts of a path are replaced by their hash: a name has 255 bytes, and the hash needs some.
const PART_MAX: usize = 200;
/// Deeper paths are not kept as directories.
const PARTS_MAX: usize = 64;
/// Names of responses that have not come to their end begin with this.
const TEMPORARY: &str = "+";
/// One read of a body whose checksum is computed.
const PIECE_BYTES: u32 = 256 << 10;

/// Where a response is kept.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    pub dir: PoolPath,
    pub name: String,
}

impl Place {
    /// Of a URL's path and query.
    pub fn of(target: &str) -> Self {
        Self::with(target, "")
    }

    /// Of the response to a request that says these things, since the first response that varied came.
    fn of_variant(target: &str, since: u64, varied: &[(HeaderName, Option<String>)]) -> Self {
        let mut what = format!("{since}");
        for (name, said) in varied {
            let said = said.as_deref().map_or("-".into(), |said| format!("{}:{said}", said.len()));
            what.push_str(&format!("\n{name} {said}"));
        }
        Self::with(target, &what)
    }

    fn with(target: &str, variant: &str) -> Self {
        let path = target.split('?').next().unwrap_or_default();
        let mut parts: Vec<String> = path.split('/').skip(1).map(part).collect();
        let last = parts.pop().unwrap_or_default();
        let mut dir = PoolPath::root();
        if parts.len() <= PARTS_MAX {
            for part in parts {
                dir = dir.join(part.as_bytes());
            }
        }
        Self { dir, name: format!("{last}@{}", hash(&[target, variant])) }
    }

    pub fn path(&self) -> PoolPath {
        self.dir.join(self.name.as_bytes())
    }
}

/// Returns a part of a URL's path as a file name.
fn part(part: &str) -> String {
    match part {
        "" => "%".to_owned(),
        // Neither a name of the file system's own nor of the engine's.
        _ if part.starts_with('.') || part.starts_with(TEMPORARY) => format!("%{part}"),
        _ if part.len() > PART_MAX => format!("%%{}", hash(&[part])),
        _ => part.to_owned(),
    }
}

fn hash(texts: &[&str]) -> String {
    let mut sha = Sha256::new();
    for text in texts {
        sha.update((text.len() as u64).to_le_bytes());
        sha.update(text);
    }
    sha.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The open body of a response.
pub struct StoredBody {
    pub file: ServedFile,
    pub length: u64,
    mapped: OnceLock<Option<Mapped>>,
}

impl MappedOwner for StoredBody {
    fn mapped(&self) -> Option<&Mapped> {
        self.mapped.get_or_init(|| lendable(&self.file)).as_ref()
    }
}

/// A response on the fast pool.
pub struct Stored {
    pub place: Place,
    pub head: Head,
    pub fresh: Freshness,
    pub body: Arc<StoredBody>,
    used: Mutex<Instant>,
}

/// A response that is being written.
pub struct Unfinished {
    pub place: Place,
    file: NewFile,
    written: Mutex<u64>,
    sum: Mutex<XxHash3_64>,
}

struct OpenResponses {
    by_place: LruCache<Place, Arc<Stored>>,
    bytes: u64,
}

impl OpenResponses {
    fn take(&mut self, place: &Place) -> Option<Arc<Stored>> {
        let stored = self.by_place.pop(place)?;
        self.bytes -= stored.body.file.size;
        Some(stored)
    }

    fn take_oldest(&mut self) -> Option<Arc<Stored>> {
        let (_, stored) = self.by_place.pop_lru()?;
        self.bytes -= stored.body.file.size;
        Some(stored)
    }
}

/// All responses of one origin.
pub struct ResponseStore {
    overlay: Overlay,
    options: FreshnessOptions,
    open: Mutex<OpenResponses>,
    boot: String,
}

impl ResponseStore {
    pub fn new(overlay: Overlay, options: FreshnessOptions) -> Self {
        let open = Mutex::new(OpenResponses { by_place: LruCache::unbounded(), bytes: 0 });
        Self { overlay, options, open, boot: boot_id() }
    }

    pub fn options(&self) -> &FreshnessOptions {
        &self.options
    }

    /// The largest body that is kept, in bytes.
    pub fn largest(&self) -> u64 {
        self.overlay.fast_pool().budget.limit() / LARGEST_SHARE
    }

    /// Returns where the response to a request is kept, and the response if there is one.
    pub async fn find(&self, target: &str, request: &HeaderMap) -> (Place, Option<Arc<Stored>>) {
        let place = Place::of(target);
        let Some(found) = self.open(&place).await else { return (place, None) };
        let Some(since) = found.head.marks else { return (place, Some(found)) };
        let varied: Vec<_> = found.head.varied.iter().map(|(name, _)| (name.clone(), said_of(request, name))).collect();
        let place = Place::of_variant(target, since, &varied);
        let found = self.open(&place).await.filter(|stored| stored.head.marks.is_none());
        (place, found)
    }

    /// Returns where a response is to be kept. If it varies, the URL's file tells so from now on.
    ///
    /// # Errors
    /// Those of [`Overlay::make_file`].
    pub async fn place_for(&self, target: &str, varied: &[(HeaderName, Option<String>)]) -> Result<Place> {
        let place = Place::of(target);
        if varied.is_empty() {
            return Ok(place);
        }
        let by = |head: &Head| head.varied.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let names: Vec<HeaderName> = varied.iter().map(|(name, _)| name.clone()).collect();
        if let Some(found) = self.open(&place).await
            && let Some(since) = found.head.marks
            && by(&found.head) == names
        {
            return Ok(Place::of_variant(target, since, varied));
        }
        let since = rand::random();
        let (parts, ()) = http::Response::new(()).into_parts();
        let names = names.into_iter().map(|name| (name, None)).collect();
        let head = Head { marks: Some(since), ..Head::new(&parts, names, SystemTime::now()) };
        self.begin(place).await?.finish(self, head).await?;
        Ok(Place::of_variant(target, since, varied))
    }

    /// Begins to write a response.
    ///
    /// # Errors
    /// Those of [`Overlay::make_file`].
    pub async fn begin(&self, place: Place) -> Result<Unfinished> {
        let temporary = format!("{TEMPORARY}{:032x}", rand::random::<u128>());
        let file = self.overlay.make_file(&place.dir, temporary.as_bytes()).await?;
        Ok(Unfinished { place, file, written: Mutex::new(0), sum: Mutex::new(XxHash3_64::new()) })
    }

    /// Keeps the new head of a response that the origin has confirmed.
    pub async fn confirm(&self, stored: &Stored, head: Head) -> Arc<Stored> {
        let body = &stored.body;
        let tail = head.tail(body.length, body.file.size - body.length);
        if let Err(e) = body.file.rewrite(body.length, tail.into()).await {
            tracing::debug!("{}: the head is only in memory: {e}", stored.place.name);
        }
        let fresh = Freshness::of(&head, &self.options);
        let used = Mutex::new(Instant::now());
        self.keep(Stored { place: stored.place.clone(), head, fresh, body: body.clone(), used })
    }

    /// Removes what is kept for a URL.
    pub async fn invalidate(&self, target: &str) {
        let place = Place::of(target);
        self.forget(&place);
        if let Err(e) = self.overlay.remove_file(&place.path()).await {
            tracing::warn!("{}: not removed: {e}", place.name);
        }
    }

    /// Removes what is kept for a URL's path, whatever its query, and for all below it. Returns the number of responses.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn purge(&self, path: &str) -> Result<u64> {
        let place = Place::of(path);
        let closed: Vec<_> = {
            let mut open = self.open.lock();
            let all: Vec<Place> = open.by_place.iter().map(|(place, _)| place.clone()).collect();
            all.iter().filter_map(|place| open.take(place)).collect()
        };
        drop(closed);
        if path == "/" {
            return self.overlay.remove_below(&PoolPath::root(), |_| true).await;
        }
        let last = place.name.rsplit_once('@').map_or("", |(last, _)| last).to_owned();
        let directory = match path.ends_with('/') {
            true => place.dir.clone(),
            false => place.dir.join(last.as_bytes()),
        };
        let below = self.overlay.remove_below(&directory, |_| true).await?;
        let own = move |name: &[u8]| name.strip_prefix(last.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'@'));
        Ok(below + self.overlay.remove_in(&place.dir, own).await?)
    }

    /// Removes responses that did not come to their end before the last start.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn remove_unfinished(&self) -> Result<u64> {
        self.overlay.remove_below(&PoolPath::root(), |name| name.starts_with(TEMPORARY.as_bytes())).await
    }

    /// Closes responses that were not used for a while.
    pub fn tidy(&self, now: Instant) {
        let mut closed = Vec::new();
        let mut open = self.open.lock();
        let is_idle = |stored: &Arc<Stored>| now.saturating_duration_since(*stored.used.lock()) >= IDLE;
        while open.by_place.peek_lru().is_some_and(|(_, stored)| is_idle(stored)) {
            closed.extend(open.take_oldest());
        }
        // What a close does must not happen under the lock.
        drop(open);
    }

    fn forget(&self, place: &Place) {
        let gone = self.open.lock().take(place);
        drop(gone);
    }

    fn keep(&self, stored: Stored) -> Arc<Stored> {
        let stored = Arc::new(stored);
        let mut closed = Vec::new();
        let mut open = self.open.lock();
        closed.extend(open.take(&stored.place));
        let bytes_max = self.overlay.fast_pool().budget.limit() / OPEN_SHARE;
        if stored.body.file.size <= bytes_max {
            open.bytes += stored.body.file.size;
            open.by_place.put(stored.place.clone(), stored.clone());
        }
        while open.by_place.len() > OPEN_MAX || open.bytes > bytes_max {
            let Some(oldest) = open.take_oldest() else { break };
            closed.push(oldest);
        }
        drop(open);
        stored
    }

    async fn open(&self, place: &Place) -> Option<Arc<Stored>> {
        if let Some(stored) = self.open.lock().by_place.get(place) {
            *stored.used.lock() = Instant::now();
            return Some(stored.clone());
        }
        match self.read(place).await {
            Ok(Some(stored)) => Some(self.keep(stored)),
            Ok(None) => None,
            Err(e) => {
                tracing::warn!("{}: not used: {e}", place.name);
                None
            }
        }
    }

    /// Reads a response; `None` if there is none, or not all of it.
    async fn read(&self, place: &Place) -> Result<Option<Stored>> {
        let Some(file) = self.overlay.open_resident(&place.path()).await? else { return Ok(None) };
        let foot = Head::foot(file.size);
        let foot = file.read(foot.start, (foot.end - foot.start) as u32).await?;
        let Some(range) = Head::of_foot(&foot, file.size) else { return Ok(None) };
        let json = file.read(range.start, (range.end - range.start) as u32).await?;
        let Some(head) = Head::parse(&json) else { return Ok(None) };
        // Content that was not synced before a power cut may be anything.
        if head.boot != self.boot && checksum(&file, range.start).await? != head.sum {
            return Ok(None);
        }
        let fresh = Freshness::of(&head, &self.options);
        let body = Arc::new(StoredBody { file, length: range.start, mapped: OnceLock::new() });
        Ok(Some(Stored { place: place.clone(), head, fresh, body, used: Mutex::new(Instant::now()) }))
    }
}

async fn checksum(file: &ServedFile, length: u64) -> Result<u64> {
    let (mut sum, mut at) = (XxHash3_64::new(), 0);
    while at < length {
        let piece = file.read(at, (length - at).min(PIECE_BYTES.into()) as u32).await?;
        if piece.is_empty() {
            break;
        }
        sum.write(&piece);
        at += piece.len() as u64;
    }
    Ok(sum.finish())
}

impl Unfinished {
    /// Appends a piece of the body. Returns the length of all.
    ///
    /// # Errors
    /// `NoSpace`, errors of the device.
    pub async fn append(&self, piece: Bytes) -> Result<u64> {
        let at = *self.written.lock();
        self.sum.lock().write(&piece);
        let written = at + piece.len() as u64;
        self.file.write(at, piece).await?;
        *self.written.lock() = written;
        Ok(written)
    }

    /// Reads a part of the body that was written.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn read(&self, offset: u64, len: u32) -> Result<Bytes> {
        self.file.read(offset, len).await
    }

    /// Ends the response: from now on, it is found. Returns it, if it is still resident.
    ///
    /// # Errors
    /// `NoSpace`, errors of the device.
    pub async fn finish(&self, store: &ResponseStore, head: Head) -> Result<Option<Arc<Stored>>> {
        let length = *self.written.lock();
        let head = Head { sum: self.sum.lock().finish(), ..head };
        self.file.write(length, head.tail(length, 0).into()).await?;
        self.file.publish(self.place.name.as_bytes()).await?;
        store.forget(&self.place);
        Ok(store.open(&self.place).await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_like_the_path_and_no_other_url_has_it() {
        let of = |target: &str| {
            let place = Place::of(target);
            (place.dir.to_string(), place.name.split('@').next().unwrap().to_owned())
        };
        assert_eq!(of("/a/b?x=1"), ("/a".into(), "b".into()));
        assert_eq!(of("/a/"), ("/a".into(), "%".into()));
        assert_eq!(of("/"), (PoolPath::root().to_string(), "%".into()));
        assert_eq!(of("/../.forebay~x/c"), ("/%../%.forebay~x".into(), "c".into()));
        assert_eq!(of("/a//b").0, "/a/%");
        let long = format!("/{}", "x".repeat(300));
        assert!(Place::of(&long).name.len() < 255 && Place::of(&format!("{long}/y")).dir != Place::of("/y").dir);
        let targets = ["/a", "/a?", "/a?x", "/a/", "/b", "/%2e", "/.", "/a//b", "/a/b"];
        let names: std::collections::HashSet<String> = targets.iter().map(|target| Place::of(target).name).collect();
        assert_eq!(names.len(), targets.len());
    }

    #[test]
    fn variants_differ_by_what_the_request_said() {
        let accept = |said: Option<&str>| vec![(http::header::ACCEPT, said.map(str::to_owned))];
        let places = [None, Some(""), Some("a"), Some("a,b")].map(|said| Place::of_variant("/x", 1, &accept(said)));
        let names: std::collections::HashSet<&str> = places.iter().map(|place| &*place.name).collect();
        assert_eq!(names.len(), 4);
        assert_ne!(Place::of_variant("/x", 2, &accept(None)), places[0]);
    }
}
