//! The thread that tracks jobs: it starts the observer, takes over the jobs of an earlier daemon, empties the ring, and
//! ends jobs whose clients are gone.
//!
//! Records are read in batches, each with one system call. The ring wakes the thread when a quarter of it is used.
//!
//! If a worker dies, its counts are lost. One that ends records them. The catalog has the jobs that ran, with their
//! processes. The next worker goes on with those jobs whose clients live, and marks the report as interrupted: before it
//! answers its first request, so that no use is missed. Their processes and all descendants are added to the observer later.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use forebay_backends::Result;
use forebay_catalog::{AllocationState, JobHead, JobSerial};
use forebay_engine::EndedJob;
use forebay_system::capabilities;
use forebay_system::clock::unix_now;
use forebay_system::process::Process;

use super::accounting::Accounting;
use super::lifecycle::{self, JobEnd};
use super::watch::{Watch, WatchOptions};
use super::{Jobs, JobsInner, Registry};

/// The longest wait for the ring of first touches while a job runs.
const RING_WAIT: Duration = Duration::from_secs(1);
/// The longest wait while the observer is detached and no job runs: any change of that wakes the thread.
const IDLE_WAIT: Duration = Duration::from_secs(30);
/// Records, and the clients of jobs, are checked no more often than this.
const RECORDS_EVERY: Duration = Duration::from_secs(3);
/// Reading records may take one fiftieth of a CPU: after each time the thread pauses for this multiple of the time
/// taken.
const REST: u32 = 50;

/// The thread before it has a mount. It keeps the capabilities of the thread that starts it until the observer is
/// loaded, and may be the only thread that has them.
pub struct Collector(SyncSender<(Weak<JobsInner>, WatchOptions)>);

impl Collector {
    /// Starts the thread. It ends with the engine that it is given, or when this is dropped.
    pub fn start() -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(1);
        std::thread::Builder::new().name("forebay-jobs".into()).spawn(move || wait(&receiver))?;
        Ok(Self(sender))
    }
}

impl Jobs {
    /// Goes on with the jobs of an earlier daemon: from now on, requests count for them. [`Self::observe`] adds the observer.
    /// Blocks.
    pub fn go_on(&self) {
        if let Err(error) = self.inner.enter_jobs() {
            tracing::error!(%error, "jobs of an earlier daemon");
        }
    }

    /// Begins to track jobs, with an observer if this process may have one. Returns at once.
    ///
    /// `opens_unseen`: the kernel sends no OPEN requests.
    pub fn observe(&self, collector: Collector, wanted: WatchOptions, opens_unseen: bool) {
        let jobs = &self.inner.registry;
        jobs.opens_unseen.store(opens_unseen, Ordering::Relaxed);
        jobs.starting.store(true, Ordering::Release);
        if collector.0.send((Arc::downgrade(&self.inner), wanted)).is_err() {
            drop(Starting(jobs));
        }
    }
}

fn wait(begin: &Receiver<(Weak<JobsInner>, WatchOptions)>) {
    if let Ok((inner, wanted)) = begin.recv() {
        keep(&inner, &wanted);
    }
}

/// Its drop ends all waits for the start of the observer, also if the start failed.
struct Starting<'a>(&'a Registry);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let _ = self.0.watch.set(Err("the start of the observer broke off".into()));
        let _ = self.0.settled.set(());
    }
}

fn keep(inner: &Weak<JobsInner>, wanted: &WatchOptions) {
    let Some(begun) = inner.upgrade() else { return };
    let _ = begun.registry.collector.set(std::thread::current());
    let starting = Starting(&begun.registry);
    let mut watch = Watch::start(&begun, wanted);
    capabilities::give_up();
    match &mut watch {
        Ok(watch) => {
            watch.allow_rest();
            tracing::info!("what jobs use is observed by eBPF");
        }
        Err(why) => tracing::info!("only the requests of jobs are observed: {why}"),
    }
    let _ = begun.registry.watch.set(watch);
    if let Err(error) = begun.take_up_allocations() {
        tracing::error!(%error, "allocations of an earlier daemon");
    }
    if let Err(error) = begun.take_up_jobs() {
        tracing::error!(%error, "jobs of an earlier daemon");
    }
    drop(starting);
    let ring = begun.registry.watch().and_then(|watch| watch.observer.ring().ok());
    drop(begun);
    let mut look_at = Instant::now() + RECORDS_EVERY;
    let mut wait = RING_WAIT;
    loop {
        match &ring {
            Some(ring) => ring.wait(wait),
            None => std::thread::park_timeout(wait),
        }
        let Some(inner) = inner.upgrade().filter(|inner| !inner.engine.stop().is_cancelled()) else { return };
        if let Some(watch) = inner.registry.watch() {
            watch.take_touches(&inner);
            inner.rest_or_work(watch);
        }
        let began = Instant::now();
        if began >= look_at {
            inner.collect_uses(RECORDS_EVERY);
            inner.end_jobs_where(JobEnd::Orphaned, |head| !head.is_held && !head.clients.iter().any(Process::is_alive));
            look_at = Instant::now() + RECORDS_EVERY.max(began.elapsed() * REST);
        }
        // If the kernel only forgot inodes, the catalog did not change, so no sync follows that would give memory back.
        inner.engine.give_back_memory();
        wait = inner.registry.wait();
    }
}

impl Registry {
    /// Returns how long the collector waits if nothing wakes it.
    fn wait(&self) -> Duration {
        let at_work = self.watch().is_some_and(|watch| watch.observer.is_at_work());
        match (self.any(), at_work) {
            (true, _) => RING_WAIT,
            (false, true) => RECORDS_EVERY,
            (false, false) => IDLE_WAIT,
        }
    }

    /// Wakes the collector: a job began, or all jobs are to end.
    pub(super) fn wake_keeper(&self) {
        // The collector waits for the ring if there is one, and else in `park_timeout`.
        if let Some(watch) = self.watch() {
            watch.observer.ring_bell();
        }
        if let Some(collector) = self.collector.get() {
            collector.unpark();
        }
    }
}

impl JobsInner {
    /// Records what all jobs used until now, for a daemon that ends. The jobs go on in the next daemon.
    pub(crate) fn leave_jobs(&self) {
        self.end_jobs_where(JobEnd::Orphaned, |_| false);
        self.collect_uses(Duration::ZERO);
        let numbers: Vec<u32> = self.registry.table.lock().running.keys().copied().collect();
        for number in numbers {
            if let Err(error) = self.keep_report(number) {
                tracing::error!(%error, "a job's report");
            }
        }
        self.registry.wake_keeper();
    }

    /// Ends jobs whose clients have not ended them, and those whose end could not be recorded.
    pub(crate) fn end_jobs_where(&self, end: JobEnd, over: impl Fn(&JobHead) -> bool) {
        let numbers: Vec<(u32, JobEnd)> = {
            let mut table = self.registry.table.lock();
            let over = table.running.iter_mut().filter_map(|(number, running)| {
                let is_over = !running.is_ending && over(&running.head);
                let end = running.unrecorded.take().or(is_over.then_some(end))?;
                running.is_ending = true;
                Some((*number, end))
            });
            over.collect()
        };
        for (number, end) in numbers {
            if let Err(error) = self.finish_job(number, end) {
                tracing::error!(%error, "a job's report");
            }
        }
    }

    /// Enters the jobs into the table that an earlier daemon did not see the end of, and that go on: from now on, requests
    /// count for them. Their processes are known by the catalog and /proc.
    pub(crate) fn enter_jobs(&self) -> Result<()> {
        let catalog = self.engine.catalog();
        // A clock that was set back must not make a new job look older than the records: then its own would be removed first.
        if let Some(newest) = catalog.newest_job()? {
            let mut table = self.registry.table.lock();
            table.last_serial = table.last_serial.max(newest);
        }
        let mut going_on = self.unended_jobs()?;
        going_on.retain_mut(|(_, head)| {
            if head.is_of_earlier_boot() {
                head.clients.clear();
                head.cgroup_ids.clear();
                head.summary.cgroups.clear();
                head.summary.processes.clear();
            }
            head.clients.retain(Process::is_alive);
            !head.clients.is_empty() || head.is_held
        });
        let mut local = if going_on.is_empty() { BTreeMap::new() } else { catalog.local_files()? };
        for (serial, mut head) in going_on {
            head.is_held = head.is_held && self.is_held_by_allocation(&head.summary.id)?;
            if head.clients.is_empty() && !head.is_held {
                continue;
            }
            head.summary.interrupted = true;
            head.note_boot();
            let uses = Accounting::continued(local.remove(&serial).unwrap_or_default());
            self.run_job(&mut self.registry.table.lock(), serial, head, uses);
        }
        Ok(())
    }

    /// Returns the jobs that are recorded as running, and are not in the table.
    fn unended_jobs(&self) -> Result<Vec<(JobSerial, JobHead)>> {
        let mut found = Vec::new();
        self.engine.catalog().jobs(|serial, head| {
            if head.summary.ended_unix.is_none() && !self.registry.has(serial) {
                found.push((serial, head));
            }
            Ok(true)
        })?;
        Ok(found)
    }

    /// Returns whether there is an allocation of this name whose job may still run. Also before the allocations are taken
    /// up.
    fn is_held_by_allocation(&self, id: &str) -> Result<bool> {
        let record = self.engine.catalog().allocation(id)?;
        Ok(record.is_some_and(|record| {
            let is_over = record.state == AllocationState::Running && record.is_of_earlier_boot();
            record.state.may_run() && !is_over
        }))
    }

    /// Takes over the jobs that an earlier daemon did not see the end of, once the observer is there and the allocations are
    /// taken up: goes on with those in the table, and ends the others.
    pub(super) fn take_up_jobs(self: &Arc<Self>) -> Result<()> {
        self.enter_jobs()?;
        let mut outcome = Ok(());
        let entered: Vec<u32> = self.registry.table.lock().running.keys().copied().collect();
        for number in entered {
            outcome = outcome.and(self.go_on_with(number));
        }
        let mut users = HashMap::new();
        self.engine.catalog().jobs(|serial, head| {
            users.insert(serial, head.summary.uid);
            Ok(true)
        })?;
        let mut undecided = HashSet::new();
        for (serial, mut head) in self.unended_jobs()? {
            let goes_on = !head.is_held && lifecycle::has_processes_left(&head);
            (head.is_held, head.summary.interrupted) = (false, true);
            head.summary.ended_unix = Some(unix_now());
            // The files that the earlier daemon recorded stay.
            let ended = self.put_ended(serial, &mut head, None, goes_on);
            if ended.is_err() && goes_on {
                undecided.insert(serial);
            }
            outcome = outcome.and(ended);
        }
        // The files of all jobs that run are known now. Those that were not released stay for the next daemon.
        for (job, files) in self.engine.catalog().local_files()? {
            if !self.registry.has(job) && !undecided.contains(&job) {
                self.settle_files(job, EndedJob { user: users.get(&job).copied(), files }, false);
            }
        }
        outcome.and(self.end_leases_left_by(|head| !head.is_held && !head.has_client()))
    }

    /// Goes on with a job that an earlier daemon began: the observer learns its processes.
    fn go_on_with(self: &Arc<Self>, number: u32) -> Result<()> {
        let head = self.registry.table.lock().running.get(&number).map(|running| running.head.clone());
        let Some(head) = head else { return Ok(()) };
        let (alive, dead): (Vec<Process>, Vec<Process>) =
            head.summary.processes.iter().copied().partition(Process::is_alive);
        if let Some(running) = self.registry.table.lock().running.get_mut(&number) {
            let summary = &mut running.head.summary;
            summary.processes.retain(|process| !dead.contains(process));
            summary.observer = self.registry.status().kind;
            summary.missing = self.registry.unseen();
            summary.reads_unseen = self.registry.misses_reads();
        }
        self.add_processes(number, &alive.iter().map(|process| process.pid).collect::<Vec<_>>());
        for (id, path) in head.cgroup_ids.iter().zip(&head.summary.cgroups) {
            self.observe_cgroup(number, *id, path);
        }
        self.keep_running(number)?;
        self.go_ahead_of(number);
        Ok(())
    }
}
