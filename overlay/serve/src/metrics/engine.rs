//! What the engine and its pool count.

use std::fmt;
use std::sync::Arc;

use forebay_api::operator::{Counters, DeviceState, PoolState, Status, TierStatus};
use forebay_backends::decorators::{CallKind, Metrics, MetricsSnapshot};
use forebay_engine::Overlay;
use forebay_system::clock::unix_now;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::exposition::Exposition;

/// Exports an engine: its space, its queues, what it read and wrote, and its calls to the pool.
pub struct EngineMetrics {
    overlay: Overlay,
    pool: Arc<Metrics>,
}

impl EngineMetrics {
    /// `pool` is the decorator that the engine's calls to the pool pass through.
    pub fn new(overlay: Overlay, pool: Arc<Metrics>) -> Self {
        Self { overlay, pool }
    }
}

impl fmt::Debug for EngineMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineMetrics")
    }
}

impl Collector for EngineMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = self.overlay.status_at_last_census();
        let mut out = Exposition(encoder);
        out.info("build", "The version of the program", [("version", status.version.as_str())])?;
        space(&mut out, &status)?;
        devices(&mut out, &status)?;
        write_back(&mut out, &status, &self.overlay)?;
        reads(&mut out, &status.counters)?;
        files(&mut out, &status)?;
        observer(&mut out, &status)?;
        pool_calls(&mut out, &self.pool.snapshot(), &status)
    }
}

fn space(out: &mut Exposition<'_>, status: &Status) -> fmt::Result {
    let gauges = [
        ("fast_pool_limit_bytes", "The most that the fast pool may hold", status.limit_bytes),
        ("fast_pool_used_bytes", "Bytes of the fast pool that content occupies", status.used_bytes),
        ("fast_pool_reserved_bytes", "Bytes that are about to be written to the fast pool", status.reserved_bytes),
        ("fast_pool_evictable_files", "Files that may be evicted, unless they are in use", status.resident_files),
        ("room_waiters", "Writers that wait until the flush has made room for their data", status.waiting_for_room),
    ];
    for (name, help, value) in gauges {
        out.gauge(name, help, value as f64)?;
    }
    let evictions = status.counters.evictions;
    let reasons = [
        ("space", evictions.space),
        ("tier", evictions.tier),
        ("request", evictions.request),
        ("policy", evictions.policy),
        ("repair", evictions.repair),
    ];
    let of = reasons.iter().map(|(reason, evicted)| ([("reason", *reason)], evicted.files));
    out.counters("evictions", "Files whose content was evicted, by the reason", of)?;
    let of = reasons.iter().map(|(reason, evicted)| ([("reason", *reason)], evicted.bytes));
    out.counters("evicted_bytes", "Bytes that evicted content occupied, by the reason", of)
}

fn devices(out: &mut Exposition<'_>, status: &Status) -> fmt::Result {
    let numbers: Vec<String> = (0..status.fast.len()).map(|number| number.to_string()).collect();
    let each = || numbers.iter().map(String::as_str).zip(&status.fast);
    out.gauges(
        "device_size_bytes",
        "The size of the file system of a device of the fast pool, by its number from 0",
        each().map(|(number, device)| ([("device", number)], device.total_bytes as f64)),
    )?;
    out.gauges(
        "device_free_bytes",
        "Free bytes of the file system of a device of the fast pool",
        each().map(|(number, device)| ([("device", number)], device.free_bytes as f64)),
    )?;
    let states = each().flat_map(|(number, device)| {
        DeviceState::ALL
            .map(|state| ([("device", number), ("state", state.name())], f64::from(u8::from(device.state == state))))
    });
    out.gauges("device_state", "1 for the state that a device of the fast pool is in, 0 for the others", states)?;
    out.counters(
        "device_errors",
        "Operations on a device of the fast pool that failed",
        each().map(|(number, device)| ([("device", number)], device.errors)),
    )?;
    let only = [TierStatus {
        name: "fast".into(),
        is_volatile: false,
        limit_bytes: status.limit_bytes,
        used_bytes: status.used_bytes,
        promoted_files: 0,
        demoted_files: 0,
    }];
    let tiers = if status.tiers.is_empty() { &only[..] } else { &status.tiers[..] };
    let tiers = || tiers.iter().map(|tier| ([("tier", tier.name.as_str())], tier));
    out.gauges("tier_limit_bytes", "The most that a tier may hold", tiers().map(|(l, t)| (l, t.limit_bytes as f64)))?;
    out.gauges("tier_used_bytes", "Bytes of a tier that are used", tiers().map(|(l, t)| (l, t.used_bytes as f64)))?;
    out.counters(
        "tier_promoted_files",
        "Files that came to a tier from a slower one",
        tiers().map(|(labels, tier)| (labels, tier.promoted_files)),
    )?;
    out.counters(
        "tier_demoted_files",
        "Files that went from a tier to a slower one",
        tiers().map(|(labels, tier)| (labels, tier.demoted_files)),
    )
}

fn write_back(out: &mut Exposition<'_>, status: &Status, overlay: &Overlay) -> fmt::Result {
    let census = overlay.last_census();
    let oldest = census.oldest_dirty_unix.map_or(0, |since| unix_now().saturating_sub(since));
    let gauges = [
        ("dirty_files", "Paths whose state the pool does not have yet, at the last census", census.dirty_files),
        (
            "dirty_bytes",
            "The sizes of files whose content the pool does not have yet, at the last census",
            census.dirty_bytes,
        ),
        ("dirty_failing_files", "Dirty files whose last flush failed, at the last census", census.failing_files),
        ("dirty_oldest_seconds", "The age of the oldest difference between mount and pool; 0 if there is none", oldest),
        ("leased_files", "Files that leases keep on the fast pool, at the last census", census.leased_files),
        ("leased_bytes", "Bytes that leases keep on the fast pool, at the last census", census.leased_bytes),
        ("census_timestamp_seconds", "The time of the last census, in seconds since 1970", census.counted_unix),
        (
            "flush_stuck_files",
            "Files that were due in the last round of the flush and were not sent",
            status.flush_stuck.len() as u64,
        ),
    ];
    for (name, help, value) in gauges {
        out.gauge(name, help, value as f64)?;
    }
    let Counters { flushed_files, flush_failures, conflicts, pool_written_bytes, .. } = status.counters;
    out.counter("flushed_files", "Files whose content was sent to the pool", flushed_files)?;
    out.counter("paced_writes", "Writes that were slowed because the flush was behind", status.counters.paced_writes)?;
    out.counter("flush_failures", "Attempts to flush something that failed", flush_failures)?;
    out.counter("conflicts", "Local copies that were moved aside because the pool had changed, too", conflicts)?;
    out.counter("flushed_bytes", "Content bytes that were sent to the pool", pool_written_bytes)
}

fn reads(out: &mut Exposition<'_>, counters: &Counters) -> fmt::Result {
    let sources =
        [("fast", counters.reads.fast), ("fetched", counters.reads.fetched), ("direct", counters.reads.direct)];
    let of = sources.iter().map(|(source, served)| ([("source", *source)], served.reads));
    out.counters("reads", "Reads that the daemon answered, by where their bytes came from", of)?;
    let of = sources.iter().map(|(source, served)| ([("source", *source)], served.bytes));
    out.counters("read_bytes", "Bytes of reads that the daemon answered, by where they came from", of)?;
    let opens = [("resident", counters.opens_resident), ("absent", counters.opens_absent)];
    let of = opens.iter().map(|(state, opens)| ([("content", *state)], *opens));
    out.counters("opens", "Opens, by whether all content was on the fast pool", of)?;
    out.counter("fetches", "Chunks that were fetched from the pool to the fast pool", counters.fetches)?;
    out.counter("fetched_bytes", "Content bytes that came from the pool", counters.pool_read_bytes)?;
    out.counter("peer_read_bytes", "Content bytes that came from other nodes", counters.peer_read_bytes)?;
    out.counter(
        "ahead_files",
        "Files that were fetched ahead of readers whose opens were followed",
        counters.ahead_files,
    )?;
    out.counter(
        "ahead_bytes",
        "Bytes that were fetched ahead of readers whose opens were followed",
        counters.ahead_bytes,
    )?;
    out.counter("ahead_used_files", "Files fetched ahead of readers that were opened since", counters.ahead_used_files)
}

fn files(out: &mut Exposition<'_>, status: &Status) -> fmt::Result {
    out.gauge("open_files", "Opens of files that are not closed yet", status.open_files as f64)?;
    let states = [("memory", status.inodes_in_memory), ("kernel", status.inodes_known_to_kernel)];
    let of = states.iter().map(|(state, inodes)| ([("known_to", *state)], *inodes as f64));
    out.gauges("inodes", "Inodes that the daemon has in memory, and that the kernel knows", of)
}

fn observer(out: &mut Exposition<'_>, status: &Status) -> fmt::Result {
    let observer = &status.observer;
    let of =
        [("uses", observer.dropped_uses), ("paths", observer.dropped_paths), ("processes", observer.dropped_processes)];
    let of = of.map(|(what, dropped)| ([("what", what)], dropped));
    out.counters("observer_dropped", "Records of the observer for which there was no room", of)?;
    let is_at_work = observer.kind == forebay_api::jobs::ObserverKind::Ebpf && !observer.rests;
    out.gauge(
        "observer_active",
        "1 while programs in the kernel observe the use of files",
        f64::from(u8::from(is_at_work)),
    )
}

fn pool_calls(out: &mut Exposition<'_>, calls: &MetricsSnapshot, status: &Status) -> fmt::Result {
    out.gauge("pool_up", "1 while the pool answers", f64::from(u8::from(status.pool_state == PoolState::Up)))?;
    out.gauge("pool_calls_in_flight", "Calls to the pool that wait for their answers", calls.in_flight as f64)?;
    let kinds = || CallKind::ALL.into_iter().filter(|kind| !kind.is_step());
    let outcomes = kinds().flat_map(|kind| {
        let stats = calls.of(kind);
        let outcomes = [
            ("ok", stats.count.saturating_sub(stats.errors)),
            ("refused", stats.errors.saturating_sub(stats.faults)),
            ("failed", stats.faults),
            ("abandoned", stats.abandoned),
        ];
        outcomes.map(|(outcome, count)| ([("call", kind.name()), ("outcome", outcome)], count))
    });
    out.counters("pool_calls", "Calls to the pool, by their kind and outcome", outcomes)?;
    out.histograms(
        "pool_call_duration_seconds",
        "Time until the pool answered a call, with an error or without",
        kinds().map(|kind| ([("call", kind.name())], calls.of(kind).latency)),
    )?;
    out.counter(
        "pool_retries",
        "Requests to the pool that were repeated after a failure",
        status.counters.pool_retries,
    )?;
    let directions = [("read", calls.bytes_read()), ("write", calls.bytes_written())];
    let of = directions.map(|(direction, bytes)| ([("direction", direction)], bytes));
    out.counters("pool_bytes", "Content bytes in calls to the pool", of)
}
