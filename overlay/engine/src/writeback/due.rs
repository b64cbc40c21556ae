//! Decides by policy about an intent whose time in the queue has come.

use std::time::{Duration, Instant};

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_cache::Stamp;
use forebay_catalog::{Intent, Lane, Queued};
use forebay_policy::{FlushPolicy, SettingName, Write};
use forebay_system::clock::unix_now;

use super::super::{Inner, Ino};
use crate::node::{Node, NodeState};

/// Under `on-close`, what `close` did not flush (names, and files whose writer died) is flushed after this.
const AFTER_CLOSE: Duration = Duration::from_secs(1);
/// A file that is written all the time is flushed after this many times the idle time.
const AGE_IDLE_TIMES: u32 = 10;
/// A file that is written all the time is not flushed more often than this.
const AGE_LEAST: Duration = Duration::from_secs(10);
/// An entry that can only be flushed after a close is looked at this often, in case the close does not notify the
/// flusher.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// What to do with an entry of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Now,
    /// Not before this has passed.
    In(Lane, Duration),
    /// An operator flushes it.
    Manual,
    /// There is nothing to flush.
    Gone,
}

impl Inner {
    /// Decides what to do with an entry. `pressed`: space is short, so nothing waits to be idle.
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
        if self.policy().needed().storage_pool && !self.knows_storage_pool(&node) {
            return Ok(Due::In(Lane::Later, AFTER_CLOSE));
        }
        if !self.knows_flush_settings(&node) {
            // The owner of a directory may have said that it does not go to the pool. The next round asks.
            return Ok(Due::In(Lane::Later, AFTER_CLOSE));
        }
        let policy = self.policy_of(&node);
        let queued = Duration::from_micros(self.catalog.queue_now().saturating_sub(entry.wait.since_us));
        let is_late = policy.flush_deadline.is_some_and(|deadline| queued >= deadline);
        let idle = match policy.flush() {
            FlushPolicy::Manual => return Ok(Due::Manual),
            FlushPolicy::Idle(idle) => idle,
            // The time counts from the change, not from the last change.
            FlushPolicy::Every(every) => every.saturating_sub(queued),
            FlushPolicy::OnClose => AFTER_CLOSE,
            FlushPolicy::JobEnd if !is_late && !self.advisor().jobs_of(subject).is_empty() => {
                return Ok(Due::In(Lane::Later, LOOK_AGAIN));
            }
            FlushPolicy::JobEnd => AFTER_CLOSE,
        };
        let ends_waiting =
            |left: Duration| policy.flush_deadline.map_or(left, |at| left.min(at.saturating_sub(queued)));
        let pressed = pressed || is_late;
        let mut state = node.state.lock();
        if state.is_unlinked(subject) && matches!(entry.intent, Intent::Inode(_)) {
            // The last close removes it.
            return Ok(Due::In(Lane::Later, LOOK_AGAIN));
        }
        if matches!(policy.flush(), FlushPolicy::Every(_)) {
            let is_sent = matches!(entry.intent, Intent::Inode(_)) && state.is_uploaded() && !has_attributes(&state);
            return Ok(match idle {
                _ if is_sent => Due::In(Lane::Later, look_again_in(policy.flush())),
                Duration::ZERO => Due::Now,
                _ if pressed => Due::Now,
                left => Due::In(Lane::Fresh, ends_waiting(left)),
            });
        }
        let is_content = state.record.kind == FileKind::File && state.record.file.is_dirty();
        if !is_content {
            return Ok(match idle.saturating_sub(queued) {
                Duration::ZERO => Due::Now,
                _ if pressed => Due::Now,
                left => Due::In(Lane::Fresh, ends_waiting(left)),
            });
        }
        let may_be_written = state.may_be_written();
        let may_be_inherited = state.quiescence.closed_at.is_none() && self.mount.opened_at.elapsed() < LOOK_AGAIN;
        if state.record.file.is_spilled() && !may_be_written && may_be_inherited {
            // After its flush, a program that has it open since before this daemon started could not go on writing it.
            return Ok(Due::In(Lane::Later, LOOK_AGAIN));
        }
        if !may_be_written {
            // `None`: no writer closed it since it came into memory, so it counts as idle.
            let left = state.quiescence.closed_at.map_or(Duration::ZERO, |since| idle.saturating_sub(since.elapsed()));
            return Ok(if pressed || left.is_zero() { Due::Now } else { Due::In(Lane::Fresh, ends_waiting(left)) });
        }
        if matches!(entry.intent, Intent::Inode(_)) && state.is_uploaded() && !has_attributes(&state) {
            // The pool has its content. It counts as dirty because a program may still write it.
            return Ok(Due::In(Lane::Later, LOOK_AGAIN));
        }
        if state.record.file.is_spilled() && policy.flush_deadline.is_none() {
            // Most of it is in the pool already. Each flush makes the server copy all of that.
            return Ok(Due::In(Lane::Later, LOOK_AGAIN));
        }
        let age_max = policy.flush_deadline.unwrap_or(idle.saturating_mul(AGE_IDLE_TIMES).max(AGE_LEAST));
        if queued >= age_max {
            return Ok(Due::Now);
        }
        let left = match idle.is_zero() {
            true => Some(AFTER_CLOSE),
            false => self.until_idle(&node, &mut state, idle),
        };
        Ok(match left {
            None => Due::Now,
            Some(left) if pressed => Due::In(Lane::Later, left.min(AFTER_CLOSE)),
            Some(left) => Due::In(Lane::Fresh, ends_waiting(left)),
        })
    }

    /// Returns when an entry is going to be flushed, for operators.
    pub(crate) fn when_due(&self, entry: &Queued) -> Result<String> {
        let waits = |wait: Duration| {
            humantime::format_duration(Duration::from_secs(wait.as_secs().saturating_add(1))).to_string()
        };
        Ok(match self.is_due(entry, false)? {
            _ if entry.wait.failures > 0 => format!("tried {} times, and tried again", entry.wait.failures),
            Due::Now => "flushed now".into(),
            Due::In(Lane::Later, wait) => format!("a program uses it; looked at again within {}", waits(wait)),
            Due::In(_, wait) => format!("flushed in {} or less, if nobody writes it until then", waits(wait)),
            Due::Manual => "flushed only by request".into(),
            Due::Gone => "nothing to flush".into(),
        })
    }

    /// Returns how long a file that programs may write must still stay as it is until it is idle; `None`: it is idle.
    fn until_idle(&self, node: &Node, state: &mut NodeState, idle: Duration) -> Option<Duration> {
        let Ok(content) = self.content(node.ino, state) else { return None };
        let Ok(stamp) = Stamp::of(&content.file) else { return None };
        let unchanged = match state.quiescence.seen {
            Some((seen, at)) if seen == stamp => at.elapsed(),
            _ => {
                state.quiescence.seen = Some((stamp, Instant::now()));
                // The clock may have been set since: a change time in the future counts as now.
                let age = u64::try_from(stamp.ctime.secs).map_or(0, |then| unix_now().saturating_sub(then));
                Duration::from_secs(age.saturating_sub(1))
            }
        };
        Some(idle.saturating_sub(unchanged)).filter(|left| !left.is_zero())
    }

    /// Whether the pool must still be told of an intent, or asked about a call in doubt.
    pub(crate) fn still_differs(&self, intent: &Intent) -> bool {
        match intent {
            Intent::Name(parent, name) => self.catalog.name(*parent, name).is_ok_and(|r| r.differs()),
            Intent::Inode(ino) => self.node(*ino).is_ok_and(|n| n.state.lock().record.is_dirty()),
        }
    }

    /// Whether a program may write a file just now, or holds the content that was uploaded: then it may still differ
    /// after a flush, which is no failure.
    pub(super) fn may_be_written(&self, ino: Ino) -> bool {
        self.table.peek(ino).is_some_and(|node| {
            let state = node.state.lock();
            state.record.file.is_dirty() && (state.may_be_written() || state.is_uploaded())
        })
    }

    /// Returns when and why an intent is going to be flushed, for operators.
    pub(crate) fn flush_reason(&self, intent: &Intent) -> String {
        let Some(node) = self.subject_of(intent).and_then(|ino| self.node(ino).ok()) else { return String::new() };
        let verdict = self.verdict_of(&node);
        let by = |name: SettingName| {
            let origin = verdict.origins.get(name as usize).map(ToString::to_string).unwrap_or_default();
            format!("{name} = {} ({origin})", verdict.policy.value(name))
        };
        by(if verdict.policy.write == Write::Back { SettingName::Flush } else { SettingName::Write })
    }
}

/// Returns when a file that the pool has, and that a program may still write, is looked at again.
pub(super) fn look_again_in(flush: FlushPolicy) -> Duration {
    match flush {
        FlushPolicy::Every(every) => every.min(LOOK_AGAIN),
        _ => LOOK_AGAIN,
    }
}

fn has_attributes(state: &NodeState) -> bool {
    state.record.dirty.any() || !state.record.dirty_xattrs.is_empty()
}
