//! The hard limit, where the kernel writes past the daemon.
//!
//! A writer with a passthrough file is not seen while it writes. So such a file is only given where there is
//! room to spare; what it grows by is counted many times a second; and where the room runs out all the same,
//! its content file is made immutable until there is room again: its next write fails, and nothing passes
//! the limit.

use std::sync::Arc;
use std::time::Duration;

use forebay_backends::Result;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::{Inner, Ino};
use crate::Content;
use crate::node::Node;

/// Room that must be left for a file to be written past the daemon.
const ROOM_FOR_PASSTHROUGH: u64 = 1 << 30;
/// Room below which growth is counted as often as can be.
const WATCHED_ROOM: u64 = 2 << 30;
/// Room below which writers past the daemon are stopped: more than they can write between two counts, on a machine that
/// is busy, too (2 GiB/s for 100 ms).
const LAST_ROOM: u64 = 200 << 20;
/// Counts while there is little room, and while there is plenty.
const COUNT_OFTEN: Duration = Duration::from_millis(4);
const COUNT_SELDOM: Duration = Duration::from_millis(100);

impl Inner {
    /// Bytes that may still be written, if everything that may go is evicted.
    fn room(&self) -> u64 {
        let budget = &self.store.budget;
        let held = budget.used().saturating_add(budget.reserved()).saturating_sub(self.evictor.lock().bytes());
        budget.limit().saturating_sub(held).min(self.store.free_bytes().saturating_add(self.evictor.lock().bytes()))
    }

    /// Whether a file may be written past the daemon now.
    pub(super) fn may_write_past(&self) -> bool {
        self.room() >= ROOM_FOR_PASSTHROUGH
    }

    /// How long until the growth of files is to be counted again.
    pub(super) fn count_again_in(&self) -> Duration {
        let watched = !self.writing.lock().is_empty() && self.bare_room() < WATCHED_ROOM;
        if watched { COUNT_OFTEN } else { COUNT_SELDOM }
    }

    /// Bytes that may be written before anything is evicted.
    fn bare_room(&self) -> u64 {
        let budget = &self.store.budget;
        let used = budget.used().saturating_add(budget.reserved());
        budget.limit().saturating_sub(used).min(self.store.free_bytes())
    }

    /// Stops or releases those who write past the daemon. Blocks.
    pub(super) fn brake(&self) -> Result<()> {
        if self.bare_room() >= LAST_ROOM {
            return self.release_brakes();
        }
        let writing: Vec<Ino> = self.writing.lock().iter().copied().collect();
        let nodes = || writing.iter().filter_map(|ino| Some((ino, self.table.peek(*ino)?)));
        // Who writes through the daemon is given room when there is something to write; who was stopped waits for it.
        let needs_room = |node: &Node| {
            let state = node.state.lock();
            state.written_past || state.braked
        };
        if !nodes().any(|(_, node)| needs_room(&node)) {
            return Ok(());
        }
        self.make_room(LAST_ROOM)?;
        self.trash.drain();
        if self.bare_room() >= LAST_ROOM {
            return self.release_brakes();
        }
        self.flush_bell.notify_one();
        for (ino, node) in nodes() {
            let mut state = node.state.lock();
            let Some(content) = state.content.clone() else { continue };
            if state.written_past && !state.braked && set_immutable(&content, true) {
                state.braked = true;
                tracing::warn!(path = self.pool.url(), %ino, "the fast pool is full: a writer was stopped");
            }
        }
        Ok(())
    }

    fn release_brakes(&self) -> Result<()> {
        let writing: Vec<Ino> = self.writing.lock().iter().copied().collect();
        for ino in writing {
            let Some(node) = self.table.peek(ino) else { continue };
            let mut state = node.state.lock();
            if let (true, Some(content)) = (state.braked, state.content.clone()) {
                state.braked = !set_immutable(&content, false);
            }
        }
        Ok(())
    }
}

/// Sets or takes the immutable flag. `false` where the file system or the privileges do not allow it: then
/// the device's size is the limit.
pub(super) fn set_immutable(content: &Arc<Content>, on: bool) -> bool {
    let Ok(flags) = ioctl_getflags(&*content.file) else { return false };
    let wanted = if on { flags | IFlags::IMMUTABLE } else { flags - IFlags::IMMUTABLE };
    wanted == flags || ioctl_setflags(&*content.file, wanted).is_ok()
}
