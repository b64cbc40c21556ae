//! Files that another client appends to in the pool while programs read them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use forebay_backends::decorators::FaultMoment;
use forebay_backends::{ErrorKind, Pool};
use forebay_tests::engine::{Fixture, RDONLY, find, pool_path, read};
use forebay_tests::mount::{Mount, Options, Place, content};
use forebay_tests::process::spawn;
use forebay_tests::servers::Server;
use forebay_tests::servers::nfs::{NfsServer, Squash};
use forebay_tests::servers::s3::{Rgw, Versitygw};

/// The longest that a polled condition may take to become true.
const SEEN_WITHIN: Duration = Duration::from_secs(60);
const FRESH: &str = "[default]\nmetadata-ttl = \"0s\"\n";
/// The same, but no file is fetched whole at its open.
const IN_PIECES: &str = "[default]\nmetadata-ttl = \"0s\"\nwhole-file = \"0B\"\n";
const MIB: usize = 1 << 20;

fn append(file: &Path, bytes: &[u8]) {
    File::options().append(true).open(file).unwrap().write_all(bytes).unwrap();
}

#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + SEEN_WITHIN;
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn number(file: &File) -> u64 {
    file.metadata().unwrap().ino()
}

fn all_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Returns one mount with passthrough and one without: `sync` turns it off.
fn both_ways(policy: &str) -> [Mount; 2] {
    let through = Mount::new(Options { more: vec!["-o".into(), "sync".into()], ..Options::policy(policy) });
    let mounts = [Mount::new(Options::policy(policy)), through];
    assert_eq!(mounts.each_ref().map(|mount| mount.status().passthrough), [true, false]);
    mounts
}

/// A shared mapping of a file from offset 0, which may extend past the end of the file.
struct Mapped(*mut libc::c_void, usize);

impl Mapped {
    fn new(file: &File, len: usize) -> Self {
        // SAFETY: the kernel chooses the address; `drop` unmaps it.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert!(at != libc::MAP_FAILED);
        Self(at, len)
    }

    fn at(&self, from: usize, len: usize) -> Vec<u8> {
        assert!(from + len <= self.1);
        // SAFETY: the range is within the mapping; the caller reads no page past the end of the file.
        (from..from + len).map(|at| unsafe { self.0.cast::<u8>().add(at).read_volatile() }).collect()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the range that `new` mapped, and no reference points into it.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

/// SEMANTICS 60: "If another client appends to a file in the pool, the file keeps its inode, and programs that have it open
/// see the new bytes"
#[test]
fn appended_bytes_are_seen_through_descriptors_and_mappings_that_are_open() {
    for mount in both_ways(FRESH) {
        let log = mount.pool("log");
        let mut right = content(1, 5_000);
        fs::write(&log, &right).unwrap();
        let file = File::open(mount.path("log")).unwrap();
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(mount.path("log")).unwrap();
        let first = number(&file);
        assert_eq!(all_of(&file), right);
        let mapped = Mapped::new(&file, 4 * MIB);
        assert_eq!(mapped.at(0, 5_000), right);
        assert_eq!(mapped.at(5_000, 3_192), [0; 3_192]);
        for (round, len) in [10, 4_000, 1, 3 * MIB / 2, 70_000].into_iter().enumerate() {
            let more = content(round as u64 + 2, len);
            append(&log, &more);
            right.extend(&more);
            until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
            assert!(all_of(&file) == right, "read, round {round}");
            assert!(mapped.at(0, right.len()) == right, "mapped, round {round}");
            let pages = right.len().next_multiple_of(4096);
            let mut buffer = vec![1u8; pages + 4096];
            let at = buffer.as_ptr().align_offset(4096);
            let got = direct.read_at(&mut buffer[at..at + pages], 0).unwrap();
            assert!(buffer[at..at + got] == right, "direct, round {round}: {got} bytes");
            // An open sees the new bytes at once.
            let opened = File::open(mount.path("log")).unwrap();
            assert_eq!([number(&opened), number(&direct), number(&file)], [first; 3]);
            assert!(all_of(&opened) == right, "opened, round {round}");
        }
        assert_eq!(fs::metadata(mount.path("log")).unwrap().ino(), first);
        assert_eq!(mount.forebay(["fsck"], &[&mount.place.mnt()]).code, Some(0));
    }
}

#[test]
fn an_open_sees_what_was_appended_just_before() {
    for mount in both_ways("") {
        let mut right = content(1, 100);
        fs::write(mount.pool("log"), &right).unwrap();
        let kept = File::open(mount.path("log")).unwrap();
        for round in 2..40 {
            let more = content(round, 333);
            append(&mount.pool("log"), &more);
            right.extend(&more);
            let opened = File::open(mount.path("log")).unwrap();
            let mut seen = Vec::new();
            (&opened).read_to_end(&mut seen).unwrap();
            assert!(seen == right, "round {round}: {} bytes of {}", seen.len(), right.len());
            assert_eq!(number(&opened), number(&kept));
        }
    }
}

/// A running `tail` of a file. Its output and its errors go to the file `shown`.
struct Tail {
    running: Child,
    shown: PathBuf,
}

impl Drop for Tail {
    fn drop(&mut self) {
        let _ = self.running.kill();
        let _ = self.running.wait();
    }
}

impl Tail {
    fn new(mount: &Mount, how: &str) -> Self {
        let shown = mount.place.at(format!("shown{how}"));
        let out = File::create(&shown).unwrap();
        let mut tail = Command::new("tail");
        tail.args([how, "-s", "0.1", "-n", "+1"]).arg(mount.path("log")).stdin(Stdio::null());
        tail.stdout(out.try_clone().unwrap()).stderr(out);
        Self { running: spawn(&mut tail).unwrap(), shown }
    }

    #[track_caller]
    fn shows(&self, right: &str) {
        let mut last = String::new();
        until("tail shows it", || {
            last = fs::read_to_string(&self.shown).unwrap();
            last.len() >= right.len()
        });
        assert_eq!(last, right);
    }
}

#[test]
fn tail_shows_each_line_once() {
    for mount in both_ways(FRESH) {
        fs::write(mount.pool("log"), "one\n").unwrap();
        let tails = ["-f", "-F"].map(|how| Tail::new(&mount, how));
        let mut right = String::from("one\n");
        tails.iter().for_each(|tail| tail.shows(&right));
        for line in ["two\n", "three\n", "four\n"] {
            append(&mount.pool("log"), line.as_bytes());
            right.push_str(line);
            tails.iter().for_each(|tail| tail.shows(&right));
        }
    }
}

#[test]
fn of_a_file_that_is_here_in_parts_the_parts_are_compared() {
    for mount in both_ways(IN_PIECES) {
        let log = mount.pool("log");
        let mut right = content(1, 5 * MIB + 100);
        fs::write(&log, &right).unwrap();
        let file = File::open(mount.path("log")).unwrap();
        let first = number(&file);
        let look = |file: &File, from: usize, right: &[u8]| {
            let mut bytes = vec![0; right.len() - from];
            file.read_exact_at(&mut bytes, from as u64).unwrap();
            assert!(bytes == right[from..], "from {from}");
        };
        look(&file, 5 * MIB - 10, &right);
        for round in 2..6 {
            let more = content(round, 400_000);
            append(&log, &more);
            right.extend(&more);
            until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
            look(&file, 5 * MIB - 10, &right);
        }
        look(&file, 0, &right);
        assert_eq!([number(&file), fs::metadata(mount.path("log")).unwrap().ino()], [first; 2]);
        // Another client appends after the open and before the read: reads of the open file go on.
        let more = content(9, 10);
        drop(file);
        let file = File::open(mount.path("log")).unwrap();
        mount.forebay(["evict"], &[&mount.place.mnt()]).code.unwrap();
        append(&log, &more);
        look(&file, MIB, &right);
        right.extend(&more);
        until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
        look(&file, 0, &right);
        assert_eq!(number(&file), first);
        // After the next mount, only the chunk records say which parts of the file are resident.
        drop(file);
        until("it can be evicted", || {
            mount.forebay(["evict"], &[&mount.place.mnt()]);
            mount.status().resident_files == 0
        });
        let file = File::open(mount.path("log")).unwrap();
        look(&file, right.len() - 10, &right);
        let more = content(10, 20);
        append(&log, &more);
        right.extend(&more);
        until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
        drop(file);
        mount.umount();
        mount.mount();
        look(&File::open(mount.path("log")).unwrap(), 0, &right);
    }
}

#[test]
fn the_inode_stays_when_it_is_opened_again_after_the_bytes_went() {
    for mount in both_ways(FRESH) {
        let mut right = content(1, 10_000);
        fs::write(mount.pool("log"), &right).unwrap();
        let first = number(&File::open(mount.path("log")).unwrap());
        for round in 2..5 {
            // The kernel sends the release after close(2) has returned.
            until("it can be evicted", || {
                mount.forebay(["evict"], &[&mount.place.mnt()]);
                mount.status().resident_files == 0
            });
            let file = (round % 2 == 0).then(|| File::open(mount.path("log")).unwrap());
            let more = content(round, 5_000);
            append(&mount.pool("log"), &more);
            right.extend(&more);
            let again = File::open(mount.path("log")).unwrap();
            assert_eq!((number(&again), all_of(&again) == right), (first, true), "round {round}");
            drop(file);
        }
    }
}

#[test]
fn a_file_that_was_rewritten_and_has_grown_is_another_one() {
    let other = content(9, 3 * MIB);
    for mount in both_ways(FRESH) {
        let log = mount.pool("log");
        for (round, at) in [0, 700_000, 999_999].into_iter().enumerate() {
            let right = content(round as u64, 1_000_000);
            fs::write(&log, &right).unwrap();
            let file = File::open(mount.path("log")).unwrap();
            assert!(all_of(&file) == right);
            // Another client changes one byte, and then appends.
            File::options().write(true).open(&log).unwrap().write_all_at(&[!right[at]], at as u64).unwrap();
            append(&log, b"more");
            let theirs = fs::read(&log).unwrap();
            let opened = File::open(mount.path("log")).unwrap();
            assert!(all_of(&opened) == theirs, "round {round}");
            assert_ne!(number(&opened), number(&file), "round {round}");
            let kept = (file.metadata().unwrap().len(), all_of(&file) == right);
            assert_eq!(kept, (1_000_000, true), "round {round}");
        }
        // Another client truncates the file, and then replaces it with a longer one of another inode.
        let right = fs::read(&log).unwrap();
        let file = File::open(mount.path("log")).unwrap();
        File::options().write(true).open(&log).unwrap().set_len(1_000).unwrap();
        let opened = File::open(mount.path("log")).unwrap();
        assert_eq!(opened.metadata().unwrap().len(), 1_000);
        assert!(number(&opened) != number(&file) && all_of(&file) == right);
        fs::write(mount.pool("new"), [&right[..1_000], &other].concat()).unwrap();
        fs::rename(mount.pool("new"), &log).unwrap();
        let newest = File::open(mount.path("log")).unwrap();
        assert!(number(&newest) != number(&opened) && all_of(&opened) == right[..1_000]);
        assert!(all_of(&newest)[1_000..] == other);
    }
}

/// Returns the only content file of this length.
fn content_file(mount: &Mount, len: u64) -> PathBuf {
    let dirs = fs::read_dir(mount.place.fast().join("content")).unwrap();
    let files = dirs.flat_map(|dir| fs::read_dir(dir.unwrap().path()).unwrap()).map(|file| file.unwrap());
    let mut found = files.filter(|file| file.metadata().unwrap().len() == len).map(|file| file.path());
    let first = found.next().expect("a content file");
    assert!(found.next().is_none());
    first
}

/// A daemon was killed between its append to a content file and the record of it, so the content file is too long.
#[test]
fn bytes_behind_the_end_of_a_content_file_are_not_believed() {
    for mount in both_ways(FRESH) {
        let mut right = content(1, 6_000);
        for name in ["log", "written"] {
            fs::write(mount.pool(name), &right).unwrap();
            assert_eq!(fs::read(mount.path(name)).unwrap(), right);
            mount.umount();
            append(&content_file(&mount, 6_000), b"half of what was to come");
            mount.mount();
            assert_eq!(mount.forebay(["fsck"], &[&mount.place.mnt()]).code, Some(0));
            if name == "written" {
                let file = File::options().append(true).open(mount.path(name)).unwrap();
                (&file).write_all(b" and ours").unwrap();
                drop(file);
                mount.flush();
                assert_eq!(fs::read(mount.pool(name)).unwrap(), [&right[..6_000], b" and ours"].concat());
                continue;
            }
            let file = File::open(mount.path(name)).unwrap();
            assert_eq!(all_of(&file), right);
            append(&mount.pool(name), b"all that came");
            right.extend(b"all that came");
            until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
            assert_eq!(all_of(&file), right);
            right.truncate(6_000);
        }
    }
}

#[test]
fn a_program_with_a_file_open_sees_what_was_appended_while_the_daemon_was_killed() {
    for mount in both_ways(FRESH) {
        let mut right = content(1, 6_000);
        fs::write(mount.pool("log"), &right).unwrap();
        let file = File::open(mount.path("log")).unwrap();
        let first = number(&file);
        assert_eq!(all_of(&file), right);
        for round in 2..5 {
            let old = mount.worker();
            mount.kill_worker();
            let more = content(round, 3_000);
            append(&mount.pool("log"), &more);
            right.extend(&more);
            mount.wait_for_other_worker(old);
            until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
            assert!(all_of(&file) == right, "round {round}");
            assert_eq!([number(&file), fs::metadata(mount.path("log")).unwrap().ino()], [first; 2]);
        }
    }
}

#[test]
fn hard_links_of_a_file_that_grows_stay_one_inode() {
    let mount = Mount::new(Options::policy(FRESH));
    fs::write(mount.pool("log"), "one\n").unwrap();
    fs::hard_link(mount.pool("log"), mount.pool("other")).unwrap();
    let file = File::open(mount.path("log")).unwrap();
    assert_eq!(all_of(&file), b"one\n");
    append(&mount.pool("log"), b"two\n");
    // The name that was not looked up before comes first.
    for name in ["other", "log"] {
        let opened = File::open(mount.path(name)).unwrap();
        assert_eq!((number(&opened), all_of(&opened)), (number(&file), b"one\ntwo\n".to_vec()), "{name}");
    }
    assert_eq!(all_of(&file), b"one\ntwo\n");
}

#[test]
fn a_listing_brings_what_was_appended() {
    let mount = Mount::new(Options::policy(FRESH));
    let names = || fs::read_dir(mount.path("")).unwrap().count();
    fs::write(mount.pool("log"), "one\n").unwrap();
    let file = File::open(mount.path("log")).unwrap();
    assert_eq!((names(), all_of(&file)), (1, b"one\n".to_vec()));
    append(&mount.pool("log"), b"two\n");
    fs::write(mount.pool("another"), "").unwrap();
    assert_eq!(names(), 2);
    assert_eq!(fs::metadata(mount.path("log")).unwrap().ino(), number(&file));
    assert_eq!(all_of(&file), b"one\ntwo\n");
}

/// Checks a file `log` that grows in the pool. `put` gives it these bytes without the mount.
fn grows_behind(server: &dyn Server, put: impl Fn(&[u8])) {
    let mount = Mount::new(Options { remote: Some(server.remote()), ..Options::policy(FRESH) });
    let mut right = content(1, 100_000);
    put(&right);
    let file = File::open(mount.path("log")).unwrap();
    assert!(all_of(&file) == right);
    for round in 2..5 {
        right.extend(content(round, 50_000));
        put(&right);
        until("the file grows", || file.metadata().unwrap().len() == right.len() as u64);
        assert!(all_of(&file) == right, "round {round}");
        assert_eq!(fs::metadata(mount.path("log")).unwrap().ino(), number(&file), "round {round}");
    }
    let old = right.clone();
    right[70_000] ^= 1;
    right.extend(b"more");
    put(&right);
    let opened = File::open(mount.path("log")).unwrap();
    assert!(all_of(&opened) == right && number(&opened) != number(&file));
    assert!(all_of(&file) == old);
}

/// An object store replaces whole objects, so only a comparison of the bytes shows that an object grew.
#[test]
fn an_object_that_is_replaced_by_a_longer_one_with_the_same_beginning_has_grown() {
    let server = Versitygw::start();
    let upload = server.files().with_extension("upload");
    grows_behind(&server, |bytes| {
        fs::write(&upload, bytes).unwrap();
        server.curl(&["-T", upload.to_str().unwrap()], "log");
    });
}

#[test]
fn an_object_of_ceph_grows_as_well() {
    let server = Rgw::start();
    let upload = Place::new();
    grows_behind(&server, |bytes| {
        fs::write(upload.at("log"), bytes).unwrap();
        server.curl(&["-T", upload.at("log").to_str().unwrap()], "log");
    });
}

#[test]
fn a_file_behind_an_nfs_server_grows_as_well() {
    let server = NfsServer::start(Path::new("/var/tmp"), Squash::None);
    let log = server.export().join("log");
    grows_behind(&server, |bytes| {
        let file = File::options().create(true).truncate(false).write(true).open(&log);
        file.unwrap().write_all_at(bytes, 0).unwrap();
    });
}

/// If the pool fails while the new bytes are fetched, the content file is cut back to the old bytes. No read returns
/// the part that arrived.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_appended_in_part_is_taken_back() {
    for call in 1..8 {
        let fixture = Fixture::new();
        let old = content(1, 2 * MIB + 7);
        fixture.put("log", &old).await;
        let overlay = fixture.open().await;
        let ino = find(&overlay, "log").await;
        let opened = overlay.open_file(ino, RDONLY).await.unwrap().resident.expect("it is here");
        let more = content(2, 3 * MIB);
        fixture.memory.write_at(&pool_path("log"), old.len() as u64, more.clone().into()).await.unwrap();
        fixture.fault.set_error(ErrorKind::Os(libc::EIO));
        fixture.fault.fail_call(call, FaultMoment::Before);
        let looked = overlay.getattr(ino).await;
        fixture.fault.heal();
        let here = opened.file.metadata().unwrap().len() as usize;
        let size = looked.as_ref().map_or(0, |(attr, _)| attr.size as usize);
        assert!(here == old.len() || size == here, "call {call}: {here} bytes, shown are {size}");
        let whole = read(&overlay, "log").await.unwrap();
        assert!(whole.as_bytes() == String::from_utf8_lossy(&[old.as_slice(), &more].concat()).as_bytes(), "{call}");
        overlay.release(ino, RDONLY);
    }
}
