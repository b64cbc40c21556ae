//! fsx: random operations on one file, each checked against what was written, while the test flushes, evicts and
//! changes other files.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place, alone, content};
use forebay_tests::process::{run, tool};
use forebay_tests::settings::{number, seed};

/// All operations of fsx, with sizes and offsets of any alignment. No operation of 0 bytes: posix_fallocate refuses it, and
/// then fsx 0.3.2 ends with an error, on each file system.
const CONFIG: &str = "
flen = 1048576
[opsize]
max = 131072
min = 1
align = 1
[weights]
close_open = 2
invalidate = 1
read = 10
write = 10
mapread = 10
mapwrite = 10
truncate = 5
fsync = 0.5
fdatasync = 0.5
posix_fallocate = 3
punch_hole = 5
sendfile = 3
posix_fadvise = 1
copy_file_range = 5
";
const LIMIT: Duration = Duration::from_secs(1800);
const POLICY: &str = "
[default]
flush = \"idle:50ms\"
[[rule]]
paths = [\"on-close/**\"]
flush = \"on-close\"
[[rule]]
paths = [\"large/**\"]
whole-file = \"0B\"
";

/// The other files, which another client replaces.
fn others() -> impl Iterator<Item = String> + Clone {
    (0..10).map(|at| format!("other-{at}"))
}

/// Flushes, evicts and changes other files of the pool until `stop` is set. Returns the number of rounds.
fn disturb(mount: &Mount, stop: &AtomicBool) -> u64 {
    let (root, dir) = (mount.place.mnt(), mount.pool("others"));
    let mut rounds = 0;
    for name in others().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        rounds += 1;
        let bytes = content(rounds, 1000 + rounds as usize % 5000);
        fs::write(dir.join("part"), &bytes).unwrap();
        fs::rename(dir.join("part"), dir.join(&name)).unwrap();
        // A file that another client writes and renames over a name is a new version for the next open.
        assert_eq!(fs::read(mount.path("others").join(&name)).unwrap(), bytes, "round {rounds}");
        if rounds % 3 == 0 {
            // A file is flushed when its writer pauses. Until then `flush` may exit with 1, which is no failure of the
            // file system.
            let flushed = mount.forebay(["flush", "--wait"], &[&root]);
            assert!(matches!(flushed.code, Some(0 | 1)), "{flushed}");
        }
        mount.forebay(["evict"], &[&root]).ok();
        thread::sleep(Duration::from_millis(20));
    }
    rounds
}

fn fsx(mount: &Mount, file: &Path, seed: u64, operations: u64) {
    let config = mount.place.at("fsx.toml");
    fs::write(&config, CONFIG).unwrap();
    let artifacts = mount.place.native();
    let mut fsx = mount.as_user(&tool("fsx"));
    fsx.args(["-N", &operations.to_string(), "-S", &seed.to_string(), "-P"]).arg(&artifacts);
    run(fsx.arg("-f").arg(&config).arg(file).env("RUST_BACKTRACE", "0"), LIMIT).ok();
}

/// Runs fsx on files of all three policies at the same time, beside [`disturb`].
fn disturbed(mount: &Mount, operations: u64) {
    let seed = seed();
    let operations = number("FOREBAY_OPERATIONS").unwrap_or(operations);
    println!("FOREBAY_OPERATIONS={operations}");
    // A new name of another client may stay unseen for the time of `metadata-ttl`, so these are there from the beginning.
    fs::create_dir(mount.pool("others")).unwrap();
    for name in others() {
        fs::write(mount.pool("others").join(name), "").unwrap();
    }
    let files = ["plain/file", "on-close/file", "large/file"];
    for file in files {
        let dir = mount.path(file).parent().unwrap().to_owned();
        run(mount.as_user(Path::new("/bin/mkdir")).arg(dir), LIMIT).ok();
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let others = scope.spawn(|| disturb(mount, &stop));
        let runs: Vec<_> = files
            .iter()
            .enumerate()
            .map(|(at, file)| {
                let path = mount.path(file);
                scope.spawn(move || fsx(mount, &path, seed + at as u64, operations / files.len() as u64))
            })
            .collect();
        let outcomes: Vec<_> = runs.into_iter().map(|run| run.join()).collect();
        stop.store(true, Ordering::Relaxed);
        println!("{} rounds of flushes, evictions and changes of other files", others.join().unwrap());
        assert!(outcomes.iter().all(Result::is_ok), "fsx found a difference");
    });
    // The test also checks that the disturbance happened: files of fsx were flushed while fsx wrote on. Its own files
    // are open all the time, so only the other files were evicted.
    let counters = mount.status().counters;
    assert!(counters.evicted_bytes > 0 && counters.flushed_files > 100, "{counters:?}");
    mount.flush();
    let all = || files.map(|file| fs::read(mount.path(file)).unwrap());
    let written = all();
    for (file, bytes) in files.iter().zip(&written) {
        assert!(fs::read(mount.pool(file)).unwrap() == *bytes, "the pool has another {file} than the mount");
    }
    mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    assert_eq!(mount.status().resident_files, 0);
    assert!(all() == written, "what was fetched again is not what was written");
    assert!(mount.status().conflicts.is_empty(), "{:?}", mount.status().conflicts);
}

#[test]
fn fsx_finds_nothing_wrong_with_passthrough() {
    let _alone = alone();
    let mount = Mount::new(Options::policy(POLICY));
    assert!(mount.status().passthrough, "this machine has no passthrough: `forebay doctor` says why");
    disturbed(&mount, 60_000);
}

/// SEMANTICS 33: "A user without privileges mounts through `fusermount3`. Such a mount has no passthrough"
#[test]
fn fsx_finds_nothing_wrong_without_privileges() {
    const NOBODY: u32 = 65534;
    let _alone = alone();
    let place = Place::new();
    place.let_users_mount();
    place.give_to(NOBODY);
    let more = vec!["-o".into(), "allow_other".into()];
    let mount = Mount::on(place, Options { user: Some(NOBODY), more, ..Options::policy(POLICY) });
    assert!(!mount.status().passthrough);
    disturbed(&mount, 21_000);
}
