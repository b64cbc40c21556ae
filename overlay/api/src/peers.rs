//! What operators see of the nodes that give each other content.

use std::net::SocketAddr;

pub use forebay_cluster::{MemberSource, PassOver, Placement};
use serde::{Deserialize, Serialize};

/// The cluster as one node sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PeersStatus {
    /// The identity of this node.
    pub node: String,
    /// Where it answers other nodes.
    pub listen: SocketAddr,
    pub placement: Placement,
    /// All members, this node among them.
    pub members: Vec<PeerMember>,
    /// Bytes that came from other nodes since the start.
    pub read_bytes: u64,
    /// Bytes that this node gave to others since the start.
    pub given_bytes: u64,
    /// How often a member was passed over since the start, by reason.
    pub passed_over: Vec<(PassOver, u64)>,
    /// Changes of the pool that other nodes were told of since the start: each counts once for each node.
    #[serde(default)]
    pub announced: u64,
    /// Changes that could not be told, counted in the same way.
    #[serde(default)]
    pub announcements_lost: u64,
}

/// One member of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PeerMember {
    pub node: String,
    pub address: String,
    /// It is there for other nodes.
    pub is_cache: bool,
    /// What says that it is a member.
    pub sources: Vec<MemberSource>,
    pub state: PeerState,
    /// The share of all content that it reads from the pool for all, 0 to 1.
    pub share: f64,
    pub read_bytes: u64,
    pub given_bytes: u64,
    pub passed_over: Vec<(PassOver, u64)>,
    pub last_passed_over: Option<PassOver>,
    /// It has asked with another list of members.
    pub sees_other_members: bool,
}

/// What a node thinks of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    This,
    Trusted,
    /// It failed a short while ago, and is not asked for a while.
    Suspected,
}

/// What each member of a cluster stages of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ClusterShare {
    /// Each member that may have content of the pool stages everything.
    Each,
    /// Each member stages the ranges of which it is the first owner. Of a file with several first owners, the ranges get no
    /// lease.
    Owners,
}

/// What one member did of a stage on a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemberStage {
    pub node: String,
    pub state: MemberStageState,
    /// Files that are staged there. A file with several first owners counts for each of them.
    pub files: u64,
    /// Bytes that were not resident there before.
    pub bytes: u64,
    pub failed: u64,
    pub elapsed_ms: u64,
    /// Why not everything is staged, or what else the member says.
    pub message: Option<String>,
}

/// How the stage of one member ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MemberStageState {
    /// With `dry_run`: it would be staged.
    Staged,
    /// Some files are not staged.
    Incomplete,
    /// The member refused the whole request.
    Refused,
    /// There is no connection to the member, or it broke.
    Unreachable,
    /// The member was silent for too long.
    TimedOut,
}

impl MemberStageState {
    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::Incomplete => "incomplete",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::TimedOut => "timed out",
        }
    }
}
