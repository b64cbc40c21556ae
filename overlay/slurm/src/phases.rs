//! What a prolog and an epilog do at one mount, in bounded time.
//!
//! A failed prolog or epilog drains the node, so only a broken node may make one fail: a daemon that is dead or does not
//! answer. A pool that is slow or gone is none: the job starts, the mount serves it as well as it can, and the reason is
//! told.

use std::time::{Duration, Instant};

use forebay_api::allocations::{Allocation, AllocationPhase, AllocationRequest, AllocationVerb};
use forebay_api::jobs::Members;
use forebay_api::operator::TypedPath;
use forebay_api::{Failure, FailureKind};

use crate::SlurmJob;
use crate::directives::ProfileUse;

/// How long one request waits.
const WAIT: Duration = Duration::from_secs(1);

/// What a job asks of one mount.
#[derive(Debug, Clone, Default)]
pub struct MountShare {
    pub stage_in: Vec<TypedPath>,
    pub stage_out: Vec<TypedPath>,
    /// Shown as views while the job runs.
    pub views: Vec<TypedPath>,
    /// All groups of the job's user: only what the user may read is staged.
    pub groups: Vec<u32>,
    pub profile: ProfileUse,
    pub lease_secs: Option<u64>,
    /// The job leaves results in its scratch directory at this mount.
    pub has_results: bool,
    /// The scratch directory of the job is at this mount.
    pub has_scratch: bool,
}

impl MountShare {
    /// Returns whether the job must not start without an allocation at the mount: that stages what the job names, owns its
    /// scratch directory, and writes back what the job declares.
    pub fn needs_allocation(&self) -> bool {
        self.has_scratch || !self.stage_in.is_empty() || !self.stage_out.is_empty()
    }
}

/// What a prolog has done at a mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prologue {
    /// What was not done as requested.
    pub notes: Vec<String>,
    /// Why the job has no allocation: nothing of it is staged or written back.
    pub not_begun: Option<String>,
    /// Bytes that were staged for the job. `None`: the staging has not ended.
    pub staged_bytes: Option<u64>,
}

/// What an epilog knows of a job at a mount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JobRemains {
    /// A prolog has begun its allocation.
    pub has_begun: bool,
    /// The results in its scratch directory are committed or given up.
    pub is_settled: bool,
}

/// Stages what the job will read, until it is resident or the time is up, and starts the job.
///
/// # Errors
/// The node is broken.
pub fn prolog<S>(job: &SlurmJob, share: &MountShare, until: Instant, send: S) -> Result<Prologue, Failure>
where
    S: Fn(AllocationVerb) -> Result<Option<Allocation>, Failure>,
{
    let (mut notes, mut refusals) = (Vec::new(), Vec::new());
    note(send(AllocationVerb::Begin(request(job, share))), &mut refusals)?;
    note(send(AllocationVerb::StageIn { wait_ms: 0 }), &mut notes)?;
    let known = wait(until, &send, &mut notes)?;
    let staged_bytes = known.as_ref().filter(|known| !known.is_staging).map(|known| known.staged.bytes);
    match known {
        Some(Allocation { is_staging: true, .. }) => {
            notes.push("the time for staging is up: the job starts, and staging goes on".into());
        }
        Some(Allocation { phase: AllocationPhase::Failed, reason, .. }) => notes.extend(reason),
        _ => {}
    }
    let members = Members::SlurmSteps { job: job.id.clone() };
    note(send(AllocationVerb::Start { members }), &mut notes)?;
    Ok(Prologue { notes, not_begun: refusals.pop(), staged_bytes })
}

/// Ends the job, and writes back what it wrote, until that is in the pool or the time is up. Returns what was not done
/// as requested.
///
/// # Errors
/// The node is broken.
pub fn epilog<S>(job: &SlurmJob, remains: JobRemains, until: Instant, send: S) -> Result<Vec<String>, Failure>
where
    S: Fn(AllocationVerb) -> Result<Option<Allocation>, Failure>,
{
    let mut notes = Vec::new();
    let known = note(send(AllocationVerb::Show), &mut notes)?;
    let over = [AllocationPhase::Done, AllocationPhase::Failed, AllocationPhase::Cancelled];
    if known.is_some_and(|known| over.contains(&known.phase) && known.requeues < job.requeues) {
        // slurmd runs no prolog for a job that returns to the node at once. The epilog of the attempt before also knows
        // of the requeue, but its allocation is not over.
        note(send(AllocationVerb::Begin(request(job, &MountShare::default()))), &mut notes)?;
    }
    // Ends the job as well: in one request, so that a slow end does not keep the write-back from beginning.
    note(send(AllocationVerb::StageOut { wait_ms: 0, is_settled: remains.is_settled }), &mut notes)?;
    match wait(until, &send, &mut notes)? {
        Some(Allocation { phase: AllocationPhase::StagingOut, .. }) => {
            notes.push("the time for the write-back is up: it goes on".into());
        }
        Some(Allocation { phase: AllocationPhase::Failed, reason, .. })
        | Some(Allocation { keeps_results: true, reason, .. }) => notes.extend(reason),
        None if remains.has_begun => {
            notes.push("it has no allocation here: what it wrote to the mount is written back by policy".into());
        }
        _ => {}
    }
    Ok(notes)
}

/// Ends the job without its write-back: its scratch directory, which holds results, stays. What it wrote to the mount is
/// flushed by policy. Returns what was not done as requested.
///
/// # Errors
/// The node is broken.
pub fn end<S>(send: S) -> Result<Vec<String>, Failure>
where
    S: Fn(AllocationVerb) -> Result<Option<Allocation>, Failure>,
{
    let mut notes = Vec::new();
    note(send(AllocationVerb::End), &mut notes)?;
    Ok(notes)
}

/// Gives up what the job has in its scratch directory. What it wrote to the mount is flushed by policy. Returns what was
/// not done as requested.
///
/// # Errors
/// The node is broken.
pub fn give_up<S>(send: S) -> Result<Vec<String>, Failure>
where
    S: Fn(AllocationVerb) -> Result<Option<Allocation>, Failure>,
{
    let mut notes = Vec::new();
    // Nothing is observed of the job after its end, but it is learned from what was.
    note(send(AllocationVerb::End), &mut notes)?;
    note(send(AllocationVerb::Teardown { gives_up_results: true }), &mut notes)?;
    Ok(notes)
}

fn request(job: &SlurmJob, share: &MountShare) -> AllocationRequest {
    AllocationRequest {
        uid: Some(job.uid),
        groups: Some(share.groups.clone()),
        stage_in: share.stage_in.clone(),
        stage_out: share.stage_out.clone(),
        invocation: match &share.profile {
            ProfileUse::Auto => Some(job.invocation()),
            ProfileUse::Named(name) => Some(job.named_invocation(name)),
            ProfileUse::None => None,
        },
        lease_secs: share.lease_secs,
        requeues: job.requeues,
        has_results: share.has_results,
    }
}

/// Waits until the work on the allocation has ended, or the time is up.
fn wait<S>(until: Instant, send: &S, notes: &mut Vec<String>) -> Result<Option<Allocation>, Failure>
where
    S: Fn(AllocationVerb) -> Result<Option<Allocation>, Failure>,
{
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let known = note(send(AllocationVerb::Ready { wait_ms: left.min(WAIT).as_millis() as u64 }), notes)?;
        if left.is_zero() || !known.as_ref().is_some_and(Allocation::is_at_work) {
            return Ok(known);
        }
    }
}

/// Passes on the failure of a broken node. Any other failure becomes a note.
fn note(answer: Result<Option<Allocation>, Failure>, notes: &mut Vec<String>) -> Result<Option<Allocation>, Failure> {
    match answer {
        Err(failure) if is_broken(&failure) => Err(failure),
        Err(failure) => {
            notes.push(failure.what);
            Ok(None)
        }
        Ok(known) => Ok(known),
    }
}

fn is_broken(failure: &Failure) -> bool {
    matches!(failure.kind, FailureKind::NoDaemon | FailureKind::Corrupt | FailureKind::Denied)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use forebay_api::allocations::TransferCounts;

    use super::*;

    /// The epilog of a job without directives.
    const WITHOUT: JobRemains = JobRemains { has_begun: false, is_settled: false };

    fn job() -> SlurmJob {
        let variables = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_UID", "1"), ("SLURM_JOB_WORK_DIR", "/w")];
        let of = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        SlurmJob::of(of).unwrap()
    }

    fn allocation(phase: AllocationPhase, reason: Option<&str>) -> Allocation {
        Allocation {
            id: "slurm-7".into(),
            uid: 1,
            phase,
            reason: reason.map(Into::into),
            attempt: 1,
            requeues: 0,
            is_staging: phase == AllocationPhase::StagingIn,
            is_writing_back: phase == AllocationPhase::StagingOut,
            begun_unix: 1,
            since_unix: 1,
            command: String::new(),
            stage_in: Vec::new(),
            stage_out: Vec::new(),
            staged: TransferCounts::default(),
            flushed: TransferCounts::default(),
            keeps_results: false,
        }
    }

    fn name(verb: &AllocationVerb) -> &'static str {
        match verb {
            AllocationVerb::Begin(_) => "begin",
            AllocationVerb::StageIn { .. } => "stage-in",
            AllocationVerb::Ready { .. } => "ready",
            AllocationVerb::Start { .. } => "start",
            AllocationVerb::End => "end",
            AllocationVerb::StageOut { .. } => "stage-out",
            AllocationVerb::Teardown { .. } => "teardown",
            AllocationVerb::Show => "show",
        }
    }

    /// Runs the prolog with a daemon that answers like this. Returns the verbs and the outcome.
    fn run(
        answer: impl Fn(&str) -> Result<Option<Allocation>, Failure>,
    ) -> (Vec<&'static str>, Result<Prologue, Failure>) {
        let verbs = RefCell::new(Vec::new());
        let outcome = prolog(&job(), &MountShare::default(), Instant::now(), |verb| {
            verbs.borrow_mut().push(name(&verb));
            answer(name(&verb))
        });
        (verbs.into_inner(), outcome)
    }

    #[test]
    fn a_job_starts_although_its_staging_fails_or_takes_too_long() {
        let failed = run(|_| Ok(Some(allocation(AllocationPhase::Failed, Some("the pool does not answer")))));
        assert_eq!(failed.0, ["begin", "stage-in", "ready", "start"]);
        assert_eq!(failed.1.unwrap().notes, ["the pool does not answer"]);
        let late = run(|_| Ok(Some(allocation(AllocationPhase::StagingIn, None))));
        assert_eq!(late.0.last(), Some(&"start"));
        let late = late.1.unwrap();
        assert_eq!((late.notes.len(), late.staged_bytes), (1, None));
        let staged = TransferCounts { files: 1, bytes: 9, failed: 0 };
        let ready = run(|_| Ok(Some(Allocation { staged, ..allocation(AllocationPhase::Ready, None) })));
        assert_eq!(ready.1.unwrap(), Prologue { staged_bytes: Some(9), ..Prologue::default() });
        let refused = run(|verb| match verb {
            "begin" | "stage-in" | "ready" => Err(Failure::new(FailureKind::Busy, "too many")),
            _ => Ok(Some(allocation(AllocationPhase::Running, None))),
        });
        assert_eq!(refused.0.last(), Some(&"start"));
        let refused = refused.1.unwrap();
        assert_eq!(refused.not_begun.as_deref(), Some("too many"));
        assert_eq!(refused.notes, ["too many"; 2], "of the staging");
    }

    #[test]
    fn a_job_needs_an_allocation_only_where_it_names_something() {
        let path = || vec![TypedPath::default()];
        let needed = [
            MountShare { stage_in: path(), ..MountShare::default() },
            MountShare { stage_out: path(), ..MountShare::default() },
            MountShare { has_scratch: true, ..MountShare::default() },
        ];
        assert!(needed.iter().all(MountShare::needs_allocation));
        assert!(!MountShare { views: path(), ..MountShare::default() }.needs_allocation(), "it runs without the view");
    }

    #[test]
    fn results_are_given_up_or_settled_only_where_the_epilog_says_so() {
        let sent = RefCell::new(Vec::new());
        let answer = |verb: AllocationVerb| {
            sent.borrow_mut().push(verb);
            Ok(Some(allocation(AllocationPhase::Done, None)))
        };
        epilog(&job(), WITHOUT, Instant::now(), answer).unwrap();
        epilog(&job(), JobRemains { is_settled: true, ..WITHOUT }, Instant::now(), answer).unwrap();
        give_up(answer).unwrap();
        let sent = sent.into_inner();
        let has = |verb: AllocationVerb| sent.iter().filter(|sent| **sent == verb).count();
        assert_eq!([false, true].map(|is_settled| has(AllocationVerb::StageOut { wait_ms: 0, is_settled })), [1, 1]);
        assert_eq!(has(AllocationVerb::Teardown { gives_up_results: true }), 1);
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_a_broken_node() {
        let (verbs, outcome) = run(|_| Err(Failure::new(FailureKind::NoDaemon, "dead")));
        assert_eq!((verbs.as_slice(), outcome.unwrap_err().what.as_str()), (["begin"].as_slice(), "dead"));
        let outcome = epilog(&job(), WITHOUT, Instant::now(), |_| Err(Failure::new(FailureKind::NoDaemon, "dead")));
        assert_eq!(outcome.unwrap_err().kind, FailureKind::NoDaemon);
    }

    #[test]
    fn an_allocation_is_begun_for_the_jobs_user_and_attempt() {
        let job = SlurmJob { requeues: 3, ..job() };
        let begun = RefCell::new(None);
        prolog(&job, &MountShare::default(), Instant::now(), |verb| {
            if let AllocationVerb::Begin(request) = verb {
                begun.replace(Some(request));
            }
            Ok(None)
        })
        .unwrap();
        let request = begun.into_inner().unwrap();
        assert_eq!((request.uid, request.requeues, request.invocation), (Some(1), 3, Some(job.invocation())));
        let named = MountShare { profile: ProfileUse::Named("train".into()), ..MountShare::default() };
        assert_eq!(super::request(&job, &named).invocation, Some(job.named_invocation("train")));
        let none = MountShare { profile: ProfileUse::None, ..MountShare::default() };
        assert_eq!(super::request(&job, &none).invocation, None);
    }

    #[test]
    fn work_is_waited_for_until_it_has_ended() {
        let until = Instant::now() + Duration::from_secs(60);
        for (at_work, ended) in
            [(AllocationPhase::StagingIn, AllocationPhase::Ready), (AllocationPhase::StagingOut, AllocationPhase::Done)]
        {
            let asked = RefCell::new(0);
            let answer = |_| {
                *asked.borrow_mut() += 1;
                Ok(Some(allocation(if *asked.borrow() < 4 { at_work } else { ended }, None)))
            };
            let known = wait(until, &answer, &mut Vec::new()).unwrap();
            assert_eq!((known.unwrap().phase, *asked.borrow()), (ended, 4));
        }
        let late = epilog(&job(), WITHOUT, Instant::now(), |_| Ok(Some(allocation(AllocationPhase::StagingOut, None))));
        assert_eq!(late.unwrap(), ["the time for the write-back is up: it goes on"]);
    }

    #[test]
    fn a_job_that_returned_without_a_prolog_is_written_back_as_another_attempt() {
        let verbs = RefCell::new(Vec::new());
        let job = SlurmJob { requeues: 1, ..job() };
        let answer = |verb: AllocationVerb| {
            verbs.borrow_mut().push(name(&verb));
            Ok(Some(allocation(AllocationPhase::Done, None)))
        };
        epilog(&job, WITHOUT, Instant::now(), answer).unwrap();
        assert_eq!(*verbs.borrow(), ["show", "begin", "stage-out", "ready"]);
        verbs.borrow_mut().clear();
        epilog(&SlurmJob { requeues: 0, ..job.clone() }, WITHOUT, Instant::now(), answer).unwrap();
        assert_eq!(*verbs.borrow(), ["show", "stage-out", "ready"], "an epilog that is repeated");
        verbs.borrow_mut().clear();
        let answer = |verb: AllocationVerb| {
            verbs.borrow_mut().push(name(&verb));
            Ok(Some(allocation(AllocationPhase::Running, None)))
        };
        epilog(&job, WITHOUT, Instant::now(), answer).unwrap();
        assert_eq!(*verbs.borrow(), ["show", "stage-out", "ready"], "the epilog of the attempt before");
    }

    #[test]
    fn an_epilog_says_what_is_not_in_the_pool() {
        let answer = |phase, reason: Option<&'static str>| move |_: AllocationVerb| Ok(Some(allocation(phase, reason)));
        let notes = |answer: &dyn Fn(AllocationVerb) -> Result<Option<Allocation>, Failure>, remains| {
            epilog(&job(), remains, Instant::now(), answer).unwrap()
        };
        assert_eq!(notes(&answer(AllocationPhase::Failed, Some("out/a: no space")), WITHOUT), ["out/a: no space"]);
        assert_eq!(notes(&answer(AllocationPhase::Done, None), WITHOUT), Vec::<String>::new());
        assert_eq!(notes(&|_| Ok(None), WITHOUT), Vec::<String>::new(), "it never began here");
        let begun = JobRemains { has_begun: true, is_settled: true };
        assert_eq!(notes(&|_| Ok(None), begun).len(), 1, "its allocation was refused");
        let keeps = Allocation { keeps_results: true, ..allocation(AllocationPhase::Done, Some("results stay")) };
        assert_eq!(notes(&|_| Ok(Some(keeps.clone())), WITHOUT), ["results stay"]);
        let refused = |verb| match verb {
            AllocationVerb::StageOut { .. } => Err(Failure::new(FailureKind::Other, "cannot write it")),
            _ => Ok(None),
        };
        assert_eq!(notes(&refused, WITHOUT), ["cannot write it"]);
    }
}
