//! A pool that is slower than the writers.

use std::fs;
use std::thread;
use std::time::Duration;

use forebay_api::operator::Status;
use forebay_engine::{Overlay, Policy};
use forebay_tests::engine::{self, Fixture, create, find, put};
use forebay_tests::mount::{Mount, Options, content};

const FILE: usize = 2 << 20;
const STATUS_EVERY: Duration = Duration::from_millis(100);

fn mounted(limit: &str, policy: &str) -> Mount {
    Mount::new(Options { limit: Some(limit.into()), ..Options::policy(policy) })
}

fn write(mount: &Mount, files: std::ops::Range<u64>) {
    for at in files {
        fs::write(mount.path(format!("f{at}")), content(at, FILE)).unwrap();
    }
}

fn check_pool(mount: &Mount, files: u64) {
    mount.flush();
    for at in 0..files {
        assert!(fs::read(mount.pool(format!("f{at}"))).unwrap() == content(at, FILE), "{at}");
    }
}

fn is_slowed(status: &Status) -> bool {
    status.write_pace_bytes.is_some() || status.counters.paced_writes > 0
}

/// Writes about 40 MiB per second until writers are slowed. Returns the number of files.
fn write_until_slowed(mount: &Mount, files_max: u64) -> u64 {
    for at in (0..files_max).step_by(2) {
        write(mount, at..at + 2);
        if is_slowed(&mount.status()) {
            return at + 2;
        }
        thread::sleep(Duration::from_millis(100));
    }
    panic!("writers are not slowed: {:?}", mount.status());
}

/// Writes files as fast as it goes. Returns the most writers that waited for room at a time.
fn waiting_while_written(mount: &Mount, files: std::ops::Range<u64>) -> u64 {
    let mut waiting = 0;
    thread::scope(|scope| {
        let writer = scope.spawn(|| write(mount, files));
        while !writer.is_finished() {
            let status = mount.status();
            assert!(status.used_bytes <= status.limit_bytes, "{status:?}");
            waiting = waiting.max(status.waiting_for_room);
            thread::sleep(STATUS_EVERY);
        }
        writer.join().unwrap();
    });
    waiting
}

/// SEMANTICS 121: "Before the fast pool is full of changes that the flush sends, writers are slowed to the rate at which the
/// pool takes them (`pace-below`, [POLICY.md](POLICY.md)), so that none waits for room."
#[test]
fn writers_are_slowed_before_the_fast_pool_is_full() {
    // The margin is the whole fast pool, and nothing is sent until a quarter of it can be. So the pace is known while most of
    // the room is left.
    let policy = "[default]\nflush = \"idle:1h\"\n[write-back]\nrate = \"64MiB\"\npace-below = 1.0\n";
    let mount = mounted("256MiB", policy);
    let slowly = write_until_slowed(&mount, 100);
    // Together with those, more than the fast pool takes.
    let files = slowly + 112;
    assert_eq!(waiting_while_written(&mount, slowly..files), 0);
    check_pool(&mount, files);
}

#[test]
fn writers_that_are_not_slowed_wait_for_room() {
    // Any writer that is faster than 30 MiB per second fills the fast pool.
    const FILES: u64 = 56;
    let mount = mounted("64MiB", "[default]\nflush = \"idle:1s\"\n[write-back]\nrate = \"16MiB\"\npace-below = 0\n");
    assert!(waiting_while_written(&mount, 0..FILES) > 0);
    assert_eq!(mount.status().counters.paced_writes, 0);
    check_pool(&mount, FILES);
}

/// SEMANTICS 121: "`max-lag` does the same before the flush is too late."
#[test]
fn writers_are_slowed_before_the_flush_is_too_late() {
    let policy =
        "[default]\nflush = \"idle:0s\"\n[write-back]\nrate = \"16MiB\"\npace-below = 0\nmax-lag = \"500ms\"\n";
    write_until_slowed(&mounted("1GiB", policy), 200);
}

/// Changes that only an operator or the end of a job sends make no room, however slow the writers are.
#[test]
fn writers_are_not_slowed_for_what_is_not_sent() {
    for flush in ["manual", "job-end"] {
        let policy = format!("[default]\nflush = \"{flush}\"\n[write-back]\npace-below = 1.0\nrate = \"2MiB\"\n");
        let mount = mounted("256MiB", &policy);
        // The last ones slowly: what is to be sent is counted twice per second.
        let script = "for at in $(seq 64); do
            dd if=/dev/zero of=\"$0/f$at\" bs=1M count=2 status=none
            if [ $at -gt 40 ]; then sleep 0.1; fi
        done";
        let dir = mount.place.mnt();
        mount.forebay(["run", "--job", "j", "--", "sh", "-euc", script, dir.to_str().unwrap()], &[]).ok();
        assert_eq!(mount.status().counters.paced_writes, 0, "{flush}");
    }
}

/// An engine with 56 MiB that it does not have yet.
async fn behind(fixture: &Fixture, policy: &str) -> Overlay {
    let policy = Policy::parse(policy).unwrap();
    let options = forebay_engine::Options { limit_bytes: Some(128 << 20), policy, ..fixture.options() };
    let overlay = Overlay::open(options).await.unwrap();
    for at in 0..48 {
        engine::write(&overlay, &format!("f{at}"), &"x".repeat(1 << 20)).await.unwrap();
    }
    engine::write(&overlay, "large", &"x".repeat(8 << 20)).await.unwrap();
    overlay
}

/// Writes now and then until `holds`.
async fn write_until(overlay: &Overlay, what: &str, holds: impl Fn(&Status) -> bool) {
    let small = create(overlay, what).await;
    for at in 0..600 {
        put(overlay, small, at * 4096, &[1; 4096]).await;
        if holds(&overlay.status().await) {
            return engine::close(overlay, small).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{what}: {:?}", overlay.status().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_is_slowed_copies_no_more_at_a_time_than_it_pays_for() {
    let fixture = Fixture::new();
    let policy = "[default]\nflush = \"idle:1h\"\n[write-back]\nrate = \"2MiB\"\npace-below = 1.0\n";
    let overlay = behind(&fixture, policy).await;
    write_until(&overlay, "slowed", |status| status.write_pace_bytes.is_some()).await;
    let (source, target) = (find(&overlay, "large").await, create(&overlay, "copy").await);
    assert_eq!(overlay.copy_range(source, 0, target, 0, 8 << 20).await.unwrap(), 1 << 20);
    assert_eq!(overlay.copy_range(source, 1 << 20, target, 1 << 20, 7 << 20).await.unwrap(), 1 << 20);
    engine::close(&overlay, target).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writers_are_not_slowed_any_more_when_only_an_operator_flushes() {
    let fixture = Fixture::new();
    let policy = |flush: &str| {
        format!("[default]\nflush = \"{flush}\"\n[write-back]\nrate = \"2MiB\"\npace-below = 0\nmax-lag = \"500ms\"\n")
    };
    let overlay = behind(&fixture, &policy("idle:0s")).await;
    write_until(&overlay, "slowed", |status| status.write_pace_bytes.is_some()).await;
    overlay.set_policy(Policy::parse(&policy("manual")).unwrap()).await;
    write_until(&overlay, "free", |status| status.write_pace_bytes.is_none()).await;
}
