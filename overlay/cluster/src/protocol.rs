//! What a node asks of another one for one range, and the answers.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::identity::NodeId;
use crate::ownership::{RANKS, RangeKey};
use crate::pass_over::PassOver;

/// The most holders that a busy node names.
pub const HOLDERS_NAMED: usize = 4;

/// What the asked node may do for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Read it from the pool as an owner, if it is not resident.
    Fetch,
    /// Give it only if it is resident.
    IfResident,
}

/// A request for a range, or for a part of one.
#[derive(Debug, Clone)]
pub struct PeerAsk {
    pub from: NodeId,
    pub key: RangeKey,
    /// The version that is wanted. The answer has this one or none.
    pub version: Arc<str>,
    pub purpose: Purpose,
    /// Owners that could not answer the reader.
    pub passed: SmallVec<[NodeId; RANKS]>,
}

/// The answer to a request, as the reader sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerAnswer {
    /// All bytes of the range came, with the length and the checksum that were announced.
    Content,
    /// The node gives to as many as it may.
    Busy {
        /// Nodes to which it gave the range.
        holders: SmallVec<[NodeId; HOLDERS_NAMED]>,
        /// When to ask it again, if none of the holders gives.
        retry_after: Duration,
    },
    /// Refused by the node, or found by the reader: `Gone`, `Slow`, `Damaged`.
    Not(PassOver),
}
