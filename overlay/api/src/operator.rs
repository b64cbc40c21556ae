//! Requests of operators to the engine, and the replies, as the control socket carries them.

use std::fmt;

use forebay_backends::WorkProgress;
use forebay_prefetch::signature::Invocation;
use serde::{Deserialize, Serialize};

use crate::foresight::PlannedFile;
use crate::jobs::ObserverStatus;
use crate::peers::{ClusterShare, MemberStage};

/// A path relative to the mount, as typed: UTF-8, other bytes as `\xNN`.
pub type TypedPath = String;

/// A user, with all of its groups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UserGroups {
    pub uid: u32,
    pub groups: Vec<u32>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StageRequest {
    /// Files, directories (with everything below them) and globs.
    pub paths: Vec<TypedPath>,
    /// Also stages what earlier runs of this command read, as far as there is room.
    #[serde(default)]
    pub invocation: Option<Invocation>,
    /// The job in which the request is made: if this job runs on this mount, it owns the lease.
    #[serde(default)]
    pub job: Option<String>,
    /// The owner of the lease otherwise: a job or a user. Empty: the request is refused.
    pub lease_owner: String,
    /// Seconds until the lease ends; `None`: until it is released, or until its job ends.
    pub lease_secs: Option<u64>,
    /// The most bytes per second that are read from the pool, for all files together; above 0. `None`: no limit.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// Milliseconds after which staging stops, complete or not. `None`: when everything is resident.
    #[serde(default)]
    pub within_ms: Option<u64>,
    /// What each member of the cluster stages. `None`: only the node that gets the request stages, and all of it.
    #[serde(default)]
    pub cluster: Option<ClusterShare>,
    /// Only what this user may read is staged; other named files fail. `None`: the daemon's rights count.
    #[serde(default)]
    pub user: Option<UserGroups>,
    pub dry_run: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FlushRequest {
    /// Empty: everything.
    pub paths: Vec<TypedPath>,
    /// Return when everything is in the pool; otherwise the request only starts the flush.
    pub wait: bool,
    pub dry_run: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvictRequest {
    pub paths: Vec<TypedPath>,
    /// End the leases of the named files, whoever their owners are.
    pub release_leases: bool,
    pub dry_run: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReleaseRequest {
    /// Empty: everything.
    pub paths: Vec<TypedPath>,
    /// The job in which the request is made: if this job runs on this mount, its leases end.
    #[serde(default)]
    pub job: Option<String>,
    /// The owner whose leases end otherwise.
    pub owner: String,
    pub dry_run: bool,
}

/// The progress of an operation. The last is always `Done`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Progress {
    /// Comes again, with the sum, when a further member of a cluster has planned.
    Planned {
        files: u64,
        bytes: u64,
    },
    /// Totals so far.
    Advanced {
        files: u64,
        bytes: u64,
    },
    /// With `dry_run`: a file that would be staged for the command.
    Wanted(PlannedFile),
    /// Slow operations of the pool, reported from time to time.
    UnderWay(Vec<WorkProgress>),
    Failed {
        path: String,
        reason: String,
    },
    Done(Summary),
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Summary {
    pub files: u64,
    pub bytes: u64,
    pub failed: u64,
    /// Not done for a reason that is no error: it was already done, or the file is in use.
    pub skipped: u64,
    pub elapsed_ms: u64,
    pub message: Option<String>,
    /// The errno with which the whole request was refused before anything was done.
    #[serde(default)]
    pub refused: Option<i32>,
    /// Of a stage on a cluster, what each member did. The other fields are sums over them; a member that failed as a whole
    /// counts as one failed file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberStage>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Status {
    pub version: String,
    /// The version of the requests and replies (`protocol.rs`).
    #[serde(default)]
    pub api: u32,
    pub pid: u32,
    pub mountpoint: Option<String>,
    pub pool: String,
    pub pool_state: PoolState,
    /// The reason why the pool is down.
    #[serde(default)]
    pub pool_failure: Option<String>,
    /// Slow operations that are currently running in the pool.
    #[serde(default)]
    pub under_way: Vec<WorkProgress>,
    pub fast: Vec<DeviceStatus>,
    /// Fastest first; empty if there is one.
    #[serde(default)]
    pub tiers: Vec<TierStatus>,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    pub reserved_bytes: u64,
    pub dirty_files: u64,
    pub dirty_bytes: u64,
    pub oldest_dirty_secs: Option<u64>,
    pub flush_errors: Vec<String>,
    /// Files that are due and of which the last round of flushes sent nothing, each with the reason.
    #[serde(default)]
    pub flush_stuck: Vec<String>,
    /// Writers that wait until the flush has made room for their data.
    #[serde(default)]
    pub waiting_for_room: u64,
    /// Bytes per second to which writers are slowed, because the flush is behind.
    #[serde(default)]
    pub write_pace_bytes: Option<u64>,
    pub conflicts: Vec<String>,
    pub leased_bytes: u64,
    pub resident_files: u64,
    pub inodes_in_memory: u64,
    /// Inodes that the kernel looked up and has not forgotten.
    #[serde(default)]
    pub inodes_known_to_kernel: u64,
    pub open_files: u64,
    pub passthrough: bool,
    /// The reason why passthrough is not used.
    #[serde(default)]
    pub no_passthrough: Option<String>,
    pub content_io: String,
    /// The state of the observer.
    #[serde(default)]
    pub observer: ObserverStatus,
    pub counters: Counters,
}

/// Whether the pool answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PoolState {
    Up,
    Down,
}

impl PoolState {
    /// Returns the name in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

impl fmt::Display for PoolState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The state of a device of the fast pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    Healthy,
    /// It failed a short while ago: nothing new is placed on it.
    Suspect,
    /// It failed often: clean content on it is not used.
    Bypassed,
    /// Its file system does not answer.
    Bad,
}

impl DeviceState {
    pub const ALL: [Self; 4] = [Self::Healthy, Self::Suspect, Self::Bypassed, Self::Bad];

    /// Returns the name in the JSON output and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Suspect => "suspect",
            Self::Bypassed => "bypassed",
            Self::Bad => "bad",
        }
    }
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceStatus {
    pub path: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub state: DeviceState,
    /// It holds the catalog, so it is never bypassed.
    #[serde(default)]
    pub holds_catalog: bool,
    /// It is bypassed, and the last probe of it worked.
    #[serde(default)]
    pub probe_worked: bool,
    /// The error of its file system, if it is bad.
    #[serde(default)]
    pub failure: Option<String>,
    /// The name of its tier, if there are several.
    #[serde(default)]
    pub tier: Option<String>,
    /// Operations that failed since the start.
    #[serde(default)]
    pub errors: u64,
    /// What failed last since the start.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// A tier of the fast pool.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TierStatus {
    pub name: String,
    /// It is empty after a reboot.
    pub is_volatile: bool,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    /// Files that came from a slower tier since the start.
    pub promoted_files: u64,
    /// Files that went to a slower tier since the start.
    pub demoted_files: u64,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counters {
    pub pool_read_bytes: u64,
    /// Bytes that other nodes gave instead of the pool.
    #[serde(default)]
    pub peer_read_bytes: u64,
    pub pool_written_bytes: u64,
    pub fetches: u64,
    pub opens_resident: u64,
    pub opens_absent: u64,
    pub evicted_bytes: u64,
    pub flushed_files: u64,
    pub read_hits: u64,
    pub read_misses: u64,
    /// Files that were fetched ahead of readers whose opens were followed.
    #[serde(default)]
    pub ahead_files: u64,
    #[serde(default)]
    pub ahead_bytes: u64,
    /// How many of these were opened since then.
    #[serde(default)]
    pub ahead_used_files: u64,
    /// Requests to the pool that were repeated because the pool or the connection failed.
    #[serde(default)]
    pub pool_retries: u64,
    #[serde(default)]
    pub reads: ReadSources,
    #[serde(default)]
    pub evictions: Evictions,
    /// Attempts to flush something that failed.
    #[serde(default)]
    pub flush_failures: u64,
    /// Local copies that were moved aside because the pool had changed, too.
    #[serde(default)]
    pub conflicts: u64,
    /// Writes that were slowed because the flush was behind.
    #[serde(default)]
    pub paced_writes: u64,
    /// How long they waited, in all.
    #[serde(default)]
    pub paced_ms: u64,
}

/// Reads that the daemon answered, by the place from which their bytes came. Reads that the kernel answers, from its
/// page cache or by passthrough, are not among them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReadSources {
    /// The bytes were on the fast pool.
    pub fast: ServedReads,
    /// The read waited until its bytes were fetched to the fast pool.
    pub fetched: ServedReads,
    /// The bytes came from the pool and were not kept: there was no room, or the policy says so.
    pub direct: ServedReads,
}

/// Reads and their bytes since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServedReads {
    pub reads: u64,
    pub bytes: u64,
}

/// Evictions since the start, by their reasons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Evictions {
    /// Other content needed the space.
    pub space: Evicted,
    /// The slowest tier was full.
    pub tier: Evicted,
    /// An operator asked for it.
    pub request: Evicted,
    /// The policy does not keep written content.
    pub policy: Evicted,
    /// A check found damage.
    pub repair: Evicted,
}

/// Evicted files, and the bytes that they occupied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Evicted {
    pub files: u64,
    pub bytes: u64,
}

/// A difference between the mount and the pool at a path, in ascending order of importance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Difference {
    /// Times of a directory, which change when something is flushed into it.
    Times,
    Attributes,
    Name,
    Removed,
    Data,
}

impl Difference {
    /// Returns the name in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Times => "times",
            Self::Attributes => "attributes",
            Self::Name => "name",
            Self::Removed => "removed",
            Self::Data => "data",
        }
    }
}

/// The kind of a listed object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    File,
    Directory,
    Symlink,
    /// A fifo, a socket or a device file.
    Special,
}

/// How much of an object is on the fast pool; for a directory, how many of its names are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ContentState {
    Absent,
    Partial,
    Resident,
    /// Resident, and newer than the pool's copy.
    Dirty,
}

impl ContentState {
    /// Returns the name in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Partial => "partial",
            Self::Resident => "resident",
            Self::Dirty => "dirty",
        }
    }
}

/// One refresh of a client that polls.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Overview {
    /// Its counts of dirty and leased files are those of the last count.
    pub status: Status,
    /// The files that have waited longest for the pool, 100 at most, the oldest first.
    pub oldest_dirty: Vec<DirtyFile>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DirtyFile {
    pub path: TypedPath,
    pub bytes: u64,
    pub since_unix: u64,
    pub what: Difference,
    pub error: Option<String>,
    /// The setting that decides when it is flushed, with its origin.
    #[serde(default)]
    pub why: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListedPath {
    pub path: TypedPath,
    pub kind: ObjectKind,
    pub size: u64,
    pub resident_bytes: u64,
    pub state: ContentState,
    pub leased_until_unix: Option<u64>,
    /// All owners of leases.
    pub lease_owner: Option<String>,
    pub mtime_unix: i64,
    pub mode: u32,
    /// The part of the pool that stores it, or that stores new files in a directory, if the pool reports it.
    #[serde(default)]
    pub storage_pool: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FsckReport {
    pub checked_files: u64,
    pub checked_bytes: u64,
    pub problems: Vec<String>,
    pub repaired: u64,
    pub orphans_removed: u64,
    /// What a repair of a damaged catalog kept, and where.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl FsckReport {
    /// Adds a problem, in one line.
    pub fn add(&mut self, problem: String, is_repaired: bool) {
        self.problems.push(problem);
        self.repaired += u64::from(is_repaired);
    }

    /// Returns whether a problem is left. `repaired` counts the lines of `problems` that were repaired, whatever a line
    /// stands for.
    pub fn has_damage_left(&self) -> bool {
        self.problems.len() as u64 > self.repaired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_one_name() {
        for state in DeviceState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
        for state in [PoolState::Up, PoolState::Down] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }
}
