//! `forebay simulate eviction`

mod plot;
mod trace;

use std::collections::BTreeMap;
use std::path::Path;

use forebay_daemon::{Failure, FailureKind};
use forebay_prefetch::eviction::{DEFAULT, by_name, names};
use forebay_prefetch::simulate::{Misses, Trace, belady, bound, replay};
use serde::Serialize;

use crate::args::EvictionArgs;
use crate::exit::Exit;
use crate::output::Output;
use crate::values::bytes;

/// The policies that every trace is compared with: a baseline, and a lower bound.
const LRU: &str = "lru";
const BELADY: &str = "belady";

pub fn run(args: &EvictionArgs, output: &Output) -> Result<Exit, Failure> {
    let trace = trace::read(&args.trace)?;
    let policies: Vec<&str> =
        names().filter(|name| args.policy.as_deref().is_none_or(|only| only == *name || *name == LRU)).collect();
    let mut results = Vec::new();
    for &fraction in &args.cache_fraction {
        let result = simulate(&args.trace, &trace, fraction, &policies)?;
        match output.json {
            true => output.json(&result),
            false => show(&result, &trace, output),
        }
        results.push(result);
    }
    if let Some(file) = &args.plot {
        super::write_plot(file, plot::draw(&results))?;
    }
    Ok(Exit::Done)
}

/// Ratios between 0 and 1.
#[derive(Debug, Clone, Copy, Serialize)]
struct Ratios {
    object_miss_ratio: f64,
    byte_miss_ratio: f64,
}

impl From<Misses> for Ratios {
    fn from(misses: Misses) -> Self {
        Self { object_miss_ratio: misses.object_ratio(), byte_miss_ratio: misses.byte_ratio() }
    }
}

/// The results of a trace for one cache size.
#[derive(Debug, Serialize)]
struct Simulated<'a> {
    trace: &'a Path,
    requests: usize,
    contents: usize,
    unique_bytes: u64,
    cache_fraction: f64,
    cache_bytes: u64,
    policies: BTreeMap<&'a str, Ratios>,
    default: &'static str,
    /// The lower bound of any policy, for each ratio by itself. For contents of one size it is nearly Belady's.
    bound: Ratios,
}

fn simulate<'a>(
    path: &'a Path,
    trace: &Trace,
    cache_fraction: f64,
    names: &[&'a str],
) -> Result<Simulated<'a>, Failure> {
    let cache_bytes = trace.capacity_bytes(cache_fraction);
    let one = |name: &'a str| {
        let misses = match by_name(name, cache_bytes) {
            Some(mut policy) => replay(trace, cache_bytes, policy.as_mut()),
            None => belady(trace, cache_bytes),
        };
        (name, Ratios::from(misses))
    };
    // Each policy replays the trace independently.
    let policies = std::thread::scope(|scope| {
        let threads: Vec<_> = names.iter().chain([&BELADY]).map(|&name| scope.spawn(move || one(name))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect::<Option<_>>()
    });
    Ok(Simulated {
        trace: path,
        requests: trace.requests().len(),
        contents: trace.contents(),
        unique_bytes: u64::try_from(trace.unique_bytes()).unwrap_or(u64::MAX),
        cache_fraction,
        cache_bytes,
        policies: policies.ok_or_else(|| Failure::new(FailureKind::Other, "a policy failed"))?,
        default: DEFAULT,
        bound: bound(trace, cache_bytes).into(),
    })
}

fn show(result: &Simulated<'_>, trace: &Trace, output: &Output) {
    let sized = result.unique_bytes > trace.contents() as u64;
    let amount = |count: u64| if sized { bytes(count) } else { format!("{count} contents") };
    output.line(format!(
        "{}: {} requests for {} contents{}; a cache of {} ({} %)",
        result.trace.display(),
        result.requests,
        result.contents,
        if sized { format!(" of {}", bytes(result.unique_bytes)) } else { ", without sizes".into() },
        amount(result.cache_bytes),
        result.cache_fraction * 100.0,
    ));
    let mut rows = vec![
        ["policy", "objects missed", "bytes missed", "of LRU to Belady", "of the bytes"].map(str::to_owned).to_vec(),
    ];
    let ends = result.policies.get(LRU).zip(result.policies.get(BELADY));
    let mut ranked: Vec<_> = result.policies.iter().collect();
    ranked.sort_by(|a, b| b.1.object_miss_ratio.total_cmp(&a.1.object_miss_ratio));
    for (name, ratios) in ranked {
        let closed = |of: fn(&Ratios) -> f64| match ends {
            Some((lru, belady)) if of(lru) - of(belady) > 0.0 => {
                percent((of(lru) - of(ratios)) / (of(lru) - of(belady)))
            }
            _ => "-".into(),
        };
        rows.push(vec![
            if *name == DEFAULT { format!("{name} (default)") } else { (*name).to_owned() },
            percent(ratios.object_miss_ratio),
            percent(ratios.byte_miss_ratio),
            closed(|r| r.object_miss_ratio),
            closed(|r| r.byte_miss_ratio),
        ]);
    }
    rows.push(vec![
        "(bound)".into(),
        percent(result.bound.object_miss_ratio),
        percent(result.bound.byte_miss_ratio),
        String::new(),
        String::new(),
    ]);
    output.table(&rows);
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}
