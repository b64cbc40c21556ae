//! Checkpoints: several writers write a large file each, at the same moment, again and again; older ones are deleted.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::mount::Mount;
use crate::pairs::Side;
use crate::report::{Outcome, Target, Unit};
use crate::{Result, work};

use super::Bench;

const WRITERS: usize = 8;
const BYTES_EACH: usize = 256 << 20;
const EVERY: Duration = Duration::from_secs(10);
const KEPT: usize = 2;
/// A file is deleted when it is younger than that: unless a checkpoint takes longer than the interval.
const POLICY: &str = "[default]\nflush = \"idle:60s\"\n";

/// Measures how fast checkpoints are absorbed, and what the deleted ones cost the pool.
pub fn absorb(bench: &mut Bench) -> Result<()> {
    let root = bench.place.root.clone();
    let policy = root.join("checkpoints.toml");
    fs::write(&policy, POLICY)?;
    let policy = policy.to_str().ok_or("a directory whose name is not UTF-8")?;
    let (point, fast) = (root.join("mount-checkpoints"), root.join("fast-checkpoints"));
    let mount = Mount::start(&root.join("pool-checkpoints"), &point, &fast, &["--limit", "16GiB", "--policy", policy])?;
    let native = bench.place.native.join("checkpoints");
    fs::create_dir_all(&native)?;
    let mut last = [None, None];
    bench.ratio(
        "checkpoints: 8 writers, 256 MiB each + fsync, every 10 s, the last 2 kept",
        Target::AtLeast(0.9),
        Unit::BytesPerSec,
        |place, side, number| {
            let (root, last) = match side {
                Side::Native => (native.as_path(), &mut last[0]),
                Side::Mount => (mount.path(), &mut last[1]),
            };
            place.sync()?;
            if let Some(last) = *last {
                thread::sleep(EVERY.saturating_sub(Instant::elapsed(&last)));
            }
            *last = Some(Instant::now());
            let rate = checkpoint(root, number)?;
            if let Some(old) = number.checked_sub(KEPT) {
                (0..WRITERS).try_for_each(|writer| fs::remove_file(file(root, old, writer)))?;
            }
            Ok(rate)
        },
    )?;
    mount.settle()?;
    let kept = bench.args.pairs.min(KEPT) * WRITERS * BYTES_EACH;
    let sent = mount.pool_written_bytes()? as f64 / kept as f64;
    let row = "checkpoints: bytes that the pool got, for each byte that was kept";
    bench.add(row, Target::AtMost(1.0), Outcome::Value(sent, ""));
    drop(mount);
    for dir in [native, fast, root.join("pool-checkpoints")] {
        fs::remove_dir_all(dir)?;
    }
    Ok(())
}

fn file(root: &Path, number: usize, writer: usize) -> PathBuf {
    root.join(format!("checkpoint-{number}-{writer}"))
}

/// Writes one file with each writer. Bytes per second of all of them.
fn checkpoint(root: &Path, number: usize) -> Result<f64> {
    let begun = Instant::now();
    let written: Vec<_> = thread::scope(|scope| {
        let write = |writer| {
            let path = file(root, number, writer);
            scope.spawn(move || work::write_sequentially(&path, BYTES_EACH).map_err(|error| error.to_string()))
        };
        let writers: Vec<_> = (0..WRITERS).map(write).collect();
        writers.into_iter().map(|writer| writer.join().unwrap_or_else(|_| Err("a writer panicked".into()))).collect()
    });
    written.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    Ok((WRITERS * BYTES_EACH) as f64 / begun.elapsed().as_secs_f64())
}
