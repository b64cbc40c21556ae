//! Jobs: which job used which files, what is learned from it, and what is staged ahead of the next run.
//!
//! Two sources feed the record of a job. The requests that reach the daemon tell of opens, and of what is read and
//! written through the daemon. The observer, where this process may load eBPF programs, sees what the kernel serves by
//! itself. Both sources see reads through the page cache of the mount; these are counted from the observer alone.
//!
//! * requests: opens; writes through the daemon, and which part of the file they change; reads through the daemon that
//!   bypass the page cache; without an observer, all reads through the daemon
//! * observer: every touch of a page: the process, the kind of access, the part of the file, and whether the page had
//!   to be filled
//!
//! | module | does |
//! |---|---|
//! | `lifecycle` | begins, joins and ends jobs; a job lasts as long as a process that began or joined it, or as its allocation |
//! | `attribution` | thread → job: by the tasks of the observer, else by the parents in /proc, else by the cgroup |
//! | `watch` | the places that are observed; inodes of content files → inodes of the overlay; records → bytes |
//! | `accounting` | the files of one job, at most `FILES_MAX`; more files, and those with long paths, count in the sums alone |
//! | `observer_activation` | when the observer is attached |
//! | `collector` | the thread of all jobs |
//! | `shown` | reports for operators |
//! | `allocations` | what a batch job holds: staging, leases, the job, the write-back |
//! | `slurm_steps` | thread → Slurm job, for jobs that begin before their processes |
//! | `advice` | answers to the engine |
//! | `foresight` | profiles, and what is staged ahead of a job or a reader |
//!
//! If no job runs, a request pays for one load of a counter. A caller that asks (`job show`, `top`, the end of a job)
//! gets the counts of that moment. Eviction reads the counts before it chooses, at most once in `EVICTION_LOOKS`: a
//! file whose counts grew was used.
//!
//! If two commands run at the same time under one job name, the second counts as part of the first, and its client is
//! notified.

mod accounting;
mod advice;
mod allocations;
mod attribution;
mod collector;
mod foresight;
mod lifecycle;
mod observer_activation;
mod shown;
mod slurm_steps;
mod watch;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use forebay_api::operator::TypedPath;
use forebay_api::paths;
use forebay_backends::Result;
use forebay_cache::ContentId;
use forebay_catalog::{JobHead, JobSerial};
use forebay_ebpf::NO_JOB;
use forebay_engine::{EndedJob, FileOfJob, Ino, Opened, Overlay, PathTooLong, blocking};
use forebay_policy::JobFacts;
use forebay_system::process::Process;
use futures::FutureExt;
use lru::LruCache;
use parking_lot::Mutex;

use accounting::{Accounting, PATH_BYTES_MAX, PartMap};
use accounting::{FileId, UsedFile};
use advice::Advice;
use allocations::Allocations;
use attribution::Attribution;
pub use collector::Collector;
pub use forebay_api::foresight::{AheadReport, Explanation, PlannedFile, ProfileSummary, ReaderJob};
pub use forebay_api::jobs::{
    JobFile, JobRequest, JobSample, JobSummary, Members, ObserverKind, ObserverStatus, Sample, Traffic, UsedParts,
    check_id,
};
use foresight::Foresight;
use lifecycle::JobEnd;
pub use watch::WatchOptions;
use watch::{TrafficUpdate, Watch};

/// Number of content files, the most recently opened ones, whose inode is remembered: a record may be read after the
/// content file is gone.
const CONTENTS_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add((16 << 10) - 1);
/// A caller that asks again within this time gets the counts of the first time.
const FRESH: Duration = Duration::from_millis(100);
/// Eviction reads the counts no more often than this.
const EVICTION_LOOKS: Duration = Duration::from_secs(1);

/// What is not seen if requests are the only source.
const MISSING: &str = "what the kernel reads and writes without the daemon: resident files, and the page cache";
const MISSING_LOST: &str = "uses of files for which the observer's tables in the kernel had no room";
const MISSING_OPENS: &str = "opens: the kernel opens the files of an immutable mount by itself";

/// The jobs of a mount.
struct Registry {
    /// The number of running jobs, which a request reads first.
    running: AtomicU32,
    table: Mutex<JobTable>,
    attribution: Attribution,
    /// Held while a step of a Slurm job is added to its job.
    adopting: Mutex<()>,
    /// Held while the head of a job is written to the catalog, so that an older one never replaces the last one. Comes
    /// before `table`.
    recording: Mutex<()>,
    contents: Mutex<LruCache<ContentId, Ino>>,
    /// Bytes that a job's opens fetched from the pool, and that the observer has not seen read yet.
    fetched: Mutex<LruCache<(u32, Ino), u64>>,
    /// The collector is about to set `watch`, and then `settled`.
    starting: AtomicBool,
    /// The observer, or why there is none.
    watch: OnceLock<std::result::Result<Watch, String>>,
    /// The collector's thread.
    collector: OnceLock<std::thread::Thread>,
    /// Set once the jobs of an earlier daemon are taken over.
    settled: OnceLock<()>,
    /// The kernel sends no OPEN requests.
    opens_unseen: AtomicBool,
    since: Instant,
}

#[derive(Default)]
struct JobTable {
    running: BTreeMap<u32, Running>,
    last_number: u32,
    last_serial: JobSerial,
    /// Traffic that belongs to no job.
    others: Traffic,
}

struct Running {
    serial: JobSerial,
    head: JobHead,
    uses: Accounting,
    /// One of its clients has said that the job is over.
    is_over: bool,
    /// It is being finished: a client that comes now begins another job of its name.
    is_ending: bool,
    /// How it ended, if its report could not be recorded: that is tried again.
    unrecorded: Option<JobEnd>,
    /// Set at its end if its processes go on all the same: they need the files that never go to the pool.
    goes_on: Arc<AtomicBool>,
    /// The uses that the observer had lost before the job began.
    lost_before: u64,
}

impl Running {
    /// Returns whether a client of a job of this name can join it.
    fn is_joined_as(&self, id: &str) -> bool {
        !self.is_ending && self.head.summary.id == id
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            running: AtomicU32::new(0),
            table: Mutex::default(),
            attribution: Attribution::default(),
            adopting: Mutex::default(),
            recording: Mutex::default(),
            contents: Mutex::new(LruCache::new(CONTENTS_MAX)),
            fetched: Mutex::new(LruCache::new(CONTENTS_MAX)),
            starting: AtomicBool::new(false),
            watch: OnceLock::new(),
            collector: OnceLock::new(),
            settled: OnceLock::new(),
            opens_unseen: AtomicBool::new(false),
            since: Instant::now(),
        }
    }
}

impl Registry {
    fn watch(&self) -> Option<&Watch> {
        self.watch.get()?.as_ref().ok()
    }

    /// Waits until jobs can begin and end: some tenths of a second at the start of a daemon.
    fn wait_until_settled(&self) {
        if self.starting.load(Ordering::Acquire) {
            self.settled.wait();
        }
    }

    /// Returns the number of the running job of this name.
    pub fn number_of(&self, id: &str) -> Option<u32> {
        let table = self.table.lock();
        table.running.iter().find(|(_, running)| running.is_joined_as(id)).map(|(number, _)| *number)
    }

    /// Returns whether a job of this name runs and is held by an allocation.
    pub fn is_held(&self, id: &str) -> bool {
        let table = self.table.lock();
        table.running.values().any(|running| running.is_joined_as(id) && running.head.is_held)
    }

    /// Returns whether the job with this serial is in the table.
    fn has(&self, serial: JobSerial) -> bool {
        self.table.lock().running.values().any(|running| running.serial == serial)
    }

    /// Returns the user of the running job of this name.
    fn user_of(&self, id: &str) -> Option<u32> {
        let table = self.table.lock();
        let job = table.running.values().find(|running| running.head.summary.id == id);
        job.map(|running| running.head.summary.uid)
    }

    /// Returns whether a job of this name runs, and is not being finished.
    pub fn runs(&self, id: &str) -> bool {
        self.number_of(id).is_some()
    }

    /// Returns the running jobs that use a file.
    fn jobs_of(&self, ino: Ino) -> Vec<JobFacts> {
        if !self.any() {
            return Vec::new();
        }
        let table = self.table.lock();
        let runs_with =
            |running: &&Running| running.unrecorded.is_none() && running.uses.has_used(&FileId::Overlay(ino));
        let users = table.running.values().filter(runs_with);
        users
            .map(|running| JobFacts {
                name: running.head.summary.id.clone(),
                profile: running.head.invocation.as_ref().map(|invocation| invocation.signature().to_string()),
            })
            .collect()
    }

    fn any(&self) -> bool {
        self.running.load(Ordering::Relaxed) > 0
    }

    /// Returns the inode whose content file this was at its last open.
    fn content_of(&self, id: ContentId) -> Option<Ino> {
        self.contents.lock().get(&id).copied()
    }

    /// Takes up to `bytes` of the bytes that a job's opens of a file fetched from the pool. Returns how many it took.
    fn take_fetched(&self, job: u32, ino: Ino, bytes: u64) -> u64 {
        let mut fetched = self.fetched.lock();
        let Some(left) = fetched.get_mut(&(job, ino)) else { return 0 };
        let taken = bytes.min(*left);
        *left -= taken;
        if *left == 0 {
            fetched.pop(&(job, ino));
        }
        taken
    }

    /// Returns the job of a thread whose request is being answered.
    fn job_of(&self, thread: u32, adopts: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        let observed = |process| self.watch().and_then(|watch| watch.observer.job_of(process));
        let claims = |pid| {
            let is_member = |running: &Running| {
                let members = &running.head.summary.processes;
                members.iter().any(|member| member.pid == pid && *member == Process::of(pid))
            };
            let member = || self.table.lock().running.iter().find(|(_, r)| is_member(r)).map(|(number, _)| *number);
            observed(pid).or_else(member)
        };
        let claims_cgroup = |cgroup: &str| {
            let holds = |running: &Running| {
                running.head.summary.cgroups.iter().any(|ancestor| attribution::is_within(cgroup, ancestor))
            };
            self.table.lock().running.iter().find(|(_, running)| holds(running)).map(|(number, _)| *number)
        };
        self.attribution.job_of(thread, claims, claims_cgroup, adopts)
    }

    /// Returns whether data may be staged ahead of a reader: false for a job that was begun without prefetch.
    pub fn may_be_helped(&self, job: Option<u32>) -> bool {
        let table = self.table.lock();
        let head = job.and_then(|job| table.running.get(&job)).map(|running| &running.head);
        head.is_none_or(|head| head.prefetch || head.invocation.is_none())
    }

    pub fn status(&self) -> ObserverStatus {
        let requests = |why: &str| ObserverStatus {
            why: Some(why.to_owned()),
            missing: self.unseen(),
            ..ObserverStatus::default()
        };
        match self.watch.get() {
            None if self.starting.load(Ordering::Acquire) => requests("the observer is being started"),
            None => requests("no observer was requested"),
            Some(Err(why)) => requests(why),
            Some(Ok(watch)) => {
                if let Some(why) = watch.failure() {
                    return requests(&why);
                }
                let dropped = watch.observer.dropped();
                ObserverStatus {
                    kind: ObserverKind::Ebpf,
                    why: None,
                    rests: !watch.observer.is_at_work(),
                    missing: self.unseen(),
                    dropped_uses: dropped.touches,
                    dropped_paths: dropped.paths,
                    dropped_processes: dropped.processes,
                }
            }
        }
    }

    /// Returns how many uses the observer has lost since it started: each may be of any job.
    fn lost_uses(&self) -> u64 {
        let dropped = self.watch().map(|watch| watch.observer.dropped());
        dropped.map_or(0, |dropped| dropped.touches.saturating_add(dropped.processes))
    }

    fn misses_reads(&self) -> bool {
        self.seeing().is_none_or(Watch::misses_reads)
    }

    fn unseen(&self) -> Vec<String> {
        let mut missing = self.seeing().map_or_else(|| vec![MISSING.to_owned()], Watch::missing);
        if self.opens_unseen.load(Ordering::Relaxed) {
            missing.push(MISSING_OPENS.to_owned());
        }
        missing
    }
}

/// The jobs of a mount. All clones share one state.
#[derive(Clone)]
pub struct Jobs {
    inner: Arc<JobsInner>,
}

struct JobsInner {
    engine: Overlay,
    registry: Registry,
    foresight: Foresight,
    allocations: Allocations,
}

impl Jobs {
    /// Begins to track the jobs of an engine, and to predict what readers open next. Needs a tokio runtime.
    pub fn start(engine: Overlay) -> Self {
        let inner = Arc::new(JobsInner {
            engine,
            registry: Registry::default(),
            foresight: Foresight::new(),
            allocations: Allocations::default(),
        });
        inner.engine.set_advisor(Arc::new(Advice(Arc::downgrade(&inner))));
        if inner.engine.policy().prefetch.online {
            let stop = inner.engine.stop().clone();
            let follow = inner.clone().follow_readers();
            tokio::spawn(async move { stop.run_until_cancelled(follow).await }.boxed());
        }
        Self { inner }
    }

    /// Saves what all jobs used until now, and shuts the engine down. The jobs go on in the next daemon, which ends those
    /// whose clients are gone by then.
    pub async fn shutdown(&self) -> Result<()> {
        let inner = self.inner.clone();
        inner.engine.stop().cancel();
        let saved = blocking(move || {
            inner.leave_jobs();
            Ok(())
        })
        .await;
        self.inner.engine.shutdown().await.and(saved)
    }

    /// Registers a job, or joins a running one. It runs as long as one of its clients lives.
    ///
    /// # Errors
    /// `InvalidInput` if the name is not allowed; `NotFound` if a process does not exist; `Busy` if too many jobs run.
    pub async fn begin_job(&self, request: JobRequest, client: Process, uid: u32) -> Result<JobSummary> {
        let inner = self.inner.clone();
        blocking(move || inner.begin_job(request, Some(client), uid)).await
    }

    /// Removes a client from a job. With the last client the job is over, or with `goes_on` the job only stops being
    /// observed. Returns `None` if no such job runs.
    pub async fn end_job(&self, id: String, client: Process, goes_on: bool) -> Result<Option<JobSummary>> {
        let inner = self.inner.clone();
        blocking(move || inner.end_job(&id, client, goes_on)).await
    }

    /// Returns all known jobs, the oldest first.
    pub async fn jobs(&self) -> Result<Vec<JobSummary>> {
        let inner = self.inner.clone();
        blocking(move || inner.all_jobs()).await
    }

    /// Returns the newest job of a name, with its files. `None`: there is none.
    pub async fn job(&self, id: String) -> Result<Option<(JobSummary, Vec<JobFile>)>> {
        let inner = self.inner.clone();
        blocking(move || inner.job(&id)).await
    }

    /// Returns all counts so far, for a caller that will ask again after this time.
    pub async fn sample_jobs(&self, interval: Duration) -> Result<Sample> {
        let inner = self.inner.clone();
        blocking(move || Ok(inner.sample_jobs(interval))).await
    }

    /// Returns the job of a thread. If no job runs, this is one load.
    pub fn job_of(&self, thread: u32) -> Option<u32> {
        let jobs = &self.inner.registry;
        if jobs.any() { jobs.job_of(thread, |thread| self.inner.adopt_step(thread)) } else { None }
    }

    /// Counts an open of a file by a job.
    pub fn note_open(&self, job: Option<u32>, ino: Ino, opened: &Opened) {
        self.note_opened(job, ino, opened, false);
    }

    /// Counts that a job made a file, and opened it.
    pub fn note_create(&self, job: Option<u32>, ino: Ino, opened: &Opened) {
        self.note_opened(job, ino, opened, true);
    }

    fn note_opened(&self, job: Option<u32>, ino: Ino, opened: &Opened, is_made: bool) {
        if let (true, Some(content)) = (self.inner.registry.any(), &opened.resident) {
            self.inner.registry.contents.lock().put(ContentId(content.id), ino);
            if let (Some(job), true) = (job, opened.fetched_bytes > 0) {
                let mut fetched = self.inner.registry.fetched.lock();
                *fetched.get_or_insert_mut((job, ino), || 0) += opened.fetched_bytes;
            }
        }
        let traffic = Traffic { opens: 1, ..Traffic::default() };
        self.note_use(job, ino, traffic, PartMap::default(), is_made);
    }

    /// Counts a read through the daemon. `cached`: the read goes through the page cache, where the observer sees it.
    pub fn note_read(&self, job: Option<u32>, ino: Ino, read: Range<u64>, cached: bool) {
        if !(cached && self.inner.registry.watch().is_some_and(|watch| watch.observer.is_at_work())) {
            let bytes = read.end - read.start;
            let traffic = Traffic { read_bytes: bytes, pool_bytes: bytes, ..Traffic::default() };
            self.note(job, ino, traffic, PartMap::of_read(read));
        }
    }

    /// Counts a write through the daemon.
    pub fn note_write(&self, job: Option<u32>, ino: Ino, written: Range<u64>) {
        let traffic = Traffic { written_bytes: written.end - written.start, ..Traffic::default() };
        self.note(job, ino, traffic, PartMap::of_write(written));
    }

    /// Counts a copy between two content files that the daemon made for a job.
    pub fn note_copy(&self, job: Option<u32>, (from, read): (Ino, Range<u64>), (to, written): (Ino, Range<u64>)) {
        let bytes = read.end - read.start;
        let traffic = Traffic { read_bytes: bytes, fast_bytes: bytes, ..Traffic::default() };
        self.note(job, from, traffic, PartMap::of_read(read));
        self.note_write(job, to, written);
    }

    fn note(&self, job: Option<u32>, ino: Ino, traffic: Traffic, parts: PartMap) {
        self.note_use(job, ino, traffic, parts, false);
    }

    fn note_use(&self, job: Option<u32>, ino: Ino, traffic: Traffic, parts: PartMap, is_made: bool) {
        let Some(job) = job else { return };
        let counted = TrafficUpdate {
            job,
            file: FileId::Overlay(ino),
            path: None,
            first_ns: monotonic_ns(),
            old: Traffic::default(),
            new: traffic,
            parts,
            is_made,
        };
        self.inner.count_use(counted);
    }
}

impl JobsInner {
    /// Collects what the observer saw, unless that was done less than `age` ago, into the records of jobs and the order
    /// of eviction.
    fn collect_uses(&self, age: Duration) {
        let Some(watch) = self.registry.watch() else { return };
        let mut read = Vec::new();
        watch.collect(self, age, |counted| {
            if let (FileId::Overlay(ino), true) = (&counted.file, counted.new.read_bytes > counted.old.read_bytes) {
                read.push(*ino);
            }
            self.count_use(counted);
        });
        self.engine.note_uses(read);
    }

    fn count_use(&self, counted: TrafficUpdate) {
        let is_change = counted.is_change();
        let TrafficUpdate { job, file, path, first_ns, old, new, parts, is_made } = counted;
        if job == NO_JOB {
            return self.registry.table.lock().others.replace(&old, &new);
        }
        let (needs_path, first_of) = {
            let table = self.registry.table.lock();
            let Some(running) = table.running.get(&job) else { return };
            let uses = &running.uses;
            let is_first = uses.counts_as_new(&file) || (is_change && uses.counts_as_changed(&file));
            let first_of = || (running.serial, running.head.summary.uid, running.goes_on.clone());
            (uses.needs_path(&file), is_first.then(first_of))
        };
        let of_job = match &file {
            FileId::Overlay(ino) => Some(FileOfJob { ino: *ino, is_changed: is_change }),
            FileId::Pool(_) => None,
        };
        if let (Some((serial, ..)), Some(file)) = (&first_of, of_job) {
            self.note_local_file(*serial, file);
        }
        // A file whose path is too long to be reported has none here.
        let now = if needs_path { self.path_now(&file).ok() } else { None };
        let path = now.map(|now| now.or(path).unwrap_or_default());
        let has_ended = match self.registry.table.lock().running.get_mut(&job) {
            Some(running) => {
                running.uses.count(&file, first_ns, path, &old, &new, &parts);
                if is_made {
                    running.uses.note_changed(&file);
                }
                false
            }
            None => true,
        };
        // The end of the job did not see the file.
        if let (true, Some((serial, user, goes_on)), Some(file)) = (has_ended, first_of, of_job) {
            let ended = EndedJob { user: Some(user), files: vec![file] };
            self.settle_files(serial, ended, goes_on.load(Ordering::Acquire));
        }
    }

    /// Returns the present path of a file. `None`: it has no name any more.
    ///
    /// # Errors
    /// The path is too long to be reported.
    fn path_now(&self, file: &FileId) -> std::result::Result<Option<TypedPath>, PathTooLong> {
        let path = match file {
            FileId::Overlay(ino) => {
                let path = self.engine.path_within(*ino, PATH_BYTES_MAX)?;
                path.map(|path| paths::encode(path.as_bytes()))
            }
            FileId::Pool(path) => Some(path.clone()),
        };
        if path.as_ref().is_some_and(|path| path.len() > PATH_BYTES_MAX) { Err(PathTooLong) } else { Ok(path) }
    }
}

/// Returns the time on the clock with which the observer stamps first touches.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
