//! Allocations: what a batch job holds at the mount. `catalog/allocations/state.rs` has their states.
//!
//! An allocation outlives the processes that ask for it, and the daemon: the next daemon goes on with the staging or
//! the write-back that this one had begun. Its leases are in its name. They end with the job, or with the allocation.
//!
//! A verb is carried out to its end, even if its client leaves. The change of a record, and all that begins and ends with
//! it, is made under a lock of the allocation. So a later verb finds the work that it has to stop.

mod work;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use forebay_api::allocations::{Allocation, AllocationRequest, AllocationVerb, TransferCounts};
use forebay_api::jobs::{JobRequest, Members, check_id};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{AllocationRecord, AllocationState, AllocationWork, ScratchResults, Transition, WrongPhase};
use forebay_engine::{blocking, parse_path};
use forebay_system::clock::unix_now;
use parking_lot::{ArcMutexGuard, Mutex, RawMutex};
use tokio::sync::watch;

use crate::lifecycle::JobEnd;
use crate::{Jobs, JobsInner};
use work::WorkInProgress;

/// Allocations whose job may still run, at a time.
const ACTIVE_MAX: usize = 10_000;

/// The allocations of a mount.
pub(crate) struct Allocations {
    /// A lock for each allocation that is being changed: held while its record is read, changed and written, and while
    /// what it holds begins or ends.
    locks: Mutex<HashMap<String, Weak<Mutex<()>>>>,
    /// Those whose job may still run.
    active: Mutex<HashSet<String>>,
    work: Mutex<HashMap<String, WorkInProgress>>,
    /// Told of each change.
    changes: watch::Sender<()>,
}

impl Default for Allocations {
    fn default() -> Self {
        let (changes, _) = watch::channel(());
        Self { locks: Mutex::default(), active: Mutex::default(), work: Mutex::default(), changes }
    }
}

impl Allocations {
    /// Returns whether the leases in this name belong to an allocation whose job may still run.
    pub fn is_active(&self, id: &str) -> bool {
        self.active.lock().contains(id)
    }

    fn lock(&self, id: &str) -> Guard {
        let lock = {
            let mut locks = self.locks.lock();
            locks.retain(|_, lock| lock.strong_count() > 0);
            let known = locks.get(id).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let lock = Arc::new(Mutex::new(()));
                locks.insert(id.to_owned(), Arc::downgrade(&lock));
                lock
            })
        };
        Mutex::lock_arc(&lock)
    }

    fn note(&self, record: &AllocationRecord) {
        let mut active = self.active.lock();
        match record.state.may_run() {
            true => _ = active.insert(record.id.clone()),
            false => _ = active.remove(&record.id),
        }
    }
}

/// The lock of an allocation.
type Guard = ArcMutexGuard<RawMutex, ()>;
type Allowed = std::result::Result<Transition, WrongPhase>;

impl Jobs {
    /// Carries out a verb. Returns `None` if there is no such allocation.
    ///
    /// # Errors
    /// `InvalidInput` if the name is not allowed, or if the verb needs a new allocation; `Busy` if there are too many.
    pub async fn allocation(&self, id: String, verb: AllocationVerb, uid: u32) -> Result<Option<Allocation>> {
        check_id(&id).map_err(|why| Error::new(ErrorKind::InvalidInput, Side::Application, why))?;
        let wait_ms = match &verb {
            AllocationVerb::StageIn { wait_ms }
            | AllocationVerb::Ready { wait_ms }
            | AllocationVerb::StageOut { wait_ms, .. } => *wait_ms,
            _ => 0,
        };
        let (inner, named) = (self.inner.clone(), id.clone());
        let known = blocking(move || inner.carry_out(&named, verb, uid)).await?;
        match known {
            Some(record) if record.is_at_work() && wait_ms > 0 => self.wait(id, wait_ms).await,
            known => Ok(known.map(|record| record.shown())),
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

    /// Waits until the work on an allocation has ended, for this time at most.
    async fn wait(&self, id: String, wait_ms: u64) -> Result<Option<Allocation>> {
        let until = Instant::now() + Duration::from_millis(wait_ms);
        let mut changes = self.inner.allocations.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let (inner, wanted) = (self.inner.clone(), id.clone());
            let record = blocking(move || {
                // The end of the work holds the lock until the scratch directory is removed.
                let _lock = inner.allocations.lock(&wanted);
                inner.engine.catalog().allocation(&wanted)
            })
            .await?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || record.as_ref().is_none_or(|record| !record.is_at_work()) {
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
        let _lock = self.allocations.lock(id);
        if let AllocationVerb::Begin(request) = verb {
            return self.begin_allocation(id, &request, uid).map(Some);
        }
        // Without an allocation, a job or leases of this name have another owner.
        if self.engine.catalog().allocation(id)?.is_none() {
            return Ok(None);
        }
        match verb {
            AllocationVerb::StageIn { .. } => {
                self.change_allocation(id, |record| {
                    let staging = record.state.stage_in()?;
                    record.is_staging |= staging != Transition::Stays;
                    Ok(staging)
                })?;
                self.begin_work(id, AllocationWork::StageIn)?;
            }
            AllocationVerb::Start { members } => self.start_allocation(id, members)?,
            AllocationVerb::End => {
                let known = self.change_allocation(id, |record| Ok(record.state.end()))?;
                self.end_holding(id, JobEnd::Told)?;
                // A commit needs no space beside what the results occupy.
                if known.is_some_and(|known| !known.state.may_run() && known.results == ScratchResults::Uncommitted)
                    && let Err(error) = self.engine.unreserve_scratch(id)
                {
                    tracing::warn!(%error, "allocation {id}: its scratch directory keeps its reservation");
                }
            }
            AllocationVerb::StageOut { is_settled, .. } => {
                let known = self.change_allocation(id, |record| {
                    let was = record.results;
                    if is_settled {
                        record.results = ScratchResults::Settled;
                    }
                    let over = match was {
                        ScratchResults::Uncommitted if is_settled => record.state.stage_out_again(),
                        _ => record.state.stage_out(),
                    };
                    let state = if let Transition::To(state) = &over { state } else { &record.state };
                    record.is_writing_back = *state == AllocationState::StagingOut;
                    Ok(over)
                })?;
                // An error of the end must not keep the results from the pool: `ready` says that they are under way.
                let held = self.end_holding(id, JobEnd::Told);
                self.begin_work(id, AllocationWork::StageOut)?;
                // It may be over, and have kept its scratch directory.
                let keeps = |known: &AllocationRecord| is_settled || known.results == ScratchResults::Uncommitted;
                if let Some(known) = known.filter(|known| known.needs_no_scratch() && keeps(known)) {
                    self.discard_scratch_of(&known);
                }
                held?;
            }
            AllocationVerb::Teardown { gives_up_results } => {
                let known = self.change_allocation(id, |record| {
                    if gives_up_results || record.results == ScratchResults::Undeclared {
                        record.results = ScratchResults::Settled;
                    }
                    Ok(record.state.cancel())
                })?;
                if known.as_ref().is_some_and(|record| record.state == AllocationState::Cancelled) {
                    self.stop_work(id);
                }
                self.end_holding(id, JobEnd::Orphaned)?;
                if let Some(known) = known {
                    self.discard_scratch_of(&known);
                }
            }
            AllocationVerb::Begin(_) | AllocationVerb::Ready { .. } | AllocationVerb::Show => {}
        }
        self.engine.catalog().allocation(id)
    }

    /// Begins an allocation. One whose job may still run stays as it is, so that a request may be repeated.
    fn begin_allocation(&self, id: &str, request: &AllocationRequest, uid: u32) -> Result<AllocationRecord> {
        let known = self.engine.catalog().allocation(id)?;
        let is_requeued = known.as_ref().is_some_and(|known| known.requeues < request.requeues);
        let state = match (AllocationState::begin(known.as_ref().map(|known| &known.state), is_requeued), &known) {
            (Transition::Stays, Some(known)) => return Ok(known.clone()),
            (Transition::Stays, None) => AllocationState::Declared,
            (Transition::To(state), _) => state,
        };
        if self.allocations.active.lock().len() >= ACTIVE_MAX {
            let what = format!(
                "{ACTIVE_MAX} allocations are not over yet: `forebay job list` shows them, `forebay job teardown` ends one"
            );
            return Err(Error::new(ErrorKind::Busy, Side::Application, what));
        }
        request.stage_in.iter().chain(&request.stage_out).try_for_each(|typed| parse_path(typed).map(drop))?;
        if !is_requeued
            && known.as_ref().is_some_and(|known| known.results == ScratchResults::Uncommitted)
            && let Some(kept) = self.engine.discard_empty_scratch(id)?
        {
            let what = format!(
                "an earlier job of this name left what may be results in its scratch directory ({}): `forebay scratch \
                 commit` moves them, `forebay scratch discard` gives them up",
                kept.path
            );
            return Err(Error::new(ErrorKind::Busy, Side::Application, what));
        }
        if known.is_some() {
            // Perhaps no end of the earlier attempt was seen here.
            self.stop_work(id);
            self.release_holdings(id, JobEnd::Orphaned)?;
            self.discard_scratch(id);
        }
        let now = unix_now();
        let record = AllocationRecord {
            id: id.to_owned(),
            uid,
            groups: request.groups.clone(),
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
            is_staging: false,
            is_writing_back: false,
            results: if request.has_results { ScratchResults::Uncommitted } else { ScratchResults::Undeclared },
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

    /// Applies a verb to an allocation, if there is one. Returns its record. The caller holds its lock.
    fn change_allocation(
        &self,
        id: &str,
        verb: impl FnOnce(&mut AllocationRecord) -> Allowed,
    ) -> Result<Option<AllocationRecord>> {
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
        let Some(record) = changed.filter(|_| !self.registry.is_held(id)) else { return Ok(()) };
        let request = JobRequest {
            id: id.to_owned(),
            command: record.shown().command,
            invocation: record.invocation.clone(),
            prefetch: true,
            ends_leases: false,
            members,
        };
        self.begin_job(request, None, record.uid).map(drop)
    }

    /// Ends what an allocation holds for a job that is over.
    fn end_holding(&self, id: &str, end: JobEnd) -> Result<()> {
        if self.allocations.is_active(id) { Ok(()) } else { self.release_holdings(id, end) }
    }

    /// Ends staging, observation and leases.
    fn release_holdings(&self, id: &str, end: JobEnd) -> Result<()> {
        self.stop_staging(id);
        // The collector records the end of the job again if that fails, and ends no lease of an allocation.
        let ended = self.registry.number_of(id).map_or(Ok(None), |number| self.finish_job(number, end));
        self.engine.end_leases_of(id)?;
        ended.map(drop)
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
        let scratch: HashMap<String, u64> =
            self.engine.scratch_dirs()?.into_iter().map(|dir| (dir.id, dir.created_unix)).collect();
        for mut record in all {
            let _lock = self.allocations.lock(&record.id);
            if record.state == AllocationState::Running && record.is_of_earlier_boot() {
                let reason = "the machine was restarted while the job ran";
                let failed = |known: &mut AllocationRecord| Ok(known.state.fail(AllocationWork::Run, reason));
                record = self.change_allocation(&record.id, failed)?.unwrap_or(record);
            }
            // Its job writes no more to its scratch directory, which stays. The earlier daemon may have died before this.
            if matches!(record.state, AllocationState::Failed { during: AllocationWork::Run, .. })
                && scratch.get(&record.id).is_some_and(|created_unix| *created_unix <= record.since_unix)
                && let Err(error) = self.engine.unreserve_scratch(&record.id)
            {
                tracing::error!(%error, "allocation {}: its scratch directory keeps its reservation", record.id);
            }
            self.allocations.note(&record);
            // The earlier daemon may have died before it removed it.
            if record.needs_no_scratch()
                && scratch.get(&record.id).is_some_and(|created_unix| *created_unix < record.since_unix)
            {
                self.discard_scratch_later(record.clone(), record.since_unix);
            }
            // The earlier daemon may have died while it ended them.
            if !record.state.may_run() && owners.contains(&record.id) {
                self.engine.end_leases_of(&record.id)?;
            }
            self.begin_work(&record.id, AllocationWork::StageIn)?;
            self.begin_work(&record.id, AllocationWork::StageOut)?;
        }
        Ok(())
    }
}
