//! How much of what is opened was suggested before, and how much of what is suggested is opened, for patterns of which
//! it is known what can be foreseen. `cargo test --release -p forebay-prefetch measure -- --nocapture` shows the table.

use std::time::Instant;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::play::{Open, Play, Tree, check_bounds};

const READER: u64 = 1;
const DIRECTORY: u64 = 7;

fn random() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(20_170_924)
}

fn opens(files: impl IntoIterator<Item = u64>) -> Vec<Open> {
    files.into_iter().map(|file| (READER, DIRECTORY, file)).collect()
}

fn shuffled(files: u64, random: &mut ChaCha8Rng) -> Vec<u64> {
    let mut order: Vec<u64> = (0..files).collect();
    order.shuffle(random);
    order
}

/// Sources of a directory, compiled one after the other; each kind of them includes the same 20 of 200 headers.
fn compile(kinds: u64, sources: u64, random: &mut ChaCha8Rng) -> Vec<Open> {
    let headers: Vec<Vec<u64>> = (0..kinds).map(|_| shuffled(200, random).into_iter().take(20).collect()).collect();
    let mut out = Vec::new();
    for source in 0..sources {
        out.push((READER, DIRECTORY, source));
        let of_kind = &headers[random.random_range(0..kinds) as usize];
        out.extend(of_kind.iter().map(|header| (READER, 100, 1_000_000 + header)));
    }
    out
}

struct Row {
    name: &'static str,
    tree: Tree,
    opens: Vec<Open>,
    /// At least, in per cent.
    coverage: f64,
    accuracy: f64,
    suggested_max: usize,
}

fn row(name: &'static str, files: u64, opens: Vec<Open>, coverage: f64, accuracy: f64) -> Row {
    let tree = Tree::default().with(DIRECTORY, 0, files).with(100, 1_000_000, 200);
    Row { name, tree, opens, coverage, accuracy, suggested_max: usize::MAX }
}

fn rows() -> Vec<Row> {
    let mut random = random();
    let same = shuffled(2000, &mut random);
    let reshuffled: Vec<u64> = (0..3).flat_map(|_| shuffled(2000, &mut random)).collect();
    let few: Vec<u64> = shuffled(20_000, &mut random).into_iter().take(500).collect();
    let workers = |at: u64| opens((0..1000).map(move |step| step / 8 * 8 + (step % 8) * at % 8));
    let ranges = opens((0..250).flat_map(|step| (0..8).map(move |range| range * 250 + step)));
    let two_jobs: Vec<Open> = (0..1000).flat_map(|at| [(1, DIRECTORY, at), (2, DIRECTORY, 1999 - at)]).collect();
    let mut sidecar = random.clone();
    let pairs: Vec<u64> = shuffled(1000, &mut sidecar).into_iter().flat_map(|at| [2 * at, 2 * at + 1]).collect();
    vec![
        row("sequential, 1,000", 1000, opens(0..1000), 99.0, 99.0),
        row("every 4th of 4,000", 4000, opens((0..4000).step_by(4)), 99.0, 99.0),
        row("backward, 1,000", 1000, opens((0..1000).rev()), 99.0, 99.0),
        row("8 workers, one order", 1000, workers(3), 90.0, 90.0),
        row("8 ranges side by side", 2000, ranges, 95.0, 95.0),
        row("two jobs, to each other", 2000, two_jobs, 95.0, 90.0),
        row("shuffled, 2,000", 2000, opens(shuffled(2000, &mut random)), 60.0, 99.0),
        row("shuffled pairs, 2 x 1,000", 2000, opens(pairs), 60.0, 99.0),
        row("3 epochs, same order", 2000, opens((0..3).flat_map(|_| same.clone())), 85.0, 95.0),
        row("3 epochs, reshuffled", 2000, opens(reshuffled), 80.0, 99.0),
        row("compile, one set", 400, compile(1, 400, &mut random), 90.0, 90.0),
        row("compile, 6 sets", 400, compile(6, 400, &mut random), 50.0, 60.0),
        Row { suggested_max: 200, ..row("random 500 of 20,000", 20_000, opens(few), 0.0, 0.0) },
        Row {
            suggested_max: 4000,
            ..row("4,000 draws of 2,000", 2000, opens((0..4000).map(|_| random.random_range(0..2000))), 0.0, 30.0)
        },
    ]
}

#[test]
fn measure_coverage_and_accuracy_of_known_patterns() {
    println!(
        "{:26} {:>6} {:>9} {:>9} {:>9} {:>8}  ns/open",
        "pattern", "opens", "coverage", "accuracy", "suggested", "listings"
    );
    let mut failures = Vec::new();
    for row in rows() {
        let opens = row.opens.len();
        let begun = Instant::now();
        let played = Play::on(row.tree).all(row.opens);
        let nanoseconds = begun.elapsed().as_nanos() / opens as u128;
        check_bounds(&played.online);
        let score = &played.score;
        println!("{:26} {score}  {nanoseconds} ns", row.name);
        let is_good = 100.0 * score.coverage() >= row.coverage && 100.0 * score.accuracy() >= row.accuracy;
        if !is_good || score.suggested > row.suggested_max {
            failures.push(format!("{}: {score}", row.name));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
