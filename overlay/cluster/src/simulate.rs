//! A cluster of thousands of nodes that start to read one data set, in virtual time. The decisions are those of this crate;
//! only the network, the pool and the fast pools are models. It is in this crate, and not with the simulator of eviction,
//! so that it sees each change of the decisions, and because `prefetch` knows no cluster.
//!
//! **Network.** Each node has a link in each direction. A link is a queue: it carries one range after the other at its full
//! rate. So the bytes over a link never exceed its rate, and a range that waits for a busy link arrives later; two ranges
//! that share a link arrive one after the other, and not both late. The switches between the nodes are not limited. A
//! range is forwarded when all of it has arrived. Each message takes the latency of the network.
//!
//! **Pool.** A limited number of calls at once, each of which waits for the latency of the pool; the bytes then pass one
//! link that all nodes share, and the link of the node.
//!
//! **Fast pools** have room for what their node reads.
//!
//! **Jobs.** Each node reads the whole data set once, [`READS_AT_ONCE`] pieces at a time, in the order of the files or in an
//! order of its own. All nodes start within [`START_SPREAD`].
//!
//! **Pieces.** A piece is what one request asks for, and what has owners: one range, or as many ranges as keep the number of
//! reads of all nodes below [`READS_MAX`], but at least [`PIECES_MIN`] of them, so that a simulation takes seconds.
//! The times that a reader waits grow with the pieces. Larger pieces make a result worse than it
//! would be, because a piece is forwarded only when all of it has arrived.

mod cluster_model;
mod events;
mod links;
mod node_model;
mod timeline;

use std::time::Duration;

use serde::Serialize;

use crate::ownership::{RANGE_BYTES, ranges_of};
use crate::pass_over::PassOvers;
use crate::placement::Placement;
pub use timeline::{ClusterProgress, Timeline};

/// The pieces that a node reads at the same time, as the engine's requests for one file.
pub const READS_AT_ONCE: u32 = 16;

/// The most reads of all nodes: some 5 s of one core.
pub const READS_MAX: u64 = 250_000;

/// The fewest pieces of a data set that has as many ranges: several times the pieces that a node reads at once.
pub const PIECES_MIN: u64 = 64;

/// The largest data set, and the longest time that a simulation may take at least.
const DATASET_BYTES_MAX: u64 = 1 << 50;
const TIME_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// Pieces of each file of the data set.
pub const PIECES_OF_A_FILE: u64 = 160;

/// All nodes start within this time, as the processes of a parallel job do.
pub const START_SPREAD: Duration = Duration::from_millis(200);

/// How long a node that lost its power stays in the list: the lease of its key.
pub const LEASE: Duration = Duration::from_secs(10);

/// How much less than the other nodes a slow node can send and receive.
pub const SLOWDOWN: u64 = 10;

/// How long a node is away in a rolling restart, and how many of all are away at once.
pub const RESTART: Duration = Duration::from_secs(3);
pub const RESTARTING_SHARE: f64 = 0.02;

/// What happens while the jobs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterScenario {
    /// All nodes start at the same time.
    Storm,
    /// The same, and a share of them loses its power in the middle.
    Loss,
    /// The same, and a share of them is slower by [`SLOWDOWN`].
    Slow,
    /// The same, and all daemons are restarted, some after the other. What is resident stays.
    Rolling,
}

impl ClusterScenario {
    pub const ALL: [Self; 4] = [Self::Storm, Self::Loss, Self::Slow, Self::Rolling];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Storm => "storm",
            Self::Loss => "loss",
            Self::Slow => "slow",
            Self::Rolling => "rolling",
        }
    }
}

/// The order in which the nodes read the ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadOrder {
    /// All from the first to the last, at the same time.
    Same,
    /// Each in an order of its own, as training jobs do.
    Shuffled,
}

/// The cluster to simulate.
#[derive(Debug, Clone)]
pub struct ClusterSettings {
    pub nodes: u32,
    /// Bytes that each node reads; rounded up to whole pieces.
    pub dataset_bytes: u64,
    pub scenario: ClusterScenario,
    /// The share of nodes that are lost, or slow.
    pub affected: f64,
    pub order: ReadOrder,
    pub placement: Placement,
    /// Nodes with the role cache. With [`Placement::Dedicated`], they are added to `nodes` and run no job.
    pub cache_nodes: u32,
    /// Bytes a second of the link of each node, in each direction.
    pub node_rate: u64,
    pub node_latency: Duration,
    pub pool_rate: u64,
    pub pool_latency: Duration,
    pub pool_calls: u32,
    pub seed: u64,
}

impl ClusterSettings {
    /// Returns the bytes of a piece.
    pub fn piece_bytes(&self) -> u64 {
        let pieces = (READS_MAX / u64::from(self.nodes.max(1))).max(PIECES_MIN);
        RANGE_BYTES * ranges_of(self.dataset_bytes).div_ceil(pieces)
    }

    /// Returns the number of pieces of the data set; the last one counts as a whole one.
    pub fn pieces(&self) -> u64 {
        self.dataset_bytes.div_ceil(self.piece_bytes())
    }

    /// Returns the bytes of all pieces.
    pub fn unique_bytes(&self) -> u64 {
        self.pieces() * self.piece_bytes()
    }

    /// Returns the shortest time in which any program could do this: the pool has to send each byte once, and each node
    /// has to receive each byte. With dedicated nodes, these have to send everything.
    pub fn bound(&self) -> Duration {
        let bytes = self.unique_bytes() as f64;
        let (through_pool, through_node) = (bytes / self.pool_rate as f64, bytes / self.node_rate as f64);
        let through_owners = match self.placement {
            Placement::Dedicated => through_node * f64::from(self.nodes) / f64::from(self.cache_nodes.max(1)),
            Placement::Pool | Placement::Own => through_pool * f64::from(self.nodes),
            Placement::All => 0.0,
        };
        Duration::from_secs_f64(through_pool.max(through_node).max(through_owners)) + self.pool_latency
    }
}

/// What a simulation shows.
#[derive(Debug, Clone)]
pub struct ClusterOutcome {
    pub settings: ClusterSettings,
    /// Bytes of the data set.
    pub unique_bytes: u64,
    pub pool_bytes: u64,
    pub peer_bytes: u64,
    /// Jobs that read everything; the nodes that were lost have none.
    pub finished: u32,
    /// When half of the jobs, 95 % of them, and all had read everything. Jobs of slow nodes are not among them.
    pub half: Duration,
    pub most: Duration,
    pub all: Duration,
    /// When the last job of a slow node had read everything.
    pub slow_nodes: Option<Duration>,
    pub bound: Duration,
    /// The most bytes that one node read from the pool.
    pub most_pool_bytes_of_a_node: u64,
    pub pass_overs: PassOvers,
    pub hedges: u64,
    pub events: u64,
    pub timeline: Timeline,
}

impl ClusterOutcome {
    /// Bytes that left the pool, as a multiple of the data set.
    pub fn pool_copies(&self) -> f64 {
        self.pool_bytes as f64 / self.unique_bytes as f64
    }

    /// The time until all jobs had read everything, as a multiple of the bound.
    pub fn of_bound(&self) -> f64 {
        self.all.as_secs_f64() / self.bound.as_secs_f64()
    }
}

/// Runs a simulation. The same settings give the same result.
///
/// # Errors
/// Says which setting makes no sense.
pub fn simulate(settings: &ClusterSettings) -> Result<ClusterOutcome, String> {
    if settings.nodes == 0 {
        return Err("a cluster has at least one node".into());
    }
    if settings.placement == Placement::Dedicated && settings.cache_nodes == 0 {
        return Err("the placement dedicated needs cache nodes".into());
    }
    if settings.dataset_bytes == 0 || settings.node_rate == 0 || settings.pool_rate == 0 || settings.pool_calls == 0 {
        return Err("bytes, rates and calls are above zero".into());
    }
    if settings.dataset_bytes > DATASET_BYTES_MAX {
        return Err("a data set has at most 1 PiB".into());
    }
    if settings.bound() > TIME_MAX {
        let days = TIME_MAX.as_secs() / (24 * 3600);
        return Err(format!("this takes more than {days} days: give higher rates, fewer bytes or fewer nodes"));
    }
    if !(0.0..1.0).contains(&settings.affected) {
        return Err("the share of lost or slow nodes is at least 0 and below 1".into());
    }
    Ok(cluster_model::ClusterModel::new(settings).run())
}

#[cfg(test)]
mod tests;
