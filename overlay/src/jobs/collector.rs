//! The thread that keeps jobs: starts the observer, takes jobs up again that another daemon began, empties the ring, and
//! ends jobs whose owners are gone.
//!
//! Records are read in batches, each with one system call. The ring wakes the thread when a quarter of it is used.
//!
//! If a worker dies, its counts are lost. The jobs that ran are in the catalog with their processes. The next worker
//! goes on with those whose owners live, adds their processes and all descendants, and marks the report as interrupted.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use forebay_backends::Result;

use super::Jobs;
use super::lifecycle::End;
use super::watch::{Observe, Watch};
use crate::Overlay;
use crate::catalog::{JobHead, JobSerial};
use crate::clock::unix_now;
use crate::control::capabilities;
use crate::engine::Inner;
use crate::process::Process;

/// How long it waits for the ring of first touches to fill up while a job runs, at most,
const RING_WAIT: Duration = Duration::from_secs(1);
/// and while the observer rests and no job runs: whatever changes that wakes it.
const IDLE_WAIT: Duration = Duration::from_secs(30);
/// How often records are looked at, and owners of jobs, at most.
const RECORDS_EVERY: Duration = Duration::from_secs(3);
/// Looking at records is given one fiftieth of a CPU: after it, it rests for so many times as long.
const REST: u32 = 50;

/// The thread, while it waits for a mount. It has the capabilities of who starts it until the observer is loaded, and
/// may be the only one that has them.
pub struct Collector(SyncSender<(Weak<Inner>, Observe)>);

impl Collector {
    /// Starts the thread. It ends with the engine that it is given to, or when this is dropped.
    pub fn start() -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(1);
        std::thread::Builder::new().name("forebay-jobs".into()).spawn(move || wait(&receiver))?;
        Ok(Self(sender))
    }
}

impl Overlay {
    /// Begins to keep jobs, with an observer where this process may have one. Returns at once.
    ///
    /// `opens_unseen`: the kernel does not tell of opens.
    pub fn observe(&self, collector: Collector, wanted: Observe, opens_unseen: bool) {
        let jobs = &self.inner.jobs;
        jobs.opens_unseen.store(opens_unseen, Ordering::Relaxed);
        jobs.starting.store(true, Ordering::Release);
        if collector.0.send((Arc::downgrade(&self.inner), wanted)).is_err() {
            drop(Starting(jobs));
        }
    }
}

fn wait(begin: &Receiver<(Weak<Inner>, Observe)>) {
    if let Ok((inner, wanted)) = begin.recv() {
        keep(&inner, &wanted);
    }
}

/// Who waits for the start waits no longer when this is dropped, however it went.
struct Starting<'a>(&'a Jobs);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let _ = self.0.watch.set(Err("the start of the observer broke off".into()));
        let _ = self.0.settled.set(());
    }
}

fn keep(inner: &Weak<Inner>, wanted: &Observe) {
    let Some(begun) = inner.upgrade() else { return };
    let _ = begun.jobs.collector.set(std::thread::current());
    let starting = Starting(&begun.jobs);
    let mut watch = Watch::start(&begun, wanted);
    capabilities::give_up();
    match &mut watch {
        Ok(watch) => {
            watch.allow_rest();
            tracing::info!("what jobs use is observed by eBPF");
        }
        Err(why) => tracing::info!("what jobs use is known by their requests alone: {why}"),
    }
    let _ = begun.jobs.watch.set(watch);
    if let Err(error) = begun.take_up_jobs() {
        tracing::error!(%error, "jobs of an earlier daemon");
    }
    drop(starting);
    let ring = begun.jobs.watch().and_then(|watch| watch.observer.ring().ok());
    drop(begun);
    let mut look_at = Instant::now() + RECORDS_EVERY;
    let mut wait = RING_WAIT;
    loop {
        match &ring {
            Some(ring) => ring.wait(wait),
            None => std::thread::park_timeout(wait),
        }
        let Some(inner) = inner.upgrade().filter(|inner| !inner.stop.is_cancelled()) else { return };
        if let Some(watch) = inner.jobs.watch() {
            watch.take_touches(&inner);
            inner.rest_or_work(watch);
        }
        let began = Instant::now();
        if began >= look_at {
            inner.collect_uses(RECORDS_EVERY);
            inner.end_jobs_where(End::Orphaned, |head| !head.clients.iter().any(Process::is_alive));
            look_at = Instant::now() + RECORDS_EVERY.max(began.elapsed() * REST);
        }
        // What the kernel forgot changed nothing in the catalog, so that no sync follows it.
        inner.table.give_back();
        wait = inner.jobs.wait();
    }
}

impl Jobs {
    /// How long the collector waits where nothing wakes it.
    fn wait(&self) -> Duration {
        let at_work = self.watch().is_some_and(|watch| watch.observer.is_at_work());
        match (self.any(), at_work) {
            (true, _) => RING_WAIT,
            (false, true) => RECORDS_EVERY,
            (false, false) => IDLE_WAIT,
        }
    }

    /// Has the collector look at once: a job began, or all is to end.
    pub(super) fn wake_keeper(&self) {
        // It waits for the ring where there is one, and else for this.
        if let Some(watch) = self.watch() {
            watch.observer.ring_bell();
        }
        if let Some(collector) = self.collector.get() {
            collector.unpark();
        }
    }
}

impl Inner {
    /// Ends all jobs, for a daemon that ends.
    pub(crate) fn end_jobs(&self) {
        self.end_jobs_where(End::Unseen, |_| true);
        self.jobs.wake_keeper();
    }

    /// Ends jobs before whoever began them says so.
    fn end_jobs_where(&self, end: End, over: impl Fn(&JobHead) -> bool) {
        let numbers: Vec<u32> = {
            let table = self.jobs.table.lock();
            table.running.iter().filter(|(_, running)| over(&running.head)).map(|(number, _)| *number).collect()
        };
        for number in numbers {
            if let Err(error) = self.finish_job(number, end) {
                tracing::error!(%error, "a job's report");
            }
        }
    }

    /// Goes on with the jobs that an earlier daemon did not see the end of.
    fn take_up_jobs(self: &Arc<Self>) -> Result<()> {
        let mut found: Vec<(JobSerial, JobHead)> = Vec::new();
        self.catalog.jobs(|serial, head| {
            if head.summary.ended_unix.is_none() {
                found.push((serial, head));
            }
            Ok(true)
        })?;
        for (serial, mut head) in found {
            head.summary.interrupted = true;
            head.clients.retain(Process::is_alive);
            if head.clients.is_empty() {
                head.summary.ended_unix = Some(unix_now());
                self.catalog.put_job(serial, &mut head, Some(&[]))?;
                continue;
            }
            let alive: Vec<u32> =
                std::mem::take(&mut head.summary.processes).iter().filter(|p| p.is_alive()).map(|p| p.pid).collect();
            let cgroups = std::mem::take(&mut head.summary.cgroups);
            let ids = std::mem::take(&mut head.cgroup_ids);
            head.summary.observer = self.jobs.status().kind;
            head.summary.missing = self.jobs.unseen();
            let number = self.run_job(&mut self.jobs.table.lock(), serial, head);
            self.add_processes(number, &alive);
            cgroups.into_iter().zip(ids).for_each(|(path, id)| self.add_cgroup(number, id, path));
            self.keep_running(number)?;
            self.go_ahead_of(number);
        }
        self.end_leases_left_by(|head| !head.clients.iter().any(Process::is_alive))
    }
}
