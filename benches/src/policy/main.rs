//! Decisions of a policy per second, on one core: many rules, many paths.

use std::hint::black_box;
use std::time::Instant;

use forebay_backends::PoolPath;
use forebay_policy::{FileFacts, Policy};

const RULES: usize = 10_000;
const PATHS: usize = 1_000_000;
const RUNS: usize = 5;

/// Returns rules as a large site has them: most are for one directory, some for an ending or a name.
fn rules() -> String {
    let mut text = String::from("[default]\nflush = \"idle:5s\"\n");
    for number in 0..RULES {
        let glob = match number % 10 {
            0 => format!("**/*.x{number}"),
            1 => format!("project/p{number}/*/out-[0-9]*"),
            2 => format!("home/u{number}/scratch"),
            _ => format!("home/u{number}/**"),
        };
        text += &format!("[[rule]]\npaths = \"{glob}\"\nflush = \"idle:{}s\"\n", number % 60 + 1);
    }
    text
}

fn main() {
    let begun = Instant::now();
    let policy = match Policy::parse(&rules()) {
        Ok(policy) => policy,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    };
    let compiled = begun.elapsed();
    let path = |number: usize| match number % 4 {
        0 => format!("home/u{}/src/deep/file-{number}.c", number % RULES),
        1 => format!("project/p{}/run/out-{number}", number % RULES),
        2 => format!("datasets/imagenet/train/n{}/img-{number}.x{}", number % 1000, number % RULES),
        _ => format!("home/u{}/scratch", number % RULES),
    };
    let paths: Vec<PoolPath> = (0..PATHS).filter_map(|number| PoolPath::parse(path(number))).collect();
    let mut rates: Vec<f64> = (0..RUNS)
        .map(|_| {
            let begun = Instant::now();
            for path in &paths {
                black_box(policy.decide(&FileFacts::of_path(path)));
            }
            paths.len() as f64 / begun.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    println!(
        "| rules | paths | compiled in | decisions/s, median of {RUNS} | slowest | fastest |\n|---|---|---|---|---|---|"
    );
    println!(
        "| {RULES} | {} | {:.0} ms | {:.2} million | {:.2} | {:.2} |",
        paths.len(),
        compiled.as_secs_f64() * 1e3,
        rates[RUNS / 2] / 1e6,
        rates[0] / 1e6,
        rates[RUNS - 1] / 1e6
    );
}
