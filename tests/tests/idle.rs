//! A mount without requests does next to nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options, alone};

/// The longest wait for earlier work to end.
const SETTLED: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_secs(10);
/// Two per second, for busy machines. An idle mount needs less than one.
const SWITCHES_MAX: u64 = 20;

/// Returns how often the threads of a process have waited for something.
fn switches(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the worker runs");
    let of = |task: PathBuf| {
        // The thread may have ended.
        let status = fs::read_to_string(task.join("status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.map_or(0, |count| count.trim().parse::<u64>().unwrap())
    };
    tasks.flatten().map(|task| of(task.path())).sum()
}

/// Returns the files of the catalog's log, with their lengths.
fn log(fast: &Path) -> Vec<(PathBuf, u64)> {
    let (mut found, mut dirs) = (Vec::new(), vec![fast.to_path_buf()]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => dirs.push(entry.path()),
                false if entry.path().extension().is_some_and(|ext| ext == "log") => {
                    found.push((entry.path(), entry.metadata().unwrap().len()));
                }
                false => {}
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "the catalog has a log");
    found
}

#[test]
fn an_idle_mount_writes_nothing_to_its_catalog_and_rarely_wakes_up() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    fs::write(mount.path("file"), vec![7; 1 << 20]).unwrap();
    mount.flush();
    let fast = mount.place.fast();
    let begun = Instant::now();
    let mut before = log(&fast);
    loop {
        let (from, worker) = (switches(mount.worker().pid), mount.worker().pid);
        std::thread::sleep(LOOK);
        let (waited, after) = (switches(worker).saturating_sub(from), log(&fast));
        if after == before && waited <= SWITCHES_MAX {
            break;
        }
        assert!(begun.elapsed() < SETTLED, "{waited} waits in {LOOK:?}; the log was {before:?} and is {after:?}");
        before = after;
    }
    // A request wakes the parts that wait for it.
    fs::write(mount.path("file"), "new").unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.pool("file")).unwrap(), b"new");
}
