//! Views, against the native directory; and how long it takes to lay one.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use super::Bench;
use super::small::names;
use crate::caches::Drop;
use crate::pairs::{Side, spread};
use crate::place::Place;
use crate::report::{Outcome, Target, Unit};
use crate::{Result, work};

const HOT_ROUNDS: usize = 3;
const WALK_ROUNDS: usize = 5;
const FILES_EACH: usize = 1_000;

pub fn speed(bench: &mut Bench) -> Result<()> {
    bench.place.general.make_view("data")?;
    let small = |place: &Place, side| names(place.side(side, &place.general));
    for side in [Side::Native, Side::Mount] {
        work::open_read_close(&small(&bench.place, side), 2)?;
    }
    let at_least = Target::AtLeast;
    let hot = "view: open+read+close of 10,000 × 4 KiB, hot";
    bench.ratio(hot, at_least(0.95), Unit::PerSec, |place, side, _| {
        work::open_read_close(&small(place, side), HOT_ROUNDS)
    })?;
    let dropped = "view: open+read+close, page cache dropped";
    bench.ratio(dropped, at_least(0.90), Unit::PerSec, |place, side, _| {
        place.drop_caches(Drop::Pages)?;
        work::open_read_close(&small(place, side), 1)
    })?;
    bench.ratio("view: tree walk with stat", at_least(0.95), Unit::PerSec, |place, side, _| {
        work::walk(&place.side(side, &place.general).join("data/small"), WALK_ROUNDS)
    })?;
    bench.ratio("view: mmap read, hot", at_least(0.95), Unit::BytesPerSec, |place, side, _| {
        work::read_mapped(&super::content::big(place.side(side, &place.general)), HOT_ROUNDS)
    })?;
    bench.place.general.end_view("data")
}

/// Lays views of 100,000 files that are resident: the first one also reads their extended attributes from the pool.
pub fn laying(bench: &mut Bench) -> Result<()> {
    laying_of(bench, "100,000", 100, 2.0)
}

/// The same of a million files.
pub fn laying_a_million(bench: &mut Bench) -> Result<()> {
    laying_of(bench, "1,000,000", 1_000, 30.0)
}

fn laying_of(bench: &mut Bench, files: &str, dirs: usize, target: f64) -> Result<()> {
    let tree: PathBuf = bench.place.root.join("pool/many");
    for at in 0..dirs {
        let part = tree.join(at.to_string());
        fs::create_dir_all(&part)?;
        (0..FILES_EACH).try_for_each(|file| fs::write(part.join(file.to_string()), b"x"))?;
    }
    let mount = &bench.place.general;
    mount.stage(&mount.path().join("many"))?;
    let (mut first, mut again) = (None, Vec::new());
    for _ in 0..bench.args.pairs.clamp(2, 4) {
        // Staging what is resident leases it, and takes the same time with and without a view.
        let begun = Instant::now();
        mount.stage(&mount.path().join("many"))?;
        let staged = begun.elapsed();
        let begun = Instant::now();
        mount.make_view("many")?;
        let laid = begun.elapsed().saturating_sub(staged).as_secs_f64();
        mount.end_view("many")?;
        match first {
            None => first = Some(laid),
            Some(_) => again.push(laid),
        }
    }
    let measured = spread(again);
    let first = first.unwrap_or_default();
    bench.add(&format!("view of {files} files laid, first"), Target::AtMost(target), Outcome::Value(first, "s"));
    let name = format!("view of {files} files laid, again");
    bench.add(&name, Target::AtMost(target), Outcome::Value(measured.median, "s"));
    fs::remove_dir_all(&tree)?;
    Ok(())
}
