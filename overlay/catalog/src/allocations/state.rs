//! The states of an allocation. Each transition is a method; a verb whose work is done already changes nothing, so that
//! a scheduler may repeat any of them.
//!
//! ```text
//!   declared ──► staging-in ──► ready ──► running ──► staging-out ──► done
//!       │            │            │          │             │
//!       └────────────┴────────────┴──────────┴─────────────┴──► failed, cancelled
//! ```
//!
//! A job may start before its staging has ended, and may end without a start. A job whose staging failed may start: the
//! mount serves it from the pool. After the end of a job only [`AllocationState::begin`] leads to another run of it.

use forebay_api::allocations::AllocationPhase;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What an allocation did when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllocationWork {
    StageIn,
    Run,
    StageOut,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum AllocationState {
    Declared,
    StagingIn,
    Ready,
    Running,
    StagingOut,
    Done,
    Failed { during: AllocationWork, reason: String },
    Cancelled,
}

/// What a verb does to a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    To(AllocationState),
    /// The verb was carried out before, or came too late to matter.
    Stays,
}

/// A verb that does not apply to the state.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the allocation is {}: {verb} needs a new one (`forebay job begin`)", .phase.name())]
pub struct WrongPhase {
    pub phase: AllocationPhase,
    pub verb: &'static str,
}

type Allowed = Result<Transition, WrongPhase>;

use AllocationState::{Cancelled, Declared, Done, Failed, Ready, Running, StagingIn, StagingOut};
use Transition::{Stays, To};

impl AllocationState {
    /// Begins an allocation, or begins it again: after its end, or if the scheduler says that it has requeued the job
    /// since.
    pub fn begin(known: Option<&Self>, is_requeued: bool) -> Transition {
        match known {
            None | Some(Done | Failed { .. } | Cancelled) => To(Declared),
            Some(Declared | StagingIn | Ready | Running | StagingOut) if is_requeued => To(Declared),
            Some(Declared | StagingIn | Ready | Running | StagingOut) => Stays,
        }
    }

    /// A failed staging is tried again.
    pub fn stage_in(&self) -> Allowed {
        match self {
            Declared | Failed { during: AllocationWork::StageIn, .. } => Ok(To(StagingIn)),
            StagingIn | Ready | Running => Ok(Stays),
            StagingOut | Done | Failed { .. } | Cancelled => Err(self.wrong("stage-in")),
        }
    }

    /// All that was to be staged is resident. A job that started meanwhile runs on.
    pub fn staged(&self) -> Transition {
        if *self == StagingIn { To(Ready) } else { Stays }
    }

    /// A job starts even if its staging has not ended, or has failed.
    pub fn start(&self) -> Allowed {
        match self {
            Declared | StagingIn | Ready | Failed { during: AllocationWork::StageIn, .. } => Ok(To(Running)),
            Running => Ok(Stays),
            StagingOut | Done | Failed { .. } | Cancelled => Err(self.wrong("start")),
        }
    }

    /// The job is over, or will not run. What it wrote is still to be written back.
    pub fn end(&self) -> Transition {
        match self {
            Declared
            | StagingIn
            | Ready
            | Running
            | Failed { during: AllocationWork::StageIn | AllocationWork::Run, .. } => To(StagingOut),
            StagingOut | Done | Failed { during: AllocationWork::StageOut, .. } | Cancelled => Stays,
        }
    }

    /// Ends the job if it has not ended. A failed write-back is tried again.
    pub fn stage_out(&self) -> Transition {
        match self {
            Failed { during: AllocationWork::StageOut, .. } => To(StagingOut),
            other => other.end(),
        }
    }

    /// Results were committed after the write-back had ended: they are still to be written back.
    pub fn stage_out_again(&self) -> Transition {
        match self {
            Done | Cancelled => To(StagingOut),
            other => other.stage_out(),
        }
    }

    /// All that was to be written back is in the pool.
    pub fn staged_out(&self) -> Transition {
        if *self == StagingOut { To(Done) } else { Stays }
    }

    /// Part of the work failed. Changes nothing if the allocation has gone on to other work.
    pub fn fail(&self, during: AllocationWork, reason: &str) -> Transition {
        match (during, self) {
            (AllocationWork::StageIn, StagingIn)
            | (AllocationWork::Run, Running)
            | (AllocationWork::StageOut, StagingOut) => To(Failed { during, reason: reason.to_owned() }),
            _ => Stays,
        }
    }

    pub fn cancel(&self) -> Transition {
        match self {
            Declared
            | StagingIn
            | Ready
            | Running
            | StagingOut
            | Failed { during: AllocationWork::StageIn | AllocationWork::Run, .. } => To(Cancelled),
            Done | Failed { during: AllocationWork::StageOut, .. } | Cancelled => Stays,
        }
    }

    pub fn phase(&self) -> AllocationPhase {
        match self {
            Declared => AllocationPhase::Declared,
            StagingIn => AllocationPhase::StagingIn,
            Ready => AllocationPhase::Ready,
            Running => AllocationPhase::Running,
            StagingOut => AllocationPhase::StagingOut,
            Done => AllocationPhase::Done,
            Failed { .. } => AllocationPhase::Failed,
            Cancelled => AllocationPhase::Cancelled,
        }
    }

    /// Returns whether the job may still run: until then, the allocation may hold leases.
    pub fn may_run(&self) -> bool {
        match self {
            Declared | StagingIn | Ready | Running | Failed { during: AllocationWork::StageIn, .. } => true,
            StagingOut | Done | Failed { .. } | Cancelled => false,
        }
    }

    /// Returns whether nothing more happens without another verb.
    pub fn is_over(&self) -> bool {
        !self.may_run() && *self != StagingOut
    }

    fn wrong(&self, verb: &'static str) -> WrongPhase {
        WrongPhase { phase: self.phase(), verb }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(during: AllocationWork) -> AllocationState {
        Failed { during, reason: "why".into() }
    }

    fn all() -> Vec<AllocationState> {
        let failed = [AllocationWork::StageIn, AllocationWork::Run, AllocationWork::StageOut].map(failed);
        [Declared, StagingIn, Ready, Running, StagingOut, Done, Cancelled].into_iter().chain(failed).collect()
    }

    type Verb = fn(&AllocationState) -> Allowed;

    /// All verbs but `begin`.
    const VERBS: [(&str, Verb); 11] = [
        ("stage-in", AllocationState::stage_in),
        ("staged", |state| Ok(state.staged())),
        ("start", AllocationState::start),
        ("end", |state| Ok(state.end())),
        ("stage-out", |state| Ok(state.stage_out())),
        ("stage-out again", |state| Ok(state.stage_out_again())),
        ("staged-out", |state| Ok(state.staged_out())),
        ("fail to stage in", |state| Ok(state.fail(AllocationWork::StageIn, "why"))),
        ("fail to run", |state| Ok(state.fail(AllocationWork::Run, "why"))),
        ("fail to stage out", |state| Ok(state.fail(AllocationWork::StageOut, "why"))),
        ("cancel", |state| Ok(state.cancel())),
    ];

    fn after(state: &AllocationState, verb: Verb) -> AllocationState {
        match verb(state) {
            Ok(To(next)) => next,
            Ok(Stays) | Err(_) => state.clone(),
        }
    }

    fn reachable(from: AllocationState) -> Vec<AllocationState> {
        let mut found = vec![from];
        let mut at = 0;
        while at < found.len() {
            for (_, verb) in VERBS {
                let next = after(&found[at], verb);
                if !found.contains(&next) {
                    found.push(next);
                }
            }
            at += 1;
        }
        found
    }

    #[test]
    fn a_repeated_verb_changes_nothing() {
        for state in all() {
            for (name, verb) in VERBS {
                let once = after(&state, verb);
                assert_eq!(after(&once, verb), once, "{name} twice, from {state:?}");
            }
            let begun = AllocationState::begin(Some(&state), false);
            let once = if let To(next) = begun { next } else { state.clone() };
            assert_eq!(AllocationState::begin(Some(&once), false), Stays);
            assert_eq!(AllocationState::begin(Some(&state), true), To(Declared));
        }
    }

    #[test]
    fn every_state_is_reached_from_a_new_allocation() {
        assert_eq!(AllocationState::begin(None, false), To(Declared));
        let reached = reachable(Declared);
        all().iter().for_each(|state| assert!(reached.contains(state), "{state:?}"));
    }

    #[test]
    fn a_job_that_ended_runs_again_only_if_it_is_begun_again() {
        for over in [StagingOut, Done, Cancelled, failed(AllocationWork::StageOut)] {
            let reached = reachable(over.clone());
            assert!(!reached.iter().any(AllocationState::may_run), "from {over:?}: {reached:?}");
        }
    }

    #[test]
    fn nothing_is_done_that_was_not_written_back() {
        for state in all().into_iter().filter(|state| *state != Done) {
            for (name, verb) in VERBS {
                let done = after(&state, verb) == Done;
                assert_eq!(done, state == StagingOut && name == "staged-out", "{name} from {state:?}");
            }
        }
    }

    #[test]
    fn a_failure_of_earlier_work_does_not_stop_what_runs_now() {
        assert_eq!(Running.fail(AllocationWork::StageIn, "why"), Stays);
        assert_eq!(StagingOut.fail(AllocationWork::Run, "why"), Stays);
        assert_eq!(failed(AllocationWork::StageIn).start(), Ok(To(Running)), "the mount serves the job from the pool");
    }
}
