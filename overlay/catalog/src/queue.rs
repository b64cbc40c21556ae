//! The queue of write-back: an index of the intents by user, lane and time.
//!
//! The batch that makes a difference also writes the queue entry, and stores the entry's slot in the intent's record. A
//! batch that removes the difference deletes only the intent. The reader of the queue drops an entry whose slot differs
//! from the one in the intent's record. So a change of the overlay costs one write, and a restart finds the queue as it
//! was.
//!
//! Times are those of the queue's own clock, in microseconds. It never goes back: it follows the monotonic clock while
//! the daemon lives, and starts after a restart beyond every queued time. It depends neither on the time of day nor on
//! file times.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::Result;
use parking_lot::Mutex;
use rocksdb::{DB, Direction, IteratorMode};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::{Batch, Catalog, Intent, cf, corrupt, decoded, encode, failed};
use forebay_system::clock::unix_now;

/// The longest wait that is given to an entry: 100 years. The clock starts beyond all waits after a restart, so it could
/// end after some restarts otherwise.
const LONGEST_US: u64 = 100 * 365 * 86_400 * 1_000_000;
/// No clock comes to this time by itself: it is 292,000 years after the first start. An entry with a later one is due at
/// the next start, and does not count for the clock.
const NEVER_US: u64 = u64::MAX / 2;
/// Entries that one batch makes due.
const FORWARD: usize = 256;

/// The lane in which an intent waits. In each lane, the earlier time goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Lane {
    /// The intent waits until it has not changed for as long as the policy says, or less if the fast pool is full.
    Fresh = 0,
    /// The intent waits after a failed attempt, or while nothing can be done.
    Later = 1,
    /// The intent waits until an operator flushes it, or the policy changes.
    Manual = 2,
}

/// The place of an intent in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSlot {
    pub user: u32,
    pub lane: Lane,
    pub at_us: u64,
}

/// The value that the catalog stores for an intent.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct IntentRecord {
    /// Seconds since 1970 at which overlay and pool first differed; for reports only.
    pub since_unix: u64,
    pub slot: QueueSlot,
}

/// The value of a queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The time at which the pool last had it, or at which it was first looked at.
    pub since_us: u64,
    /// Consecutive failed attempts.
    pub failures: u32,
}

/// An intent and its entry in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queued {
    pub intent: Intent,
    pub slot: QueueSlot,
    pub wait: Wait,
}

/// The first entries of the lanes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueHeads {
    pub slots: Vec<QueueSlot>,
    /// Every lane without a head was looked at from its beginning, and is empty.
    pub is_complete: bool,
}

/// The part of the queue that is in memory: a few bytes for each user with entries.
#[derive(Debug)]
pub(super) struct FlushQueue {
    /// The queue's clock at `started`.
    base_us: u64,
    started: Instant,
    /// The latest time that was given out: each time is given out at most once.
    last_us: AtomicU64,
    /// The delay before a new entry is looked at for the first time.
    delay_us: AtomicU64,
    /// Users who may have entries.
    users: Mutex<BTreeSet<u32>>,
    added: Notify,
}

impl FlushQueue {
    pub(super) fn load(db: &DB) -> Result<Self> {
        let family = db.cf_handle(cf::QUEUE).ok_or_else(|| corrupt(cf::QUEUE))?;
        let mut users = BTreeSet::new();
        let mut base_us = 0;
        let mut next = Some(0u32);
        while let Some(from) = next {
            let first = lane_key(from, Lane::Fresh, 0);
            let Some(item) = db.iterator_cf(family, IteratorMode::From(&first, Direction::Forward)).next() else {
                break;
            };
            let (key, _) = item.map_err(|e| failed("read the catalog", e))?;
            let (slot, _) = parse(&key).ok_or_else(|| corrupt(cf::QUEUE))?;
            users.insert(slot.user);
            for lane in [Lane::Fresh, Lane::Later, Lane::Manual] {
                let end = lane_key(slot.user, lane, NEVER_US);
                let last = db.iterator_cf(family, IteratorMode::From(&end, Direction::Reverse)).next();
                if let Some((last, _)) =
                    last.transpose().map_err(|e| failed("read the catalog", e))?.and_then(|(k, _)| parse(&k))
                    && (last.user, last.lane) == (slot.user, lane)
                {
                    base_us = base_us.max(last.at_us);
                }
            }
            next = slot.user.checked_add(1);
        }
        Ok(Self {
            base_us: base_us + 1,
            started: Instant::now(),
            last_us: AtomicU64::new(0),
            delay_us: AtomicU64::new(0),
            users: Mutex::new(users),
            added: Notify::new(),
        })
    }

    fn now_us(&self) -> u64 {
        self.base_us.saturating_add(us(self.started.elapsed()))
    }

    /// Returns the current time, or a later one if the current one was given out before.
    fn unique_us(&self) -> u64 {
        let now = self.now_us();
        let step = |last: u64| Some(now.max(last + 1));
        let last = self.last_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).unwrap_or(now);
        now.max(last + 1)
    }

    /// Records that entries of these users are now in the catalog.
    pub(super) fn was_added(&self, users: &BTreeSet<u32>) {
        if !users.is_empty() {
            self.users.lock().extend(users);
            self.added.notify_one();
        }
    }
}

impl Catalog {
    /// Returns the time of the queue's clock, in microseconds.
    pub fn queue_now(&self) -> u64 {
        self.queue.now_us()
    }

    /// Returns the time of the queue's clock at which a wait from `now_us` on ends. A wait of more than 100 years ends
    /// after 100 years.
    pub fn queue_after(now_us: u64, wait: Duration) -> u64 {
        now_us.saturating_add(us(wait))
    }

    /// Returns the time of the queue's clock, in microseconds. No two calls return the same time.
    pub fn queue_unique(&self) -> u64 {
        self.queue.unique_us()
    }

    /// Makes entries due whose time never comes. Only at the start.
    pub(super) fn bring_forward(&self) -> Result<()> {
        let users = self.queue.users.lock().clone();
        for user in users {
            for lane in [Lane::Fresh, Lane::Later, Lane::Manual] {
                loop {
                    let taken = self.queue_take(user, lane, NEVER_US, u64::MAX, FORWARD)?;
                    if taken.is_empty() {
                        break;
                    }
                    tracing::warn!(user, "{} entries of the flush had a time that never comes", taken.len());
                    let mut batch = self.batch();
                    for entry in taken {
                        let at_us = self.queue_unique();
                        let wait = Wait { since_us: entry.wait.since_us.min(at_us), ..entry.wait };
                        batch.requeue(&entry, QueueSlot { at_us, ..entry.slot }, wait)?;
                    }
                    self.write(batch)?;
                }
            }
        }
        Ok(())
    }

    /// Sets the delay after which new entries are looked at.
    pub fn set_queue_delay(&self, delay: Duration) {
        self.queue.delay_us.store(us(delay), Ordering::Relaxed);
    }

    /// Waits until an entry is added. Returns at once if one was added since the last call.
    pub async fn queued(&self) {
        self.queue.added.notified().await;
    }

    /// Returns the first entry of each user's lanes. `from` returns the time up to which a lane is already empty.
    ///
    /// An entry may be written later than its time. So a user leaves the set only when all lanes were looked at from their
    /// beginning.
    pub fn queue_heads(&self, from: impl Fn(u32, Lane) -> u64) -> Result<QueueHeads> {
        let users = std::mem::take(&mut *self.queue.users.lock());
        let mut heads = QueueHeads { slots: Vec::new(), is_complete: true };
        let mut kept = BTreeSet::new();
        let mut found = Ok(());
        for user in &users {
            for lane in [Lane::Fresh, Lane::Later, Lane::Manual] {
                let (from_us, before) = (from(*user, lane), heads.slots.len());
                let first = self.scan_lane(*user, lane, from_us, |slot, _, _| {
                    heads.slots.push(slot);
                    Ok(false)
                });
                found = found.and(first);
                let is_empty = heads.slots.len() == before;
                if !is_empty || from_us > 0 {
                    kept.insert(*user);
                }
                heads.is_complete &= !is_empty || from_us == 0;
            }
        }
        // A batch that is written from now on adds its user to the set itself.
        self.queue.users.lock().extend(if found.is_ok() { kept } else { users });
        found.map(|()| heads)
    }

    /// Returns whether a user has anything that waits for more than an operator.
    pub fn has_queued(&self, user: u32) -> Result<bool> {
        let mut found = false;
        for lane in [Lane::Fresh, Lane::Later] {
            self.scan_lane(user, lane, 0, |_, _, _| {
                found = true;
                Ok(false)
            })?;
        }
        Ok(found)
    }

    /// Returns the first `most` entries of a lane whose time is `until_us` or earlier. Entries that do not match their
    /// intent's record are dropped.
    pub fn queue_take(&self, user: u32, lane: Lane, from_us: u64, until_us: u64, most: usize) -> Result<Vec<Queued>> {
        let mut taken = Vec::new();
        let mut stale = Vec::new();
        let mut met = 0;
        self.scan_lane(user, lane, from_us, |slot, intent, wait| {
            if slot.at_us > until_us {
                return Ok(false);
            }
            met += 1;
            match self.slot_of(&intent)? {
                Some(known) if known == slot => taken.push(Queued { intent, slot, wait }),
                _ => stale.push(Queued { intent, slot, wait }),
            }
            Ok(taken.len() < most && met < 4 * most)
        })?;
        let mut batch = self.batch();
        stale.iter().for_each(|entry| batch.leave_queue(entry));
        if !batch.is_empty() {
            self.write(batch)?;
        }
        Ok(taken)
    }

    /// Returns the entry of an intent, if it has one.
    pub fn queued_as(&self, intent: &Intent) -> Result<Option<Queued>> {
        let Some(slot) = self.slot_of(intent)? else { return Ok(None) };
        let wait: Option<Wait> = self.get(cf::QUEUE, &key(&slot, intent))?;
        Ok(wait.map(|wait| Queued { intent: intent.clone(), slot, wait }))
    }

    /// Returns whether an intent still has this entry.
    pub fn is_queued_as(&self, entry: &Queued) -> Result<bool> {
        Ok(self.slot_of(&entry.intent)? == Some(entry.slot))
    }

    fn slot_of(&self, intent: &Intent) -> Result<Option<QueueSlot>> {
        Ok(self.get::<IntentRecord>(cf::INTENTS, &intent.encode())?.map(|record| record.slot))
    }

    fn scan_lane(
        &self,
        user: u32,
        lane: Lane,
        from_us: u64,
        mut each: impl FnMut(QueueSlot, Intent, Wait) -> Result<bool>,
    ) -> Result<()> {
        self.scan(cf::QUEUE, &lane_key(user, lane, from_us), |key, value| {
            let (slot, intent) = parse(key).ok_or_else(|| corrupt(cf::QUEUE))?;
            if (slot.user, slot.lane) != (user, lane) {
                return Ok(false);
            }
            each(slot, intent, decoded(cf::QUEUE, value)?)
        })
    }
}

impl Batch<'_> {
    /// Adds an intent to the queue.
    pub(super) fn enter_queue(&mut self, user: u32, intent: &Intent) {
        let now_us = self.catalog.queue.unique_us();
        let at_us = now_us.saturating_add(self.catalog.queue.delay_us.load(Ordering::Relaxed));
        let slot = QueueSlot { user, lane: Lane::Fresh, at_us };
        self.queue(intent, slot, Wait { since_us: now_us, failures: 0 }, unix_now());
    }

    /// Removes an entry from the queue; the intent's record is not changed.
    pub fn leave_queue(&mut self, entry: &Queued) {
        self.delete_raw(cf::QUEUE, &key(&entry.slot, &entry.intent));
    }

    /// Moves an intent to another slot. The caller holds the namespace lock, and has checked that the intent still has
    /// this entry.
    ///
    /// # Errors
    /// The errors of the catalog.
    pub fn requeue(&mut self, entry: &Queued, slot: QueueSlot, wait: Wait) -> Result<()> {
        let record: Option<IntentRecord> = self.catalog.get(cf::INTENTS, &entry.intent.encode())?;
        self.leave_queue(entry);
        if let Some(record) = record {
            self.queue(&entry.intent, slot, wait, record.since_unix);
        }
        Ok(())
    }

    /// Deletes an intent and its entry.
    pub fn forget_intent(&mut self, entry: &Queued) {
        self.leave_queue(entry);
        self.delete_raw(cf::INTENTS, &entry.intent.encode());
    }

    fn queue(&mut self, intent: &Intent, slot: QueueSlot, wait: Wait, since_unix: u64) {
        self.put_raw(cf::INTENTS, &intent.encode(), &encode(&IntentRecord { since_unix, slot }));
        self.put_raw(cf::QUEUE, &key(&slot, intent), &encode(&wait));
        self.queued_for.insert(slot.user);
    }
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(LONGEST_US).min(LONGEST_US)
}

fn lane_key(user: u32, lane: Lane, at_us: u64) -> Vec<u8> {
    [user.to_be_bytes().as_slice(), &[lane as u8], &at_us.to_be_bytes()].concat()
}

fn key(slot: &QueueSlot, intent: &Intent) -> Vec<u8> {
    [lane_key(slot.user, slot.lane, slot.at_us), intent.encode()].concat()
}

fn parse(key: &[u8]) -> Option<(QueueSlot, Intent)> {
    let (user, rest) = key.split_first_chunk::<4>()?;
    let (lane, rest) = rest.split_first()?;
    let (at, rest) = rest.split_first_chunk::<8>()?;
    let lane = [Lane::Fresh, Lane::Later, Lane::Manual].into_iter().find(|l| *l as u8 == *lane)?;
    let slot = QueueSlot { user: u32::from_be_bytes(*user), lane, at_us: u64::from_be_bytes(*at) };
    Some((slot, Intent::decode(rest)?))
}

#[cfg(test)]
mod tests;
