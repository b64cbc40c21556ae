//! The loop of events.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use twox_hash::XxHash3_64;

use super::events::{Errand, Event, EventQueue, NodeNumber, RangeNumber};
use super::links::PoolModel;
use super::node_model::{Course, Errands, NodeModel, OpenEnquiry};
use super::timeline::Timeline;
use super::{
    ClusterOutcome, ClusterScenario, ClusterSettings, LEASE, PIECES_OF_A_FILE, READS_AT_ONCE, RESTART,
    RESTARTING_SHARE, ReadOrder, SLOWDOWN, START_SPREAD,
};
use crate::Moment;
use crate::asking::{Asking, AskingStep, Enquiry};
use crate::identity::{Member, NodeId, Role};
use crate::lending::{Lend, LocalFacts};
use crate::members::{MemberList, MemberSource, Roster};
use crate::ownership::{FileKey, FileOwners, RANGE_BYTES, RangeKey, Ranked, owners_of};
use crate::pass_over::{PassOver, PassOvers};
use crate::placement::{Placement, Placing};
use crate::protocol::{PeerAnswer, PeerAsk, Purpose};

/// How long a connection that was cut without a word counts as alive.
const SILENCE: Duration = Duration::from_secs(2);

pub struct ClusterModel<'a> {
    settings: &'a ClusterSettings,
    piece_bytes: u64,
    now: Moment,
    queue: EventQueue,
    nodes: Vec<NodeModel>,
    numbers: HashMap<NodeId, NodeNumber>,
    pool: PoolModel,
    members: MemberList,
    roster: Roster,
    placing: Placing,
    files: Vec<FileKey>,
    /// Of each piece.
    ranked: Vec<Ranked>,
    version: Arc<str>,
    timeline: Timeline,
    /// Jobs that have not ended.
    jobs_left: u32,
    /// Bytes that have left the pool; `pool.bytes` are those that were asked of it.
    pool_sent: u64,
    peer_bytes: u64,
    hedges: u64,
}

impl<'a> ClusterModel<'a> {
    pub fn new(settings: &'a ClusterSettings) -> Self {
        let pieces = settings.pieces();
        let times = (settings.piece_bytes() / RANGE_BYTES) as u32;
        let dedicated = if settings.placement == Placement::Dedicated { settings.cache_nodes } else { 0 };
        let mut members = MemberList::default();
        let mut nodes = Vec::new();
        let mut numbers = HashMap::new();
        for number in 0..settings.nodes + dedicated {
            let is_cache = number >= settings.nodes;
            // Letters, digits and a dash: always an identity.
            let Ok(id) = NodeId::new(&format!("node-{number:05}")) else { continue };
            let course = match settings.order {
                ReadOrder::Same => Course::new(0, 1, pieces),
                ReadOrder::Shuffled => shuffled(settings.seed, number, pieces),
            };
            let role = if is_cache { Role::Cache } else { Role::Compute };
            numbers.insert(id.clone(), number);
            let member = Member { id, address: String::new(), role };
            members.join(MemberSource::Etcd, member.clone());
            nodes.push(NodeModel::new(member, settings.node_rate, times, course));
        }
        let files = 0..pieces.div_ceil(PIECES_OF_A_FILE);
        let files = files.map(|file| FileKey::of("pool", format!("{}/{file}", settings.seed).as_bytes())).collect();
        let mut model = Self {
            settings,
            piece_bytes: settings.piece_bytes(),
            now: Moment::ZERO,
            queue: EventQueue::default(),
            nodes,
            numbers,
            pool: PoolModel::new(settings.pool_rate, settings.pool_latency, settings.pool_calls),
            roster: members.roster(),
            members,
            placing: Placing { placement: settings.placement, ..Placing::default() },
            files,
            ranked: Vec::new(),
            version: "1".into(),
            timeline: Timeline::new(pieces * u64::from(settings.nodes)),
            jobs_left: settings.nodes,
            pool_sent: 0,
            peer_bytes: 0,
            hedges: 0,
        };
        model.deal();
        model.plan();
        model
    }

    /// Computes the owners of all pieces.
    fn deal(&mut self) {
        self.roster = self.members.roster();
        let eligible = self.placing.eligible(&self.roster);
        self.ranked.clear();
        let mut left = self.settings.pieces();
        for file in &self.files {
            let pieces = left.min(PIECES_OF_A_FILE);
            left -= pieces;
            let owners = FileOwners::of(&self.roster, eligible.clone(), *file, pieces);
            self.ranked.extend((0..pieces).map(|index| owners.ranked(&self.roster, index)));
        }
    }

    /// Plans the starts, and what the scenario does to the nodes.
    fn plan(&mut self) {
        let seed = self.settings.seed;
        let count = self.nodes.len() as u32;
        let spread = START_SPREAD.as_nanos() as u64;
        for number in 0..count {
            let at = Duration::from_nanos(random(seed, 1, number) % spread);
            self.queue.push(at, Event::Start(number));
        }
        let middle = self.settings.bound() / 2;
        let mut drawn: Vec<u32> = (0..count).collect();
        drawn.sort_by_key(|number| (random(seed, 2, *number), *number));
        drawn.truncate((f64::from(count) * self.settings.affected).round() as usize);
        match self.settings.scenario {
            ClusterScenario::Storm => {}
            ClusterScenario::Loss => {
                for number in drawn {
                    self.queue.push(middle, Event::NodeLost(number));
                }
                self.queue.push(middle + LEASE, Event::LeasesExpire);
            }
            ClusterScenario::Slow => {
                for number in drawn {
                    let node = &mut self.nodes[number as usize];
                    node.set_rate(self.settings.node_rate / SLOWDOWN);
                    node.is_slow = true;
                }
            }
            ClusterScenario::Rolling => {
                let at_once = (f64::from(count) * RESTARTING_SHARE).ceil().max(1.0) as u32;
                for number in 0..count {
                    self.queue.push(START_SPREAD + RESTART * (number / at_once), Event::NodeStops(number));
                }
            }
        }
    }

    pub fn run(mut self) -> ClusterOutcome {
        while self.jobs_left > 0 {
            let Some((at, event)) = self.queue.pop() else { break };
            self.now = at;
            self.happen(event);
        }
        self.summary()
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Start(node) => {
                self.nodes[node as usize].is_up = true;
                self.read_on(node);
            }
            Event::AskArrives(errand) => self.ask_arrives(errand),
            Event::Answered(errand, answer) => self.answered(errand, &answer),
            Event::Sent { errand, began, peer_life } => {
                if !self.still_gives(&errand, peer_life) {
                    return;
                }
                let reader = &mut self.nodes[errand.reader as usize];
                let arrived = reader.into.receive(self.now, self.piece_bytes) + self.settings.node_latency;
                self.queue.push(arrived, Event::Delivered { errand, began, peer_life });
            }
            Event::Delivered { errand, began, peer_life } => self.delivered(errand, began, peer_life),
            Event::PoolSent { node, range, life } => {
                self.pool_sent += self.piece_bytes;
                if self.nodes[node as usize].life == life {
                    let arrived = self.nodes[node as usize].into.receive(self.now, self.piece_bytes);
                    self.queue.push(arrived, Event::PoolDelivered { node, range, life });
                }
            }
            Event::PoolDelivered { node, range, life } => {
                if self.nodes[node as usize].life == life {
                    self.land(node, range);
                }
            }
            Event::Resume(errand) => {
                let node = &self.nodes[errand.reader as usize];
                let waits = node.life == errand.life
                    && node.errands.get(&errand.range).is_some_and(|of| of.attempt == errand.attempt);
                if waits {
                    self.go_on(errand.reader, errand.range);
                }
            }
            Event::HedgeDue(errand) => self.hedge(errand),
            Event::NodeLost(node) => {
                self.nodes[node as usize].is_lost = true;
                self.stop(node, SILENCE);
                let node = &self.nodes[node as usize];
                if node.has_job && node.finished_at.is_none() {
                    self.jobs_left -= 1;
                }
            }
            Event::NodeStops(node) => {
                self.stop(node, self.settings.node_latency);
                self.queue.push(self.now + RESTART, Event::Start(node));
            }
            Event::LeasesExpire => {
                for node in self.nodes.iter().filter(|node| node.is_lost) {
                    self.members.leave(MemberSource::Etcd, &node.id);
                }
                self.deal();
                for node in &mut self.nodes {
                    node.changed_at = Some(self.now);
                }
            }
        }
    }

    /// Lets the job of a node read until enough ranges are under way.
    fn read_on(&mut self, number: NodeNumber) {
        loop {
            let node = &mut self.nodes[number as usize];
            if !node.is_up || !node.has_job || node.reading >= READS_AT_ONCE {
                return;
            }
            let Some(range) = node.next_read() else { return };
            if node.has(range) {
                self.has_read(number);
            } else if let Some(errands) = node.errands.get_mut(&range) {
                errands.for_job = true;
                node.reading += 1;
            } else {
                node.reading += 1;
                self.begin(number, range, true, false);
            }
        }
    }

    fn has_read(&mut self, number: NodeNumber) {
        let copies = self.pool_sent as f64 / (self.settings.unique_bytes()) as f64;
        self.timeline.note(self.now, copies);
        let node = &mut self.nodes[number as usize];
        node.read += 1;
        if node.read == self.settings.pieces() {
            node.finished_at = Some(self.now);
            self.jobs_left -= 1;
        }
    }

    /// Begins to fetch a range; `stands_in` for an owner that could not answer.
    fn begin(&mut self, number: NodeNumber, range: RangeNumber, for_job: bool, stands_in: bool) {
        let key = self.key(range);
        let node = &mut self.nodes[number as usize];
        let ranked: &[u32] = if self.placing.asks(&node.id) { self.ranked[range as usize].as_slice() } else { &[] };
        let unsettled = stands_in || node.is_unsettled(self.now);
        let asking = Asking::begin(self.now, &node.id, key, &self.roster, ranked, unsettled, !for_job);
        let open = SmallVec::new();
        let errands =
            Errands { asking, attempt: 0, open, for_job, for_others: !for_job, from_pool: false, waiting: Vec::new() };
        node.errands.insert(range, Box::new(errands));
        self.go_on(number, range);
    }

    fn go_on(&mut self, number: NodeNumber, range: RangeNumber) {
        let now = self.now;
        let node = &mut self.nodes[number as usize];
        let Some(errands) = node.errands.get_mut(&range) else { return };
        match errands.asking.next(now, &node.patience, &mut node.suspicions, &mut node.pass_overs) {
            AskingStep::Ask(enquiry) => self.send(number, range, enquiry),
            AskingStep::Wait(until) => {
                errands.attempt += 1;
                let (attempt, life) = (errands.attempt, node.life);
                let errand = Errand { reader: number, range, peer: number, purpose: Purpose::Fetch, attempt, life };
                self.queue.push(until, Event::Resume(errand));
            }
            AskingStep::Pool => self.read_pool(number, range),
        }
    }

    fn read_pool(&mut self, number: NodeNumber, range: RangeNumber) {
        let node = &mut self.nodes[number as usize];
        let Some(errands) = node.errands.get_mut(&range) else { return };
        errands.from_pool = true;
        node.pool_bytes += self.piece_bytes;
        let life = node.life;
        let sent = self.pool.read(self.now, self.piece_bytes);
        self.queue.push(sent, Event::PoolSent { node: number, range, life });
    }
    fn send(&mut self, number: NodeNumber, range: RangeNumber, enquiry: Enquiry) {
        let Some(&peer) = self.numbers.get(&enquiry.peer) else { return };
        let node = &mut self.nodes[number as usize];
        let Some(errands) = node.errands.get_mut(&range) else { return };
        errands.attempt += 1;
        let (hedge_at, give_up_at) = (enquiry.hedge_at, enquiry.give_up_at);
        let (attempt, passed_owners) = (errands.attempt, !enquiry.passed.is_empty());
        errands.open.push(OpenEnquiry { attempt, asked: self.now, hedge_at, give_up_at, passed_owners });
        let (life, purpose) = (node.life, enquiry.purpose);
        let errand = Errand { reader: number, range, peer, purpose, attempt, life };
        if self.nodes[peer as usize].is_lost {
            self.queue.push(give_up_at, Event::Answered(errand, Box::new(PeerAnswer::Not(PassOver::Gone))));
            self.queue.push(hedge_at, Event::HedgeDue(errand));
        } else {
            self.queue.push(self.now + self.settings.node_latency, Event::AskArrives(errand));
        }
    }

    fn ask_arrives(&mut self, errand: Errand) {
        let range = errand.range;
        let reader = &self.nodes[errand.reader as usize];
        let Some(OpenEnquiry { passed_owners, .. }) = reader.enquiry(&errand) else { return };
        // The owners that the reader passed over are behind this one in its list: only nodes that see other members
        // need them.
        let (from, passed) = (reader.id.clone(), SmallVec::new());
        let ask =
            PeerAsk { from, key: self.key(range), version: self.version.clone(), purpose: errand.purpose, passed };
        let ids: SmallVec<[NodeId; 3]> =
            owners_of(&self.ranked[range as usize]).iter().map(|seat| self.roster.member(*seat).id.clone()).collect();
        let may_give = self.placing.gives_to(&self.nodes[errand.peer as usize].member, &ask.from);
        let readers_give = self.placing.readers_give();
        let peer = &mut self.nodes[errand.peer as usize];
        if !peer.is_up {
            let answer = Box::new(PeerAnswer::Not(PassOver::Gone));
            self.queue.push(self.now + self.settings.node_latency, Event::Answered(errand, answer));
            return;
        }
        let held = peer.held(range);
        let facts = LocalFacts { held, owners: &ids, may_give, readers_give, has_room: true };
        match peer.lender.decide(&ask, facts) {
            Lend::Give => self.give(errand),
            Lend::WhenArrived => {
                if let Some(errands) = peer.errands.get_mut(&range) {
                    errands.waiting.push(errand);
                }
            }
            Lend::Fetch => {
                self.begin(errand.peer, range, false, passed_owners);
                if let Some(errands) = self.nodes[errand.peer as usize].errands.get_mut(&range) {
                    errands.waiting.push(errand);
                }
            }
            Lend::Answer(answer) => {
                self.queue.push(self.now + self.settings.node_latency, Event::Answered(errand, Box::new(answer)));
            }
        }
    }

    /// Sends a resident range.
    fn give(&mut self, errand: Errand) {
        let began = self.now;
        let peer = &mut self.nodes[errand.peer as usize];
        let (begin, sent) = peer.out.send(self.now, self.piece_bytes);
        let peer_life = peer.life;
        let reader = &mut self.nodes[errand.reader as usize];
        if let Some(open) = reader.enquiry(&errand) {
            // While an owner waits for the pool, it says so: the reader's time begins anew when it gives.
            let asked = open.asked.max(began);
            reader.patience.took(begin - asked);
            let (hedge_at, give_up_at) = (asked + (open.hedge_at - open.asked), asked + (open.give_up_at - open.asked));
            if begin > hedge_at {
                self.queue.push(hedge_at, Event::HedgeDue(errand));
            }
            if begin > give_up_at {
                self.queue.push(give_up_at, Event::Answered(errand, Box::new(PeerAnswer::Not(PassOver::Slow))));
            }
        }
        self.queue.push(sent, Event::Sent { errand, began, peer_life });
    }

    /// Returns whether the peer lives that gives; if not, tells the reader.
    fn still_gives(&mut self, errand: &Errand, peer_life: u32) -> bool {
        let peer = &self.nodes[errand.peer as usize];
        if peer.life == peer_life {
            return true;
        }
        let notice = if peer.is_lost { SILENCE } else { self.settings.node_latency };
        let at = self.now.max(peer.stopped_at + notice);
        self.queue.push(at, Event::Answered(*errand, Box::new(PeerAnswer::Not(PassOver::Gone))));
        false
    }

    fn delivered(&mut self, errand: Errand, began: Moment, peer_life: u32) {
        if !self.still_gives(&errand, peer_life) {
            return;
        }
        let time = self.now - began;
        let key = self.key(errand.range);
        let awaited = self.nodes[errand.reader as usize].awaits(&errand);
        let (to, reader_lives) = {
            let reader = &self.nodes[errand.reader as usize];
            (reader.id.clone(), reader.life == errand.life)
        };
        let peer = &mut self.nodes[errand.peer as usize];
        let peer_id = peer.id.clone();
        peer.lender.ended(key, &to, time, reader_lives);
        if !awaited {
            return;
        }
        self.peer_bytes += self.piece_bytes;
        let now = self.now;
        let node = &mut self.nodes[errand.reader as usize];
        let Some(errands) = node.errands.get_mut(&errand.range) else { return };
        let of = (&peer_id, errand.purpose);
        errands.asking.answered(now, of, &PeerAnswer::Content, &mut node.suspicions, &mut node.pass_overs);
        if !errands.from_pool {
            self.land(errand.reader, errand.range);
        }
    }

    fn answered(&mut self, errand: Errand, answer: &PeerAnswer) {
        if !self.nodes[errand.reader as usize].awaits(&errand) {
            return;
        }
        let peer = self.nodes[errand.peer as usize].id.clone();
        let now = self.now;
        let node = &mut self.nodes[errand.reader as usize];
        let Some(errands) = node.errands.get_mut(&errand.range) else { return };
        errands.open.retain(|open| open.attempt != errand.attempt);
        let of = (&peer, errand.purpose);
        errands.asking.answered(now, of, answer, &mut node.suspicions, &mut node.pass_overs);
        // While another enquiry is open, its answer decides.
        if errands.open.is_empty() && !errands.from_pool {
            self.go_on(errand.reader, errand.range);
        }
    }

    fn hedge(&mut self, errand: Errand) {
        if !self.nodes[errand.reader as usize].awaits(&errand) {
            return;
        }
        let slow = self.nodes[errand.peer as usize].id.clone();
        let now = self.now;
        let node = &mut self.nodes[errand.reader as usize];
        let Some(errands) = node.errands.get_mut(&errand.range) else { return };
        let second = errands.asking.hedge(now, &slow, &node.patience, &node.suspicions);
        if let Some(enquiry) = second {
            self.hedges += 1;
            self.send(errand.reader, errand.range, enquiry);
        }
    }

    /// A range is resident now.
    fn land(&mut self, number: NodeNumber, range: RangeNumber) {
        let node = &mut self.nodes[number as usize];
        node.keep(range);
        let Some(errands) = node.errands.remove(&range) else { return };
        if errands.for_job {
            node.reading -= 1;
        }
        for errand in errands.waiting {
            self.ask_arrives(errand);
        }
        if errands.for_job {
            self.has_read(number);
            self.read_on(number);
        }
    }

    /// A daemon ends. Those that wait for it notice after `notice`.
    fn stop(&mut self, number: NodeNumber, notice: Duration) {
        for errand in self.nodes[number as usize].stop(self.now) {
            let answer = Box::new(PeerAnswer::Not(PassOver::Gone));
            self.queue.push(self.now + notice, Event::Answered(errand, answer));
        }
    }

    fn key(&self, range: RangeNumber) -> RangeKey {
        let file = self.files[(u64::from(range) / PIECES_OF_A_FILE) as usize];
        RangeKey { file, index: u64::from(range) % PIECES_OF_A_FILE }
    }

    fn summary(self) -> ClusterOutcome {
        let done = |is_slow: bool| {
            let jobs = self.nodes.iter().filter(move |node| node.has_job && node.is_slow == is_slow);
            let mut times: Vec<Moment> = jobs.filter_map(|node| node.finished_at).collect();
            times.sort_unstable();
            times
        };
        let (times, slow) = (done(false), done(true));
        let at = |share: f64| match times.len() {
            0 => Duration::ZERO,
            count => times[((count as f64 * share).ceil() as usize).clamp(1, count) - 1],
        };
        let mut pass_overs = PassOvers::default();
        for node in &self.nodes {
            pass_overs.add(&node.pass_overs);
        }
        ClusterOutcome {
            settings: self.settings.clone(),
            unique_bytes: self.settings.unique_bytes(),
            pool_bytes: self.pool.bytes,
            peer_bytes: self.peer_bytes,
            finished: (times.len() + slow.len()) as u32,
            half: at(0.5),
            most: at(0.95),
            all: at(1.0),
            slow_nodes: slow.last().copied(),
            bound: self.settings.bound(),
            most_pool_bytes_of_a_node: self.nodes.iter().map(|node| node.pool_bytes).max().unwrap_or(0),
            pass_overs,
            hedges: self.hedges,
            events: self.queue.count(),
            timeline: self.timeline,
        }
    }
}

/// Returns a number that looks random, the same for the same arguments.
fn random(seed: u64, purpose: u64, number: u32) -> u64 {
    XxHash3_64::oneshot_with_seed(seed ^ purpose.rotate_left(32), &number.to_le_bytes())
}

fn shuffled(seed: u64, number: u32, pieces: u64) -> Course {
    let mut step = random(seed, 3, number) % pieces.max(1);
    // A step without a common divisor meets each range once; 1 is one.
    while step == 0 || common_divisor(step, pieces) != 1 {
        step = (step + 1) % pieces.max(2);
    }
    Course::new(random(seed, 4, number) % pieces.max(1), step, pieces)
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
