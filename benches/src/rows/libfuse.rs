//! libfuse's `passthrough_hp`, for comparison.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Bench, small};
use crate::bind::Bound;
use crate::pairs::{self, Side};
use crate::report::{Outcome, Target, Unit};
use crate::{Result, work};

const ROWS: [(&str, bool); 2] =
    [("the same, libfuse's passthrough_hp", false), ("the same, libfuse's passthrough_hp, bound", true)];
const START_LIMIT: Duration = Duration::from_secs(10);

/// A mount of it that goes with the value.
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
    let Some(program) = bench.args.passthrough_hp.clone() else {
        for (name, _) in ROWS {
            bench.add(name, Target::Beside, Outcome::Missing("not built here".into()));
        }
        return Ok(());
    };
    let peer = Peer::start(&program, &bench.place.native, &bench.place.root.join("mount-libfuse"))?;
    for (name, bound) in ROWS {
        let series = pairs::alternate(bench.args.pairs, |side, pair| {
            let names = small::names(match side {
                Side::Native => &bench.place.native,
                Side::Mount => &peer.point,
            });
            if pair == 0 {
                work::open_read_close(&names, 2)?;
            }
            let _bound = Bound::when(bound)?;
            work::open_read_close(&names, 3)
        })?;
        bench.add_series(name, Target::Beside, series, Unit::PerSec);
    }
    Ok(())
}
