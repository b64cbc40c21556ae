//! Rows of names and attributes.

use std::fs;
use std::path::{Path, PathBuf};

use super::content::{mount, settle};
use super::{Bench, small};
use crate::pairs::Side;
use crate::place::{MANY_ENTRIES, Place};
use crate::report::{Target, Unit};
use crate::{Result, work};

const STAT_ROUNDS: usize = 10;
const WALK_ROUNDS: usize = 5;
const LIST_ROUNDS: usize = 5;
/// Files that one sample creates.
const CREATED: usize = 10_000;

/// What the kernel may know already.
pub fn known(bench: &mut Bench) -> Result<()> {
    let unit = Unit::PerSec;
    let place = &bench.place;
    for root in [&place.native, place.general.path()] {
        work::stat(&small::names(root), 1)?;
        work::walk(&root.join("data/small"), 2)?;
        work::list(&root.join("data/many"), MANY_ENTRIES, 2)?;
    }
    bench.ratio("stat of 10,000 known files", Target::AtLeast(0.80), unit, |place, side, _| {
        work::stat(&small::names(place.side(side, &place.general)), STAT_ROUNDS)
    })?;
    bench.ratio("tree walk with stat, 10,100 entries", Target::AtLeast(0.80), unit, |place, side, _| {
        work::walk(&place.side(side, &place.general).join("data/small"), WALK_ROUNDS)
    })?;
    bench.ratio("readdir of 100,000", Target::AtLeast(1.0), unit, |place, side, _| {
        work::list(&place.side(side, &place.general).join("data/many"), MANY_ENTRIES, LIST_ROUNDS)
    })
}

/// The tree of one sample. No two samples share one: ext4 is slow to use an inode again that was deleted a moment ago,
/// so all are created before any is removed.
fn tree(place: &Place, side: Side, background: bool, pair: usize) -> PathBuf {
    place.side(side, mount(place, background)).join(format!("created-{background}/{pair}"))
}

fn files(root: &Path) -> Vec<PathBuf> {
    work::spread_names(root, CREATED)
}

pub fn create_and_unlink(bench: &mut Bench) -> Result<()> {
    let unit = Unit::PerSec;
    let suffix = |background| if background { ", default policy" } else { "" };
    let target = |background, least| if background { Target::Beside } else { Target::AtLeast(least) };
    for background in [false, true] {
        let name = format!("create + write 4 KiB + close of 10,000{}", suffix(background));
        bench.ratio(&name, target(background, 0.50), unit, |place, side, pair| {
            let root = tree(place, side, background, pair);
            work::make_spread(&root)?;
            settle(place, background)?;
            work::create(&files(&root))
        })?;
    }
    for background in [false, true] {
        let name = format!("unlink of them{}", suffix(background));
        bench.ratio(&name, target(background, 0.20), unit, |place, side, pair| {
            let root = tree(place, side, background, pair);
            settle(place, background)?;
            work::unlink(&files(&root))
        })?;
    }
    let place = &bench.place;
    for root in [&place.native, place.quiet.path(), place.general.path()] {
        for background in [false, true] {
            match fs::remove_dir_all(root.join(format!("created-{background}"))) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
    }
    Ok(())
}
