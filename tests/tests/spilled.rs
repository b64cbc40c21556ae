//! Files that do not fit into the fast pool, in front of a pool that takes content in parts: ranges of them are spilled.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::Command;

use forebay_backends::decorators::{CallKind, FaultMoment, Odds};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Capabilities, ErrorKind, RenameMode};
use forebay_engine::{Change, Ino, Options, Overlay, Policy};
use forebay_tests::engine::*;
use forebay_tests::mount::{self, Mount, content};
use forebay_tests::servers::{Server, s3::Versitygw};
use forebay_tests::settings::{number, seed};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const MIB: usize = 1 << 20;
const LIMIT: u64 = 8 << 20;

/// A pool as S3 is: it cannot write ranges.
fn fixture() -> Fixture {
    let can = Capabilities { ranged_write: false, ..MemoryPool::all_capabilities() };
    Fixture::over(MemoryPool::with_capabilities(can))
}

fn options(fixture: &Fixture) -> Options {
    let text = "[default]\nflush = \"idle:1h\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    Options { limit_bytes: Some(LIMIT), policy: Policy::parse(text).unwrap(), ..fixture.options() }
}

async fn fill(overlay: &Overlay, ino: Ino, data: &[u8]) {
    for at in (0..data.len()).step_by(MIB) {
        put(overlay, ino, at, &data[at..data.len().min(at + MIB)]).await;
    }
}

/// Reads all of a file by its inode.
async fn all(overlay: &Overlay, ino: Ino) -> Vec<u8> {
    let mut found = Vec::new();
    loop {
        let piece = overlay.read(ino, found.len() as u64, 700_000).await.unwrap();
        if piece.is_empty() {
            return found;
        }
        found.extend(piece);
    }
}

/// Waits until the pool has no part any more.
async fn no_parts_are_left(fixture: &Fixture) {
    for _ in 0..1000 {
        if fixture.memory.parts().is_empty() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("parts are left: {:?}", fixture.memory.parts());
}

/// Waits until so many bytes of the fast pool are used: discarded content is removed in the background.
async fn until_used(overlay: &Overlay, bytes: u64) {
    for _ in 0..1000 {
        if overlay.status().await.used_bytes == bytes {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("{} bytes are used, not {bytes}", overlay.status().await.used_bytes);
}

fn size(bytes: usize) -> Change {
    Change { size: Some(bytes as u64), ..Change::default() }
}

/// SEMANTICS 113: "ranges of it are sent to the pool in parts"
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_larger_than_the_limit_goes_to_the_pool_in_parts() {
    let fixture = fixture();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let mut expected = content(1, 20 * MIB);
    let ino = create(&overlay, "large").await;
    for at in (0..expected.len()).step_by(MIB) {
        put(&overlay, ino, at, &expected[at..at + MIB]).await;
        assert!(overlay.status().await.used_bytes <= LIMIT);
    }
    assert!(fixture.memory.parts().len() > 10);
    // What was written before and after the limit can be read and overwritten, across the ends of parts, too.
    for at in [100, 256 * 1024 - 30_000, 7 * MIB + 5, 15 * MIB] {
        let new = content(at as u64, 70_000);
        expected[at..at + new.len()].copy_from_slice(&new);
        put(&overlay, ino, at, &new).await;
        assert!(overlay.read(ino, at as u64 - 10, 80_000).await.unwrap() == expected[at - 10..at + 79_990], "{at}");
        assert!(overlay.status().await.used_bytes <= LIMIT);
    }
    let attr = overlay.getattr(ino).await.unwrap().0;
    assert_eq!((attr.size, attr.blocks * 512), (expected.len() as u64, expected.len() as u64));
    overlay.fsync(ino, false).await.unwrap();
    assert_eq!(in_pool(&fixture, "large"), None, "nobody sees it before it is closed");
    // Another program opens it meanwhile.
    overlay.open_file(ino, RDONLY).await.unwrap();
    assert_eq!(overlay.read(ino, 0, 10).await.unwrap(), expected[..10]);
    overlay.release(ino, RDONLY);
    let more = content(2, 3 * MIB);
    put(&overlay, ino, expected.len(), &more).await;
    expected.extend(&more);
    let written = overlay.getattr(ino).await.unwrap().0.mtime;
    close(&overlay, ino).await;
    assert!(!overlay.dirty().await.unwrap().is_empty());
    assert!(all(&overlay, ino).await == expected);
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected);
    let attr = overlay.getattr(ino).await.unwrap().0;
    assert_eq!((attr.mtime, attr.size), (written, expected.len() as u64));
    no_parts_are_left(&fixture).await;
    assert!(all(&overlay, ino).await == expected);
    evict(&overlay, true).await;
    until_used(&overlay, 0).await;
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
}

/// SEMANTICS 113: "ranges of it are sent to the pool in parts"
#[tokio::test(flavor = "multi_thread")]
async fn a_spilled_file_can_be_renamed_cut_emptied_replaced_and_removed() {
    let fixture = fixture();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let expected = content(4, 12 * MIB);
    let ino = create(&overlay, "a").await;
    fill(&overlay, ino, &expected).await;
    overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    rename(&overlay, "a", "d/b").await.unwrap();
    put(&overlay, ino, 3, b"after the rename").await;
    flush(&overlay).await;
    put(&overlay, ino, 30, b"after its flush").await;
    let cut = 5 * MIB + 1234;
    assert_eq!(overlay.setattr(ino, &size(cut), CALLER).await.unwrap().0.size, cut as u64);
    overlay.setattr(ino, &size(cut + 300_000), CALLER).await.unwrap();
    let mut now = expected[..cut].to_vec();
    now.extend(vec![0; 300_000]);
    now[3..19].copy_from_slice(b"after the rename");
    now[30..45].copy_from_slice(b"after its flush");
    assert!(all(&overlay, ino).await == now, "what was cut off does not come back");
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "d/b").unwrap() == now);
    assert_eq!(in_pool(&fixture, "a"), None);
    // Emptied, it is in the fast pool again.
    let ino = create(&overlay, "c").await;
    fill(&overlay, ino, &expected).await;
    overlay.setattr(ino, &size(0), CALLER).await.unwrap();
    no_parts_are_left(&fixture).await;
    put(&overlay, ino, 0, b"short").await;
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "c").unwrap(), b"short");
    // Removed while a program goes on writing it.
    let ino = create(&overlay, "e").await;
    fill(&overlay, ino, &expected).await;
    overlay.unlink(Ino::ROOT, b"e").await.unwrap();
    flush(&overlay).await;
    put(&overlay, ino, 12 * MIB, &content(9, 6 * MIB)).await;
    assert!(all(&overlay, ino).await == [&expected[..], &content(9, 6 * MIB)].concat());
    close(&overlay, ino).await;
    no_parts_are_left(&fixture).await;
    // Replaced by another one, before it was flushed.
    let ino = create(&overlay, "f").await;
    fill(&overlay, ino, &expected).await;
    close(&overlay, ino).await;
    let other = create(&overlay, "g").await;
    put(&overlay, other, 0, b"other").await;
    close(&overlay, other).await;
    overlay.rename(Ino::ROOT, b"g", Ino::ROOT, b"f", RenameMode::Replace).await.unwrap();
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "f").unwrap(), b"other");
    no_parts_are_left(&fixture).await;
    // The content of `f`, which is one block.
    until_used(&overlay, 4096).await;
}

/// SEMANTICS 113: "If another client made or changed the file meanwhile, both are kept"
#[tokio::test(flavor = "multi_thread")]
async fn a_spilled_file_stays_beside_the_file_of_another_client() {
    let fixture = fixture();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let expected = content(4, 12 * MIB);
    let ino = create(&overlay, "a").await;
    fill(&overlay, ino, &expected).await;
    fixture.put("a", b"theirs").await;
    close(&overlay, ino).await;
    flush(&overlay).await;
    flushed(&overlay).await;
    let found: Vec<_> = fixture.memory.snapshot().into_iter().collect();
    assert_eq!(found.len(), 2, "{:?}", overlay.status().await.conflicts);
    assert_eq!(in_pool(&fixture, "a").unwrap(), b"theirs");
    assert!(found.iter().any(|(_, entry)| entry.content[..] == expected[..]));
    no_parts_are_left(&fixture).await;
}

/// SEMANTICS 113: "ranges of it are sent to the pool in parts"
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_at_close_waits_for_all_of_a_spilled_file() {
    let fixture = fixture();
    let policy = Policy::parse("[default]\nflush = \"on-close\"\nmetadata-ttl = \"0s\"\n").unwrap();
    let overlay = Overlay::open(Options { policy, ..options(&fixture) }).await.unwrap();
    let expected = content(4, 12 * MIB);
    let ino = create(&overlay, "a").await;
    fill(&overlay, ino, &expected).await;
    overlay.close(ino, true).await.unwrap();
    assert!(in_pool(&fixture, "a").unwrap() == expected);
    let puts = || fixture.metrics.snapshot().of(CallKind::PutParts).count;
    assert_eq!(puts(), 1);
    overlay.release(ino, RDWR);
    flushed(&overlay).await;
    assert_eq!(puts(), 1, "it is not sent again");
    until_used(&overlay, 0).await;
    no_parts_are_left(&fixture).await;
}

/// SEMANTICS 47: "A file that cannot be written through"
#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_cannot_be_sent_or_read_loses_nothing() {
    let fixture = fixture();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let mut expected = content(5, 12 * MIB);
    let ino = create(&overlay, "large").await;
    fill(&overlay, ino, &expected[..7 * MIB]).await;
    for odds in [Odds { before: 1.0, after: 0.0 }, Odds { before: 0.0, after: 1.0 }] {
        fixture.fault.set_odds(CallKind::SendPart, odds);
        let error = refused(overlay.write(ino, 7 << 20, content(6, 2 * MIB).into()).await);
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.to_string().contains("bytes do not fit"), "{error}");
        assert!(all(&overlay, ino).await == expected[..7 * MIB]);
    }
    fixture.fault.heal();
    no_parts_are_left(&fixture).await;
    for at in (7 * MIB..12 * MIB).step_by(MIB) {
        put(&overlay, ino, at, &expected[at..at + MIB]).await;
    }
    fixture.fault.set_odds(CallKind::ReadPart, Odds { before: 1.0, after: 0.0 });
    assert_eq!(refused(overlay.read(ino, 0, 10).await).kind(), ErrorKind::Os(libc::EIO));
    assert_eq!(refused(overlay.write(ino, 5, "x".into()).await).kind(), ErrorKind::Os(libc::EIO));
    fixture.fault.heal();
    put(&overlay, ino, 5, b"x").await;
    expected[5] = b'x';
    assert!(all(&overlay, ino).await == expected);
    close(&overlay, ino).await;
    fixture.fault.set_odds(CallKind::PutParts, Odds { before: 0.0, after: 1.0 });
    flush(&overlay).await;
    fixture.fault.heal();
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected);
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    no_parts_are_left(&fixture).await;
}

/// A write across the end of a spilled range fetches two of them, and there is room for one.
#[tokio::test(flavor = "multi_thread")]
async fn what_came_back_for_a_write_is_not_given_up_for_the_rest_of_it() {
    let fixture = fixture();
    let text = "[default]\nflush = \"idle:1h\"\n[[rule]]\npaths = \"other\"\nwrite = \"local\"\n";
    let overlay = Overlay::open(Options { policy: Policy::parse(text).unwrap(), ..options(&fixture) }).await.unwrap();
    let other = create(&overlay, "other").await;
    fill(&overlay, other, &content(1, 7 * MIB)).await;
    let expected = content(2, 4 * MIB);
    let large = create(&overlay, "large").await;
    for at in (0..expected.len()).step_by(100_000) {
        put(&overlay, large, at, &expected[at..expected.len().min(at + 100_000)]).await;
    }
    // All that is left of it is spilled.
    overlay.setattr(large, &size(2 * MIB), CALLER).await.unwrap();
    const RANGE: usize = LIMIT as usize / 32;
    let free = LIMIT - overlay.status().await.used_bytes;
    put(&overlay, other, 7 * MIB, &vec![1; free as usize - RANGE - 50_000]).await;
    let error = refused(overlay.write(large, RANGE as u64 - 10, vec![9; 20].into()).await);
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(all(&overlay, large).await == expected[..2 * MIB], "nothing of it is lost");
    overlay.setattr(other, &size(6 * MIB), CALLER).await.unwrap();
    put(&overlay, large, RANGE - 10, &[9; 20]).await;
    let mut now = expected[..2 * MIB].to_vec();
    now[RANGE - 10..RANGE + 10].fill(9);
    assert!(all(&overlay, large).await == now);
    close(&overlay, large).await;
    flush(&overlay).await;
    assert!(in_pool(&fixture, "large").unwrap() == now);
    overlay.release(other, RDWR);
}

/// Changes a file of up to 20 MiB at random, in front of a limit of 8 MiB, and compares it with a plain vector. The daemon
/// ends in the middle, in an orderly way or killed.
async fn changes_at_random(seed: u64, steps: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let fixture = fixture();
    let mut fast = tempfile::tempdir().unwrap();
    let open = async |fast: &tempfile::TempDir| {
        opened(|| Options { fast: vec![fast.path().into()], ..options(&fixture) }).await
    };
    let mut overlay = open(&fast).await;
    let mut ino = create(&overlay, "f").await;
    let mut expected: Vec<u8> = Vec::new();
    for step in 0..steps {
        let at = rng.random_range(0..=expected.len());
        let told = format!("seed {seed}, step {step}");
        let change = rng.random_range(0..100);
        match change {
            0..50 => {
                let at = if rng.random() { expected.len() } else { at };
                let data = content(rng.random(), rng.random_range(1..=MIB));
                let end = at + data.len();
                if end > 20 * MIB {
                    continue;
                }
                put(&overlay, ino, at, &data).await;
                expected.resize(expected.len().max(end), 0);
                expected[at..end].copy_from_slice(&data);
            }
            50..80 => {
                let len = rng.random_range(1..=MIB).min(expected.len() - at);
                let read = overlay.read(ino, at as u64, len as u32).await.unwrap();
                assert!(read == expected[at..at + len], "{told}: {len} at {at}");
            }
            80..88 => {
                let to = if rng.random_ratio(1, 8) { 0 } else { rng.random_range(0..=20 * MIB) };
                overlay.setattr(ino, &size(to), CALLER).await.unwrap();
                expected.resize(to, 0);
            }
            88..91 => overlay.fsync(ino, false).await.unwrap(),
            91..94 => {
                flush(&overlay).await;
            }
            94..96 => {
                close(&overlay, ino).await;
                flushed(&overlay).await;
                assert!(in_pool(&fixture, "f").unwrap() == expected, "{told}");
                if expected.len() > 7 * MIB {
                    // The pool's own copy does not fit, and is not changed in place.
                    overlay.unlink(Ino::ROOT, b"f").await.unwrap();
                    ino = create(&overlay, "f").await;
                    expected.clear();
                } else {
                    overlay.open_file(ino, RDWR).await.unwrap();
                }
            }
            96..98 => {
                let killed = tempfile::tempdir().unwrap();
                image(fast.path(), killed.path());
                // The killed daemon does nothing more: it would send what it has when its directory is gone.
                _ = overlay.shutdown().await;
                fast = killed;
                overlay = open(&fast).await;
                overlay.open_inherited(ino, RDWR).await.unwrap();
            }
            // A large file would be flushed as soon as it is closed, and not changed in place.
            _ if expected.len() > 7 * MIB => {}
            _ => {
                overlay.release(ino, RDWR);
                overlay.shutdown().await.unwrap();
                drop(overlay);
                overlay = open(&fast).await;
                ino = find(&overlay, "f").await;
                overlay.open_file(ino, RDWR).await.unwrap();
            }
        }
        let used = overlay.status().await.used_bytes;
        assert!(used <= LIMIT, "{told}: {used} bytes are used after change {change}");
        assert_eq!(overlay.getattr(ino).await.unwrap().0.size, expected.len() as u64, "{told}");
    }
    assert!(all(&overlay, ino).await == expected, "seed {seed}");
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "f").unwrap() == expected, "seed {seed}");
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    no_parts_are_left(&fixture).await;
}

/// SEMANTICS 113: "A killed daemon loses no byte of it"
#[tokio::test(flavor = "multi_thread")]
async fn a_spilled_file_behaves_as_any_other() {
    let first = seed();
    for seed in first..first + if number("FOREBAY_SEED").is_some() { 1 } else { 6 } {
        changes_at_random(seed, 150).await;
    }
}

/// SEMANTICS 113: "A killed daemon loses no byte of it"
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_at_any_call_loses_nothing() {
    let expected = content(7, 13 * MIB);
    for moment in [FaultMoment::Before, FaultMoment::After] {
        for call in (1..).step_by(7) {
            let fixture = fixture();
            let overlay = Overlay::open(options(&fixture)).await.unwrap();
            let ino = create(&overlay, "large").await;
            fixture.fault.crash_at(call, moment);
            let mut acknowledged = 0;
            while acknowledged < expected.len() {
                let piece = expected[acknowledged..acknowledged + MIB / 2].to_vec();
                if overlay.write(ino, acknowledged as u64, piece.into()).await.is_err() {
                    break;
                }
                acknowledged += MIB / 2;
            }
            let is_written = acknowledged == expected.len();
            if is_written {
                overlay.release(ino, RDWR);
                flush(&overlay).await;
            }
            let was_hit = fixture.fault.calls() >= call;
            let killed = tempfile::tempdir().unwrap();
            image(fixture.fast.path(), killed.path());
            // The killed daemon does nothing more: it would flush the file, and remove its parts.
            _ = overlay.shutdown().await;
            drop(overlay);
            fixture.fault.heal();
            let fast = vec![killed.path().to_owned()];
            let overlay = Overlay::open(Options { fast, ..options(&fixture) }).await.unwrap();
            let ino = find(&overlay, "large").await;
            assert!(all(&overlay, ino).await == expected[..acknowledged], "call {call}, {moment:?}");
            flushed(&overlay).await;
            assert!(in_pool(&fixture, "large").unwrap() == expected[..acknowledged], "call {call}, {moment:?}");
            assert_eq!(overlay.status().await.conflicts, Vec::<String>::new(), "call {call}, {moment:?}");
            no_parts_are_left(&fixture).await;
            if !was_hit {
                break;
            }
        }
    }
}

fn bucket(server: &Versitygw, policy: &str) -> Mount {
    let limit = Some("64MiB".into());
    Mount::new(mount::Options { limit, remote: Some(server.remote()), ..mount::Options::policy(policy) })
}

/// SEMANTICS 113: "ranges of it are sent to the pool in parts"
#[test]
fn programs_write_what_does_not_fit_to_a_bucket() {
    let server = Versitygw::start();
    let mount = bucket(&server, "[default]\nflush = \"idle:1s\"\nwrite = \"through\"\n");
    let dir = tempfile::tempdir().unwrap();
    let expected = content(1, 200 * MIB);
    fs::write(dir.path().join("source"), &expected).unwrap();
    let sh = |script: &str| {
        let output = Command::new("sh").args(["-ec", script]).current_dir(mount.place.mnt()).output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let source = dir.path().join("source").display().to_string();
    sh(&format!("dd if={source} of=dd bs=1M conv=fsync status=none; cmp dd {source}"));
    sh(&format!("cp {source} copied"));
    sh(&format!("mkdir d; tar -cf - -C {} source | tar -C d -xf -", dir.path().display()));
    mount.flush();
    for name in ["dd", "copied", "d/source"] {
        assert!(server.remote().tree.read(name).unwrap() == expected, "{name}");
        assert!(fs::read(mount.path(name)).unwrap() == expected, "{name}");
    }
    assert!(mount.status().used_bytes <= 64 << 20);
    assert_eq!(mount.status().dirty_files, 0);
}

/// SEMANTICS 113: "A killed daemon loses no byte of it"
#[test]
fn the_worker_is_killed_while_a_file_is_spilled() {
    let server = Versitygw::start();
    let mount = bucket(&server, "[default]\nflush = \"idle:1s\"\nwrite = \"through\"\n");
    let expected = content(2, 200 * MIB);
    let mut out = OpenOptions::new().append(true).create(true).open(mount.path("out")).unwrap();
    for (n, piece) in expected.chunks(MIB / 2).enumerate() {
        if n % 60 == 59 {
            let worker = mount.worker();
            mount.kill_worker();
            mount.wait_for_other_worker(worker);
        }
        out.write_all(piece).unwrap();
    }
    out.sync_all().unwrap();
    assert!(fs::read(mount.path("out")).unwrap() == expected);
    drop(out);
    mount.flush();
    assert!(server.remote().tree.read("out").unwrap() == expected);
    assert_eq!(mount.status().dirty_files, 0);
}
