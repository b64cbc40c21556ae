//! A job from its beginning to its end.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_api::jobs::{JobFile, JobRequest, JobSummary, Members, Traffic, check_id};
use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::{JobHead, JobSerial};
use forebay_ebpf::Observer;
use forebay_engine::{EndedJob, FileOfJob, Ino, blocking};
use forebay_system::clock::unix_now;
use forebay_system::process::{self, Process};
use futures::FutureExt;

use super::accounting::{Accounting, FileId, UsedFile};
use super::shown::shown;
use super::{JobTable, Jobs, MISSING_LOST, Running, attribution, slurm_steps};
use crate::JobsInner;

/// Jobs that run at a time.
const RUNNING_MAX: usize = 256;
/// A tree of processes is read this many times, to find processes that were forked while it was added.
const TREE_LOOKS: usize = 4;

/// How long it waits before the files of a job that ended are settled again, if the pool did not tell what is needed.
const SETTLE_AGAIN: Duration = Duration::from_secs(10);
/// Processes of a job that are listed before those that have ended are dropped from the list.
const MEMBERS_MAX: usize = 1024;

/// How a job ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobEnd {
    /// A client has said that the job is over.
    Told,
    /// All clients are gone.
    Orphaned,
    /// The job goes on, and is not observed any more.
    Unseen,
}

impl JobsInner {
    /// Begins or joins a job. Without a client, an allocation holds the job.
    pub(crate) fn begin_job(
        self: &Arc<Self>,
        request: JobRequest,
        client: Option<Process>,
        uid: u32,
    ) -> Result<JobSummary> {
        let jobs = &self.registry;
        check_id(&request.id).map_err(|why| Error::new(ErrorKind::InvalidInput, Side::Application, why))?;
        jobs.wait_until_settled();
        let roots = match &request.members {
            Members::Caller => client.iter().map(|client| client.pid).collect(),
            Members::Processes(pids) => pids.clone(),
            Members::Cgroup { .. } | Members::SlurmSteps { .. } => Vec::new(),
        };
        if let Some(gone) = roots.iter().find(|pid| process::tree(&[**pid]).is_empty()) {
            let what = format!("process {gone} does not exist");
            return Err(Error::new(ErrorKind::NotFound, Side::Application, what));
        }
        // The report of the job says from the start what the observer can see.
        self.observer_at_work(Duration::ZERO);
        let (number, is_told) = self.enter_job(&request, client, uid)?;
        self.add_processes(number, &roots);
        if let Members::Cgroup { id, path } = request.members {
            self.add_cgroup(number, id, path);
        }
        let begun = self.keep_running(number)?;
        if is_told {
            self.go_ahead_of(number);
        }
        Ok(begun)
    }

    /// Begins to stage what a job will read, if that is wanted.
    pub(super) fn go_ahead_of(self: &Arc<Self>, number: u32) {
        let wanted = |running: &Running| {
            let invocation = running.head.invocation.clone().filter(|_| running.head.prefetch);
            invocation.map(|invocation| (running.serial, invocation))
        };
        let found = self.registry.table.lock().running.get(&number).and_then(wanted);
        if let (Some((serial, invocation)), true) = (found, self.engine.policy().prefetch.jobs) {
            Jobs { inner: self.clone() }.stage_ahead(serial, invocation);
        }
    }

    /// Returns the number of a job in the table, a new job or a running one. The bool is true if this request is the
    /// first that says which command the job runs: a job that is joined learns it from the first client that knows.
    fn enter_job(&self, request: &JobRequest, client: Option<Process>, uid: u32) -> Result<(u32, bool)> {
        let slurm_job = match &request.members {
            Members::SlurmSteps { job } => Some(job.clone()),
            _ => None,
        };
        let mut table = self.registry.table.lock();
        let known = table.running.iter_mut().find(|(_, running)| running.is_joined_as(&request.id));
        if let Some((number, running)) = known {
            let head = &mut running.head;
            head.is_held |= client.is_none();
            head.clients.extend(client);
            head.ends_leases |= request.ends_leases;
            head.slurm_job = slurm_job.or(head.slurm_job.take());
            let is_told = head.invocation.is_none() && request.invocation.is_some();
            if is_told {
                head.invocation = request.invocation.clone();
                head.prefetch = request.prefetch;
                head.summary.command = request.command.clone();
            }
            return Ok((*number, is_told));
        }
        if table.running.len() >= RUNNING_MAX {
            let what = format!("{RUNNING_MAX} jobs run already");
            return Err(Error::new(ErrorKind::Busy, Side::Application, what));
        }
        let summary = JobSummary {
            id: request.id.clone(),
            uid,
            command: request.command.clone(),
            begun_unix: unix_now(),
            ended_unix: None,
            processes: Vec::new(),
            cgroups: Vec::new(),
            observer: self.registry.status().kind,
            missing: self.registry.unseen(),
            reads_unseen: self.registry.misses_reads(),
            interrupted: false,
            file_count: 0,
            omitted_files: 0,
            ahead: None,
            traffic: Traffic::default(),
        };
        let mut head = JobHead {
            summary,
            is_held: client.is_none(),
            clients: client.into_iter().collect(),
            cgroup_ids: Vec::new(),
            files_bytes: 0,
            invocation: request.invocation.clone(),
            prefetch: request.prefetch,
            ends_leases: request.ends_leases,
            slurm_job,
            boot: String::new(),
        };
        head.note_boot();
        let micros = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        let serial = micros.max(table.last_serial + 1);
        Ok((self.run_job(&mut table, serial, head, Accounting::default()), true))
    }

    pub(super) fn run_job(&self, table: &mut JobTable, serial: JobSerial, head: JobHead, uses: Accounting) -> u32 {
        table.last_number += 1;
        table.last_serial = table.last_serial.max(serial);
        let lost_before = self.registry.lost_uses();
        let goes_on = Arc::new(AtomicBool::new(false));
        let (is_over, is_ending, unrecorded) = (false, false, None);
        let running = Running { serial, head, uses, is_over, is_ending, unrecorded, goes_on, lost_before };
        table.running.insert(table.last_number, running);
        self.registry.running.store(table.running.len() as u32, Ordering::Relaxed);
        self.registry.wake_keeper();
        table.last_number
    }

    /// Adds the step of a Slurm job that a thread belongs to, if that job runs. Returns the number of the job.
    pub(super) fn adopt_step(&self, thread: u32) -> Option<u32> {
        let waits = |running: &Running| running.head.slurm_job.is_some();
        if !self.registry.table.lock().running.values().any(waits) {
            return None;
        }
        let (pid, slurm_job) = slurm_steps::step_of(thread)?;
        let step = Process::of(pid);
        // The first requests of a step may arrive at the same time.
        let _adopting = self.registry.adopting.lock();
        let number = {
            let mut table = self.registry.table.lock();
            let is_job = |running: &Running| running.head.slurm_job.as_ref() == Some(&slurm_job);
            let (number, running) = table.running.iter_mut().find(|(_, running)| is_job(running))?;
            let members = &mut running.head.summary.processes;
            if members.contains(&step) {
                return Some(*number);
            }
            // A job may have any number of steps, one after the other.
            if members.len() >= MEMBERS_MAX {
                members.retain(Process::is_alive);
            }
            *number
        };
        self.add_processes(number, &[pid]);
        Some(number)
    }

    /// Adds processes with their descendants to a job.
    pub(super) fn add_processes(&self, number: u32, roots: &[u32]) {
        let mut known = Vec::new();
        let observer = self.observer_at_work(Duration::ZERO).map(|watch| &watch.observer);
        for _ in 0..TREE_LOOKS {
            let tree = process::tree(roots);
            let new: Vec<Process> = tree.into_iter().filter(|process| !known.contains(process)).collect();
            if new.is_empty() {
                break;
            }
            for process in &new {
                let add =
                    |observer: &Observer| observer.add_running_process(process.pid, number, || process.is_running());
                if let Some(Err(error)) = observer.map(add) {
                    tracing::warn!("process {} is not observed: {error}", process.pid);
                }
            }
            if let Some(running) = self.registry.table.lock().running.get_mut(&number) {
                let members = &mut running.head.summary.processes;
                // A job of an earlier daemon has its processes already.
                let listed: HashSet<Process> = members.iter().copied().collect();
                members.extend(new.iter().filter(|process| !listed.contains(process)));
            }
            known.extend(new);
        }
        self.forget_processes_of_ended(number);
        self.registry.attribution.forget();
    }

    /// The job may have ended while processes were added to it: its end did not see them.
    fn forget_processes_of_ended(&self, number: u32) {
        let runs = self.registry.table.lock().running.contains_key(&number);
        if let (false, Some(watch)) = (runs, self.registry.watch())
            && let Err(error) = watch.observer.end(number)
        {
            tracing::warn!("a job that has ended is still observed: {error}");
        }
    }

    fn add_cgroup(&self, number: u32, id: u64, path: String) {
        self.observe_cgroup(number, id, &path);
        if let Some(running) = self.registry.table.lock().running.get_mut(&number) {
            running.head.summary.cgroups.push(path);
            running.head.cgroup_ids.push(id);
        }
        self.registry.attribution.forget();
    }

    /// Adds the processes in a cgroup to what the observer knows of a job.
    pub(super) fn observe_cgroup(&self, number: u32, id: u64, path: &str) {
        if let Some(Err(error)) =
            self.observer_at_work(Duration::ZERO).map(|watch| watch.observer.add_cgroup(id, number))
        {
            tracing::warn!("cgroup {path} is not observed: {error}");
        }
        self.forget_processes_of_ended(number);
    }

    /// Records in the catalog that a job runs, for the next daemon.
    pub(super) fn keep_running(&self, number: u32) -> Result<JobSummary> {
        let _recording = self.registry.recording.lock();
        let known = {
            let table = self.registry.table.lock();
            // The record of one that is ending is written by its end.
            let running = table.running.get(&number).filter(|running| !running.is_ending);
            running.map(|running| (running.serial, running.head.clone(), running.summary()))
        };
        let Some((serial, mut head, summary)) = known else {
            return Err(Error::new(ErrorKind::NotFound, Side::Application, "the job has ended"));
        };
        self.engine.catalog().put_job(serial, &mut head, None)?;
        Ok(summary)
    }

    pub(super) fn end_job(&self, id: &str, client: Process, goes_on: bool) -> Result<Option<JobSummary>> {
        self.registry.wait_until_settled();
        let (number, is_over) = {
            let mut table = self.registry.table.lock();
            let found = table.running.iter_mut().find(|(_, running)| running.is_joined_as(id));
            let Some((number, running)) = found else {
                drop(table);
                if !goes_on {
                    self.end_leases_left_by(|head| head.summary.id == id)?;
                }
                return Ok(None);
            };
            running.is_over |= !goes_on;
            if let Some(at) = running.head.clients.iter().position(|known| *known == client) {
                running.head.clients.remove(at);
            }
            running.head.clients.retain(Process::is_alive);
            if !running.head.clients.is_empty() || running.head.is_held {
                return Ok(Some(running.summary()));
            }
            running.is_ending = true;
            (*number, running.is_over)
        };
        self.finish_job(number, if is_over { JobEnd::Told } else { JobEnd::Unseen })
    }

    /// Collects the counts of a job for the last time, and saves its report.
    ///
    /// # Errors
    /// If the report cannot be recorded, the job stays in the table with all that it used, and the collector tries again.
    pub(crate) fn finish_job(&self, number: u32, end: JobEnd) -> Result<Option<JobSummary>> {
        if let Some(running) = self.registry.table.lock().running.get_mut(&number) {
            running.is_ending = true;
        }
        if let Some(Err(error)) = self.registry.watch().map(|watch| watch.observer.end(number)) {
            tracing::warn!("a job that has ended is still observed: {error}");
        }
        self.collect_uses(Duration::ZERO);
        let goes_on = self.goes_on_after(number, end);
        let recorded = self.record_end(number, end, goes_on)?;
        let ended = {
            let mut table = self.registry.table.lock();
            let ended = table.running.remove(&number);
            if let Some(ended) = &ended {
                ended.goes_on.store(goes_on, Ordering::Release);
            }
            self.registry.running.store(table.running.len() as u32, Ordering::Relaxed);
            ended
        };
        self.foresight.access_predictor.job_ended(number);
        self.registry.attribution.forget();
        if let Some(watch) = self.registry.watch() {
            watch.forget(number);
        }
        // Another thread may have finished it.
        let (Some(ended), Some((mut head, used))) = (ended, recorded) else { return Ok(None) };
        let over = EndedJob { user: Some(head.summary.uid), files: ended.uses.overlay_files() };
        self.settle_files(ended.serial, over, goes_on);
        let ahead = self.end_ahead(ended.serial);
        let is_whole = !head.summary.missing.iter().any(|missing| missing == MISSING_LOST);
        match self.learn(&head, &used, ahead.as_deref(), is_whole) {
            Ok(report) => head.summary.ahead = ahead.map(|_| report),
            Err(error) => tracing::warn!(%error, "nothing is learned from job {}", head.summary.id),
        }
        let id = &head.summary.id;
        // If another job of the same name runs, or if there is an allocation, the leases belong to that.
        let is_owner = !self.registry.runs(id) && !self.allocations.is_active(id);
        let ends_leases = end != JobEnd::Unseen && head.ends_leases && is_owner;
        if ends_leases {
            self.engine.end_leases_of(id)?;
            head.ends_leases = false;
        }
        if ends_leases || head.summary.ahead.is_some() {
            let _recording = self.registry.recording.lock();
            if let Err(error) = self.engine.catalog().put_job(ended.serial, &mut head, None) {
                tracing::warn!(%error, "the report of job {} lacks what was staged ahead of it", head.summary.id);
            }
        }
        Ok(Some(head.summary))
    }

    /// Records the report of a job that ends, while it is in the table: a failure loses nothing. Returns the record, and the
    /// files of the job. `None`: another thread has finished it.
    fn record_end(&self, number: u32, end: JobEnd, goes_on: bool) -> Result<Option<(JobHead, Vec<UsedFile>)>> {
        let _recording = self.registry.recording.lock();
        let known = {
            let lost = self.registry.lost_uses();
            let mut table = self.registry.table.lock();
            table.running.get_mut(&number).map(|running| {
                let summary = &mut running.head.summary;
                _ = summary.ended_unix.get_or_insert_with(unix_now);
                summary.interrupted |= end != JobEnd::Told;
                if lost != running.lost_before && !summary.missing.iter().any(|missing| missing == MISSING_LOST) {
                    summary.reads_unseen = true;
                    summary.missing.push(MISSING_LOST.to_owned());
                }
                running.unrecorded = None;
                let head = JobHead { summary: running.summary(), ..running.head.clone() };
                (running.serial, head, self.ranked(&running.uses))
            })
        };
        let Some((serial, mut head, ranked)) = known else { return Ok(None) };
        let used = self.named(ranked);
        let recorded = self.put_ended(serial, &mut head, Some(&shown(&used)), goes_on);
        if recorded.is_err()
            && let Some(running) = self.registry.table.lock().running.get_mut(&number)
        {
            running.unrecorded = Some(end);
        }
        recorded.map(|()| Some((head, used)))
    }

    /// Returns whether processes of a job go on after it: then the files that never go to the pool stay.
    fn goes_on_after(&self, number: u32, end: JobEnd) -> bool {
        let head = self.registry.table.lock().running.get(&number).map(|running| running.head.clone());
        match end {
            JobEnd::Told => false,
            // An allocation knows that its job is over.
            JobEnd::Orphaned => head.is_some_and(|head| !head.is_held && has_processes_left(&head)),
            JobEnd::Unseen => true,
        }
    }

    /// Records a job that has ended.
    pub(super) fn put_ended(
        &self,
        serial: JobSerial,
        head: &mut JobHead,
        files: Option<&[JobFile]>,
        goes_on: bool,
    ) -> Result<()> {
        let catalog = self.engine.catalog();
        if goes_on { catalog.put_unseen_job(serial, head, files) } else { catalog.put_job(serial, head, files) }
    }

    /// Records what a running job used until now, for the next daemon.
    pub(super) fn keep_report(&self, number: u32) -> Result<()> {
        let _recording = self.registry.recording.lock();
        let known = {
            let table = self.registry.table.lock();
            let running = table.running.get(&number).filter(|running| !running.is_ending);
            running.map(|running| {
                let head = JobHead { summary: running.summary(), ..running.head.clone() };
                (running.serial, head, self.ranked(&running.uses))
            })
        };
        let Some((serial, mut head, ranked)) = known else { return Ok(()) };
        self.engine.catalog().put_job(serial, &mut head, Some(&shown(&self.named(ranked))))
    }

    /// Records that a job uses a file, if the file never goes to the pool: it is removed at the end of the job, also if
    /// this daemon does not see that end.
    pub(super) fn note_local_file(&self, job: JobSerial, file: FileOfJob) {
        if self.engine.is_local_file(file.ino) {
            self.record_local_file(job, file);
        }
    }

    fn record_local_file(&self, job: JobSerial, file: FileOfJob) {
        if let Err(error) = self.engine.catalog().put_local_file(job, file) {
            tracing::warn!(%error, "a file that never goes to the pool may outlive the job that uses it");
        }
    }

    /// Leaves a local file, which is to be removed, to the running jobs that use it or may use it. Returns whether there
    /// are any.
    pub(super) fn take_over(&self, ino: Ino) -> bool {
        if !self.registry.any() {
            return false;
        }
        let takers: Vec<JobSerial> = {
            let mut table = self.registry.table.lock();
            let users = table.running.values_mut().filter(|running| running.uses.may_have_used(&FileId::Overlay(ino)));
            users
                .map(|running| {
                    running.uses.take_over(ino);
                    running.serial
                })
                .collect()
        };
        takers.iter().for_each(|job| self.record_local_file(*job, FileOfJob { ino, is_changed: true }));
        !takers.is_empty()
    }

    /// Lets the engine flush or remove the files that waited for the end of a job. `goes_on`: its processes go on, so
    /// nothing is removed.
    pub(super) fn settle_files(&self, job: JobSerial, mut ended: EndedJob, goes_on: bool) {
        let engine = self.engine.clone();
        let task = async move {
            let mut settled = Ok(());
            if goes_on {
                engine.job_left(&std::mem::take(&mut ended.files));
            } else {
                settled = engine.job_ended(&mut ended).await;
            }
            // What is not removed by the time that this daemon ends, the next one tries again.
            while !ended.files.is_empty() {
                let again = tokio::time::sleep(SETTLE_AGAIN);
                if engine.stop().run_until_cancelled(again).await.is_none() {
                    break;
                }
                settled = engine.remove_local_files(&mut ended).await;
            }
            let forgotten = blocking(move || settled.and_then(|()| engine.catalog().forget_local_files(job))).await;
            if let Err(error) = forgotten {
                tracing::warn!(%error, "a file that should never go to the pool was not removed when its job ended");
            }
        };
        self.foresight.runtime.spawn(task.boxed());
    }

    /// Ends the leases of jobs whose end no daemon saw.
    pub(super) fn end_leases_left_by(&self, is_over: impl Fn(&JobHead) -> bool) -> Result<()> {
        let mut left = Vec::new();
        self.engine.catalog().jobs(|serial, head| {
            // The leases belong to a job of the same name that runs, or to an allocation.
            let is_owner = !self.registry.runs(&head.summary.id) && !self.allocations.is_active(&head.summary.id);
            if head.ends_leases && head.summary.ended_unix.is_some() && is_owner && is_over(&head) {
                left.push((serial, head));
            }
            Ok(true)
        })?;
        for (serial, mut head) in left {
            self.engine.end_leases_of(&head.summary.id)?;
            head.ends_leases = false;
            self.engine.catalog().put_job(serial, &mut head, None)?;
        }
        Ok(())
    }
}

/// Returns whether processes of a job live, as far as they are known, although no client lives.
pub(super) fn has_processes_left(head: &JobHead) -> bool {
    let JobSummary { processes, cgroups, .. } = &head.summary;
    if head.is_of_earlier_boot() {
        return false;
    }
    processes.iter().any(Process::is_alive) || attribution::any_is_within(cgroups)
}

#[cfg(test)]
pub(crate) mod tests;
