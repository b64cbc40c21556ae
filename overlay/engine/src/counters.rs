//! What the engine counts since its start.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use forebay_api::operator::{Counters, Evicted, Evictions, ReadSources, ServedReads};
use forebay_backends::Result;

#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    pub pool_read_bytes: AtomicU64,
    pub peer_read_bytes: AtomicU64,
    pub pool_written_bytes: AtomicU64,
    pub fetches: AtomicU64,
    pub opens_resident: AtomicU64,
    pub opens_absent: AtomicU64,
    /// Files and bytes, by [`ChosenBy`].
    evictions: [[AtomicU64; 2]; 5],
    /// Reads and bytes, by [`ReadSource`].
    reads: [[AtomicU64; 2]; 3],
    pub flush_failures: AtomicU64,
    pub conflicts: AtomicU64,
    pub flushed_files: AtomicU64,
    pub read_hits: AtomicU64,
    pub read_misses: AtomicU64,
    /// Writes that were slowed, and for how long in all, in microseconds.
    pub paced_writes: AtomicU64,
    pub paced_us: AtomicU64,
    pub ahead_files: AtomicU64,
    pub ahead_bytes: AtomicU64,
    pub ahead_used_files: AtomicU64,
}

/// Where the bytes of a read that the daemon answers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadSource {
    Fast,
    Fetched,
    Direct,
}

/// What chose content to be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChosenBy {
    /// The order of eviction, because other content needs the space.
    Space,
    /// The order of eviction, because the slowest tier is full.
    Tier,
    /// An operator.
    Request,
    /// A rule that does not keep written content.
    Rule,
    /// A check that found damage.
    Repair,
}

impl EngineCounters {
    /// Counts a read, if it succeeded.
    pub fn count_read(&self, source: ReadSource, read: Result<Bytes>) -> Result<Bytes> {
        if let Ok(data) = &read {
            count(&self.reads[source as usize], data.len() as u64);
        }
        read
    }

    /// Counts bytes of the fast pool that were sent without being read.
    pub fn count_sent(&self, bytes: u64) {
        count(&self.reads[ReadSource::Fast as usize], bytes);
    }

    pub fn count_eviction(&self, chosen_by: ChosenBy, bytes: u64) {
        count(&self.evictions[chosen_by as usize], bytes);
    }

    fn evictions(&self) -> Evictions {
        let of = |chosen_by: ChosenBy| {
            let [files, bytes] = pair(&self.evictions[chosen_by as usize]);
            Evicted { files, bytes }
        };
        Evictions {
            space: of(ChosenBy::Space),
            tier: of(ChosenBy::Tier),
            request: of(ChosenBy::Request),
            policy: of(ChosenBy::Rule),
            repair: of(ChosenBy::Repair),
        }
    }

    fn reads(&self) -> ReadSources {
        let of = |source: ReadSource| {
            let [reads, bytes] = pair(&self.reads[source as usize]);
            ServedReads { reads, bytes }
        };
        ReadSources { fast: of(ReadSource::Fast), fetched: of(ReadSource::Fetched), direct: of(ReadSource::Direct) }
    }

    pub fn read(&self, pool_retries: u64) -> Counters {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let evictions = self.evictions();
        Counters {
            pool_read_bytes: get(&self.pool_read_bytes),
            peer_read_bytes: get(&self.peer_read_bytes),
            pool_written_bytes: get(&self.pool_written_bytes),
            fetches: get(&self.fetches),
            opens_resident: get(&self.opens_resident),
            opens_absent: get(&self.opens_absent),
            evicted_bytes: self.evictions.iter().map(|[_, bytes]| get(bytes)).sum(),
            flushed_files: get(&self.flushed_files),
            read_hits: get(&self.read_hits),
            read_misses: get(&self.read_misses),
            ahead_files: get(&self.ahead_files),
            ahead_bytes: get(&self.ahead_bytes),
            ahead_used_files: get(&self.ahead_used_files),
            pool_retries,
            reads: self.reads(),
            evictions,
            flush_failures: get(&self.flush_failures),
            conflicts: get(&self.conflicts),
            paced_writes: get(&self.paced_writes),
            paced_ms: get(&self.paced_us) / 1000,
        }
    }
}

fn count([times, sum]: &[AtomicU64; 2], bytes: u64) {
    times.fetch_add(1, Ordering::Relaxed);
    sum.fetch_add(bytes, Ordering::Relaxed);
}

fn pair([times, bytes]: &[AtomicU64; 2]) -> [u64; 2] {
    [times.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed)]
}
