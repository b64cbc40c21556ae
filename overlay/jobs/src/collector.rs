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
use forebay_catalog::{JobHead, JobSerial};
use forebay_system::capabilities;
use forebay_system::clock::unix_now;
use forebay_system::process::Process;

use super::lifecycle::End;
use super::watch::{Observe, Watch};
use super::{Inner, Jobs, Registry};

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

impl Jobs {
    /// Begins to keep jobs, with an observer where this process may have one. Returns at once.
    ///
    /// `opens_unseen`: the kernel does not tell of opens.
    pub fn observe(&self, collector: Collector, wanted: Observe, opens_unseen: bool) {
        let jobs = &self.inner.registry;
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
struct Starting<'a>(&'a Registry);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let _ = self.0.watch.set(Err("the start of the observer broke off".into()));
        let _ = self.0.settled.set(());
    }
}

fn keep(inner: &Weak<Inner>, wanted: &Observe) {
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
        Err(why) => tracing::info!("what jobs use is known by their requests alone: {why}"),
    }
    let _ = begun.registry.watch.set(watch);
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
            inner.end_jobs_where(End::Orphaned, |head| !head.clients.iter().any(Process::is_alive));
            look_at = Instant::now() + RECORDS_EVERY.max(began.elapsed() * REST);
        }
        // What the kernel forgot changed nothing in the catalog, so that no sync follows it.
        inner.engine.give_back_memory();
        wait = inner.registry.wait();
    }
}

impl Registry {
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
        self.registry.wake_keeper();
    }

    /// Ends jobs before whoever began them says so.
    fn end_jobs_where(&self, end: End, over: impl Fn(&JobHead) -> bool) {
        let numbers: Vec<u32> = {
            let table = self.registry.table.lock();
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
        self.engine.catalog().jobs(|serial, head| {
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
                self.engine.catalog().put_job(serial, &mut head, Some(&[]))?;
                continue;
            }
            let alive: Vec<u32> =
                std::mem::take(&mut head.summary.processes).iter().filter(|p| p.is_alive()).map(|p| p.pid).collect();
            let cgroups = std::mem::take(&mut head.summary.cgroups);
            let ids = std::mem::take(&mut head.cgroup_ids);
            head.summary.observer = self.registry.status().kind;
            head.summary.missing = self.registry.unseen();
            head.summary.reads_unseen = self.registry.misses_reads();
            let number = self.run_job(&mut self.registry.table.lock(), serial, head);
            self.add_processes(number, &alive);
            cgroups.into_iter().zip(ids).for_each(|(path, id)| self.add_cgroup(number, id, path));
            self.keep_running(number)?;
            self.go_ahead_of(number);
        }
        self.end_leases_left_by(|head| !head.clients.iter().any(Process::is_alive))
    }
}
