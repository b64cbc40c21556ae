//! Failures outside of the program. Each gives a clear error that names the cause and the remedy; no data is lost, and
//! nothing hangs.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_api::operator::PoolState;
use forebay_tests::mount::{Mount, Options, Place, attempt, attempt_with, content};
use forebay_tests::process::{forebay, run, sh, spawn, wait, wait_until};

const SHELL: Duration = Duration::from_secs(60);
// Exit codes of the command line.
const USAGE: i32 = 2;
const POOL_UNAVAILABLE: i32 = 4;
const NO_SPACE: i32 = 5;
const BUSY: i32 = 6;
const DENIED: i32 = 7;
const CORRUPT: i32 = 8;

/// A user other than root.
const USER: u32 = 4711;

fn limit(limit: &str) -> Options {
    Options { limit: Some(limit.into()), ..Options::policy("[default]\nflush = \"manual\"\n") }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_full_fast_pool_is_refused_at_the_mount_with_its_name() {
    let place = Place::new();
    let fast = place.small_disk("fast", "ext4", 64);
    // dd ends with an error when the disk is full.
    sh(&fast, "dd if=/dev/zero of=filler bs=1M 2>/dev/null || true", SHELL);
    attempt(&place, &limit("10M")).refused(NO_SPACE, &[text(&fast), "too little room", "0 B free", "--fast"]);
    fs::remove_file(fast.join("filler")).unwrap();
    attempt(&place, &limit("10M")).ok();
}

#[test]
fn a_fast_pool_that_fills_up_says_enospc_and_keeps_what_it_has() {
    let place = Place::new();
    let fast = place.small_disk("fast", "ext4", 160);
    let mount = Mount::on(place, limit("100M"));
    fs::write(mount.path("before"), content(1, 1 << 20)).unwrap();
    File::open(mount.path("before")).unwrap().sync_all().unwrap();
    // Another program fills the disk, so that less than the limit is left.
    sh(&fast, "dd if=/dev/zero of=filler bs=1M 2>/dev/null || true", SHELL);
    let mut refused = false;
    for at in 0..64 {
        let written = File::create(mount.path(format!("more-{at}"))).and_then(|mut file| {
            file.write_all(&content(at, 1 << 20))?;
            file.sync_all()
        });
        if let Err(error) = written {
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
            refused = true;
            break;
        }
    }
    assert!(refused, "a full disk took everything");
    assert_eq!(fs::read(mount.path("before")).unwrap(), content(1, 1 << 20));
    fs::remove_file(fast.join("filler")).unwrap();
    fs::write(mount.path("after"), content(2, 1 << 20)).unwrap();
    mount.umount();
    mount.mount();
    mount.flush();
    for (name, seed) in [("before", 1), ("after", 2)] {
        assert_eq!(fs::read(mount.pool(name)).unwrap(), content(seed, 1 << 20), "{name}");
    }
}

#[test]
fn a_read_only_fast_pool_is_refused_with_its_name() {
    let place = Place::new();
    let fast = place.small_disk("fast", "tmpfs", 64);
    sh(place.at("").as_path(), "mount -o remount,ro fast", SHELL);
    attempt(&place, &limit("10M")).refused(DENIED, &[text(&fast), "read-only", "--fast"]);
}

#[test]
fn a_missing_fast_pool_is_made_and_a_file_in_its_place_is_refused() {
    let place = Place::new();
    fs::remove_dir(place.fast()).unwrap();
    attempt(&place, &limit("10M")).ok();
    assert!(place.fast().join("catalog").is_dir());

    let place = Place::new();
    fs::remove_dir(place.fast()).unwrap();
    fs::write(place.fast(), "").unwrap();
    attempt(&place, &limit("10M")).refused(USAGE, &[text(&place.fast()), "not a directory"]);
}

/// SEMANTICS 32: "A fast-pool directory serves one daemon: a second daemon is refused, and the error names the mount
/// that uses the directory."
#[test]
fn a_fast_pool_of_another_mount_is_refused_with_the_name_of_that_mount() {
    let mount = Mount::new(limit("10M"));
    fs::write(mount.path("a"), "kept").unwrap();
    let other = Place::new();
    let (pool, mnt, fast) = (other.pool(), other.mnt(), mount.place.fast());
    let words: [&OsStr; 4] = [pool.as_os_str(), mnt.as_os_str(), "--fast".as_ref(), fast.as_os_str()];
    let answer = attempt_with(&other, &limit("10M"), &words);
    answer.refused(BUSY, &[text(&fast), text(&mount.place.mnt()), "umount"]);
    assert_eq!(fs::read(mount.path("a")).unwrap(), b"kept");
}

#[test]
fn a_limit_above_the_partition_is_refused_with_both_numbers() {
    let place = Place::new();
    let fast = place.small_disk("fast", "tmpfs", 64);
    attempt(&place, &limit("1TB")).refused(NO_SPACE, &[text(&fast), "931.3 GiB", "64.0 MiB", "--limit"]);
}

#[test]
fn a_pool_that_does_not_exist_is_refused_with_its_name() {
    let place = Place::new();
    fs::remove_dir(place.pool()).unwrap();
    attempt(&place, &limit("10M")).refused(POOL_UNAVAILABLE, &[text(&place.pool()), "try:"]);
}

#[test]
fn a_mount_of_forebay_is_no_pool_and_no_fast_pool() {
    let mount = Mount::new(limit("10M"));
    fs::create_dir(mount.path("inner")).unwrap();
    let other = Place::new();
    let (inner, pool, mnt, fast) = (mount.path("inner"), other.pool(), other.mnt(), other.fast());
    for (pool, fast, what) in [(&inner, &fast, "the pool"), (&pool, &inner, "the fast pool")] {
        let words = [pool.as_os_str(), mnt.as_os_str(), "--fast".as_ref(), fast.as_os_str()];
        attempt_with(&other, &limit("10M"), &words).refused(USAGE, &[what, text(&mount.place.mnt()), "try:"]);
    }
}

#[test]
fn a_node_without_certificates_says_what_to_install() {
    let place = Place::new();
    let mnt = place.mnt();
    for words in [["mount", "https://127.0.0.1:9/", text(&mnt)], ["serve", "http://127.0.0.1:9", "--reverse-proxy"]] {
        let mut command = Command::new(forebay());
        command.args(words).arg("--fast").arg(place.fast()).args(["--limit", "64M"]);
        command.env("SSL_CERT_FILE", place.at("nothing.pem")).env("SSL_CERT_DIR", place.at("nothing"));
        run(&mut command, SHELL).refused(USAGE, &["install ca-certificates", "SSL_CERT_FILE"]);
    }
}

const IDLE: &str = "[default]\nflush = \"idle:100ms\"\n[pool]\ndeadline = \"2s\"\n";

/// Writes files while `vanish` takes the pool away. Then reads them, and files that only the pool has.
fn load(mount: &Mount, vanish: impl FnOnce()) {
    let mut vanish = Some(vanish);
    for at in 0..200 {
        fs::write(mount.path(format!("f-{at}")), content(at, 10_000)).unwrap();
        if at == 100 {
            vanish.take().unwrap()();
        }
    }
    // A read of a file that only the pool has may fail, but never returns other bytes.
    for at in 0..20 {
        let mut bytes = Vec::new();
        let read = File::open(mount.path(format!("cold-{at}"))).and_then(|mut f| f.read_to_end(&mut bytes));
        assert!(read.is_err() || bytes == content(at, 200_000), "cold-{at} was read as something else");
    }
    let flushed = mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]);
    assert!(matches!(flushed.code, Some(1 | POOL_UNAVAILABLE)), "{flushed}");
    assert!(mount.status().dirty_files > 0);
    for at in 0..200 {
        assert_eq!(fs::read(mount.path(format!("f-{at}"))).unwrap(), content(at, 10_000), "f-{at}");
    }
}

fn make_cold(pool: &Path) {
    for at in 0..20 {
        fs::write(pool.join(format!("cold-{at}")), content(at, 200_000)).unwrap();
    }
}

fn all_is_in_the_pool(mount: &Mount) {
    for at in 0..200 {
        assert_eq!(fs::read(mount.pool(format!("f-{at}"))).unwrap(), content(at, 10_000), "f-{at}");
    }
    for at in 0..20 {
        assert_eq!(fs::read(mount.path(format!("cold-{at}"))).unwrap(), content(at, 200_000), "cold-{at}");
    }
    // The daemon sweeps unfinished uploads of the one before it in the background. The mount never shows them.
    let count = |dir: &Path| fs::read_dir(dir).unwrap().count();
    wait_until("the pool has nothing more than the mount shows", || {
        count(&mount.place.pool()) == count(&mount.place.mnt())
    });
    assert!(mount.status().conflicts.is_empty(), "{:?}", mount.status().conflicts);
}

/// Freezes a file system: every call that writes to it blocks until this is dropped.
struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    fn new(file_system: &'a Path) -> Self {
        sh(file_system, "fsfreeze --freeze .", SHELL);
        Self(file_system)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let thawed = Command::new("fsfreeze").arg("--unfreeze").arg(self.0).status();
        assert!(thawed.is_ok_and(|s| s.success()) || std::thread::panicking(), "the pool stays frozen");
    }
}

/// SEMANTICS 13: "Changes that were made while the pool did not answer are flushed when it answers again."
#[test]
fn a_pool_that_hangs_under_load_costs_errors_and_no_bytes() {
    let place = Place::new();
    let pool = place.small_disk("pool", "ext4", 100);
    make_cold(&pool);
    sh(&pool, "rmdir lost+found && sync -f .", SHELL);
    let mount = Mount::on(place, Options::policy(IDLE));
    let mut frozen = None;
    load(&mount, || frozen = Some(Frozen::new(&pool)));
    // A frozen file system answers what it is asked, and only what changes it hangs. So between two attempts of the
    // write-back, the pool may count as up for a moment.
    wait_until("the pool counts as down", || mount.status().pool_state == PoolState::Down);
    drop(frozen);
    let begun = Instant::now();
    while mount.status().pool_state == PoolState::Down {
        assert!(begun.elapsed() < SHELL, "the pool is back, and stays down: {:?}", mount.status().pool_failure);
        std::thread::sleep(Duration::from_millis(100));
    }
    mount.flush();
    all_is_in_the_pool(&mount);
}

/// Longer than a client waits for a daemon that sends nothing.
const LONGER_THAN_SILENCE: Duration = Duration::from_secs(23);

#[test]
fn a_fast_pool_that_hangs_is_waited_for() {
    let place = Place::new();
    let fast = place.small_disk("fast", "ext4", 200);
    make_cold(&place.pool());
    let mount = Mount::on(place, limit("100M"));
    let frozen = Frozen::new(&fast);
    let begun = Instant::now();
    let mut stage = spawn(Command::new(forebay()).arg("stage").arg(mount.place.mnt())).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let status = mount.forebay(["status"], &[&mount.place.mnt()]);
    assert!(status.code == Some(0) || status.code == Some(3) && status.out.contains("stuck"), "{status}");
    std::thread::sleep(LONGER_THAN_SILENCE.saturating_sub(begun.elapsed()));
    assert!(stage.try_wait().unwrap().is_none(), "nothing can have been staged");
    drop(frozen);
    assert!(wait(&mut stage, SHELL).is_some_and(|s| s.success()));
    all_is_staged(&mount);
}

fn all_is_staged(mount: &Mount) {
    fs::remove_dir_all(mount.place.pool()).unwrap();
    for at in 0..20 {
        assert_eq!(fs::read(mount.path(format!("cold-{at}"))).unwrap(), content(at, 200_000), "cold-{at}");
    }
}

/// Makes every call to a file system fail from now on, as if its device were gone.
fn shut_down(file_system: &Path) {
    const SHUTDOWN: libc::Ioctl = 0x8004_587d_u32 as libc::Ioctl;
    const AFTER_FLUSHING_THE_LOG: u32 = 1;
    let dir = File::open(file_system).unwrap();
    // SAFETY: the request reads one number, which outlives the call.
    let done = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&dir), SHUTDOWN, &AFTER_FLUSHING_THE_LOG) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_pool_whose_file_system_dies_under_load_is_served_again_after_a_remount() {
    let place = Place::new();
    let pool = place.small_disk("pool", "ext4", 100);
    make_cold(&pool);
    sh(&pool, "rmdir lost+found && sync -f .", SHELL);
    let mount = Mount::on(place, Options::policy(IDLE));
    load(&mount, || shut_down(&pool));
    sh(&mount.place.at(""), "umount --lazy pool", SHELL);
    mount.umount();
    // The file system gets another device number, because `other` took its old one.
    mount.place.small_disk("other", "ext4", 16);
    sh(&mount.place.at(""), "mount -o loop pool.img pool", SHELL);
    mount.mount();
    mount.flush();
    all_is_in_the_pool(&mount);
}

/// Returns an unmounted mount whose fast pool has a fetched, a flushed and a dirty file.
fn filled() -> Mount {
    let place = Place::new();
    fs::write(place.pool().join("fetched"), content(1, 2_000_000)).unwrap();
    fs::set_permissions(place.pool(), fs::Permissions::from_mode(0o775)).unwrap();
    chown(place.pool(), Some(USER), Some(USER)).unwrap();
    let mount = Mount::on(place, limit("100M"));
    fs::write(mount.path("flushed"), content(2, 30_000)).unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.path("fetched")).unwrap(), content(1, 2_000_000));
    fs::create_dir_all(mount.path("new/dir")).unwrap();
    chown(mount.path("new"), Some(USER), Some(USER)).unwrap();
    fs::write(mount.path("new/dir/only-here"), content(3, 50_000)).unwrap();
    fs::set_permissions(mount.path("new/dir/only-here"), fs::Permissions::from_mode(0o640)).unwrap();
    File::open(mount.path("new/dir/only-here")).unwrap().sync_all().unwrap();
    mount.umount();
    mount
}

fn saved(mount: &Mount, below: &str) -> Vec<Vec<u8>> {
    let Ok(files) = fs::read_dir(mount.place.fast().join("saved").join(below)) else { return Vec::new() };
    files.map(|file| fs::read(file.unwrap().path()).unwrap()).collect()
}

#[test]
fn a_damaged_catalog_is_refused_and_repair_sets_aside_what_the_pool_does_not_have() {
    for damage in [
        "printf garbage >CURRENT",
        "rm CURRENT",
        "for f in MANIFEST-*; do truncate -s 10 $f; done",
        "for f in MANIFEST-*; do head -c 100000 /dev/urandom >$f; done",
        "rm MANIFEST-*",
    ] {
        let mount = filled();
        let (fast, catalog) = (mount.place.fast(), mount.place.fast().join("catalog"));
        sh(&catalog, damage, SHELL);
        for _ in 0..2 {
            attempt(&mount.place, &limit("100M")).refused(CORRUPT, &[text(&catalog), "fsck --repair", text(&fast)]);
            mount.forebay(["fsck"], &[&fast]).refused(CORRUPT, &[text(&catalog), "fsck --repair"]);
        }
        let repaired = mount.forebay(["fsck", "--repair"], &[&fast]).ok();
        assert!(repaired.out.contains("1 file not in the pool: set aside"), "{damage}: {repaired}");
        let only_here = fs::read(fast.join("saved/files/new/dir/only-here")).unwrap();
        assert!(only_here == content(3, 50_000), "{damage}");
        // Checksums prove that fetched content is the pool's. Content that was written in the mount and flushed has no
        // such proof, so it is set aside.
        assert_eq!(saved(&mount, "other"), [content(2, 30_000)], "{damage}");
        mount.mount();
        let put_back = format!("cp -a {}/saved/files/. {}/", fast.display(), mount.place.mnt().display());
        sh(Path::new("/"), &put_back, SHELL);
        mount.flush();
        // The owners and modes of the directories above it, also of the root, are those of before.
        for at in [mount.path(""), mount.pool("")] {
            let seen = |below: &str| {
                let meta = fs::metadata(at.join(below)).unwrap();
                (meta.mode() & 0o7777, meta.uid(), meta.gid())
            };
            assert_eq!(seen(""), (0o775, USER, USER), "{damage}: {}", at.display());
            assert_eq!(seen("new"), (0o755, USER, USER), "{damage}: {}", at.display());
            assert_eq!(seen("new/dir"), (0o755, 0, 0), "{damage}: {}", at.display());
            assert_eq!(seen("new/dir/only-here"), (0o640, 0, 0), "{damage}: {}", at.display());
        }
        assert!(fs::read(mount.pool("new/dir/only-here")).unwrap() == content(3, 50_000), "{damage}");
        assert_eq!(fs::read(mount.path("flushed")).unwrap(), content(2, 30_000));
        mount.forebay(["fsck"], &[&mount.place.mnt()]).ok();
    }
}

/// Returns the content of every file below a directory.
fn files_below(dir: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let below = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![fs::read(path).unwrap()] };
    entries.flat_map(|entry| below(entry.unwrap().path())).collect()
}

#[test]
fn of_a_catalog_whose_records_are_damaged_all_content_is_kept() {
    for damage in [
        // In the middle of the log: the death of a process can only cut off its end.
        "dd if=/dev/zero of=$(ls -S *.log | head -1) bs=1 seek=300 count=8 conv=notrunc status=none",
        "rm -r ../catalog",
        "rm *.log *.sst",
        "for f in *.log *.sst; do truncate -s 100 $f; done",
        "for f in *.sst; do dd if=/dev/zero of=$f bs=1 seek=20 count=8 conv=notrunc status=none; done",
    ] {
        let mount = filled();
        if damage.contains("sst") {
            // After another start the records are in table files.
            mount.mount();
            mount.umount();
        }
        let fast = mount.place.fast();
        sh(&fast.join("catalog"), damage, SHELL);
        attempt(&mount.place, &limit("100M")).refused(CORRUPT, &["fsck --repair", text(&fast)]);
        let repaired = mount.forebay(["fsck", "--repair"], &[&fast]);
        let kept = files_below(&fast.join("saved"));
        for (name, expected) in [("flushed", content(2, 30_000)), ("only-here", content(3, 50_000))] {
            assert!(kept.contains(&expected), "{damage}: the content of {name} is gone: {repaired}\n{}", mount.log());
        }
        mount.mount();
        assert_eq!(fs::read(mount.path("flushed")).unwrap(), content(2, 30_000));
        assert_eq!(fs::read(mount.path("fetched")).unwrap(), content(1, 2_000_000));
    }
}

#[test]
fn content_files_that_were_truncated_are_named_by_fsck_and_fetched_again() {
    let mount = Mount::new(limit("100M"));
    // The file is written in the mount and flushed: from now on the pool's copy is authoritative.
    fs::write(mount.path("a"), content(2, 300_000)).unwrap();
    mount.flush();
    mount.umount();
    let cut = "find content -type f -exec truncate -s 1000 {} +";
    sh(&mount.place.fast(), cut, SHELL);
    mount
        .forebay(["fsck"], &[&mount.place.fast()])
        .refused(CORRUPT, &["/a: content file", "1000 bytes instead of 300000"]);
    mount.mount();
    assert_eq!(fs::read(mount.path("a")).unwrap(), content(2, 300_000));
    mount.flush();
    assert_eq!(fs::read(mount.pool("a")).unwrap(), content(2, 300_000));
}

#[test]
fn a_lost_content_file_of_what_was_not_flushed_is_an_error_and_not_a_flush() {
    let place = Place::new();
    fs::write(place.pool().join("a"), content(1, 300_000)).unwrap();
    let mount = Mount::on(place, limit("100M"));
    fs::write(mount.path("a"), content(2, 300_000)).unwrap();
    fs::write(mount.path("b"), content(3, 1000)).unwrap();
    mount.umount();
    sh(&mount.place.fast(), "find content -type f -size +100k -delete", SHELL);
    for words in [&["fsck"][..], &["fsck", "--repair"]] {
        let mut command = Command::new(forebay());
        run(command.args(words).arg(mount.place.fast()), SHELL).refused(CORRUPT, &["/a: content file", "is missing"]);
    }
    mount.mount();
    let read = fs::read(mount.path("a")).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(libc::EIO), "{read}");
    mount.forebay(["flush", "--wait"], &[&mount.place.mnt()]).refused(1, &["/a"]);
    assert_eq!(fs::read(mount.pool("a")).unwrap(), content(1, 300_000));
    assert_eq!(fs::read(mount.pool("b")).unwrap(), content(3, 1000));
    // After a new write the file is whole again.
    fs::write(mount.path("a"), content(4, 2000)).unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.pool("a")).unwrap(), content(4, 2000));
}

#[test]
fn a_fast_pool_whose_device_dies_costs_errors_and_no_synced_bytes() {
    let place = Place::new();
    let fast = place.small_disk("fast", "ext4", 200);
    let mount = Mount::on(place, limit("100M"));
    fs::write(mount.path("before"), content(1, 1 << 20)).unwrap();
    File::open(mount.path("before")).unwrap().sync_all().unwrap();
    shut_down(&fast);
    let written = File::create(mount.path("after")).and_then(|mut file| {
        file.write_all(&content(2, 1 << 20))?;
        file.sync_all()
    });
    assert!(written.is_err(), "a dead device took it");
    mount.status();
    let ended = mount.forebay(["umount"], &[&mount.place.mnt()]);
    assert!(matches!(ended.code, Some(0 | BUSY)), "{ended}");
    sh(&mount.place.at(""), "umount fast && mount -o loop fast.img fast", SHELL);
    mount.mount();
    assert_eq!(fs::read(mount.path("before")).unwrap(), content(1, 1 << 20));
    mount.flush();
    assert_eq!(fs::read(mount.pool("before")).unwrap(), content(1, 1 << 20));
}

/// Returns names of the maximum length, and names with every byte that is allowed.
fn odd_names() -> Vec<OsString> {
    let every: Vec<u8> = (1..=255u8).filter(|b| *b != b'/').collect();
    vec![
        OsString::from("x".repeat(255)),
        OsString::from("ä".repeat(127)),
        OsString::from_vec(vec![0xff; 255]),
        OsString::from_vec(every),
        OsString::from_vec(b"\xc3\x28 not utf-8".to_vec()),
        OsString::from("line\nbreak \\x41 'quotes\" *?[a]"),
    ]
}

#[test]
fn names_of_255_bytes_and_not_utf8_go_there_and_back() {
    let mount = Mount::new(limit("100M"));
    for (seed, name) in (0u64..).zip(odd_names()) {
        let bytes = content(seed, 5_000);
        fs::write(mount.path(&name), &bytes).unwrap();
        mount.forebay(["flush", "--wait"], &[&mount.path(&name)]).ok();
        assert_eq!(fs::read(mount.pool(&name)).unwrap(), bytes, "{}", name.as_bytes().escape_ascii());
        mount.forebay(["evict"], &[&mount.path(&name)]).ok();
        mount.forebay(["stage"], &[&mount.path(&name)]).ok();
        assert_eq!(fs::read(mount.path(&name)).unwrap(), bytes, "{}", name.as_bytes().escape_ascii());
    }
    let mut listed: Vec<_> = fs::read_dir(mount.place.mnt()).unwrap().map(|e| e.unwrap().file_name()).collect();
    let mut expected = odd_names();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    let too_long = File::create(mount.path("x".repeat(256))).unwrap_err();
    assert_eq!(too_long.raw_os_error(), Some(libc::ENAMETOOLONG));
}

#[test]
fn deep_trees_are_made_flushed_and_removed() {
    // As deep as a path of PATH_MAX bytes allows below the mount.
    let mount = Mount::new(limit("100M"));
    let deep: PathBuf = (0..1500).map(|_| "d").collect();
    fs::create_dir_all(mount.path(&deep)).unwrap();
    fs::write(mount.path(&deep).join("leaf"), "deep").unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.pool(&deep).join("leaf")).unwrap(), b"deep");
    mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    assert_eq!(fs::read(mount.path(&deep).join("leaf")).unwrap(), b"deep");
    fs::remove_dir_all(mount.path("d")).unwrap();
    mount.flush();
    assert!(!mount.pool("d").exists());
}

/// The commands print each odd name in one line of text, or as JSON, and `stage` finds the odd names in a list.
#[test]
fn odd_names_pass_through_lists_and_listings() {
    let mount = Mount::new(limit("100M"));
    let mut list = Vec::new();
    for name in odd_names() {
        fs::write(mount.pool(&name), "1").unwrap();
        list.extend(mount.path(&name).as_os_str().as_bytes());
        list.push(0);
    }
    let file = mount.place.at("list");
    fs::write(&file, list).unwrap();
    mount.forebay(["stage", "-0", &format!("@{}", text(&file))], &[]).ok();
    assert_eq!(mount.status().resident_files, odd_names().len() as u64);
    for name in odd_names() {
        fs::write(mount.path(&name), "22").unwrap();
    }
    for command in [&["ls"][..], &["dirty"], &["du"]] {
        let words = |more: &[&str]| {
            let mut run_it = Command::new(forebay());
            run(run_it.args(more).args(command).arg(mount.place.mnt()), SHELL).ok().out
        };
        let lines = words(&[]);
        let steers = |c: char| c.is_control() && c != '\n';
        assert!(!lines.contains(steers), "{command:?}: {lines:?}");
        for line in words(&["--json"]).lines() {
            serde_json::from_str::<serde_json::Value>(line).unwrap();
        }
    }
    // One row for each name: a newline in a name does not make two rows.
    assert_eq!(mount.forebay(["ls"], &[&mount.place.mnt()]).ok().out.lines().count(), odd_names().len());
}

/// A time that no clock shows is a time like any other: no request of a program ends the daemon.
#[test]
fn the_earliest_and_the_latest_time_are_set_and_end_no_daemon() {
    let mount = Mount::new(limit("100M"));
    let path = mount.path("file");
    fs::write(&path, "1").unwrap();
    let file = File::open(&path).unwrap();
    let worker = mount.worker();
    for secs in [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX - 1, i64::MAX] {
        for nanos in [0, 1, 999_999_999] {
            let time = rustix::fs::Timespec { tv_sec: secs, tv_nsec: nanos };
            let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
            // The content file's file system may know fewer times than the kernel.
            rustix::fs::futimens(&file, &times).unwrap();
            fs::metadata(&path).unwrap();
            mount.forebay(["ls"], &[&mount.place.mnt()]).ok();
        }
    }
    assert_eq!(mount.worker(), worker, "the daemon ended");
    assert_eq!(fs::read(&path).unwrap(), b"1");
}
