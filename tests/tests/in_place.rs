//! Files with several names. Their content is written to the pool in place, because a rename would separate the names.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use forebay_tests::mount::{Mount, Options, Place, content};
use forebay_tests::process::sh;

const MANUAL: &str = "[default]\nflush = \"manual\"\n";
const SHELL: Duration = Duration::from_secs(60);

/// Makes a file with two names in the pool, and writes to one of them through the mount. The flush writes its content
/// in place.
fn written_under_one_of_two_names(mount: &Mount, old: &[u8], bytes: &[u8]) {
    fs::write(mount.pool("a"), old).unwrap();
    fs::hard_link(mount.pool("a"), mount.pool("b")).unwrap();
    fs::write(mount.path("a"), bytes).unwrap();
}

fn arrived_under_both_names(mount: &Mount, bytes: &[u8]) {
    for name in ["a", "b"] {
        assert!(fs::read(mount.pool(name)).unwrap() == bytes, "the pool has another {name}");
    }
    assert_eq!(mount.status().conflicts, [""; 0]);
    assert!(!is_marked(mount), "a mark is left");
}

/// Returns whether the pool's file has the mark of a write in place.
fn is_marked(mount: &Mount) -> bool {
    sh(&mount.place.pool(), "getfattr -d a b", SHELL).ok().out.contains("forebay")
}

/// SEMANTICS 36: "A flush that is interrupted at any point is continued later"
#[test]
fn a_flush_in_place_that_was_killed_is_taken_up_again() {
    let mut half_done = 0;
    for pause_ms in [0, 10, 30, 60, 100, 200] {
        let mount = Mount::manual();
        let bytes = content(pause_ms, 200 << 20);
        written_under_one_of_two_names(&mount, &bytes[1..], &bytes);
        std::thread::scope(|scope| {
            let flush = scope.spawn(|| mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]));
            let begun = Instant::now();
            while !is_marked(&mount) && !flush.is_finished() {
                assert!(begun.elapsed() < SHELL, "the flush neither begins nor ends");
                std::thread::sleep(Duration::from_millis(2));
            }
            std::thread::sleep(Duration::from_millis(pause_ms));
            let worker = mount.worker();
            mount.kill_worker();
            half_done += u32::from(is_marked(&mount));
            mount.wait_for_other_worker(worker);
            let _ = flush.join();
        });
        mount.flush();
        arrived_under_both_names(&mount, &bytes);
    }
    assert!(half_done > 0, "no flush was cut off");
}

#[test]
fn a_flush_in_place_that_finds_no_room_changes_nothing() {
    const MIB: u64 = 1 << 20;
    let place = Place::new();
    let pool = place.small_disk("pool", "ext4", 128);
    let mount = Mount::on(place, Options::policy(MANUAL));
    let bytes = content(3, 24 << 20);
    written_under_one_of_two_names(&mount, b"short", &bytes);
    // The pool has room for the staged copy, and not for the same amount again.
    let stat = rustix::fs::statvfs(&pool).unwrap();
    let filler = File::create(pool.join("filler")).unwrap();
    let free = stat.f_bfree * stat.f_frsize;
    rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, free - 40 * MIB).unwrap();
    let answer = mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]);
    assert!(answer.code != Some(0) && answer.err.contains("in place"), "{answer}");
    for name in ["a", "b"] {
        assert_eq!(fs::read_to_string(pool.join(name)).unwrap(), "short");
    }
    drop(filler);
    fs::remove_file(pool.join("filler")).unwrap();
    mount.flush();
    arrived_under_both_names(&mount, &bytes);
}
