//! The arguments of `forebay simulate`.

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::{Args, Subcommand, ValueEnum};
use forebay_cluster::Placement;
use forebay_cluster::simulate::{ClusterScenario, ReadOrder};
use forebay_daemon::config::ThrottleConfig;

use crate::values;

#[derive(Debug, Subcommand)]
pub enum SimulateCommand {
    /// Replay a trace of requests, and show the miss ratio of each eviction policy beside LRU and Belady, which knows
    /// the future.
    Eviction(EvictionArgs),
    /// Let jobs start on all nodes of a cluster that share their fast pools, and show what the pool has to send, how long
    /// the start takes, and why nodes were passed over. The same arguments give the same result.
    Cluster(SimulateClusterArgs),
}

#[derive(Debug, Args)]
pub struct EvictionArgs {
    /// The trace, in the oracleGeneral format of libCacheSim, or the output of `forebay --json job show`, one job on
    /// each line in the order in which they ran. Either may be compressed with zstd.
    pub trace: PathBuf,
    /// The size of the cache as a share of the bytes of all contents, such as 0.1. Repeat it, or give several with
    /// commas, for more sizes.
    #[arg(long, value_name = "F", required = true, value_delimiter = ',', value_parser = values::fraction)]
    pub cache_fraction: Vec<f64>,
    /// Replay only this policy, beside LRU and Belady.
    #[arg(long, value_name = "NAME", value_parser = values::evictor)]
    pub policy: Option<String>,
    /// Draw the miss ratios over the cache sizes into this file (SVG).
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SimulateClusterArgs {
    /// Nodes that run the job.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub nodes: u32,
    /// Bytes of the data set, all of which each node reads.
    #[arg(long, value_name = "BYTES", default_value = "1TB")]
    pub bytes: ByteSize,
    /// What happens meanwhile: `storm` (nothing), `loss` (nodes lose their power in the middle), `slow` (nodes have a tenth
    /// of the rate), `rolling` (all daemons are restarted). Repeat it, or give several with commas; all if not given.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = scenario)]
    pub scenario: Vec<ClusterScenario>,
    /// The share of the nodes that are lost, or slow.
    #[arg(long, value_name = "F", default_value = "0.05", value_parser = values::fraction)]
    pub affected: f64,
    /// The order in which the nodes read.
    #[arg(long, value_enum, default_value = "shuffled")]
    pub order: OrderName,
    /// Which nodes keep content for the others: `all`, `dedicated` (only cache nodes), or `pool` (none: each reads the
    /// pool).
    #[arg(long, value_enum, default_value = "all")]
    pub placement: PlacementName,
    /// Cache nodes beside the others, for `--placement dedicated`.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub cache_nodes: u32,
    /// The rate of each node's network in each direction, and its latency.
    #[arg(long, value_name = "RATE,LATENCY", default_value = "12.5GB/s,100us", value_parser = values::pace)]
    pub network: ThrottleConfig,
    /// The rate of the pool, and the latency of a call.
    #[arg(long, value_name = "RATE,LATENCY", default_value = "50GB/s,2ms", value_parser = values::pace)]
    pub pool: ThrottleConfig,
    /// Calls that the pool answers at once; more of them wait.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub pool_calls: u32,
    /// The number from which nodes and orders are drawn.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Draw what was read, and what the pool sent, over the time into this file (SVG).
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// Names of [`ReadOrder`].
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OrderName {
    /// All from the first byte to the last.
    Same,
    /// Each node in an order of its own.
    Shuffled,
}

impl From<OrderName> for ReadOrder {
    fn from(name: OrderName) -> Self {
        match name {
            OrderName::Same => Self::Same,
            OrderName::Shuffled => Self::Shuffled,
        }
    }
}

/// Names of [`Placement`].
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum PlacementName {
    All,
    Dedicated,
    Pool,
}

impl From<PlacementName> for Placement {
    fn from(name: PlacementName) -> Self {
        match name {
            PlacementName::All => Self::All,
            PlacementName::Dedicated => Self::Dedicated,
            PlacementName::Pool => Self::Pool,
        }
    }
}

fn scenario(text: &str) -> Result<ClusterScenario, String> {
    let named = ClusterScenario::ALL.into_iter().find(|scenario| scenario.as_str() == text);
    named.ok_or_else(|| {
        let known: Vec<_> = ClusterScenario::ALL.iter().map(|scenario| scenario.as_str()).collect();
        format!("there is no such scenario; known are {}", known.join(", "))
    })
}
