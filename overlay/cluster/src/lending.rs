//! The asked node's side: give, fetch and give, name other holders, or refuse.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use smallvec::SmallVec;

use crate::identity::NodeId;
use crate::ownership::RangeKey;
use crate::pass_over::PassOver;
use crate::protocol::{HOLDERS_NAMED, PeerAnswer, PeerAsk, Purpose};

/// The most ranges that a node gives at once.
pub const GIVES_AT_ONCE: u32 = 16;

/// The most nodes to which a node gives one range at once. Fewer would make the number of holders grow slowly, more would
/// make each give slow before the first one helps.
pub const GIVES_OF_ONE_RANGE: u32 = 4;

/// The most ranges of which the holders are remembered, some 300 bytes for each.
const RANGES_REMEMBERED: usize = 4096;

/// Bounds of the time after which a reader comes back.
const RETRY_SHORTEST: Duration = Duration::from_millis(2);
const RETRY_LONGEST: Duration = Duration::from_secs(2);

/// What the asked node has of the wanted version of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldRange {
    /// All of it, equal to the pool's copy of that version.
    Resident,
    /// It is being read from the pool.
    FromPool,
    /// This node waits for it itself, for another node.
    FromPeer,
    Absent,
    /// The file has another version on this node, or local changes.
    OtherVersion,
}

/// What the asked node knows of a range for an answer.
#[derive(Debug, Clone, Copy)]
pub struct LocalFacts<'a> {
    pub held: HeldRange,
    /// The owners of the range in this node's view, in their order.
    pub owners: &'a [NodeId],
    /// Whether the placement of the file lets this node give it to the reader.
    pub may_give: bool,
    /// Whether readers may give it, too.
    pub readers_give: bool,
    /// Whether the fast pool could take the range.
    pub has_room: bool,
}

/// What the asked node does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lend {
    /// Give it. When that has ended, [`Lender::ended`] is due.
    Give,
    /// Decide again when it is resident, or if it cannot be read.
    WhenArrived,
    /// Read it from the pool, and decide again then.
    Fetch,
    Answer(PeerAnswer),
}

/// The gives of a node.
#[derive(Debug, Clone)]
pub struct Lender {
    this: NodeId,
    active: u32,
    ranges: HashMap<RangeKey, Lent>,
    /// The ranges in the order in which they came; the first is forgotten first.
    order: VecDeque<RangeKey>,
    /// What a give took lately.
    usual: Duration,
    /// The bounds of the time are this many times as long.
    times: u32,
}

#[derive(Debug, Clone, Default)]
struct Lent {
    active: u32,
    /// The last nodes that got it; the newest last.
    holders: SmallVec<[NodeId; HOLDERS_NAMED]>,
}

impl Lender {
    /// What a give is expected to take before there was one.
    const AT_FIRST: Duration = Duration::from_millis(50);

    pub fn new(this: NodeId) -> Self {
        Self::for_long_requests(this, 1)
    }

    /// For requests that take `times` as long as those of the engine: in simulations.
    pub(crate) fn for_long_requests(this: NodeId, times: u32) -> Self {
        let (ranges, order) = (HashMap::new(), VecDeque::new());
        Self { this, active: 0, ranges, order, usual: Self::AT_FIRST * times, times }
    }

    /// Decides what to do with a request.
    pub fn decide(&mut self, ask: &PeerAsk, facts: LocalFacts<'_>) -> Lend {
        if let Err(why) = self.check(ask, facts) {
            return Lend::Answer(PeerAnswer::Not(why));
        }
        let retry_after = (self.usual / 2).clamp(RETRY_SHORTEST * self.times, RETRY_LONGEST * self.times);
        match facts.held {
            HeldRange::Resident => {}
            HeldRange::FromPool => return Lend::WhenArrived,
            // A node that waits for another node makes no third one wait, so that no circle can come about.
            HeldRange::FromPeer => return Lend::Answer(PeerAnswer::Busy { holders: SmallVec::new(), retry_after }),
            HeldRange::Absent | HeldRange::OtherVersion => return Lend::Fetch,
        }
        let lent = self.ranges.entry(ask.key).or_insert_with(|| {
            self.order.push_back(ask.key);
            Lent::default()
        });
        if self.active >= GIVES_AT_ONCE || lent.active >= GIVES_OF_ONE_RANGE {
            let holders = lent.holders.iter().filter(|id| facts.readers_give && **id != ask.from).cloned().collect();
            self.forget();
            return Lend::Answer(PeerAnswer::Busy { holders, retry_after });
        }
        lent.active += 1;
        self.active += 1;
        self.forget();
        Lend::Give
    }

    fn check(&self, ask: &PeerAsk, facts: LocalFacts<'_>) -> Result<(), PassOver> {
        if !facts.may_give {
            return Err(PassOver::Confined);
        }
        match (facts.held, ask.purpose) {
            (HeldRange::OtherVersion, _) => return Err(PassOver::RefusedVersion),
            (HeldRange::Resident, _) => return Ok(()),
            (_, Purpose::IfResident) => return Err(PassOver::NotResident),
            (HeldRange::FromPool | HeldRange::FromPeer | HeldRange::Absent, Purpose::Fetch) => {}
        }
        let place = |id: &NodeId| facts.owners.iter().position(|owner| owner == id);
        let Some(mine) = place(&self.this) else { return Err(PassOver::NotOwner) };
        // An owner asks only owners before itself. If this one sees it otherwise, it is the reader that has to fetch.
        let asks_backwards = place(&ask.from).is_some_and(|of_reader| of_reader <= mine);
        if asks_backwards || ask.from == self.this || ask.passed.contains(&self.this) {
            return Err(PassOver::Loop);
        }
        if facts.held == HeldRange::Absent && !facts.has_room {
            return Err(PassOver::NoRoom);
        }
        Ok(())
    }

    /// A give ended after `time`: with success if `to` has all bytes now.
    pub fn ended(&mut self, key: RangeKey, to: &NodeId, time: Duration, success: bool) {
        self.active = self.active.saturating_sub(1);
        if success {
            self.usual = (self.usual * 7 + time) / 8;
        }
        let Some(lent) = self.ranges.get_mut(&key) else { return };
        lent.active = lent.active.saturating_sub(1);
        if success {
            if lent.holders.len() == HOLDERS_NAMED {
                lent.holders.remove(0);
            }
            lent.holders.push(to.clone());
        }
    }

    /// Forgets holders that left.
    pub fn retain(&mut self, is_member: impl Fn(&NodeId) -> bool) {
        for lent in self.ranges.values_mut() {
            lent.holders.retain(|id| is_member(id));
        }
    }

    /// Returns the number of gives that are under way.
    pub fn active(&self) -> u32 {
        self.active
    }

    /// Forgets the holders of the oldest ranges; those that are being given stay.
    fn forget(&mut self) {
        while self.order.len() > RANGES_REMEMBERED {
            let Some(oldest) = self.order.pop_front() else { return };
            match self.ranges.get(&oldest) {
                Some(lent) if lent.active > 0 => self.order.push_back(oldest),
                _ => _ = self.ranges.remove(&oldest),
            }
            // All of them being given is impossible: there are more than may be given at once.
        }
    }
}
