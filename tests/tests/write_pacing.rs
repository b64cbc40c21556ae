//! A pool that is slower than the writers.

use std::fs;
use std::thread;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, content};

const FILE: usize = 2 << 20;

/// Writes files while the pool takes 64 MiB per second. Returns the most writers that waited for room at a time, and
/// whether writers were slowed.
fn write_past_the_pool(flush: &str, write_back: &str) -> (u64, bool) {
    const FILES: u64 = 160;
    let policy = format!("[default]\nflush = \"{flush}\"\n[write-back]\nrate = \"64MiB\"\n{write_back}\n");
    let mount = Mount::new(Options { limit: Some("256MiB".into()), ..Options::policy(&policy) });
    let name = |at: u64| format!("f{at}");
    let (mut waiting, mut slowed) = (0, false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for at in 0..FILES {
                fs::write(mount.path(name(at)), content(at, FILE)).unwrap();
            }
        });
        while !writer.is_finished() {
            let status = mount.status();
            assert!(status.used_bytes <= status.limit_bytes, "{status:?}");
            waiting = waiting.max(status.waiting_for_room);
            slowed |= status.write_pace_bytes.is_some();
            thread::sleep(Duration::from_millis(10));
        }
        writer.join().unwrap();
    });
    assert_eq!(mount.status().counters.paced_writes > 0, slowed);
    mount.flush();
    for at in 0..FILES {
        assert!(fs::read(mount.pool(name(at))).unwrap() == content(at, FILE), "{at}");
    }
    (waiting, slowed)
}

/// SEMANTICS 121: "Before the fast pool is full of changes that the flush sends, writers are slowed to the rate at which the
/// pool takes them (`pace-below`, [POLICY.md](POLICY.md)), so that none waits for room." Otherwise they wait.
#[test]
fn writers_are_slowed_before_the_fast_pool_is_full() {
    assert_eq!(write_past_the_pool("idle:1s", "pace-below = 0.5"), (0, true));
    assert_eq!(write_past_the_pool("idle:1s", "pace-below = 0"), (1, false));
}

/// SEMANTICS 121: "`max-lag` does the same before the flush is too late."
#[test]
fn writers_are_slowed_before_the_flush_is_too_late() {
    assert!(write_past_the_pool("idle:0s", "pace-below = 0\nmax-lag = \"500ms\"").1);
}

/// Changes that only an operator sends make no room, however slow the writers are.
#[test]
fn nobody_is_slowed_for_what_is_not_sent() {
    let policy = "[default]\nflush = \"manual\"\n[write-back]\npace-below = 1.0\nrate = \"1MiB\"\n";
    let mount = Mount::new(Options { limit: Some("256MiB".into()), ..Options::policy(policy) });
    for at in 0..64 {
        fs::write(mount.path(format!("f{at}")), content(at, FILE)).unwrap();
    }
    assert_eq!(mount.status().counters.paced_writes, 0);
}
