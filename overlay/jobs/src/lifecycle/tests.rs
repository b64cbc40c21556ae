//! Jobs on an engine whose pool is in memory, without an observer.

use std::process::{Child, Command};
use std::time::Instant;

use forebay_api::allocations::{AllocationPhase, AllocationRequest, AllocationVerb};
use forebay_api::operator::StageRequest;
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Attrs, Expected, Piece, Pool, PoolPath, Time};
use forebay_engine::{Caller, Lookup, Opened, Options, Overlay, Policy, TestOptions, WriteFaults, content_io, summary};
use forebay_policy::JobFacts;
use forebay_prefetch::signature::Invocation;

use super::*;
use crate::accounting::{PartMap, UsedFile};

mod earlier;

const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };
const RULES: &str = "[default]\nflush = \"manual\"\n[[rule]]\npaths = \"tmp*\"\nwrite = \"local\"\n";
const RDWR: i32 = rustix::fs::OFlags::RDWR.bits() as i32;
pub(crate) const WAIT: Duration = Duration::from_secs(60);
const LIMIT_BYTES: u64 = 1 << 30;

pub(crate) struct Daemon {
    pool: Arc<MemoryPool>,
    fast: tempfile::TempDir,
    pub(crate) jobs: Jobs,
    faults: WriteFaults,
}

/// The fast pool of a daemon that has just died may be in use for a moment.
async fn engine(pool: &Arc<MemoryPool>, fast: &tempfile::TempDir, limit_bytes: u64, faults: &WriteFaults) -> Overlay {
    let begun = Instant::now();
    loop {
        let options = Options {
            pool: pool.clone(),
            fast: vec![fast.path().to_owned()],
            limit_bytes: Some(limit_bytes),
            policy: Policy::parse(RULES).unwrap(),
            memory_bytes: 16 << 20,
            content_io: content_io::Choice::Plain,
            read_only: false,
            node: "here".into(),
            reattached: false,
            other_root: Default::default(),
            for_tests: TestOptions { catalog_faults: faults.clone(), ..TestOptions::default() },
        };
        match Overlay::open(options).await {
            Err(error) if error.is(ErrorKind::Busy) && begun.elapsed() < WAIT => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            opened => return opened.unwrap(),
        }
    }
}

impl Daemon {
    pub(crate) async fn start() -> Self {
        Self::limited(LIMIT_BYTES).await
    }

    /// A daemon whose fast pool has so many bytes.
    pub(crate) async fn limited(limit_bytes: u64) -> Self {
        let (pool, fast) = (Arc::new(MemoryPool::new()), tempfile::tempdir().unwrap());
        let faults = WriteFaults::default();
        let jobs = Jobs::start(engine(&pool, &fast, limit_bytes, &faults).await);
        Self { pool, fast, jobs, faults }
    }

    /// Another daemon takes over. The first one ends no job.
    async fn dies(self) -> Self {
        self.jobs.inner.engine.stop().cancel();
        self.jobs.inner.engine.shutdown().await.unwrap();
        self.followed_by_next().await
    }

    /// The mount is unmounted and mounted again.
    async fn ends(self) -> Self {
        self.jobs.shutdown().await.unwrap();
        self.followed_by_next().await
    }

    async fn followed_by_next(self) -> Self {
        let daemon = self.replaced_by_next().await;
        daemon.jobs.inner.take_up_jobs().unwrap();
        daemon
    }

    /// The next daemon begins to answer requests, and has no observer yet.
    async fn replaced_by_next(self) -> Self {
        let Self { pool, fast, jobs, faults } = self;
        drop(jobs);
        let jobs = Jobs::start(engine(&pool, &fast, LIMIT_BYTES, &faults).await);
        jobs.go_on();
        Self { pool, fast, jobs, faults }
    }

    /// Waits until all jobs that have ended are done with their files.
    async fn until_settled(&self) {
        let begun = Instant::now();
        while !self.jobs.inner.engine.catalog().local_files().unwrap().is_empty() {
            assert!(begun.elapsed() < WAIT, "the catalog keeps what was decided");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Another client makes the file `a` in the pool. Returns its inode.
    async fn make_in_pool(&self) -> Ino {
        self.put("a", b"content".to_vec()).await
    }

    /// Another client makes or replaces a file in the pool. Returns its inode.
    pub(crate) async fn put(&self, name: &str, content: Vec<u8>) -> Ino {
        let attrs = Attrs { mode: 0o644, uid: 0, gid: 0, atime: Time::now(), mtime: Time::now(), xattrs: Vec::new() };
        let (path, size) = (PoolPath::parse(name).unwrap(), content.len() as u64);
        let pieces = Box::pin(futures::stream::iter([Ok(Piece { offset: 0, data: content.into() })]));
        self.pool.put(&path, size, pieces, &attrs, &Expected::Anything).await.unwrap();
        self.jobs.inner.engine.resolve(&path).await.unwrap()
    }

    fn number_of(&self, id: &str) -> u32 {
        self.jobs.inner.registry.number_of(id).unwrap()
    }

    /// A job of root makes a file.
    async fn make(&self, id: &str, name: &str) -> Ino {
        let ino = self.make_as(CALLER.uid, name).await;
        self.jobs.note_write(Some(self.number_of(id)), ino, 0..1);
        ino
    }

    /// A user makes a file outside of all jobs.
    async fn make_as(&self, uid: u32, name: &str) -> Ino {
        self.make_in(Ino::ROOT, uid, name).await
    }

    async fn make_in(&self, dir: Ino, uid: u32, name: &str) -> Ino {
        let caller = Caller { uid, gid: uid, pid: 1 };
        let made = self.jobs.inner.engine.create(dir, name.as_bytes(), 0o644, 0, RDWR, caller).await;
        let ino = made.unwrap().0.attr.ino;
        self.jobs.inner.engine.close(ino, true).await.unwrap();
        self.jobs.inner.engine.release(ino, RDWR);
        ino
    }

    /// A job reads a file through the daemon.
    fn read_by(&self, id: &str, ino: Ino) {
        self.jobs.note_read(Some(self.number_of(id)), ino, 0..1, false);
    }

    async fn has(&self, name: &str) -> bool {
        matches!(self.jobs.inner.engine.lookup(Ino::ROOT, name.as_bytes()).await.unwrap(), Lookup::Found(_))
    }

    async fn until_gone(&self, name: &str) {
        let begun = Instant::now();
        while self.has(name).await {
            assert!(begun.elapsed() < WAIT, "{name} is still there");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn leased_bytes(&self) -> u64 {
        self.jobs.inner.engine.status().await.leased_bytes
    }
}

fn request(id: &str) -> JobRequest {
    JobRequest {
        id: id.into(),
        command: String::new(),
        invocation: None,
        prefetch: false,
        ends_leases: true,
        members: Members::Processes(Vec::new()),
    }
}

/// An open through the daemon.
fn opened() -> Opened {
    Opened { resident: None, pages: Default::default(), no_flush: true, missed: false, fetched_bytes: 0 }
}

fn client() -> Child {
    Command::new("/bin/sleep").arg("600").spawn().unwrap()
}

fn end(mut client: Child) {
    client.kill().unwrap();
    client.wait().unwrap();
}

fn myself() -> Process {
    Process::of(std::process::id())
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner."
#[tokio::test(flavor = "multi_thread")]
async fn a_local_file_that_a_job_made_before_its_daemon_died_is_removed_with_the_job() {
    let daemon = Daemon::start().await;
    let (dead, other) = (client(), client());
    let orphan = Process::of(dead.id());
    daemon.jobs.begin_job(request("goes-on"), myself(), 0).await.unwrap();
    daemon.jobs.begin_job(request("orphan"), orphan, 0).await.unwrap();
    daemon.jobs.begin_job(request("other"), Process::of(other.id()), 0).await.unwrap();
    daemon.make("goes-on", "tmp-1").await;
    daemon.make("orphan", "tmp-2").await;
    daemon.make("goes-on", "result").await;
    let shared = daemon.make("orphan", "tmp-shared").await;
    daemon.jobs.note_write(Some(daemon.number_of("other")), shared, 0..1);
    end(dead);
    let daemon = daemon.dies().await;
    daemon.until_gone("tmp-2").await;
    assert!(daemon.has("tmp-1").await && daemon.has("tmp-shared").await, "jobs that run use them");
    daemon.make("goes-on", "tmp-3").await;
    for name in ["goes-on", "other"] {
        let client = if name == "other" { Process::of(other.id()) } else { myself() };
        daemon.jobs.end_job(name.into(), client, false).await.unwrap();
    }
    for name in ["tmp-1", "tmp-3", "tmp-shared"] {
        daemon.until_gone(name).await;
    }
    assert!(daemon.has("result").await);
    daemon.until_settled().await;
    end(other);
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner." `observe` that is interrupted ends no job.
#[tokio::test(flavor = "multi_thread")]
async fn a_local_file_of_a_job_that_goes_on_unobserved_stays() {
    let daemon = Daemon::start().await;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    daemon.make("j", "tmp-1").await;
    daemon.jobs.end_job("j".into(), myself(), true).await.unwrap();
    daemon.until_settled().await;
    assert!(daemon.has("tmp-1").await, "the job goes on");
    let daemon = daemon.dies().await;
    daemon.until_settled().await;
    assert!(daemon.has("tmp-1").await);
}

/// The process that observed a job was killed, or ended while there was no mount.
#[tokio::test(flavor = "multi_thread")]
async fn a_local_file_of_processes_that_outlive_their_observer_stays() {
    for meets_daemon in [true, false] {
        let daemon = Daemon::start().await;
        let (observer, observed) = (client(), client());
        let begun = JobRequest { members: Members::Processes(vec![observed.id()]), ..request("j") };
        daemon.jobs.begin_job(begun, Process::of(observer.id()), 0).await.unwrap();
        daemon.make("j", "tmp-1").await;
        end(observer);
        let daemon = if meets_daemon {
            daemon.jobs.inner.finish_job(daemon.number_of("j"), JobEnd::Orphaned).unwrap();
            daemon
        } else {
            daemon.ends().await
        };
        daemon.until_settled().await;
        assert!(daemon.has("tmp-1").await);
        assert!(!daemon.jobs.inner.registry.runs("j"));
        end(observed);
    }
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner." An unmount ends no job.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_and_its_local_files_outlive_an_unmount() {
    let daemon = Daemon::start().await;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    daemon.make("j", "tmp-1").await;
    let daemon = daemon.ends().await;
    assert!(daemon.jobs.inner.registry.runs("j") && daemon.has("tmp-1").await);
    let ended = daemon.jobs.end_job("j".into(), myself(), false).await.unwrap();
    assert!(ended.is_some_and(|job| job.interrupted));
    daemon.until_gone("tmp-1").await;
}

/// SEMANTICS 85: "It is removed when the last job that used it ends, if one of these jobs made or wrote it, or belongs to its
/// owner." So does the next daemon.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_removes_no_local_file_of_another_user_that_it_only_read() {
    const OWNER: u32 = 1000;
    const READER: u32 = 2000;
    for dies in [false, true] {
        let daemon = Daemon::start().await;
        let client = client();
        daemon.jobs.begin_job(request("j"), Process::of(client.id()), READER).await.unwrap();
        let number = Some(daemon.number_of("j"));
        for (owner, name) in [(OWNER, "tmp-read"), (OWNER, "tmp-written"), (OWNER, "tmp-made"), (READER, "tmp-own")] {
            let ino = daemon.make_as(owner, name).await;
            daemon.read_by("j", ino);
            match name {
                "tmp-written" => daemon.jobs.note_write(number, ino, 0..1),
                "tmp-made" => daemon.jobs.note_create(number, ino, &opened()),
                _ => {}
            }
        }
        let daemon = if dies {
            end(client);
            daemon.dies().await
        } else {
            daemon.jobs.end_job("j".into(), Process::of(client.id()), false).await.unwrap();
            end(client);
            daemon
        };
        daemon.until_settled().await;
        for (name, stays) in [("tmp-read", true), ("tmp-written", false), ("tmp-made", false), ("tmp-own", false)] {
            assert_eq!(daemon.has(name).await, stays, "{name}");
        }
    }
}

/// The job that could remove the file ended before one that only read it.
#[tokio::test(flavor = "multi_thread")]
async fn a_local_file_that_a_job_of_another_user_still_reads_is_removed_with_that_job() {
    for dies in [false, true] {
        let mut daemon = Daemon::start().await;
        daemon.jobs.begin_job(request("makes"), myself(), 0).await.unwrap();
        daemon.jobs.begin_job(request("reads"), myself(), 2000).await.unwrap();
        let ino = daemon.make("makes", "tmp-1").await;
        daemon.read_by("reads", ino);
        daemon.jobs.end_job("makes".into(), myself(), false).await.unwrap();
        let begun = Instant::now();
        while daemon.jobs.inner.engine.catalog().local_files().unwrap().len() > 1 {
            assert!(begun.elapsed() < WAIT, "the end of the job is not settled");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(daemon.has("tmp-1").await, "it is read");
        if dies {
            daemon = daemon.dies().await;
        }
        daemon.jobs.end_job("reads".into(), myself(), false).await.unwrap();
        daemon.until_gone("tmp-1").await;
    }
}

/// A job with more files than are counted may use any file.
#[tokio::test(flavor = "multi_thread")]
async fn no_local_file_is_removed_while_a_job_runs_whose_files_are_not_all_known() {
    let daemon = Daemon::start().await;
    for id in ["large", "short"] {
        daemon.jobs.begin_job(request(id), myself(), 0).await.unwrap();
    }
    {
        let number = daemon.number_of("large");
        let mut table = daemon.jobs.inner.registry.table.lock();
        let uses = &mut table.running.get_mut(&number).unwrap().uses;
        let (none, parts) = (Traffic::default(), PartMap::default());
        for at in 0..crate::accounting::FILES_KNOWN as u64 {
            uses.count(&crate::FileId::Overlay(Ino(1_000_000 + at)), at, Some(String::new()), &none, &none, &parts);
        }
    }
    let ino = daemon.make("large", "tmp-1").await;
    daemon.jobs.note_write(Some(daemon.number_of("short")), ino, 0..1);
    daemon.jobs.end_job("short".into(), myself(), false).await.unwrap();
    let begun = Instant::now();
    let is_left = || daemon.jobs.inner.registry.jobs_of(ino).len() == 1;
    while daemon.has("tmp-1").await && !is_left() {
        assert!(begun.elapsed() < WAIT, "the end of the job is not settled");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(daemon.has("tmp-1").await, "the large job may use it");
    daemon.jobs.end_job("large".into(), myself(), false).await.unwrap();
    daemon.until_gone("tmp-1").await;
}

/// A path through nested directories may have half a MiB, and a job may use any number of such files.
#[tokio::test(flavor = "multi_thread")]
async fn files_with_very_long_paths_are_counted_without_their_paths() {
    const DEPTH: usize = 20;
    const FILES: u64 = 10;
    let daemon = Daemon::start().await;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    daemon.make("j", "short").await;
    let mut dir = Ino::ROOT;
    for _ in 0..DEPTH {
        let name = "d".repeat(255);
        dir = daemon.jobs.inner.engine.mkdir(dir, name.as_bytes(), 0o755, 0, CALLER).await.unwrap().attr.ino;
    }
    let number = Some(daemon.number_of("j"));
    for at in 0..FILES {
        let ino = daemon.make_in(dir, CALLER.uid, &at.to_string()).await;
        daemon.jobs.note_write(number, ino, 0..1);
        daemon.jobs.note_write(number, ino, 1..2);
    }
    let ended = daemon.jobs.end_job("j".into(), myself(), false).await.unwrap().unwrap();
    assert_eq!((ended.file_count, ended.omitted_files, ended.traffic.written_bytes), (1, FILES, 1 + 2 * FILES));
    let (_, files) = daemon.jobs.job("j".into()).await.unwrap().unwrap();
    assert_eq!(files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["short"]);
}

/// A daemon that replaces a dead one answers requests before it has an observer.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_job_uses_before_the_next_daemon_has_an_observer_counts_for_it() {
    let daemon = Daemon::start().await;
    let own = std::process::id();
    let begun = JobRequest { members: Members::Processes(vec![own]), ..request("j") };
    daemon.jobs.begin_job(begun, myself(), 0).await.unwrap();
    daemon.jobs.inner.engine.stop().cancel();
    daemon.jobs.inner.engine.shutdown().await.unwrap();
    let daemon = daemon.replaced_by_next().await;
    let (job, ino) = (daemon.jobs.job_of(own), daemon.make_as(CALLER.uid, "tmp-1").await);
    assert_eq!(job, daemon.jobs.inner.registry.number_of("j"));
    daemon.jobs.note_write(job, ino, 0..1);
    daemon.jobs.inner.take_up_jobs().unwrap();
    assert_eq!(daemon.jobs.inner.registry.table.lock().running.len(), 1, "it is one job");
    let ended = daemon.jobs.end_job("j".into(), myself(), false).await.unwrap().unwrap();
    assert_eq!((ended.traffic.written_bytes, ended.interrupted), (1, true));
    assert_eq!(ended.processes.iter().filter(|process| **process == myself()).count(), 1);
    daemon.until_gone("tmp-1").await;
}

/// What a job used is not lost if the catalog has no room for its report at its end.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_job_that_cannot_be_recorded_is_recorded_later() {
    for goes_on in [false, true] {
        let daemon = Daemon::start().await;
        daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
        daemon.make("j", "tmp-1").await;
        let files = async || {
            let (job, files) = daemon.jobs.job("j".into()).await.unwrap().unwrap();
            (job.ended_unix.is_some(), job.interrupted, files.len())
        };
        daemon.faults.fail_all();
        assert!(daemon.jobs.end_job("j".into(), myself(), goes_on).await.is_err());
        assert_eq!(files().await, (true, goes_on, 1));
        assert!(!daemon.jobs.inner.registry.runs("j"));
        daemon.faults.fail_write(0);
        daemon.jobs.inner.end_jobs_where(JobEnd::Orphaned, |_| false);
        assert!(daemon.jobs.inner.registry.table.lock().running.is_empty());
        assert_eq!(files().await, (true, goes_on, 1));
        daemon.until_settled().await;
        assert_eq!(daemon.has("tmp-1").await, goes_on);
    }
}

/// The write-back that `stage-out` has begun by the record of the allocation is done, and has all that the job wrote.
#[tokio::test(flavor = "multi_thread")]
async fn results_are_written_back_although_the_end_of_the_job_cannot_be_recorded() {
    const USER: u32 = 1000;
    let daemon = Daemon::start().await;
    daemon.make_in_pool().await;
    let verb = async |verb| daemon.jobs.allocation("a".into(), verb, USER).await;
    verb(AllocationVerb::Begin(AllocationRequest::default())).await.unwrap();
    let stage = StageRequest { paths: vec!["a".into()], job: Some("a".into()), ..StageRequest::default() };
    assert_eq!(summary(daemon.jobs.inner.engine.stage(stage)).await.0.failed, 0);
    verb(AllocationVerb::Start { members: Members::Processes(Vec::new()) }).await.unwrap();
    assert!(daemon.leased_bytes().await > 0);
    // Another user's: it is a result because the job wrote it.
    daemon.make("a", "result").await;
    // The second write is that of the job, after that of the allocation.
    daemon.faults.fail_write(2);
    assert!(verb(AllocationVerb::StageOut { wait_ms: 0, is_settled: false }).await.is_err());
    assert!(daemon.faults.has_failed());
    let begun = Instant::now();
    loop {
        let shown = verb(AllocationVerb::Show).await.unwrap().unwrap();
        if shown.phase == AllocationPhase::Done {
            break;
        }
        assert!(begun.elapsed() < WAIT, "{shown:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let dirty = daemon.jobs.inner.engine.dirty().await.unwrap();
    assert!(dirty.iter().all(|file| file.path != "/result"), "it is in the pool: {dirty:?}");
    assert_eq!(daemon.leased_bytes().await, 0);
}

/// What a job used before an unmount is reported, if it ends before the next mount.
#[tokio::test(flavor = "multi_thread")]
async fn the_report_of_a_job_that_ends_while_there_is_no_mount_is_kept() {
    let daemon = Daemon::start().await;
    let client = client();
    daemon.jobs.begin_job(request("j"), Process::of(client.id()), 0).await.unwrap();
    daemon.make("j", "result").await;
    daemon.jobs.shutdown().await.unwrap();
    end(client);
    let daemon = daemon.followed_by_next().await;
    let (job, files) = daemon.jobs.job("j".into()).await.unwrap().unwrap();
    assert!(job.ended_unix.is_some() && job.interrupted);
    assert_eq!((job.file_count, files.len(), files[0].path.as_str()), (1, 1, "result"));
}

/// `observe` that is interrupted leaves the leases of its job, since the job may go on.
#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_an_earlier_job_ends_no_lease_of_a_running_one_of_its_name() {
    let daemon = Daemon::start().await;
    daemon.make_in_pool().await;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    daemon.jobs.end_job("j".into(), myself(), true).await.unwrap();
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    let staged = StageRequest { paths: vec!["a".into()], job: Some("j".into()), ..StageRequest::default() };
    assert_eq!(summary(daemon.jobs.inner.engine.stage(staged)).await.0.failed, 0);
    assert_eq!(daemon.leased_bytes().await, 7);
    let daemon = daemon.dies().await;
    assert_eq!(daemon.leased_bytes().await, 7, "the job goes on");
    daemon.jobs.end_job("j".into(), myself(), false).await.unwrap();
    assert_eq!(daemon.leased_bytes().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_comes_while_a_job_is_finished_begins_another_one() {
    let daemon = Daemon::start().await;
    let inner = &daemon.jobs.inner;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    let first = daemon.number_of("j");
    inner.registry.table.lock().running.get_mut(&first).unwrap().is_ending = true;
    assert!(!inner.registry.runs("j"));
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    let second = daemon.number_of("j");
    assert_ne!(first, second);
    inner.finish_job(first, JobEnd::Told).unwrap();
    assert_eq!(daemon.number_of("j"), second, "its client goes on");
}

/// What a full table lost looks as if the job had not used it.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_learned_from_a_run_of_which_uses_were_lost() {
    let daemon = Daemon::start().await;
    let ino = daemon.make_in_pool().await;
    let inner = &daemon.jobs.inner;
    let invocation = Invocation { words: vec!["train".into()], ..Invocation::default() };
    let begun = JobRequest { invocation: Some(invocation.clone()), ..request("j") };
    daemon.jobs.begin_job(begun, myself(), 0).await.unwrap();
    let number = daemon.number_of("j");
    let head = inner.registry.table.lock().running[&number].head.clone();
    let traffic = Traffic { read_bytes: 7, ..Traffic::default() };
    let shown = JobFile { path: "a".into(), first_use_rank: 1, traffic, in_pool: false, parts: None };
    let used = [UsedFile { id: crate::FileId::Overlay(ino), shown, parts: PartMap::of_read(0..7) }];
    let is_learned = |is_whole| {
        inner.learn(&head, &used, None, is_whole).unwrap();
        inner.engine.catalog().profile_head(&invocation.signature()).unwrap().is_some()
    };
    assert_eq!([is_learned(false), is_learned(true)], [false, true]);
}

/// The records of jobs are kept in the order of their numbers, the oldest of which are removed first.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_begins_after_the_clock_was_set_back_is_newer_than_the_records() {
    let daemon = Daemon::start().await;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    let (serial, mut head) = {
        let table = daemon.jobs.inner.registry.table.lock();
        let running = table.running.values().next().unwrap();
        (running.serial, running.head.clone())
    };
    daemon.jobs.end_job("j".into(), myself(), false).await.unwrap();
    // Recorded by an earlier daemon, at a time that is yet to come.
    let later = serial * 2;
    head.summary.ended_unix = Some(1);
    daemon.jobs.inner.engine.catalog().put_job(later, &mut head, Some(&[])).unwrap();
    let daemon = daemon.dies().await;
    daemon.jobs.begin_job(request("next"), myself(), 0).await.unwrap();
    let serials: Vec<_> = daemon.jobs.inner.registry.table.lock().running.values().map(|job| job.serial).collect();
    assert!(serials.len() == 1 && serials[0] > later, "{serials:?} after {later}");
    daemon.jobs.end_job("next".into(), myself(), false).await.unwrap();
}

/// A rule for a job is for the files that it uses.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_uses_its_files_alone() {
    let daemon = Daemon::start().await;
    daemon.jobs.begin_job(request("j"), myself(), 0).await.unwrap();
    let ino = daemon.make("j", "result").await;
    let jobs_of = |ino| daemon.jobs.inner.registry.jobs_of(ino);
    assert_eq!(jobs_of(ino), [JobFacts { name: "j".into(), profile: None }]);
    let number = daemon.number_of("j");
    for other in 0..crate::accounting::FILES_MAX as u64 {
        daemon.jobs.note_write(Some(number), Ino(1_000_000 + other), 0..1);
    }
    assert!(jobs_of(Ino(999_999)).is_empty());
    assert_eq!(jobs_of(Ino(1_000_000 + crate::accounting::FILES_MAX as u64 - 1)).len(), 1, "it is not reported");
}
