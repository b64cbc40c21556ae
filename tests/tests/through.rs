//! Files that do not fit into the fast pool: they are written through to the pool.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::decorators::{CallKind, Odds, Throttle};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{Capabilities, ErrorKind, Expected, Pool, SetAttrs};
use forebay_engine::{Change, Ino, Options, Overlay, Policy};
use forebay_tests::engine::*;
use forebay_tests::mount::{self, Mount, content};
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const LIMIT: u64 = 8 << 20;

fn options(fixture: &Fixture) -> Options {
    let text = "[default]\nflush = \"idle:1h\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    Options { limit_bytes: Some(LIMIT), policy: Policy::parse(text).unwrap(), ..fixture.options() }
}

/// Writes a file that is larger than the limit. Returns its content, too.
async fn written_through(fixture: &Fixture) -> (Overlay, Ino, Vec<u8>) {
    let overlay = Overlay::open(options(fixture)).await.unwrap();
    let expected = content(10, 12 * MIB);
    let ino = create(&overlay, "large").await;
    for at in (0..expected.len()).step_by(MIB) {
        put(&overlay, ino, at, &expected[at..at + MIB]).await;
    }
    (overlay, ino, expected)
}

/// Returns the fast pool that a daemon leaves if it is killed after its last write reached the pool, and before it had the
/// answer; and what the file has then.
async fn killed_beside_a_write(fixture: &Fixture) -> (TempDir, Ino, Vec<u8>) {
    let (_overlay, ino, mut expected) = written_through(fixture).await;
    let killed = tempfile::tempdir().unwrap();
    image(fixture.fast.path(), killed.path());
    fixture.memory.write_at(&pool_path("large"), 12 << 20, "the last write".into()).await.unwrap();
    expected.extend(b"the last write");
    (killed, ino, expected)
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_larger_than_the_limit_is_written_through() {
    let fixture = Fixture::new();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let mut expected = content(1, 20 * MIB);
    let ino = create(&overlay, "large").await;
    for at in (0..expected.len()).step_by(MIB) {
        put(&overlay, ino, at, &expected[at..at + MIB]).await;
        assert!(overlay.status().await.used_bytes <= LIMIT);
    }
    // What was written before and after the limit can be read and overwritten.
    for at in [100, 7 * MIB + 5, 15 * MIB] {
        let new = content(at as u64, 70_000);
        expected[at..at + new.len()].copy_from_slice(&new);
        put(&overlay, ino, at, &new).await;
        assert_eq!(overlay.read(ino, at as u64 - 10, 80_000).await.unwrap(), expected[at - 10..at + 79_990], "{at}");
    }
    assert_eq!(overlay.getattr(ino).await.unwrap().0.size, expected.len() as u64);
    overlay.fsync(ino, false).await.unwrap();
    assert!(in_pool(&fixture, "large").unwrap() == expected, "what fsync has confirmed is in the pool");
    // Another program opens it meanwhile.
    overlay.open_file(ino, RDONLY).await.unwrap();
    assert_eq!(overlay.read(ino, 0, 10).await.unwrap(), expected[..10]);
    overlay.release(ino, RDONLY);
    let more = content(2, 3 * MIB);
    put(&overlay, ino, expected.len(), &more).await;
    expected.extend(&more);
    close(&overlay, ino).await;
    // Only times are still to be sent.
    let dirty = overlay.dirty().await.unwrap();
    assert!(dirty.iter().all(|dirty| dirty.bytes == 0), "{dirty:?}");
    assert_eq!(overlay.status().await.used_bytes, 0);
    assert!(in_pool(&fixture, "large").unwrap() == expected);
    // The clock of this pool is in the year 2023. Times are those of this node, as for all files.
    flushed(&overlay).await;
    let mtime = overlay.getattr(ino).await.unwrap().0.mtime;
    let there = fixture.memory.stat(&pool_path("large")).await.unwrap().mtime;
    assert!(mtime == there && mtime.secs > 1_750_000_000, "{mtime:?} {there:?}");
    assert!(read(&overlay, "large").await.unwrap().into_bytes() == String::from_utf8_lossy(&expected).as_bytes());
    // It is cached again where it fits.
    let change = Change { size: Some(MIB as u64), ..Change::default() };
    let ino = find(&overlay, "large").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    put(&overlay, ino, 5, b"again").await;
    overlay.setattr(ino, &change, CALLER).await.unwrap();
    close(&overlay, ino).await;
    expected[5..10].copy_from_slice(b"again");
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected[..MIB]);
    overlay.open_file(ino, RDWR).await.unwrap();
    put(&overlay, ino, 0, b"in the fast pool").await;
    assert_eq!(overlay.dirty().await.unwrap().len(), 1);
    close(&overlay, ino).await;
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_of_the_pool_is_changed_in_the_pool() {
    let fixture = Fixture::new();
    let mut expected = content(3, 20 * MIB);
    fixture.put("large", &expected).await;
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let ino = find(&overlay, "large").await;
    overlay.open_file(ino, RDWR).await.unwrap();
    put(&overlay, ino, 12 * MIB, b"changed").await;
    expected[12 * MIB..12 * MIB + 7].copy_from_slice(b"changed");
    assert!(overlay.status().await.counters.pool_read_bytes < 20 << 20, "it was fetched to be changed");
    close(&overlay, ino).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected);
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_through_can_be_renamed_cut_emptied_and_removed() {
    let fixture = Fixture::new();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let expected = content(4, 12 * MIB);
    let fill = async |ino| {
        for at in (0..expected.len()).step_by(MIB) {
            put(&overlay, ino, at, &expected[at..at + MIB]).await;
        }
    };
    let ino = create(&overlay, "a").await;
    fill(ino).await;
    overlay.mkdir(Ino::ROOT, b"d", 0o755, 0, CALLER).await.unwrap();
    rename(&overlay, "a", "d/b").await.unwrap();
    put(&overlay, ino, 3, b"after the rename").await;
    flush(&overlay).await;
    put(&overlay, ino, 30, b"after its flush").await;
    let cut = Change { size: Some(11 << 20), ..Change::default() };
    assert_eq!(overlay.setattr(ino, &cut, CALLER).await.unwrap().0.size, 11 << 20);
    let grown = Change { size: Some((11 << 20) + 10), ..Change::default() };
    assert_eq!(overlay.setattr(ino, &grown, CALLER).await.unwrap().0.size, (11 << 20) + 10);
    close(&overlay, ino).await;
    flushed(&overlay).await;
    let mut now = expected[..11 * MIB].to_vec();
    now.extend([0; 10]);
    now[3..19].copy_from_slice(b"after the rename");
    now[30..45].copy_from_slice(b"after its flush");
    assert!(in_pool(&fixture, "d/b").unwrap() == now);
    assert_eq!(in_pool(&fixture, "a"), None);
    // Emptied while it is written through, it is in the fast pool again.
    let ino = create(&overlay, "c").await;
    fill(ino).await;
    overlay.setattr(ino, &Change { size: Some(0), ..Change::default() }, CALLER).await.unwrap();
    put(&overlay, ino, 0, b"short").await;
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "c").unwrap(), b"short");
    // Removed while a program goes on writing it.
    let ino = create(&overlay, "e").await;
    fill(ino).await;
    overlay.unlink(Ino::ROOT, b"e").await.unwrap();
    flush(&overlay).await;
    put(&overlay, ino, 12 * MIB, b"nobody will see this").await;
    assert_eq!(overlay.read(ino, 12 << 20, 6).await.unwrap(), &b"nobody"[..]);
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert_eq!(in_pool(&fixture, "e"), None);
}

/// SEMANTICS 47: "A file that cannot be written through"
#[tokio::test(flavor = "multi_thread")]
async fn where_it_cannot_be_written_through_a_write_fails_with_the_numbers() {
    let manual = "[default]\nflush = \"manual\"\nmetadata-ttl = \"0s\"\n[pool]\nretry = \"0s\"\n";
    for case in ["no ranges", "manual", "down"] {
        let ranged_write = case != "no ranges";
        let can = Capabilities { ranged_write, parts_ahead: None, ..MemoryPool::all_capabilities() };
        let fixture = Fixture::over(MemoryPool::with_capabilities(can));
        let mut options = options(&fixture);
        if case == "manual" {
            options.policy = Policy::parse(manual).unwrap();
        }
        let overlay = Overlay::open(options).await.unwrap();
        let ino = create(&overlay, "large").await;
        put(&overlay, ino, 0, &content(5, 7 * MIB)).await;
        fixture.fault.set_down(case == "down");
        let error = refused(overlay.write(ino, 7 << 20, content(6, 2 * MIB).into()).await);
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{case}");
        assert!(error.to_string().contains("bytes do not fit"), "{case}: {error}");
        // What fits is kept, and flushed as always.
        fixture.fault.set_down(false);
        close(&overlay, ino).await;
        flushed(&overlay).await;
        assert!(in_pool(&fixture, "large").unwrap() == content(5, 7 * MIB), "{case}");
    }
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn another_client_of_the_pool_may_change_what_is_written_through() {
    let fixture = Fixture::new();
    let (overlay, ino, expected) = written_through(&fixture).await;
    let path = pool_path("large");
    fixture.memory.write_at(&path, 12 << 20, "theirs".into()).await.unwrap();
    fixture.memory.set_attrs(&path, &SetAttrs { mode: Some(0o640), ..SetAttrs::default() }).await.unwrap();
    put(&overlay, ino, 0, b"ours").await;
    assert_eq!(overlay.read(ino, (12 << 20) - 2, 100).await.unwrap(), [&expected[12 * MIB - 2..], b"theirs"].concat());
    // It is removed, or replaced: what is written from then on has no place.
    fixture.put("large", b"another object").await;
    let error = refused(overlay.write(ino, 0, "lost".into()).await);
    assert!(error.is(ErrorKind::Stale), "{error}");
    overlay.release(ino, RDWR);
    assert_eq!(in_pool(&fixture, "large").unwrap(), b"another object");
    assert_eq!(read(&overlay, "large").await.unwrap(), "another object");
    fixture.memory.remove(&path, &Expected::Anything).await.unwrap();
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_goes_on_writing_through() {
    let fixture = Fixture::new();
    let (killed, ino, mut expected) = killed_beside_a_write(&fixture).await;
    let overlay = Overlay::open(Options { fast: vec![killed.path().into()], ..options(&fixture) }).await.unwrap();
    overlay.open_inherited(ino, RDWR).await.unwrap();
    assert_eq!(overlay.getattr(ino).await.unwrap().0.size, expected.len() as u64);
    put(&overlay, ino, expected.len(), b" and one more").await;
    expected.extend(b" and one more");
    close(&overlay, ino).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected);
    assert!(overlay.dirty().await.unwrap().iter().all(|dirty| dirty.bytes == 0));
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_goes_on_although_the_pool_is_not_asked_at_once() {
    for case in ["own flush", "down"] {
        let fixture = Fixture::new();
        let (killed, ino, mut expected) = killed_beside_a_write(&fixture).await;
        let pool = Arc::new(Throttle::new(fixture.metrics.clone(), None, Duration::from_millis(200)));
        let options = Options { fast: vec![killed.path().into()], pool, ..options(&fixture) };
        let overlay = Overlay::open(options).await.unwrap();
        let flushing = async {
            if case == "own flush" {
                flush(&overlay).await;
            }
        };
        let opening = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            fixture.fault.set_down(case == "down");
            overlay.open_inherited(ino, RDWR).await.unwrap();
            fixture.fault.set_down(false);
        };
        tokio::join!(flushing, opening);
        assert_eq!(overlay.getattr(ino).await.unwrap().0.size, expected.len() as u64, "{case}");
        put(&overlay, ino, expected.len(), b" and one more").await;
        expected.extend(b" and one more");
        assert_eq!(overlay.getattr(ino).await.unwrap().0.size, expected.len() as u64, "{case}");
        close(&overlay, ino).await;
        assert!(in_pool(&fixture, "large").unwrap() == expected, "{case}");
    }
}

/// SEMANTICS 12: "While the pool does not answer, programs can read resident files and write new files, and `status`
/// answers."
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_daemon_wrote_through_can_be_emptied_while_the_pool_is_down() {
    let fixture = Fixture::new();
    let (killed, ino, _) = killed_beside_a_write(&fixture).await;
    let overlay = Overlay::open(Options { fast: vec![killed.path().into()], ..options(&fixture) }).await.unwrap();
    fixture.fault.set_down(true);
    overlay.open_file(ino, RDWR | libc::O_TRUNC).await.unwrap();
    put(&overlay, ino, 0, b"new content").await;
    close(&overlay, ino).await;
    fixture.fault.set_down(false);
    flushed(&overlay).await;
    // The killed daemon's last write had no answer: it may be another client's.
    let conflicts = overlay.status().await.conflicts;
    assert_eq!(conflicts.len(), 1, "{conflicts:?}");
    let kept = fixture.memory.snapshot();
    assert!(kept.iter().any(|(_, entry)| entry.content == b"new content"[..]), "nothing is lost");
    assert!(in_pool(&fixture, "large").unwrap().len() > 100);
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn new_content_in_the_pool_has_no_privileges_of_the_old() {
    let fixture = Fixture::new();
    let (overlay, ino, _) = written_through(&fixture).await;
    let mode = |mode| Change { mode: Some(mode), ..Change::default() };
    overlay.setattr(ino, &mode(0o4755), CALLER).await.unwrap();
    flush(&overlay).await;
    let there = || fixture.memory.snapshot().into_iter().find(|(at, _)| *at == pool_path("large")).unwrap().1.mode;
    assert_eq!(there() & 0o7777, 0o4755);
    // What the kernel requests before the write of a program that may not keep the bits.
    overlay.setattr(ino, &mode(0o755), CALLER).await.unwrap();
    put(&overlay, ino, 0, b"new").await;
    assert_eq!(there() & 0o7777, 0o755, "the bits were removed before the new bytes came");
    close(&overlay, ino).await;
}

/// SEMANTICS 47: "and a power cut none that"
#[tokio::test(flavor = "multi_thread")]
async fn fsync_reaches_the_pool_and_what_the_pool_lost_stays_lost() {
    let fixture = Fixture::new();
    let syncs = || fixture.metrics.snapshot().of(CallKind::SyncFile).count;
    let (overlay, ino, _) = written_through(&fixture).await;
    overlay.fsync(ino, false).await.unwrap();
    let before = syncs();
    assert!(before > 0);
    overlay.fsync(ino, false).await.unwrap();
    assert_eq!(syncs(), before, "nothing was written since");
    // A daemon that was killed had written before the one that syncs.
    put(&overlay, ino, 0, b"new").await;
    let killed = tempfile::tempdir().unwrap();
    image(fixture.fast.path(), killed.path());
    drop(overlay);
    let overlay = Overlay::open(Options { fast: vec![killed.path().into()], ..options(&fixture) }).await.unwrap();
    // Also before the daemon has opened again what the kernel holds open.
    overlay.fsync(ino, false).await.unwrap();
    assert!(syncs() > before, "{}", syncs());
    overlay.open_inherited(ino, RDWR).await.unwrap();
    // Without an fsync, the pool is asked now and then.
    let before = syncs();
    for at in 0..70 {
        put(&overlay, ino, at % 12 * MIB, &content(at as u64, MIB)).await;
    }
    assert!(syncs() > before);
    fixture.fault.set_odds(CallKind::SyncFile, Odds { before: 1.0, after: 0.0 });
    put(&overlay, ino, 0, b"lost").await;
    assert!(overlay.fsync(ino, false).await.is_err());
    fixture.fault.heal();
    assert!(overlay.fsync(ino, false).await.is_err(), "the pool would not tell again");
    overlay.setattr(ino, &Change { size: Some(0), ..Change::default() }, CALLER).await.unwrap();
    overlay.fsync(ino, false).await.unwrap();
    close(&overlay, ino).await;
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_the_pool_that_was_lost_makes_no_conflict() {
    let fixture = Fixture::new();
    let (overlay, ino, mut expected) = written_through(&fixture).await;
    for ends in ["read", "write", "empty"] {
        fixture.fault.set_odds(CallKind::WriteAt, Odds { before: 0.0, after: 1.0 });
        let arrived = content(11, 1000);
        assert!(overlay.write(ino, expected.len() as u64, arrived.clone().into()).await.is_err(), "{ends}");
        expected.extend(arrived);
        fixture.fault.heal();
        match ends {
            "read" => assert_eq!(
                overlay.read(ino, expected.len() as u64 - 9, 9).await.unwrap(),
                expected[expected.len() - 9..]
            ),
            "write" => {
                put(&overlay, ino, 0, b"go on").await;
                expected[..5].copy_from_slice(b"go on");
            }
            _ => {
                overlay.setattr(ino, &Change { size: Some(0), ..Change::default() }, CALLER).await.unwrap();
                put(&overlay, ino, 0, b"short").await;
                expected = b"short".to_vec();
            }
        }
    }
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected);
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    assert_eq!(fixture.pooled().len(), 1);
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn another_name_of_the_object_leads_to_the_same_file() {
    let fixture = Fixture::new();
    let (overlay, ino, mut expected) = written_through(&fixture).await;
    fixture.memory.link(&pool_path("large"), &pool_path("other")).await.unwrap();
    put(&overlay, ino, 0, b"this write finds that there is another name").await;
    expected[..43].copy_from_slice(b"this write finds that there is another name");
    // The answer is of a version that no write of this daemon made.
    fixture.memory.write_at(&pool_path("other"), 12 << 20, "more".into()).await.unwrap();
    expected.extend(b"more");
    assert_eq!(find(&overlay, "other").await, ino);
    put(&overlay, ino, expected.len(), b" at the end").await;
    expected.extend(b" at the end");
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "other").unwrap() == expected);
    assert_eq!(overlay.status().await.conflicts, Vec::<String>::new());
    assert_eq!(fixture.pooled().len(), 2);
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[tokio::test(flavor = "multi_thread")]
async fn programs_write_one_file_at_the_same_time_while_its_directory_is_listed() {
    let fixture = Fixture::new();
    let overlay = Overlay::open(options(&fixture)).await.unwrap();
    let expected = content(12, 24 * MIB);
    let ino = create(&overlay, "large").await;
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (overlay, expected) = (overlay.clone(), expected.clone());
            tokio::spawn(async move {
                overlay.open_file(ino, RDWR).await.unwrap();
                for at in (writer * 64 * 1024..expected.len()).step_by(256 * 1024) {
                    put(&overlay, ino, at, &expected[at..at + 64 * 1024]).await;
                    let there = overlay.read(ino, at as u64, 64 * 1024).await.unwrap();
                    assert!(there == expected[at..at + 64 * 1024], "at {at}");
                    assert!(overlay.getattr(ino).await.unwrap().0.size >= at as u64 + 64 * 1024);
                }
                overlay.release(ino, RDWR);
            })
        })
        .collect();
    while !writers.iter().all(|writer| writer.is_finished()) {
        overlay.list_residency(&pool_path(""), true).await.unwrap();
        let _ = overlay.lookup(Ino::ROOT, b"none").await.unwrap();
        tokio::task::yield_now().await;
    }
    for writer in writers {
        writer.await.unwrap();
    }
    close(&overlay, ino).await;
    flushed(&overlay).await;
    assert!(in_pool(&fixture, "large").unwrap() == expected);
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[test]
fn programs_write_what_does_not_fit() {
    let policy = "[default]\nflush = \"idle:1s\"\n";
    let limit = Some("64MiB".into());
    let mount = Mount::new(mount::Options { limit, ..mount::Options::policy(policy) });
    let expected = content(1, 200 * MIB);
    fs::write(mount.pool("source"), &expected).unwrap();
    // By write(2), by copy_file_range(2) and sendfile(2), and by tar in small blocks, from the pool and from the mount.
    let sh = |script: &str| {
        let output = Command::new("sh").args(["-ec", script]).current_dir(mount.place.mnt()).output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    };
    sh(&format!("dd if={} of=dd bs=1M conv=fsync status=none", mount.pool("source").display()));
    sh("cp source copied");
    sh("mkdir d; tar -cf - source | tar -C d -xf -");
    sh("cp -p source d/kept; cat source >> d/kept");
    for name in ["dd", "copied", "d/source"] {
        assert!(fs::read(mount.pool(name)).unwrap() == expected, "{name}");
        assert!(fs::read(mount.path(name)).unwrap() == expected, "{name}");
    }
    assert!(fs::read(mount.pool("d/kept")).unwrap() == [&expected[..], &expected].concat());
    mount.flush();
    let times = |path| fs::metadata(path).unwrap().mtime();
    assert_eq!(times(mount.pool("d/source")), times(mount.pool("source")));
    assert!(mount.status().used_bytes <= 64 << 20);
    assert_eq!(mount.status().dirty_files, 0);
    // Mapped, and beside a reader that has it open.
    let reader = File::open(mount.path("dd")).unwrap();
    sh("printf mapped > piece; dd if=piece of=dd bs=1 seek=1000 conv=notrunc status=none");
    let mut piece = [0; 6];
    reader.read_exact_at(&mut piece, 1000).unwrap();
    assert_eq!(&piece, b"mapped");
    fs::set_permissions(mount.path("dd"), fs::Permissions::from_mode(0o600)).unwrap();
    mount.flush();
    assert_eq!(fs::metadata(mount.pool("dd")).unwrap().mode() & 0o777, 0o600);
}

/// SEMANTICS 47: "It reads it directly if a program opened the file for reading before"
#[test]
fn what_the_kernel_reads_past_the_daemon_stays_in_the_fast_pool() {
    let policy = "[default]\nflush = \"idle:1s\"\n";
    let mount = Mount::new(mount::Options { limit: Some("64MiB".into()), ..mount::Options::policy(policy) });
    fs::write(mount.pool("f"), content(3, MIB)).unwrap();
    fs::read(mount.path("f")).unwrap();
    let reader = File::open(mount.path("f")).unwrap();
    let writer = OpenOptions::new().write(true).open(mount.path("f")).unwrap();
    let written = (0..100).take_while(|n| writer.write_all_at(&content(*n, MIB), n << 20).is_ok()).count();
    // The file may fill the fast pool to its last block. Without passthrough, the daemon sees the reader.
    assert!(written <= 64 || !mount.status().passthrough, "{written}");
    let mut piece = vec![0; MIB];
    reader.read_exact_at(&mut piece, 0).unwrap();
    assert!(piece == content(0, MIB), "the reader sees what is written");
    drop((reader, writer));
    mount.flush();
    assert!(fs::read(mount.pool("f")).unwrap().len() >= written << 20);
}

/// SEMANTICS 47: "a file that does not fit is written through"
#[test]
fn the_worker_is_killed_while_a_file_is_written_through() {
    let policy = "[default]\nflush = \"idle:1s\"\n";
    let limit = Some("64MiB".into());
    let mount = Mount::new(mount::Options { limit, ..mount::Options::policy(policy) });
    let expected = content(2, 240 * MIB);
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
    assert!(fs::read(mount.pool("out")).unwrap() == expected);
    drop(out);
    std::thread::sleep(Duration::from_millis(100));
    assert!(fs::read(mount.path("out")).unwrap() == expected);
    mount.flush();
    assert_eq!(mount.status().dirty_files, 0);
}
