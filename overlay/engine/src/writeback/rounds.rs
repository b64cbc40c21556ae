//! The flush by policy: rounds over the entries of the queue that are due.
//!
//! Each lane of each user has its own round. So failures and long uploads of one user delay no other user, and no first
//! attempt waits for repeated ones. Users begin in turn. At most `ROUNDS` rounds of `ROUND` intents are in memory.
//!
//! If a round makes no progress, the log and `status` say so, with the reason for each of up to `STUCK_NAMED` files.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_backends::Result;
use forebay_catalog::{Catalog, Intent, Lane, QueueHeads, QueueSlot, Queued, Wait};
use forebay_policy::{FlushPolicy, Priority};
use forebay_system::descriptors::for_flush;
use futures::FutureExt;
use tokio::task::JoinSet;

use super::due::{Due, LOOK_AGAIN, look_again_in};
use super::manual_look::ManualLook;
use super::notices::QueueNotices;
use super::state::FactsNumber;
use super::{CONCURRENCY, Failed};
use crate::{Inner, Ino, Txn, blocking};

/// Rounds that run at the same time.
const ROUNDS: usize = 8;
/// Intents of one round of first attempts.
pub(super) const ROUND: usize = 4096;
/// Intents of one round of repeated attempts.
const ROUND_AGAIN: usize = 512;
/// Steps that a round may run at the same time at least, however many users there are.
const STEPS_LEAST: usize = 2;
/// The interval of looks at the queue while entries are due.
const FLUSH_EVERY: Duration = Duration::from_millis(250);
/// The interval of looks at the queue while no entry is due yet: the fast pool may be full before the first one is.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A flush that failed is tried again after this long, twice as long each time.
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// The longest time between two attempts.
const RETRY_LAST: Duration = Duration::from_secs(60);
/// Entries that one batch requeues.
const PLACES: usize = 256;
/// Files that are named for rounds without progress, in all.
const STUCK_NAMED: usize = 20;
/// The interval of log messages while rounds make no progress.
const STUCK_TOLD_EVERY: Duration = Duration::from_secs(60);
/// Lanes whose position in the queue is remembered. Without it, the position is found more slowly.
const CURSORS: usize = 4096;
/// A position is not remembered longer than this.
const CURSORS_EVERY: Duration = Duration::from_secs(20);
/// Lanes whose last round made no progress, with the reasons.
#[derive(Debug, Default)]
pub(crate) struct Stuck {
    lanes: BTreeMap<(u32, Lane), Vec<String>>,
    told: Option<Instant>,
}

type LaneOf = (u32, Lane);

/// How a round ended.
struct RoundEnd {
    lane: LaneOf,
    /// All entries before this are done.
    until_us: u64,
    tried: usize,
    done: usize,
    stuck: Vec<String>,
}

struct Rounds {
    /// How far each lane was emptied, so that a look does not go through deleted entries before that. Forgotten now and
    /// then, since an entry may be written later than its time.
    cursors: HashMap<LaneOf, u64>,
    cursors_since: Option<Instant>,
    /// The last look began at the beginning of each lane that seems empty.
    is_complete: bool,
    running: HashSet<LaneOf>,
    last: u32,
    manual: ManualLook,
}

impl Inner {
    /// Returns why rounds made no progress, file by file.
    pub(crate) fn stuck(&self) -> Vec<String> {
        let stuck = self.flusher.stuck.lock();
        stuck.lanes.values().flatten().take(STUCK_NAMED).cloned().collect()
    }
}

/// Flushes by policy until the engine stops.
pub(crate) async fn flush_loop(inner: Arc<Inner>) {
    let mut rounds = Rounds::after_start();
    let mut running = JoinSet::new();
    loop {
        if inner.policy().uniform().is_some_and(|policy| policy.flush() == FlushPolicy::Manual) {
            // Nothing becomes due by itself until another policy is in force.
            inner.flusher.activity.note(HashSet::new(), 0);
            inner.flusher.bell.notified().await;
            continue;
        }
        let wait = match rounds.begin(&inner, &mut running).await {
            Ok(wait) => wait,
            Err(error) => {
                tracing::error!(%error, "the queue of the flush cannot be read");
                // What was noted may hold no longer.
                inner.flusher.activity.note(HashSet::new(), 0);
                Some(LOOK_EVERY)
            }
        };
        let something = wait.is_some();
        let until_aged = rounds.manual.until_aged(Instant::now()).filter(|_| inner.policy().needed().age);
        let until = until_aged.into_iter().chain(rounds.until_complete()).min();
        tokio::select! {
            Some(ended) = running.join_next() => match ended {
                Ok(Ok(end)) => {
                    rounds.end(&inner, end);
                    // Entries that are still due do not wait.
                    continue;
                }
                Ok(Err((lane, error))) => {
                    rounds.running.remove(&lane);
                    let error: forebay_backends::Error = error;
                    tracing::error!(%error, user = lane.0, "a flush round ended early");
                }
                Err(error) => {
                    // The error does not name the round, so all are forgotten. A round that still runs is handled when
                    // it ends.
                    rounds.running.clear();
                    tracing::error!(%error, "a flush round ended early");
                }
            },
            () = inner.flusher.bell.notified() => {}
            () = inner.catalog.queued(), if !something => {}
            () = tokio::time::sleep(wait.or(until).unwrap_or(LOOK_EVERY)), if something || until.is_some() => {}
        }
        tokio::time::sleep(FLUSH_EVERY).await;
    }
}

impl Rounds {
    fn after_start() -> Self {
        Self {
            cursors: HashMap::new(),
            cursors_since: None,
            is_complete: true,
            running: HashSet::new(),
            last: 0,
            manual: ManualLook::after_start(),
        }
    }

    /// Begins rounds for what is due. Returns how long it is until something may be due again; `None`: nothing waits.
    async fn begin(
        &mut self,
        inner: &Arc<Inner>,
        running: &mut JoinSet<Result<RoundEnd, (LaneOf, forebay_backends::Error)>>,
    ) -> Result<Option<Duration>> {
        let notices = std::mem::take(&mut *inner.flusher.calls.lock());
        if let Err(error) = self.follow(inner, &notices).await {
            inner.flusher.calls.lock().put_back(notices);
            return Err(error);
        }
        if self.cursors_since.is_none_or(|since| since.elapsed() >= CURSORS_EVERY) {
            self.cursors.clear();
            self.cursors_since = Some(Instant::now());
        }
        let (again, cursors) = (inner.clone(), self.cursors.clone());
        let QueueHeads { slots: heads, is_complete } =
            blocking(move || again.catalog.queue_heads(|user, lane| cursors.get(&(user, lane)).copied().unwrap_or(0)))
                .await?;
        self.is_complete = is_complete;
        inner.flusher.stuck.lock().lanes.retain(|lane, _| heads.iter().any(|head| (head.user, head.lane) == *lane));
        let manual_left = self.look_at_manual(inner, &heads).await?;
        let now = inner.catalog.queue_now();
        let full = inner.store.budget.above(inner.policy().space.high_watermark) > 0;
        let pressed = full || inner.waiting_for_room() > 0 || inner.is_flush_behind();
        let mut wait = manual_left.then_some(FLUSH_EVERY);
        let due_since = heads.iter().filter(|head| head.lane != Lane::Manual).map(|head| head.at_us).min();
        // The turns begin after the user whose round began last.
        let split = heads.partition_point(|head| head.user <= self.last);
        let turns = heads[split..].iter().chain(&heads[..split]);
        let users = heads.iter().filter(|head| head.lane != Lane::Manual).map(|head| head.user).collect::<HashSet<_>>();
        for head in turns.filter(|head| head.lane != Lane::Manual) {
            let lane = (head.user, head.lane);
            let is_pressed =
                |user| inner.shares.is_pressed(user) || inner.is_share_scarce(user) || inner.quotas.is_pressed(user);
            let pressed = pressed || is_pressed(head.user);
            let left = match pressed && head.lane == Lane::Fresh {
                true => Duration::ZERO,
                false => Duration::from_micros(head.at_us.saturating_sub(now)),
            };
            let busy = self.running.contains(&lane) || self.running.len() >= ROUNDS;
            if left.is_zero() && !busy {
                self.running.insert(lane);
                self.last = head.user;
                let from_us = self.cursors.get(&lane).copied().unwrap_or(0);
                let steps = (for_flush(CONCURRENCY) / users.len().max(1)).max(STEPS_LEAST);
                let inner = inner.clone();
                let task =
                    async move { inner.round(lane, from_us, pressed, steps).await.map_err(|error| (lane, error)) };
                running.spawn(task.boxed());
            }
            wait = Some(wait.unwrap_or(LOOK_EVERY).min(left.clamp(FLUSH_EVERY, LOOK_EVERY)));
        }
        let users = self.running.iter().map(|(user, _)| *user).collect();
        inner.flusher.activity.note(users, due_since.map_or(0, |at| now.saturating_sub(at)));
        Ok(wait)
    }

    /// Returns how long it is until all lanes are looked at from their beginning, if one may have an entry before its cursor.
    fn until_complete(&self) -> Option<Duration> {
        let since = self.cursors_since.filter(|_| !self.is_complete)?;
        Some(CURSORS_EVERY.saturating_sub(since.elapsed()))
    }

    /// Does what other parts of the engine told the queue. After an error, it is to be done once more.
    async fn follow(&mut self, inner: &Arc<Inner>, notices: &QueueNotices) -> Result<()> {
        if !notices.hastened.is_empty() || !notices.doubtful.is_empty() {
            let (again, hastened, doubtful) = (inner.clone(), notices.hastened.clone(), notices.doubtful.clone());
            blocking(move || {
                again.hasten_all(hastened)?;
                again.look_at_doubtful(doubtful)
            })
            .await?;
        }
        if notices.moved || notices.policy_changed {
            self.manual.want();
        }
        if notices.policy_changed {
            self.cursors.clear();
            let again = inner.clone();
            blocking(move || again.look_at_waiting()).await?;
        }
        Ok(())
    }

    fn end(&mut self, inner: &Inner, end: RoundEnd) {
        self.running.remove(&end.lane);
        if self.cursors.len() >= CURSORS {
            self.cursors.clear();
        }
        self.cursors.insert(end.lane, end.until_us);
        let mut stuck = inner.flusher.stuck.lock();
        if end.done > 0 || end.tried == 0 {
            if end.done > 0 {
                stuck.lanes.remove(&end.lane);
            }
            return;
        }
        let news = stuck.lanes.insert(end.lane, end.stuck.clone()).is_none();
        if news || stuck.told.is_none_or(|told| told.elapsed() >= STUCK_TOLD_EVERY) {
            stuck.told = Some(Instant::now());
            drop(stuck);
            tracing::error!(
                user = end.lane.0,
                tried = end.tried,
                why = end.stuck.join("; "),
                "a flush round failed; its files stay in the fast pool"
            );
        }
    }

    /// Goes through some of the manual entries: after the start, because the policy may be another one, after names moved,
    /// and now and then if rules ask for the age of files. Returns whether there are more.
    async fn look_at_manual(&mut self, inner: &Arc<Inner>, heads: &[QueueSlot]) -> Result<bool> {
        let users: Vec<u32> = heads.iter().filter(|head| head.lane == Lane::Manual).map(|head| head.user).collect();
        if inner.policy().needed().age {
            self.manual.want_for_age(Instant::now());
        }
        let Some((user, from)) = self.manual.next(&users, inner.catalog.queue_now(), Instant::now()) else {
            return Ok(self.manual.is_wanted());
        };
        let again = inner.clone();
        let until = blocking(move || again.look_at_manual(user, from)).await?;
        self.manual.looked(user, until.unwrap_or(u64::MAX));
        Ok(true)
    }
}

impl Inner {
    /// Runs one round: takes what is due of a lane, flushes it, and requeues what still differs.
    async fn round(self: Arc<Self>, lane: LaneOf, from_us: u64, pressed: bool, steps: usize) -> Result<RoundEnd> {
        let now = self.catalog.queue_now();
        let again = self.clone();
        let (taken, unknown) = blocking(move || {
            let until = if pressed && lane.1 == Lane::Fresh { u64::MAX } else { now };
            let most = if lane.1 == Lane::Fresh { ROUND } else { ROUND_AGAIN };
            let taken = again.catalog.queue_take(lane.0, lane.1, from_us, until, most)?;
            let unknown = again.directories_to_ask(taken.iter().map(|entry| &entry.intent));
            Ok((taken, unknown))
        })
        .await?;
        if let Err(error) = self.learn_directories(unknown).await
            && self.policies.may_tell_unknown()
        {
            tracing::warn!(%error, "the settings of directories are not known; what is below them waits");
        }
        let again = self.clone();
        let (due, until_us) = blocking(move || {
            // Entries that come into the lane from now on have a later time than now.
            let until_us = taken.last().map_or(from_us, |entry| entry.slot.at_us.min(now));
            let (mut due, mut places, facts) = (Vec::new(), Vec::new(), again.flusher.facts());
            for entry in taken {
                match again.is_due(&entry, pressed) {
                    Ok(Due::Now) => due.push(entry),
                    Ok(other) => places.push((entry, other)),
                    Err(error) => {
                        tracing::error!(%error, "the queue of the flush cannot be read");
                        places.push((entry, Due::In(Lane::Later, RETRY_LAST)));
                    }
                }
            }
            again.give_places(places, facts)?;
            again.order_by_priority(&mut due);
            Ok((due, until_us))
        })
        .await?;
        if due.is_empty() {
            return Ok(RoundEnd { lane, until_us, tried: 0, done: 0, stuck: Vec::new() });
        }
        let plan = self.plan_flush(due.iter().map(|entry| entry.intent.clone()).collect());
        let failed = self.flush_some(plan, steps, |_| {}).await;
        let (tried, again) = (due.len(), self.clone());
        let (done, stuck) = blocking(move || again.put_back(due, &failed)).await?;
        Ok(RoundEnd { lane, until_us, tried, done, stuck })
    }

    /// After a round: entries that no longer differ leave the queue, the other ones wait. Returns how many are done,
    /// and why the other ones are not.
    fn put_back(&self, tried: Vec<Queued>, failed: &Failed) -> Result<(usize, Vec<String>)> {
        let failed: HashMap<&Intent, String> =
            failed.iter().map(|f| (&f.intent, format!("{}: {}", f.path, f.error))).collect();
        let (mut done, mut stuck, mut places) = (0, Vec::new(), Vec::new());
        for entry in tried {
            let held = matches!(&entry.intent, Intent::Inode(ino) if self.may_be_written(*ino));
            let why = failed.get(&entry.intent);
            let place = if !self.still_differs(&entry.intent) {
                done += 1;
                QueueDestination::Leave
            } else if why.is_none() && held {
                done += 1;
                QueueDestination::Held(self.looks_again_in(&entry.intent))
            } else {
                if stuck.len() < STUCK_NAMED {
                    stuck.push(why.cloned().unwrap_or_else(|| {
                        format!(
                            "{}: it changed while it was flushed, or waits for another name",
                            self.path_of(&entry.intent)
                        )
                    }));
                }
                QueueDestination::Failed
            };
            places.push((entry, place));
        }
        self.place_all(places)?;
        Ok((done, stuck))
    }

    /// Gives entries the places that were decided by these facts. If other facts are known by now, manual entries are looked
    /// at once more: the look because of the new facts may have passed before.
    pub(super) fn give_places(&self, places: Vec<(Queued, Due)>, facts: FactsNumber) -> Result<()> {
        let manual = places.iter().filter(|(_, due)| *due == Due::Manual).map(|(entry, _)| entry.intent.clone());
        let manual: Vec<Intent> = manual.collect();
        let placed = places.into_iter().map(|(entry, due)| {
            let place = match due {
                Due::In(lane, wait) => QueueDestination::In(lane, wait),
                Due::Manual => QueueDestination::Manual,
                Due::Gone | Due::Now => QueueDestination::Leave,
            };
            (entry, place)
        });
        self.place_all(placed.collect())?;
        if self.flusher.facts() != facts {
            let mut calls = self.flusher.calls.lock();
            manual.into_iter().for_each(|intent| calls.doubt(intent));
        }
        Ok(())
    }

    fn place_all(&self, places: Vec<(Queued, QueueDestination)>) -> Result<()> {
        let mut places = places.into_iter().peekable();
        while places.peek().is_some() {
            let mut txn = Txn::begin(self);
            for (entry, place) in places.by_ref().take(PLACES) {
                self.place_one(&mut txn, &entry, place)?;
            }
            txn.commit()?;
        }
        Ok(())
    }

    fn place_one(&self, txn: &mut Txn<'_>, entry: &Queued, place: QueueDestination) -> Result<()> {
        // An intent that was settled and differs again since has a new entry.
        if !self.catalog.is_queued_as(entry)? {
            txn.batch.leave_queue(entry);
            return Ok(());
        }
        let now = self.catalog.queue_unique();
        let (lane, wait, next) = match place {
            QueueDestination::Leave => {
                let is_gone = match &entry.intent {
                    Intent::Inode(ino) => self.catalog.inode(*ino)?.is_none_or(|record| !record.is_dirty()),
                    Intent::Name(parent, name) => !self.catalog.name(*parent, name)?.differs(),
                };
                if is_gone {
                    txn.batch.forget_intent(entry);
                    return Ok(());
                }
                // It differs, but its subject cannot be found.
                (Lane::Later, RETRY_LAST, entry.wait)
            }
            QueueDestination::In(lane, wait) => (lane, wait, Wait { failures: 0, ..entry.wait }),
            QueueDestination::Manual => (Lane::Manual, Duration::ZERO, Wait { failures: 0, ..entry.wait }),
            QueueDestination::Held(wait) => (Lane::Later, wait, Wait { since_us: now, failures: 0 }),
            QueueDestination::Failed => {
                let wait = RETRY_FIRST.saturating_mul(1 << entry.wait.failures.min(16)).min(RETRY_LAST);
                (Lane::Later, wait, Wait { failures: entry.wait.failures.saturating_add(1), ..entry.wait })
            }
        };
        let at_us = Catalog::queue_after(now, wait);
        let subject = match &entry.intent {
            Intent::Inode(ino) => Some(*ino),
            Intent::Name(parent, name) => self.catalog.name(*parent, name)?.here_ino(),
        };
        let mut user = entry.slot.user;
        if let Some(node) = subject.and_then(|ino| self.table.peek(ino))
            && let Some(mut state) = node.state.try_lock()
        {
            state.quiescence.postponed |= lane == Lane::Later;
            user = state.record.uid;
        }
        txn.batch.requeue(entry, QueueSlot { user, lane, at_us }, next)
    }

    /// Requeues files whose last writer closed them as if they had just been queued.
    fn hasten_all(&self, inos: HashSet<Ino>) -> Result<()> {
        let mut places = Vec::new();
        for ino in inos {
            let Ok(node) = self.node(ino) else { continue };
            let idle = match self.policy_of(&node).flush() {
                FlushPolicy::Idle(idle) => idle,
                FlushPolicy::JobEnd => Duration::ZERO,
                FlushPolicy::Every(_) | FlushPolicy::OnClose | FlushPolicy::Manual => continue,
            };
            let links = node.state.lock().record.links.clone();
            let names = links.into_iter().map(|(parent, name)| Intent::Name(parent, name));
            for intent in names.chain([Intent::Inode(ino)]) {
                if let Some(entry) = self.catalog.queued_as(&intent)?
                    && entry.slot.lane == Lane::Later
                {
                    places.push((entry, QueueDestination::In(Lane::Fresh, idle)));
                }
            }
        }
        self.place_all(places)
    }

    /// Gives all entries that wait for their time the time that the policy in force says.
    fn look_at_waiting(&self) -> Result<()> {
        let (mut places, facts) = (Vec::new(), self.flusher.facts());
        // In the order of the intents, which stays as it is while their times change.
        self.catalog.intents(|intent, _| {
            let entry = self.catalog.queued_as(&intent)?;
            // An entry that failed keeps its time.
            let waits = |entry: &Queued| entry.slot.lane != Lane::Manual && entry.wait.failures == 0;
            if let Some(entry) = entry.filter(waits) {
                let subject = self.subject_of(&intent);
                match self.is_due(&entry, false)? {
                    Due::Now => places.push((entry, Due::In(Lane::Fresh, Duration::ZERO))),
                    other => places.push((entry, other)),
                }
                subject.into_iter().for_each(|ino| self.table.drop_idle(ino));
            }
            if places.len() >= PLACES {
                self.give_places(std::mem::take(&mut places), facts)?;
            }
            Ok(true)
        })?;
        self.give_places(places, facts)
    }

    /// Puts entries of high priority first.
    fn order_by_priority(&self, due: &mut [Queued]) {
        if self.policy().uniform().is_some() {
            return;
        }
        due.sort_by_cached_key(|entry| {
            let node = self.subject_of(&entry.intent).and_then(|ino| self.node(ino).ok());
            node.map_or(Priority::Normal, |node| self.policy_of(&node).priority)
        });
    }

    /// Returns the inode that an intent is about.
    pub(crate) fn subject_of(&self, intent: &Intent) -> Option<Ino> {
        match intent {
            Intent::Inode(ino) => Some(*ino),
            Intent::Name(parent, name) => self.catalog.name(*parent, name).ok().and_then(|record| record.here_ino()),
        }
    }

    /// Returns when a file that was flushed while a program has it open is looked at again.
    fn looks_again_in(&self, intent: &Intent) -> Duration {
        let node = self.subject_of(intent).and_then(|ino| self.node(ino).ok());
        node.map_or(LOOK_AGAIN, |node| look_again_in(self.policy_of(&node).flush()))
    }
}

/// Where an entry of the queue goes.
#[derive(Debug, Clone, Copy)]
enum QueueDestination {
    Leave,
    In(Lane, Duration),
    Manual,
    /// The pool has it; a program may still change it.
    Held(Duration),
    Failed,
}
