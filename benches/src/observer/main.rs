//! What the observer costs those that read: reads from the page cache, by CPU time of the thread that reads, with the
//! observer and without, in turns.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_benches::Result;
use forebay_benches::args::Args;
use forebay_benches::pairs::{Series, Side, alternate, spread};
use forebay_ebpf::{Observer, Options, Place};

const FILE_BYTES: u64 = 64 << 20;
const JOB: u32 = 1;

/// A kind of reads, and what part of its speed the observer must leave.
struct Row {
    name: &'static str,
    least: f64,
    file: PathBuf,
    block: usize,
    reads: u64,
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

fn run() -> Result<()> {
    let args = Args::parse(std::env::args().skip(1))?;
    for fact in forebay_benches::machine::facts(&args.dir)? {
        println!("{fact}");
    }
    let dir = tempfile::tempdir_in(&args.dir)?;
    let other = tempfile::tempdir_in("/dev/shm")?;
    let watched = dir.path().join("watched");
    std::fs::create_dir(&watched)?;
    let reads = if args.quick { 200_000 } else { 1_000_000 };
    let row = |name, least, dir: &Path, block: usize| {
        let file = dir.join(format!("{block}"));
        Row { name, least, file, block, reads: reads / (block as u64 / 4096) }
    };
    let rows = [
        row("4 KiB, a file that is known", 0.93, &watched, 4096),
        row("4 KiB, another directory of the same file system", 0.93, dir.path(), 4096),
        row("4 KiB, another file system", 0.98, other.path(), 4096),
        row("128 KiB, a file that is known", 0.99, &watched, 128 << 10),
    ];
    println!("\n| 64 MiB in the page cache, reads at random | target | | ratio | spread | off | on |");
    println!("|---|---|---|---|---|---|---|");
    for row in &rows {
        let mut file = File::create(&row.file)?;
        for _ in 0..FILE_BYTES >> 20 {
            file.write_all(&vec![7; 1 << 20])?;
        }
        file.sync_all()?;
        let series = alternate(args.pairs, |side, pair| {
            let observer = match side {
                Side::Native => None,
                Side::Mount => Some(observer(&watched)?),
            };
            let rate = sample(row, pair as u64)?;
            drop(observer);
            Ok(rate)
        })?;
        show(row, &series);
    }
    Ok(())
}

fn observer(dir: &Path) -> Result<Observer> {
    let options = Options { places: vec![Place::below(dir, true)?], ignored: 0, masked: Vec::new() };
    let observer = Observer::start(&options)?;
    observer.add_process(std::process::id(), JOB)?;
    Ok(observer)
}

fn show(row: &Row, series: &Series) {
    let ratio = series.ratio();
    let verdict = if (ratio.median * 100.0).round() / 100.0 >= row.least { "ok" } else { "**below**" };
    let each = |rates: &[f64]| format!("{:.0} ns", 1e9 / spread(rates.to_vec()).median);
    println!(
        "| {} | ≥ {:.2} | {verdict} | {:.3} | {:.3} – {:.3} | {} | {} |",
        row.name,
        row.least,
        ratio.median,
        ratio.min,
        ratio.max,
        each(&series.native),
        each(&series.mount),
    );
}

/// Reads for each second of the thread's CPU time.
fn sample(row: &Row, seed: u64) -> Result<f64> {
    let file = File::open(&row.file)?;
    let mut buffer = vec![0; row.block];
    let blocks = FILE_BYTES / row.block as u64;
    let mut at = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move || {
        // Xorshift: Marsaglia, 2003.
        at ^= at << 13;
        at ^= at >> 7;
        at ^= at << 17;
        at
    };
    let mut read = |count: u64| -> Result<()> {
        for _ in 0..count {
            file.read_exact_at(&mut buffer, random() % blocks * row.block as u64)?;
        }
        Ok(())
    };
    read(row.reads / 10)?;
    let start = cpu_time();
    read(row.reads)?;
    Ok(row.reads as f64 / (cpu_time() - start))
}

/// Of this thread, in seconds.
fn cpu_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
