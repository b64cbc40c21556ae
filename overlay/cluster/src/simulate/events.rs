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
    Sent {
        errand: Errand,
        began: Moment,
        peer_life: u32,
    },
    /// They have reached the reader.
    Delivered {
        errand: Errand,
        began: Moment,
        peer_life: u32,
    },
    /// All bytes have left the pool.
    PoolSent {
        node: NodeNumber,
        range: RangeNumber,
        life: u32,
    },
    PoolDelivered {
        node: NodeNumber,
        range: RangeNumber,
        life: u32,
    },
    /// The reader looks again at a range for which it waits.
    Resume(Errand),
    /// No answer has come.
    HedgeDue(Errand),
    NodeLost(NodeNumber),
    NodeStops(NodeNumber),
    /// The leases of lost nodes have expired.
    LeasesExpire,
}

/// Events are kept apart from their order, so that the order stays small.
#[derive(Default)]
pub struct EventQueue {
    /// When in nanoseconds, the number of the event, and its place in `events`.
    order: BinaryHeap<Reverse<(u64, u64, u32)>>,
    events: Vec<Option<Event>>,
    free: Vec<u32>,
    count: u64,
}

impl EventQueue {
    pub fn push(&mut self, at: Moment, event: Event) {
        let place = match self.free.pop() {
            Some(place) => {
                self.events[place as usize] = Some(event);
                place
            }
            None => {
                self.events.push(Some(event));
                self.events.len() as u32 - 1
            }
        };
        self.count += 1;
        self.order.push(Reverse((at.as_nanos() as u64, self.count, place)));
    }

    pub fn pop(&mut self) -> Option<(Moment, Event)> {
        let Reverse((at, _, place)) = self.order.pop()?;
        let event = self.events[place as usize].take()?;
        self.free.push(place);
        Some((Moment::from_nanos(at), event))
    }

    /// Returns how many events there have been.
    pub fn count(&self) -> u64 {
        self.count
    }
}
