//! The sentences of docs/SEMANTICS.md that have short tests, through a mount, as a program sees them.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_tests::mapped::Mapped;
use forebay_tests::mount::{Mount, Options, Place, attempt, content};
use forebay_tests::process::{run, sh, wait_until};

const MANUAL: &str = "[default]\nflush = \"manual\"\n";
const SHELL: Duration = Duration::from_secs(60);

/// The permission check depends on a request in which the daemon finds another client's change of the directory. It
/// must not fail because of that change.
#[test]
fn users_are_not_refused_because_another_client_changes_the_directory() {
    let mount = Mount::new(Options::policy("[default]\nmetadata-ttl = \"0s\"\n"));
    fs::write(mount.pool("a"), "content").unwrap();
    for round in 0..40 {
        if round % 8 == 0 {
            // After a mount, the kernel knows of the root only that it is a directory.
            mount.umount();
            mount.mount();
        }
        fs::write(mount.pool(format!("new-{round}")), "").unwrap();
        run(Command::new("cat").arg(mount.path("a")).uid(1234).gid(1234), SHELL).ok();
    }
}

/// SEMANTICS 4: "Content that the pool does not have is never evicted."
#[test]
fn dirty_content_is_not_evicted_and_clean_content_is() {
    let mount = Mount::manual();
    let bytes = content(4, 100_000);
    fs::write(mount.path("a"), &bytes).unwrap();
    mount.forebay(["evict"], &[&mount.path("a")]).ok();
    assert_eq!(fs::read(mount.path("a")).unwrap(), bytes);
    assert!(!mount.pool("a").exists());
    mount.flush();
    mount.forebay(["evict"], &[&mount.path("a")]).ok();
    assert_eq!(mount.status().used_bytes, 0);
    assert_eq!(fs::read(mount.path("a")).unwrap(), bytes);
}

/// SEMANTICS 7: "If a content file is shorter than its record says, the daemon discards it and fetches the bytes again"
#[test]
fn truncated_content_file_is_fetched_again() {
    let mount = Mount::new(Options::default());
    let bytes = content(7, 300_000);
    fs::write(mount.pool("a"), &bytes).unwrap();
    assert_eq!(fs::read(mount.path("a")).unwrap(), bytes);
    mount.umount();
    let mut cut = 0;
    for dir in fs::read_dir(mount.place.fast().join("content")).unwrap() {
        for file in fs::read_dir(dir.unwrap().path()).unwrap() {
            File::options().write(true).open(file.unwrap().path()).unwrap().set_len(1000).unwrap();
            cut += 1;
        }
    }
    assert_eq!(cut, 1);
    mount.mount();
    assert_eq!(fs::read(mount.path("a")).unwrap(), bytes);
}

/// SEMANTICS 8: "Under `close-to-open`, the default, an open sees what any client flushed before it."
#[test]
fn open_sees_what_another_client_wrote_before() {
    let mount = Mount::new(Options::default());
    for round in 0..20 {
        let bytes = content(round, 5000 + round as usize);
        if round % 4 > 1 {
            // After an eviction, the open fetches the new version.
            mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
        }
        // Another node writes in place, or renames a new file over the old name.
        match round % 2 {
            0 => fs::write(mount.pool("a"), &bytes).unwrap(),
            _ => {
                fs::write(mount.pool("new"), &bytes).unwrap();
                fs::rename(mount.pool("new"), mount.pool("a")).unwrap();
            }
        }
        assert_eq!(fs::read(mount.path("a")).unwrap(), bytes, "round {round}");
    }
}

/// SEMANTICS 9: "Names and attributes lag behind the pool by at most `metadata-ttl`."
#[test]
fn names_and_attributes_from_another_client_appear_within_the_ttl() {
    let mount = Mount::new(Options::policy("[default]\nmetadata-ttl = \"1s\"\n"));
    fs::write(mount.pool("a"), "1").unwrap();
    fs::write(mount.pool("gone"), "").unwrap();
    fs::create_dir(mount.pool("dir")).unwrap();
    assert_eq!(fs::metadata(mount.path("a")).unwrap().len(), 1);
    assert!(mount.path("gone").exists() && !mount.path("dir/new").exists());
    fs::write(mount.pool("a"), "22").unwrap();
    fs::set_permissions(mount.pool("a"), fs::Permissions::from_mode(0o604)).unwrap();
    fs::write(mount.pool("dir/new"), "3").unwrap();
    fs::remove_file(mount.pool("gone")).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    // If the pool takes long to answer, what was known is shown.
    wait_until("the news", || fs::metadata(mount.path("a")).unwrap().len() == 2 && !mount.path("gone").exists());
    let attributes = fs::metadata(mount.path("a")).unwrap();
    assert_eq!((attributes.len(), attributes.mode() & 0o7777), (2, 0o604));
    assert!(!mount.path("gone").exists());
    assert!(mount.path("dir/new").exists());
    let listed: Vec<_> = fs::read_dir(mount.path("dir")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(listed, ["new"]);
}

/// SEMANTICS 10: "If the pool's copy of a dirty file changed, both copies are kept."
#[test]
fn conflict_keeps_both_and_is_reported() {
    let mount = Mount::manual();
    fs::write(mount.pool("a"), "first").unwrap();
    assert_eq!(fs::read(mount.path("a")).unwrap(), b"first");
    fs::write(mount.path("a"), "ours").unwrap();
    fs::write(mount.pool("a"), "theirs, longer").unwrap();
    mount.flush();
    assert_eq!(fs::read(mount.pool("a")).unwrap(), b"theirs, longer");
    let mut copies = Vec::new();
    for entry in fs::read_dir(mount.place.pool()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().starts_with("a.conflict-") {
            copies.push(fs::read(entry.path()).unwrap());
        }
    }
    assert_eq!(copies, [b"ours"]);
    assert_eq!(mount.status().conflicts.len(), 1);
    assert_eq!(fs::read(mount.path("a")).unwrap(), b"theirs, longer");
}

/// SEMANTICS 12: "While the pool does not answer, programs can read resident files and write new files"
/// SEMANTICS 13: "Changes that were made while the pool did not answer are flushed when it answers again."
#[test]
fn pool_may_go_and_come_back() {
    let place = Place::new();
    fs::write(place.pool().join("a"), content(12, 200_000)).unwrap();
    fs::write(place.pool().join("cold"), "cold").unwrap();
    let mount = Mount::on(place, Options::policy("[default]\nflush = \"idle:1s\"\n[pool]\ndeadline = \"3s\"\n"));
    assert_eq!(fs::read_dir(mount.place.mnt()).unwrap().count(), 2);
    assert_eq!(fs::read(mount.path("a")).unwrap(), content(12, 200_000));
    let away = mount.place.at("away");
    fs::rename(mount.place.pool(), &away).unwrap();
    fs::create_dir(mount.place.pool()).unwrap();
    assert_eq!(fs::read(mount.path("a")).unwrap(), content(12, 200_000));
    fs::write(mount.path("b"), "absorbed").unwrap();
    assert_eq!(fs::read(mount.path("b")).unwrap(), b"absorbed");
    let begun = Instant::now();
    assert!(mount.status().dirty_files > 0);
    assert!(begun.elapsed() < Duration::from_secs(60), "status waited for the pool");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(fs::read_dir(mount.place.pool()).unwrap().count(), 0, "written to what is not the pool");
    assert_eq!(fs::read(mount.path("b")).unwrap(), b"absorbed");
    fs::remove_dir(mount.place.pool()).unwrap();
    fs::rename(&away, mount.place.pool()).unwrap();
    wait_until("the flush after the return", || fs::read(mount.pool("b")).is_ok_and(|b| b == b"absorbed"));
    assert_eq!(fs::read(mount.path("cold")).unwrap(), b"cold");
}

/// Allows for the directories that content files lie in.
const INDEX_BYTES: u64 = 1 << 20;

/// Returns the bytes that content files take of the fast pool, as its file system reports them.
fn occupied_bytes(mount: &Mount) -> u64 {
    let told = sh(&mount.place.fast(), "du -s --block-size=1 content | cut -f1", SHELL).ok().out;
    told.trim().parse().unwrap()
}

/// SEMANTICS 15: "Content never takes more than `--limit`."
#[test]
fn limit_holds_for_reads() {
    const LIMIT: u64 = 300 << 20;
    let mount = Mount::new(Options { limit: Some("300MiB".into()), policy: Some(MANUAL.into()), ..Options::default() });
    for n in 0..8 {
        fs::write(mount.pool(format!("in{n}")), content(n, 60 << 20)).unwrap();
    }
    for n in 0..8 {
        assert_eq!(fs::read(mount.path(format!("in{n}"))).unwrap(), content(n, 60 << 20), "in{n}");
        assert!(mount.status().used_bytes <= LIMIT);
        let occupied = occupied_bytes(&mount);
        assert!(occupied <= LIMIT + INDEX_BYTES, "content files take {occupied} bytes after in{n}");
    }
}

/// SEMANTICS 15: "Content never takes more than `--limit`."
#[test]
fn limit_holds_for_writers_past_the_daemon() {
    const LIMIT_MIB: u64 = 1536;
    let limit = Some(format!("{LIMIT_MIB}MiB"));
    let mount = Mount::new(Options { limit, policy: Some(MANUAL.into()), ..Options::default() });
    // The policy flushes nothing, so at some point the writer must be stopped.
    let out = File::create(mount.path("out")).unwrap();
    let piece = content(9, 1 << 20);
    let written = (0..4000u64).take_while(|n| out.write_all_at(&piece, n << 20).is_ok()).count() as u64;
    assert!((500..LIMIT_MIB).contains(&written), "{written} MiB were written below a limit of {LIMIT_MIB} MiB");
    drop(out);
    let occupied = occupied_bytes(&mount);
    assert!(occupied <= (LIMIT_MIB << 20) + INDEX_BYTES, "{occupied} bytes");
    assert!(fs::metadata(mount.path("out")).unwrap().len() >= written << 20);
}

/// SEMANTICS 16: "A stage that does not fit is refused before it starts."
/// SEMANTICS 17: "When `forebay stage` returns 0, every requested byte is resident and leased."
#[test]
fn staged_means_staged_and_too_much_is_refused() {
    let mount = Mount::new(Options { limit: Some("64MiB".into()), ..Options::default() });
    fs::create_dir(mount.pool("set")).unwrap();
    for n in 0..10 {
        fs::write(mount.pool(format!("set/{n}")), content(n, 1 << 20)).unwrap();
    }
    fs::write(mount.pool("huge"), content(99, 80 << 20)).unwrap();
    mount.forebay(["stage"], &[&mount.path("set")]).ok();
    let status = mount.status();
    assert_eq!((status.resident_files, status.leased_bytes), (10, 10 << 20));
    mount.forebay(["stage"], &[&mount.path("huge")]).refused(5, &[&(80u64 << 20).to_string()]);
    assert_eq!(mount.status().counters.pool_read_bytes, 10 << 20, "the refused stage read something");
    mount.forebay(["evict"], &[&mount.path("set")]).ok();
    assert_eq!(mount.status().resident_files, 10, "a lease did not hold");
    mount.forebay(["evict", "--release-leases"], &[&mount.path("set")]).ok();
    assert_eq!(mount.status().resident_files, 0);
    mount.forebay(["stage"], &[&mount.path("nothing-here")]).refused(1, &["nothing-here"]);
}

/// SEMANTICS 18: "A file or directory that is created and removed before it is flushed never reaches the pool."
#[test]
fn temporary_files_never_reach_the_pool() {
    let mount = Mount::manual();
    for n in 0..20 {
        fs::create_dir(mount.path(format!("d{n}"))).unwrap();
        fs::write(mount.path(format!("d{n}/a")), "x").unwrap();
        fs::rename(mount.path(format!("d{n}/a")), mount.path(format!("d{n}/b"))).unwrap();
        fs::remove_dir_all(mount.path(format!("d{n}"))).unwrap();
    }
    let names = mount.forebay(["dirty", "--json"], &[&mount.place.mnt()]).ok().out;
    assert!(!names.contains("d1"), "{names}");
    mount.flush();
    assert_eq!(fs::read_dir(mount.place.pool()).unwrap().count(), 0);
    assert_eq!(mount.status().counters.pool_written_bytes, 0);
}

/// SEMANTICS 19: "`umount` flushes nothing: it says how many files are not in the pool yet, and the next
/// mount has them."
#[test]
fn unflushed_files_survive_umount() {
    let mount = Mount::manual();
    let bytes = content(19, 70_000);
    fs::write(mount.path("kept"), &bytes).unwrap();
    let said = mount.forebay(["umount"], &[&mount.place.mnt()]).ok();
    assert!(format!("{}{}", said.out, said.err).contains("not in the pool"), "{said}");
    assert!(!mount.pool("kept").exists());
    mount.mount();
    assert_eq!(fs::read(mount.path("kept")).unwrap(), bytes);
    mount.flush();
    assert_eq!(fs::read(mount.pool("kept")).unwrap(), bytes);
}

/// SEMANTICS 21: "Hard links are one inode, in the mount and after the flush."
#[test]
fn hard_links_stay_one_file() {
    let mount = Mount::manual();
    fs::write(mount.pool("old"), "1").unwrap();
    fs::hard_link(mount.pool("old"), mount.pool("old2")).unwrap();
    let ino = |name: &str| fs::metadata(mount.path(name)).unwrap().ino();
    assert_eq!(fs::read_dir(mount.place.mnt()).unwrap().count(), 2);
    assert_eq!(ino("old"), ino("old2"));
    fs::write(mount.path("new"), "2").unwrap();
    fs::hard_link(mount.path("new"), mount.path("new2")).unwrap();
    fs::hard_link(mount.path("old"), mount.path("old3")).unwrap();
    mount.flush();
    let pool = |name: &str| fs::metadata(mount.pool(name)).unwrap();
    assert_eq!((pool("new").ino(), pool("new").nlink()), (pool("new2").ino(), 2));
    assert_eq!((pool("old").ino(), pool("old").nlink()), (pool("old3").ino(), 3));
}

/// SEMANTICS 22: "A file that is removed while it is open can be read and written until it is closed."
#[test]
fn removed_file_lives_while_it_is_open() {
    let mount = Mount::new(Options::default());
    fs::write(mount.pool("a"), "from the pool").unwrap();
    let mut file = OpenOptions::new().read(true).write(true).open(mount.path("a")).unwrap();
    fs::remove_file(mount.path("a")).unwrap();
    mount.flush();
    assert!(!mount.pool("a").exists());
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "from the pool");
    file.write_all(b" and more").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    text.clear();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "from the pool and more");
    assert_eq!(file.metadata().unwrap().nlink(), 0);
}

/// SEMANTICS 23: "A rename is atomic in the mount, over an existing file and as an exchange."
#[test]
fn renames_reach_the_pool_even_in_a_circle() {
    let mount = Mount::manual();
    for name in ["a", "b", "c"] {
        fs::write(mount.pool(name), name).unwrap();
        fs::create_dir_all(mount.pool(format!("d{name}/sub"))).unwrap();
        fs::write(mount.pool(format!("d{name}/sub/f")), name).unwrap();
    }
    let circle =
        "mv a t && mv b a && mv c b && mv t c && mv da t && mv db da && mv dc db && mv t dc && mv dc/sub da/in";
    sh(&mount.place.mnt(), circle, SHELL).ok();
    let swap = |from: &str, to: &str| {
        let (from, to) = (mount.path(from), mount.path(to));
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, &from, rustix::fs::CWD, &to, flags).unwrap();
    };
    swap("a", "b");
    swap("da", "c");
    fs::write(mount.path("over"), "new").unwrap();
    fs::rename(mount.path("over"), mount.path("a")).unwrap();
    let compare = format!("diff -r '{}' '{}'", mount.place.mnt().display(), mount.place.pool().display());
    mount.flush();
    sh(Path::new("/"), &compare, SHELL).ok();
    assert_eq!(fs::read_to_string(mount.pool("a")).unwrap(), "new");
    assert_eq!(fs::read_to_string(mount.pool("c/in/f")).unwrap(), "a");
    assert!(mount.pool("da").is_file());
}

/// SEMANTICS 25: "Locks (`flock`, `fcntl`) hold between the programs of one node."
#[test]
fn locks_hold_between_programs() {
    let mount = Mount::manual();
    fs::write(mount.path("a"), "").unwrap();
    let held = File::open(mount.path("a")).unwrap();
    held.lock().unwrap();
    let try_flock = || sh(&mount.place.mnt(), "flock -n -E 9 a true || echo $?", SHELL).out;
    assert_eq!(try_flock(), "9\n", "flock beside another program's lock");
    held.unlock().unwrap();
    assert_eq!(try_flock(), "", "flock after it");
    let range = |kind: i32, start: i64, len: i64| libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    let writer = OpenOptions::new().write(true).open(mount.path("a")).unwrap();
    let lock = |kind, start, len| {
        let lock = range(kind, start, len);
        // SAFETY: the descriptor is open, and the description of the lock outlives the call.
        assert_eq!(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETLK, &raw const lock) }, 0);
    };
    let try_fcntl = |start: u32| {
        let script = format!(
            "import fcntl\ntry: fcntl.lockf(open('a', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, 10, {start}); print('granted')\n\
             except BlockingIOError: print('refused')"
        );
        sh(&mount.place.mnt(), &format!("python3 -c \"{script}\""), SHELL).out
    };
    lock(libc::F_WRLCK, 100, 10);
    assert_eq!(try_fcntl(105), "refused\n", "a part of the range is locked");
    assert_eq!(try_fcntl(110), "granted\n", "the range ends before");
    lock(libc::F_UNLCK, 100, 10);
    assert_eq!(try_fcntl(105), "granted\n", "the lock was given back");
}

/// SEMANTICS 26: "`O_TMPFILE` is refused with `EOPNOTSUPP`."
/// SEMANTICS 27: "Names that start with `.forebay~` are refused with `EINVAL`."
/// SEMANTICS 28: "Reads do not change the access time."
#[test]
fn what_the_mount_does_not_do_is_said_by_errno() {
    let mount = Mount::manual();
    let unnamed = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(mount.place.mnt());
    assert_eq!(unnamed.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    let reserved = File::create(mount.path(".forebay~x"));
    assert_eq!(reserved.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    fs::write(mount.path("a"), "text").unwrap();
    sh(&mount.place.mnt(), "touch -a -d 2001-01-01 a", SHELL).ok();
    let before = fs::metadata(mount.path("a")).unwrap().atime();
    fs::read(mount.path("a")).unwrap();
    assert_eq!(fs::metadata(mount.path("a")).unwrap().atime(), before);
}

/// SEMANTICS 29: "Holes stay holes."
#[test]
fn holes_stay_holes() {
    let mount = Mount::manual();
    let script = "truncate -s 64M a; printf x | dd of=a bs=1 seek=33554432 conv=notrunc status=none
        head -c 4M /dev/urandom > b; fallocate -p -o 1M -l 2M b";
    sh(&mount.place.mnt(), script, SHELL).ok();
    mount.flush();
    for name in ["a", "b"] {
        let (here, there) = (fs::metadata(mount.path(name)).unwrap(), fs::metadata(mount.pool(name)).unwrap());
        assert_eq!(here.len(), there.len());
        assert!(there.blocks() * 512 < 3 << 20, "{name} takes {} blocks in the pool", there.blocks());
        let file = File::open(mount.path(name)).unwrap();
        let from = if name == "a" { 0 } else { 1 << 20 };
        assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(from)).unwrap(), from);
    }
    sh(
        Path::new("/"),
        &format!("cmp {0}/a {1}/a && cmp {0}/b {1}/b", mount.place.mnt().display(), mount.place.pool().display()),
        SHELL,
    )
    .ok();
    sh(&mount.place.pool(), "truncate -s 64M c; printf x | dd of=c bs=1 seek=33554432 conv=notrunc status=none", SHELL)
        .ok();
    let before = mount.status().used_bytes;
    assert_eq!(fs::read(mount.path("c")).unwrap().iter().filter(|byte| **byte != 0).count(), 1);
    let taken = mount.status().used_bytes - before;
    assert!(taken < 3 << 20, "{taken} bytes for a file of the pool with one byte in it");
}

/// SEMANTICS 29: "Holes stay holes: `SEEK_HOLE` finds them", also in content that was fetched from the pool.
/// SEMANTICS 44: "`stat` reports the blocks that the bytes of a file occupy"
#[test]
fn holes_are_found_again_after_an_eviction() {
    let mount = Mount::manual();
    let make = "truncate -s 8M NAME; printf x | dd of=NAME bs=1 seek=4M conv=notrunc status=none";
    sh(&mount.place.mnt(), &make.replace("NAME", "ours"), SHELL).ok();
    sh(&mount.place.pool(), &make.replace("NAME", "theirs"), SHELL).ok();
    mount.flush();
    mount.forebay(["evict"], &[&mount.path("ours")]).ok();
    for name in ["ours", "theirs"] {
        let blocks = || fs::metadata(mount.path(name)).unwrap().blocks() * 512;
        assert!(blocks() < 1 << 20, "{name} takes {} bytes before it is read", blocks());
        let file = File::open(mount.path(name)).unwrap();
        let seek = |to| rustix::fs::seek(&file, to).unwrap();
        assert_eq!(seek(rustix::fs::SeekFrom::Hole(0)), 0, "{name}");
        assert_eq!(seek(rustix::fs::SeekFrom::Data(0)), 4 << 20, "{name}");
        assert!(seek(rustix::fs::SeekFrom::Hole(4 << 20)) < 6 << 20, "{name}");
        assert!(blocks() < 1 << 20, "{name} takes {} bytes after it was read", blocks());
    }
}

/// SEMANTICS 34: "A store through a shared mapping is written back like any other write, also after the file was
/// closed"
#[test]
fn stores_through_mappings_that_outlive_the_close_are_not_lost() {
    const LEN: usize = 8192;
    let mount = Mount::manual();
    fs::write(mount.pool("old"), [b'-'; LEN]).unwrap();
    fs::read(mount.path("old")).unwrap();
    File::create(mount.path("new")).unwrap().set_len(LEN as u64).unwrap();
    for name in ["old", "new"] {
        let mapped = Mapped::of(&mount.path(name), LEN);
        // Gives the daemon time to see the close.
        std::thread::sleep(Duration::from_millis(300));
        for (round, byte) in b"abc".iter().copied().enumerate() {
            mapped.store(round * 4000, byte);
            // A second store goes to a page that is dirty already.
            mapped.store(1, byte);
            mount.flush();
            let there = fs::read(mount.pool(name)).unwrap();
            assert_eq!((there[round * 4000], there[1]), (byte, byte), "{name}, round {round}");
        }
        mapped.store(2, b'z');
        mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
        mapped.store(3, b'z');
        drop(mapped);
        mount.flush();
        assert_eq!(fs::read(mount.pool(name)).unwrap()[1..4], *b"czz", "{name}");
        assert_eq!(mount.status().dirty_files, 0);
        mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
        assert_eq!(mount.status().resident_files, 0);
        assert_eq!(fs::read(mount.path(name)).unwrap()[1..4], *b"czz", "{name}");
    }
}

/// SEMANTICS 34, for stores during an upload of the file.
#[test]
fn stores_beside_an_upload_are_not_taken_for_sent() {
    const LEN: usize = 64 << 20;
    let mount = Mount::manual();
    File::create(mount.path("a")).unwrap().set_len(LEN as u64).unwrap();
    let mapped = Mapped::of(&mount.path("a"), LEN);
    (0..LEN).step_by(4096).for_each(|at| mapped.store(at, 1));
    for round in 0..8 {
        std::thread::scope(|scope| {
            // The flush may report that the file is written all the time.
            let flush = scope.spawn(|| mount.forebay(["flush", "--wait"], &[&mount.path("a")]));
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(20 + 10 * round) {
                mapped.store(0, 100 + round as u8);
                mapped.store(0, round as u8);
            }
            flush.join().unwrap();
        });
        mount.flush();
        assert_eq!(fs::read(mount.pool("a")).unwrap()[0], round as u8, "round {round}");
    }
}

/// SEMANTICS 35: "If another client changes attributes of a file in the pool while a program in the mount writes its
/// content, that change is kept"
#[test]
fn attributes_that_another_client_sets_during_a_write_are_kept() {
    let mount = Mount::manual();
    fs::write(mount.pool("a"), "old").unwrap();
    sh(&mount.place.mnt(), "getfattr -d a; echo new >> a; setfattr -n user.ours -v 1 a", SHELL).ok();
    sh(&mount.place.pool(), "chmod 600 a; chown 123:456 a; setfattr -n user.theirs -v 2 a", SHELL).ok();
    mount.flush();
    for place in [mount.place.pool(), mount.place.mnt()] {
        let seen = sh(&place, "cat a; stat -c '%a %u %g' a; getfattr -d a | grep user", SHELL).ok().out;
        assert_eq!(seen.trim(), "oldnew\n600 123 456\nuser.ours=\"1\"\nuser.theirs=\"2\"", "{}", place.display());
    }
}

/// SEMANTICS 32: "A fast-pool directory serves one daemon."
#[test]
fn second_daemon_on_a_fast_pool_is_refused() {
    let mount = Mount::new(Options::default());
    let other = Place::new();
    fs::remove_dir(other.fast()).unwrap();
    symlink(mount.place.fast(), other.fast()).unwrap();
    let answer = attempt(&other, &Options::default());
    assert_ne!(answer.code, Some(0));
    assert!(answer.err.contains("in use"), "{answer}");
}
