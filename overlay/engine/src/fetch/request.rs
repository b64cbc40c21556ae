//! One request to the pool: consecutive chunks of a file. Readers get each chunk as soon as it has arrived.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use forebay_backends::{Content, Error, ErrorKind, PoolPath, Result, Side, Version};
use forebay_cache::{CHUNK_BYTES, SpaceReservation};
use futures::{StreamExt, TryStreamExt, future, stream};
use rustix::fs::FallocateFlags;
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::{Inner, MEMORY_UNIT_BYTES, blocking};
use super::bandwidth_estimator::TimedRequest;
use super::{changed, lost};
use crate::node::Node;
use crate::peers::PeerWish;

/// Bytes of one write to a content file. The file system keeps the bytes of one call in one piece of memory, and goes
/// through that whole piece at each later write into it: with larger pieces, overwriting fetched content would be slow.
const WRITE_BYTES: usize = 128 << 10;

/// How long content of a peer waits for memory before the pool is asked instead. The peer has a few places for all of its readers,
/// and gives up a reader that takes nothing for a minute.
const PEER_WAITS_FOR_MEMORY: Duration = Duration::from_secs(10);

/// One chunk to fetch, and the channel to those that wait for it.
pub(super) struct Chunk {
    pub index: u64,
    pub range: Range<u64>,
    pub waiting: watch::Sender<Option<Result<(), Arc<Error>>>>,
}

/// One call to the pool.
pub(super) struct FetchRequest {
    pub path: PoolPath,
    pub version: Version,
    /// Consecutive chunks.
    pub chunks: VecDeque<Chunk>,
}

impl FetchRequest {
    pub fn is_all_of(&self, version: &Version, bytes: u64) -> bool {
        let (first, last) = (self.chunks.front(), self.chunks.back());
        self.version == *version
            && first.is_some_and(|c| c.range.start == 0)
            && last.is_some_and(|c| c.range.end == bytes)
    }

    /// Joins chunks that follow each other.
    pub fn of(path: &PoolPath, version: &Version, chunks: Vec<Chunk>) -> Vec<Self> {
        let mut requests: Vec<Self> = Vec::new();
        for chunk in chunks {
            let follows = |last: &&mut Self| last.chunks.back().is_some_and(|c| c.range.end == chunk.range.start);
            match requests.last_mut().filter(follows) {
                Some(last) => last.chunks.push_back(chunk),
                None => {
                    let (path, version) = (path.clone(), version.clone());
                    requests.push(Self { path, version, chunks: VecDeque::from([chunk]) });
                }
            }
        }
        requests
    }
}

/// A stream that is cut into chunks.
struct Source<'a> {
    stream: Content,
    /// Bytes that arrived beyond the end of the last chunk.
    rest: Bytes,
    /// `None`: no call to the pool is timed.
    under_way: Option<TimedRequest<'a>>,
    kind: BytesFrom,
}

/// Where the bytes of a source come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BytesFrom {
    Pool,
    /// What does not come from a peer is requested from the pool.
    Peer,
}

impl Source<'_> {
    /// Returns the next `length` bytes; fewer where the object ends.
    async fn next(&mut self, length: usize) -> Result<Bytes> {
        let mut data = BytesMut::new();
        loop {
            if self.rest.is_empty() {
                match self.stream.try_next().await? {
                    Some(piece) => self.rest = piece,
                    None => return Ok(data.freeze()),
                }
                if let Some(under_way) = &mut self.under_way {
                    under_way.came(self.rest.len() as u64, Instant::now());
                }
            }
            let missing = length - data.len();
            if data.is_empty() && self.rest.len() >= length {
                // A chunk that came in one piece is not copied.
                return Ok(self.rest.split_to(length));
            }
            data.reserve(missing);
            data.extend_from_slice(&self.rest.split_to(missing.min(self.rest.len())));
            if data.len() == length {
                return Ok(data.freeze());
            }
        }
    }
}

impl Inner {
    /// Fetches the chunks of a request one after the other, and notifies those that wait for each.
    pub(super) async fn answer(self: &Arc<Self>, node: &Arc<Node>, mut request: FetchRequest) {
        let Err(error) = self.bring_in(node, &mut request).await else { return };
        self.fail(node, request, error);
    }

    /// The same with bytes that have already arrived.
    pub(super) async fn answer_with(self: &Arc<Self>, node: &Arc<Node>, mut request: FetchRequest, content: Bytes) {
        let stream = stream::once(future::ready(Ok(content))).boxed();
        let mut source = Source { stream, rest: Bytes::new(), under_way: None, kind: BytesFrom::Pool };
        let Err(error) = self.pour(node, &mut request, &mut source, None).await else { return };
        self.fail(node, request, error);
    }

    fn fail(&self, node: &Node, request: FetchRequest, error: Error) {
        let error = Arc::new(error);
        for chunk in request.chunks {
            node.state.lock().flights.remove(&chunk.index);
            chunk.waiting.send_replace(Some(Err(error.clone())));
        }
    }

    async fn bring_in(self: &Arc<Self>, node: &Arc<Node>, request: &mut FetchRequest) -> Result<()> {
        self.bring_in_from_peers(node, request).await?;
        let (Some(first), Some(last)) = (request.chunks.front(), request.chunks.back()) else { return Ok(()) };
        let range = first.range.start..last.range.end;
        // A pool that does not stream returns the whole range at once.
        let streams = self.pool.capabilities().streams;
        let held = if streams { CHUNK_BYTES } else { range.end - range.start };
        let units = held.min(range.end - range.start).div_ceil(MEMORY_UNIT_BYTES) as u32;
        let _memory = self.memory.acquire_many(units).await.map_err(|_| lost())?;
        let space = Some(self.reserve_for_fetch(node, first.range.end - first.range.start).await?);
        let under_way = Some(self.fetcher.bandwidth.begin(range.end - range.start, streams, Instant::now()));
        let stream = self.ask(self.pool.stream(&request.path, &request.version, range)).await;
        let stream = stream.map_err(|e| e.context(&request.path))?;
        let mut source = Source { stream, rest: Bytes::new(), under_way, kind: BytesFrom::Pool };
        self.pour(node, request, &mut source, space).await
    }

    /// Fetches what other nodes give of a request. The rest stays in it.
    async fn bring_in_from_peers(self: &Arc<Self>, node: &Arc<Node>, request: &mut FetchRequest) -> Result<()> {
        let Some(peers) = self.peers.get() else { return Ok(()) };
        while let (Some(first), Some(last)) = (request.chunks.front(), request.chunks.back()) {
            let range = first.range.start..last.range.end;
            let before = request.chunks.len();
            let wish = PeerWish { path: request.path.clone(), version: request.version.clone(), range };
            let Some(stream) = peers.stream(wish).await else { return Ok(()) };
            // The chunk that arrives, and the part of the next one that came with it. Not acquired before the peer has
            // what it gives: two nodes that read the pool for each other would wait for each other's memory.
            let units = (2 * CHUNK_BYTES).div_ceil(MEMORY_UNIT_BYTES) as u32;
            let Ok(memory) = timeout(PEER_WAITS_FOR_MEMORY, self.memory.acquire_many(units)).await else {
                return Ok(());
            };
            let _memory = memory.map_err(|_| lost())?;
            let mut source = Source { stream, rest: Bytes::new(), under_way: None, kind: BytesFrom::Peer };
            self.pour(node, request, &mut source, None).await?;
            if request.chunks.len() == before {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes what the source yields to the chunks of a request; `space` is reserved for the first one. If a peer gives no
    /// more, the chunks that did not come stay in the request.
    async fn pour(
        self: &Arc<Self>,
        node: &Arc<Node>,
        request: &mut FetchRequest,
        source: &mut Source<'_>,
        mut space: Option<SpaceReservation>,
    ) -> Result<()> {
        while let Some(chunk) = request.chunks.front() {
            let length = chunk.range.end - chunk.range.start;
            let space = match space.take() {
                Some(space) => space,
                None => self.reserve_for_fetch(node, length).await?,
            };
            let data = source.next(length as usize).await;
            if source.kind == BytesFrom::Peer && !data.as_ref().is_ok_and(|data| data.len() as u64 == length) {
                return Ok(());
            }
            if source.kind == BytesFrom::Pool {
                self.pool_calls.health.note(&data);
            }
            let data = data.map_err(|e| e.context(&request.path))?;
            if data.len() as u64 != length {
                let (came, at) = (data.len(), chunk.range.start);
                let why = format!("{}: {came} of {length} bytes at {at}", request.path);
                return Err(Error::new(ErrorKind::Stale, Side::Pool, why));
            }
            self.keep(node, request, chunk, (data, space), source.kind).await?;
            if let Some(chunk) = request.chunks.pop_front() {
                node.state.lock().flights.remove(&chunk.index);
                chunk.waiting.send_replace(Some(Ok(())));
            }
        }
        Ok(())
    }

    /// Writes a chunk to the content file, and records that it is valid.
    async fn keep(
        self: &Arc<Self>,
        node: &Arc<Node>,
        request: &FetchRequest,
        chunk: &Chunk,
        (data, space): (Bytes, SpaceReservation),
        kind: BytesFrom,
    ) -> Result<()> {
        self.counters.fetches.fetch_add(1, Ordering::Relaxed);
        let bytes = match kind {
            BytesFrom::Pool => &self.counters.pool_read_bytes,
            BytesFrom::Peer => &self.counters.peer_read_bytes,
        };
        bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        let Some((content, id)) = self.content_for_fetch(node, &request.version)? else {
            return Err(changed(&request.path));
        };
        let checksum = crc32c::crc32c(&data);
        // A chunk of zeros stays a hole. Only its last byte is written, so that the file gets its length.
        let zeros = data.iter().all(|byte| *byte == 0);
        let skip = if zeros { data.len().saturating_sub(1) } else { 0 };
        for from in (skip..data.len()).step_by(WRITE_BYTES) {
            let until = data.len().min(from + WRITE_BYTES);
            let at = chunk.range.start + from as u64;
            let written = self.contents.io.write_at(content.file.clone(), at, data.slice(from..until)).await;
            written.inspect_err(|error| _ = self.store.note_error(id, error))?;
        }
        if zeros {
            let (file, start) = (content.file.clone(), chunk.range.start);
            // Then the block of the last byte is freed; the length stays. The range goes to the end of the chunk even
            // if the file ends before it, because a part of a block would only be zeroed.
            let _ = blocking(move || {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // A file system without hole punching keeps the block.
                let _ = rustix::fs::fallocate(&*file, flags, start, CHUNK_BYTES);
                Ok(())
            })
            .await;
        }
        self.landed(node, (&request.path, &request.version), chunk, (id, &content), checksum, space)
    }
}
