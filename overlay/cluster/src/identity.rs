//! Nodes, and what names them.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// The longest identity: that of a DNS label and a machine id together.
const ID_BYTES_MAX: usize = 100;

/// The stable identity of a node, such as its host name or machine id. A node that comes back with another address keeps
/// its identity, and with it what it owns.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeId {
    name: Arc<str>,
    /// The same on every node and in every release: it decides what a node owns.
    hash: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no identity of a node: use 1 to {ID_BYTES_MAX} letters, digits, dots, dashes and underscores")]
pub struct BadNodeId(String);

impl NodeId {
    /// # Errors
    /// If the text is empty, too long, or has other characters than letters, digits, `.`, `-` and `_`.
    pub fn new(name: &str) -> Result<Self, BadNodeId> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if name.is_empty() || name.len() > ID_BYTES_MAX || !name.chars().all(allowed) {
            return Err(BadNodeId(name.chars().take(ID_BYTES_MAX).collect()));
        }
        Ok(Self { name: name.into(), hash: XxHash3_64::oneshot(name.as_bytes()) })
    }

    pub fn as_str(&self) -> &str {
        &self.name
    }

    pub(crate) fn stable_hash(&self) -> u64 {
        self.hash
    }
}

impl PartialEq for NodeId {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.name == other.name
    }
}

impl Eq for NodeId {}

impl PartialOrd for NodeId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for NodeId {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.name.cmp(&other.name)
    }
}

impl Hash for NodeId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl TryFrom<String> for NodeId {
    type Error = BadNodeId;

    fn try_from(name: String) -> Result<Self, BadNodeId> {
        Self::new(&name)
    }
}

impl From<NodeId> for String {
    fn from(id: NodeId) -> Self {
        id.name.as_ref().to_owned()
    }
}

/// What a node is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Runs jobs, and has a fast pool beside them.
    #[default]
    Compute,
    /// Has a fast pool for other nodes.
    Cache,
}

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub id: NodeId,
    /// Where its door for peers is, as `host:port`. It decides nothing.
    pub address: String,
    #[serde(default)]
    pub role: Role,
}
