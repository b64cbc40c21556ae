//! When the observer is at work.
//!
//! A program in the kernel costs every read of a page 60 to 134 ns, whoever makes it (`make bench-observer`). So the programs
//! are attached only while somebody needs what they tell: a job runs, somebody looks on, or eviction is near enough that
//! it will want to know what is used.
//!
//! Eviction is near from half of the low watermark on, or of what the device still has if that is less. The programs
//! are detached `LINGER` after the last need; `[observer] at-work` in the policy says otherwise. Meanwhile requests
//! tell of opens, so that opened files do not look unused. On mounts of immutable data the kernel tells of no opens, so
//! the observer does not rest.
//!
//! Since Linux 5.19 no capability is needed to attach loaded programs. A process that could not attach them again does
//! not let the observer rest. If attaching fails all the same, there is no observer until it succeeds while no job
//! runs; reports say so.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::watch::Watch;
use super::{Inner, Registry};

/// Share of the low watermark from which on uses are noted for eviction, however far it still is.
const NOTED_FROM: f64 = 0.5;
/// How long it goes on when nobody needs it any more: the next job may begin at once.
const LINGER: Duration = Duration::from_secs(10);

/// Of one observer. Under this lock it is put to work, and let rest.
#[derive(Debug, Default)]
pub(super) struct ObserverActivation {
    /// Until then somebody needs it.
    needed_until: Option<Instant>,
    /// It could come back.
    is_allowed: bool,
    /// Why it could not, the last time. It is not tried again while jobs run: what they use is known by their requests, and
    /// nothing is told twice, or of half of a job.
    failed: Option<String>,
}

impl Watch {
    /// Lets the observer rest from now on, where this process can have it work again.
    pub(super) fn allow_rest(&mut self) {
        match self.observer.try_again() {
            Ok(()) => self.rest.get_mut().is_allowed = true,
            Err(error) => tracing::warn!("the observer stays at work, without a hook that it had: {error}"),
        }
    }

    /// Why it sees nothing, though somebody needs it.
    pub(super) fn failure(&self) -> Option<String> {
        self.rest.lock().failed.clone()
    }

    fn put_to_work(&self, rest: &mut ObserverActivation, jobs_run: bool) {
        if self.observer.is_at_work() || (jobs_run && rest.failed.is_some()) {
            return;
        }
        match self.observer.work() {
            Ok(()) => {
                tracing::debug!("the observer is at work");
                rest.failed = None;
            }
            Err(error) => {
                let why = format!("the observer cannot come back to work: {error}");
                if rest.failed.is_none() {
                    tracing::warn!("what jobs use is known by their requests alone: {why}");
                }
                rest.failed = Some(why);
            }
        }
    }
}

impl Registry {
    /// The observer, if it can tell what is used.
    pub(super) fn seeing(&self) -> Option<&Watch> {
        self.watch().filter(|watch| watch.failure().is_none())
    }
}

impl Inner {
    /// The observer, at work from now on for at least as long as said, and a while longer. `None`: it is not.
    pub(super) fn observer_at_work(&self, at_least: Duration) -> Option<&Watch> {
        let watch = self.registry.watch()?;
        let mut rest = watch.rest.lock();
        let until = Instant::now() + at_least + LINGER;
        rest.needed_until = Some(rest.needed_until.map_or(until, |known| known.max(until)));
        watch.put_to_work(&mut rest, self.registry.any());
        watch.observer.is_at_work().then_some(watch)
    }

    /// Lets the observer rest, or has it work, as it is needed now.
    pub(super) fn rest_or_work(&self, watch: &Watch) {
        let mut rest = watch.rest.lock();
        let now = Instant::now();
        if self.needs_observer() {
            rest.needed_until = rest.needed_until.max(Some(now + LINGER));
        }
        let is_needed = rest.needed_until.is_some_and(|until| now < until);
        if is_needed || !rest.is_allowed {
            watch.put_to_work(&mut rest, self.registry.any());
        } else if watch.observer.is_at_work() {
            tracing::debug!("nobody needs the observer: it rests");
            watch.observer.rest();
        }
    }

    fn needs_observer(&self) -> bool {
        let jobs = &self.registry;
        // Where the kernel tells of no opens nothing else says what is used.
        self.engine.policy().observes_always
            || jobs.any()
            || jobs.opens_unseen.load(Ordering::Relaxed)
            || self.is_eviction_near()
    }

    fn is_eviction_near(&self) -> bool {
        let budget = &self.engine.fast_pool().budget;
        let used = budget.used().saturating_add(budget.reserved());
        // Others may fill the device before we reach our limit.
        let room = budget.limit().min(used.saturating_add(self.engine.fast_pool().free_bytes()));
        used as f64 > room as f64 * self.engine.policy().space.low_watermark * NOTED_FROM
    }

    /// The fast pool is filled further. Where uses should be noted from now on, who keeps jobs is told.
    pub(crate) fn note_filling(&self) {
        if let Some(watch) = self.registry.watch()
            && !watch.observer.is_at_work()
            && self.engine.fast_pool().budget.above(self.engine.policy().space.low_watermark * NOTED_FROM) > 0
        {
            watch.observer.ring_bell();
        }
    }
}
