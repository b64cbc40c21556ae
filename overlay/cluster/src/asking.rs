//! The reader's side: whom to ask for one range, in which order and how long, and when to read the pool instead.

use std::time::Duration;

use smallvec::SmallVec;

use crate::Moment;
use crate::identity::NodeId;
use crate::members::{Roster, Seat};
use crate::ownership::{RANKED, RANKS, RangeKey, owners_of};
use crate::pass_over::{PassOver, PassOvers};
use crate::protocol::{HOLDERS_NAMED, PeerAnswer, Purpose};
use crate::suspicion::Suspicions;

/// The longest time that a reader spends on members before it reads the pool. Each member that fails takes much less
/// ([`PeerPatience`]); so long takes only a cluster in which all members are busy. It is long because a cluster whose
/// readers give up together and turn to the pool does not get out of that again.
const ASKING_LONGEST: Duration = Duration::from_secs(120);

/// The most requests for one range before the reader reads the pool: more than fit into the time, unless nodes answer
/// that they are busy without a pause.
const ASKS_MAX: u32 = 256;

/// How many busy holders may name other holders before an owner is asked again.
const DESCENTS_MAX: u32 = 4;

/// What the pause grows by each time that an owner is busy, up to a multiple of what the owner says.
const BUSY_GROWTH: f64 = 1.5;
const BUSY_GROWTH_MAX: f64 = 2.0;

/// How long after a change of the members, a restart of this node, or a failure of a member, nodes ask those behind them.
pub const UNSETTLED: Duration = Duration::from_secs(600);

/// What to do next for a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AskingStep {
    Ask(Enquiry),
    /// Call [`Asking::next`] again then.
    Wait(Moment),
    /// Read the range from the pool.
    Pool,
}

/// A request to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enquiry {
    pub peer: NodeId,
    pub purpose: Purpose,
    /// Owners that could not answer: for the asked node, to see that it is its turn.
    pub passed: SmallVec<[NodeId; RANKS]>,
    /// If no answer has begun by then, ask [`Asking::hedge`] for a second source, and take what comes first.
    pub hedge_at: Moment,
    /// If no answer has begun by then, the peer is passed over as slow. Afterwards, the same time is the bound for each
    /// pause between bytes, except while an owner says that it waits for the pool.
    pub give_up_at: Moment,
}

/// How long a reader waits for the beginning of an answer, by what it took lately.
#[derive(Debug, Clone, Copy)]
pub struct PeerPatience {
    usual: Duration,
    /// The bounds are this many times as long.
    times: u32,
}

impl Default for PeerPatience {
    fn default() -> Self {
        Self::for_long_requests(1)
    }
}

impl PeerPatience {
    /// What an answer is expected to take before there was one.
    const AT_FIRST: Duration = Duration::from_millis(250);
    const HEDGE_SHORTEST: Duration = Duration::from_millis(100);
    const GIVE_UP_SHORTEST: Duration = Duration::from_secs(1);
    const GIVE_UP_LONGEST: Duration = Duration::from_secs(30);

    /// For requests that take `times` as long as those of the engine: in simulations.
    pub(crate) fn for_long_requests(times: u32) -> Self {
        Self { usual: Self::AT_FIRST * times, times }
    }

    /// Returns the longest time that a reader spends on members.
    fn asking_longest(&self) -> Duration {
        ASKING_LONGEST * self.times
    }

    /// An answer began after this time.
    pub fn took(&mut self, time: Duration) {
        self.usual = (self.usual * 7 + time) / 8;
    }

    /// Returns the time without an answer after which a second source is asked: 0.1 to 15 s.
    pub fn hedge_after(&self) -> Duration {
        (self.usual * 3).clamp(Self::HEDGE_SHORTEST * self.times, Self::GIVE_UP_LONGEST * self.times / 2)
    }

    /// Returns the time without an answer after which a peer is passed over: 1 to 30 s.
    pub fn give_up_after(&self) -> Duration {
        (self.usual * 8).clamp(Self::GIVE_UP_SHORTEST * self.times, Self::GIVE_UP_LONGEST * self.times)
    }
}

/// The search for a source of one range.
#[derive(Debug, Clone)]
pub struct Asking {
    began: Moment,
    /// The owners before this node, in their order; all owners if this node is none.
    owners: SmallVec<[NodeId; RANKS]>,
    this: NodeId,
    /// Owners that could not give or fetch the range.
    passed: SmallVec<[NodeId; RANKS]>,
    /// Members behind this one that may have the range although they do not have to; the next one last.
    behind: SmallVec<[NodeId; RANKED]>,
    /// Nodes that are said to have the range; the next one last.
    holders: SmallVec<[NodeId; HOLDERS_NAMED]>,
    /// Not to ask an owner before, because it is busy.
    wait_until: Moment,
    /// Busy holders since an owner was asked.
    descents: u32,
    /// How often owners were busy.
    busy: i32,
    /// Different for each range and reader, so that readers spread over holders and do not come back all at once.
    salt: u64,
    asks: u32,
    has_hedged: bool,
    /// Members would only repeat what one said.
    only_pool: bool,
}

impl Asking {
    /// `ranked` are the members of the range in their order. `unsettled` says that members have changed, or failed, a short
    /// while ago ([`UNSETTLED`]): then other nodes may have the range although this one would have to fetch it, and are
    /// asked what they have before the pool is read. A node that fetches only `for_others` does not ask the owners before
    /// it: its reader did.
    pub fn begin(
        now: Moment,
        this: &NodeId,
        key: RangeKey,
        roster: &Roster,
        ranked: &[Seat],
        unsettled: bool,
        for_others: bool,
    ) -> Self {
        let id = |seat: &Seat| &roster.member(*seat).id;
        let owners = owners_of(ranked);
        let mine = owners.iter().position(|seat| id(seat) == this);
        let begin_behind = if unsettled { mine.map_or(owners.len(), |mine| mine + 1) } else { ranked.len() };
        let before = if for_others { &[] } else { &owners[..mine.unwrap_or(owners.len())] };
        Self {
            began: now,
            owners: before.iter().map(id).cloned().collect(),
            behind: ranked[begin_behind..].iter().rev().map(id).filter(|id| *id != this).cloned().collect(),
            this: this.clone(),
            passed: SmallVec::new(),
            holders: SmallVec::new(),
            wait_until: now,
            descents: 0,
            busy: 0,
            salt: this.stable_hash() ^ key.stable_hash(),
            asks: 0,
            has_hedged: false,
            only_pool: false,
        }
    }

    /// Returns what to do now. Counts the members that are passed over without a request.
    pub fn next(
        &mut self,
        now: Moment,
        patience: &PeerPatience,
        suspicions: &mut Suspicions,
        pass_overs: &mut PassOvers,
    ) -> AskingStep {
        if self.only_pool || self.asks >= ASKS_MAX || now >= self.began + patience.asking_longest() {
            return AskingStep::Pool;
        }
        while let Some(holder) = self.holders.pop() {
            if suspicions.admits(now, &holder) {
                return AskingStep::Ask(self.enquiry(now, holder, Purpose::IfResident, patience));
            }
            pass_overs.count(PassOver::Suspected);
        }
        while let Some(owner) = self.owners.iter().find(|id| !self.passed.contains(id)).cloned() {
            if now < self.wait_until {
                return AskingStep::Wait(self.wait_until);
            }
            if suspicions.admits(now, &owner) {
                return AskingStep::Ask(self.enquiry(now, owner, Purpose::Fetch, patience));
            }
            pass_overs.count(PassOver::Suspected);
            self.passed.push(owner);
        }
        // These answer at once, so nobody waits in a circle.
        while let Some(other) = self.behind.pop() {
            if suspicions.admits(now, &other) {
                return AskingStep::Ask(self.enquiry(now, other, Purpose::IfResident, patience));
            }
        }
        AskingStep::Pool
    }

    /// Returns a second source to ask while the first one is silent, once for a range.
    pub fn hedge(
        &mut self,
        now: Moment,
        slow: &NodeId,
        patience: &PeerPatience,
        suspicions: &Suspicions,
    ) -> Option<Enquiry> {
        if std::mem::replace(&mut self.has_hedged, true) {
            return None;
        }
        let is_free = |id: &&NodeId| *id != slow && !self.passed.contains(id) && !suspicions.is_suspected(id);
        let second = self.holders.iter().rev().chain(&self.owners).find(is_free)?.clone();
        self.holders.retain(|id| *id != second);
        Some(self.enquiry(now, second, Purpose::IfResident, patience))
    }

    /// Takes an answer to an enquiry. After [`PeerAnswer::Content`], the search is over.
    pub fn answered(
        &mut self,
        now: Moment,
        (peer, purpose): (&NodeId, Purpose),
        answer: &PeerAnswer,
        suspicions: &mut Suspicions,
        pass_overs: &mut PassOvers,
    ) {
        match answer {
            PeerAnswer::Content => suspicions.answered(peer),
            PeerAnswer::Busy { holders, retry_after } => {
                suspicions.answered(peer);
                pass_overs.count(PassOver::Busy);
                let from_owner = purpose == Purpose::Fetch;
                self.descents = if from_owner { 0 } else { self.descents + 1 };
                // Busy holders may name each other: after a few of them, an owner is asked again, with a pause before.
                if self.descents <= DESCENTS_MAX {
                    let may = |id: &&NodeId| **id != self.this && *id != peer && !self.passed.contains(id);
                    self.holders = holders.iter().filter(may).cloned().collect();
                }
                let spread = self.salt.rotate_left(self.asks * 8);
                if !self.holders.is_empty() {
                    let turn = (spread % self.holders.len() as u64) as usize;
                    self.holders.rotate_left(turn);
                }
                // Between half of the time and all of it.
                if from_owner {
                    let grown = retry_after.mul_f64(BUSY_GROWTH.powi(self.busy.min(32)).min(BUSY_GROWTH_MAX));
                    self.wait_until = now + grown.mul_f64(0.5 + (spread % 1024) as f64 / 2048.0);
                    self.busy += 1;
                }
            }
            PeerAnswer::Not(why) => {
                suspicions.passed_over(now, peer, *why);
                pass_overs.count(*why);
                if purpose == Purpose::IfResident {
                    return;
                }
                match why {
                    // Only the pool knows which version is the right one, and what may be read.
                    PassOver::RefusedVersion | PassOver::Confined | PassOver::Loop => self.only_pool = true,
                    _ => self.passed.push(peer.clone()),
                }
            }
        }
    }

    fn enquiry(&mut self, now: Moment, peer: NodeId, purpose: Purpose, patience: &PeerPatience) -> Enquiry {
        self.asks += 1;
        Enquiry {
            peer,
            purpose,
            passed: self.passed.iter().cloned().collect(),
            hedge_at: now + patience.hedge_after(),
            give_up_at: now + patience.give_up_after(),
        }
    }
}
