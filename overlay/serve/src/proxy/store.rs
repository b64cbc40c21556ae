//! Responses on the fast pool. Each is a file: the body, then the head.
//!
//! The files lie in directories like the paths of their URLs, so that one part of a site can be purged, and is seen on the
//! page. A name ends in a space and the hash of the whole URL. No part of a URL has a space, so no directory has such a name.
//!
//! If responses of a URL vary by headers of the request, the file of the URL only tells by which ones, and the responses are
//! beside it. Their hashes include what the request said, and the time at which the first of them came: if the URL's file is
//! removed, none of them is found again.

use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use forebay_backends::{PoolPath, Result};
use forebay_engine::{NewFile, Overlay, ServedFile};
use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::{RwLock, Semaphore};
use twox_hash::XxHash3_64;

use super::freshness::{Freshness, FreshnessOptions};
use super::head::{ResponseHead, boot_id, said_of};
use super::tail::TAILS_MAX;
use crate::access::hex;
use crate::content::lendable;
use crate::kept_open::KeptOpen;
use crate::transport::{Mapped, MappedOwner};

/// The largest response that is kept, as a share of the fast pool.
const LARGEST_SHARE: u64 = 4;
/// Longer parts of a path are replaced by their hash: a name has 255 bytes, and the hash needs some.
const PART_MAX: usize = 200;
/// Deeper directories are left out: what would be in them is in the last one.
const PARTS_MAX: usize = 16;
/// Names of responses that have not come to their end begin with this, and with a number of their process.
const TEMPORARY: &str = " +";
/// The share of the fast pool that responses may take that are still coming.
const COMING_SHARE: u64 = 2;
/// What a response without a length counts for among them, in bytes.
const UNKNOWN_BYTES: u64 = 16 << 20;
/// One read of a body whose checksum is computed.
const PIECE_BYTES: u32 = 256 << 10;

/// Where a response is kept.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ResponsePlace {
    pub dir: PoolPath,
    pub name: String,
}

impl ResponsePlace {
    /// Of a URL's path and query.
    pub fn of(target: &str) -> Self {
        Self::with(target, "")
    }

    /// Of the response to a request that says these things, since the first response that varied came.
    pub fn of_variant(target: &str, since: u64, varied: &[(HeaderName, Option<String>)]) -> Self {
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
        for part in parts.iter().take(PARTS_MAX) {
            dir = dir.join(part.as_bytes());
        }
        Self { dir, name: format!("{last} {}", hash(&[target, variant])) }
    }

    pub fn path(&self) -> PoolPath {
        self.dir.join(self.name.as_bytes())
    }
}

/// Returns a part of a URL's path as a file name. What is changed begins with a space, which no URL has.
fn part(part: &str) -> String {
    match part {
        // Neither a name of the file system's own nor of the engine's.
        _ if part.is_empty() || part.starts_with('.') => format!(" {part}"),
        _ if part.len() > PART_MAX => format!("  {}", hash(&[part])),
        _ => part.to_owned(),
    }
}

fn hash(texts: &[&str]) -> String {
    let mut sha = Sha256::new();
    for text in texts {
        sha.update((text.len() as u64).to_le_bytes());
        sha.update(text);
    }
    hex(&sha.finalize()[..16])
}

/// The open body of a response.
pub struct StoredBody {
    pub file: ServedFile,
    pub length: u64,
    /// Bytes after the body.
    tail: AtomicU64,
    mapped: OnceLock<Option<Mapped>>,
}

impl MappedOwner for StoredBody {
    fn mapped(&self) -> Option<&Mapped> {
        self.mapped.get_or_init(|| lendable(&self.file)).as_ref()
    }
}

/// A response on the fast pool.
pub struct Stored {
    pub place: ResponsePlace,
    pub head: ResponseHead,
    pub fresh: Freshness,
    pub body: Arc<StoredBody>,
}

/// A response that is being written.
pub struct Unfinished {
    pub place: ResponsePlace,
    file: NewFile,
    written: Mutex<WrittenBody>,
    /// Until the file is closed: a response that is whole holds none of the room for those that are coming, however slowly
    /// clients read it.
    _room: Option<ComingRoom>,
}

/// What has been written of a body.
#[derive(Default)]
struct WrittenBody {
    bytes: u64,
    sum: XxHash3_64,
}

struct OpenResponses {
    by_place: KeptOpen<ResponsePlace, Arc<Stored>>,
    /// Grows when responses are removed: what was read before is not kept open.
    removals: u64,
}

/// Room for a response that is coming.
pub struct ComingRoom {
    all: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for ComingRoom {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// All responses of one origin.
pub struct ResponseStore {
    overlay: Overlay,
    options: FreshnessOptions,
    open: Mutex<OpenResponses>,
    /// Bytes of responses that are coming.
    coming: Arc<AtomicU64>,
    /// For responses that are passed on: the memory is bounded.
    tails: Arc<Semaphore>,
    /// Held to read from the look whether a response is outdated until it is found by its name. A removal that a client asked for
    /// waits for that: it removes what was found to be current before.
    publishing: RwLock<()>,
    boot: String,
    /// Of this process.
    temporary: String,
}

impl ResponseStore {
    pub fn new(overlay: Overlay, options: FreshnessOptions) -> Self {
        let by_place = KeptOpen::new(overlay.fast_pool().budget.limit());
        let open = Mutex::new(OpenResponses { by_place, removals: 0 });
        let temporary = format!("{TEMPORARY}{:016x}-", rand::random::<u64>());
        let tails = Arc::new(Semaphore::new(TAILS_MAX));
        let (coming, publishing) = (Arc::default(), RwLock::default());
        Self { overlay, options, open, coming, tails, publishing, boot: boot_id(), temporary }
    }

    pub fn options(&self) -> &FreshnessOptions {
        &self.options
    }

    /// The largest body that is kept, in bytes.
    pub fn largest(&self) -> u64 {
        self.overlay.fast_pool().budget.limit() / LARGEST_SHARE
    }

    /// The semaphore of responses that are passed on.
    pub fn tails(&self) -> Arc<Semaphore> {
        self.tails.clone()
    }

    /// Returns where the response to a request with these headers is kept, and the response if there is one.
    pub async fn find(&self, target: &str, headers: &HeaderMap) -> (ResponsePlace, Option<Arc<Stored>>) {
        self.find_for(target, || headers).await
    }

    /// The same. The headers are needed only if responses of the URL vary.
    pub async fn find_for<'a>(
        &self,
        target: &str,
        headers: impl FnOnce() -> &'a HeaderMap,
    ) -> (ResponsePlace, Option<Arc<Stored>>) {
        let place = ResponsePlace::of(target);
        let Some(found) = self.open(&place).await else { return (place, None) };
        let Some(since) = found.head.marks else { return (place, Some(found)) };
        let headers = headers();
        let varied: Vec<_> = found.head.varied.iter().map(|(name, _)| (name.clone(), said_of(headers, name))).collect();
        let place = ResponsePlace::of_variant(target, since, &varied);
        let found = self.open(&place).await.filter(|stored| stored.head.marks.is_none());
        (place, found)
    }

    /// Returns room for a response of this length; `None` if it is too large, or others take the room.
    pub fn room_for(&self, length: Option<u64>) -> Option<ComingRoom> {
        let bytes = length.unwrap_or(UNKNOWN_BYTES);
        if length.is_some_and(|length| length > self.largest()) {
            return None;
        }
        let room = ComingRoom { all: self.coming.clone(), bytes };
        let before = self.coming.fetch_add(bytes, Ordering::Relaxed);
        (before.saturating_add(bytes) <= self.overlay.fast_pool().budget.limit() / COMING_SHARE).then_some(room)
    }

    /// Returns the headers that responses of a URL vary by, if it is known that they do.
    pub async fn varies_by(&self, target: &str) -> Option<(Vec<HeaderName>, u64)> {
        let found = self.open(&ResponsePlace::of(target)).await?;
        let since = found.head.marks?;
        Some((found.head.varied.iter().map(|(name, _)| name.clone()).collect(), since))
    }

    /// Notes that responses of a URL vary by these headers of the request from now on.
    ///
    /// # Errors
    /// Those of [`Overlay::make_file`].
    pub async fn mark(&self, target: &str, names: &[HeaderName], since: u64) -> Result<()> {
        let (parts, ()) = http::Response::new(()).into_parts();
        let varied = names.iter().map(|name| (name.clone(), None)).collect();
        let head = ResponseHead { marks: Some(since), ..ResponseHead::new(&parts, varied, SystemTime::now()) };
        let removals = self.removals();
        self.begin(ResponsePlace::of(target), None).await?.finish(self, head, removals, || false).await?;
        Ok(())
    }

    /// Begins to write a response. `room`: for its body, if it has one.
    ///
    /// # Errors
    /// Those of [`Overlay::make_file`].
    pub async fn begin(&self, place: ResponsePlace, room: Option<ComingRoom>) -> Result<Unfinished> {
        let temporary = format!("{}{:032x}", self.temporary, rand::random::<u128>());
        let file = self.overlay.make_file(&place.dir, temporary.as_bytes()).await?;
        Ok(Unfinished { place, file, written: Mutex::default(), _room: room })
    }

    /// Returns a response that the origin has confirmed, with its new head. It is kept, unless it is outdated.
    pub async fn confirm(
        &self,
        stored: &Stored,
        head: ResponseHead,
        is_outdated: impl Fn() -> bool + Send,
    ) -> Arc<Stored> {
        let _publishing = self.publishing.read().await;
        // Before the look whether it is outdated, as in `Unfinished::finish`.
        let removals = self.removals();
        let is_kept = !is_outdated();
        if is_kept {
            stored.body.write_head(&head).await;
        }
        let fresh = Freshness::of(&head, &self.options);
        let stored = Stored { place: stored.place.clone(), head, fresh, body: stored.body.clone() };
        let stored = Arc::new(stored);
        if is_kept {
            self.keep(stored.clone(), removals);
        }
        stored
    }

    /// Waits until no response is published that was found to be current before now.
    async fn until_published(&self) {
        drop(self.publishing.write().await);
    }

    /// Removes what is kept for a URL. The flights for it are outdated.
    pub async fn invalidate(&self, target: &str) {
        self.until_published().await;
        self.remove(&ResponsePlace::of(target)).await;
    }

    pub async fn remove(&self, place: &ResponsePlace) {
        self.close(|open| open == place);
        if let Err(e) = self.overlay.remove_file(&place.path()).await {
            tracing::warn!("{}: not removed: {e}", place.name);
        }
        self.close(|open| open == place);
    }

    /// Removes what is kept for a URL's path, whatever its query, and for all below it. The flights for it are outdated.
    /// Returns the number of responses.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn purge(&self, path: &str) -> Result<u64> {
        self.until_published().await;
        self.close(|_| true);
        let removed = self.remove_path(path).await;
        self.close(|_| true);
        removed
    }

    async fn remove_path(&self, path: &str) -> Result<u64> {
        if path == "/" {
            return self.overlay.remove_below(&PoolPath::root(), |_| true).await;
        }
        let place = ResponsePlace::of(path);
        let last = place.name.rsplit_once(' ').map_or("", |(last, _)| last).to_owned();
        // What is below a path of so many directories is in the same directory as responses beside it.
        let is_last = place.dir.components().count() == PARTS_MAX;
        let directory = match path.ends_with('/') || is_last {
            true => place.dir.clone(),
            false => place.dir.join(last.as_bytes()),
        };
        let below = self.overlay.remove_below(&directory, |_| true).await?;
        let own = move |name: &[u8]| name.strip_prefix(last.as_bytes()).is_some_and(|rest| rest.first() == Some(&b' '));
        Ok(below + self.overlay.remove_in(&place.dir, own).await?)
    }

    /// Closes responses, and lets none of them stay open that was read before.
    fn close(&self, goes: impl Fn(&ResponsePlace) -> bool) {
        let mut open = self.open.lock();
        open.removals += 1;
        let closed = open.by_place.take_all(goes);
        drop(open);
        // What a close does must not happen under the lock.
        drop(closed);
    }

    /// Removes responses that did not come to their end before the last start.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn remove_unfinished(&self) -> Result<u64> {
        let is_old =
            |name: &[u8]| name.starts_with(TEMPORARY.as_bytes()) && !name.starts_with(self.temporary.as_bytes());
        self.overlay.remove_below(&PoolPath::root(), is_old).await
    }

    /// Closes responses that were not used for a while.
    pub fn tidy(&self, now: Instant) {
        let closed = self.open.lock().by_place.take_idle(now);
        drop(closed);
    }

    /// Returns the number of removals until now.
    pub fn removals(&self) -> u64 {
        self.open.lock().removals
    }

    /// Keeps a response open, unless responses were removed since then. A response that came later stays.
    /// Returns the one that stays.
    fn keep(&self, stored: Arc<Stored>, removals: u64) -> Arc<Stored> {
        let mut open = self.open.lock();
        if open.removals != removals {
            return stored;
        }
        if let Some(kept) = open.by_place.peek(&stored.place).filter(|kept| kept.head.received > stored.head.received) {
            return kept.clone();
        }
        let closed = open.by_place.put(stored.place.clone(), stored.clone(), stored.body.file.size);
        drop(open);
        drop(closed);
        stored
    }

    async fn open(&self, place: &ResponsePlace) -> Option<Arc<Stored>> {
        let removals = {
            let mut open = self.open.lock();
            if let Some(stored) = open.by_place.get(place) {
                return Some(stored.clone());
            }
            open.removals
        };
        match self.read(place).await {
            Ok(Some(stored)) => Some(self.keep(Arc::new(stored), removals)),
            Ok(None) => None,
            Err(e) => {
                tracing::warn!("{}: not used: {e}", place.name);
                None
            }
        }
    }

    /// Reads a response; `None` if there is none, or not all of it.
    async fn read(&self, place: &ResponsePlace) -> Result<Option<Stored>> {
        match self.overlay.open_resident(&place.path()).await? {
            Some(file) => self.read_file(place, file).await,
            None => Ok(None),
        }
    }

    async fn read_file(&self, place: &ResponsePlace, file: ServedFile) -> Result<Option<Stored>> {
        let foot = ResponseHead::foot(file.size);
        let foot = file.read(foot.start, (foot.end - foot.start) as u32).await?;
        let Some(range) = ResponseHead::of_foot(&foot, file.size) else { return Ok(None) };
        let json = file.read(range.start, (range.end - range.start) as u32).await?;
        let Some(mut head) = ResponseHead::parse(&json) else { return Ok(None) };
        let tail = AtomicU64::new(file.size - range.start);
        let body = Arc::new(StoredBody { file, length: range.start, tail, mapped: OnceLock::new() });
        // Content that was not synced before a power cut may be anything.
        if head.boot != self.boot {
            if checksum(&body.file, body.length).await? != head.sum {
                return Ok(None);
            }
            head.boot.clone_from(&self.boot);
            body.write_head(&head).await;
        }
        let fresh = Freshness::of(&head, &self.options);
        Ok(Some(Stored { place: place.clone(), head, fresh, body }))
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

impl StoredBody {
    /// Writes the head again, after the body.
    async fn write_head(&self, head: &ResponseHead) {
        let tail = head.tail(self.length, self.tail.load(Ordering::Relaxed));
        let bytes = tail.len() as u64;
        match self.file.rewrite(self.length, tail.into()).await {
            Ok(()) => self.tail.store(bytes, Ordering::Relaxed),
            Err(e) => tracing::debug!("the head of a response is only in memory: {e}"),
        }
    }
}

impl Unfinished {
    /// Appends a piece of the body. Returns the length of all.
    ///
    /// # Errors
    /// `NoSpace`, errors of the device.
    pub async fn append(&self, piece: Bytes) -> Result<u64> {
        let at = self.written.lock().bytes;
        self.file.write(at, piece.clone()).await?;
        let mut written = self.written.lock();
        written.sum.write(&piece);
        written.bytes = at + piece.len() as u64;
        Ok(written.bytes)
    }

    /// Reads a part of the body that was written.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn read(&self, offset: u64, len: u32) -> Result<Bytes> {
        self.file.read(offset, len).await
    }

    /// Ends the response: from now on, it is found. Returns it, if it is still resident. `removals`: those of the store
    /// before it was known that the response is not outdated.
    ///
    /// # Errors
    /// `NoSpace`, errors of the device.
    pub async fn finish(
        &self,
        store: &ResponseStore,
        head: ResponseHead,
        removals: u64,
        is_outdated: impl Fn() -> bool + Send,
    ) -> Result<Option<Arc<Stored>>> {
        let (length, sum) = {
            let written = self.written.lock();
            (written.bytes, written.sum.finish())
        };
        let head = ResponseHead { sum, ..head };
        self.file.write(length, head.tail(length, 0).into()).await?;
        {
            let _publishing = store.publishing.read().await;
            if is_outdated() {
                return Ok(None);
            }
            self.file.publish(self.place.name.as_bytes()).await?;
        }
        // Another response may have taken the name meanwhile: this is about the one that was written.
        let file = self.file.reopen().await?;
        let Some(stored) = store.read_file(&self.place, file).await?.map(Arc::new) else { return Ok(None) };
        store.keep(stored.clone(), removals);
        Ok(Some(stored))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_like_the_path_and_no_other_url_has_it() {
        let of = |target: &str| {
            let place = ResponsePlace::of(target);
            (place.dir.to_string(), place.name.rsplit_once(' ').unwrap().0.to_owned())
        };
        assert_eq!(of("/a/b?x=1"), ("/a".into(), "b".into()));
        assert_eq!(of("/a/"), ("/a".into(), " ".into()));
        assert_eq!(of("/"), (PoolPath::root().to_string(), " ".into()));
        assert_eq!(of("/.well-known/.forebay~x/c"), ("/ .well-known/ .forebay~x".into(), "c".into()));
        assert_eq!(of("/a//b").0, "/a/ ");
        assert_eq!(of(&format!("{}/x", "/a".repeat(100))).0, "/a".repeat(PARTS_MAX));
        let long = format!("/{}", "x".repeat(300));
        assert!(
            ResponsePlace::of(&long).name.len() < 255
                && ResponsePlace::of(&format!("{long}/y")).dir != ResponsePlace::of("/y").dir
        );
        let targets = ["/a", "/a?", "/a?x", "/a/", "/b", "/%2e", "/.", "/a//b", "/a/b"];
        let names: std::collections::HashSet<String> =
            targets.iter().map(|target| ResponsePlace::of(target).name).collect();
        assert_eq!(names.len(), targets.len());
    }

    #[test]
    fn variants_differ_by_what_the_request_said() {
        let accept = |said: Option<&str>| vec![(http::header::ACCEPT, said.map(str::to_owned))];
        let places =
            [None, Some(""), Some("a"), Some("a,b")].map(|said| ResponsePlace::of_variant("/x", 1, &accept(said)));
        let names: std::collections::HashSet<&str> = places.iter().map(|place| &*place.name).collect();
        assert_eq!(names.len(), 4);
        assert_ne!(ResponsePlace::of_variant("/x", 2, &accept(None)), places[0]);
    }
}
