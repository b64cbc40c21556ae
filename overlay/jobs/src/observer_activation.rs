//! Decides when the observer is attached.
//!
//! A program in the kernel costs every read of a page 60 to 134 ns, whichever process makes it (`make bench-observer`).
//! So the programs are attached only while their records are needed: a job runs, `top` runs, or eviction is so near
//! that it will need to know what is used.
//!
//! Eviction counts as near once half of the low watermark is used: of the fast pool's limit, or of the space that the
//! device still has for it if that is less. The programs are detached `LINGER` after the last need, unless `[observer]
//! at-work` in the policy says otherwise. Meanwhile requests tell of opens, so that opened files do not look unused. On
//! mounts of immutable data the kernel sends no OPEN requests, so the observer stays attached.
//!
//! Since Linux 5.19 no capability is needed to attach loaded programs. If this process could not attach them again, it
//! never detaches them. If attaching fails all the same, there is no observer until it succeeds while no job runs;
//! reports say so.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::watch::Watch;
use super::{JobsInner, Registry};

/// Uses are recorded for eviction from this share of the low watermark on.
const NOTED_FROM: f64 = 0.5;
/// How long the observer stays attached after the last need: the next job may begin at once.
const LINGER: Duration = Duration::from_secs(10);

/// The state of one observer. Its lock is held while the programs are attached or detached.
#[derive(Debug, Default)]
pub(super) struct ObserverActivation {
    /// The observer is needed until then.
    needed_until: Option<Instant>,
    /// The programs can be attached again after they were detached.
    is_allowed: bool,
    /// Why the last attempt to attach failed. There is no other attempt while jobs run: requests count what they use,
    /// and no use must be counted twice, or half of a job be observed.
    failed: Option<String>,
}

impl Watch {
    /// Permits that the observer is detached from now on, if this process can attach it again.
    pub(super) fn allow_rest(&mut self) {
        match self.observer.try_again() {
            Ok(()) => self.rest.get_mut().is_allowed = true,
            Err(error) => tracing::warn!("the observer works on without one of its hooks: {error}"),
        }
    }

    /// Returns why the observer sees nothing although it is needed.
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
                let why = format!("the observer could not be attached again: {error}");
                if rest.failed.is_none() {
                    tracing::warn!("only the requests of jobs are observed: {why}");
                }
                rest.failed = Some(why);
            }
        }
    }
}

impl Registry {
    /// Returns the observer, if it can tell what is used.
    pub(super) fn seeing(&self) -> Option<&Watch> {
        self.watch().filter(|watch| watch.failure().is_none())
    }
}

impl JobsInner {
    /// Attaches the observer for at least this time and `LINGER`. Returns `None` if it is not attached.
    pub(super) fn observer_at_work(&self, at_least: Duration) -> Option<&Watch> {
        let watch = self.registry.watch()?;
        let mut rest = watch.rest.lock();
        let until = Instant::now() + at_least + LINGER;
        rest.needed_until = Some(rest.needed_until.map_or(until, |known| known.max(until)));
        watch.put_to_work(&mut rest, self.registry.any());
        watch.observer.is_at_work().then_some(watch)
    }

    /// Attaches or detaches the observer, as it is needed now.
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
            tracing::debug!("no reader needs the observer: it is detached");
            watch.observer.rest();
        }
    }

    fn needs_observer(&self) -> bool {
        let jobs = &self.registry;
        // If the kernel sends no OPEN requests, only the observer tells what is used.
        self.engine.policy().observes_always
            || jobs.any()
            || jobs.opens_unseen.load(Ordering::Relaxed)
            || self.is_eviction_near()
    }

    fn is_eviction_near(&self) -> bool {
        let budget = &self.engine.fast_pool().budget;
        let used = budget.used().saturating_add(budget.reserved());
        // Other users of the device may fill it before the fast pool reaches its limit.
        let room = budget.limit().min(used.saturating_add(self.engine.fast_pool().free_bytes()));
        used as f64 > room as f64 * self.engine.policy().space.low_watermark * NOTED_FROM
    }

    /// Wakes the collector if the fast pool is now so full that uses should be recorded. Called when the fast pool
    /// grew.
    pub(crate) fn note_filling(&self) {
        if let Some(watch) = self.registry.watch()
            && !watch.observer.is_at_work()
            && self.engine.fast_pool().budget.above(self.engine.policy().space.low_watermark * NOTED_FROM) > 0
        {
            watch.observer.ring_bell();
        }
    }
}
