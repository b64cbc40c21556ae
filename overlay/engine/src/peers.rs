//! Content from other nodes and for them: bytes that a peer may give instead of the pool, and content that this node may
//! give. Which node is asked, and whether this one gives, is decided elsewhere ([`PeerSource`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_backends::{Content as ContentStream, Error, ErrorKind, FileKind, PoolPath, Result, Side, Version};
use forebay_cache::CHUNK_BYTES;
use forebay_catalog::NameRecord;
use futures::future::BoxFuture;

use super::coherence::Age;
use super::{Inner, Ino, Overlay};
use crate::fetch::FetchPriority;
use crate::node::{Node, NodeState};
use crate::pool_calls::{CONFIRM_WITHIN, PoolChange};

/// Why a version is not lent.
const UNCONFIRMED: &str = "the version is not confirmed";
/// How long a member waits for a version to be confirmed. A bit longer than the question itself takes to find that the pool
/// is slow: the rest of the wait says nothing about the pool.
const LEND_WITHIN: Duration = CONFIRM_WITHIN.saturating_add(Duration::from_millis(100));

/// Bytes of the pool that a peer may give.
#[derive(Debug, Clone)]
pub struct PeerWish {
    pub path: PoolPath,
    /// Only bytes of this version may be given.
    pub version: Version,
    /// Begins at a multiple of [`Loan::CHUNK_BYTES`], and ends at one or at the end of the file.
    pub range: Range<u64>,
}

/// What asks other nodes for bytes before the pool is asked.
pub trait PeerSource: Send + Sync + 'static {
    /// Returns a stream of the bytes of a wish, once they begin to come; `None`: the pool must be asked. The stream takes them
    /// only while it is polled, so the caller can get memory for them first. After an error of the stream, the pool is asked
    /// for what did not come.
    fn stream(&self, wish: PeerWish) -> BoxFuture<'_, Option<ContentStream>>;

    /// Returns the ranges of a version of a file of which this node is the first owner, in their order. Ranges that follow
    /// each other are one range; an empty file has one empty range.
    fn first_owned(&self, path: &PoolPath, version: &Version) -> Vec<Range<u64>>;

    /// Tells the other nodes that this one has changed an object of the pool, or a name. Does not wait, and may be lost.
    fn announce(&self, path: &PoolPath);
}

/// What this node has of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    Resident,
    /// All that is missing is on its way from the pool or from a peer.
    UnderWay,
    Absent,
}

/// Clean content of one version that this node may give to others.
pub struct Loan {
    overlay: Overlay,
    node: Arc<Node>,
    version: Version,
}

impl Overlay {
    /// Sets what is asked before the pool. Only the first call counts.
    pub fn set_peers(&self, peers: Arc<dyn PeerSource>) {
        let _ = self.inner.peers.set(peers);
    }

    /// Finds a file whose content on this node is that of a version. `asks`: the pool is asked if this node knows
    /// another version or none. Returns `None` if the file has another version, or changes that the pool does not have.
    ///
    /// # Errors
    /// `NotFound`; `Timeout` if the pool does not say which version it has; other errors of the pool.
    pub async fn lend(
        &self,
        path: &PoolPath,
        is_wanted: impl Fn(&Version) -> bool,
        asks: bool,
    ) -> Result<Option<Loan>> {
        let inner = &self.inner;
        let Some(ino) = inner.find_known(path, NameRecord::here_ino)? else {
            if !asks {
                return Ok(None);
            }
            let ino = self.resolve(path).await?;
            return Ok(inner.loan_of(self, ino, &is_wanted));
        };
        if let Some(loan) = inner.loan_of(self, ino, &is_wanted) {
            return Ok(Some(loan));
        }
        let is_dirty = inner.node(ino)?.state.lock().record.file.is_dirty();
        if !asks || is_dirty {
            return Ok(None);
        }
        let since = Instant::now();
        // A member that waits for this answer may as well ask the pool itself.
        match tokio::time::timeout(LEND_WITHIN, inner.revalidate(ino, Age::Since(since))).await {
            // Another object has the name by now.
            Ok(Err(e)) if e.is(ErrorKind::Stale) => {}
            Ok(other) => other?,
            Err(_) => return Err(Error::new(ErrorKind::Timeout, Side::Pool, UNCONFIRMED)),
        }
        let ino = self.resolve(path).await?;
        let loan = inner.loan_of(self, ino, &is_wanted);
        let is_confirmed = inner.node(ino)?.state.lock().validated.is_some_and(|at| at >= since);
        match loan {
            None if !is_confirmed => Err(Error::new(ErrorKind::Timeout, Side::Pool, UNCONFIRMED)),
            loan => Ok(loan),
        }
    }
}

impl Overlay {
    /// Another node has changed an object of the pool, or a name. What is cached of it does not count any more, nor does an
    /// answer of the pool that is on its way: the next use asks the pool. Asks nothing itself. Blocks on the catalog.
    ///
    /// # Errors
    /// Those of the catalog: then the cached state counts for the rest of its time.
    pub fn take_announcement(&self, path: &PoolPath) -> Result<()> {
        let forgotten = self.forget_announced(path);
        // At the end: until then, an open may find the state that is being forgotten.
        self.inner.pool_calls.invalidations.announcements.fetch_add(1, Ordering::AcqRel);
        forgotten
    }

    fn forget_announced(&self, path: &PoolPath) -> Result<()> {
        let inner = &self.inner;
        let (Some(parent), Some(name)) = (path.parent(), path.name()) else { return Ok(()) };
        let in_pool = |record: &NameRecord| record.pool.or_else(|| record.here_ino());
        let Some(dir) = inner.find_known(&parent, in_pool)? else { return Ok(()) };
        let record = inner.catalog.name(dir, name)?;
        let objects: Vec<_> = [record.pool, record.here_ino()].into_iter().flatten().collect();
        let mut nodes: Vec<_> = objects.iter().chain([&dir]).filter_map(|ino| inner.table.peek(*ino)).collect();
        nodes.dedup_by_key(|node| node.ino);
        // As if a call of this daemon had changed them: that makes answers on their way void.
        drop(PoolChange::begin(inner, &nodes.iter().map(|node| node.ino).collect::<Vec<_>>())?);
        // A listing that is under way may have the old state, or the new one: the directory is listed again.
        inner.pool_calls.watches.name_changed(dir, name);
        inner.pool_calls.watches.look_again(dir);
        for node in nodes {
            let mut state = node.state.lock();
            state.validated = None;
            if node.ino == dir {
                state.names.negative.remove(name);
                state.names.listed_at = None;
                state.kernel.pages_go_stale();
            }
        }
        // The daemon itself looks at what is above views.
        let may_forget = |ino: &Ino| inner.table.is_known_to_kernel(*ino) && !inner.is_pinned(*ino);
        for ino in objects.into_iter().chain([dir]).filter(may_forget) {
            inner.tell_kernel_inode(ino, false);
        }
        // With the name of a directory, the kernel would forget what is mounted below it.
        if record.here.is_none_or(|(_, kind)| kind != FileKind::Directory) {
            inner.tell_kernel_name(dir, name);
        }
        Ok(())
    }
}

impl Inner {
    /// Returns the inode of a path as far as this node knows, without a question to the pool. `under`: which inode of a
    /// name counts.
    fn find_known(&self, path: &PoolPath, under: impl Fn(&NameRecord) -> Option<Ino>) -> Result<Option<Ino>> {
        let mut at = Ino::ROOT;
        for name in path.components() {
            let Some(ino) = under(&self.catalog.name(at, name)?) else { return Ok(None) };
            at = ino;
        }
        Ok(Some(at))
    }

    fn loan_of(&self, overlay: &Overlay, ino: Ino, is_wanted: &impl Fn(&Version) -> bool) -> Option<Loan> {
        let node = self.node(ino).ok()?;
        let version = {
            let state = node.state.lock();
            let is_file = state.record.kind == FileKind::File && !state.is_deleted() && !state.is_superseded();
            if !is_file || state.record.file.is_dirty() {
                return None;
            }
            state.record.version.clone().filter(|version| is_wanted(version))?
        };
        Some(Loan { overlay: overlay.clone(), node, version })
    }
}

impl Loan {
    /// The unit of content that has a checksum of its own.
    pub const CHUNK_BYTES: u64 = CHUNK_BYTES;

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.version.size()
    }

    /// Returns what this node has of a range. `None`: the file has another version by now.
    pub fn holding(&self, range: &Range<u64>) -> Result<Option<Holding>> {
        let mut state = self.node.state.lock();
        if !self.is_current(&state) {
            return Ok(None);
        }
        if state.record.file.is_whole() {
            return Ok(Some(Holding::Resident));
        }
        let missing = match state.record.file.is_partial() {
            true => self.overlay.inner.residency(&mut state)?.extents().missing(range.clone()),
            false => vec![range.clone()],
        };
        let chunks = |gap: &Range<u64>| gap.start / CHUNK_BYTES..gap.end.div_ceil(CHUNK_BYTES);
        Ok(Some(match missing.iter().flat_map(chunks).all(|chunk| state.flights.contains_key(&chunk)) {
            _ if missing.is_empty() => Holding::Resident,
            true => Holding::UnderWay,
            false => Holding::Absent,
        }))
    }

    /// Makes a range resident.
    ///
    /// # Errors
    /// `NoSpace`; `Stale` if the pool has another version; errors of the pool.
    pub async fn fetch(&self, range: Range<u64>) -> Result<()> {
        self.overlay.inner.ensure(&self.node, range, FetchPriority::Demand).await
    }

    /// Reads a chunk that is resident. Returns its bytes, and the checksum (CRC-32C) that they had when they came from the
    /// pool.
    ///
    /// # Errors
    /// `Stale` if it is not resident any more, or the file has another version by now; errors of the fast pool.
    pub async fn chunk(&self, index: u64) -> Result<(Bytes, u32)> {
        let inner = &self.overlay.inner;
        // Further chunks are never resident.
        let number = u32::try_from(index).map_err(|_| self.gone())?;
        let range = index * CHUNK_BYTES..self.size().min((index + 1) * CHUNK_BYTES);
        let (id, content, checksum) = {
            let mut state = self.node.state.lock();
            self.check(&mut state, &range)?;
            let id = state.record.file.content().ok_or_else(|| self.gone())?;
            let content = inner.content(self.node.ino, &mut state);
            let residency = inner.residency(&mut state)?;
            (id, content, inner.catalog.checksum(id, residency, number)?)
        };
        let (at, len) = (range.start, range.end.saturating_sub(range.start));
        let bytes = match inner.read_valid(self.node.ino, content, (at, len as usize), range.end).await {
            Err(e) if inner.content_failed(&self.node, id, &e) => return Err(self.gone()),
            read => read?,
        };
        // A content file is not used for another file, and not for other bytes, as long as a record names it.
        let mut state = self.node.state.lock();
        self.check(&mut state, &range)?;
        if state.record.file.content() != Some(id) || bytes.len() as u64 != len {
            return Err(self.gone());
        }
        // Content that was written in the mount has none.
        Ok((bytes.clone(), checksum.unwrap_or_else(|| crc32c::crc32c(&bytes))))
    }

    fn check(&self, state: &mut NodeState, range: &Range<u64>) -> Result<()> {
        let file = state.record.file;
        let resident = self.is_current(state)
            && (file.is_whole()
                || (file.is_partial() && self.overlay.inner.residency(state)?.extents().contains(range.clone())));
        if resident { Ok(()) } else { Err(self.gone()) }
    }

    fn is_current(&self, state: &NodeState) -> bool {
        state.record.version.as_ref() == Some(&self.version) && !state.record.file.is_dirty()
    }

    fn gone(&self) -> Error {
        Error::new(ErrorKind::Stale, Side::Cache, "the content is not resident any more")
    }
}
