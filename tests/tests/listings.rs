//! Directories that change while they are read, and names that are replaced while they are opened.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_tests::mapped::Mapped;
use forebay_tests::mount::{Mount, Options, Place, alone};
use forebay_tests::process::run;
use rustix::fs::RawDir;

const FILES: usize = 5000;
const MINUTE: Duration = Duration::from_secs(60);

fn list(mount: &Mount) {
    run(Command::new("ls").arg("-f").arg(mount.path("d")), MINUTE).ok();
}

/// SEMANTICS 51: "sees each name that exists during the whole listing exactly once"
#[test]
fn a_directory_that_changes_while_it_is_read_loses_no_name() {
    let _alone = alone();
    for kills in [false, true] {
        let mount = Mount::new(Options::default());
        fs::create_dir(mount.pool("d")).unwrap();
        for at in 0..FILES {
            File::create(mount.pool(format!("d/f{at}"))).unwrap();
        }
        let mut seen: HashMap<String, u32> = HashMap::new();
        for (at, entry) in fs::read_dir(mount.path("d")).unwrap().enumerate() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            *seen.entry(name.clone()).or_default() += 1;
            if name.starts_with('f') {
                fs::remove_file(mount.path("d").join(&name)).unwrap();
            }
            if at % 500 == 250 {
                File::create(mount.path(format!("d/new{at}"))).unwrap();
                let _ = fs::rename(
                    mount.path(format!("d/new{}", at.saturating_sub(500))),
                    mount.path(format!("d/moved{at}")),
                );
                list(&mount);
            }
            if kills && at == FILES / 2 {
                let worker = mount.worker();
                mount.kill_worker();
                mount.wait_for_other_worker(worker);
            }
        }
        let lost = (0..FILES).filter(|at| !seen.contains_key(&format!("f{at}"))).count();
        let names = |dir: PathBuf| fs::read_dir(dir).map_or(0, Iterator::count);
        assert_eq!(
            lost,
            0,
            "names that were never seen (worker killed: {kills}): {} were seen; {} are in the mount now, {} in the pool",
            seen.len(),
            names(mount.path("d")),
            names(mount.pool("d"))
        );
        let twice: Vec<_> = seen.iter().filter(|(name, times)| name.starts_with('f') && **times > 1).collect();
        assert!(twice.is_empty(), "seen twice (worker killed: {kills}): {twice:?}");
    }
}

/// SEMANTICS 51: "sees each name that exists during the whole listing exactly once". The kernel's cache of 2,048 entries of
/// 32 bytes ends with a page, and the names before the reader's position are gone from it.
#[test]
fn a_listing_that_fills_the_kernels_pages_loses_no_name() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    for files in [2045, 2046, 2047] {
        let dir = mount.path(format!("d{files}"));
        fs::create_dir(&dir).unwrap();
        let list = || run(Command::new("ls").arg("-f").arg(&dir), MINUTE).ok();
        (0..files).for_each(|at| drop(File::create(dir.join(format!("f{at:04}"))).unwrap()));
        (0..2).for_each(|_| drop(list()));
        let (mut seen, mut part, mut made) = (HashSet::new(), Vec::new(), 0);
        let (opened, mut buffer) = (File::open(&dir).unwrap(), Vec::with_capacity(32 << 10));
        let mut reader = RawDir::new(&opened, buffer.spare_capacity_mut());
        while let Some(entry) = reader.next() {
            part.push(entry.unwrap().file_name().to_str().unwrap().to_owned());
            if !reader.is_buffer_empty() {
                continue;
            }
            for name in part.drain(..) {
                if name.starts_with('f') {
                    fs::remove_file(dir.join(&name)).unwrap();
                    File::create(dir.join(format!("g{made:04}"))).unwrap();
                    made += 1;
                }
                seen.insert(name);
            }
            (0..3).for_each(|_| drop(list()));
        }
        let lost = (0..files).filter(|at| !seen.contains(&format!("f{at:04}"))).count();
        assert_eq!(lost, 0, "of {files} files");
    }
}

/// All open file descriptions of a directory share one listing in memory.
#[test]
fn many_handles_of_a_large_directory_cost_no_memory_each() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    fs::create_dir(mount.pool("d")).unwrap();
    for at in 0..20_000 {
        File::create(mount.pool(format!("d/some-name-of-a-file-{at}"))).unwrap();
    }
    list(&mount);
    let before = mount.rss_bytes();
    let mut readers = Vec::new();
    for at in 0..300 {
        if at % 10 == 0 {
            // Changes the directory, so that the kernel's cache cannot answer.
            File::create(mount.path(format!("d/new{at}"))).unwrap();
        }
        let mut reader = fs::read_dir(mount.path("d")).unwrap();
        reader.next().unwrap().unwrap();
        readers.push(reader);
    }
    let grown = mount.rss_bytes().saturating_sub(before);
    assert!(grown < 96 << 20, "{} MiB for 300 handles", grown >> 20);
    drop(readers);
}

/// SEMANTICS 23: "A rename is atomic in the mount".
#[test]
fn an_open_beside_a_replacement_gives_the_old_file_or_the_new_one() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let (file, stop) = (mount.path("L"), AtomicBool::new(false));
    fs::write(&file, "0").unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..u32::MAX {
                if stop.load(Ordering::Relaxed) {
                    return round;
                }
                fs::write(mount.path("t"), round.to_string()).unwrap();
                fs::rename(mount.path("t"), &file).unwrap();
            }
            u32::MAX
        });
        let begun = Instant::now();
        let mut opens = 0;
        let failed = loop {
            opens += 1;
            match File::open(&file) {
                Err(error) => break Some(error),
                Ok(_) if begun.elapsed() > Duration::from_secs(10) => break None,
                Ok(_) => {}
            }
        };
        stop.store(true, Ordering::Relaxed);
        let rounds = writer.join().unwrap();
        assert!(failed.is_none(), "after {opens} opens and {rounds} replacements: {failed:?}");
    });
    assert!(!mount.log().contains("has no record"), "{}", mount.log());
}

/// A file that replaces another one is synced before the catalog records that, and has an open descriptor until then.
#[test]
fn files_that_are_replaced_faster_than_they_are_synced_take_few_descriptors() {
    let place = Place::new();
    for at in 0..2000 {
        fs::write(place.pool().join(format!("f{at}")), "old").unwrap();
    }
    let mount = Mount::on(place, Options { descriptors: Some(600), ..Options::default() });
    let write = |name: &str, round: u32| {
        fs::write(mount.path("t"), round.to_string()).unwrap_or_else(|error| panic!("round {round}: {error}"));
        fs::rename(mount.path("t"), mount.path(name)).unwrap();
    };
    for round in 0..6000 {
        write(if round % 2 == 0 { "one" } else { "other" }, round);
    }
    let read = |name: &str| fs::read_to_string(mount.path(name)).unwrap();
    assert_eq!((read("one").as_str(), read("other").as_str()), ("5998", "5999"));
    // The same for files that are emptied and written anew.
    for at in 0..2000 {
        assert_eq!(read(&format!("f{at}")), "old");
    }
    for at in 0..2000 {
        fs::write(mount.path(format!("f{at}")), "new").unwrap_or_else(|error| panic!("file {at}: {error}"));
    }
}

/// SEMANTICS 24: "Modes, owners, times to the nanosecond, extended attributes and ACLs reach the pool."
#[test]
fn times_before_1970_are_kept_with_their_fractions() {
    let mount = Mount::new(Options::default());
    fs::write(mount.path("f"), "x").unwrap();
    let times = |secs: i64, nanos: i64| rustix::fs::Timespec { tv_sec: secs, tv_nsec: nanos };
    let file = File::open(mount.path("f")).unwrap();
    let stamps =
        rustix::fs::Timestamps { last_access: times(-1, 999_999_999), last_modification: times(-3, 250_000_000) };
    rustix::fs::futimens(&file, &stamps).unwrap();
    drop(file);
    mount.flush();
    for path in [mount.path("f"), mount.pool("f")] {
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (-3, 250_000_000), "{}", path.display());
        assert_eq!((meta.atime(), meta.atime_nsec()), (-1, 999_999_999), "{}", path.display());
    }
}

/// SEMANTICS 34: "A store through a shared mapping is written back like any other write". The first store to a page
/// changes the times of the file, as on a local file system.
#[test]
fn a_store_through_a_mapping_shows_in_the_times_at_once() {
    let mount = Mount::new(Options::default());
    let file = mount.path("f");
    let times = || {
        let meta = fs::metadata(&file).unwrap();
        (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec())
    };
    for is_flushed in [true, false] {
        fs::write(&file, vec![0; 8192]).unwrap();
        if is_flushed {
            mount.flush();
        }
        let written = times();
        std::thread::sleep(Duration::from_millis(50));
        let mapped = Mapped::of(&file, 8192);
        mapped.store(0, 1);
        let stored = times();
        assert_ne!(stored, written, "flushed: {is_flushed}");
        drop(mapped);
        assert_eq!(times(), stored, "flushed: {is_flushed}");
    }
    let written = times();
    std::thread::sleep(Duration::from_millis(50));
    run(Command::new("xfs_io").args(["-c", "mmap 0 4k", "-c", "mwrite 0 4k", "-c", "msync -s"]).arg(&file), MINUTE * 5)
        .ok();
    assert_ne!(times(), written);
}

/// SEMANTICS 50: "A program that opens a staged file finds it"
#[test]
fn what_has_just_appeared_in_the_pool_is_opened_once_it_is_staged() {
    let mount = Mount::new(Options::policy("[default]\nmetadata-ttl = \"1h\"\n"));
    fs::create_dir(mount.pool("d")).unwrap();
    fs::read_dir(mount.path("d")).unwrap().for_each(drop);
    for name in ["f", "d/f"] {
        assert!(!mount.path(name).exists(), "{name}");
        fs::write(mount.pool(name), name).unwrap();
    }
    mount.forebay(["stage"], &[&mount.path("f"), &mount.path("d")]).ok();
    for name in ["f", "d/f"] {
        assert_eq!(fs::read_to_string(mount.path(name)).unwrap(), name);
    }
}
