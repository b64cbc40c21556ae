//! What the observer tells of processes whose every access is known. Needs root, and a kernel with BTF.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay_ebpf::{FirstTouch, Key, Observer, Options, Place, Record, Way};
use forebay_tests::reading::{BLOCK, How, PAGE, Step, WAYS_TO_READ};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// What must be told of one job and one file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Truth {
    read_bytes: u64,
    direct_bytes: u64,
    direct_calls: u64,
    is_mapped: bool,
    parts: BTreeSet<u64>,
}

/// A plan of accesses within the files: of bytes that are there, since others are not touches.
fn plan<R: Rng>(rng: &mut R, files: &[(PathBuf, u64)], steps: usize) -> Vec<Step> {
    let one = |rng: &mut R| {
        let (file, size) = files.choose(rng).unwrap();
        let how = *WAYS_TO_READ.choose(rng).unwrap();
        // Those go on in pieces of whole pages, or may not begin elsewhere.
        let aligned = !matches!(how, How::Read | How::Pread | How::Readv | How::IoUring);
        let unit = if aligned { BLOCK } else { 1 };
        let from = rng.random_range(0..size / unit) * unit;
        let len = rng.random_range(1..=(400_000.min(size - from) / unit).max(1)) * unit;
        Step { file: file.clone(), how, from, len: len.min(size - from) }
    };
    let end = |step: &Step| (step.file.clone(), (step.from + step.len).div_ceil(PAGE));
    let mut plan: Vec<Step> = Vec::new();
    while plan.len() < steps {
        let step = one(rng);
        // io_uring and splice are no calls that the kernel counts: one that ends where the one before ended, in the same
        // file, is taken for the rest of it.
        let last = plan.iter().rev().find(|last| !matches!(last.how, How::Mmap | How::Direct));
        if last.is_none_or(|last| end(last) != end(&step)) {
            plan.push(step);
        }
    }
    plan
}

/// What the records should say, and the files in the order of their first touches.
fn truth(plan: &[Step], sizes: &HashMap<PathBuf, u64>) -> (BTreeMap<PathBuf, Truth>, Vec<PathBuf>) {
    let (mut all, mut order) = (BTreeMap::<PathBuf, Truth>::new(), Vec::new());
    for step in plan {
        let size = sizes[&step.file];
        let of_file = all.entry(step.file.clone()).or_insert_with(|| {
            order.push(step.file.clone());
            Truth::default()
        });
        let (from, until) = (step.from, step.from + step.len);
        let pages = (from / PAGE * PAGE, (until.div_ceil(PAGE) * PAGE).min(size));
        match step.how {
            How::Mmap => of_file.is_mapped = true,
            How::Direct => {
                of_file.direct_bytes += step.len;
                of_file.direct_calls += 1;
            }
            _ => of_file.read_bytes += pages.1 - pages.0,
        }
        let shift = shift(size);
        of_file.parts.extend(pages.0 >> shift..=(pages.1 - 1) >> shift);
    }
    (all, order)
}

/// 256 parts of a file, of 64 KiB or more.
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

fn seed() -> u64 {
    let seed = std::env::var("FOREBAY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    println!("FOREBAY_SEED={seed}");
    seed
}

/// Files of many sizes, in a directory on a disk.
fn files(dir: &Path, rng: &mut impl Rng, sizes: &[u64]) -> Vec<(PathBuf, u64)> {
    let one = |(number, size): (usize, &u64)| {
        let path = dir.join(format!("file-{number}"));
        let mut file = File::create(&path).unwrap();
        let mut block = vec![0u8; *size as usize];
        rng.fill_bytes(&mut block);
        file.write_all(&block).unwrap();
        (path, *size)
    };
    let made = sizes.iter().enumerate().map(one).collect();
    rustix::fs::syncfs(File::open(dir).unwrap()).unwrap();
    made
}

const SIZES: [u64; 8] = [4096, 9000, 65_536, 100_001, 1 << 20, 5_000_000, 17 << 20, 40_000_003];

struct Run {
    records: HashMap<Key, Record>,
    touches: Vec<FirstTouch>,
}

/// Runs the jobs at once, observed, and each as one of its own.
fn run(observer: &Observer, plans: &[Vec<Step>]) -> Run {
    let mut jobs: Vec<Child> = plans.iter().map(|_| start()).collect();
    for (number, job) in jobs.iter().enumerate() {
        observer.add_process(job.id(), number as u32 + 1).unwrap();
    }
    for (job, plan) in jobs.iter_mut().zip(plans) {
        job.stdin.take().unwrap().write_all(&serde_json::to_vec(plan).unwrap()).unwrap();
    }
    let mut touches = Vec::new();
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
        touches.extend(observer.first_touches(Duration::from_millis(50)));
    }
    touches.extend(observer.first_touches(Duration::ZERO));
    Run { records: observer.records().unwrap(), touches }
}

fn check(run: &Run, job: u32, dir: &Path, plan: &[Step], sizes: &HashMap<PathBuf, u64>, cached: bool) {
    let (truth, order) = truth(plan, sizes);
    let mut touches: Vec<&FirstTouch> = run.touches.iter().filter(|touch| touch.key.job == job).collect();
    touches.sort_by_key(|touch| touch.rank);
    let told: Vec<PathBuf> = touches.iter().map(|touch| dir.join(&touch.path)).collect();
    assert_eq!(told, order, "files of job {job}, in the order of first touches");
    for touch in touches {
        let path = dir.join(&touch.path);
        let (record, truth) = (&run.records[&touch.key], &truth[&path]);
        let told = parts(record);
        let differ: Vec<u64> = told.symmetric_difference(&truth.parts).copied().collect();
        let part = 1 << shift(sizes[&path]);
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
        if cached {
            assert_eq!(record.way(Way::Read).bytes, truth.read_bytes, "bytes of {path:?} by job {job}: {record:?}");
        }
    }
}

fn observe(place: Place) -> Observer {
    let options = Options { places: vec![place], ignored: std::process::id(), masked: Vec::new() };
    let observer = Observer::start(&options).unwrap();
    let lacking: Vec<_> = observer.hooks().iter().filter(|state| state.lacking.is_some()).collect();
    assert!(lacking.is_empty(), "{lacking:?}");
    observer
}

/// Reads all of it into the page cache, or gives up what is there of it.
fn set_cached(path: &Path, cached: bool) {
    let file = File::open(path).unwrap();
    if cached {
        std::io::copy(&mut &file, &mut std::io::sink()).unwrap();
    } else {
        rustix::fs::fadvise(file.as_fd(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

/// Four jobs at once: what they read is in the page cache or not, and is shared or not.
fn observe_jobs(rng: &mut impl Rng, dir: &Path, sets: &[Vec<(PathBuf, u64)>], cached: bool) {
    let plans: Vec<Vec<Step>> = (0..4).map(|job| plan(&mut *rng, &sets[job % sets.len()], 400)).collect();
    sets.iter().flatten().for_each(|(path, _)| set_cached(path, cached));
    let observer = observe(Place::below(dir, false).unwrap());
    let run = run(&observer, &plans);
    assert!(run.records.keys().all(|key| (1..=4).contains(&key.job)), "nothing else is watched");
    let sizes = sets.iter().flatten().cloned().collect();
    for (number, plan) in plans.iter().enumerate() {
        check(&run, number as u32 + 1, dir, plan, &sizes, cached);
    }
    assert_eq!(observer.dropped(), Default::default());
}

#[test]
fn records_are_exact_for_every_way_to_read_by_jobs_at_once() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let files = files(dir.path(), &mut rng, &SIZES);
    observe_jobs(&mut rng, dir.path(), &[files], true);
}

/// Where one waits for pages that another is reading, the kernel does not tell of all that it reads. So each has its own.
#[test]
fn ranges_are_exact_for_every_way_to_read_what_is_not_in_memory() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed());
    let of_job = |job: u32| {
        let own = dir.path().join(format!("job-{job}/with/directories"));
        std::fs::create_dir_all(&own).unwrap();
        files(&own, &mut rng, &[4096, 9000, 100_001, 5_000_000, 17 << 20])
    };
    let sets: Vec<_> = (0..4).map(of_job).collect();
    observe_jobs(&mut rng, dir.path(), &sets, false);
}

/// As fast as files can be opened, which is more than a hundred thousand in a second for two CPUs.
#[test]
fn no_first_touch_of_a_flood_is_dropped() {
    const FILES: usize = 10_000;
    const JOBS: usize = 4;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    let files = files(dir.path(), &mut rng, &[1; FILES]);
    let read = |(file, _): &(PathBuf, u64)| Step { file: file.clone(), how: How::Pread, from: 0, len: 1 };
    let plan: Vec<Step> = files.iter().map(read).collect();
    let observer = observe(Place::below(dir.path(), false).unwrap());
    let run = run(&observer, &vec![plan; JOBS]);
    assert_eq!(observer.dropped(), Default::default());
    assert_eq!(run.records.len(), FILES * JOBS);
    for job in 1..=JOBS as u32 {
        let paths: BTreeSet<&Path> =
            run.touches.iter().filter(|t| t.key.job == job).map(|t| t.path.as_path()).collect();
        assert_eq!(paths.len(), FILES, "paths that were told of job {job}");
    }
}
