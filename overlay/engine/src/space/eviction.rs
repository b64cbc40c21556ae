//! Room in the fast pool: clean, unleased, unused content is evicted when something else needs the space.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{Reservation, SpaceBudget};
use forebay_policy::{SpacePolicy, Write};
use forebay_system::clock::unix_now;
use parking_lot::Mutex;

use super::super::{Inner, Ino, Txn};
use crate::counters::ChosenBy;
use crate::node::{Node, NodeState};

/// Why the content of a file is not evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeepReason {
    Dirty,
    Leased,
    Open,
    Fetching,
    /// There is nothing to evict.
    Absent,
}

impl KeepReason {
    /// Returns the reason for operators, with what helps.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Dirty => "not in the pool yet: flush first",
            Self::Leased => "leased: --release-leases ends the leases",
            Self::Open => "open: close it first",
            Self::Fetching => "being fetched",
            Self::Absent => "not resident",
        }
    }

    /// Returns what has to happen before eviction.
    pub fn what_evicts(self) -> &'static str {
        match self {
            Self::Dirty => "is evicted only after it is flushed",
            Self::Leased => "is evicted only after its leases end, or by `forebay evict --release-leases`",
            Self::Open => "is not evicted while it is open",
            Self::Fetching => "is not evicted while it is being fetched",
            Self::Absent => "there is nothing to evict",
        }
    }
}

/// How often a caller evicts content for its bytes: other callers may take what it freed.
const EVICTIONS: u32 = 16;

/// Callers that make room.
#[derive(Debug, Default)]
pub(crate) struct MakingRoom {
    turn: Mutex<()>,
    /// Bytes that callers of `reserve` wait for.
    asked: AtomicU64,
}

/// One caller of `reserve` that waits for room.
struct RoomRequest<'a> {
    making_room: &'a MakingRoom,
    bytes: u64,
}

impl<'a> RoomRequest<'a> {
    fn begin(making_room: &'a MakingRoom, bytes: u64) -> Self {
        making_room.asked.fetch_add(bytes, Ordering::Relaxed);
        Self { making_room, bytes }
    }
}

impl Drop for RoomRequest<'_> {
    fn drop(&mut self) {
        self.making_room.asked.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Inner {
    /// Reserves space, and evicts content if there is too little. Evicts nothing if all clean content would not suffice.
    ///
    /// # Errors
    /// `NoSpace` with the numbers.
    pub async fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.reserve_learning(bytes, EVICTIONS - 1).await
    }

    /// The same for content that a program can get from the pool, too: it is not waited for long.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub(crate) async fn reserve_fetched(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.reserve_learning(bytes, 1).await
    }

    /// Reserves space. `rounds`: how often it waits for the storage pools of content that may be pinned.
    async fn reserve_learning(self: &Arc<Self>, bytes: u64, rounds: u32) -> Result<Reservation> {
        for _ in 0..rounds {
            let learned = self.layouts.learned();
            match self.reserve_now(bytes).await {
                // Content whose storage pool is known by now may be evicted.
                Err(error) if error.is(ErrorKind::NoSpace) && self.learns_wanted_layouts(learned).await => {}
                reserved => return reserved,
            }
        }
        self.reserve_now(bytes).await
    }

    /// The same, with what is known of the storage pools of content.
    async fn reserve_now(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.advisor().fast_pool_grew();
        if let Some(reservation) = self.store.budget.reserve(bytes)
            && (bytes == 0 || self.store.free_bytes() >= bytes)
        {
            return Ok(reservation);
        }
        let inner = self.clone();
        super::super::blocking(move || {
            for attempt in 1..=EVICTIONS {
                let may_fit = bytes <= inner.room_after_eviction();
                let freed_bytes = if may_fit {
                    let _asked = RoomRequest::begin(&inner.space.making_room, bytes);
                    inner.make_room(bytes)?
                } else {
                    0
                };
                inner.trash.drain();
                if let Some(reservation) = inner.store.budget.reserve(bytes)
                    && inner.store.free_bytes() >= bytes
                {
                    return Ok(reservation);
                }
                // The first attempt may have counted on the victims of another caller.
                if attempt > 1 && freed_bytes == 0 {
                    break;
                }
            }
            inner.flusher.bell.notify_one();
            let budget = &inner.store.budget;
            Err(Error::new(
                ErrorKind::NoSpace,
                Side::Cache,
                format!(
                    "{bytes} bytes do not fit: {} of {} are used, {} promised, {} free on the device, and nothing \
                     more may be evicted; flush, or give a larger --limit",
                    budget.used(),
                    budget.limit(),
                    budget.reserved(),
                    inner.store.free_bytes(),
                ),
            ))
        })
        .await
    }

    /// Returns the most bytes that could be reserved if all clean content were evicted. Blocks.
    pub(crate) fn room_after_eviction(&self) -> u64 {
        // A victim that is being evicted is neither in the order of eviction nor pending.
        let _turn = self.space.making_room.turn.lock();
        let evictable = self.space.evictor.lock().bytes().saturating_add(self.trash.pending_bytes());
        let budget = &self.store.budget;
        let stays = budget.taken().saturating_sub(evictable);
        budget.limit().saturating_sub(stays).min(self.store.free_bytes().saturating_add(evictable))
    }

    /// Evicts until `bytes` more fit below the high watermark, and all that callers of `reserve` wait for, if possible.
    /// Returns the bytes that it evicted. Blocks. One caller at a time: the bytes that one evicts are not evicted again
    /// by the next.
    pub(crate) fn make_room(&self, bytes: u64) -> Result<u64> {
        self.advisor().report_uses();
        let _turn = self.space.making_room.turn.lock();
        let bytes = bytes.max(self.space.making_room.asked.load(Ordering::Relaxed));
        // The file of evicted content is removed when its record is synced. On a busy disk that takes seconds.
        let pending = self.trash.pending_bytes();
        let needed = bytes_to_evict(&self.store.budget, self.policy().space, pending, bytes);
        let short_on_disk = bytes.saturating_sub(self.store.free_bytes().saturating_add(pending));
        self.evict_now(needed.max(short_on_disk), ChosenBy::Space, &|_| true)
    }

    /// Evicts so many bytes of content of a full tier that may go and that `of` names. Blocks.
    pub(crate) fn evict_of_tier(&self, bytes: u64, of: &dyn Fn(u64) -> bool) -> Result<()> {
        let _turn = self.space.making_room.turn.lock();
        self.evict_now(bytes, ChosenBy::Tier, of).map(drop)
    }

    /// The same for the caller whose turn it is.
    fn evict_now(&self, wanted: u64, chosen_by: ChosenBy, of: &dyn Fn(u64) -> bool) -> Result<u64> {
        let (mut stayed, mut failed) = (Vec::new(), Ok(()));
        let mut leased = HashMap::new();
        let (mut left, mut freed_bytes) = (wanted, 0);
        while left > 0 {
            let Some(victim) = self.victim(&mut leased, of) else { break };
            match self.evict_inode(victim, chosen_by) {
                Ok(Ok(bytes)) => {
                    left = left.saturating_sub(bytes.max(1));
                    freed_bytes += bytes;
                }
                Ok(Err(KeepReason::Absent)) => {}
                Err(error) if error.is(ErrorKind::Stale) => {}
                // It came into use meanwhile. The policy has dropped it, so it is inserted again below.
                Ok(Err(_)) => stayed.push(victim),
                Err(error) => {
                    stayed.push(victim);
                    failed = Err(error);
                    break;
                }
            }
        }
        let now = unix_now();
        for ino in stayed {
            let Ok(node) = self.node(ino) else { continue };
            let mut state = node.state.lock();
            if !matches!(self.kept(&state, now), Some(KeepReason::Absent | KeepReason::Dirty)) {
                let bytes = self.counted_bytes(&mut state);
                self.note_clean(ino, state.record.file.content(), bytes);
            }
        }
        failed.map(|()| freed_bytes)
    }

    /// Returns the next inode that the policy gives up, that may be evicted, and that `of` names. Content staged for a running job goes
    /// last. `leased`: of inodes that are not in memory, whether they have leases. It is kept for the next call, because
    /// the policy may propose all of them again.
    fn victim(&self, leased: &mut HashMap<u64, bool>, of: &dyn Fn(u64) -> bool) -> Option<Ino> {
        let now = unix_now();
        let has_leases = |key: u64| self.catalog.leases_of(Ino(key)).map_or(true, |leases| leases.hold(now));
        let mut may_go = |key: u64| {
            !self.is_pinned_by_policy(Ino(key))
                && match self.table.peek(Ino(key)) {
                    // A locked inode is in use. What is absent leaves the policy.
                    Some(node) => node
                        .state
                        .try_lock()
                        .is_some_and(|state| self.kept(&state, now).is_none_or(|kept| kept == KeepReason::Absent)),
                    None => !*leased.entry(key).or_insert_with(|| has_leases(key)),
                }
        };
        let mut evictor = self.space.evictor.lock();
        let unwanted = evictor.evict(&mut |key| of(key) && !self.advisor().keeps(Ino(key)) && may_go(key));
        unwanted.or_else(|| evictor.evict(&mut |key| of(key) && may_go(key))).map(Ino)
    }

    /// Returns why the content of an inode may not be evicted; `None`: it may.
    pub(crate) fn kept(&self, state: &NodeState, now_unix: u64) -> Option<KeepReason> {
        let file = state.record.file;
        match () {
            () if file.is_absent() || state.is_deleted() => Some(KeepReason::Absent),
            () if file.is_dirty() => Some(KeepReason::Dirty),
            () if state.leases.hold(now_unix) => Some(KeepReason::Leased),
            () if state.opens.any() || state.opens.is_opening() => Some(KeepReason::Open),
            () if !state.flights.is_empty() => Some(KeepReason::Fetching),
            () => None,
        }
    }

    /// Evicts the content of an inode. Returns the bytes that it occupied, or why it stays.
    pub(crate) fn evict_inode(&self, ino: Ino, chosen_by: ChosenBy) -> Result<Result<u64, KeepReason>> {
        let mut txn = Txn::begin(self);
        if let Some(kept) = self.kept(txn.state(ino)?, unix_now()) {
            return Ok(Err(kept));
        }
        let bytes = match chosen_by {
            ChosenBy::Space | ChosenBy::Tier => txn.give_up_chosen(ino)?,
            ChosenBy::Request | ChosenBy::Rule | ChosenBy::Repair => txn.give_up(ino)?,
        };
        // What the page cache holds of this version stays valid.
        txn.commit()?;
        self.advisor().evicted(ino);
        self.counters.count_eviction(chosen_by, bytes);
        // The kernel's passthrough registration holds the content file, and with it the space.
        self.tell_kernel_inode(ino, true);
        Ok(Ok(bytes))
    }

    /// Drops the content of a file whose rule says `write = "around"`, if the pool has it and no program uses it.
    pub(crate) fn drop_written_around(&self, node: &Node) -> Result<()> {
        if self.policy().may_write(Write::Around) && self.policy_of(node).write == Write::Around {
            // What is not in the pool yet stays, and is dropped after its flush.
            let _ = self.evict_inode(node.ino, ChosenBy::Rule)?;
        }
        Ok(())
    }

    /// Evicts clean content of the slowest tier until `bytes` more fit below the high watermark, or below the low one if
    /// the high one is passed. Blocks.
    pub(crate) fn make_room_in(&self, tier: usize, bytes: u64) -> Result<()> {
        if tier != self.store.last_tier() {
            return Ok(());
        }
        let space = self.policy().tiers[tier].space;
        let wanted = bytes_to_evict(&self.store.tiers()[tier].budget, space, self.trash.pending_bytes(), bytes);
        self.evict_of_tier(wanted, &|key| !self.is_in_faster_tier(Ino(key)))
    }
}

/// Returns the bytes to evict so that `bytes` more fit below the high watermark, or below the low one if the high one is
/// passed. `pending` bytes of evicted content are still counted as used.
fn bytes_to_evict(budget: &SpaceBudget, space: SpacePolicy, pending: u64, bytes: u64) -> u64 {
    let is_high = budget.above(space.high_watermark) > pending;
    let share = if is_high { space.low_watermark } else { space.high_watermark };
    let may_stay = (budget.limit() as f64 * share) as u64;
    budget.taken().saturating_add(bytes).saturating_sub(pending).saturating_sub(may_stay)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_on_their_way_out_are_not_evicted_again() {
        let budget = SpaceBudget::new(100);
        budget.account(0, 60);
        let space = SpacePolicy { high_watermark: 0.5, low_watermark: 0.4 };
        let needed = |pending, bytes| bytes_to_evict(&budget, space, pending, bytes);
        assert_eq!((needed(0, 0), needed(0, 10)), (20, 30));
        assert_eq!((needed(5, 0), needed(20, 0)), (15, 0));
        assert_eq!(needed(20, 15), 5, "the high watermark is not passed any more");
        assert_eq!(needed(30, 15), 0, "another caller has made room");
    }
}
