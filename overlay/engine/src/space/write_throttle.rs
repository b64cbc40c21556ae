//! The hard limit for passthrough writers.
//!
//! The daemon does not see passthrough writes. So a file is opened for them only if there is room to spare, and some of
//! that is free already. Its growth is counted many times a second. If the room runs out all the same, its content file
//! is made immutable until there is room again: the next write fails, and nothing exceeds the limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{Content, is_open_elsewhere};
use forebay_catalog::Intent;
use parking_lot::Mutex;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use tokio::sync::Notify;

use super::super::{Inner, Ino};
use crate::node::{Node, NodeState};
use crate::quotas::FileOwner;

/// Room that must be left, free or evictable, to open a file for passthrough writes.
const ROOM_FOR_PASSTHROUGH: u64 = 1 << 30;
/// Room below which growth is counted as often as possible.
const WATCHED_ROOM: u64 = 2 << 30;
/// Room below which passthrough writers are stopped: more than they can write between two counts, even on a busy
/// machine (2 GiB/s for 100 ms).
const LAST_ROOM: u64 = 200 << 20;
/// Intervals between counts: while there is little room, and while there is plenty.
const COUNT_OFTEN: Duration = Duration::from_millis(4);
const COUNT_SELDOM: Duration = Duration::from_millis(100);

/// How old the known free space of the devices may be at an open: little is written meanwhile, compared with the room
/// that must be left.
const FREE_KNOWN_FOR: Duration = Duration::from_millis(10);

/// The interval of log messages about writers that their owner's share or quota stops.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// How old the count of dirty bytes may be for a program that asks for the pool's free space: some programs ask at each
/// open, and the count looks at each dirty file.
const DIRTY_KNOWN_FOR: Duration = Duration::from_secs(1);

/// What is known between two counts.
#[derive(Debug, Default)]
pub(crate) struct WriteThrottle {
    /// An open would have got passthrough if evictable content had been evicted.
    room_wanted: AtomicBool,
    /// Notified when a file begins to be counted, or when room is wanted.
    called: Notify,
    /// When the free space of the devices was read, and the bytes.
    free: Mutex<Option<(Instant, u64)>>,
    /// When the dirty bytes were counted, and the bytes.
    dirty: Mutex<Option<(Instant, u64)>>,
    /// When a stopped writer was last told of.
    told: Mutex<Option<Instant>>,
}

impl WriteThrottle {
    /// Whether a log message about a stopped writer is due. A user may cause many.
    fn may_tell(&self) -> bool {
        let mut told = self.told.lock();
        let is_due = told.is_none_or(|at| at.elapsed() >= TOLD_EVERY);
        if is_due {
            *told = Some(Instant::now());
        }
        is_due
    }
}

impl Inner {
    /// Whether a file may be opened for passthrough writes now. If that needs an eviction first, the next count makes
    /// room.
    pub(crate) fn may_bypass(&self, owner: FileOwner) -> bool {
        // The share and the quota of a user are bounded in the same way.
        if self.room_of_owner(owner).is_none_or(|room| room < ROOM_FOR_PASSTHROUGH) {
            return false;
        }
        if self.room_for_dirty() < ROOM_FOR_PASSTHROUGH || self.is_pacing() {
            return false;
        }
        let spare = self.bare_room(self.free_bytes_lately()) >= LAST_ROOM;
        if !spare {
            self.space.throttle.room_wanted.store(true, Ordering::Relaxed);
            self.space.throttle.called.notify_one();
        }
        spare
    }

    fn free_bytes_lately(&self) -> u64 {
        let mut known = self.space.throttle.free.lock();
        match *known {
            Some((at, free)) if at.elapsed() < FREE_KNOWN_FOR => free,
            _ => {
                let free = self.store.free_bytes();
                *known = Some((Instant::now(), free));
                free
            }
        }
    }

    /// Returns the dirty bytes, as they were at most `DIRTY_KNOWN_FOR` ago. Blocks.
    pub(crate) fn dirty_bytes_lately(&self) -> Result<u64> {
        let mut known = self.space.throttle.dirty.lock();
        match *known {
            Some((at, bytes)) if at.elapsed() < DIRTY_KNOWN_FOR => Ok(bytes),
            _ => {
                let bytes = self.dirty_bytes()?;
                *known = Some((Instant::now(), bytes));
                Ok(bytes)
            }
        }
    }

    /// Returns how long it is until the growth of files is to be counted again.
    pub(crate) fn count_again_in(&self) -> Duration {
        let is_watched = || {
            self.bare_room(self.store.free_bytes()) < WATCHED_ROOM
                || self.writers_past_daemon().any(|owner| self.has_less(owner, WATCHED_ROOM))
        };
        if self.is_counting() && is_watched() { COUNT_OFTEN } else { COUNT_SELDOM }
    }

    /// Returns the owners of the files that the kernel may write without the daemon.
    fn writers_past_daemon(&self) -> impl Iterator<Item = FileOwner> {
        let writing: Vec<Ino> = self.space.writing.lock().iter().copied().collect();
        let nodes = writing.into_iter().filter_map(|ino| self.table.peek(ino));
        nodes.filter_map(|node| {
            let state = node.state.lock();
            (!state.bypass.is_none()).then(|| FileOwner::of(&state.record))
        })
    }

    /// Whether an owner is known to have less room than this.
    fn has_less(&self, owner: FileOwner, bytes: u64) -> bool {
        self.room_of_owner(owner).is_some_and(|room| room < bytes)
    }

    /// Begins to count a file that may grow from now on.
    pub(crate) fn begin_counting(&self, ino: Ino) {
        self.space.writing.lock().insert(ino);
        self.space.throttle.called.notify_one();
    }

    /// Waits until there may be something to count or to evict. Only one task may call this.
    pub(crate) async fn until_counting(&self) {
        // Both keep a notification that comes before they are waited for.
        while !self.is_counting() && self.store.budget.above(self.policy().space.high_watermark) == 0 {
            tokio::select! {
                () = self.space.throttle.called.notified() => {}
                () = self.store.budget.grown() => {}
            }
        }
    }

    /// Whether any file may grow, or room is wanted.
    pub(crate) fn is_counting(&self) -> bool {
        !self.space.writing.lock().is_empty() || self.space.throttle.room_wanted.load(Ordering::Relaxed)
    }

    /// Returns the bytes that may become dirty before the fast pool is full.
    pub(crate) fn room_for_dirty(&self) -> u64 {
        self.bare_room(self.free_bytes_lately()).saturating_add(self.space.evictor.evictable().bytes)
    }

    /// Returns the bytes that may be written before anything is evicted, if the devices have `free` free bytes.
    fn bare_room(&self, free: u64) -> u64 {
        let budget = &self.store.budget;
        let used = budget.used().saturating_add(budget.reserved());
        budget.limit().saturating_sub(used).min(free)
    }

    /// Stops or releases passthrough writers. Blocks.
    pub(crate) fn throttle_writers(&self) -> Result<()> {
        let wanted = self.space.throttle.room_wanted.swap(false, Ordering::Relaxed);
        if self.bare_room(self.store.free_bytes()) >= LAST_ROOM {
            return self.throttle_by_shares();
        }
        let writing: Vec<Ino> = self.space.writing.lock().iter().copied().collect();
        let nodes = || writing.iter().filter_map(|ino| Some((ino, self.table.peek(*ino)?)));
        // A writer through the daemon reserves its room when it writes. A passthrough writer cannot, and a stopped one
        // waits for room.
        let needs_room = |node: &Node| !node.state.lock().bypass.is_none();
        if !wanted && !nodes().any(|(_, node)| needs_room(&node)) {
            return Ok(());
        }
        self.make_room(LAST_ROOM)?;
        self.trash.drain();
        if self.bare_room(self.store.free_bytes()) >= LAST_ROOM {
            return self.throttle_by_shares();
        }
        self.flusher.bell.notify_one();
        for (ino, node) in nodes() {
            let mut state = node.state.lock();
            let Some(content) = state.content.clone() else { continue };
            if state.bypass.stop(|on| set_immutable(&content, on)) {
                tracing::warn!(
                    path = self.pool.url(), %ino,
                    "the fast pool is full: a writer was stopped; a rule `write = \"through\"` would let it go on in the pool"
                );
            }
        }
        Ok(())
    }

    /// There is room: stops passthrough writers whose owner has used up its share, and releases the other ones.
    fn throttle_by_shares(&self) -> Result<()> {
        let writing: Vec<Ino> = self.space.writing.lock().iter().copied().collect();
        for ino in writing {
            let Some(node) = self.table.peek(ino) else { continue };
            let mut state = node.state.lock();
            let Some(content) = state.content.clone() else { continue };
            let owner = FileOwner::of(&state.record);
            if state.bypass.is_none() || !self.has_less(owner, LAST_ROOM) {
                state.bypass.resume(|on| set_immutable(&content, on));
            } else if state.bypass.stop(|on| set_immutable(&content, on)) {
                self.flusher.bell.notify_one();
                if self.space.throttle.may_tell() {
                    let why = "it has its share of dirty bytes, or a quota is used up";
                    tracing::warn!(path = self.pool.url(), %ino, "user {}: {why}: a writer was stopped", owner.uid);
                }
            }
        }
        Ok(())
    }

    /// Lets stopped writers go on. They are stopped again at the next count if there is still no room.
    pub(crate) fn resume_writers(&self, node: &Node, content: &Arc<Content>) {
        node.state.lock().bypass.resume(|on| set_immutable(content, on));
    }

    /// Lets the daemon write a content file that is immutable because its writers were stopped. They are not passthrough
    /// writers if no other descriptor of it exists: a daemon that starts again does not know that.
    ///
    /// # Errors
    /// `NoSpace` if they are.
    pub(crate) fn resume_for_daemon(&self, node: &Node, content: &Content) -> Result<()> {
        if !node.state.lock().bypass.is_stopped() {
            return Ok(());
        }
        // What is kept for the next open counts as another descriptor.
        self.release_content(node.ino);
        let ended = {
            let mut state = node.state.lock();
            !state.opens.may_bypass() && !is_open_elsewhere(&content.file) && self.end_bypass(node.ino, &mut state)
        };
        if ended {
            return Ok(());
        }
        let what = format!("{}: its writers are stopped, because the fast pool is full", self.display(node.ino));
        Err(Error::new(ErrorKind::NoSpace, Side::Cache, what))
    }

    /// Changes a content file in a way that takes no room, although its writers may be stopped: an immutable file refuses
    /// each change. They are stopped again, at the latest with the next count.
    pub(crate) fn change_of_stopped<T>(
        &self,
        state: &mut NodeState,
        content: &Arc<Content>,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !state.bypass.is_stopped() {
            return change();
        }
        state.bypass.resume(|on| set_immutable(content, on));
        let changed = change();
        state.bypass.stop(|on| set_immutable(content, on));
        changed
    }

    /// Notes that no program can write the content of a file without the daemon any more. Returns `false` if the content
    /// file is still immutable, because the flag could not be cleared.
    pub(crate) fn end_bypass(&self, ino: Ino, state: &mut NodeState) -> bool {
        let content = state.content.clone();
        // A content file that is opened or removed loses the flag, too.
        let ended = state.bypass.end(|on| content.as_ref().map_or(!on, |content| set_immutable(content, on)));
        if ended {
            self.space.writing.lock().remove(&ino);
        }
        ended
    }

    /// Returns the bytes of files that cannot be evicted, because the pool may not have them.
    pub(crate) fn dirty_bytes(&self) -> Result<u64> {
        let mut sum = 0;
        self.each_dirty(|_, bytes| sum += bytes)?;
        Ok(sum)
    }

    /// Visits these files, each with the bytes that its content occupies.
    pub(crate) fn each_dirty(&self, mut each: impl FnMut(Ino, u64)) -> Result<()> {
        let mut inos = Vec::new();
        self.catalog.intents(|intent, _| {
            inos.extend(if let Intent::Inode(ino) = intent { Some(ino) } else { None });
            Ok(true)
        })?;
        for ino in inos {
            let Ok(node) = self.node(ino) else { continue };
            if node.state.lock().record.file.is_dirty() {
                each(ino, self.attr_of(&node).map_or(0, |attr| attr.blocks * 512));
            }
        }
        Ok(())
    }
}

/// Sets or clears the immutable flag. Returns `false` if the file system or the privileges do not allow it: then the
/// device's size is the limit.
fn set_immutable(content: &Arc<Content>, on: bool) -> bool {
    let Ok(flags) = ioctl_getflags(&*content.file) else { return false };
    let wanted = if on { flags | IFlags::IMMUTABLE } else { flags - IFlags::IMMUTABLE };
    wanted == flags || ioctl_setflags(&*content.file, wanted).is_ok()
}
