//! Measures how much of what is opened was suggested before, and how much of what is suggested is opened, for patterns
//! whose predictable share is known. `cargo test --release -p forebay-prefetch measure -- --nocapture` shows the table.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::super::{Online, OpenEvent};
use super::play::{Open, Play, Tree, check_bounds, reader_of, who};

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

/// Sources of a directory, compiled one after the other; each kind of source includes the same 20 of 200 headers.
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
    /// The required minimum, in per cent.
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
    let part: Vec<u64> = shuffled(2000, &mut random).into_iter().take(500).collect();
    let few: Vec<u64> = shuffled(20_000, &mut random).into_iter().take(500).collect();
    let configured: Vec<u64> = reshuffled
        .iter()
        .enumerate()
        .flat_map(|(at, file)| at.is_multiple_of(9).then_some(2000).into_iter().chain([*file]))
        .collect();
    let classes = (0..200).fold(Tree::default(), |tree, class| tree.with(class, class * 50, 50));
    let of_class = |file: u64| (READER, file / 50, file);
    let of_classes = (0..2).flat_map(|_| shuffled(10_000, &mut random)).map(of_class).collect();
    let few_files = shuffled(40, &mut random);
    let workers = |at: u64| opens((0..1000).map(move |step| step / 8 * 8 + (step % 8) * at % 8));
    let ranges = opens((0..250).flat_map(|step| (0..8).map(move |range| range * 250 + step)));
    let two_jobs: Vec<Open> = (0..1000).flat_map(|at| [(1, DIRECTORY, at), (2, DIRECTORY, 1999 - at)]).collect();
    let mut sidecar = random.clone();
    let pairs: Vec<u64> = shuffled(1000, &mut sidecar).into_iter().flat_map(|at| [2 * at, 2 * at + 1]).collect();
    let mut by_bytes: Vec<u64> = (0..2000).collect();
    by_bytes.sort_by_key(u64::to_string);
    let directories = || (0..200).fold(Tree::default(), |tree, directory| tree.with(directory, directory * 20, 20));
    let of_tree = |file: u64| (READER, file / 20, file);
    let all_of_tree = (0..4000).map(of_tree).collect();
    let backward_in_tree = (0..200).flat_map(|at| (0..20).rev().map(move |file| of_tree(at * 20 + file))).collect();
    let first_of_each = (0..20).chain((20..4000).step_by(20)).map(of_tree).collect();
    vec![
        row("order of bytes, 2,000", 2000, opens(by_bytes.clone()), 98.0, 99.0),
        row("backward by bytes, 2,000", 2000, opens(by_bytes.into_iter().rev()), 98.0, 99.0),
        Row { tree: directories(), ..row("200 directories of 20", 0, all_of_tree, 93.0, 99.0) },
        Row { tree: directories(), ..row("the same, each backward", 0, backward_in_tree, 93.0, 99.0) },
        Row { tree: directories(), suggested_max: 40, ..row("one whole, 1st of the rest", 0, first_of_each, 6.0, 0.0) },
        row("sequential, 1,000", 1000, opens(0..1000), 99.0, 99.0),
        row("every 4th of 4,000", 4000, opens((0..4000).step_by(4)), 99.0, 99.0),
        row("backward, 1,000", 1000, opens((0..1000).rev()), 99.0, 99.0),
        row("8 workers, one order", 1000, workers(3), 90.0, 90.0),
        row("8 ranges side by side", 2000, ranges, 95.0, 95.0),
        row("two jobs, to each other", 2000, two_jobs, 95.0, 90.0),
        row("shuffled, 2,000", 2000, opens(shuffled(2000, &mut random)), 65.0, 99.0),
        row("shuffled pairs, 2 x 1,000", 2000, opens(pairs), 60.0, 99.0),
        row("3 epochs, same order", 2000, opens((0..3).flat_map(|_| same.clone())), 85.0, 95.0),
        row("3 epochs, reshuffled", 2000, opens(reshuffled), 80.0, 99.0),
        row("3 epochs, configuration read", 2001, opens(configured), 75.0, 90.0),
        Row { tree: classes, ..row("2 epochs of 200 x 50, shuffled", 2000, of_classes, 65.0, 90.0) },
        row("5 epochs of 40, same order", 40, opens((0..5).flat_map(|_| few_files.clone())), 70.0, 90.0),
        row("compile, one set", 400, compile(1, 400, &mut random), 85.0, 85.0),
        row("compile, 6 sets", 400, compile(6, 400, &mut random), 50.0, 60.0),
        Row { suggested_max: 200, ..row("random 500 of 20,000", 20_000, opens(few), 0.0, 0.0) },
        Row { suggested_max: 500, ..row("random 500 of 2,000", 2000, opens(part), 0.0, 0.0) },
        Row {
            suggested_max: 8000,
            ..row("4,000 draws of 2,000", 2000, opens((0..4000).map(|_| random.random_range(0..2000))), 0.0, 30.0)
        },
    ]
}

#[test]
fn measure_coverage_and_accuracy_of_known_patterns() {
    println!("pattern                          opens  coverage  accuracy suggested listings  used/suggested");
    let mut failures = Vec::new();
    for row in rows() {
        let played = Play::on(row.tree).all(row.opens);
        check_bounds(&played.online);
        let score = &played.score;
        println!("{:30} {score}", row.name);
        let is_good = 100.0 * score.coverage() >= row.coverage && 100.0 * score.accuracy() >= row.accuracy;
        if !is_good || score.suggested > row.suggested_max {
            failures.push(format!("{}: {score}", row.name));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn what_one_job_shows_serves_the_next() {
    let mut random = random();
    let tree = Tree::default().with(1, 0, 500).with(2, 500, 500);
    let mut play = Play::on(tree).all(shuffled(500, &mut random).into_iter().map(|file| (1, 1, file)));
    play.online.ended(who(1));
    let first = std::mem::take(&mut play.score);
    let second = play.all(shuffled(500, &mut random).into_iter().map(|file| (2, 2, 500 + file))).score;
    assert!(second.coverage() > first.coverage() + 0.1, "{first} then {second}");
}

/// Also shows the time of an open, without the time of the listing, which is the caller's.
#[test]
fn large_sets_and_many_readers_stay_within_the_bounds() {
    println!("pattern                          opens   ns/open  slowest");
    let mut random = random();
    let large = shuffled(100_000, &mut random);
    let many = (0..300_000u64).map(|at| (at % 200, DIRECTORY + at % 3, at / 200 * 3 + at % 3));
    let again = row("3 epochs of 100,000, shuffled", 100_000, Vec::new(), 0.0, 0.0);
    let epochs: Vec<u64> = (0..3).flat_map(|_| shuffled(100_000, &mut random)).collect();
    let of_many = (0..3).fold(Tree::default(), |tree, directory| tree.with(DIRECTORY + directory, 0, 5000));
    let more = [
        row("sequential, 100,000", 100_000, opens(0..100_000), 0.0, 0.0),
        row("3 epochs of 100,000, in order", 100_000, opens((0..3).flat_map(|_| large.clone())), 0.0, 0.0),
        Row { opens: opens(epochs), ..again },
        row("random, 300,000 of 10^6", 0, opens((0..300_000).map(|_| random.random_range(0..1_000_000))), 0.0, 0.0),
        Row { tree: of_many, ..row("200 readers side by side", 0, many.collect(), 0.0, 0.0) },
    ];
    for row in rows().into_iter().chain(more) {
        let mut online = Online::new();
        let (mut total, mut slowest) = (Duration::ZERO, Duration::ZERO);
        for (at, &(reader, directory, file)) in row.opens.iter().enumerate() {
            let touch = OpenEvent { reader: reader_of(reader), directory, file, at: Duration::from_secs(at as u64) };
            let mut listed = false;
            let begun = Instant::now();
            let suggestions = online.touched(&touch, &mut |directory| {
                listed = true;
                row.tree.directories.get(&directory).cloned()
            });
            suggestions.iter().for_each(|suggestion| online.staged(suggestion.file));
            if !listed {
                total += begun.elapsed();
                slowest = slowest.max(begun.elapsed());
            }
        }
        let nanoseconds = total.as_nanos() / row.opens.len() as u128;
        println!("{:30} {:7} {nanoseconds:9} {slowest:8.1?}", row.name, row.opens.len());
        check_bounds(&online);
    }
}
