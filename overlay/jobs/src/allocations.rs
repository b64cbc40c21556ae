//! Allocations: what a batch job holds at the mount. `catalog/allocations/state.rs` has their states.
//!
//! An allocation outlives the processes that ask for it, and the daemon: the next daemon goes on with the staging or
//! the write-back that this one had begun. Its leases are in its name. They end with the job, or with the allocation.
//!
//! A verb is carried out to its end, even if its client leaves. Each change of a record, and the begin of the work that
//! follows from it, is made under one lock. So a later verb finds the work that it has to stop.

mod work;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::allocations::{Allocation, AllocationRequest, AllocationVerb, TransferCounts};
use forebay_api::jobs::{JobRequest, Members, check_id};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{AllocationRecord, AllocationState, AllocationWork, Transition, WrongPhase};
use forebay_engine::{blocking, parse_path};
use forebay_system::clock::unix_now;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::lifecycle::JobEnd;
use crate::{Jobs, JobsInner};
use work::WorkInProgress;

/// Allocations whose job may still run, at a time.
const ACTIVE_MAX: usize = 10_000;

/// The allocations of a mount.
pub(crate) struct Allocations {
    /// Held while a record is read, changed and written, and while the work that follows is begun.
    changing: Mutex<()>,
    /// Those whose job may still run.
    active: Mutex<HashSet<String>>,
    work: Mutex<HashMap<String, WorkInProgress>>,
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
        let mut active = self.active.lock();
        match record.state.may_run() {
            true => _ = active.insert(record.id.clone()),
            false => _ = active.remove(&record.id),
        }
    }
}

type Allowed = std::result::Result<Transition, WrongPhase>;

impl Jobs {
    /// Carries out a verb. Returns `None` if there is no such allocation.
    ///
    /// # Errors
    /// `InvalidInput` if the name is not allowed, or if the verb needs a new allocation; `Busy` if there are too many.
    pub async fn allocation(&self, id: String, verb: AllocationVerb, uid: u32) -> Result<Option<Allocation>> {
        check_id(&id).map_err(|why| Error::new(ErrorKind::InvalidInput, Side::Application, why))?;
        let wait = match &verb {
            AllocationVerb::StageIn { wait_ms } | AllocationVerb::Ready { wait_ms } => {
                Some((AllocationState::StagingIn, *wait_ms))
            }
            AllocationVerb::StageOut { wait_ms } => Some((AllocationState::StagingOut, *wait_ms)),
            _ => None,
        };
        let (inner, named) = (self.inner.clone(), id.clone());
        let known = blocking(move || inner.carry_out(&named, verb, uid)).await?;
        match (known, wait) {
            (Some(record), Some((state, wait_ms))) if record.state == state => {
                self.wait_while(id, state, wait_ms).await
            }
            (known, _) => Ok(known.map(|record| record.shown())),
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
    async fn wait_while(&self, id: String, state: AllocationState, wait_ms: u64) -> Result<Option<Allocation>> {
        let until = Instant::now() + Duration::from_millis(wait_ms);
        let mut changes = self.inner.allocations.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let (inner, wanted) = (self.inner.clone(), id.clone());
            let record = blocking(move || inner.engine.catalog().allocation(&wanted)).await?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || record.as_ref().is_none_or(|record| record.state != state) {
                return Ok(record.map(|record| record.shown()));
            }
            // At the end of the time, the state is read once more.
            let _ = tokio::time::timeout(left, changes.changed()).await;
        }
    }
}

impl JobsInner {
    fn carry_out(self: &Arc<Self>, id: &str, verb: AllocationVerb, uid: u32) -> Result<Option<AllocationRecord>> {
        // The allocations of an earlier daemon are taken up first.
        self.registry.wait_until_settled();
        match verb {
            AllocationVerb::Begin(request) => return self.begin_allocation(id, &request, uid).map(Some),
            AllocationVerb::StageIn { .. } => {
                self.change_allocation(id, |record| record.state.stage_in())?;
                self.begin_work(id, AllocationWork::StageIn)?;
            }
            AllocationVerb::Start { members } => self.start_allocation(id, members)?,
            AllocationVerb::End => {
                self.change_allocation(id, |record| Ok(record.state.end()))?;
                self.end_holding(id, JobEnd::Told)?;
            }
            AllocationVerb::StageOut { .. } => {
                self.change_allocation(id, |record| Ok(record.state.stage_out()))?;
                self.end_holding(id, JobEnd::Told)?;
                self.begin_work(id, AllocationWork::StageOut)?;
            }
            AllocationVerb::Teardown => {
                let known = self.change_allocation(id, |record| Ok(record.state.cancel()))?;
                if known.is_some_and(|record| record.state == AllocationState::Cancelled) {
                    self.stop_work(id);
                }
                self.end_holding(id, JobEnd::Orphaned)?;
            }
            AllocationVerb::Ready { .. } | AllocationVerb::Show => {}
        }
        self.engine.catalog().allocation(id)
    }

    /// Begins an allocation. One whose job may still run stays as it is, so that a request may be repeated.
    fn begin_allocation(&self, id: &str, request: &AllocationRequest, uid: u32) -> Result<AllocationRecord> {
        let _changing = self.allocations.changing.lock();
        let known = self.engine.catalog().allocation(id)?;
        let is_requeued = known.as_ref().is_some_and(|known| known.requeues < request.requeues);
        let state = match (AllocationState::begin(known.as_ref().map(|known| &known.state), is_requeued), &known) {
            (Transition::Stays, Some(known)) => return Ok(known.clone()),
            (Transition::Stays, None) => AllocationState::Declared,
            (Transition::To(state), _) => state,
        };
        if self.allocations.active.lock().len() >= ACTIVE_MAX {
            let what = format!("{ACTIVE_MAX} allocations are not over yet: end those that nobody needs");
            return Err(Error::new(ErrorKind::Busy, Side::Application, what));
        }
        request.stage_in.iter().chain(&request.stage_out).try_for_each(|typed| parse_path(typed).map(drop))?;
        if known.is_some() {
            // Perhaps no end of the earlier attempt was seen here.
            self.stop_work(id);
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

    fn put_allocation(&self, record: &AllocationRecord) -> Result<()> {
        self.engine.catalog().put_allocation(record)?;
        self.allocations.note(record);
        self.allocations.changes.send_replace(());
        Ok(())
    }

    /// Applies a verb to an allocation, if there is one. Returns its record.
    fn change_allocation(
        &self,
        id: &str,
        verb: impl FnOnce(&mut AllocationRecord) -> Allowed,
    ) -> Result<Option<AllocationRecord>> {
        let _changing = self.allocations.changing.lock();
        let Some(mut record) = self.engine.catalog().allocation(id)? else { return Ok(None) };
        let before = record.clone();
        let wrong = |wrong: WrongPhase| Error::new(ErrorKind::InvalidInput, Side::Application, wrong.to_string());
        if let Transition::To(state) = verb(&mut record).map_err(wrong)? {
            record.state = state;
            record.since_unix = unix_now();
            tracing::info!("allocation {id}: {}", record.state.phase().name());
        }
        if record != before {
            self.put_allocation(&record)?;
        }
        Ok(Some(record))
    }

    /// Starts the job, and observes it unless it is observed already.
    fn start_allocation(self: &Arc<Self>, id: &str, members: Members) -> Result<()> {
        let changed = self.change_allocation(id, |record| {
            let started = record.state.start()?;
            if started != Transition::Stays {
                record.note_boot();
            }
            Ok(started)
        })?;
        let Some(record) = changed.filter(|_| self.registry.number_of(id).is_none()) else { return Ok(()) };
        let request = JobRequest {
            id: id.to_owned(),
            command: record.shown().command,
            invocation: record.invocation.clone(),
            prefetch: true,
            ends_leases: false,
            members,
        };
        let begun = self.begin_job(request, None, record.uid);
        // If the job ended meanwhile, its end found nothing to end.
        self.end_holding(id, JobEnd::Told)?;
        begun.map(drop)
    }

    /// Ends what an allocation holds for a job that is over.
    fn end_holding(&self, id: &str, end: JobEnd) -> Result<()> {
        if self.allocations.is_active(id) { Ok(()) } else { self.release_holdings(id, end) }
    }

    /// Ends staging, observation and leases.
    fn release_holdings(&self, id: &str, end: JobEnd) -> Result<()> {
        self.stop_staging(id);
        if let Some(number) = self.registry.number_of(id) {
            self.finish_job(number, end)?;
        }
        self.engine.end_leases_of(id)
    }

    /// Goes on with the allocations of an earlier daemon.
    pub(crate) fn take_up_allocations(self: &Arc<Self>) -> Result<()> {
        let (mut all, mut owners) = (Vec::new(), HashSet::new());
        self.engine.catalog().allocations(|record| {
            all.push(record);
            Ok(true)
        })?;
        self.engine.catalog().leases(|_, leases| {
            owners.extend(leases.holding(0).map(|lease| lease.owner.clone()));
            Ok(true)
        })?;
        for mut record in all {
            if record.state == AllocationState::Running && record.is_of_earlier_boot() {
                let reason = "the machine was restarted while the job ran";
                let failed = |known: &mut AllocationRecord| Ok(known.state.fail(AllocationWork::Run, reason));
                record = self.change_allocation(&record.id, failed)?.unwrap_or(record);
            }
            self.allocations.note(&record);
            // The earlier daemon may have died while it ended them.
            if !record.state.may_run() && owners.contains(&record.id) {
                self.engine.end_leases_of(&record.id)?;
            }
            match record.state {
                AllocationState::StagingIn => self.begin_work(&record.id, AllocationWork::StageIn)?,
                AllocationState::StagingOut => self.begin_work(&record.id, AllocationWork::StageOut)?,
                _ => {}
            }
        }
        Ok(())
    }
}
