//! Rows of the daemon: processor time, memory, and how fast it answers after a crash.

use std::time::{Duration, Instant};

use super::Bench;
use crate::caches::Drop;
use crate::report::{Outcome, Target};
use crate::{Result, work};

/// Several reads, because processor time is counted in hundredths of a second.
const ROUNDS: usize = 10;
/// More than the rapid crashes after which the supervisor calls the mount failing.
const DEATHS: usize = 10;

/// Measures the daemon's processor time during reads that the kernel serves without it.
pub fn cpu(bench: &mut Bench) -> Result<()> {
    let general = &bench.place.general;
    let file = general.path().join("data/big");
    general.settle()?;
    bench.place.drop_caches(Drop::Pages)?;
    let before = general.cpu_secs()?;
    for _ in 0..ROUNDS {
        work::read_sequentially(&file, 1)?;
    }
    let cpu = (general.cpu_secs()? - before) / ROUNDS as f64;
    bench.add("daemon CPU time to read 1 GiB, resident", Target::AtMost(0.01), Outcome::Value(cpu, "s"));
    Ok(())
}

/// Measures the peak memory. Runs before [`death`], because a new worker has a new peak.
pub fn memory(bench: &mut Bench) -> Result<()> {
    let mib = |bytes: u64| bytes as f64 / 1_048_576.0;
    let (general, quiet) = (mib(bench.place.general.peak_rss_bytes()?), mib(bench.place.quiet.peak_rss_bytes()?));
    bench.add("peak RSS of the daemon after all rows above", Target::AtMost(128.0), Outcome::Value(general, "MiB"));
    bench.add("peak RSS of a daemon that flushed nothing", Target::Beside, Outcome::Value(quiet, "MiB"));
    Ok(())
}

/// Kills one worker after the other, and measures how long a program waits for the next answer. The slowest counts.
pub fn death(bench: &mut Bench) -> Result<()> {
    let general = &bench.place.general;
    let mut slowest = Duration::ZERO;
    for round in 0..DEATHS {
        general.kill_worker()?;
        let killed = Instant::now();
        // The kernel has not cached this name, so the daemon has to answer.
        if general.path().join(format!("asked-after-death-{round}")).exists() {
            return Err("a name exists that no program created".into());
        }
        slowest = slowest.max(killed.elapsed());
    }
    let secs = slowest.as_secs_f64();
    bench.add("first answer after the death of the worker", Target::AtMost(0.3), Outcome::Value(secs, "s"));
    Ok(())
}
