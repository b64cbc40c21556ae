//! The configuration of a case.

use std::path::Path;

use forebay_engine::Policy;
use serde::{Deserialize, Serialize};

/// Events besides the operations on the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum World {
    /// No other client changes the pool.
    Quiet,
    /// Other clients change the pool.
    Shared,
    /// A crash loses everything that was not synced.
    PowerCuts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flushing {
    OnClose,
    Manual,
    Idle,
}

/// What becomes of bytes that are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reading {
    #[default]
    Cache,
    Bypass,
    Pin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub world: World,
    pub flushing: Flushing,
    #[serde(default)]
    pub reading: Reading,
    /// Names and attributes are revalidated at each use; if false, never within a case.
    pub fresh: bool,
    /// Files with more bytes than this are not fetched whole at open.
    pub whole_file_bytes: u64,
    pub limit_bytes: Option<u64>,
    /// The daemon may keep only two content files open that no program uses.
    pub few_descriptors: bool,
    /// Files that are idle for a second are flushed. At the end no flush is requested: everything must reach the pool
    /// by itself.
    pub arrives: bool,
    /// Content moves to a tier in memory when it is used, and is gone from there after a power cut.
    #[serde(default)]
    pub memory_tier: bool,
}

impl Config {
    /// `memory`: the directory of the tier in memory.
    pub fn policy(&self, memory: &Path) -> Policy {
        let flush = match self.flushing {
            Flushing::OnClose => "on-close",
            Flushing::Manual => "manual",
            Flushing::Idle if self.arrives => "idle:1s",
            Flushing::Idle => "idle:0s",
        };
        // A rule, so that nothing can assume one policy for all paths.
        let read = match self.reading {
            Reading::Cache => "cache",
            Reading::Bypass => "bypass",
            Reading::Pin => "pin",
        };
        let ttl = if self.fresh { "0s" } else { "1h" };
        let text = format!(
            "[default]\nflush = \"{flush}\"\nmetadata-ttl = \"{ttl}\"\nwhole-file = \"{}B\"\n[pool]\nretry = \"0s\"\n\
             [[rule]]\npaths = \"**\"\nread = \"{read}\"\n",
            self.whole_file_bytes
        );
        let tier =
            format!("[[tier]]\nname = \"memory\"\nfast = [\"{}\"]\nlimit = \"1MiB\"\nuses = 1\n", memory.display());
        let text = if self.memory_tier { text + &tier } else { text };
        // Nothing reaches these quotas: the counts are compared at the end. A change of the policy ends or begins them.
        let quotas = "[[quota]]\nuser = \"*\"\nbytes = \"1TiB\"\n[[quota]]\ngroup = \"*\"\nfiles = 1000000\n";
        let text = if self.reading == Reading::Bypass { text } else { text + quotas };
        Policy::parse(&text).expect("a policy")
    }
}
