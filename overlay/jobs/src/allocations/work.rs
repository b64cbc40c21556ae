//! The staging and the write-back of allocations, in the background.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::allocations::TransferCounts;
use forebay_api::operator::{FlushRequest, Progress, StageRequest, TypedPath};
use forebay_api::scratch::ScratchDir;
use forebay_backends::{ErrorKind, Result};
use forebay_catalog::{AllocationRecord, AllocationState, AllocationWork, ScratchResults, Transition};
use forebay_engine::{Ino, blocking};
use forebay_system::clock::unix_now;
use futures::{FutureExt, Stream, StreamExt};
use tokio_util::sync::CancellationToken;

use crate::JobsInner;

/// Failures that the reason of an allocation names.
const NAMED_FAILURES: usize = 3;
/// How long a removal of a scratch directory waits that another task has to itself.
const DISCARD_AGAIN: Duration = Duration::from_secs(10);

/// Work that is being done for an allocation.
pub(super) struct WorkInProgress {
    work: AllocationWork,
    attempt: u32,
    /// Cancelled when the work is to stop, and when it has ended.
    stop: CancellationToken,
}

impl JobsInner {
    /// Begins work on an allocation if it is due and not in progress. The caller holds the lock of the allocation.
    pub(super) fn begin_work(self: &Arc<Self>, id: &str, work: AllocationWork) -> Result<()> {
        let Some(record) = self.engine.catalog().allocation(id)? else { return Ok(()) };
        let is_due = match work {
            AllocationWork::StageIn => record.state.may_run() && record.is_staging,
            AllocationWork::Run => false,
            AllocationWork::StageOut => record.is_at_write_back(),
        };
        if !is_due {
            return Ok(());
        }
        let attempt = record.attempt;
        let stop = self.engine.stop().child_token();
        let known =
            self.allocations.work.lock().insert(id.to_owned(), WorkInProgress { work, attempt, stop: stop.clone() });
        match known {
            Some(known) if known.work == work && known.attempt == attempt && !known.stop.is_cancelled() => {
                self.allocations.work.lock().insert(id.to_owned(), known);
                return Ok(());
            }
            Some(known) => known.stop.cancel(),
            None => {}
        }
        let inner = self.clone();
        let task = async move {
            // Also if it panics: then the next request for the work begins it again.
            let ended = stop.clone().drop_guard();
            let moving = async {
                if work == AllocationWork::StageOut {
                    inner.write_back(&record).await
                } else {
                    inner.stage_in(&record).await
                }
            };
            let Some(outcome) = stop.run_until_cancelled(moving).await else { return };
            let (inner, id) = (inner.clone(), record.id.clone());
            let recorded = blocking(move || inner.end_work(&record, work, outcome)).await;
            if let Err(error) = recorded {
                tracing::error!(%error, "allocation {id}: its progress is not recorded");
            }
            drop(ended);
        };
        self.foresight.runtime.spawn(task.boxed());
        Ok(())
    }

    /// Stops all work on an allocation.
    pub(super) fn stop_work(&self, id: &str) {
        if let Some(known) = self.allocations.work.lock().remove(id) {
            known.stop.cancel();
        }
    }

    /// Stops the staging for an allocation.
    pub(super) fn stop_staging(&self, id: &str) {
        let mut all = self.allocations.work.lock();
        if all.get(id).is_some_and(|known| known.work == AllocationWork::StageIn)
            && let Some(known) = all.remove(id)
        {
            known.stop.cancel();
        }
    }

    /// Records how work on an attempt ended.
    fn end_work(self: &Arc<Self>, of: &AllocationRecord, work: AllocationWork, outcome: Outcome) -> Result<()> {
        let id = &of.id;
        let failure =
            outcome.failure(if work == AllocationWork::StageOut { "not in the pool yet" } else { "not staged" });
        let _lock = self.allocations.lock(id);
        let changed = self.change_allocation(id, |record| {
            // Under the lock: a verb that comes next finds no work, and begins it again if it has to.
            let mut all = self.allocations.work.lock();
            if all.get(id).is_none_or(|known| known.work != work || known.attempt != of.attempt) {
                return Ok(Transition::Stays);
            }
            all.remove(id);
            drop(all);
            if work == AllocationWork::StageOut {
                (record.flushed, record.is_writing_back) = (outcome.moved, false);
            } else {
                (record.staged, record.is_staging) = (outcome.moved, false);
            }
            record.message = failure.clone().or(outcome.message);
            Ok(match (&failure, work) {
                (Some(reason), work) => record.state.fail(work, reason),
                (None, AllocationWork::StageOut) => record.state.staged_out(),
                (None, _) => record.state.staged(),
            })
        })?;
        if work == AllocationWork::StageOut
            && let Some(over) = changed.as_ref().filter(|record| record.needs_no_scratch())
        {
            self.discard_scratch_of(over);
        }
        if let (Some(_), Some(reason)) = (changed, failure) {
            tracing::warn!("allocation {id}: {reason}");
        }
        Ok(())
    }

    /// Removes the scratch directory of an earlier attempt. One that cannot be removed stays.
    pub(super) fn discard_scratch(&self, id: &str) {
        if let Err(error) = self.engine.discard_scratch(id) {
            tracing::warn!(%error, "allocation {id}: its scratch directory stays");
        }
    }

    /// Removes the scratch directory of an allocation that is over: later, if it is in use now. One that may hold results
    /// stays, without its reservation. The caller holds the lock of the allocation.
    pub(super) fn discard_scratch_of(self: &Arc<Self>, record: &AllocationRecord) {
        let id = &record.id;
        match self.release_scratch(record) {
            Err(error) if error.is(ErrorKind::Busy) => {
                tracing::warn!(%error, "allocation {id}: its scratch directory is removed later");
                self.discard_scratch_later(record.clone(), unix_now().saturating_add(1));
            }
            Err(error) => tracing::warn!(%error, "allocation {id}: its scratch directory stays"),
            Ok(()) => {}
        }
    }

    /// Removes the scratch directory of an allocation that is over, or keeps it for its results, and says so.
    fn release_scratch(&self, record: &AllocationRecord) -> Result<()> {
        if record.gives_up_scratch() {
            return self.engine.discard_scratch(&record.id);
        }
        let kept = self.engine.discard_empty_scratch(&record.id)?;
        self.change_allocation(&record.id, |record| {
            match &kept {
                Some(dir) => note_kept(record, dir),
                // There were none.
                None if record.results == ScratchResults::Uncommitted => record.results = ScratchResults::Settled,
                None => {}
            }
            Ok(Transition::Stays)
        })?;
        Ok(())
    }

    /// Removes the scratch directory of an allocation that is over, in the background. It must have been created before a
    /// moment: a later one has nothing to do with the allocation.
    pub(super) fn discard_scratch_later(self: &Arc<Self>, record: AllocationRecord, before_unix: u64) {
        let (inner, stop) = (self.clone(), self.engine.stop().child_token());
        let task = async move {
            let discard = async {
                loop {
                    let (again, of) = (inner.clone(), record.clone());
                    match blocking(move || again.discard_if_over(&of, before_unix)).await {
                        Err(error) if error.is(ErrorKind::Busy) => tokio::time::sleep(DISCARD_AGAIN).await,
                        Err(error) => {
                            tracing::warn!(%error, "allocation {}: its scratch directory stays", record.id);
                            return;
                        }
                        Ok(()) => return,
                    }
                }
            };
            let _ = stop.run_until_cancelled(discard).await;
        };
        self.foresight.runtime.spawn(task.boxed());
    }

    fn discard_if_over(&self, of: &AllocationRecord, before_unix: u64) -> Result<()> {
        let _lock = self.allocations.lock(&of.id);
        let now = self.engine.catalog().allocation(&of.id)?;
        let Some(now) = now.filter(|now| now.attempt == of.attempt && now.needs_no_scratch()) else { return Ok(()) };
        let is_older = |dir: &ScratchDir| dir.id == of.id && dir.created_unix < before_unix;
        match self.engine.scratch_dirs()?.iter().any(is_older) {
            true => self.release_scratch(&now),
            false => Ok(()),
        }
    }

    async fn stage_in(&self, record: &AllocationRecord) -> Outcome {
        let request = StageRequest {
            paths: record.stage_in.clone(),
            invocation: record.invocation.clone().filter(|_| self.engine.policy().prefetch.jobs),
            // No lease outlives the allocation: there is no other owner.
            job: Some(record.id.clone()),
            lease_owner: String::new(),
            lease_secs: record.lease_secs,
            user: record.user(),
            ..StageRequest::default()
        };
        let mut outcome = Outcome::default();
        outcome.follow("", self.engine.stage(request)).await;
        outcome
    }

    async fn write_back(self: &Arc<Self>, record: &AllocationRecord) -> Outcome {
        let flush = |paths| self.engine.flush(FlushRequest { paths, wait: true, dry_run: false });
        let mut outcome = Outcome::default();
        if !record.stage_out.is_empty() {
            // One by one: what does not exist must not keep the rest from the pool.
            let user = record.user();
            for path in &record.stage_out {
                if let Some(user) = &user
                    && let Err(error) = self.engine.check_flush_for(path, user).await
                {
                    outcome.moved.failed += 1;
                    outcome.failures.push((path.clone(), error.to_string()));
                    continue;
                }
                outcome.follow(path, flush(vec![path.clone()])).await;
            }
            return outcome;
        }
        match self.results_of(record).await {
            Ok(results) => outcome.follow("", self.engine.flush_objects(results)).await,
            Err(error) => outcome.failures.push((String::new(), error.to_string())),
        }
        outcome
    }

    /// Returns what a job wrote, and what its user owns, as far as it is not in the pool.
    ///
    /// It does not matter since when a file is dirty: the job may have changed one that was dirty before. A removed name
    /// has no owner any more: its removal is flushed by policy.
    async fn results_of(self: &Arc<Self>, record: &AllocationRecord) -> Result<Vec<Ino>> {
        let engine = &self.engine;
        let name = |path: &str| path.trim_matches('/').to_owned();
        let (inner, id) = (self.clone(), record.id.clone());
        let written: HashSet<TypedPath> = match blocking(move || inner.job(&id)).await? {
            Some((_, files)) => {
                let written = files.iter().filter(|file| file.traffic.written_bytes > 0 && !file.in_pool);
                written.map(|file| name(&file.path)).collect()
            }
            None => HashSet::new(),
        };
        let mut results = Vec::new();
        for (ino, file) in engine.dirty_objects().await? {
            let Some(ino) = ino else { continue };
            match engine.getattr(ino).await {
                Ok((attr, _)) if attr.uid == record.uid || written.contains(&name(&file.path)) => results.push(ino),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(results)
    }
}

/// Records that a scratch directory stays with what is in it.
fn note_kept(record: &mut AllocationRecord, dir: &ScratchDir) {
    let place = if dir.is_missing { &dir.id } else { &dir.path };
    let what = format!("what is in its scratch directory ({place}) is not committed, and stays");
    match &mut record.state {
        AllocationState::Failed { reason, .. } if reason.contains(&what) => {}
        AllocationState::Failed { reason, .. } => reason.push_str(&format!("; {what}")),
        _ => record.message = Some(what),
    }
}

/// What work on an allocation has done so far.
#[derive(Debug, Default)]
struct Outcome {
    moved: TransferCounts,
    message: Option<String>,
    /// Paths, and why they could not be moved. An empty path stands for the whole request.
    failures: Vec<(String, String)>,
}

impl Outcome {
    /// Adds the progress of an operation on `path`.
    async fn follow(&mut self, path: &str, progress: impl Stream<Item = Progress>) {
        let mut progress = std::pin::pin!(progress);
        let mut last = None;
        while let Some(step) = progress.next().await {
            match step {
                Progress::Failed { path, reason } => self.failures.push((path, reason)),
                Progress::Done(summary) => last = Some(summary),
                _ => {}
            }
        }
        let Some(summary) = last else {
            self.failures.push((path.to_owned(), "it ended without a result; the log may tell why".into()));
            return;
        };
        self.moved.files += summary.files;
        self.moved.bytes = self.moved.bytes.saturating_add(summary.bytes);
        self.moved.failed += summary.failed;
        match summary.refused {
            Some(errno) => {
                let why = summary.message.unwrap_or_else(|| std::io::Error::from_raw_os_error(errno).to_string());
                self.failures.push((path.to_owned(), why));
            }
            None => {
                // What was cut off by a time limit, for example, has no failure of its own.
                if summary.failed > 0 && self.failures.is_empty() {
                    self.failures.push((path.to_owned(), summary.message.clone().unwrap_or_default()));
                }
                self.message = summary.message.or(self.message.take());
            }
        }
    }

    /// Returns why the work failed.
    fn failure(&self, what: &str) -> Option<String> {
        // A file that failed in several attempts counts once.
        let mut named: Vec<String> = Vec::new();
        let mut seen = HashSet::new();
        for (path, why) in self.failures.iter().filter(|(path, _)| seen.insert(path)) {
            let why = why.strip_prefix(&format!("{path}: ")).unwrap_or(why);
            named.push(if path.is_empty() { why.to_owned() } else { format!("{path}: {why}") });
        }
        match named.len() {
            0 => None,
            1 if self.failures[0].0.is_empty() => named.pop(),
            failed => {
                named.truncate(NAMED_FAILURES);
                named.extend((failed > NAMED_FAILURES).then(|| "...".to_owned()));
                Some(format!("{failed} {what}: {}", named.join("; ")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(path: &str, why: &str) -> (String, String) {
        (path.into(), why.into())
    }

    #[test]
    fn a_reason_names_each_file_once_and_not_too_many() {
        let outcome = |failures| Outcome { failures, ..Outcome::default() };
        assert_eq!(outcome(Vec::new()).failure("short"), None);
        assert_eq!(outcome(vec![failed("", "no space")]).failure("short").as_deref(), Some("no space"));
        let twice = vec![failed("/a", "/a: gone"), failed("/a", "again"), failed("/b", "gone")];
        assert_eq!(outcome(twice).failure("short").as_deref(), Some("2 short: /a: gone; /b: gone"));
        let many = (0..5).map(|at| failed(&at.to_string(), "x")).collect();
        assert_eq!(outcome(many).failure("short").as_deref(), Some("5 short: 0: x; 1: x; 2: x; ..."));
    }

    #[tokio::test]
    async fn work_that_ends_without_a_result_has_failed() {
        let mut outcome = Outcome::default();
        outcome.follow("", futures::stream::empty()).await;
        assert!(outcome.failure("short").is_some());
    }
}
