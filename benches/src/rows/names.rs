//! Rows of names and attributes.

use std::fs;
use std::path::{Path, PathBuf};

use super::content::{mount, settle};
use super::{Bench, small};
use crate::bind::Bound;
use crate::pairs::Side;
use crate::place::{MANY_ENTRIES, Place};
use crate::report::{Target, Unit};
use crate::work::Change;
use crate::{Result, work};

const STAT_ROUNDS: usize = 10;
const WALK_ROUNDS: usize = 5;
const LIST_ROUNDS: usize = 5;
/// Files that one sample creates.
const CREATED: usize = 10_000;
/// Entries of a directory that changes while it is read.
const SCANNED: usize = 5_000;

/// Measures names and attributes that the kernel may have cached.
pub fn known(bench: &mut Bench) -> Result<()> {
    let unit = Unit::PerSec;
    let place = &bench.place;
    for root in [&place.native, place.general.path()] {
        work::stat(&small::names(root), 1)?;
        work::walk(&root.join("data/small"), 2)?;
        work::list(&root.join("data/many"), MANY_ENTRIES, 2)?;
    }
    bench.ratio("repeated stat of 10,000 files", Target::AtLeast(0.80), unit, |place, side, _| {
        work::stat(&small::names(place.side(side, &place.general)), STAT_ROUNDS)
    })?;
    for (suffix, bound) in [("", false), (", bound", true)] {
        let name = format!("tree walk with stat, 10,100 entries{suffix}");
        bench.ratio(&name, Target::AtLeast(0.80), unit, |place, side, _| {
            let _bound = Bound::when(bound)?;
            work::walk(&place.side(side, &place.general).join("data/small"), WALK_ROUNDS)
        })?;
    }
    bench.ratio("readdir of 100,000 entries", Target::AtLeast(1.0), unit, |place, side, _| {
        work::list(&place.side(side, &place.general).join("data/many"), MANY_ENTRIES, LIST_ROUNDS)
    })
}

/// How files are created and removed.
#[derive(Clone, Copy)]
struct How {
    suffix: &'static str,
    /// The default policy flushes in the background.
    background: bool,
    /// The client is bound to a CPU.
    bound: bool,
}

const HOWS: [How; 3] = [
    How { suffix: "", background: false, bound: false },
    How { suffix: ", bound", background: false, bound: true },
    How { suffix: ", default policy", background: true, bound: false },
];

impl How {
    fn target(self, least: f64) -> Target {
        if self.background { Target::Beside } else { Target::AtLeast(least) }
    }

    fn dir(self, root: &Path) -> PathBuf {
        root.join(format!("created-{}-{}", self.background, self.bound))
    }

    /// Returns the tree of one sample. Each sample has its own, and all trees are created before any is removed,
    /// because ext4 is slow to reuse an inode that was deleted a moment ago.
    fn tree(self, place: &Place, side: Side, pair: usize) -> PathBuf {
        self.dir(place.side(side, mount(place, self.background))).join(pair.to_string())
    }
}

pub fn files(root: &Path) -> Vec<PathBuf> {
    work::spread_names(root, CREATED)
}

pub fn create_and_unlink(bench: &mut Bench) -> Result<()> {
    let unit = Unit::PerSec;
    for how in HOWS {
        let name = format!("create + write 4 KiB + close of 10,000{}", how.suffix);
        bench.ratio(&name, how.target(0.50), unit, |place, side, pair| {
            let root = how.tree(place, side, pair);
            work::make_spread(&root)?;
            settle(place, how.background)?;
            let _bound = Bound::when(how.bound)?;
            work::create(&files(&root))
        })?;
    }
    for how in HOWS {
        let name = format!("unlink of 10,000 files{}", how.suffix);
        bench.ratio(&name, how.target(0.20), unit, |place, side, pair| {
            let root = how.tree(place, side, pair);
            settle(place, how.background)?;
            let _bound = Bound::when(how.bound)?;
            work::unlink(&files(&root))
        })?;
    }
    let place = &bench.place;
    for root in [&place.native, place.quiet.path(), place.general.path()] {
        for how in HOWS {
            match fs::remove_dir_all(how.dir(root)) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Measures a program that changes a directory while it reads it, such as
/// `for entry in os.scandir(dir): os.unlink(entry)`. All directories are made before any is changed, for the reason
/// that [`How::tree`] gives.
pub fn scandir_and_change(bench: &mut Bench) -> Result<()> {
    let dir = |root: &Path, change: Change, pair: usize| root.join(format!("scanned-{change:?}-{pair}"));
    let changes = [("a creation", Change::Create), ("an unlink", Change::Unlink)];
    let place = &bench.place;
    for pair in 0..bench.args.pairs {
        for (_, change) in changes {
            for root in [&place.native, place.quiet.path()] {
                work::make_many(&dir(root, change, pair), SCANNED)?;
            }
        }
    }
    for (what, change) in changes {
        let name = format!("scandir of 5,000 with {what} at each");
        bench.ratio(&name, Target::AtLeast(0.50), Unit::PerSec, |place, side, pair| {
            settle(place, false)?;
            work::scan_and_change(&dir(place.side(side, &place.quiet), change, pair), SCANNED, change)
        })?;
    }
    Ok(())
}
