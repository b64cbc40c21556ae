//! Many files and many readers. A mount does no work for each file at its start, and its memory does not grow with the
//! files that programs looked at.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options, Place, alone};
use forebay_tests::process::run;

const DIRS: usize = 1000;
const FILES_IN_DIR: usize = 1000;
/// The promise is less than a second. A machine that is busy with other work gets more.
const MOUNT_LIMIT: Duration = Duration::from_secs(5);

/// Makes a pool with very many empty files in memory: making them on a disk would take most of the test.
fn a_million_files(place: &Place) {
    let pool = place.small_disk("pool", "tmpfs", 4096);
    for dir in 0..DIRS {
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

/// SEMANTICS 30: "Mounting takes no longer with a catalog of a million files than with an empty one."
/// SEMANTICS 31: "Files that programs looked at and the kernel then forgot cost the daemon no memory."
#[test]
fn a_million_files_cost_nothing_at_the_mount_and_nothing_once_forgotten() {
    let _alone = alone();
    let place = Place::new();
    a_million_files(&place);
    let mount = Mount::on(place, Options::default());
    // The first two rounds fill caches of limited size. The second one fills the caches of the catalog.
    for _ in 0..2 {
        assert_eq!(look_at_all(&mount), (DIRS * FILES_IN_DIR) as u64);
        forget_all(&mount);
    }
    let before = mount.rss_bytes();
    assert_eq!(look_at_all(&mount), (DIRS * FILES_IN_DIR) as u64);
    forget_all(&mount);
    let after = mount.rss_bytes();
    println!("resident memory: {} MiB, after as many lookups again {} MiB", before >> 20, after >> 20);
    assert!(after <= before + before / 10 + (16 << 20), "{before} bytes grew to {after}");

    mount.umount();
    let began = Instant::now();
    mount.mount();
    let took = began.elapsed();
    println!("mounted with a catalog of {} files in {} ms", DIRS * FILES_IN_DIR, took.as_millis());
    assert!(took < MOUNT_LIMIT, "{took:?}");
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

const BIG: u64 = 1 << 30;
const READERS: usize = 64;

/// SEMANTICS 14: "However many readers request the same bytes at the same time, the daemon requests them from the pool
/// once."
#[test]
fn sixty_four_readers_of_one_cold_file_cost_the_pool_its_size_once() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let file = fs::File::create(mount.pool("big")).unwrap();
    let piece: Vec<u8> = (0..1u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for _ in 0..BIG >> 20 {
        std::io::Write::write_all(&mut &file, &piece).unwrap();
    }
    assert!(file.metadata().unwrap().blocks() * 512 >= BIG);
    let readers: Vec<_> = (0..READERS)
        .map(|_| {
            let path = mount.path("big");
            std::thread::spawn(move || {
                // A process of its own reads the whole file.
                run(Command::new("sum").arg(&path), Duration::from_secs(240)).ok().out
            })
        })
        .collect();
    let sums: Vec<String> = readers.into_iter().map(|r| r.join().unwrap()).collect();
    let first = sums[0].split_whitespace().next().unwrap().to_owned();
    assert!(sums.iter().all(|s| s.split_whitespace().next() == Some(&*first)), "readers saw different bytes");
    let read = mount.status().counters.pool_read_bytes;
    println!("{READERS} readers of {BIG} bytes: the pool was asked for {read}");
    assert!(read <= BIG + BIG / 20, "{read} bytes were read from the pool");
}
