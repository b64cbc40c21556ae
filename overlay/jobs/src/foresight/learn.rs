//! Learns from a job that has ended.
//!
//! A profile contains files that the pool has, and that the job read without having written them itself. Interrupted
//! runs are left out, and so are those in which the observer lost uses. Without eBPF, or if hooks for reads are missing, it is unknown how much of a resident file was
//! read: a job that opens the file and writes nothing counts as a reader of all of it.
//!
//! Nothing is learned from a job whose command is not known, as with `observe` without a command, or that `observe`
//! stopped observing before its end.

use forebay_api::jobs::ObserverKind;
use forebay_backends::Result;
use forebay_catalog::{JobHead, ProfileHead};
use forebay_prefetch::profile::{FileUse, Parts, Profile};

use super::AheadReport;
use super::job_prefetch::JobPrefetch;
use crate::JobsInner;
use crate::{FileId, UsedFile};

/// Weight of each run relative to the run after it.
const DECAY: f64 = 0.5;

impl JobsInner {
    /// Folds what a job used into the profile of its signature, if the whole run was observed. `is_whole`: the observer
    /// had room for each use.
    pub(crate) fn learn(
        &self,
        head: &JobHead,
        used: &[UsedFile],
        ahead: Option<&JobPrefetch>,
        is_whole: bool,
    ) -> Result<AheadReport> {
        let summary = &head.summary;
        let tells_all = summary.observer == ObserverKind::Ebpf && !summary.reads_unseen;
        let report = self.report_ahead(used, ahead, tells_all);
        let Some(invocation) = head.invocation.as_ref().filter(|_| is_whole && !head.summary.interrupted) else {
            return Ok(report);
        };
        let uses: Vec<FileUse> = used.iter().filter_map(|file| self.use_of(file, tells_all)).collect();
        if uses.is_empty() {
            return Ok(report);
        }
        let signature = invocation.signature();
        let _learning = self.foresight.learning.lock();
        let mut profile = self.engine.catalog().profile(&signature)?.unwrap_or_else(|| Profile::new(invocation));
        let ended_unix = head.summary.ended_unix.unwrap_or_default();
        profile.fold(invocation, ended_unix, uses);
        let before = self.engine.catalog().profile_head(&signature)?;
        let of = |field: fn(&ProfileHead) -> f64| before.as_ref().map_or(0.0, field);
        let mut after = ProfileHead {
            runs: before.as_ref().map_or(0, |before| before.runs) + 1,
            files: profile.files().count() as u64,
            encoded_bytes: 0,
            last_seen_unix: ended_unix,
            staged_bytes: of(|head| head.staged_bytes) * DECAY + report.bytes as f64,
            used_bytes: of(|head| head.used_bytes) * DECAY + report.used_bytes as f64,
            signature,
        };
        self.engine.catalog().put_profile(&mut after, &profile)?;
        Ok(report)
    }

    /// Returns what a run read of a file that the pool has; `None` if it read nothing of it. `tells_all`: no read goes
    /// unseen.
    fn use_of(&self, file: &UsedFile, tells_all: bool) -> Option<FileUse> {
        let FileId::Overlay(ino) = file.id else { return None };
        let size_bytes = self.engine.size_in_pool(ino)?;
        let parts = file.parts.read_parts();
        (file.reads_unwritten() || is_taken_for_read(file, tells_all)).then(|| FileUse {
            path: file.shown.path.clone(),
            size_bytes,
            rank: u32::try_from(file.shown.first_use_rank).unwrap_or(u32::MAX),
            parts: parts.filter(|_| tells_all).map(|(part_bytes, bits)| Parts { part_bytes, bits }),
        })
    }

    fn report_ahead(&self, used: &[UsedFile], ahead: Option<&JobPrefetch>, tells_all: bool) -> AheadReport {
        let mut report = AheadReport::default();
        let Some(ahead) = ahead else { return report };
        // Never locked while a file is looked up.
        let (staged, foreseen) = (ahead.staged.lock().clone(), ahead.foreseen.lock().clone());
        let counted = staged.iter().filter(|(_, bytes)| **bytes > 0);
        (report.files, report.bytes) = counted.fold((0, 0), |(files, bytes), (_, more)| (files + 1, bytes + more));
        for file in used {
            let FileId::Overlay(ino) = file.id else { continue };
            let is_read = file.is_read() || is_taken_for_read(file, tells_all);
            let Some(size) = self.engine.size_in_pool(ino).filter(|_| is_read) else { continue };
            report.wanted_bytes = report.wanted_bytes.saturating_add(size);
            if foreseen.contains_key(&ino) {
                report.covered_bytes = report.covered_bytes.saturating_add(size);
            }
            if let Some(bytes) = staged.get(&ino).filter(|bytes| **bytes > 0) {
                report.used_files += 1;
                report.used_bytes += bytes;
            }
        }
        report
    }
}

/// Returns whether a file counts as read although no read was seen. If some reads go unseen, an open without a write
/// counts as a read of the whole file.
fn is_taken_for_read(file: &UsedFile, tells_all: bool) -> bool {
    !tells_all && file.shown.traffic.written_bytes == 0
}
