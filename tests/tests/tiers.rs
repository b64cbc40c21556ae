//! Tiers of the fast pool: content moves between memory and disks, and devices fail.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use forebay_api::operator::{DeviceState, Status, TierStatus};
use forebay_tests::disk::Disk;
use forebay_tests::mount::{Mount, Options, Place, alone, attempt, content};
use forebay_tests::settings::seed;

/// How long content may take to move, or a device to be bypassed and used again.
const WAIT: Duration = Duration::from_secs(60);
const LEN: usize = 200_000;

const MANUAL: &str = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n";

/// Returns a mount with a tier in memory above the fast directory.
fn with_memory(limit: &str) -> Mount {
    let place = Place::new();
    let ram = place.small_disk("ram", "tmpfs", 64);
    let tier = format!("[[tier]]\nname = \"ram\"\nfast = [\"{}\"]\nlimit = \"{limit}\"\n", ram.join("f").display());
    Mount::on(place, Options::policy(&format!("{MANUAL}{tier}")))
}

fn tier(mount: &Mount, name: &str) -> TierStatus {
    let status = mount.status();
    status.tiers.iter().find(|tier| tier.name == name).unwrap_or_else(|| panic!("{status:?}")).clone()
}

#[track_caller]
fn wait_until(mount: &Mount, what: &str, holds: impl Fn(&Status) -> bool) {
    let deadline = Instant::now() + WAIT;
    loop {
        let status = mount.status();
        if holds(&status) {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {status:#?}\n{}", mount.log());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the content files below a directory of the fast pool.
fn files_in(fast: &Path) -> BTreeSet<PathBuf> {
    let dirs = fs::read_dir(fast.join("content")).into_iter().flatten().flatten();
    let files = dirs.flat_map(|dir| fs::read_dir(dir.path()).into_iter().flatten().flatten());
    files.map(|file| file.path()).filter(|file| fs::metadata(file).is_ok_and(|meta| meta.len() > 0)).collect()
}

fn ram(mount: &Mount) -> PathBuf {
    mount.place.at("ram/f")
}

fn name(number: u64) -> String {
    format!("file{number}")
}

/// Puts files into the pool.
fn put(mount: &Mount, numbers: std::ops::Range<u64>) {
    for number in numbers {
        fs::write(mount.place.pool().join(name(number)), content(number, LEN)).unwrap();
    }
}

#[track_caller]
fn is_right(mount: &Mount, number: u64) {
    assert!(fs::read(mount.path(name(number))).unwrap() == content(number, LEN), "{}", name(number));
}

#[track_caller]
fn is_sound(mount: &Mount) {
    let said = mount.forebay(["fsck"], &[&mount.place.mnt()]);
    assert_eq!(said.code, Some(0), "{said}");
}

/// SEMANTICS 90: "A move of content between tiers changes nothing that programs see: bytes, times and open files stay as
/// they are."
#[test]
fn what_is_used_is_promoted_into_memory_and_what_is_cold_is_demoted() {
    let mount = with_memory("2MiB");
    put(&mount, 0..20);
    (0..20).for_each(|number| is_right(&mount, number));
    let before = fs::metadata(mount.path(name(0))).unwrap();
    assert_eq!((tier(&mount, "ram").used_bytes, files_in(&ram(&mount)).len()), (0, 0), "one use is not enough");
    is_right(&mount, 0);
    wait_until(&mount, "it is promoted", |status| status.tiers[0].promoted_files == 1);
    assert_eq!(files_in(&ram(&mount)).len(), 1);
    let after = fs::metadata(mount.path(name(0))).unwrap();
    assert_eq!((before.modified().unwrap(), before.len()), (after.modified().unwrap(), after.len()));
    // All are used more often than it: they take its place, within the limit.
    for _ in 0..3 {
        (1..20).for_each(|number| is_right(&mount, number));
    }
    wait_until(&mount, "the first is demoted", |status| {
        status.tiers[0].demoted_files > 0 && status.tiers[0].used_bytes > 1 << 20
    });
    assert!(tier(&mount, "ram").used_bytes <= 2 << 20, "{:?}", tier(&mount, "ram"));
    (0..20).for_each(|number| is_right(&mount, number));
    assert_eq!(mount.status().counters.pool_read_bytes, 20 * LEN as u64, "nothing was fetched twice");
    is_sound(&mount);
}

/// SEMANTICS 91: "Content in a memory tier is never the only copy: a file leaves the tier before it is changed, and what
/// `fsync` acknowledged is on a disk."
#[test]
fn a_file_in_memory_leaves_it_before_it_is_changed() {
    let mount = with_memory("8MiB");
    put(&mount, 0..4);
    for _ in 0..2 {
        (0..4).for_each(|number| is_right(&mount, number));
    }
    wait_until(&mount, "all are promoted", |status| status.tiers[0].promoted_files == 4);
    // A program that has it open for reading sees what is written.
    let reader = File::open(mount.path(name(0))).unwrap();
    let mut bytes = vec![0; LEN];
    reader.read_exact_at(&mut bytes, 0).unwrap();
    let mut writer = OpenOptions::new().append(true).open(mount.path(name(0))).unwrap();
    writer.write_all(b"more").unwrap();
    writer.sync_all().unwrap();
    let mut end = [0; 4];
    reader.read_exact_at(&mut end, LEN as u64).unwrap();
    assert_eq!(&end, b"more");
    OpenOptions::new().write(true).open(mount.path(name(1))).unwrap().set_len(100).unwrap();
    fs::write(mount.path(name(2)), "new").unwrap();
    File::open(mount.path(name(2))).unwrap().sync_all().unwrap();
    File::open(mount.path(name(1))).unwrap().sync_all().unwrap();
    wait_until(&mount, "one is left", |_| files_in(&ram(&mount)).len() == 1);
    drop((reader, writer));
    // The machine is restarted.
    mount.kill_all();
    mount.forebay(["umount", "--lazy"], &[&mount.place.mnt()]);
    fs::remove_dir_all(ram(&mount)).unwrap();
    mount.mount();
    let expected = [[content(0, LEN), b"more".to_vec()].concat(), content(1, 100), b"new".to_vec(), content(3, LEN)];
    for (number, expected) in expected.iter().enumerate() {
        assert!(fs::read(mount.path(name(number as u64))).unwrap() == *expected, "{number}");
    }
    mount.flush();
    assert!(fs::read(mount.pool(name(0))).unwrap() == expected[0]);
    is_sound(&mount);
}

/// SEMANTICS 92: "After a restart of the machine, what was in a memory tier is read from the pool again."
#[test]
fn content_in_memory_is_absent_after_a_restart_of_the_machine() {
    let mount = with_memory("8MiB");
    put(&mount, 0..5);
    for _ in 0..2 {
        (0..5).for_each(|number| is_right(&mount, number));
    }
    wait_until(&mount, "all are promoted", |status| status.tiers[0].promoted_files == 5);
    let read = mount.status().counters.pool_read_bytes;
    mount.umount();
    mount.mount();
    (0..5).for_each(|number| is_right(&mount, number));
    assert_eq!((mount.status().counters.pool_read_bytes, read), (0, 5 * LEN as u64), "a restart of the daemon");
    mount.umount();
    fs::remove_dir_all(ram(&mount)).unwrap();
    mount.mount();
    let status = mount.status();
    assert_eq!((status.tiers[0].used_bytes, status.resident_files), (0, 0));
    (0..5).for_each(|number| is_right(&mount, number));
    assert_eq!(mount.status().counters.pool_read_bytes, 5 * LEN as u64);
    assert!(!mount.log().contains("ERROR"), "{}", mount.log());
    is_sound(&mount);
}

/// Daemons are killed while content moves: every file has its bytes afterwards, in one content file.
#[test]
fn moves_survive_kill_9_at_random_points() {
    let _alone = alone();
    let mount = with_memory("1MiB");
    let files = 12;
    put(&mount, 0..files);
    let mut random = seed();
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut versions = vec![0; files as usize];
    for round in 0..25u64 {
        for _ in 0..30 {
            let number = next(files);
            let is = content(number + 1000 * versions[number as usize], LEN);
            assert!(fs::read(mount.path(name(number))).unwrap() == is, "{} in round {round}", name(number));
        }
        let written = next(files);
        versions[written as usize] = round + 1;
        let mut file = OpenOptions::new().write(true).open(mount.path(name(written))).unwrap();
        file.write_all(&content(written + 1000 * (round + 1), LEN)).unwrap();
        file.sync_all().unwrap();
        drop(file);
        if round % 3 == 0 {
            mount.flush();
        }
        thread::sleep(Duration::from_millis(next(120)));
        let old = mount.worker();
        mount.kill_worker();
        mount.wait_for_other_worker(old);
    }
    mount.flush();
    for number in 0..files {
        let is = content(number + 1000 * versions[number as usize], LEN);
        assert!(fs::read(mount.path(name(number))).unwrap() == is, "{}", name(number));
        assert!(fs::read(mount.pool(name(number))).unwrap() == is, "{} in the pool", name(number));
    }
    is_sound(&mount);
    mount.forebay(["fsck", "--repair"], &[&mount.place.mnt()]).ok();
    let all = files_in(&ram(&mount)).len() + files_in(&mount.place.fast()).len();
    assert_eq!(all, files as usize, "one content file for each");
}

/// SEMANTICS 93: "If a device fails that does not hold the catalog, clean content on it is read from the pool, nothing new
/// is placed on it, and `status` and `dirty` name what is not in the pool yet. When it works again, it is used again."
#[test]
fn a_device_that_fails_is_bypassed_until_it_works_again() {
    let place = Place::new();
    let disk = Disk::new(&place, "second", 300);
    let dir = disk.dir.join("f");
    let tier = format!("[[tier]]\nname = \"nvme\"\nfast = [\"{}\"]\nlimit = \"100MiB\"\nuses = 0\n", dir.display());
    let text = format!("{MANUAL}{tier}");
    let mount = Mount::on(place, Options::policy(&text));
    // What is written goes to the tier above; what was flushed is clean there.
    for number in 0..6 {
        fs::write(mount.path(name(number)), content(number, LEN)).unwrap();
    }
    mount.flush();
    let mut kept = File::create(mount.path("kept")).unwrap();
    kept.write_all(&content(100, LEN)).unwrap();
    kept.sync_all().unwrap();
    drop(kept);
    assert_eq!(files_in(&dir).len(), 7);
    disk.write_back();
    disk.forget_content_of(&dir);
    disk.fail();
    // A program holds a file open, so the device is looked at.
    let open = File::open(mount.path(name(5))).unwrap();
    wait_until(&mount, "it is bypassed", |status| {
        status.fast.iter().any(|device| device.state == DeviceState::Bypassed)
    });
    let read = mount.status().counters.pool_read_bytes;
    (0..5).for_each(|number| is_right(&mount, number));
    assert!(mount.status().counters.pool_read_bytes - read >= 5 * LEN as u64);
    let status = mount.status();
    let failing = status.fast.iter().find(|device| device.tier.as_deref() == Some("nvme")).unwrap();
    assert!(failing.errors >= 3 && status.fast[0].state == DeviceState::Healthy, "{status:?}");
    assert!(failing.last_error.is_some(), "{status:?}");
    assert!(status.flush_errors.iter().any(|error| error.contains("kept") && error.contains("bypassed")), "{status:?}");
    let dirty = mount.forebay(["dirty"], &[&mount.place.mnt()]).ok().out;
    assert!(dirty.lines().any(|line| line.contains("kept") && line.contains("bypassed")), "{dirty}");
    assert!(mount.log().contains("kept") && mount.log().contains("on a device that fails"), "{}", mount.log());
    // What is written meanwhile is on the other device.
    let on_fast = files_in(&mount.place.fast()).len();
    let mut file = File::create(mount.path("meanwhile")).unwrap();
    file.write_all(&content(200, LEN)).unwrap();
    file.sync_all().unwrap();
    assert_eq!(files_in(&mount.place.fast()).len(), on_fast + 1);
    drop((file, open));
    mount.forebay(["flush", "--wait"], &[&mount.path("meanwhile")]).ok();
    disk.mend();
    wait_until(&mount, "it is used again", |status| {
        status.fast.iter().all(|device| device.state == DeviceState::Healthy)
    });
    mount.flush();
    assert!(fs::read(mount.pool("kept")).unwrap() == content(100, LEN));
    assert!(fs::read(mount.pool("meanwhile")).unwrap() == content(200, LEN));
    (0..6).for_each(|number| is_right(&mount, number));
    fs::write(mount.path("again"), content(300, LEN)).unwrap();
    assert!(fs::read(mount.path("again")).unwrap() == content(300, LEN));
    is_sound(&mount);
}

/// A tier is added to a fast pool that was used without it, and taken away again: refused while it holds what the pool
/// does not have.
#[test]
fn a_rule_names_the_tier_of_what_is_fetched() {
    let place = Place::new();
    let quick = place.at("quick");
    let text = format!(
        "{MANUAL}[[tier]]\nname = \"quick\"\nfast = [\"{}\"]\n[[rule]]\npaths = \"file1*\"\ntier = \"quick\"\n",
        quick.display()
    );
    let mount = Mount::on(place, Options::policy(&text));
    put(&mount, 0..20);
    (0..20).for_each(|number| is_right(&mount, number));
    assert_eq!(files_in(&quick).len(), 11, "file1 and file10 to file19");
    assert_eq!(files_in(&mount.place.fast()).len(), 9);
    is_sound(&mount);
    // Another policy does not take tiers away that are in use, not even when the daemon starts again.
    let without = mount.place.at("without.toml");
    fs::write(&without, MANUAL).unwrap();
    let applied = mount.forebay(["policy", "apply"], &[&without, &mount.place.mnt()]).ok().out;
    assert!(applied.contains("only at the next mount: tiers"), "{applied}");
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    assert_eq!(files_in(&quick).len(), 11);
    assert_eq!(tier(&mount, "quick").name, "quick");
    // A check of the fast pool without its daemon keeps what the tiers have.
    mount.umount();
    let checked = mount.forebay(["fsck"], &[&mount.place.fast()]);
    assert_eq!(checked.code, Some(0), "{checked}");
    mount.mount();
    (0..20).for_each(|number| is_right(&mount, number));
    assert_eq!(mount.status().counters.pool_read_bytes, 0, "all of it is still there");
    let wrong = mount.place.at("wrong.toml");
    fs::write(&wrong, text.replace("tier = \"quick\"", "tier = \"quik\"")).unwrap();
    let refused = mount.forebay(["policy", "check"], &[&wrong]);
    assert!(refused.code != Some(0) && refused.err.contains("did you mean `quick`?"), "{refused}");
}

#[test]
fn a_tier_comes_and_goes() {
    let place = Place::new();
    let second = place.at("second");
    let with = Options::policy(&format!("{MANUAL}[[tier]]\nname = \"nvme\"\nfast = [\"{}\"]\n", second.display()));
    let without = Options::policy(MANUAL);
    let mount = Mount::on(place, without.clone());
    fs::write(mount.path("old"), content(1, LEN)).unwrap();
    mount.umount();
    let mount = Mount::on(mount.place, with.clone());
    fs::write(mount.path("new"), content(2, LEN)).unwrap();
    assert_eq!((files_in(&second).len(), files_in(&mount.place.fast()).len()), (1, 1));
    assert!(fs::read(mount.path("old")).unwrap() == content(1, LEN));
    mount.umount();
    let said = attempt(&mount.place, &without);
    let text = format!("{}{}", said.out, said.err);
    assert!(said.code != Some(0) && text.contains("1 files that are not in the pool yet (new"), "{said}");
    let mount = Mount::on(mount.place, with);
    mount.flush();
    mount.umount();
    let mount = Mount::on(mount.place, without);
    assert!(fs::read(mount.path("new")).unwrap() == content(2, LEN));
    assert!(fs::read(mount.path("old")).unwrap() == content(1, LEN));
    is_sound(&mount);
}
