//! Reports of jobs for operators.

use std::time::Duration;

use forebay_api::jobs::{JobFile, JobSample, JobSummary, Sample};
use forebay_backends::Result;

use super::accounting::{Accounting, FileId, JobFileUse, PATHS_BYTES_MAX, UsedFile};
use super::{FRESH, Running};
use crate::JobsInner;

impl JobsInner {
    pub(super) fn all_jobs(&self) -> Result<Vec<JobSummary>> {
        self.collect_uses(FRESH);
        let mut all = Vec::new();
        self.engine.catalog().jobs(|serial, head| {
            all.push((serial, head.summary));
            Ok(true)
        })?;
        let table = self.registry.table.lock();
        for (serial, summary) in &mut all {
            if let Some(running) = table.running.values().find(|running| running.serial == *serial) {
                *summary = running.summary();
            }
        }
        Ok(all.into_iter().map(|(_, summary)| summary).collect())
    }

    pub(super) fn job(&self, id: &str) -> Result<Option<(JobSummary, Vec<JobFile>)>> {
        self.collect_uses(FRESH);
        let running = {
            let table = self.registry.table.lock();
            // The newest: one that has ended may wait for its report to be recorded.
            let found = table.running.values().rev().find(|running| running.head.summary.id == id);
            found.map(|running| (running.summary(), self.ranked(&running.uses)))
        };
        if let Some((summary, ranked)) = running {
            return Ok(Some((summary, shown(&self.named(ranked)))));
        }
        let mut newest = None;
        self.engine.catalog().jobs(|serial, head| {
            if head.summary.id == id {
                newest = Some((serial, head.summary));
            }
            Ok(true)
        })?;
        newest.map(|(serial, summary)| Ok((summary, self.engine.catalog().job_files(serial)?))).transpose()
    }

    pub(super) fn sample_jobs(&self, interval: Duration) -> Sample {
        self.observer_at_work(interval);
        self.collect_uses(FRESH);
        let observer = self.registry.status();
        let table = self.registry.table.lock();
        let jobs = table.running.values().map(|running| JobSample {
            id: running.head.summary.id.clone(),
            uid: running.head.summary.uid,
            files: (running.uses.len() + running.uses.omitted()) as u64,
            traffic: running.uses.sum(),
        });
        let at_ms = self.registry.since.elapsed().as_millis() as u64;
        Sample { at_ms, jobs: jobs.collect(), others: table.others, observer }
    }

    /// Returns the files of a job in the order of their first uses, by the names that they had then.
    pub(super) fn ranked(&self, uses: &Accounting) -> Vec<UsedFile> {
        let file = |(at, (file, used)): (usize, (&FileId, &JobFileUse))| {
            let shown = JobFile {
                path: used.path.clone(),
                first_use_rank: at as u64 + 1,
                traffic: used.traffic,
                in_pool: matches!(file, FileId::Pool(_)),
                parts: used.parts.parts(),
            };
            UsedFile { id: file.clone(), shown, parts: used.parts }
        };
        uses.ranked().into_iter().enumerate().map(file).collect()
    }

    /// Replaces the names by the present ones, where the files have one, as long as there is room for them: renames may have
    /// made them longer.
    pub(super) fn named(&self, mut ranked: Vec<UsedFile>) -> Vec<UsedFile> {
        let mut room_bytes = PATHS_BYTES_MAX;
        for file in &mut ranked {
            let now = self.path_now(&file.id).ok().flatten().filter(|path| path.len() <= room_bytes);
            file.shown.path = now.unwrap_or_else(|| std::mem::take(&mut file.shown.path));
            room_bytes = room_bytes.saturating_sub(file.shown.path.len());
        }
        ranked
    }
}

/// Returns the report of files.
pub(super) fn shown(used: &[UsedFile]) -> Vec<JobFile> {
    used.iter().map(|file| file.shown.clone()).collect()
}

impl Running {
    pub(super) fn summary(&self) -> JobSummary {
        JobSummary {
            file_count: self.uses.len() as u64,
            omitted_files: self.uses.omitted() as u64,
            traffic: self.uses.sum(),
            ..self.head.summary.clone()
        }
    }
}
