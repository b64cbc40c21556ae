//! The end of a case: all failures end, everything is flushed, and whole trees are compared.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use forebay_api::operator::{EvictRequest, FlushRequest};
use forebay_api::quotas::QuotaVerb;
use forebay_engine::summary;

use super::Failure;
use super::check::{Compared, same};
use super::config::World;
use super::run::Run;
use super::tree::Tree;
use super::view;

/// The maximum number of flushes until nothing is dirty: a conflict renames our file, and only the next flush writes
/// the file with its new name.
const ROUNDS: u32 = 4;
/// The time limit for arrival in the pool: a failed write-back is retried after seconds, with growing pauses.
const ARRIVAL: Duration = Duration::from_secs(120);
/// The number of times that the count of used bytes is read before it must be right.
const COUNTS: u32 = 200;
const ALL: Compared = Compared { contents: true, mtimes: true };

impl Run {
    pub fn end(&mut self) -> Result<(), Failure> {
        self.heal();
        while let Some(handle) = self.handles.pop() {
            self.end_handle(handle)?;
        }
        self.model.sweep(&[]);
        if self.outdated {
            self.catch_up()?;
        }
        let overlay = self.overlay();
        let roomy = self.machine.config.limit_bytes.is_none();
        if roomy {
            let shown = self.machine.run(view::shown(&overlay))?;
            same(&shown, &self.model, ALL).map_err(|e| format!("before the last flush: {e}"))?;
        }
        match self.machine.config.arrives {
            true => self.await_arrival()?,
            false => self.flush_everything()?,
        }
        let pooled = self.machine.run(view::pooled(&self.machine.memory));
        self.check_pool(&pooled)?;
        self.check_fast_pool()?;
        let request = EvictRequest { paths: vec![String::new()], release_leases: true, dry_run: false };
        let (done, _) = self.machine.run(async { summary(overlay.evict(request)).await });
        if done.failed > 0 || done.skipped > 0 {
            let state = self.machine.run(overlay.list_residency(&Default::default(), true));
            let kept: Vec<_> = state.into_iter().flatten().filter(|f| f.resident_bytes > 0).collect();
            if done.failed > 0 || !kept.is_empty() {
                return Err(format!("all is clean and closed, but not everything was evicted: {done:?} {kept:?}"));
            }
        }
        // What the engine remembers of a pool that other clients change may be old. A new start revalidates all of it.
        drop(overlay);
        if self.shared() {
            self.machine.crash(|_| {}).map_err(|e| format!("the last start: {e}"))?;
        }
        let overlay = self.overlay();
        let shown = self.machine.run(view::shown(&overlay))?;
        same(&shown, &pooled, ALL).map_err(|e| format!("after an eviction: {e}"))?;
        self.check_fast_pool()
    }

    fn flush_everything(&mut self) -> Result<(), Failure> {
        let overlay = self.overlay();
        for _ in 0..ROUNDS {
            let request = FlushRequest { wait: true, ..FlushRequest::default() };
            let (done, failures) = self.machine.run(async { summary(overlay.flush(request)).await });
            if done.failed > 0 {
                return Err(format!("the last flush failed: {:?} {failures:?}", done.message));
            }
            let dirty = self.machine.run(overlay.dirty()).map_err(|e| e.to_string())?;
            if dirty.is_empty() {
                return Ok(());
            }
        }
        let dirty = self.machine.run(overlay.dirty()).map_err(|e| e.to_string())?;
        Err(format!("still dirty after the last flush: {dirty:?}"))
    }

    /// Waits until everything is in the pool, without any request for a flush and without further operations.
    fn await_arrival(&mut self) -> Result<(), Failure> {
        let overlay = self.overlay();
        let began = Instant::now();
        loop {
            let dirty = self.machine.run(overlay.dirty()).map_err(|e| e.to_string())?;
            if dirty.is_empty() {
                return Ok(());
            }
            if began.elapsed() > ARRIVAL {
                return Err(format!("without a request for a flush, this is still dirty after {ARRIVAL:?}: {dirty:?}"));
            }
            self.machine.run(async { tokio::time::sleep(Duration::from_millis(20)).await });
        }
    }

    fn check_pool(&mut self, pooled: &Tree) -> Result<(), Failure> {
        let overlay = self.overlay();
        let status = self.machine.run(overlay.status());
        let world = self.machine.config.world;
        if world == World::Quiet && !status.conflicts.is_empty() {
            return Err(format!("there are conflicts without another client: {:?}", status.conflicts));
        }
        let same_as_model = match world {
            World::Quiet => true,
            World::PowerCuts => status.conflicts.is_empty(),
            World::Shared => false,
        };
        if same_as_model {
            same(pooled, &self.model, ALL).map_err(|e| format!("the pool after the last flush: {e}"))?;
        }
        if world == World::Shared {
            self.effects.check(pooled).map_err(|e| format!("{e}; conflicts: {:?}", status.conflicts))?;
        }
        Ok(())
    }

    /// Checks that the catalog and the content files agree, and that the count of used bytes is right.
    fn check_fast_pool(&mut self) -> Result<(), Failure> {
        let overlay = self.overlay();
        // With `repair`, fsck also removes orphaned content files, and waits for removals in progress.
        let report = self.machine.run(overlay.fsck(true)).map_err(|e| e.to_string())?;
        if !report.problems.is_empty() {
            return Err(format!("fsck: {:?}", report.problems));
        }
        let report = self.machine.run(overlay.quotas(QuotaVerb::Check)).map_err(|e| e.to_string())?;
        if !report.differences.is_empty() {
            return Err(format!("quotas: {:?}", report.differences));
        }
        // After a start, the content files are counted in the background.
        for _ in 0..COUNTS {
            if self.check_count().is_ok() {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        self.check_count()
    }

    fn check_count(&self) -> Result<(), Failure> {
        let overlay = self.overlay();
        let mut blocks = 0;
        for dir in std::fs::read_dir(self.machine.content_dir()).into_iter().flatten().flatten() {
            for file in std::fs::read_dir(dir.path()).into_iter().flatten().flatten() {
                blocks += file.metadata().map_or(0, |m| m.blocks() * 512);
            }
        }
        let status = self.machine.run(overlay.status());
        if status.used_bytes != blocks {
            return Err(format!("{} bytes are accounted as used, {blocks} are", status.used_bytes));
        }
        Ok(())
    }
}
