//! What a node notes about a job between its prolog and its epilog, because it cannot be found out later.

use std::sync::PoisonError;

use forebay_daemon::Failure;
use forebay_daemon::registry::RegisteredMount;
use forebay_slurm::SlurmJob;
use forebay_slurm::exchange::{NodeProgress, NodeReport, get};

use super::{NodeRecord, RECORD_LOCK, ResultsFate, StagedJob, record_name};

impl StagedJob {
    /// Notes that a mount has begun the allocation of the job.
    pub fn note_begun(&self, entry: &RegisteredMount) -> Result<(), Failure> {
        self.change_record(|record| record.begun.get_or_insert_default().push(entry.mountpoint().to_owned()))
    }

    /// Returns whether the prolog began the allocation of the job at this mount. If not, an allocation of its name at that
    /// mount belongs to an earlier job: Slurm gives a number again when it has used all of them.
    pub fn has_begun_at(&self, entry: &RegisteredMount) -> bool {
        self.record.begun.as_ref().is_none_or(|begun| begun.iter().any(|place| place == entry.mountpoint()))
    }

    /// Returns whether results of the job may be in a scratch directory.
    pub fn may_have_results(&self) -> bool {
        let has_begun = self.record.begun.as_ref().is_none_or(|begun| {
            let mount = self.record.scratch_mount.as_ref();
            mount.is_some_and(|mount| begun.contains(mount))
        });
        self.has_results() && has_begun
    }

    /// Returns why no allocation would own the scratch directory of the job.
    pub fn scratch_refusal(&mut self) -> Option<String> {
        if let Err(failure) = self.take_up_begun() {
            return Some(failure.what);
        }
        let mount = self.record.scratch_mount.as_ref()?;
        let has_begun = self.record.begun.as_ref().is_none_or(|begun| begun.contains(mount));
        let is_needed = self.record.request.staging.scratch_bytes.is_some() && !has_begun;
        is_needed.then(|| format!("{}: its allocation has not begun in time", mount.display()))
    }

    /// Notes what the controller and the other nodes tell only until the job is torn down: an epilog that is repeated later
    /// needs it.
    pub fn note_known(&mut self, fate: ResultsFate) -> Result<(), Failure> {
        let others_staged = self.record.others_staged || (self.node.nodes > 1 && self.have_others_staged());
        let is_interrupted = self.is_interrupted();
        let known_fate = match fate {
            ResultsFate::Unknown => self.record.known_fate,
            // Nothing of it is committed.
            ResultsFate::Kept if is_interrupted || !self.record.is_staged => self.record.known_fate,
            fate => Some(fate),
        };
        let noted = |record: &NodeRecord| (record.others_staged, record.is_interrupted, record.known_fate);
        let note = |record: &mut NodeRecord| {
            record.others_staged = others_staged;
            record.is_interrupted = is_interrupted;
            record.known_fate = known_fate;
        };
        if noted(&self.record) == (others_staged, is_interrupted, known_fate) {
            return Ok(());
        }
        note(&mut self.record);
        self.change_record(note)
    }

    /// Returns whether the job begins anew after this attempt. The epilog of the attempt is told so; one that is repeated by
    /// hand is not.
    pub fn is_interrupted(&self) -> bool {
        self.record.is_interrupted || self.job.requeues > self.record.requeues
    }

    /// Returns whether each node of the job is known to have staged.
    fn have_others_staged(&self) -> bool {
        let (Some(exchange), attempt) = (&self.exchange, &self.record.request.attempt) else { return false };
        let reports = exchange.reports(&self.job.id, attempt).unwrap_or_default();
        // Read after the reports, because it is removed before them.
        let request = exchange.request(&self.job.id);
        let is_there = request.is_ok_and(|known| known.is_some_and(|known| known.attempt == *attempt));
        let has_staged = |report: &NodeReport| report.progress != NodeProgress::StageInFailed;
        is_there && reports.len() >= self.node.nodes && reports.iter().all(has_staged)
    }

    /// Returns how results of the job are committed later.
    pub fn remedy(&self, fate: ResultsFate) -> String {
        let SlurmJob { id, uid, .. } = &self.job;
        let kept = "what may be results is in its scratch directory, which stays";
        let repeat = format!("`SLURM_JOB_ID={id} SLURM_JOB_UID={uid} forebay slurm epilog`");
        let options = "with the options that the node's Epilog has";
        if self.is_interrupted() || matches!(fate, ResultsFate::Refused | ResultsFate::GivenUp) {
            return format!("{kept}: {repeat} gives it up, {options}");
        }
        let is_known = fate != ResultsFate::Unknown && (self.node.nodes <= 1 || self.record.others_staged);
        if !is_known || !self.record.is_staged {
            return format!(
                "{kept}: `forebay scratch list` names it, `forebay scratch commit` moves results of it, `forebay scratch \
                 discard` gives them up"
            );
        }
        format!("{kept}: {repeat} commits it, {options}")
    }

    /// Stores the record. Mounts that were noted meanwhile stay noted.
    pub(super) fn store_again(&mut self) -> Result<(), Failure> {
        let _lock = RECORD_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_up_begun()?;
        self.store()
    }

    fn take_up_begun(&mut self) -> Result<(), Failure> {
        let owner = rustix::process::geteuid().as_raw();
        let known: Option<NodeRecord> = get(&self.records.join(record_name(&self.job)), &[owner])?;
        if let Some(known) = known {
            self.record.begun = known.begun;
        }
        Ok(())
    }
}
