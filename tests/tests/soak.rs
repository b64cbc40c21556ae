//! Bursts of small files with few descriptors: all of them reach the pool, all become clean, and none stays held.

use std::fs;
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options, alone};

/// The longest that the background flush may take for all files.
const ARRIVAL: Duration = Duration::from_secs(300);
const FILES: usize = 8000;

/// Sets both limits, because a daemon raises the soft one as far as it may. They hold for processes that this one
/// starts later.
fn limit_descriptors(most: u64) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: a plain system call with a structure that lives through it.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0, "root may set its limits");
}

fn await_clean(mount: &Mount) {
    let begun = Instant::now();
    loop {
        let status = mount.status();
        if status.dirty_files == 0 {
            return;
        }
        assert!(
            begun.elapsed() < ARRIVAL,
            "{} files stay dirty; {:?} {:?}",
            status.dirty_files,
            status.flush_errors,
            status.flush_stuck
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn a_burst_beyond_the_descriptors_arrives_and_is_clean() {
    let _alone = alone();
    limit_descriptors(4096);
    let mount = Mount::new(Options::policy("[default]\nflush = \"idle:1s\"\n"));
    fs::create_dir(mount.path("out")).unwrap();
    for number in 0..FILES {
        fs::write(mount.path(format!("out/{number}")), number.to_string()).unwrap();
    }
    await_clean(&mount);
    assert_eq!(fs::read_dir(mount.pool("out")).unwrap().count(), FILES);
    // A file that is written again after the daemon closed its first descriptor becomes clean, too.
    fs::write(mount.path("out/0"), "again").unwrap();
    fs::write(mount.path("out/new"), "new").unwrap();
    await_clean(&mount);
    assert_eq!(fs::read(mount.pool("out/0")).unwrap(), b"again");
    assert_eq!(fs::read(mount.pool("out/new")).unwrap(), b"new");
    // Clean files can be evicted: no descriptor is left that the daemon takes for another program's.
    mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    assert_eq!(mount.status().resident_files, 0);
}
