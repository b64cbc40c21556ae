//! Measures staging ahead of jobs with real programs on a slow pool: how much faster they run, how much of their reads
//! was predicted, and what staging costs if the reads cannot be predicted.
//!
//! Arguments: `[--runs N] [--only WORD[,WORD]] [--plot FILE]`. Each program runs N times (default 6) on each of two
//! mounts of one throttled pool, in turns: one mount stages ahead, the other does not. Before each run all cached
//! content is evicted, and the kernel's caches are dropped.

mod curve;
mod ground;
mod programs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_benches::pairs::spread;
use forebay_benches::{Result, interrupt, machine};

use ground::{Ground, Mode, Ran};
use programs::{Program, Target};

/// A pool elsewhere in the building: 100 MB/s for all requests together, 2 ms before each answer.
const POOL: &str = "100MB/s,2ms";
const RUNS: usize = 6;
/// Runs whose files are staged before they begin.
const STAGED: usize = 2;

struct Args {
    runs: usize,
    /// Selects the programs whose name contains one of these words; empty selects all.
    only: Vec<String>,
    plot: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn args() -> Result<Args> {
    let mut args = Args { runs: RUNS, only: Vec::new(), plot: None };
    let mut words = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--runs" => args.runs = value()?.parse()?,
            "--only" => args.only = value()?.split(',').map(str::to_owned).collect(),
            // Cargo runs a bench in the directory of its crate. FILE is relative to the one above, where make runs.
            "--plot" => args.plot = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(value()?)),
            _ => {
                return Err(format!("{word}: not known; there are --runs N, --only WORD[,WORD] and --plot FILE").into());
            }
        }
    }
    if args.runs < 2 { Err("--runs: at least 2".into()) } else { Ok(args) }
}

fn run() -> Result<()> {
    let args = args()?;
    interrupt::watch();
    println!("Pool: {POOL}. {} runs of each program on either mount. {}\n", args.runs, machine::today()?);
    for fact in machine::facts(Path::new("/var/tmp"))? {
        println!("* {fact}");
    }
    println!(
        "\n| program | run 1 | later runs, staged during the run | not staged | speedup | spread | \
         staged before the run | speedup | all resident | coverage | accuracy | target | |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    let mut records = Vec::new();
    let is_wanted = |p: &&Program| args.only.is_empty() || args.only.iter().any(|word| p.name.contains(word.as_str()));
    for program in programs::all().iter().filter(is_wanted) {
        records.push((program.name, measure(program, args.runs)?));
    }
    curve::rows(&records, args.plot.as_deref())
}

/// Measures one program and prints its row. Returns what the runs without staging read, in their order, and the paths
/// that a user would have declared.
fn measure(program: &Program, runs: usize) -> Result<curve::Record> {
    let mut ground = Ground::make(program)?;
    let (mut ahead, mut plain): (Vec<Ran>, Vec<Ran>) = Default::default();
    for run in 0..runs {
        ground.slow_down((program.throttle)(run))?;
        let order = if run % 2 == 0 { [Mode::Plain, Mode::Ahead] } else { [Mode::Ahead, Mode::Plain] };
        for mode in order {
            interrupt::check()?;
            (program.before)(&ground.dir, run)?;
            ground.empty(mode)?;
            let ran = ground.run(mode, &(program.words)(&ground.dir, run))?;
            if mode == Mode::Ahead { ahead.push(ran) } else { plain.push(ran) }
        }
    }
    // The files of the next runs are staged first, as a prolog does. The last run is then repeated with its files still
    // resident.
    let (mut before, mut words) = (Vec::new(), Vec::new());
    for run in runs..runs + STAGED {
        interrupt::check()?;
        (program.before)(&ground.dir, run)?;
        ground.empty(Mode::Ahead)?;
        words = (program.words)(&ground.dir, run);
        ground.stage(&words)?;
        before.push(ground.run(Mode::Ahead, &words)?.seconds);
    }
    let before = spread(before);
    (program.before)(&ground.dir, runs + STAGED - 1)?;
    let here = ground.run(Mode::Ahead, &words)?;
    let ratios: Vec<f64> = ahead.iter().zip(&plain).skip(1).map(|(a, p)| p.seconds / a.seconds).collect();
    let middle = |ran: &[Ran]| spread(ran.iter().skip(1).map(|ran| ran.seconds).collect()).median;
    let shares = |of: fn(&Ran) -> f64| spread(ahead.iter().skip(1).map(of).collect()).median;
    let (coverage, accuracy) = (shares(Ran::coverage), shares(Ran::accuracy));
    let ratio = spread(ratios);
    let of_staged = middle(&plain) / before.median;
    // The least ratio, and whether enough was predicted.
    let (target, least, foreseen) = match program.target {
        Target::Repeat => ("≥ 2.00, coverage ≥ 0.95, accuracy ≥ 0.9", 2.0, coverage >= 0.95 && accuracy >= 0.9),
        Target::Next => ("≥ 2.00, coverage ≥ 0.9", 2.0, coverage >= 0.9),
        Target::NoSlower => ("≥ 0.97", 0.97, true),
    };
    let verdict = match program.target {
        _ if foreseen && ratio.median >= least => "pass",
        // `NoSlower` has to hold while the files are staged during the run, so it has no such verdict.
        Target::Repeat | Target::Next if foreseen && of_staged >= least => "**miss**; pass if staged before the run",
        _ => "**miss**",
    };
    // A share of 0 bytes is NaN.
    let shown = |share: f64| if share.is_nan() { "–".to_owned() } else { format!("{share:.3}") };
    println!(
        "| {} | {:.2} s | {:.2} s | {:.2} s | {:.2} | {:.2}–{:.2} | {:.2} s | {of_staged:.2} | {:.2} s | {} | {} | \
         {target} | {} |",
        program.name,
        ahead[0].seconds,
        middle(&ahead),
        middle(&plain),
        ratio.median,
        ratio.min,
        ratio.max,
        before.median,
        here.seconds,
        shown(coverage),
        shown(accuracy),
        verdict,
    );
    let words = (0..runs).map(|run| (program.words)(&ground.dir, run)).collect();
    let declared = ground.below(program.declared)?.into_keys().collect();
    Ok(curve::Record { runs: plain, words, declared, sizes: ground.below(".")? })
}
