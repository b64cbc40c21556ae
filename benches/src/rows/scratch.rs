//! Scratch directories, against a directory beside the fast pool; and their commit into the mount.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::pairs::{Side, spread};
use crate::report::{Outcome, Target, Unit};
use crate::{Result, work};

use super::Bench;
use super::content::settle;
use super::names::files;

const MANY_DIRS: usize = 100;
const FILES_EACH: usize = 1_000;
const LARGE_BYTES: u64 = 10 << 30;

pub fn speed(bench: &mut Bench) -> Result<()> {
    let dir = bench.place.quiet.make_scratch("speed")?;
    let native = bench.place.native.join("scratch");
    fs::create_dir_all(&native)?;
    let root = |side: Side, pair: usize| match side {
        Side::Native => native.join(pair.to_string()),
        Side::Mount => dir.join(pair.to_string()),
    };
    bench.ratio(
        "scratch: create + write 4 KiB + close of 10,000",
        Target::AtLeast(0.95),
        Unit::PerSec,
        |place, side, pair| {
            let root = root(side, pair);
            work::make_spread(&root)?;
            settle(place, false)?;
            work::create(&files(&root))
        },
    )?;
    bench.ratio("scratch: unlink of 10,000 files", Target::AtLeast(0.95), Unit::PerSec, |place, side, pair| {
        settle(place, false)?;
        work::unlink(&files(&root(side, pair)))
    })?;
    let archive = bench.place.root.join("tree.tar");
    tar(&["-cf", text(&archive)?, "-C", "/usr", "include", "share/perl"])?;
    bench.ratio(
        "scratch: unpacking an archive of a real tree",
        Target::AtLeast(0.95),
        Unit::PerSec,
        |place, side, pair| {
            let root = root(side, pair).join("tar");
            fs::create_dir_all(&root)?;
            settle(place, false)?;
            let begun = Instant::now();
            tar(&["-xf", text(&archive)?, "-C", text(&root)?])?;
            Ok(1.0 / begun.elapsed().as_secs_f64())
        },
    )?;
    fs::remove_dir_all(&native)?;
    bench.place.quiet.discard_scratch(&dir)
}

pub fn commit(bench: &mut Bench) -> Result<()> {
    let dir = bench.place.quiet.make_scratch("commit")?;
    let (mut many, mut large) = (Vec::new(), Vec::new());
    for pair in 0..bench.args.pairs {
        let tree = dir.join("tree");
        for at in 0..MANY_DIRS {
            let part = tree.join(at.to_string());
            fs::create_dir_all(&part)?;
            (0..FILES_EACH).try_for_each(|file| fs::write(part.join(file.to_string()), b"x"))?;
        }
        many.push(committed(bench, &tree, &format!("committed-{pair}"))?);
        let file = File::create(dir.join("large"))?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, LARGE_BYTES)?;
        large.push(committed(bench, &dir.join("large"), "committed-large")?);
        fs::remove_file(bench.place.quiet.path().join("committed-large"))?;
    }
    let mut add = |name: &str, target: f64, secs: Vec<f64>, factor: f64, unit| {
        let measured = spread(secs.into_iter().map(|secs| secs * factor).collect());
        bench.add(name, Target::AtMost(target), Outcome::Value(measured.median, unit));
    };
    add("scratch: commit of 100,000 files", 5.0, many, 1.0, "s");
    add("scratch: commit of one file of 10 GiB", 50.0, large, 1000.0, "ms");
    bench.place.quiet.discard_scratch(&dir)
}

/// Commits a path, and returns the seconds that this took.
fn committed(bench: &Bench, from: &Path, name: &str) -> Result<f64> {
    settle(&bench.place, false)?;
    let begun = Instant::now();
    bench.place.quiet.commit_scratch(from, name)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Runs `tar`.
fn tar(arguments: &[&str]) -> Result<()> {
    let done = Command::new("tar").args(arguments).status()?;
    if done.success() { Ok(()) } else { Err(format!("tar: {done}").into()) }
}

fn text(path: &Path) -> Result<&str> {
    Ok(path.to_str().ok_or("a directory whose name is not UTF-8")?)
}
