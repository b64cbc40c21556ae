//! One node: its links, what is resident, what it fetches, and how far its job is.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::events::{Errand, RangeNumber};
use super::links::QueuedLink;
use crate::Moment;
use crate::asking::{Asking, PeerPatience, UNSETTLED};
use crate::identity::{Member, NodeId, Role};
use crate::lending::{HeldRange, Lender};
use crate::pass_over::PassOvers;
use crate::suspicion::Suspicions;

/// An enquiry without an answer.
#[derive(Debug, Clone, Copy)]
pub struct OpenEnquiry {
    pub attempt: u32,
    pub asked: Moment,
    pub hedge_at: Moment,
    pub give_up_at: Moment,
    /// Whether owners before the asked one could not answer.
    pub passed_owners: bool,
}

/// A range that a node fetches, once for all that want it.
#[derive(Debug)]
pub struct Errands {
    pub asking: Asking,
    /// The number of the last enquiry.
    pub attempt: u32,
    /// The enquiries that have no answer yet.
    pub open: SmallVec<[OpenEnquiry; 2]>,
    pub for_job: bool,
    /// Whether another node asked for it first.
    pub for_others: bool,
    /// Whether the pool was asked: then nothing else is.
    pub from_pool: bool,
    /// Other nodes that get it when it has arrived.
    pub waiting: Vec<Errand>,
}

/// What each node reads, in the order in which it reads it: a step through the pieces that meets each once.
#[derive(Debug, Clone)]
pub struct Course {
    begin: u64,
    step: u64,
    pieces: u64,
    position: u64,
}

impl Course {
    pub fn new(begin: u64, step: u64, pieces: u64) -> Self {
        Self { begin, step, pieces, position: 0 }
    }

    pub fn advance(&mut self) -> Option<RangeNumber> {
        let at = (self.position < self.pieces).then_some(self.position)?;
        self.position += 1;
        let range = (u128::from(self.begin) + u128::from(self.step) * u128::from(at)) % u128::from(self.pieces);
        Some(range as RangeNumber)
    }
}

pub struct NodeModel {
    pub id: NodeId,
    pub member: Member,
    pub is_up: bool,
    pub is_lost: bool,
    pub is_slow: bool,
    pub has_job: bool,
    /// Counts restarts.
    pub life: u32,
    pub stopped_at: Moment,
    /// When this node was restarted, or the members changed.
    pub changed_at: Option<Moment>,
    pub out: QueuedLink,
    pub into: QueuedLink,
    resident: Vec<u64>,
    pub errands: BTreeMap<RangeNumber, Box<Errands>>,
    pub course: Course,
    /// Ranges that the job was reading when the daemon stopped.
    pub again: Vec<RangeNumber>,
    pub reading: u32,
    pub read: u64,
    pub finished_at: Option<Moment>,
    pub lender: Lender,
    pub suspicions: Suspicions,
    pub pass_overs: PassOvers,
    pub patience: PeerPatience,
    times: u32,
    pub pool_bytes: u64,
}

impl NodeModel {
    /// Requests take `times` as long as those of the engine.
    pub fn new(member: Member, rate: u64, times: u32, course: Course) -> Self {
        Self {
            lender: Lender::for_long_requests(member.id.clone(), times),
            id: member.id.clone(),
            has_job: member.role == Role::Compute,
            member,
            is_up: true,
            is_lost: false,
            is_slow: false,
            life: 0,
            stopped_at: Moment::ZERO,
            changed_at: None,
            out: QueuedLink::new(rate),
            into: QueuedLink::new(rate),
            resident: vec![0; course.pieces.div_ceil(64) as usize],
            errands: BTreeMap::new(),
            course,
            again: Vec::new(),
            reading: 0,
            read: 0,
            finished_at: None,
            suspicions: Suspicions::default(),
            pass_overs: PassOvers::default(),
            patience: PeerPatience::for_long_requests(times),
            times,
            pool_bytes: 0,
        }
    }

    pub fn has(&self, range: RangeNumber) -> bool {
        self.resident[range as usize / 64] & (1 << (range % 64)) != 0
    }

    pub fn keep(&mut self, range: RangeNumber) {
        self.resident[range as usize / 64] |= 1 << (range % 64);
    }

    pub fn held(&self, range: RangeNumber) -> HeldRange {
        match self.has(range) {
            true => HeldRange::Resident,
            false => match self.errands.get(&range) {
                None => HeldRange::Absent,
                Some(errands) if errands.from_pool || errands.for_others => HeldRange::FromPool,
                Some(_) => HeldRange::FromPeer,
            },
        }
    }

    /// The daemon ends. What is resident stays. Returns the requests of other nodes that wait for this one.
    pub fn stop(&mut self, now: Moment) -> Vec<Errand> {
        self.is_up = false;
        self.life += 1;
        let errands = std::mem::take(&mut self.errands);
        self.again.extend(errands.iter().filter(|(_, of)| of.for_job).map(|(range, _)| *range));
        self.stopped_at = now;
        self.changed_at = Some(now);
        self.reading = 0;
        self.lender = Lender::for_long_requests(self.id.clone(), self.times);
        self.suspicions = Suspicions::default();
        self.out.clear(now);
        self.into.clear(now);
        errands.into_values().flat_map(|of| of.waiting).collect()
    }

    /// Changes the rate of both links.
    pub fn set_rate(&mut self, bytes_per_sec: u64) {
        (self.out, self.into) = (QueuedLink::new(bytes_per_sec), QueuedLink::new(bytes_per_sec));
    }

    /// Returns whether members may have stood in for each other lately.
    pub fn is_unsettled(&self, now: Moment) -> bool {
        !self.suspicions.trusts_all() || self.changed_at.is_some_and(|at| now < at + UNSETTLED)
    }

    /// Returns the next range that the job reads.
    pub fn next_read(&mut self) -> Option<RangeNumber> {
        self.again.pop().or_else(|| self.course.advance())
    }

    /// Returns the enquiry to which an answer belongs, if it is still open.
    pub fn enquiry(&self, errand: &Errand) -> Option<OpenEnquiry> {
        let errands = self.errands.get(&errand.range).filter(|_| self.is_up && self.life == errand.life)?;
        errands.open.iter().find(|open| open.attempt == errand.attempt).copied()
    }

    pub fn awaits(&self, errand: &Errand) -> bool {
        self.enquiry(errand).is_some()
    }
}
