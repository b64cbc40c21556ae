//! Runs every eviction policy on every trace: how much of the distance between LRU and Belady it closes, and by how
//! much it is worse than LRU at most. Then compares the default policy with Belady on a set that is read repeatedly,
//! and measures what each policy costs per operation and per content.
//!
//! The argument is a directory with traces of libCacheSim's oracleGeneral format (`*.oracleGeneral.zst`).

mod cost;
mod epochs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_benches::Result;
use forebay_prefetch::eviction::{DEFAULT, by_name, names};
use forebay_prefetch::simulate::{Misses, Trace, belady, oracle_general, replay};

/// Cache sizes, as shares of the unique bytes.
const FRACTIONS: [f64; 4] = [0.01, 0.05, 0.10, 0.25];

/// If LRU and Belady are nearer than this, every policy counts as closing nothing.
const DISTANCE_LEAST: f64 = 0.001;

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
    let Some(dir) = std::env::args().skip(1).find(|arg| !arg.starts_with("--")) else {
        return Err("give a directory with *.oracleGeneral.zst: make bench-foresight TRACES=DIR".into());
    };
    let traces = traces(Path::new(&dir))?;
    println!("Objects | bytes: miss ratio, and the share of the distance from LRU to Belady that is closed.\n");
    let head: Vec<&str> = names().collect();
    println!("| trace | cache | LRU | Belady | {} |", head.join(" | "));
    println!("|---|---|---|---|{}", "---|".repeat(head.len()));
    let mut totals = vec![Total::default(); head.len()];
    for (name, trace) in &traces {
        for fraction in FRACTIONS {
            row(name, trace, fraction, &mut totals);
        }
    }
    println!("\n| policy | closed, objects | closed, bytes | worst above LRU, objects | worst above LRU, bytes |");
    println!("|---|---|---|---|---|");
    for (name, total) in names().zip(&totals) {
        let mark = if name == DEFAULT { " (default)" } else { "" };
        let [objects, bytes] = total.closed.map(|sum| 100.0 * sum / total.rows.max(1.0));
        let [worst_objects, worst_bytes] = total.worst.map(|worst| 100.0 * worst);
        println!("| {name}{mark} | {objects:.1} % | {bytes:.1} % | {worst_objects:+.2} % | {worst_bytes:+.2} % |");
    }
    epochs::rows();
    cost::rows();
    Ok(())
}

/// Returns the traces of a directory with their names.
fn traces(dir: &Path) -> Result<Vec<(String, Trace)>> {
    const SUFFIX: &str = ".oracleGeneral.zst";
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    let mut traces = Vec::new();
    for path in paths {
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(SUFFIX)) else { continue };
        let bytes = zstd::decode_all(std::fs::File::open(&path)?)?;
        traces.push((name.to_owned(), oracle_general::parse(&bytes)?));
    }
    if traces.is_empty() { Err(format!("no *{SUFFIX} in {}", dir.display()).into()) } else { Ok(traces) }
}

/// A figure for objects, and one for bytes.
type Both = [f64; 2];

#[derive(Debug, Clone)]
struct Total {
    closed: Both,
    /// The largest amount by which a miss ratio exceeds that of LRU.
    worst: Both,
    rows: f64,
}

impl Default for Total {
    fn default() -> Self {
        Self { closed: [0.0; 2], worst: [f64::NEG_INFINITY; 2], rows: 0.0 }
    }
}

fn ratios(misses: Misses) -> Both {
    [misses.object_ratio(), misses.byte_ratio()]
}

fn of(name: &str, trace: &Trace, capacity: u64) -> Both {
    by_name(name, capacity).map_or([1.0; 2], |mut policy| ratios(replay(trace, capacity, policy.as_mut())))
}

fn row(name: &str, trace: &Trace, fraction: f64, totals: &mut [Total]) {
    let capacity = trace.capacity_bytes(fraction);
    let (lru, belady) = (of("lru", trace, capacity), ratios(belady(trace, capacity)));
    let shown = |both: Both| format!("{:.4} \\| {:.4}", both[0], both[1]);
    let mut cells = vec![name.to_owned(), format!("{} %", fraction * 100.0), shown(lru), shown(belady)];
    for (policy, total) in names().zip(totals) {
        let misses = of(policy, trace, capacity);
        let closed: Both = std::array::from_fn(|i| match lru[i] - belady[i] {
            distance if distance < DISTANCE_LEAST => 0.0,
            distance => (lru[i] - misses[i]) / distance,
        });
        total.rows += 1.0;
        for i in 0..2 {
            total.closed[i] += closed[i];
            total.worst[i] = total.worst[i].max(misses[i] - lru[i]);
        }
        let [objects, bytes] = closed.map(|share| share * 100.0);
        cells.push(format!("{} ({objects:.0} % \\| {bytes:.0} %)", shown(misses)));
    }
    println!("| {} |", cells.join(" | "));
}
