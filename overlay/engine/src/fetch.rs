//! Fetches bytes of the pool into content files: each chunk once for all of its readers (single flight), within one
//! budget of memory and one of space.

mod bandwidth_estimator;
mod demand_priority;
mod listed;
mod placement;
mod request;
mod unusable;

use std::collections::VecDeque;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use forebay_backends::decorators::Rate;
use forebay_backends::{Error, ErrorKind, PoolPath, Result, Side, Stripe, Version};
use forebay_cache::{CHUNK_BYTES, Content, ContentId, SpaceReservation};
use forebay_catalog::ContentRecord;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use tokio::sync::watch;

use super::coherence::Age;
use super::pool_calls::OWN_CHANGES;
use super::{Inner, Ino, Txn};
use crate::contents::failed;
use crate::inode_change::InodeChange;
use crate::node::{Flight, Node};
pub(crate) use bandwidth_estimator::BandwidthEstimator;
pub(crate) use demand_priority::DemandPriority;
use request::{Chunk, FetchRequest};

/// Requests that one reader or stager may have in flight.
const REQUESTS_AT_ONCE: usize = 16;
/// The same for a file that is striped over more targets than that.
const MOST_AT_ONCE: usize = 32;
/// How often a file is fetched again because it changed in the pool meanwhile.
const ATTEMPTS: u32 = 3;
/// The longest request to a striped file.
const STRIPE_REQUEST_BYTES: u64 = 4 << 20;

/// What orders the requests of a fetch.
#[derive(Debug, Default)]
pub(crate) struct Fetcher {
    pub bandwidth: BandwidthEstimator,
    pub demand: DemandPriority,
}

/// How urgent a fetch is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FetchPriority<'a> {
    /// A reader waits for it.
    Demand,
    /// No reader has requested it yet. Readers go first, between any two requests; and it is no faster than the rate.
    Ahead(Option<&'a Rate>),
}

impl Inner {
    /// Fetches from the version that the pool has since `since`, by `attempt`, which gets the size of the file. If the
    /// pool's copy changes meanwhile, it is called again. Returns `None` if it changes each time, or if each attempt
    /// returns `None`.
    pub async fn fetch_current<T, F>(
        self: &Arc<Self>,
        ino: Ino,
        since: Instant,
        attempt: impl Fn(u64) -> F,
    ) -> Result<Option<T>>
    where
        F: Future<Output = Result<Option<T>>>,
    {
        let node = self.node(ino)?;
        for _ in 0..ATTEMPTS {
            self.revalidate(ino, Age::Since(since)).await?;
            let size = self.attr_of(&node)?.size;
            match attempt(size).await {
                Err(e) if e.is(ErrorKind::Stale) => self.revalidate(ino, Age::Now).await?,
                Ok(None) => {}
                other => return other,
            }
        }
        Ok(None)
    }

    /// Makes a range of a file resident. An empty range makes an empty file whole.
    ///
    /// # Errors
    /// `NoSpace` if the fast pool has no room, `TooLarge` from 4 PiB of a file on, `Stale` if the pool's copy is gone or has
    /// another version by now, and all other errors of the pool.
    pub async fn ensure(
        self: &Arc<Self>,
        node: &Arc<Node>,
        range: Range<u64>,
        priority: FetchPriority<'_>,
    ) -> Result<()> {
        if range.is_empty() {
            return self.complete_empty(node);
        }
        match priority {
            FetchPriority::Demand => {
                let _reading = self.fetcher.demand.read();
                self.fetch_now(node, range).await
            }
            FetchPriority::Ahead(rate) => self.fetch_behind_readers(node, range, rate).await,
        }
    }

    fn fetch_behind_readers<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        range: Range<u64>,
        rate: Option<&'a Rate>,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            // A sparse file that is resident may have more pieces than can be looked at.
            if self.missing_bytes(node, range.clone())? == 0 {
                return Ok(());
            }
            let stripe = self.stripe_of(node).await;
            let mut at = range.start;
            let pieces = std::iter::from_fn(|| {
                let from = at;
                at = range.end.min(self.request_end(stripe, from));
                (from < at).then_some(from..at)
            });
            let bring = |piece: Range<u64>| async {
                let missing = self.missing_bytes(node, piece.clone())?;
                if missing == 0 {
                    return Ok(());
                }
                if let Some(rate) = rate {
                    rate.pass_in_turn(missing).await;
                }
                let _turn = self.fetcher.demand.ahead().await;
                self.fetch_now(node, piece).await
            };
            stream::iter(pieces.map(bring)).buffer_unordered(requests_at_once(stripe)).try_collect().await
        }
        .boxed()
    }

    async fn fetch_now(self: &Arc<Self>, node: &Arc<Node>, range: Range<u64>) -> Result<()> {
        let mut left = OWN_CHANGES;
        loop {
            self.end_abandoned_write_through(node).await.map_err(|e| self.no_longer_there(node, e))?;
            let known = self.known(node);
            match self.fetch_as_known(node, range.clone()).await {
                Err(e) if self.ask_again(node, &known, &e, &mut left).await => {}
                other => return other.map_err(|e| self.no_longer_there(node, e)),
            }
        }
    }

    /// Fetches a range, for a caller that holds the flush lock, so that no call of this daemon changes the pool's copy
    /// meanwhile.
    pub fn fetch_as_known<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            self.leave_unusable(node)?;
            let stripe = self.stripe_of(node).await;
            let at_once = requests_at_once(stripe);
            let mut under_way = VecDeque::new();
            let mut at = range.start;
            loop {
                while at < range.end && under_way.len() < at_once {
                    let end = range.end.min(self.request_end(stripe, at));
                    let flights = self.begin_fetch(node, at..end)?;
                    if !flights.is_empty() {
                        under_way.push_back(flights);
                    }
                    at = end;
                }
                let Some(flights) = under_way.pop_front() else { return Ok(()) };
                for mut flight in flights {
                    let landed = flight.wait_for(Option::is_some).await.map_err(|_| lost())?;
                    if let Some(Err(e)) = &*landed {
                        return Err(Error::new(e.kind(), e.side(), e.to_string()));
                    }
                }
            }
        }
        .boxed()
    }

    async fn stripe_of(&self, node: &Node) -> Option<Stripe> {
        self.layout_of(node).await?.stripe
    }

    /// Returns where a request that begins at `at` ends, if the file is long enough.
    fn request_end(&self, stripe: Option<Stripe>, at: u64) -> u64 {
        let bytes = stripe.map_or_else(|| self.request_bytes(), in_stripe);
        (at / bytes + 1).saturating_mul(bytes)
    }

    /// Returns the length of one request: whole chunks.
    pub fn request_bytes(&self) -> u64 {
        if self.pool.capabilities().streams { self.fetcher.bandwidth.request_bytes() } else { CHUNK_BYTES }
    }

    /// Requests the chunks of a range that are neither resident nor in flight. Returns the flights to wait for.
    fn begin_fetch(self: &Arc<Self>, node: &Arc<Node>, range: Range<u64>) -> Result<Vec<Flight>> {
        if node.is_written_through() || node.is_spilled() {
            let what = format!("{}: it does not fit into the fast pool", self.display(node.ino));
            return Err(Error::new(ErrorKind::NoSpace, Side::Cache, what));
        }
        // Before the inode is locked, because this locks inodes, too.
        let path = match self.pool_path(node.ino) {
            Ok(path) => path,
            Err(_) if node.state.lock().record.file.is_whole() => return Ok(Vec::new()),
            Err(e) => return Err(e),
        };
        let (flights, requests) = self.plan(node, range, &path)?;
        for request in requests {
            let (inner, node) = (self.clone(), node.clone());
            tokio::spawn(async move { inner.answer(&node, request).await }.boxed());
        }
        Ok(flights)
    }

    /// Returns the flights of all missing chunks of a range, and the requests for those that were not in flight yet.
    fn plan(&self, node: &Node, range: Range<u64>, path: &PoolPath) -> Result<(Vec<Flight>, Vec<FetchRequest>)> {
        let mut state = node.state.lock();
        let (mut flights, mut fresh) = (Vec::new(), Vec::new());
        if state.record.file.is_whole() {
            return Ok((flights, Vec::new()));
        }
        let size = state.record.size;
        let Some(version) = state.record.version.clone() else {
            return Err(Error::new(ErrorKind::Corrupt, Side::Cache, format!("{}: no version", node.ino)));
        };
        let range = range.start..range.end.min(size);
        let missing = match state.record.file.is_partial() {
            true => self.residency(&mut state)?.extents().missing(range),
            false if range.is_empty() => Vec::new(),
            false => vec![range],
        };
        if let Some(last) = missing.last() {
            // Before anything is requested that could not be kept.
            chunk_number((last.end - 1) / CHUNK_BYTES)?;
        }
        let mut next = 0;
        for gap in missing {
            for index in next.max(gap.start / CHUNK_BYTES)..=(gap.end - 1) / CHUNK_BYTES {
                next = index + 1;
                if let Some(flight) = state.flights.get(&index) {
                    flights.push(flight.clone());
                    continue;
                }
                let range = index * CHUNK_BYTES..size.min((index + 1) * CHUNK_BYTES);
                let (waiting, receiver) = watch::channel(None);
                state.flights.insert(index, receiver.clone());
                flights.push(receiver);
                fresh.push(Chunk { index, range, waiting });
            }
        }
        Ok((flights, FetchRequest::of(path, &version, fresh)))
    }

    /// Returns the content file into which a version is fetched; `None` if the inode has another version by now, or is
    /// whole.
    fn content_for_fetch(&self, node: &Arc<Node>, version: &Version) -> Result<Option<(Arc<Content>, ContentId)>> {
        {
            let mut state = node.state.lock();
            if state.record.version.as_ref() != Some(version) || state.record.file.is_whole() {
                return Ok(None);
            }
            if state.record.file.is_partial() {
                return self.partial_content(node.ino, &mut state).map(Some);
            }
        }
        let content = self.preallocated.take_on(self.tier_for_fetch(node, CHUNK_BYTES))?;
        let id = ContentId(content.id);
        let mut txn = Txn::begin(self);
        let record = txn.record(node.ino)?;
        let takes_bytes = record.file.is_absent() && !record.file.is_written_through();
        if record.version.as_ref() != Some(version) || !takes_bytes {
            let partial = record.file.is_partial() && record.version.as_ref() == Some(version);
            drop(txn);
            self.trash.discard(id, 0);
            if !partial {
                return Ok(None);
            }
            let mut state = node.state.lock();
            return match state.record.file.is_partial() {
                true => self.partial_content(node.ino, &mut state).map(Some),
                false => Ok(None),
            };
        }
        let begun = (|| {
            let record = txn.record(node.ino)?;
            record.file = record.file.begin_fetch(id)?;
            txn.put_content(node.ino, content.clone(), ContentRecord::empty(node.ino, self.catalog.epoch()))?;
            txn.commit()
        })();
        // No record names it.
        begun.inspect_err(|_| self.trash.discard(id, 0))?;
        self.keep_open(node.ino);
        Ok(Some((content, id)))
    }

    /// Records that a chunk of a version is in the content file, in the space that was reserved for it.
    fn landed(
        &self,
        node: &Arc<Node>,
        (path, version): (&PoolPath, &Version),
        chunk: &Chunk,
        (id, content): (ContentId, &Content),
        checksum: u32,
        space: SpaceReservation,
    ) -> Result<()> {
        let mut state = node.state.lock();
        // Both are read under the lock: of two chunks that land together, the one that is counted last includes the other,
        // and has no earlier epoch.
        let epoch = self.catalog.epoch();
        let occupied = content.file.metadata().map_err(failed)?.blocks() * 512;
        let of_version = state.record.version.as_ref() == Some(version);
        if !of_version
            || state.is_deleted()
            || state.record.file.content() != Some(id)
            || !state.record.file.is_partial()
        {
            return Err(changed(path));
        }
        // What was written meanwhile may not reach the device.
        self.check_used(id)?;
        let size = state.record.size;
        let (atime, mtime) = (state.record.atime, state.record.mtime);
        let before = self.residency(&mut state)?.bytes;
        let mut change = InodeChange::begin(&self.catalog, node.ino, &mut state);
        let number = chunk_number(chunk.index)?;
        let residency = change.add_chunk(id, number, chunk.range.clone(), checksum, (epoch, occupied))?;
        if residency.extents().contains(0..size) {
            crate::contents::set_mtime(&content.file, atime, mtime)?;
            change.complete()?;
        }
        change.commit()?;
        self.store.account_reserved(id, before, occupied, space);
        self.note_clean(node.ino, Some(id), occupied);
        self.epochs.fetched.fetch_max(epoch, Ordering::Relaxed);
        Ok(())
    }

    /// Completes an empty file: it needs no bytes.
    fn complete_empty(&self, node: &Arc<Node>) -> Result<()> {
        self.leave_unusable(node)?;
        let version = {
            let record = &node.state.lock().record;
            record.version.clone().filter(|_| record.size == 0 && !record.file.is_whole())
        };
        let Some(version) = version else { return Ok(()) };
        let Some((content, _)) = self.content_for_fetch(node, &version)? else { return Ok(()) };
        let mut state = node.state.lock();
        if state.record.file.is_partial() && state.record.size == 0 && !state.is_deleted() {
            crate::contents::set_mtime(&content.file, state.record.atime, state.record.mtime)?;
            let mut change = InodeChange::begin(&self.catalog, node.ino, &mut state);
            change.complete()?;
            change.commit()?;
            self.note_clean(node.ino, state.record.file.content(), 0);
        }
        Ok(())
    }

    /// Reads a range of the pool's copy without keeping it, because the fast pool has no room.
    pub async fn read_uncached(&self, node: &Arc<Node>, range: Range<u64>) -> Result<Bytes> {
        let mut left = OWN_CHANGES;
        loop {
            let known = {
                node.state.lock().growth.read_unkept = true;
                self.known(node)
            };
            match self.read_as_known(node, range.clone()).await {
                Err(e) if self.ask_again(node, &known, &e, &mut left).await => {}
                other => return other.map_err(|e| self.no_longer_there(node, e)),
            }
        }
    }

    pub(super) async fn read_as_known(&self, node: &Arc<Node>, range: Range<u64>) -> Result<Bytes> {
        let path = self.pool_path(node.ino)?;
        let version = node.state.lock().record.version.clone();
        let Some(version) = version else { return Ok(Bytes::new()) };
        self.counters.pool_read_bytes.fetch_add(range.end - range.start, Ordering::Relaxed);
        self.ask(self.pool.read(&path, &version, range)).await.map_err(|e| e.context(path))
    }
}

/// Returns how many requests for one file may be in flight: as many as targets have a part of it, within bounds.
fn requests_at_once(stripe: Option<Stripe>) -> usize {
    stripe.map_or(REQUESTS_AT_ONCE, |s| (s.targets as usize).clamp(REQUESTS_AT_ONCE, MOST_AT_ONCE))
}

/// Returns the length of one request to a striped file: whole chunks of ours in whole chunks of the pool, so that each
/// request reads from as few targets as possible.
fn in_stripe(stripe: Stripe) -> u64 {
    stripe.chunk_bytes.clamp(CHUNK_BYTES, STRIPE_REQUEST_BYTES).next_multiple_of(CHUNK_BYTES)
}

/// Returns the number under which the catalog has a chunk: it has 32 bits.
///
/// # Errors
/// `TooLarge` from 4 PiB of a file on.
fn chunk_number(index: u64) -> Result<u32> {
    let what = "the fast pool holds no bytes beyond the first 4 PiB of a file";
    u32::try_from(index).map_err(|_| Error::new(ErrorKind::TooLarge, Side::Cache, what))
}

fn changed(path: &PoolPath) -> Error {
    Error::new(ErrorKind::Stale, Side::Pool, format!("{path}: changed while it was fetched"))
}

fn lost() -> Error {
    Error::new(ErrorKind::Unavailable, Side::Cache, "the engine is shutting down")
}
