//! Slows writers before the fast pool is full, and before the flush is too late.
//!
//! Without this, programs write at the speed of the fast pool until it is full, and then each write waits until the pool
//! has taken a whole file. So the rate of each user's writers falls smoothly with what is left of a margin, as in Linux's
//! `balance_dirty_pages`: with the share `x` left, they may write `x / (1 - x)` of what the flush sends. With one half left
//! both rates are equal, so the margin of a single user settles there; those of several users settle lower. The margins
//! are `write-back.pace-below` of the room in the fast pool and of a user's share of it, and the second half of
//! `write-back.max-lag`.
//!
//! Writers are not slowed for what is not sent anyway: changes that wait for an operator, for the end of a job, or for the
//! close of a file make no room, however slow the writers are.
//!
//! Only writes through the daemon can be slowed. So while writers are slowed, no file is opened for passthrough writes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::space_for_write;
use crate::Inner;
use crate::node::Node;
use crate::quotas::FileOwner;

/// How often the rate is computed, at most.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A rate that was computed longer ago says nothing about now.
const LOOK_VALID: Duration = Duration::from_secs(1);
/// The time constant of the average of what the flush sends.
const AVERAGED_OVER: Duration = Duration::from_secs(5);
/// Until the first bytes are sent, the flush counts as one that sends the whole margin in this time.
const MARGIN_SENT_IN: Duration = Duration::from_secs(4);
/// Writers are not slowed if nothing was sent for this long, although the pool answers.
const STALLED_MAX: Duration = Duration::from_secs(30);
/// One write waits no longer than this.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Shorter waits are put together: a timer has milliseconds.
const PAUSE_MIN: Duration = Duration::from_millis(2);
/// However slow the flush is, writers may fill what is left of the room in this time constant.
const ROOM_LASTS: Duration = Duration::from_secs(60);
/// Bytes per second that each user may write, however little room is left.
const SLOWEST: f64 = (1 << 20) as f64;
/// The backlog of the flush is counted at most so often, and a pause is so many times as long as the count before it.
const BACKLOG_EVERY: Duration = Duration::from_millis(500);
const BACKLOG_PAUSE_FACTOR: u32 = 20;
/// Users whose turns are remembered.
const TURNS: usize = 1024;

/// What the rate depends on.
#[derive(Debug, Clone, Copy)]
struct PacingFacts {
    /// Bytes that were sent to the pool since the start.
    sent_bytes: u64,
    is_flushing: bool,
    pool_is_down: bool,
    /// Bytes that may still become dirty.
    room_bytes: u64,
    /// Writers are slowed below this room; zero: never.
    margin_bytes: u64,
    /// Whether sending what is dirty makes room.
    has_backlog: bool,
    /// How late the flush is.
    lag: Duration,
    max_lag: Option<Duration>,
}

/// Returns the bytes per second that a margin of which the share `left` is left allows; `None`: any.
fn allowed(flush_rate: f64, left: f64) -> Option<f64> {
    (left < 1.0).then(|| flush_rate * left.max(0.0) / (1.0 - left.max(0.0)))
}

impl PacingFacts {
    fn is_scarce(&self) -> bool {
        self.room_bytes < self.margin_bytes
    }

    /// Returns the bytes per second that each user may write, while the flush sends `flush_rate`; `None`: any.
    fn rate(&self, flush_rate: f64) -> Option<f64> {
        let (room, margin) = (self.room_bytes as f64, self.margin_bytes as f64);
        let by_room = (self.is_scarce() && self.has_backlog).then(|| {
            let left = room / margin;
            let sent = if self.pool_is_down { 0.0 } else { flush_rate * left };
            sent.max(room / ROOM_LASTS.as_secs_f64()) / (1.0 - left)
        });
        let by_lag = self.max_lag.and_then(|most| {
            let most = most.as_secs_f64().max(f64::MIN_POSITIVE);
            allowed(flush_rate, 2.0 * (1.0 - self.lag.as_secs_f64() / most))
        });
        least(by_room, by_lag)
    }
}

fn least(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    [one, other].into_iter().flatten().reduce(f64::min)
}

#[derive(Debug, Default)]
struct PacerState {
    /// When the rate was computed, and what had been sent by then.
    looked: Option<(Instant, u64)>,
    /// Bytes per second that the flush sends while it has something to send. `None`: not known, or none.
    flush_rate: Option<f64>,
    /// When it last sent anything, or was not to send anything.
    progressed: Option<Instant>,
    /// Nothing was sent for a long time, although there was something to send.
    is_stalled: bool,
    /// Bytes per second that each user may write; `None`: any.
    rate: Option<f64>,
    /// When the bytes that each user was allowed to write so far are written.
    allowed_until: HashMap<u32, Instant>,
}

impl PacerState {
    fn look(&mut self, now: Instant, facts: PacingFacts) {
        let is_working = facts.is_flushing && !facts.pool_is_down;
        if let Some((before, sent_bytes)) = self.looked {
            let sent = facts.sent_bytes.saturating_sub(sent_bytes) as f64;
            let took = now.saturating_duration_since(before);
            if sent > 0.0 || !is_working || took > LOOK_VALID {
                self.progressed = Some(now);
            }
            // Over a longer time, the flush was not always at work.
            if is_working && !took.is_zero() && took <= LOOK_VALID {
                let new = sent / took.as_secs_f64();
                let weight = 1.0 - (-took.as_secs_f64() / AVERAGED_OVER.as_secs_f64()).exp();
                self.flush_rate = match self.flush_rate {
                    Some(rate) => Some(rate + (new - rate) * weight),
                    None => Some(new).filter(|rate| *rate > 0.0),
                };
            }
        }
        self.looked = Some((now, facts.sent_bytes));
        let progressed = *self.progressed.get_or_insert(now);
        self.is_stalled = now.saturating_duration_since(progressed) > STALLED_MAX;
        if self.is_stalled {
            self.flush_rate = None;
        }
        let assumed = facts.margin_bytes as f64 / MARGIN_SENT_IN.as_secs_f64();
        let flush_rate = self.flush_rate.or((assumed > 0.0 && !self.is_stalled).then_some(assumed));
        self.rate = flush_rate.and_then(|flush_rate| facts.rate(flush_rate));
    }

    fn is_look_due(&self, now: Instant) -> bool {
        self.looked.is_none_or(|(at, _)| now.saturating_duration_since(at) >= LOOK_EVERY)
    }

    /// Returns the rate for a user of whose own margin the share `left` is left; `None`: all of it.
    fn rate_of(&self, left: Option<f64>) -> Option<f64> {
        let own = self.flush_rate.zip(left).and_then(|(flush_rate, left)| allowed(flush_rate, left));
        least(self.rate, own).map(|rate| rate.max(SLOWEST))
    }

    /// Returns how long a writer waits before it writes some bytes. All writers of a user share the user's rate.
    fn pause(&mut self, now: Instant, user: u32, bytes: u64, left: Option<f64>) -> Duration {
        let Some(rate) = self.rate_of(left) else {
            self.allowed_until.remove(&user);
            return Duration::ZERO;
        };
        if self.allowed_until.len() >= TURNS {
            self.allowed_until.retain(|_, until| *until > now);
        }
        let until = self.allowed_until.entry(user).or_insert(now);
        let begin = (*until).max(now);
        let takes = Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(PAUSE_MAX).min(PAUSE_MAX);
        *until = (begin + takes).min(now + PAUSE_MAX);
        let pause = begin.saturating_duration_since(now);
        if pause < PAUSE_MIN { Duration::ZERO } else { pause }
    }
}

/// Whether the flush has something to send that makes room.
#[derive(Debug, Default)]
struct Backlog {
    is_counting: bool,
    /// When it was counted, for how long that is valid, and the result.
    counted: Option<(Instant, Duration, bool)>,
}

impl Backlog {
    fn is_due(&self) -> bool {
        !self.is_counting && self.counted.is_none_or(|(at, valid, _)| at.elapsed() >= valid)
    }

    fn is_known(&self) -> bool {
        self.counted.is_some_and(|(at, valid, is)| is && at.elapsed() < valid * 2)
    }
}

/// Computes how long writers wait.
#[derive(Debug, Default)]
pub(crate) struct WritePacer {
    state: Mutex<PacerState>,
    backlog: Mutex<Backlog>,
}

impl Inner {
    /// Lets a writer wait that is about to make some bytes dirty, if the flush is behind. Call it before anything else is
    /// held that other requests wait for. Returns whether the writers of its user are slowed.
    pub(crate) async fn pace_writer(self: &Arc<Self>, node: &Node, offset: u64, len: u64) -> bool {
        let below = self.policy().write_back.pace_below;
        let owner = FileOwner::of(&node.state.lock().record);
        let left = self.shares.margin_left(owner.uid, below).filter(|_| self.flusher.activity.sends_of(owner.uid));
        let now = Instant::now();
        let facts = self.space.pacer.state.lock().is_look_due(now).then(|| self.pacing_facts());
        if facts.is_some_and(|facts| facts.is_scarce()) {
            self.count_backlog();
        }
        let is_slowed = {
            let mut pacer = self.space.pacer.state.lock();
            if let Some(facts) = facts {
                pacer.look(now, facts);
            }
            pacer.rate_of(left).is_some()
        };
        if !is_slowed {
            return false;
        }
        let bytes = self.dirtied_by(node, offset, len);
        let pause = match bytes {
            0 => Duration::ZERO,
            _ => self.space.pacer.state.lock().pause(now, owner.uid, bytes, left),
        };
        if !pause.is_zero() {
            self.counters.paced_writes.fetch_add(1, Ordering::Relaxed);
            self.counters.paced_us.fetch_add(pause.as_micros() as u64, Ordering::Relaxed);
            tokio::time::sleep(pause).await;
        }
        true
    }

    /// Returns the bytes per second to which each user's writers are slowed, because the flush is behind. `None`: they are
    /// not, or nobody has written lately.
    pub(crate) fn write_pace(&self) -> Option<u64> {
        let pacer = self.space.pacer.state.lock();
        let is_valid = pacer.looked.is_some_and(|(at, _)| at.elapsed() <= LOOK_VALID);
        pacer.rate_of(None).filter(|_| is_valid).map(|rate| rate as u64)
    }

    /// Whether writers may have to be slowed, so that none should write without the daemon.
    pub(crate) fn is_pacing(&self) -> bool {
        self.write_pace().is_some() || (self.is_room_scarce() && self.space.pacer.backlog.lock().is_known())
    }

    /// Whether so little room is left, and so much of it can be made, that the flush does not wait until files are old
    /// enough.
    pub(crate) fn is_flush_behind(self: &Arc<Self>) -> bool {
        let is_scarce = self.is_room_scarce();
        if is_scarce {
            self.count_backlog();
        }
        is_scarce && self.space.pacer.backlog.lock().is_known()
    }

    fn is_room_scarce(&self) -> bool {
        self.room_for_dirty() < self.pacing_margin()
    }

    /// Whether so little is left of a user's share that the flush does not wait until files are old enough.
    pub(crate) fn is_share_scarce(&self, user: u32) -> bool {
        self.shares.margin_left(user, self.policy().write_back.pace_below).is_some()
    }

    /// Counts in the background whether the flush makes room, if the last count is not valid any more.
    fn count_backlog(self: &Arc<Self>) {
        let mut backlog = self.space.pacer.backlog.lock();
        if !backlog.is_due() {
            return;
        }
        backlog.is_counting = true;
        drop(backlog);
        let inner = self.clone();
        // A margin of which a quarter is to be sent, or as much as is left of it.
        let least = (self.pacing_margin() / 4).min(self.room_for_dirty()).max(1);
        tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            let found = inner.has_to_send(least);
            let is = found.inspect_err(|error| tracing::error!(%error, "the backlog of the flush")).unwrap_or(false);
            let valid = BACKLOG_EVERY.max(begun.elapsed() * BACKLOG_PAUSE_FACTOR);
            *inner.space.pacer.backlog.lock() = Backlog { is_counting: false, counted: Some((begun, valid, is)) };
        });
    }

    fn pacing_margin(&self) -> u64 {
        (self.store.budget.limit() as f64 * self.policy().write_back.pace_below) as u64
    }

    fn pacing_facts(&self) -> PacingFacts {
        PacingFacts {
            sent_bytes: self.progress().0,
            is_flushing: self.flusher.activity.is_sending(),
            pool_is_down: self.pool_calls.health.why_down().is_some(),
            room_bytes: self.room_for_dirty(),
            margin_bytes: self.pacing_margin(),
            has_backlog: self.space.pacer.backlog.lock().is_known(),
            lag: self.flusher.activity.lag(),
            max_lag: self.policy().write_back.max_lag,
        }
    }

    /// Returns the bytes that a write makes dirty: none where it overwrites what is dirty already.
    fn dirtied_by(&self, node: &Node, offset: u64, len: u64) -> u64 {
        if node.is_written_through() || node.is_spilled() {
            return 0;
        }
        let content = {
            let mut state = node.state.lock();
            state.record.file.is_dirty().then(|| self.content(node.ino, &mut state))
        };
        match content {
            // Errors are the write's own.
            Some(Ok(content)) => space_for_write(&content, offset, len).unwrap_or(0),
            Some(Err(_)) => 0,
            None => len,
        }
    }
}

#[cfg(test)]
mod tests;
