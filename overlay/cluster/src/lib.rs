//! Which node of a cluster gives which bytes: decisions only, without I/O, clock or threads. The caller passes in the time
//! as a [`Moment`], and does what the decisions say.
//!
//! | module | decides |
//! |---|---|
//! | `identity` | what names a node: an identity that stays when its address changes |
//! | `members` | who belongs to the cluster, and which source says so; a [`Roster`] is the list at one moment |
//! | `ownership` | which members own a range of a file: rendezvous hashing with bounded load |
//! | `placement` | which members may own and hold a file at all |
//! | `protocol` | what a node asks of another one, and the answers |
//! | `asking` | the reader's side of one range: whom to ask in which order, how long, and when to read the pool |
//! | `lending` | the other side: give, fetch and give, name other holders, or refuse |
//! | `suspicion` | which members are not asked for a while because they failed |
//! | `pass_over` | why a member did not give what was asked of it, counted |
//! | `simulate` | a cluster of thousands of nodes that runs the modules above on a modelled network and pool |
//!
//! **No loops.** A node fetches for others only as one of the [`RANKS`] owners of a range, and then it reads the pool
//! itself: the reader has asked the owners before it. All other nodes give only what is resident. A node that waits for
//! another one makes no third one wait ([`HeldRange::FromPeer`]). So whoever waits, waits for a node that waits for the
//! pool, also where the rosters of nodes differ.
//!
//! **One copy per cluster.** The first owner that is not passed over is the only node that reads a range from the pool.
//! If more nodes ask for a range than it may give to at once, it names nodes that have it by now ([`PeerAnswer::Busy`]):
//! the number of holders grows by a factor with each round.

mod asking;
mod identity;
mod lending;
mod members;
mod ownership;
mod pass_over;
mod placement;
mod protocol;
pub mod simulate;
mod suspicion;

pub use asking::{Asking, AskingStep, Enquiry, PeerPatience, UNSETTLED};
pub use identity::{BadNodeId, Member, NodeId, Role};
pub use lending::{GIVES_AT_ONCE, GIVES_OF_ONE_RANGE, HeldRange, Lend, Lender, LocalFacts};
pub use members::{MemberList, MemberSource, Roster, Seat};
pub use ownership::{
    DEALT_MAX, FileKey, FileOwners, RANGE_BYTES, RANKED, RANKS, RangeKey, Ranked, owners_of, range_of, ranges_of,
};
pub use pass_over::{PassOver, PassOvers};
pub use placement::{Confinement, Placement, Placing};
pub use protocol::{HOLDERS_NAMED, PeerAnswer, PeerAsk, Purpose};
pub use suspicion::{SUSPECTED_LONGEST, SUSPECTED_SHORTEST, Suspicions};

/// A time, as the time since any fixed moment of a monotonic clock.
pub type Moment = std::time::Duration;

#[cfg(test)]
mod tests;
