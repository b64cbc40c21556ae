//! What happens when, in the order of time and then of insertion.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Moment;
use crate::protocol::{PeerAnswer, Purpose};

/// The number of a node in the simulation.
pub type NodeNumber = u32;

/// The number of a range in the data set.
pub type RangeNumber = u32;

/// A request of a node for a range. `attempt` tells it from earlier requests of the same node for the range, and
/// `life` from those before a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errand {
    pub reader: NodeNumber,
    pub range: RangeNumber,
    pub peer: NodeNumber,
    pub purpose: Purpose,
    pub attempt: u32,
    pub life: u32,
}

#[derive(Debug)]
pub enum Event {
    /// The job of a node begins, or goes on after a restart.
    Start(NodeNumber),
    AskArrives(Errand),
    /// An answer other than content reaches the reader.
    Answered(Errand, Box<PeerAnswer>),
    /// All bytes have left the peer, which began to give them at `began`, in its `peer_life`.
    Sent { errand: Errand, began: Moment, peer_life: u32 },
    /// They have reached the reader.
    Delivered { errand: Errand, began: Moment, peer_life: u32 },
    /// All bytes have left the pool.
    PoolSent { node: NodeNumber, range: RangeNumber, life: u32 },
    PoolDelivered { node: NodeNumber, range: RangeNumber, life: u32 },
    /// The reader looks again at a range for which it waits.
    Resume(Errand),
    /// No answer has come.
    HedgeDue(Errand),
    NodeLost(NodeNumber),
    NodeStops(NodeNumber),
    /// The leases of lost nodes have expired.
    LeasesExpire,
}

struct DueEvent {
    at: Moment,
    number: u64,
    event: Event,
}

impl PartialEq for DueEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for DueEvent {}

impl PartialOrd for DueEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DueEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[derive(Default)]
pub struct EventQueue {
    heap: BinaryHeap<Reverse<DueEvent>>,
    count: u64,
}

impl EventQueue {
    pub fn push(&mut self, at: Moment, event: Event) {
        self.count += 1;
        self.heap.push(Reverse(DueEvent { at, number: self.count, event }));
    }

    pub fn pop(&mut self) -> Option<(Moment, Event)> {
        self.heap.pop().map(|Reverse(due)| (due.at, due.event))
    }

    /// Returns how many events there have been.
    pub fn count(&self) -> u64 {
        self.count
    }
}
