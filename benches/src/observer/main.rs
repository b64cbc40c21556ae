//! The cost of the observer for programs that read, measured with and without it in turns: fio on files of a mount and
//! on other files, and the cost of one event.

mod events;
mod fio;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use forebay_benches::Result;
use forebay_benches::args::Args;
use forebay_benches::pairs::{Side, Spread, alternate, spread};

/// The size of the file that both sides read; it stays in the page cache.
const FILE_BYTES: u64 = 64 << 20;
/// A sample is the best of this many short ones, which alternate with those of the other side: other load on a shared
/// machine can only make them slower.
const SHORT: usize = 5;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args = Args::parse(std::env::args().skip(1))?;
    for fact in forebay_benches::machine::facts(&args.dir)? {
        println!("* {fact}");
    }
    if args.wants("fio") {
        fio::rows(&args)?;
    }
    if args.wants("events") {
        events::rows(&args)?;
    }
    Ok(())
}

fn make_file(path: &Path) -> Result<()> {
    let mut file = File::create(path)?;
    for _ in 0..FILE_BYTES >> 20 {
        file.write_all(&vec![7; 1 << 20])?;
    }
    Ok(file.sync_all()?)
}

/// Nanoseconds for each event, without the observer and with it.
struct Samples {
    off: Vec<f64>,
    on: Vec<f64>,
}

impl Samples {
    fn take(pairs: usize, mut sample: impl FnMut(Observed) -> Result<f64>) -> Result<Self> {
        let side = |side| if side == Side::Mount { Observed::Yes } else { Observed::No };
        let short = alternate(pairs * SHORT, |which, _| sample(side(which)))?;
        let best =
            |each: &[f64]| each.chunks(SHORT).map(|each| each.iter().copied().fold(f64::MAX, f64::min)).collect();
        Ok(Self { off: best(&short.native), on: best(&short.mount) })
    }

    /// Returns the spread of `of(off, on)` over the pairs.
    fn spread(&self, of: impl Fn(f64, f64) -> f64) -> Spread {
        spread(self.off.iter().zip(&self.on).map(|(off, on)| of(*off, *on)).collect())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Observed {
    No,
    Yes,
}
