//! Moves the content of one file to another tier: copy, one batch, and then the old content file is discarded.
//!
//! Until the batch is written, the copy is a content file that no record names: the next daemon removes it. Until the
//! catalog is synced, the old content file stays, so a power cut brings it back. Clean content that was moved belongs to
//! the open epoch, as if it had just been fetched.
//!
//! A program that reads a content file by passthrough goes on reading it after a move, and would miss what is written
//! later. So a file that is open is not moved, except out of memory: what is there is read through the daemon.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{Content, ContentId, CopyEnd, Stamp, StorageTier, is_open_elsewhere};
use forebay_system::clock::unix_now;

use crate::contents::{failed, set_mtime};
use crate::node::{Node, NodeState};
use crate::{Inner, Txn, blocking};

/// How often it is tried again because the file changed meanwhile.
const ATTEMPTS: u32 = 5;

/// How a move ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoveEnd {
    /// With the bytes that it freed in the old tier.
    Moved(u64),
    /// It is in use. It may be moved later.
    InUse,
    /// There is nothing to move, or no room for it.
    Stays,
}

/// Why content is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoveReason {
    /// Promotion or demotion: nothing waits for it.
    Placement,
    /// A program is about to change what is in memory.
    Writing,
}

impl Inner {
    /// Moves what is in memory to a tier that keeps it over a reboot, before it is changed or counts as durable.
    pub(crate) async fn leave_memory(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        if !self.store.has_tiers() {
            return Ok(());
        }
        for _ in 0..ATTEMPTS {
            let bytes = {
                let mut state = node.state.lock();
                let in_memory = state.record.file.content().is_some_and(|id| self.store.is_volatile(id));
                if !in_memory || !state.record.file.is_whole() {
                    return Ok(());
                }
                self.counted_bytes(&mut state)
            };
            let _space = self.reserve(bytes).await?;
            let (inner, moved) = (self.clone(), node.clone());
            let to = self.store.tier_for_writes();
            if let MoveEnd::Moved(_) = blocking(move || inner.move_content(&moved, to, MoveReason::Writing)).await? {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::Busy, Side::Cache, format!("{}: changes all the time", self.display(node.ino))))
    }

    /// Moves what is in memory to the tier of a device, before it gets a name in a view there. Blocks.
    pub(crate) fn leave_memory_for_link(self: &Arc<Self>, node: &Arc<Node>, device: usize) -> Result<()> {
        let bytes = {
            let mut state = node.state.lock();
            match state.record.file.content() {
                Some(id) if self.store.is_volatile(id) => self.counted_bytes(&mut state),
                _ => return Ok(()),
            }
        };
        let has_device = |tier: &StorageTier| tier.devices.contains(&device);
        let to = self.store.tiers().iter().position(has_device).unwrap_or_else(|| self.store.last_tier());
        let Some(_space) = self.store.budget.reserve(bytes) else {
            let what = "no room in the fast pool for what a view shows of a memory tier";
            return Err(Error::new(ErrorKind::NoSpace, Side::Cache, what));
        };
        self.move_content(node, to, MoveReason::Writing).map(drop)
    }

    /// Returns the content of a file if it may be moved.
    pub(super) fn movable(&self, node: &Node, state: &NodeState, reason: MoveReason) -> Option<ContentId> {
        let file = state.record.file;
        let id = file.content()?;
        let in_memory = self.store.is_volatile(id);
        let is_written = state.opens.has_writer() || !state.bypass.is_none();
        let ends = state.is_deleted() || state.is_superseded();
        if !file.is_whole() || !state.flights.is_empty() || ends || (is_written && reason == MoveReason::Placement) {
            return None;
        }
        if reason == MoveReason::Writing || (in_memory && file.is_dirty()) {
            return in_memory.then_some(id);
        }
        // Of a daemon that died, the kernel may have passthrough files.
        let is_read = || state.opens.any() || self.mount.inherited.lock().contains(&node.ino);
        let stays = file.is_dirty()
            || state.leases.hold(unix_now())
            || state.growth.under_way
            || (self.may_pass_through(id) && is_read())
            || self.is_in_view(id);
        (!stays).then_some(id)
    }

    /// Returns whether a program may still have a content file mapped that it has closed.
    fn is_mapped(&self, node: &Node, content: &Content) -> bool {
        // The file that is kept for the next open would count as one, too.
        let passes = self.may_pass_through(ContentId(content.id));
        passes && {
            self.release_content(node.ino);
            is_open_elsewhere(&content.file)
        }
    }

    /// Moves the content of a file to a tier. Blocks.
    ///
    /// # Errors
    /// The errors of both devices and of the catalog. The content stays where it is.
    pub(super) fn move_content(self: &Arc<Self>, node: &Arc<Node>, to: usize, reason: MoveReason) -> Result<MoveEnd> {
        let (id, content, bytes) = {
            let mut state = node.state.lock();
            if !state.record.file.is_whole() || state.is_deleted() {
                return Ok(MoveEnd::Stays);
            }
            let Some(id) = self.movable(node, &state, reason) else { return Ok(MoveEnd::InUse) };
            if self.store.tier_of(id) == Some(to) {
                return Ok(MoveEnd::Stays);
            }
            (id, self.content(node.ino, &mut state)?, self.counted_bytes(&mut state))
        };
        if reason == MoveReason::Placement && self.is_mapped(node, &content) {
            return Ok(MoveEnd::InUse);
        }
        let tier = &self.store.tiers()[to];
        let of_tier = tier.budget.reserve(bytes);
        // A program that writes waits for it: it has reserved the space in the fast pool.
        let by_placement = reason == MoveReason::Placement;
        let of_pool = if by_placement && !tier.is_volatile { self.store.budget.reserve(bytes) } else { None };
        let lacks =
            of_tier.is_none() || (!tier.is_volatile && of_pool.is_none()) || self.store.free_bytes_in(to) < bytes;
        if by_placement && lacks {
            return Ok(MoveEnd::Stays);
        }
        let stamp = Stamp::of(&content.file)?;
        let copy = self.preallocated.take_on(to)?;
        let new = ContentId(copy.id);
        let goes_on = || {
            let may = node.state.try_lock().is_none_or(|state| self.movable(node, &state, reason) == Some(id));
            !self.stop.is_cancelled() && may
        };
        // Each error is noted for the device that has it. Errors of the catalog are of neither.
        let note = |id, error: &Error| _ = self.store.note_error(id, error);
        let moved = (|| {
            let is_there = self.store.tier_of(new) == Some(to) || !by_placement;
            let CopyEnd::Whole(occupied) = (match is_there {
                true => self.store.copy_between(id, (new, &copy.file), goes_on)?,
                false => CopyEnd::Stopped,
            }) else {
                return Ok(MoveEnd::InUse);
            };
            let was_dirty = node.state.lock().record.file.is_dirty();
            if was_dirty {
                // It is the only copy.
                copy.file.sync_data().map_err(failed).inspect_err(|error| note(new, error))?;
            }
            if self.catalog.check_written_back(&content).is_err() {
                // What was copied may not be what was written.
                self.give_up_unwritten(node, id)?;
                return Ok(MoveEnd::Stays);
            }
            let mut txn = Txn::begin(self);
            let state = txn.state(node.ino)?;
            let now = Stamp::of(&content.file).inspect_err(|error| note(id, error))?;
            let same = self.movable(node, state, reason) == Some(id) && now == stamp;
            let is_mapped = by_placement && self.is_mapped(node, &content);
            if !same || is_mapped || state.record.file.is_dirty() != was_dirty {
                return Ok(MoveEnd::InUse);
            }
            let mut residency = txn.residency(node.ino)?;
            let counted = std::mem::replace(&mut residency.bytes, occupied);
            let epoch = self.catalog.epoch();
            residency.epoch = epoch;
            let record = txn.record(node.ino)?;
            record.file = record.file.moved(new)?;
            let (atime, mtime) = if was_dirty { (record.atime, stamp.mtime) } else { (record.atime, record.mtime) };
            set_mtime(&copy.file, atime, mtime).inspect_err(|error| note(new, error))?;
            txn.move_content(node.ino, id, copy.clone(), residency)?;
            self.epochs.fetched.fetch_max(epoch, Ordering::Relaxed);
            txn.discard(id, counted);
            txn.commit()?;
            self.store.account(new, 0, occupied);
            Ok(MoveEnd::Moved(counted))
        })();
        match moved {
            Ok(MoveEnd::Moved(_)) => {
                self.keep_open(node.ino);
                // The kernel may keep the old content file for the next open, which would pin its space.
                self.tell_kernel_inode(node.ino, true);
            }
            _ => self.trash.discard(new, 0),
        }
        moved
    }
}
