//! Allocations, stored as JSON, so that other versions of this program can read the records.

mod state;

use forebay_api::allocations::{Allocation, TransferCounts};
use forebay_api::operator::{TypedPath, UserGroups};
use forebay_backends::Result;
use forebay_prefetch::signature::Invocation;
use serde::{Deserialize, Serialize};

use super::{Catalog, boot, cf, corrupt, failed};
pub use state::{AllocationState, AllocationWork, Transition, WrongPhase};

/// The most allocations that are kept beside those that are not over, newest first.
const ALLOCATIONS_MAX: usize = 1000;

/// What is known of the results in the scratch directory of an allocation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScratchResults {
    /// Nothing was said about them: they are committed before the write-back begins, or never.
    #[default]
    Undeclared,
    /// Some are to be committed.
    Uncommitted,
    /// All are committed or given up.
    Settled,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationRecord {
    pub id: String,
    pub uid: u32,
    /// All groups of this user: only what the user may read is staged. `None`: the daemon's rights count.
    #[serde(default)]
    pub groups: Option<Vec<u32>>,
    #[serde(flatten)]
    pub state: AllocationState,
    /// What is short although the allocation did not fail.
    #[serde(default)]
    pub message: Option<String>,
    pub attempt: u32,
    /// How often the scheduler had requeued the job when this attempt began.
    #[serde(default)]
    pub requeues: u64,
    pub begun_unix: u64,
    /// When the state was entered.
    pub since_unix: u64,
    /// The boot of the machine in which the job started.
    #[serde(default)]
    pub boot: String,
    pub stage_in: Vec<TypedPath>,
    pub stage_out: Vec<TypedPath>,
    pub invocation: Option<Invocation>,
    pub lease_secs: Option<u64>,
    /// Staging has begun and has not ended; the job may have started meanwhile.
    #[serde(default)]
    pub is_staging: bool,
    /// Its write-back was asked for. Without it, an ended job keeps its scratch directory, which may hold results.
    #[serde(default)]
    pub is_writing_back: bool,
    #[serde(default)]
    pub results: ScratchResults,
    #[serde(default)]
    pub staged: TransferCounts,
    #[serde(default)]
    pub flushed: TransferCounts,
}

impl AllocationRecord {
    /// Returns the user whose rights count for what the allocation names.
    pub fn user(&self) -> Option<UserGroups> {
        Some(UserGroups { uid: self.uid, groups: self.groups.clone()? })
    }

    /// Returns whether the job started before the machine did.
    pub fn is_of_earlier_boot(&self) -> bool {
        self.boot != boot::boot_id()
    }

    /// Records that the job starts now.
    pub fn note_boot(&mut self) {
        self.boot = boot::boot_id();
    }

    /// Returns whether staging or the write-back has begun, or is about to, and has not ended.
    pub fn is_at_work(&self) -> bool {
        self.is_at_write_back() || (self.state.may_run() && self.is_staging)
    }

    /// Returns whether the write-back was asked for, and has not ended.
    pub fn is_at_write_back(&self) -> bool {
        self.state == AllocationState::StagingOut && self.is_writing_back
    }

    /// Returns whether the allocation is over, so that nothing but results keeps its scratch directory.
    pub fn needs_no_scratch(&self) -> bool {
        match &self.state {
            AllocationState::Done | AllocationState::Cancelled => true,
            AllocationState::Failed { during, .. } => *during == AllocationWork::StageOut,
            _ => false,
        }
    }

    /// Returns whether the scratch directory of an allocation that is over may be removed with what is in it. After a
    /// failed write-back, a result may still be committed from it, and the write-back be repeated.
    pub fn gives_up_scratch(&self) -> bool {
        match self.results {
            ScratchResults::Undeclared => !matches!(self.state, AllocationState::Failed { .. }),
            ScratchResults::Uncommitted => false,
            ScratchResults::Settled => true,
        }
    }

    /// Returns the allocation as operators see it.
    pub fn shown(&self) -> Allocation {
        let failure = match &self.state {
            AllocationState::Failed { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        Allocation {
            id: self.id.clone(),
            uid: self.uid,
            phase: self.state.phase(),
            reason: failure.or_else(|| self.message.clone()),
            attempt: self.attempt,
            requeues: self.requeues,
            is_staging: self.state.may_run() && self.is_staging,
            is_writing_back: self.is_at_write_back(),
            begun_unix: self.begun_unix,
            since_unix: self.since_unix,
            command: self.invocation.as_ref().map(|invocation| invocation.words.join(" ")).unwrap_or_default(),
            stage_in: self.stage_in.clone(),
            stage_out: self.stage_out.clone(),
            staged: self.staged,
            flushed: self.flushed,
            keeps_results: self.needs_no_scratch() && self.results == ScratchResults::Uncommitted,
        }
    }
}

/// Returns a record. One that only a later version can read counts as absent: it must not keep other jobs from running.
fn readable(id: &[u8], value: &[u8]) -> Option<AllocationRecord> {
    let record = serde_json::from_slice(value);
    if let Err(error) = &record {
        tracing::warn!(%error, "allocation {} is not understood", id.escape_ascii());
    }
    record.ok()
}

impl Catalog {
    /// Visits all kept allocations, in the order of their names.
    pub fn allocations(&self, mut each: impl FnMut(AllocationRecord) -> Result<bool>) -> Result<()> {
        self.scan(cf::ALLOCATIONS, b"", |id, value| readable(id, value).map_or(Ok(true), &mut each))
    }

    pub fn allocation(&self, id: &str) -> Result<Option<AllocationRecord>> {
        let value = self.db.get_cf(self.family(cf::ALLOCATIONS)?, id).map_err(|e| failed("read the catalog", e))?;
        Ok(value.and_then(|value| readable(id.as_bytes(), &value)))
    }

    /// Stores an allocation durably, and deletes the oldest ones beyond the limit that are over.
    pub fn put_allocation(&self, record: &AllocationRecord) -> Result<()> {
        let mut over = Vec::new();
        self.allocations(|known| {
            if known.state.is_over() && known.id != record.id {
                over.push((known.since_unix, known.id));
            }
            Ok(true)
        })?;
        over.sort_unstable();
        let text = serde_json::to_vec(record).map_err(|e| corrupt(cf::ALLOCATIONS).with_source(e))?;
        let mut batch = self.batch();
        batch.put_raw(cf::ALLOCATIONS, record.id.as_bytes(), &text);
        for (_, id) in over.iter().rev().skip(ALLOCATIONS_MAX) {
            batch.delete_raw(cf::ALLOCATIONS, id.as_bytes());
        }
        self.write(batch)?;
        self.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Durability;
    use super::*;

    fn record(id: &str, state: AllocationState, since_unix: u64) -> AllocationRecord {
        AllocationRecord {
            id: id.into(),
            uid: 7,
            groups: None,
            state,
            message: None,
            attempt: 1,
            requeues: 0,
            begun_unix: 1,
            since_unix,
            boot: String::new(),
            stage_in: vec!["a".into()],
            stage_out: Vec::new(),
            invocation: None,
            lease_secs: None,
            is_staging: false,
            is_writing_back: false,
            results: ScratchResults::Undeclared,
            staged: TransferCounts::default(),
            flushed: TransferCounts::default(),
        }
    }

    #[test]
    fn an_allocation_is_found_after_a_power_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog");
        let failed = AllocationState::Failed { during: AllocationWork::StageOut, reason: "the pool is full".into() };
        let stored = record("slurm-7", failed, 3);
        let catalog = Catalog::open(&path, Durability::SyncedOnly).unwrap();
        catalog.put_allocation(&stored).unwrap();
        drop(catalog);
        let catalog = Catalog::open(&path, Durability::SyncedOnly).unwrap();
        assert_eq!(catalog.allocation("slurm-7").unwrap(), Some(stored.clone()));
        assert_eq!(stored.shown().reason.as_deref(), Some("the pool is full"));
        assert_eq!(catalog.allocation("slurm-8").unwrap(), None);
        // A record of a later version.
        let mut batch = catalog.batch();
        batch.put_raw(cf::ALLOCATIONS, b"slurm-8", br#"{"id":"slurm-8","phase":"resting"}"#);
        catalog.write(batch).unwrap();
        assert_eq!(catalog.allocation("slurm-8").unwrap(), None);
        catalog.put_allocation(&stored).unwrap();
    }

    #[test]
    fn results_that_are_not_settled_keep_their_scratch_directory() {
        let failed = |during| AllocationState::Failed { during, reason: "why".into() };
        let ends = [AllocationState::Done, AllocationState::Cancelled, failed(AllocationWork::StageOut)];
        let given_up = |results| {
            let records = ends.clone().map(|state| AllocationRecord { results, ..record("j", state, 1) });
            records.map(|record| record.needs_no_scratch() && record.gives_up_scratch())
        };
        assert_eq!(given_up(ScratchResults::Undeclared), [true, true, false]);
        assert_eq!(given_up(ScratchResults::Uncommitted), [false; 3]);
        assert_eq!(given_up(ScratchResults::Settled), [true; 3]);
        for state in [failed(AllocationWork::Run), failed(AllocationWork::StageIn), AllocationState::StagingOut] {
            assert!(!record("j", state, 1).needs_no_scratch());
        }
        // As an earlier program stored it.
        let mut old = serde_json::to_value(record("j", AllocationState::Done, 1)).unwrap();
        old.as_object_mut().unwrap().remove("results").unwrap();
        assert_eq!(serde_json::from_value::<AllocationRecord>(old).unwrap(), record("j", AllocationState::Done, 1));
    }

    #[test]
    fn the_newest_thousand_are_kept_and_those_that_are_not_over() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(&dir.path().join("catalog"), Durability::Process).unwrap();
        let states = |at: u64| if at == 0 { AllocationState::Running } else { AllocationState::Done };
        for at in 0..ALLOCATIONS_MAX as u64 + 4 {
            catalog.put_allocation(&record(&at.to_string(), states(at), at)).unwrap();
        }
        let mut since = Vec::new();
        catalog
            .allocations(|kept| {
                since.push(kept.since_unix);
                Ok(true)
            })
            .unwrap();
        since.sort_unstable();
        assert_eq!(since.len(), ALLOCATIONS_MAX + 2, "one runs, and one was just stored");
        assert_eq!(since[..2], [0, 3]);
    }
}
