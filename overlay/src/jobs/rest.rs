//! When the observer is at work.
//!
//! A program in the kernel costs every read of a page some tens of nanoseconds, whoever makes it: a tenth of a read of
//! 4 KiB. So the programs are attached only while somebody needs what they tell: a job runs, somebody looks on, or
//! eviction is near enough that it will want to know what is used.

use std::time::{Duration, Instant};

use super::watch::Watch;
use crate::engine::Inner;

/// Share of the low watermark from which on uses are noted for eviction, however far it still is.
const NOTED_FROM: f64 = 0.5;
/// How long it goes on when nobody needs it any more: the next job may begin at once.
const LINGER: Duration = Duration::from_secs(10);

/// Of one observer.
#[derive(Debug, Default)]
pub(super) struct Rest {
    needed: Option<Instant>,
    /// It could come back.
    is_allowed: bool,
}

impl Watch {
    /// Lets the observer rest from now on, where this process can have it work again.
    pub(super) fn allow_rest(&self) {
        match self.observer.try_again() {
            Ok(()) => self.rest.lock().is_allowed = true,
            Err(error) => tracing::warn!("the observer stays at work, and may not see processes end: {error}"),
        }
    }
}

impl Inner {
    /// The observer, at work.
    pub(super) fn observer_at_work(&self) -> Option<&Watch> {
        let watch = self.jobs.watch()?;
        let mut rest = watch.rest.lock();
        rest.needed = Some(Instant::now());
        self.put_to_work(watch);
        drop(rest);
        Some(watch)
    }

    /// Lets the observer rest, or has it work, as it is needed now.
    pub(super) fn rest_or_work(&self, watch: &Watch) {
        let mut rest = watch.rest.lock();
        let now = Instant::now();
        if self.needs_observer() {
            rest.needed = Some(now);
        }
        let is_needed = rest.needed.is_some_and(|at| now.duration_since(at) < LINGER);
        if is_needed || !rest.is_allowed {
            self.put_to_work(watch);
        } else if watch.observer.is_at_work() {
            tracing::debug!("nobody needs the observer: it rests");
            watch.observer.rest();
        }
    }

    fn needs_observer(&self) -> bool {
        self.policy.observes_always || self.jobs.any() || self.is_eviction_near()
    }

    fn is_eviction_near(&self) -> bool {
        self.store.budget.above(self.policy.space.low_watermark * NOTED_FROM) > 0
    }

    /// The fast pool is filled further. Where uses should be noted from now on, who keeps jobs is told.
    pub(crate) fn note_filling(&self) {
        if let Some(watch) = self.jobs.watch()
            && !watch.observer.is_at_work()
            && self.is_eviction_near()
        {
            watch.observer.ring_bell();
        }
    }

    /// `rest` of the observer is held.
    fn put_to_work(&self, watch: &Watch) {
        if watch.observer.is_at_work() {
            return;
        }
        match watch.observer.work() {
            Ok(()) => tracing::debug!("the observer is at work"),
            Err(error) => tracing::warn!("what the kernel serves by itself is not seen: {error}"),
        }
    }
}
