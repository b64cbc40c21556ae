//! Many files and many readers. A mount does no work for each file at its start, and its memory does not grow with the
//! files that programs looked at.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options, Place, alone, content};
use forebay_tests::process::run;
use forebay_tests::settings::is_complete;

const FILES_IN_DIR: usize = 1000;
/// What a file may cost once it is forgotten, in bytes. The smallest piece that the allocator gives is 16 bytes.
const FORGOTTEN_FILE: u64 = 8;

/// A million files, or fewer in which as much memory or time for each file shows.
fn dirs() -> usize {
    if is_complete() { 1000 } else { 300 }
}

fn files() -> u64 {
    (dirs() * FILES_IN_DIR) as u64
}

/// What a start may read of a catalog with anything in it, beside its logs: indexes of tables.
const READ_OF_ANY: u64 = 512 << 10;
/// The most bytes of logs, whatever the number of files: RocksDB writes a table when this much is in memory.
const LOGS_MAX: u64 = 10 << 20;

/// Makes a pool with very many empty files in memory: making them on a disk would take most of the test.
fn very_many_files(place: &Place) {
    let pool = place.small_disk("pool", "tmpfs", 4096);
    for dir in 0..dirs() {
        let dir = pool.join(format!("d{dir:04}"));
        fs::create_dir(&dir).unwrap();
        for file in 0..FILES_IN_DIR {
            fs::File::create(dir.join(format!("f{file:04}"))).unwrap();
        }
    }
}

/// Looks up every file once, so that the kernel knows each inode. Returns the number of files.
fn look_at_all(mount: &Mount) -> u64 {
    let mut seen = 0;
    for dir in fs::read_dir(mount.place.mnt()).unwrap() {
        for file in fs::read_dir(dir.unwrap().path()).unwrap() {
            seen += u64::from(file.unwrap().metadata().unwrap().is_file());
        }
    }
    seen
}

/// Threads that no start waits for: RocksDB merges tables when it is their turn, which may be just after a start, the
/// observer reads the types of the kernel, once or some times, and the scan of the fast pool begins when the mount serves.
const OTHER_THREADS: [&str; 3] = ["rocksdb", "forebay-jobs", "forebay-scan"];

/// Bytes that the worker's threads have read since its start, from files and sockets.
fn read_since_start(mount: &Mount) -> u64 {
    let read_by = |thread: &Path| {
        let name = fs::read_to_string(thread.join("comm")).ok()?;
        let io = fs::read_to_string(thread.join("io")).ok()?;
        let bytes = io.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse::<u64>().ok()?;
        (!OTHER_THREADS.iter().any(|other| name.starts_with(other))).then_some(bytes)
    };
    let threads = fs::read_dir(format!("/proc/{}/task", mount.worker().pid)).unwrap();
    // A thread may end meanwhile.
    threads.filter_map(|thread| read_by(&thread.unwrap().path())).sum()
}

/// Mounts again, some times. Returns the bytes that a worker had read when the root could be looked at, in the best case.
fn read_at_start(mount: &Mount) -> u64 {
    let once = |_| {
        mount.umount();
        mount.mount();
        assert!(mount.path("").metadata().unwrap().is_dir());
        read_since_start(mount)
    };
    (0..3).map(once).min().unwrap()
}

fn bytes_of(dir: &Path) -> u64 {
    let each = |entry: std::io::Result<fs::DirEntry>| match entry.unwrap() {
        entry if entry.file_type().unwrap().is_dir() => bytes_of(&entry.path()),
        entry => entry.metadata().unwrap().len(),
    };
    fs::read_dir(dir).unwrap().map(each).sum()
}

/// SEMANTICS 30: "Mounting takes no longer with a catalog of a million files than with an empty one."
/// SEMANTICS 31: "Files that programs looked at and the kernel then forgot cost the daemon no memory."
#[test]
fn very_many_files_cost_nothing_at_the_mount_and_nothing_once_forgotten() {
    let _alone = alone();
    let place = Place::new();
    very_many_files(&place);
    let mount = Mount::on(place, Options::default());
    let with_none = read_at_start(&mount);
    // The first two rounds fill caches of limited size. The second one fills the caches of the catalog.
    for _ in 0..2 {
        assert_eq!(look_at_all(&mount), files());
        forget_all(&mount);
    }
    let before = mount.rss_bytes();
    assert_eq!(look_at_all(&mount), files());
    forget_all(&mount);
    let after = mount.rss_bytes();
    println!("resident memory: {} KiB, after as many lookups again {} KiB", before >> 10, after >> 10);
    assert!(after <= before + FORGOTTEN_FILE * files(), "{before} bytes grew to {after}");

    let with_all = read_at_start(&mount);
    let catalog = bytes_of(&mount.place.fast().join("catalog"));
    let is_log = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|extension| extension == "log");
    let logs = fs::read_dir(mount.place.fast().join("catalog")).unwrap().map(Result::unwrap).filter(is_log);
    let logs: u64 = logs.map(|entry| entry.metadata().unwrap().len()).sum();
    println!("read at the start: {with_none} bytes, with a catalog of {catalog} bytes {with_all}, logs {logs}");
    assert!(logs <= LOGS_MAX, "{logs} bytes of logs are read again at each start");
    assert!(
        with_all < with_none + logs + READ_OF_ANY + catalog / 50,
        "{with_none} bytes with an empty catalog, {with_all} with all files"
    );
    assert!(fs::metadata(mount.path("d0099/f0999")).unwrap().is_file());
}

/// Makes the kernel forget unused names and inodes, and waits until the daemon has processed that.
fn forget_all(mount: &Mount) {
    let known = || mount.status().inodes_known_to_kernel;
    let begun = Instant::now();
    assert!(known() > 1000);
    while known() > 1000 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the kernel still knows {} inodes", known());
        fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
    // Until then, the daemon and its allocator return memory.
    std::thread::sleep(Duration::from_secs(3));
}

const BIG: u64 = 512 << 20;
const READERS: usize = 64;

/// SEMANTICS 14: "However many readers request the same bytes at the same time, the daemon requests them from the pool
/// once."
#[test]
fn sixty_four_readers_of_one_cold_file_cost_the_pool_its_size_once() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let file = fs::File::create(mount.pool("big")).unwrap();
    for mib in 0..BIG >> 20 {
        std::io::Write::write_all(&mut &file, &content(mib, 1 << 20)).unwrap();
    }
    assert!(file.metadata().unwrap().blocks() * 512 >= BIG);
    let readers: Vec<_> = (0..READERS)
        .map(|_| {
            let (seen, meant) = (mount.path("big"), mount.pool("big"));
            // A process of its own reads the whole file.
            std::thread::spawn(move || run(Command::new("cmp").arg(&seen).arg(&meant), Duration::from_secs(240)).ok())
        })
        .collect();
    for reader in readers {
        reader.join().unwrap();
    }
    let read = mount.status().counters.pool_read_bytes;
    println!("{READERS} readers of {BIG} bytes: the pool was asked for {read}");
    assert!(read <= BIG + BIG / 20, "{read} bytes were read from the pool");
}
