//! Rows of many small files.

use std::path::{Path, PathBuf};

use super::Bench;
use crate::bind::Bound;
use crate::caches::Drop;
use crate::place::{Place, SMALL_FILES};
use crate::report::{Target, Unit};
use crate::{Result, work};

const HOT_ROUNDS: usize = 3;
/// Clients that open files at once.
const CLIENTS: usize = 8;

pub fn names(root: &Path) -> Vec<PathBuf> {
    work::spread_names(&root.join("data/small"), SMALL_FILES)
}

/// Reads all small files into the kernel's caches: the native ones, and those of both mounts.
fn warm(place: &Place) -> Result<()> {
    for root in [&place.native, place.general.path(), place.immutable.path()] {
        work::open_read_close(&names(root), 2)?;
    }
    Ok(())
}

pub fn hot(bench: &mut Bench) -> Result<()> {
    let unit = Unit::PerSec;
    warm(&bench.place)?;
    for (name, bound) in [("open+read+close of 10,000 × 4 KiB, hot", false), ("open+read+close, hot, bound", true)] {
        bench.ratio(name, Target::AtLeast(0.15), unit, |place, side, _| {
            let _bound = Bound::when(bound)?;
            work::open_read_close(&names(place.side(side, &place.general)), HOT_ROUNDS)
        })?;
    }
    bench.ratio("open+read+close, hot, 8 clients at once", Target::Beside, unit, |place, side, _| {
        work::open_read_close_at_once(&names(place.side(side, &place.general)), CLIENTS, HOT_ROUNDS)
    })?;
    bench.ratio("open+read+close, hot, --immutable", Target::AtLeast(0.65), unit, |place, side, _| {
        work::open_read_close(&names(place.side(side, &place.immutable)), HOT_ROUNDS)
    })
}

pub fn dropped(bench: &mut Bench) -> Result<()> {
    let unit = Unit::PerSec;
    let rows = [
        ("open+read+close, page cache dropped", Target::AtLeast(0.60), Drop::Pages, false, false),
        ("open+read+close, page cache dropped, bound", Target::AtLeast(0.60), Drop::Pages, false, true),
        ("open+read+close, page cache dropped, --immutable", Target::Beside, Drop::Pages, true, false),
        ("open+read+close, page cache, dentries and inodes dropped", Target::Beside, Drop::All, false, false),
    ];
    for (name, target, what, immutable, bound) in rows {
        bench.ratio(name, target, unit, |place, side, _| {
            let mount = if immutable { &place.immutable } else { &place.general };
            place.drop_caches(what)?;
            let _bound = Bound::when(bound)?;
            work::open_read_close(&names(place.side(side, mount)), 1)
        })?;
    }
    Ok(())
}
