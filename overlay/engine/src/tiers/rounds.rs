//! Rounds of promotion and demotion.
//!
//! A tier above its high watermark gives its least recently used content to the next slower tier that has room, until it
//! is below the low watermark. The slowest tier evicts. Content that is promoted into a full tier takes the place of
//! content that was used less often.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_backends::{ErrorKind, Result};
use forebay_cache::ContentId;

use super::moving::{MoveEnd, MoveReason};
use crate::node::Node;
use crate::{Inner, Ino, blocking};

/// Pause after a round, so that one that cannot do anything is not repeated at once.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is tried to move the only copy of content out of memory, if nothing else begins a round.
const LEAVE_AGAIN: Duration = Duration::from_secs(5);
/// The largest file that is moved to a faster tier, as a share of its limit.
const LARGEST_SHARE: u64 = 8;

/// Moves content between tiers, as long as the daemon runs.
pub(crate) async fn tier_loop(inner: Arc<Inner>) {
    if !inner.store.has_tiers() {
        return std::future::pending().await;
    }
    loop {
        let leaves = !inner.tiers.uses.lock().leaving().is_empty();
        let grown = inner.store.tiers().iter().map(|tier| Box::pin(tier.budget.grown()));
        tokio::select! {
            () = inner.tiers.bell.notified() => {}
            _ = futures::future::select_all(grown) => {}
            () = tokio::time::sleep(LEAVE_AGAIN), if leaves => {}
        }
        let again = inner.clone();
        if let Err(error) = blocking(move || again.tier_round()).await {
            tracing::error!(%error, "content is not moved between tiers");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

impl Inner {
    fn tier_round(self: &Arc<Self>) -> Result<()> {
        let mut result = Ok(());
        let leaving = self.tiers.uses.lock().leaving();
        for ino in leaving {
            if self.stop.is_cancelled() {
                return result;
            }
            result = result.and(self.move_only_copy(ino));
        }
        self.advisor().report_uses();
        result = result.and(self.promote_wanted());
        for tier in 0..self.store.tiers().len() {
            result = result.and(self.relieve(tier));
        }
        result
    }

    /// Moves content out of memory if it is the only copy. If it cannot be moved now, a later round tries it again.
    fn move_only_copy(self: &Arc<Self>, ino: Ino) -> Result<()> {
        if self.has_left_memory(ino)? {
            return Ok(());
        }
        if let Some((_, bytes)) = self.placed(ino)
            && self.is_movable(ino)?
        {
            let to = self.tier_for_only_copy(bytes)?;
            self.move_placed(ino, to)?;
        }
        self.has_left_memory(ino).map(drop)
    }

    fn is_movable(&self, ino: Ino) -> Result<bool> {
        let Some(node) = self.present(ino)? else { return Ok(false) };
        let state = node.state.lock();
        Ok(self.movable(&node, &state, MoveReason::Placement).is_some())
    }

    /// Returns whether content in memory is not the only copy of a file, and notes it.
    fn has_left_memory(&self, ino: Ino) -> Result<bool> {
        let node = self.present(ino)?;
        let state = node.as_ref().map(|node| node.state.lock());
        let file = state.as_ref().map(|state| state.record.file);
        let is_only_copy =
            file.is_some_and(|file| file.is_dirty() && file.content().is_some_and(|id| self.store.is_volatile(id)));
        if !is_only_copy {
            // Under the lock of the inode: from now on, it may become the only copy again.
            self.tiers.uses.lock().has_left(ino);
        }
        Ok(!is_only_copy)
    }

    /// Returns a tier that survives a reboot, after making room for so many bytes in it and in the fast pool.
    fn tier_for_only_copy(self: &Arc<Self>, bytes: u64) -> Result<usize> {
        let has_room = |tier: &usize| {
            let of_tier = &self.store.tiers()[*tier];
            !of_tier.is_volatile && of_tier.has_room(bytes) && self.store.takes_content(*tier)
        };
        let fits = (0..self.store.tiers().len()).find(has_room);
        if bytes > self.room_after_eviction() {
            // All clean content would not suffice: it stays.
            return Ok(fits.unwrap_or_else(|| self.store.tier_for_writes()));
        }
        if fits.is_none() {
            self.make_room_in(self.store.last_tier(), bytes)?;
            self.trash.drain();
        }
        if self.store.budget.taken().saturating_add(bytes) > self.store.budget.limit() {
            self.make_room(bytes)?;
            self.trash.drain();
        }
        let last = Some(self.store.last_tier()).filter(has_room);
        Ok(fits.or(last).unwrap_or_else(|| self.store.tier_for_writes()))
    }

    fn promote_wanted(self: &Arc<Self>) -> Result<()> {
        let wanted = self.tiers.uses.lock().wanted();
        for ino in wanted {
            if self.stop.is_cancelled() {
                break;
            }
            if self.promote(ino)? != MoveEnd::InUse {
                self.tiers.uses.lock().settled(ino);
            }
        }
        Ok(())
    }

    /// Moves content to the next faster tier, if it fits there.
    fn promote(self: &Arc<Self>, ino: Ino) -> Result<MoveEnd> {
        let Some((id, bytes)) = self.placed(ino) else { return Ok(MoveEnd::Stays) };
        let Some(to) = self.store.tier_of(id).and_then(|tier| tier.checked_sub(1)) else { return Ok(MoveEnd::Stays) };
        let fits = bytes <= self.store.tiers()[to].budget.limit() / LARGEST_SHARE && self.store.takes_content(to);
        if !fits || !self.room_by_replacing(ino, to, bytes)? {
            return Ok(MoveEnd::Stays);
        }
        let moved = self.move_placed(ino, to)?;
        if let MoveEnd::Moved(_) = moved {
            self.store.tiers()[to].promoted_files.fetch_add(1, Ordering::Relaxed);
        }
        Ok(moved)
    }

    /// Demotes content of a tier that was used less often than a file, until the file fits. Returns whether it fits.
    fn room_by_replacing(self: &Arc<Self>, ino: Ino, tier: usize, bytes: u64) -> Result<bool> {
        loop {
            if self.store.tiers()[tier].has_room(bytes) {
                return Ok(true);
            }
            let coldest = {
                let uses = self.tiers.uses.lock();
                uses.coldest(tier).filter(|coldest| uses.count(*coldest) < uses.count(ino))
            };
            let Some(coldest) = coldest else { return Ok(false) };
            if !self.demote(coldest, tier)? {
                return Ok(false);
            }
            self.trash.drain();
        }
    }

    /// Makes a tier that is above its high watermark go below the low one.
    fn relieve(self: &Arc<Self>, tier: usize) -> Result<()> {
        let space = self.policy().tiers[tier].space;
        let budget = &self.store.tiers()[tier].budget;
        let pending = self.trash.pending_bytes();
        if budget.above(space.high_watermark) <= pending {
            return Ok(());
        }
        if tier == self.store.last_tier() {
            return self.make_room_in(tier, 0);
        }
        let mut excess = budget.above(space.low_watermark).saturating_sub(pending);
        let files = self.tiers.uses.lock().held(tier);
        for _ in 0..files {
            if excess == 0 || self.stop.is_cancelled() {
                break;
            }
            let Some(coldest) = self.tiers.uses.lock().coldest(tier) else { break };
            let bytes = self.placed(coldest).map_or(0, |(_, bytes)| bytes);
            if self.demote(coldest, tier)? {
                excess = excess.saturating_sub(bytes);
            }
        }
        Ok(())
    }

    /// Moves content of a tier to a slower one. If that fails, it counts as used just now. Returns whether it has left
    /// the tier.
    fn demote(self: &Arc<Self>, ino: Ino, tier: usize) -> Result<bool> {
        self.tiers.uses.lock().forget(ino);
        let left = self.demote_from(tier, ino);
        if !matches!(left, Ok(true)) {
            self.note_stay(ino, tier);
        }
        left
    }

    fn demote_from(self: &Arc<Self>, tier: usize, ino: Ino) -> Result<bool> {
        let Some((id, bytes)) = self.placed(ino) else { return Ok(true) };
        if self.store.tier_of(id) != Some(tier) {
            return Ok(true);
        }
        let last = self.store.last_tier();
        let slower = (tier + 1)..self.store.tiers().len();
        let is_place = |to: &usize| self.store.tiers()[*to].has_room(bytes) && self.store.takes_content(*to);
        let to = slower.clone().find(is_place).unwrap_or(last);
        if to == tier {
            return Ok(false);
        }
        if !is_place(&to) {
            self.make_room_in(to, bytes)?;
            self.trash.drain();
        }
        match self.move_placed(ino, to)? {
            MoveEnd::Moved(_) => {
                self.store.tiers()[tier].demoted_files.fetch_add(1, Ordering::Relaxed);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Notes that a file could not be moved out of a tier, if the tier still has clean content of it.
    fn note_stay(&self, ino: Ino, tier: usize) {
        let Ok(Some(node)) = self.present(ino) else { return };
        let state = node.state.lock();
        let file = state.record.file;
        if !file.is_dirty() && file.content().and_then(|id| self.store.tier_of(id)) == Some(tier) {
            self.tiers.uses.lock().holds(ino, tier);
        }
        drop(state);
        drop(node);
        self.table.drop_idle(ino);
    }

    fn move_placed(self: &Arc<Self>, ino: Ino, to: usize) -> Result<MoveEnd> {
        let Some(node) = self.present(ino)? else { return Ok(MoveEnd::Stays) };
        let moved = self.move_content(&node, to, MoveReason::Placement);
        drop(node);
        self.table.drop_idle(ino);
        match moved {
            // It was evicted or replaced meanwhile, or one of the devices fails.
            Err(error) if !error.is(ErrorKind::NoSpace) => {
                tracing::warn!(%error, %ino, "content stays in its tier");
                Ok(MoveEnd::Stays)
            }
            Err(_) => Ok(MoveEnd::Stays),
            moved => moved,
        }
    }

    fn present(&self, ino: Ino) -> Result<Option<Arc<Node>>> {
        self.node_unless_gone(ino)
    }

    /// Returns the content file of an inode, and its bytes.
    fn placed(&self, ino: Ino) -> Option<(ContentId, u64)> {
        let node = self.present(ino).ok().flatten()?;
        let mut state = node.state.lock();
        let id = state.record.file.content()?;
        Some((id, self.counted_bytes(&mut state)))
    }
}
