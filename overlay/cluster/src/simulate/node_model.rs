//! One node: its links, what is resident, what it fetches, and how far its job is.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::events::{Errand, RangeNumber};
use super::links::QueuedLink;
use crate::Moment;
use crate::asking::{Asking, PeerPatience, UNSETTLED};
use crate::identity::NodeId;
use crate::lending::{HeldRange, Lender};
use crate::pass_over::PassOvers;
use crate::suspicion::Suspicions;

/// A range that a node fetches, once for all that want it.
#[derive(Debug)]
pub struct Errands {
    pub asking: Asking,
    /// The number of the last enquiry.
    pub attempt: u32,
    /// The enquiries that have no answer yet, and when each was sent.
    pub open: SmallVec<[(u32, Moment); 2]>,
    pub for_job: bool,
    /// Whether another node asked for it first.
    pub for_others: bool,
    /// Whether the pool was asked: then nothing else is.
    pub from_pool: bool,
    /// Other nodes that get it when it has arrived.
    pub waiting: Vec<(Errand, Moment)>,
}

/// What each node reads, in the order in which it reads it: a step through the ranges that meets each once.
#[derive(Debug, Clone)]
pub struct Course {
    begin: u64,
    step: u64,
    ranges: u64,
    position: u64,
}

impl Course {
    pub fn new(begin: u64, step: u64, ranges: u64) -> Self {
        Self { begin, step, ranges, position: 0 }
    }

    pub fn advance(&mut self) -> Option<RangeNumber> {
        let at = (self.position < self.ranges).then_some(self.position)?;
        self.position += 1;
        let range = (u128::from(self.begin) + u128::from(self.step) * u128::from(at)) % u128::from(self.ranges);
        Some(range as RangeNumber)
    }
}

pub struct NodeModel {
    pub id: NodeId,
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
    pub errands: HashMap<RangeNumber, Errands>,
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
    pub pool_ranges: u32,
}

impl NodeModel {
    pub fn new(id: NodeId, rate: u64, ranges: u64, course: Course) -> Self {
        Self {
            lender: Lender::new(id.clone()),
            id,
            is_up: true,
            is_lost: false,
            is_slow: false,
            has_job: true,
            life: 0,
            stopped_at: Moment::ZERO,
            changed_at: None,
            out: QueuedLink::new(rate),
            into: QueuedLink::new(rate),
            resident: vec![0; ranges.div_ceil(64) as usize],
            errands: HashMap::new(),
            course,
            again: Vec::new(),
            reading: 0,
            read: 0,
            finished_at: None,
            suspicions: Suspicions::default(),
            pass_overs: PassOvers::default(),
            patience: PeerPatience::default(),
            pool_ranges: 0,
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
        let mut errands: Vec<(RangeNumber, Errands)> = self.errands.drain().collect();
        // The order of a hash map differs from run to run.
        errands.sort_unstable_by_key(|(range, _)| *range);
        self.again.extend(errands.iter().filter(|(_, of)| of.for_job).map(|(range, _)| *range));
        self.stopped_at = now;
        self.changed_at = Some(now);
        self.reading = 0;
        self.lender = Lender::new(self.id.clone());
        self.suspicions = Suspicions::default();
        self.patience = PeerPatience::default();
        self.out.clear(now);
        self.into.clear(now);
        errands.into_iter().flat_map(|(_, of)| of.waiting).map(|(errand, _)| errand).collect()
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

    /// Whether an answer belongs to an enquiry that is still open.
    pub fn awaits(&self, errand: &Errand) -> bool {
        self.is_up
            && self.life == errand.life
            && self.errands.get(&errand.range).is_some_and(|of| of.open.iter().any(|(at, _)| *at == errand.attempt))
    }
}
