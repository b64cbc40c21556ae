//! Answers to the questions that the engine has about jobs.

use std::sync::Weak;

use forebay_backends::Result;
use forebay_engine::{Advisor, Foreseen, Ino, Means};
use forebay_policy::JobFacts;

use super::foresight::Invocation;
use super::{EVICTION_LOOKS, JobsInner, ObserverStatus};

/// Answers the engine's questions about jobs. The engine does not keep jobs alive.
pub(super) struct Advice(pub Weak<JobsInner>);

impl Advisor for Advice {
    fn report_uses(&self) {
        if let Some(inner) = self.0.upgrade() {
            inner.collect_uses(EVICTION_LOOKS);
        }
    }

    fn fast_pool_grew(&self) {
        if let Some(inner) = self.0.upgrade() {
            inner.note_filling();
        }
    }

    fn keeps(&self, ino: Ino) -> bool {
        self.0.upgrade().is_some_and(|inner| inner.foresight.keeps(ino))
    }

    fn evicted(&self, ino: Ino) {
        if let Some(inner) = self.0.upgrade() {
            inner.foresight.access_predictor.evicted(ino);
        }
    }

    fn is_running(&self, job: &str) -> bool {
        self.0.upgrade().is_some_and(|inner| inner.registry.runs(job) || inner.allocations.is_active(job))
    }

    fn jobs_of(&self, ino: Ino) -> Vec<JobFacts> {
        self.0.upgrade().map(|inner| inner.registry.jobs_of(ino)).unwrap_or_default()
    }

    fn takes_over(&self, ino: Ino) -> bool {
        self.0.upgrade().is_some_and(|inner| inner.take_over(ino))
    }

    fn user_of(&self, owner: &str) -> Option<u32> {
        let inner = self.0.upgrade()?;
        let of_allocation = || inner.engine.catalog().allocation(owner).ok()?.map(|allocation| allocation.uid);
        inner.registry.user_of(owner).or_else(of_allocation)
    }

    fn foresee(&self, invocation: &Invocation, means: Means) -> Result<Foreseen> {
        self.0.upgrade().map_or_else(|| Ok(Foreseen::default()), |inner| inner.foresee(invocation, means))
    }

    fn observer_status(&self) -> ObserverStatus {
        self.0.upgrade().map(|inner| inner.registry.status()).unwrap_or_default()
    }
}
