//! Rows of one large file.

use std::fs;
use std::path::{Path, PathBuf};

use super::Bench;
use crate::caches::Drop;
use crate::fio::{self, Job};
use crate::mount::Mount;
use crate::place::{BIG_BYTES, Place};
use crate::report::{Target, Unit};
use crate::{Result, work};

/// Reads of a hot file in one sample; one read takes about 50 ms.
const HOT_ROUNDS: usize = 6;
const MAPPED_ROUNDS: usize = 3;

pub fn big(root: &Path) -> PathBuf {
    root.join("data/big")
}

/// Measures sequential reads.
pub fn read(bench: &mut Bench) -> Result<()> {
    let (target, unit) = (Target::AtLeast(0.97), Unit::BytesPerSec);
    warm(&bench.place)?;
    bench.ratio("sequential read 1 MiB, page cache hot", target, unit, |place, side, _| {
        work::read_sequentially(&big(place.side(side, &place.general)), HOT_ROUNDS)
    })?;
    bench.ratio("sequential read 1 MiB, page cache dropped", target, unit, |place, side, _| {
        place.drop_caches(Drop::Pages)?;
        work::read_sequentially(&big(place.side(side, &place.general)), 1)
    })
}

/// Measures random reads, and reads through a mapping.
pub fn random(bench: &mut Bench) -> Result<()> {
    let secs = bench.fio_secs();
    let job = |jobs, depth, direct| Job { write: false, block_kib: 4, direct, jobs, depth, secs };
    let rows = [
        ("random 4 KiB read, hot, 1 job", 0.88, job(1, 1, false)),
        ("random 4 KiB read, hot, 4 jobs", 0.88, job(4, 1, false)),
        ("O_DIRECT 4 KiB random read, depth 1", 0.95, job(1, 1, true)),
        ("O_DIRECT 4 KiB random read, depth 16", 0.95, job(1, 16, true)),
    ];
    for (name, target, job) in rows {
        warm(&bench.place)?;
        bench.ratio(name, Target::AtLeast(target), Unit::PerSec, |place, side, _| {
            fio::run(&big(place.side(side, &place.general)), job)
        })?;
    }
    warm(&bench.place)?;
    bench.ratio("mmap read, hot", Target::AtLeast(0.95), Unit::BytesPerSec, |place, side, _| {
        work::read_mapped(&big(place.side(side, &place.general)), MAPPED_ROUNDS)
    })
}

/// Reads both copies of the large file into the page cache.
fn warm(place: &Place) -> Result<()> {
    for root in [&place.native, place.general.path()] {
        work::read_sequentially(&big(root), 2)?;
    }
    Ok(())
}

/// Measures sequential and random writes, without and with the background flush of the default policy.
pub fn write(bench: &mut Bench) -> Result<()> {
    let secs = bench.fio_secs();
    let job = Job { write: true, block_kib: 4, direct: false, jobs: 1, depth: 1, secs };
    for (suffix, background) in [("", false), (", default policy", true)] {
        let target = |least| if background { Target::Beside } else { Target::AtLeast(least) };
        let name = format!("sequential write 1 MiB + fsync{suffix}");
        bench.ratio(&name, target(0.95), Unit::BytesPerSec, |place, side, pair| {
            let mount = mount(place, background);
            settle(place, background)?;
            let path = place.side(side, mount).join(format!("sequential-{background}-{pair}"));
            let rate = work::write_sequentially(&path, BIG_BYTES)?;
            fs::remove_file(&path)?;
            Ok(rate)
        })?;
        let name = format!("random 4 KiB overwrite{suffix}");
        for root in [&bench.place.native, mount(&bench.place, background).path()] {
            work::write_sequentially(&root.join(format!("overwritten-{background}")), BIG_BYTES)?;
        }
        bench.ratio(&name, target(0.90), Unit::PerSec, |place, side, _| {
            settle(place, background)?;
            let path = place.side(side, mount(place, background)).join(format!("overwritten-{background}"));
            work::read_sequentially(&path, 1)?;
            fio::run(&path, job)
        })?;
        for root in [&bench.place.native, mount(&bench.place, background).path()] {
            fs::remove_file(root.join(format!("overwritten-{background}")))?;
        }
    }
    Ok(())
}

pub fn mount(place: &Place, background: bool) -> &Mount {
    if background { &place.general } else { &place.quiet }
}

/// Waits until nothing is left to flush or to write, before the next sample begins.
pub fn settle(place: &Place, background: bool) -> Result<()> {
    if background {
        place.general.settle()?;
    }
    place.sync()
}
