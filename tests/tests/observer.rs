//! What the observer records of processes whose every access is known. Needs root, and a kernel with BTF.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_ebpf::{FirstTouch, Key, Observer, ObserverOptions, Record, WatchedPlace, Way};
use forebay_system::process::Process;
use forebay_tests::observed::{options, records};
use forebay_tests::reading::{CALLS_TO_READ, How, Step, WAYS_TO_READ};
use forebay_tests::settings::seed;
use forebay_tests::truth::{Set, files, plans, truth};
use rand::SeedableRng;

/// Returns the binary logarithm of the size of a part. A file has at most 256 parts, of 64 KiB or more.
fn shift(size: u64) -> u32 {
    (16..48).find(|shift| size <= 256 << shift).unwrap()
}

fn parts(record: &Record) -> BTreeSet<u64> {
    (0..256).filter(|part| record.read[part / 64] >> (part % 64) & 1 == 1).map(|part| part as u64).collect()
}

fn start() -> Child {
    Command::new(env!("CARGO_BIN_EXE_observed"))
        .arg("read")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

const SIZES: [u64; 8] = [4096, 9000, 65_536, 100_001, 1 << 20, 5_000_000, 17 << 20, 40_000_003];

struct Run {
    records: HashMap<Key, Record>,
    touches: Vec<FirstTouch>,
}

/// Runs the plans at the same time, each as a job of its own, and observes them.
fn run(observer: &Observer, plans: &[Vec<Step>]) -> Run {
    let mut jobs: Vec<Child> = plans.iter().map(|_| start()).collect();
    for (number, job) in jobs.iter().enumerate() {
        observer.add_process(job.id(), number as u32 + 1).unwrap();
    }
    for (job, plan) in jobs.iter_mut().zip(plans) {
        job.stdin.take().unwrap().write_all(&serde_json::to_vec(plan).unwrap()).unwrap();
    }
    let (ring, mut touches) = (observer.ring().unwrap(), Vec::new());
    let end = Instant::now() + Duration::from_secs(120);
    while !jobs.is_empty() {
        assert!(Instant::now() < end, "a job does not end");
        jobs.retain_mut(|job| match job.try_wait().unwrap() {
            Some(status) => {
                assert!(status.success());
                false
            }
            None => true,
        });
        ring.wait(Duration::from_millis(50));
        touches.extend(observer.first_touches());
    }
    touches.extend(observer.first_touches());
    Run { records: records(observer), touches }
}

fn check(run: &Run, job: u32, dir: &Path, plan: &[Step], sizes: &HashMap<PathBuf, u64>, cached: bool) {
    let (truth, order) = truth(plan, sizes);
    let mut touches: Vec<&FirstTouch> = run.touches.iter().filter(|touch| touch.key.job == job).collect();
    touches.sort_by_key(|touch| touch.rank);
    let told: Vec<PathBuf> = touches.iter().map(|touch| dir.join(&touch.path)).collect();
    assert_eq!(told, order, "files of job {job}, in the order of first touches");
    let mut compared = 0;
    for touch in touches {
        let path = dir.join(&touch.path);
        let (record, truth) = (&run.records[&touch.key], &truth[&path]);
        let told = parts(record);
        let shift = shift(sizes[&path]);
        let differ: Vec<u64> = told.symmetric_difference(&truth.parts(shift)).copied().collect();
        let part = 1 << shift;
        let touches = |step: &&Step| {
            let mut parts = differ.iter().map(|differ| differ * part);
            step.file == path && parts.any(|at| step.from < at + part && at < step.from + step.len)
        };
        let steps: Vec<&Step> = plan.iter().filter(touches).collect();
        assert!(differ.is_empty(), "ranges {differ:?} of {path:?} by job {job}: {steps:#?} {record:?}");
        assert_eq!(record.way(Way::DirectRead).bytes, truth.direct_bytes, "O_DIRECT of {path:?} by job {job}");
        assert_eq!(record.way(Way::DirectRead).calls, truth.direct_calls, "O_DIRECT of {path:?} by job {job}");
        assert_eq!(record.way(Way::Map).bytes > 0, truth.is_mapped, "mapping of {path:?} by job {job}");
        assert_eq!(record.written_bytes(), 0);
        let read = record.way(Way::Read).bytes;
        // If the kernel dropped pages from its cache meanwhile, they were read from the disk, and the kernel does not
        // report all of that.
        if cached && record.way(Way::Fill).calls == 0 {
            let differ = read.abs_diff(truth.read_bytes);
            let is_as_long = |step: &&Step| {
                let pages = step.pages(sizes[&path]);
                step.file == path && pages.end - pages.start == differ
            };
            let steps: Vec<&Step> = plan.iter().filter(is_as_long).collect();
            assert_eq!(read, truth.read_bytes, "bytes of {path:?} by job {job}: {record:?}, as long as {steps:#?}");
            compared += 1;
        }
    }
    assert!(!cached || compared > 0, "the page cache keeps no file of job {job}");
}

fn observe(place: WatchedPlace) -> Observer {
    let options =
        ObserverOptions { places: vec![place], ignored: std::process::id(), scratch: None, masked: Vec::new() };
    let observer = Observer::start(&options).unwrap();
    let lacking: Vec<_> = observer.hooks().iter().filter(|state| state.lacking.is_some()).collect();
    assert!(lacking.is_empty(), "{lacking:?}");
    observer
}

/// Reads the whole file into the page cache, or drops its pages from it.
fn set_cached(path: &Path, cached: bool) {
    let file = File::open(path).unwrap();
    if cached {
        std::io::copy(&mut &file, &mut std::io::sink()).unwrap();
    } else {
        rustix::fs::fadvise(file.as_fd(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

/// Runs the plans as parallel jobs, on files that are in the page cache or are not, and checks their records.
fn observe_jobs(dir: &Path, plans: &[Vec<Step>], files: &[(PathBuf, u64)], cached: bool) {
    files.iter().for_each(|(path, _)| set_cached(path, cached));
    let observer = observe(WatchedPlace::below(dir, false).unwrap());
    let run = run(&observer, plans);
    assert!(run.records.keys().all(|key| (1..=4).contains(&key.job)), "nothing else is watched");
    let sizes = files.iter().cloned().collect();
    for (number, plan) in plans.iter().enumerate() {
        check(&run, number as u32 + 1, dir, plan, &sizes, cached);
    }
    assert_eq!(observer.dropped(), Default::default());
}

/// Each job maps only its own files. If two jobs map pages of one folio, the kernel may map the whole folio and report
/// one page.
#[test]
fn records_are_exact_for_every_way_to_read_by_jobs_at_once() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let shared = files(dir.path(), &mut rng, &SIZES);
    let own: Vec<_> =
        (0..4).map(|job| files(&dir.path().join(format!("job-{job}")), &mut rng, &[9000, 1 << 20, 17 << 20])).collect();
    let of_job = |own: &Vec<_>| {
        let calls = Set { files: &shared, ways: &CALLS_TO_READ, once: false };
        let all = Set { files: own, ways: &WAYS_TO_READ, once: false };
        plans(&mut rng, &[(calls, 300), (all, 100)])
    };
    let plans: Vec<_> = own.iter().map(of_job).collect();
    observe_jobs(dir.path(), &plans, &[shared, own.concat()].concat(), true);
}

/// If a read finds some of its pages in memory and waits for other pages, the kernel does not report all of the read.
/// So each job has its own files, and reads nothing twice.
#[test]
fn ranges_are_exact_for_every_way_to_read_what_is_not_in_memory() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let of_job = |job: u32| {
        let own = dir.path().join(format!("job-{job}/with/directories"));
        files(&own, &mut rng, &[4096, 9000, 100_001, 5_000_000, 17 << 20, 40_000_003])
    };
    let own: Vec<_> = (0..4).map(of_job).collect();
    let of_job = |own: &Vec<_>| plans(&mut rng, &[(Set { files: own, ways: &WAYS_TO_READ, once: true }, 400)]);
    let plans: Vec<_> = own.iter().map(of_job).collect();
    observe_jobs(dir.path(), &plans, &own.concat(), false);
}

/// The jobs open files as fast as they can: more than a hundred thousand per second on two CPUs.
#[test]
fn no_first_touch_of_a_flood_is_dropped() {
    const FILES: usize = 10_000;
    const JOBS: usize = 4;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    let files = files(dir.path(), &mut rng, &[1; FILES]);
    let read = |(file, _): &(PathBuf, u64)| Step { file: file.clone(), how: How::Pread, from: 0, len: 1 };
    let plan: Vec<Step> = files.iter().map(read).collect();
    let observer = observe(WatchedPlace::below(dir.path(), false).unwrap());
    let run = run(&observer, &vec![plan; JOBS]);
    assert_eq!(observer.dropped(), Default::default());
    assert_eq!(run.records.len(), FILES * JOBS);
    for job in 1..=JOBS as u32 {
        let paths: BTreeSet<&Path> =
            run.touches.iter().filter(|t| t.key.job == job).map(|t| t.path.as_path()).collect();
        assert_eq!(paths.len(), FILES, "paths that were told of job {job}");
    }
}

/// At its start, the observer measures how the kernel counts pages, by a read of one page. Only the starting thread's
/// read counts.
#[test]
fn what_other_threads_read_meanwhile_does_not_mislead() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (large, small) = (dir.path().join("large"), dir.path().join("small"));
    std::fs::write(&large, [1; 1 << 16]).unwrap();
    std::fs::write(&small, [1]).unwrap();
    let plan = [Step { file: small, how: How::Pread, from: 0, len: 1 }];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                set_cached(&large, true);
            }
        });
        let told = std::panic::catch_unwind(|| {
            let of_one =
                |_| run(&observe(WatchedPlace::below(dir.path(), false).unwrap()), &[plan.to_vec()]).records.len();
            (0..10).map(of_one).collect::<Vec<_>>()
        });
        done.store(true, Ordering::Relaxed);
        assert_eq!(told.unwrap(), [1; 10]);
    });
}

/// A CPU remembers the file that a task reads, and need not look up its record.
#[test]
fn a_file_whose_record_was_forgotten_is_recorded_at_its_next_touch() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [1; 8192]).unwrap();
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &cpus).unwrap();
    let observer = Observer::start(&options(dir.path(), &[])).unwrap();
    observer.add_process(std::process::id(), 1).unwrap();
    let file = File::open(&path).unwrap();
    let read_page = |number: u64| file.read_exact_at(&mut [0; 4096], number * 4096).unwrap();
    read_page(0);
    let told: Vec<Key> = records(&observer).into_keys().collect();
    assert_eq!(told.len(), 1);
    observer.forget(told.clone());
    assert!(records(&observer).is_empty());
    read_page(1);
    assert_eq!(records(&observer).into_keys().collect::<Vec<_>>(), told);
}

/// The kernel tells of the exit of a process that it knows. The number of one that was added too late would belong to the job
/// for ever, whichever process gets it next.
#[test]
fn a_process_that_exits_while_it_is_added_leaves_nothing_behind() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let observer = Observer::start(&options(dir.path(), &[])).unwrap();
    let mut child = start();
    let process = Process::of(child.id());
    let mut exits_after_the_check = || {
        let was_running = process.is_running();
        child.kill().unwrap();
        child.wait().unwrap();
        was_running
    };
    observer.add_running_process(process.pid, 1, &mut exits_after_the_check).unwrap();
    assert_eq!(observer.job_of(process.pid), None);
    observer.add_running_process(process.pid, 1, || process.is_running()).unwrap();
    assert_eq!(observer.job_of(process.pid), None);
    let mut looks = 0;
    let belongs_to_another_by_then = || {
        looks += 1;
        if looks == 2 {
            observer.add_process(process.pid, 2).unwrap();
        }
        looks == 1
    };
    observer.add_running_process(process.pid, 1, belongs_to_another_by_then).unwrap();
    assert_eq!(observer.job_of(process.pid), Some(2));
    let mut child = start();
    observer.add_running_process(child.id(), 3, || Process::of(child.id()).is_running()).unwrap();
    assert_eq!(observer.job_of(child.id()), Some(3));
    child.kill().unwrap();
    child.wait().unwrap();
}
