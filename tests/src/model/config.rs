//! What one case is run with.

use forebay_engine::Policy;
use serde::{Deserialize, Serialize};

/// Who and what is there beside the operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum World {
    /// Nobody else changes the pool.
    Quiet,
    /// Others change the pool.
    Shared,
    /// What was not synced is lost at a crash.
    PowerCuts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flushing {
    OnClose,
    Manual,
    Idle,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub world: World,
    pub flushing: Flushing,
    /// Names and attributes are asked for anew each time; else never within a case.
    pub fresh: bool,
    /// Files above this many bytes are not fetched whole when they are opened.
    pub whole_file_bytes: u64,
    pub limit_bytes: Option<u64>,
    /// The daemon may have two content files open that nobody uses.
    pub few_descriptors: bool,
    /// What is idle for a second is flushed, and at the end nobody asks for a flush: all must arrive by itself.
    pub arrives: bool,
}

impl Config {
    pub fn policy(&self) -> Policy {
        let flush = match self.flushing {
            Flushing::OnClose => "on-close",
            Flushing::Manual => "manual",
            Flushing::Idle if self.arrives => "idle:1s",
            Flushing::Idle => "idle:0s",
        };
        let ttl = if self.fresh { "0s" } else { "1h" };
        let text = format!(
            "[default]\nflush = \"{flush}\"\nmetadata-ttl = \"{ttl}\"\nwhole-file = \"{}B\"\n[pool]\nretry = \"0s\"\n",
            self.whole_file_bytes
        );
        Policy::parse(&text).expect("a policy")
    }
}
