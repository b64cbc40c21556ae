//! libfuse's `passthrough_hp`, for comparison.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Bench, names, small};
use crate::bind::Bound;
use crate::caches::{self, drop_caches};
use crate::pairs::{self, Side};
use crate::report::{Outcome, Target, Unit};
use crate::{Result, work};

const ROWS: [(&str, bool); 2] = [
    ("open+read+close, hot, libfuse's passthrough_hp", false),
    ("open+read+close, hot, libfuse's passthrough_hp, bound", true),
];
const CREATE_ROWS: [(&str, bool); 2] = [
    ("create of 10,000, libfuse's passthrough_hp", false),
    ("create of 10,000, libfuse's passthrough_hp, bound", true),
];
/// The mount point, and the directory in which files are created on it.
const POINT: &str = "mount-libfuse";
const TREES: &str = "created-libfuse";
const START_LIMIT: Duration = Duration::from_secs(10);

/// A mount of `passthrough_hp`; it is unmounted when this value is dropped.
struct Peer {
    child: Child,
    point: PathBuf,
}

impl Peer {
    fn start(program: &Path, source: &Path, point: &Path) -> Result<Self> {
        fs::create_dir_all(point)?;
        let child = Command::new(program)
            .args([source, point])
            .arg("--foreground")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let mut peer = Self { child, point: point.into() };
        let start = Instant::now();
        while !point.join("data").exists() {
            if peer.child.try_wait()?.is_some() || start.elapsed() > START_LIMIT {
                return Err(format!("{} did not mount", program.display()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.point).stderr(Stdio::null()).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = Command::new("umount").arg("-l").arg(&self.point).stderr(Stdio::null()).status();
    }
}

pub fn hot(bench: &mut Bench) -> Result<()> {
    rows(bench, ROWS, |root, pair, bound| {
        let names = small::names(root);
        if pair == 0 {
            work::open_read_close(&names, 2)?;
        }
        let _bound = Bound::when(bound)?;
        work::open_read_close(&names, 3)
    })
}

/// Measures creation. `passthrough_hp` creates its files in the native directory, without a catalog or a journal. So
/// the rows show what a request costs, and little else.
pub fn create(bench: &mut Bench) -> Result<()> {
    rows(bench, CREATE_ROWS, |root, pair, bound| {
        // `passthrough_hp` holds a descriptor for each file in the kernel's caches. Dropping the caches makes it close
        // those of the last sample.
        drop_caches(root, caches::Drop::All)?;
        let tree = root.join(TREES).join(format!("{pair}-{bound}-{}", root.ends_with(POINT)));
        work::make_spread(&tree)?;
        let _bound = Bound::when(bound)?;
        work::create(&names::files(&tree))
    })?;
    let _ = fs::remove_dir_all(bench.place.native.join(TREES));
    Ok(())
}

/// Adds one row for each name, measured by `sample(root, pair, bound)`: one unbound, one bound.
fn rows(bench: &mut Bench, rows: [(&str, bool); 2], sample: impl Fn(&Path, usize, bool) -> Result<f64>) -> Result<()> {
    let Some(program) = bench.args.passthrough_hp.clone() else {
        for (name, _) in rows {
            bench.add(name, Target::Beside, Outcome::Missing("not built here".into()));
        }
        return Ok(());
    };
    let peer = Peer::start(&program, &bench.place.native, &bench.place.root.join(POINT))?;
    for (name, bound) in rows {
        let series = pairs::alternate(bench.args.pairs, |side, pair| {
            let root = match side {
                Side::Native => &bench.place.native,
                Side::Mount => &peer.point,
            };
            sample(root, pair, bound)
        })?;
        bench.add_series(name, Target::Beside, series, Unit::PerSec);
    }
    Ok(())
}
