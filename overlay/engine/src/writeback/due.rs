//! What the policy says of an intent whose time in the queue has come.

use std::time::{Duration, Instant};

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_cache::Stamp;
use forebay_catalog::{Intent, Lane, Queued};
use forebay_policy::Flush;
use forebay_system::clock::unix_now;

use super::super::{Inner, Ino};
use crate::node::{Node, NodeState};

/// What `close` did not come to under `on-close`, names and files whose writer died, is flushed after this.
const AFTER_CLOSE: Duration = Duration::from_secs(1);
/// A file that is written all the time is flushed after this many times the idle time,
const AGE_IDLE_TIMES: u32 = 10;
/// but not more often than this.
const AGE_LEAST: Duration = Duration::from_secs(10);
/// What can only be flushed when a program closes it is looked at this often, if the close does not tell.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// What is to be done with an entry of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Now,
    /// Not before this has passed.
    In(Lane, Duration),
    /// An operator does it.
    Manual,
    /// There is nothing to flush.
    Gone,
}

impl Inner {
    /// `pressed`: the fast pool is full, so nothing waits to be idle.
    pub(super) fn is_due(&self, entry: &Queued, pressed: bool) -> Result<Due> {
        let subject = match &entry.intent {
            Intent::Inode(ino) => *ino,
            Intent::Name(parent, name) => self.catalog.name(*parent, name)?.here_ino().unwrap_or(*parent),
        };
        let node = match self.node(subject) {
            // Removed since it was queued.
            Err(e) if e.is(ErrorKind::Stale) => return Ok(Due::Gone),
            node => node?,
        };
        if self.policy.asks_storage_pool() && !self.knows_storage_pool(&node) {
            return Ok(Due::In(Lane::Later, AFTER_CLOSE));
        }
        let idle = match self.policy_of(&node).flush {
            Flush::Manual => return Ok(Due::Manual),
            Flush::Idle(idle) => idle,
            Flush::OnClose => AFTER_CLOSE,
        };
        let queued = Duration::from_micros(self.catalog.queue_now().saturating_sub(entry.wait.since_us));
        let mut state = node.state.lock();
        if state.is_unlinked(subject) && matches!(entry.intent, Intent::Inode(_)) {
            // It goes with the last close.
            return Ok(Due::In(Lane::Later, LOOK_AGAIN));
        }
        let is_content = state.record.kind == FileKind::File && state.record.file.is_dirty();
        if !is_content {
            return Ok(match idle.saturating_sub(queued) {
                Duration::ZERO => Due::Now,
                _ if pressed => Due::Now,
                left => Due::In(Lane::Fresh, left),
            });
        }
        let may_be_written = state.writers > 0 || state.written_past.is_some();
        if !may_be_written {
            // Without an open since the start it has been idle at least for so long.
            let left = state.quiet_since.map_or(Duration::ZERO, |since| idle.saturating_sub(since.elapsed()));
            return Ok(if pressed || left.is_zero() { Due::Now } else { Due::In(Lane::Fresh, left) });
        }
        if matches!(entry.intent, Intent::Inode(_)) && state.is_uploaded() && !has_attributes(&state) {
            // The pool has it; it counts as dirty because somebody may still write it.
            return Ok(Due::In(Lane::Later, LOOK_AGAIN));
        }
        if queued >= (idle * AGE_IDLE_TIMES).max(AGE_LEAST) {
            return Ok(Due::Now);
        }
        let left = match idle.is_zero() {
            true => Some(AFTER_CLOSE),
            false => self.until_idle(&node, &mut state, idle),
        };
        Ok(match left {
            None => Due::Now,
            Some(left) if pressed => Due::In(Lane::Later, left.min(AFTER_CLOSE)),
            Some(left) => Due::In(Lane::Fresh, left),
        })
    }

    /// How long a file that programs may write has yet to stay as it is; `None`: it is idle.
    fn until_idle(&self, node: &Node, state: &mut NodeState, idle: Duration) -> Option<Duration> {
        let Ok(content) = self.content(node.ino, state) else { return None };
        let Ok(stamp) = Stamp::of(&content.file) else { return None };
        let unchanged = match state.seen {
            Some((seen, at)) if seen == stamp => at.elapsed(),
            _ => {
                state.seen = Some((stamp, Instant::now()));
                // Only good news are believed of the time of day: it may have been set since.
                let age = u64::try_from(stamp.ctime.secs).map_or(0, |then| unix_now().saturating_sub(then));
                Duration::from_secs(age.saturating_sub(1))
            }
        };
        Some(idle.saturating_sub(unchanged)).filter(|left| !left.is_zero())
    }

    /// The pool is still to be told, or asked.
    pub(crate) fn still_differs(&self, intent: &Intent) -> bool {
        match intent {
            Intent::Name(parent, name) => self.catalog.name(*parent, name).is_ok_and(|r| r.differs()),
            Intent::Inode(ino) => self.node(*ino).is_ok_and(|n| n.state.lock().record.is_dirty()),
        }
    }

    /// A program may write a file just now: that it still differs after a flush is no fault.
    pub(super) fn may_be_written(&self, ino: Ino) -> bool {
        self.table.peek(ino).is_some_and(|node| {
            let state = node.state.lock();
            state.record.file.is_dirty() && (state.writers > 0 || state.written_past.is_some())
        })
    }
}

fn has_attributes(state: &NodeState) -> bool {
    state.record.dirty.any() || !state.record.dirty_xattrs.is_empty()
}
