//! Questions of the engine to the `jobs` crate. That crate stands above the engine, and sets the advisor once.

use std::sync::Arc;
use std::time::Duration;

use forebay_api::jobs::ObserverStatus;
use forebay_backends::Result;
use forebay_policy::JobFacts;
use forebay_prefetch::plan::{PoolRate, StagingPlan, StagingRefusal};
use forebay_prefetch::profile::ExpectedRead;
use forebay_prefetch::signature::Invocation;

use super::{Inner, Ino, Overlay};

/// Knows jobs, and the files that they use. Each method has a default for an engine without jobs.
pub trait Advisor: Send + Sync {
    /// Called when eviction is about to choose: calls [`Overlay::note_uses`] for files whose use was seen since the
    /// last time.
    fn report_uses(&self) {}

    /// Called when the fast pool has been filled further.
    fn fast_pool_grew(&self) {}

    /// Returns whether content was fetched ahead and is still expected to be used. Such content is evicted last.
    fn keeps(&self, _ino: Ino) -> bool {
        false
    }

    /// Called when the clean content of a file was given up.
    fn evicted(&self, _ino: Ino) {}

    /// Returns whether a job of this name is running.
    fn is_running(&self, _job: &str) -> bool {
        false
    }

    /// Returns the running jobs that use a file.
    fn jobs_of(&self, _ino: Ino) -> Vec<JobFacts> {
        Vec::new()
    }

    /// Leaves a local file that is to be removed to the running jobs that use it, or may use it: their end removes it.
    /// Returns whether there are such jobs.
    fn takes_over(&self, _ino: Ino) -> bool {
        false
    }

    /// Returns the user of a job or an allocation, which owns leases. Blocks.
    fn user_of(&self, _owner: &str) -> Option<u32> {
        None
    }

    /// Predicts what a command will read, and plans what of it to stage. Blocks.
    fn foresee(&self, _invocation: &Invocation, _means: Means) -> Result<Foreseen> {
        Ok(Foreseen::default())
    }

    fn observer_status(&self) -> ObserverStatus {
        ObserverStatus { why: Some("no observer was requested".into()), ..ObserverStatus::default() }
    }
}

/// The advisor of an engine without jobs.
struct NoJobs;

impl Advisor for NoJobs {}

/// Limits of a plan beside the room in the fast pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct Means {
    /// Bytes that are staged in addition, and first.
    pub declared_bytes: u64,
    /// Time until the content must be resident. `None`: the caller waits for it.
    pub time: Option<Duration>,
    /// `None`: the measured rate.
    pub pool: Option<PoolRate>,
}

/// What to stage for a command.
#[derive(Debug, Default)]
pub struct Foreseen {
    pub expected: Vec<ExpectedRead>,
    /// `StagingCandidate::file` is an index into `expected`.
    pub plan: StagingPlan,
}

impl Foreseen {
    /// Returns how many files are left out for this reason.
    pub fn left_out(&self, reason: StagingRefusal) -> usize {
        self.plan.refused.iter().filter(|(_, why)| *why == reason).count()
    }

    /// Returns the files to stage, in the order of the plan.
    pub fn into_chosen(self) -> Vec<ExpectedRead> {
        self.plan.chosen.iter().map(|candidate| self.expected[candidate.file as usize].clone()).collect()
    }
}

impl Overlay {
    /// Sets the advisor. A second call changes nothing.
    pub fn set_advisor(&self, advisor: Arc<dyn Advisor>) {
        let _ = self.inner.advisor.set(advisor);
    }
}

impl Inner {
    pub(super) fn advisor(&self) -> &dyn Advisor {
        self.advisor.get().map_or(&NoJobs, |advisor| &**advisor)
    }
}
