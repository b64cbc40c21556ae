//! Allocations: what a batch job holds at the mount. `catalog/allocations/state.rs` has their states.
//!
//! An allocation outlives the processes that ask for it, and the daemon: the next daemon goes on with the staging or
//! the write-back that this one had begun. Its leases are in its name. They end with the job, or with the allocation.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::allocations::{Allocation, AllocationRequest, AllocationVerb, TransferCounts};
use forebay_api::jobs::{JobRequest, Members, check_id};
use forebay_api::operator::{FlushRequest, StageRequest, Summary, TypedPath};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{AllocationRecord, AllocationState, AllocationWork, Transition, WrongPhase};
use forebay_engine::{blocking, parse_path, summary};
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::lifecycle::JobEnd;
use crate::{Jobs, JobsInner};

/// Allocations that are not over, at a time.
const ACTIVE_MAX: usize = 10_000;
/// Failures that the reason of an allocation names.
const NAMED_FAILURES: usize = 3;
/// How often the files that a job changed are looked up again, because some were removed meanwhile.
const ATTEMPTS: usize = 3;

/// The allocations of a mount.
pub(crate) struct Allocations {
    /// Held while a record is read, changed and written.
    changing: Mutex<()>,
    /// Those whose job may still run.
    active: Mutex<HashSet<String>>,
    /// AllocationWork in progress.
    work: Mutex<HashMap<String, (AllocationWork, CancellationToken)>>,
    /// Told of each change.
    changes: watch::Sender<()>,
}

impl Default for Allocations {
    fn default() -> Self {
        let (changes, _) = watch::channel(());
        Self { changing: Mutex::default(), active: Mutex::default(), work: Mutex::default(), changes }
    }
}

impl Allocations {
    /// Returns whether the leases in this name belong to an allocation whose job may still run.
    pub fn is_active(&self, id: &str) -> bool {
        self.active.lock().contains(id)
    }

    fn note(&self, record: &AllocationRecord) {
        let may_run = |state: &AllocationState| match state {
            AllocationState::Declared
            | AllocationState::StagingIn
            | AllocationState::Ready
            | AllocationState::Running
            | AllocationState::Failed { during: AllocationWork::StageIn, .. } => true,
            AllocationState::StagingOut
            | AllocationState::Done
            | AllocationState::Failed { .. }
            | AllocationState::Cancelled => false,
        };
        let mut active = self.active.lock();
        match may_run(&record.state) {
            true => _ = active.insert(record.id.clone()),
            false => _ = active.remove(&record.id),
        }
    }
}

impl Jobs {
    /// Carries out a verb. Returns `None` if there is no such allocation.
    ///
    /// # Errors
    /// `InvalidInput` if the name is not allowed, or if the verb needs a new allocation; `Busy` if there are too many.
    pub async fn allocation(&self, id: String, verb: AllocationVerb, uid: u32) -> Result<Option<Allocation>> {
        check_id(&id).map_err(|why| Error::new(ErrorKind::InvalidInput, Side::Application, why))?;
        // The allocations of an earlier daemon are taken up first.
        let inner = self.inner.clone();
        blocking(move || {
            inner.registry.wait_until_settled();
            Ok(())
        })
        .await?;
        let inner = self.inner.clone();
        let known = id.clone();
        let change = move |verb: fn(&AllocationState) -> Allowed| {
            blocking(move || inner.change_allocation(&known, |record| verb(&record.state)))
        };
        let inner = self.inner.clone();
        match verb {
            AllocationVerb::Begin(request) => {
                blocking(move || inner.begin_allocation(&id, &request, uid).map(|record| Some(record.shown()))).await
            }
            AllocationVerb::StageIn { wait_ms } => {
                let Some((record, moved)) = change(AllocationState::stage_in).await? else { return Ok(None) };
                if moved {
                    self.work_on(record, AllocationWork::StageIn);
                }
                self.wait_while(id, &AllocationState::StagingIn, wait_ms).await
            }
            AllocationVerb::Ready { wait_ms } => self.wait_while(id, &AllocationState::StagingIn, wait_ms).await,
            AllocationVerb::Start { members } => blocking(move || inner.start_allocation(&id, members)).await,
            AllocationVerb::End => {
                let Some((record, _)) = change(|state| Ok(state.end())).await? else { return Ok(None) };
                blocking(move || inner.end_holding(&id, JobEnd::Told)).await?;
                Ok(Some(record.shown()))
            }
            AllocationVerb::StageOut { wait_ms } => {
                let Some((record, _)) = change(|state| Ok(state.stage_out())).await? else { return Ok(None) };
                let ended = id.clone();
                blocking(move || inner.end_holding(&ended, JobEnd::Told)).await?;
                if record.state == AllocationState::StagingOut {
                    self.work_on(record, AllocationWork::StageOut);
                }
                self.wait_while(id, &AllocationState::StagingOut, wait_ms).await
            }
            AllocationVerb::Teardown => {
                let Some((record, _)) = change(|state| Ok(state.cancel())).await? else { return Ok(None) };
                self.stop_work(&id, AllocationWork::StageOut);
                blocking(move || inner.end_holding(&id, JobEnd::Orphaned)).await?;
                Ok(Some(record.shown()))
            }
            AllocationVerb::Show => {
                blocking(move || Ok(inner.engine.catalog().allocation(&id)?.map(|record| record.shown()))).await
            }
        }
    }

    /// Returns all kept allocations, in the order of their names.
    pub async fn allocations(&self) -> Result<Vec<Allocation>> {
        let inner = self.inner.clone();
        blocking(move || {
            let mut all = Vec::new();
            inner.engine.catalog().allocations(|record| {
                all.push(record.shown());
                Ok(true)
            })?;
            Ok(all)
        })
        .await
    }

    /// Waits while an allocation is in a state, for this time at most.
    async fn wait_while(&self, id: String, state: &AllocationState, wait_ms: u64) -> Result<Option<Allocation>> {
        let until = Instant::now().checked_add(Duration::from_millis(wait_ms));
        let mut changes = self.inner.allocations.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let (inner, wanted) = (self.inner.clone(), id.clone());
            let record = blocking(move || inner.engine.catalog().allocation(&wanted)).await?;
            let goes_on = record.as_ref().is_some_and(|record| record.state == *state);
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            if !goes_on || left.is_zero() {
                return Ok(record.map(|record| record.shown()));
            }
            // At the end of the time, the state is read once more.
            let _ = tokio::time::timeout(left, changes.changed()).await;
        }
    }

    /// Begins work on an allocation, unless the same work is in progress.
    pub(crate) fn work_on(&self, record: AllocationRecord, work: AllocationWork) {
        let inner = self.inner.clone();
        let stop = inner.engine.stop().child_token();
        {
            let mut all = inner.allocations.work.lock();
            match all.get(&record.id) {
                Some((known, stop)) if *known == work && !stop.is_cancelled() => return,
                _ => _ = all.insert(record.id.clone(), (work, stop.clone())),
            }
        }
        let jobs = self.clone();
        inner.foresight.runtime.clone().spawn(async move {
            let moving = async {
                if work == AllocationWork::StageOut {
                    jobs.stage_out(&record).await
                } else {
                    jobs.stage_in(&record).await
                }
            };
            let Some(outcome) = stop.run_until_cancelled(moving).await else { return };
            stop.cancel();
            inner.allocations.work.lock().retain(|_, (_, stop)| !stop.is_cancelled());
            let recorded = blocking(move || inner.end_work(&record, work, outcome)).await;
            if let Err(error) = recorded {
                tracing::error!(%error, "an allocation is not recorded");
            }
        });
    }

    fn stop_work(&self, id: &str, work: AllocationWork) {
        self.inner.stop_work(id, work);
    }

    async fn stage_in(&self, record: &AllocationRecord) -> Outcome {
        let request = StageRequest {
            paths: record.stage_in.clone(),
            invocation: record.invocation.clone().filter(|_| self.inner.engine.policy().prefetch.jobs),
            job: Some(record.id.clone()),
            lease_owner: record.id.clone(),
            lease_secs: record.lease_secs,
            ..StageRequest::default()
        };
        let staged = summary(self.inner.engine.stage(request)).await;
        Outcome::of(staged, "not staged")
    }

    async fn stage_out(&self, record: &AllocationRecord) -> Outcome {
        let mut outcome = Outcome::default();
        for _ in 0..ATTEMPTS {
            let paths = match record.stage_out.is_empty() {
                true => self.changed_by(record).await,
                false => Ok(record.stage_out.clone()),
            };
            let paths = match paths {
                Ok(paths) => paths,
                Err(error) => return Outcome { failure: Some(error.to_string()), ..Outcome::default() },
            };
            if paths.is_empty() {
                return outcome;
            }
            let request = FlushRequest { paths, wait: true, dry_run: false };
            let flushed = summary(self.inner.engine.flush(request)).await;
            let is_gone = flushed.0.refused == Some(rustix::io::Errno::NOENT.raw_os_error());
            outcome = Outcome::of(flushed, "not in the pool yet");
            // A file that the job changed was removed since it was looked up.
            if !(is_gone && record.stage_out.is_empty()) {
                break;
            }
        }
        outcome
    }

    /// Returns what the user of a job changed since the job started, and is not in the pool yet.
    async fn changed_by(&self, record: &AllocationRecord) -> Result<Vec<TypedPath>> {
        let engine = &self.inner.engine;
        let Some(started_unix) = record.started_unix else { return Ok(Vec::new()) };
        let mut changed = Vec::new();
        for file in engine.dirty().await?.into_iter().filter(|file| file.since_unix >= started_unix) {
            // A removed name has no owner any more. Its removal is flushed by policy.
            let Ok(ino) = engine.resolve(&parse_path(&file.path)?).await else { continue };
            if engine.getattr(ino).await.is_ok_and(|(attr, _)| attr.uid == record.uid) {
                changed.push(file.path);
            }
        }
        Ok(changed)
    }
}

type Allowed = std::result::Result<Transition, WrongPhase>;

/// How work on an allocation ended.
#[derive(Debug, Default)]
struct Outcome {
    moved: TransferCounts,
    message: Option<String>,
    failure: Option<String>,
}

impl Outcome {
    fn of((summary, failures): (Summary, Vec<(String, String)>), what: &str) -> Self {
        let moved = TransferCounts { files: summary.files, bytes: summary.bytes, failed: summary.failed };
        // A file that failed in several attempts counts once.
        let mut named: Vec<(String, String)> = Vec::new();
        for (path, why) in failures {
            if !named.iter().any(|(known, _)| *known == path) {
                let why = why.strip_prefix(&format!("{path}: ")).map(str::to_owned).unwrap_or(why);
                named.push((path, why));
            }
        }
        let failure = match (named.len(), summary.failed, &summary.message) {
            (0, 0, _) => None,
            (0, _, Some(message)) => Some(message.clone()),
            (0, failed, None) => Some(format!("{failed} {what}")),
            (failed, ..) => {
                let mut shown: Vec<String> =
                    named.iter().take(NAMED_FAILURES).map(|(path, why)| format!("{path}: {why}")).collect();
                shown.extend((failed > NAMED_FAILURES).then(|| "...".to_owned()));
                Some(format!("{failed} {what}: {}", shown.join("; ")))
            }
        };
        Self { moved, message: summary.message, failure }
    }
}

impl JobsInner {
    /// Begins an allocation. One that is not over stays as it is, so that a request may be repeated.
    fn begin_allocation(&self, id: &str, request: &AllocationRequest, uid: u32) -> Result<AllocationRecord> {
        let _changing = self.allocations.changing.lock();
        let known = self.engine.catalog().allocation(id)?;
        let is_requeued = known.as_ref().is_some_and(|known| known.requeues < request.requeues);
        match (AllocationState::begin(known.as_ref().map(|known| &known.state), is_requeued), known) {
            (Transition::Stays, Some(known)) => Ok(known),
            (Transition::Stays, None) => Err(Error::new(ErrorKind::Corrupt, Side::Cache, format!("allocation {id}"))),
            (Transition::To(state), known) => {
                if self.allocations.active.lock().len() >= ACTIVE_MAX {
                    let what = format!("{ACTIVE_MAX} allocations are not over yet");
                    return Err(Error::new(ErrorKind::Busy, Side::Application, what));
                }
                for typed in &request.stage_in {
                    parse_path(typed)?;
                }
                for typed in &request.stage_out {
                    parse_path(typed)?;
                }
                if known.as_ref().is_some_and(|known| !known.state.is_over()) {
                    // No end of the earlier attempt was seen here.
                    self.stop_work(id, AllocationWork::StageOut);
                    self.release_holdings(id, JobEnd::Orphaned)?;
                }
                let now = unix_now();
                let record = AllocationRecord {
                    id: id.to_owned(),
                    uid,
                    state,
                    message: None,
                    attempt: known.map_or(1, |known| known.attempt + 1),
                    requeues: request.requeues,
                    begun_unix: now,
                    since_unix: now,
                    started_unix: None,
                    boot: String::new(),
                    stage_in: request.stage_in.clone(),
                    stage_out: request.stage_out.clone(),
                    invocation: request.invocation.clone(),
                    lease_secs: request.lease_secs,
                    staged: TransferCounts::default(),
                    flushed: TransferCounts::default(),
                };
                self.put_allocation(&record)?;
                Ok(record)
            }
        }
    }

    fn put_allocation(&self, record: &AllocationRecord) -> Result<()> {
        self.engine.catalog().put_allocation(record)?;
        self.allocations.note(record);
        self.allocations.changes.send_replace(());
        Ok(())
    }

    /// Applies a verb to an allocation, if there is one. Returns its record, and whether its state changed.
    fn change_allocation(
        &self,
        id: &str,
        verb: impl FnOnce(&mut AllocationRecord) -> Allowed,
    ) -> Result<Option<(AllocationRecord, bool)>> {
        let _changing = self.allocations.changing.lock();
        let Some(mut record) = self.engine.catalog().allocation(id)? else { return Ok(None) };
        let before = record.clone();
        let wrong = |wrong: WrongPhase| Error::new(ErrorKind::InvalidInput, Side::Application, wrong.to_string());
        let moved = match verb(&mut record).map_err(wrong)? {
            Transition::To(state) => {
                record.state = state;
                record.since_unix = unix_now();
                tracing::info!("allocation {id}: {}", record.state.phase().name());
                true
            }
            Transition::Stays => false,
        };
        if record != before {
            self.put_allocation(&record)?;
        }
        Ok(Some((record, moved)))
    }

    fn start_allocation(self: &Arc<Self>, id: &str, members: Members) -> Result<Option<Allocation>> {
        let changed = self.change_allocation(id, |record| {
            let started = record.state.start()?;
            if started != Transition::Stays {
                record.note_start(unix_now());
            }
            Ok(started)
        })?;
        let Some((record, moved)) = changed else { return Ok(None) };
        if moved {
            let request = JobRequest {
                id: id.to_owned(),
                command: record.shown().command,
                invocation: record.invocation.clone(),
                prefetch: true,
                ends_leases: false,
                members,
            };
            // The job runs whether it is observed or not.
            if let Err(error) = self.begin_job(request, None, record.uid) {
                tracing::warn!(%error, "allocation {id}: the job is not observed");
            }
            // If the job ended meanwhile, its end found nothing to end.
            self.end_holding(id, JobEnd::Told)?;
        }
        Ok(Some(record.shown()))
    }

    /// Ends what an allocation holds for a job that is over: staging, observation, leases.
    fn end_holding(&self, id: &str, end: JobEnd) -> Result<()> {
        if self.allocations.is_active(id) { Ok(()) } else { self.release_holdings(id, end) }
    }

    fn release_holdings(&self, id: &str, end: JobEnd) -> Result<()> {
        self.stop_work(id, AllocationWork::StageIn);
        if let Some(number) = self.registry.number_of(id) {
            self.finish_job(number, end)?;
        }
        self.engine.end_leases_of(id)
    }

    fn stop_work(&self, id: &str, work: AllocationWork) {
        let mut all = self.allocations.work.lock();
        if all.get(id).is_some_and(|(known, _)| *known == work)
            && let Some((_, stop)) = all.remove(id)
        {
            stop.cancel();
        }
    }

    /// Records how work on an attempt ended.
    fn end_work(&self, of: &AllocationRecord, work: AllocationWork, outcome: Outcome) -> Result<()> {
        let id = &of.id;
        let changed = self.change_allocation(id, |record| {
            if record.attempt != of.attempt {
                return Ok(Transition::Stays);
            }
            *(if work == AllocationWork::StageOut { &mut record.flushed } else { &mut record.staged }) = outcome.moved;
            record.message = outcome.failure.clone().or(outcome.message);
            Ok(match (&outcome.failure, work) {
                (Some(reason), work) => record.state.fail(work, reason),
                (None, AllocationWork::StageOut) => record.state.staged_out(),
                (None, _) => record.state.staged(),
            })
        })?;
        if let (Some(_), Some(reason)) = (changed, outcome.failure) {
            tracing::warn!("allocation {id}: {reason}");
        }
        Ok(())
    }

    /// Goes on with the allocations of an earlier daemon.
    pub(crate) fn take_up_allocations(self: &Arc<Self>) -> Result<()> {
        let mut all = Vec::new();
        self.engine.catalog().allocations(|record| {
            all.push(record);
            Ok(true)
        })?;
        let jobs = Jobs { inner: self.clone() };
        for record in all {
            self.allocations.note(&record);
            match record.state {
                AllocationState::StagingIn => jobs.work_on(record, AllocationWork::StageIn),
                AllocationState::StagingOut => jobs.work_on(record, AllocationWork::StageOut),
                AllocationState::Running if record.is_of_earlier_boot() => {
                    let reason = "the machine was restarted while the job ran";
                    self.change_allocation(&record.id, |record| Ok(record.state.fail(AllocationWork::Run, reason)))?;
                    self.engine.end_leases_of(&record.id)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
