//! A device of the fast pool fails a write, and then goes on as if nothing had happened. What it lost does not count as
//! kept.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use forebay_tests::disk::Disk;
use forebay_tests::mount::{Mount, Options, Place, content};

const LEN: usize = 300_000;
/// Longer than an epoch.
const EPOCH: Duration = Duration::from_secs(180);

/// Returns a mount with its catalog on one device, and its content on the other one, which has more room.
fn mounted() -> (Disk, Mount) {
    let place = Place::new();
    let disk = Disk::new(&place, "second", 600);
    place.small_disk("fast", "ext4", 300);
    let options = Options {
        limit: Some("200M".into()),
        more: vec!["--fast".into(), disk.dir.to_str().unwrap().into()],
        ..Options::policy("[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n")
    };
    (disk, Mount::on(place, options))
}

#[track_caller]
fn write(mount: &Mount, name: &str, seed: u64) -> File {
    let mut file = File::create(mount.path(name)).unwrap();
    file.write_all(&content(seed, LEN)).unwrap();
    file
}

#[track_caller]
fn is_eio(result: std::io::Result<()>) {
    assert_eq!(result.expect_err("it was lost").raw_os_error(), Some(libc::EIO));
}

/// Checks that a file is reported as lost, and is not flushed.
#[track_caller]
fn is_kept_back(mount: &Mount, name: &str) {
    let said = mount.forebay(["flush", "--wait"], &[&mount.path(name)]);
    assert!(said.code != Some(0) && format!("{}{}", said.out, said.err).contains("did not reach"), "{said}");
    let said = mount.forebay(["dirty"], &[&mount.place.mnt()]).ok();
    let line = said.out.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("it is not named: {said}"));
    assert!(line.contains("did not reach the fast pool's device"), "{said}");
}

/// SEMANTICS 42: "If the kernel once reported that bytes of a dirty file were lost on their way to the device, they
/// stay lost"
#[test]
fn what_fsync_said_was_lost_is_lost_until_it_is_written_anew() {
    let (disk, mount) = mounted();
    let (emptied, copied) = (write(&mount, "emptied", 1), write(&mount, "copied", 2));
    disk.fail();
    is_eio(emptied.sync_all());
    is_eio(copied.sync_data());
    disk.mend();
    // The kernel itself reports no error any more.
    for name in ["emptied", "copied"] {
        is_eio(OpenOptions::new().write(true).open(mount.path(name)).unwrap().sync_all());
        is_kept_back(&mount, name);
    }
    drop((emptied, copied));
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    for name in ["emptied", "copied"] {
        is_eio(File::open(mount.path(name)).unwrap().sync_all());
        is_kept_back(&mount, name);
        assert!(!mount.pool(name).exists());
    }
    write(&mount, "emptied", 3).sync_all().unwrap();
    fs::copy(mount.path("copied"), mount.path("copy")).unwrap();
    fs::rename(mount.path("copy"), mount.path("copied")).unwrap();
    File::open(mount.path("copied")).unwrap().sync_all().unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.pool("emptied")).unwrap(), content(3, LEN));
    assert_eq!(fs::read(mount.pool("copied")).unwrap(), fs::read(mount.path("copied")).unwrap());
    assert_eq!(mount.status().dirty_files, 0);
}

/// SEMANTICS 42, for a file that no program synced: the kernel wrote it back by itself, and no open file reports the
/// error.
#[test]
fn a_closed_file_that_was_not_written_back_is_not_flushed() {
    let (disk, mount) = mounted();
    drop(write(&mount, "lost", 1));
    disk.fail();
    disk.write_back();
    disk.mend();
    disk.forget_content();
    drop(write(&mount, "kept", 2));
    let said = mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]);
    assert_ne!(said.code, Some(0), "{said}");
    is_kept_back(&mount, "lost");
    assert!(!mount.pool("lost").exists());
    assert_eq!(fs::read(mount.pool("kept")).unwrap(), content(2, LEN));
    fs::remove_file(mount.path("lost")).unwrap();
    mount.flush();
    assert_eq!(mount.status().dirty_files, 0);
}

/// SEMANTICS 42, for a file that replaced another one: the pool keeps the replaced file.
#[test]
fn a_replacement_that_was_lost_does_not_replace_the_pools_file() {
    let (disk, mount) = mounted();
    fs::write(mount.pool("file"), "as it was").unwrap();
    drop(write(&mount, "new", 1));
    disk.fail();
    fs::rename(mount.path("new"), mount.path("file")).unwrap();
    File::open(mount.place.mnt()).unwrap().sync_all().expect("the loss of one file does not affect other files");
    disk.mend();
    is_eio(File::open(mount.path("file")).unwrap().sync_all());
    is_kept_back(&mount, "file");
    assert_eq!(fs::read(mount.pool("file")).unwrap(), b"as it was");
}

/// SEMANTICS 43: "Clean content that did not reach the device is discarded and fetched again"
#[test]
fn clean_content_that_was_not_written_back_is_fetched_again() {
    let (disk, mount) = mounted();
    let names = ["read", "written", "forgotten"];
    for (seed, name) in names.into_iter().enumerate() {
        fs::write(mount.pool(name), content(seed as u64, LEN)).unwrap();
        assert_eq!(fs::read(mount.path(name)).unwrap(), content(seed as u64, LEN));
    }
    disk.fail();
    disk.write_back();
    disk.mend();
    disk.forget_content();
    let fetched = mount.status().counters.fetches;
    assert!(fs::read(mount.path("read")).unwrap() == content(0, LEN), "other bytes than the pool's");
    let mut written = OpenOptions::new().append(true).open(mount.path("written")).unwrap();
    written.write_all(b"more").unwrap();
    written.sync_all().unwrap();
    drop(written);
    let expected = [content(1, LEN), b"more".to_vec()].concat();
    assert!(fs::read(mount.path("written")).unwrap() == expected, "other bytes than the pool's");
    // A device that failed to write metadata of its file system may report that more than once.
    assert!(mount.status().counters.fetches >= fetched + 2, "{}", mount.log());
    // No program opens `forgotten`: its content is discarded when the fast pool is synced.
    let begun = Instant::now();
    while mount.status().resident_files > 1 {
        assert!(begun.elapsed() < EPOCH, "it was not looked at: {}", mount.log());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(fs::read(mount.path("forgotten")).unwrap() == content(2, LEN), "other bytes than the pool's");
    mount.flush();
    assert!(fs::read(mount.pool("written")).unwrap() == expected);
}

/// SEMANTICS 43, for content that one program is about to write, and other programs to read, when the daemon finds the
/// loss.
#[test]
fn no_program_is_given_content_that_was_not_written_back() {
    const FILES: u64 = 60;
    const READERS: usize = 3;
    let (disk, mount) = mounted();
    for seed in 0..FILES {
        let name = seed.to_string();
        fs::write(mount.pool(&name), content(seed, LEN)).unwrap();
        assert!(fs::read(mount.path(&name)).unwrap() == content(seed, LEN));
    }
    disk.fail();
    disk.write_back();
    disk.mend();
    disk.forget_content();
    let together = Barrier::new(READERS + 1);
    // A thread must not panic in this closure, because the other threads would wait for it.
    let each = |work: &dyn Fn(u64) -> Result<(), String>| {
        let one = |seed| {
            together.wait();
            work(seed).map_err(|what| format!("{seed}: {what}"))
        };
        (0..FILES).filter_map(|seed| one(seed).err()).collect::<Vec<String>>()
    };
    let reads = |seed: u64| match fs::read(mount.path(seed.to_string())) {
        Ok(found) if found.starts_with(&content(seed, LEN)) => Ok(()),
        Ok(_) => Err("other bytes than the pool's".into()),
        Err(error) => Err(error.to_string()),
    };
    let writes = |seed: u64| {
        let opened = OpenOptions::new().append(true).open(mount.path(seed.to_string()));
        opened.and_then(|mut file| file.write_all(b"more")).map_err(|error| error.to_string())
    };
    let failures = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(|| each(&reads))).collect();
        let mut failures = each(&writes);
        failures.extend(readers.into_iter().flat_map(|reader| reader.join().unwrap()));
        failures
    });
    assert!(failures.is_empty(), "{failures:#?}");
    mount.flush();
    for seed in 0..FILES {
        let expected = [content(seed, LEN), b"more".to_vec()].concat();
        assert!(fs::read(mount.pool(seed.to_string())).unwrap() == expected, "{seed}: other bytes went to the pool");
    }
}
