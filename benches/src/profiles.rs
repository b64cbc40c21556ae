//! The cost of profiles: encoded bytes per file and the time of each operation, for several kinds of names; and the
//! time of a plan.
//!
//! Arguments: `[FILES [NAMES]]`. FILES is the number of files of a run, 10^4 by default. NAMES is a part of the label
//! of the kinds of names to measure; by default all are measured.

use std::time::{Duration, Instant};

use forebay_prefetch::plan::{PROBABILITY_MIN, PlanLimits, PoolRate, StagingCandidate, plan};
use forebay_prefetch::profile::{FileUse, Profile};
use forebay_prefetch::signature::Invocation;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A label; whether a run first uses the files in another order than that of their names; and a function that returns
/// the names of the files, from the number of the run and the number of files.
type Kind = (&'static str, bool, fn(usize, usize) -> Vec<String>);

/// A label, and a function that returns the size of a file.
type Sizes = (&'static str, fn(&mut ChaCha8Rng) -> u64);

const SIZES: [Sizes; 2] =
    [("equal sizes", |_| 4 << 20), ("sizes at random", |random| random.random_range(1 << 16..4 << 20))];

fn hashed(run: usize, files: usize) -> Vec<String> {
    let mut random = ChaCha8Rng::seed_from_u64(run as u64);
    (0..files).map(|_| format!("objects/{:02x}/{:032x}", random.random::<u8>(), random.random::<u128>())).collect()
}

const KINDS: [Kind; 9] = [
    ("part-00042", false, |_, n| (0..n).map(|i| format!("data/train/part-{i:05}.parquet")).collect()),
    ("part-00042, shuffled use", true, |_, n| (0..n).map(|i| format!("data/train/part-{i:05}.parquet")).collect()),
    ("100 directories", false, |_, n| (0..n).map(|i| format!("a/dir{:03}/f{:05}.dat", i % 100, i / 100)).collect()),
    ("images by class", true, |_, n| {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        (0..n).map(|i| format!("img/n{:08}/n{0:08}_{}.JPEG", i / 1000 * 7919, random.random_range(0..60_000))).collect()
    }),
    ("all move with the day", false, |run, n| {
        (0..n).map(|i| format!("in/2024-03-{:02}/part-{i:05}.nc", run + 1)).collect()
    }),
    ("day and tile", false, |run, n| {
        (0..n).map(|i| format!("in/2024-03-{:02}/tile-{:03}/{:03}.tif", run + 1, i / 100, i % 100)).collect()
    }),
    ("names without numbers by day", false, |run, n| {
        let letters = |mut i: usize| {
            let mut out = String::new();
            while out.len() < 4 {
                out.push(char::from(b'a' + (i % 26) as u8));
                i /= 26;
            }
            out
        };
        (0..n).map(|i| format!("in/2024-03-{:02}/station-{}.nc", run + 1, letters(i))).collect()
    }),
    ("hashes, the same", true, |_, n| hashed(0, n)),
    ("hashes, new each run", true, hashed),
];

fn uses(run: usize, paths: Vec<String>, shuffled: bool, size: fn(&mut ChaCha8Rng) -> u64) -> Vec<FileUse> {
    let mut random = ChaCha8Rng::seed_from_u64(1000 + run as u64);
    let mut ranks: Vec<u32> = (1..=paths.len() as u32).collect();
    if shuffled {
        ranks.shuffle(&mut random);
    }
    let of = |(path, rank): (String, u32)| FileUse { path, size_bytes: size(&mut random), rank, parts: None };
    paths.into_iter().zip(ranks).map(of).collect()
}

fn milliseconds<T>(of: impl FnOnce() -> T) -> (f64, T) {
    let begun = Instant::now();
    let out = of();
    (begun.elapsed().as_secs_f64() * 1e3, out)
}

/// Prints the time of plans for a million files.
fn plans() {
    const FILES: u64 = 1_000_000;
    const POOL: PoolRate = PoolRate { bytes_per_second: 100e6, latency: Duration::from_millis(2), concurrency: 16 };
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let candidates: Vec<StagingCandidate> = (0..FILES)
        .map(|file| {
            let bytes = random.random_range(0..1 << 20);
            let missing_bytes = if random.random() { bytes } else { 0 };
            StagingCandidate { file, bytes, missing_bytes, probability: random.random(), rank: random.random() }
        })
        .collect();
    println!("\nplan of {FILES} files; milliseconds, the slowest of five");
    let hour = Some(Duration::from_secs(3600));
    for (name, room_bytes, time) in [
        ("room for all", u64::MAX, None),
        ("room for a tenth", FILES << 16, None),
        ("an hour for it", u64::MAX, hour),
        ("both are short", FILES << 16, hour),
    ] {
        let limits = PlanLimits { room_bytes, time, probability_min: PROBABILITY_MIN };
        let once = || {
            let candidates = candidates.clone();
            milliseconds(|| plan(candidates, &POOL, &limits))
        };
        let (took, planned) = once();
        let slowest = (0..4).map(|_| once().0).fold(took, f64::max);
        println!("{name:28} {slowest:8.0} {:9} chosen", planned.chosen.len());
    }
}

fn main() {
    // Cargo adds options, such as `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let files = arguments.next().and_then(|files| files.parse().ok()).unwrap_or(10_000);
    let wanted = arguments.next().unwrap_or_default();
    println!("{files} files a run, 8 runs; milliseconds, of predict the best of three");
    println!(
        "{:28} {:16} {:>8} {:>6} {:>7} {:>7} {:>7} {:>8} {:>8} {:>9}",
        "names", "", "files", "B/file", "fold", "encode", "decode", "predict", "changed", "expected"
    );
    for (name, shuffled, paths) in KINDS.into_iter().filter(|(name, ..)| name.contains(&wanted)) {
        for (sizes, size) in SIZES {
            let job = |run: usize| Invocation {
                words: ["solve", &format!("--day=2024-03-{:02}", run + 1), "--n=16", "in/x7"].map(Into::into).to_vec(),
                ..Invocation::default()
            };
            let mut profile = Profile::new(&job(0));
            let mut fold = 0.0;
            for run in 0..8 {
                let used = uses(run, paths(run, files), shuffled, size);
                fold = milliseconds(|| profile.fold(&job(run), run as u64 * 86_400, used)).0;
            }
            let (encode, bytes) = milliseconds(|| profile.encode());
            let (decode, decoded) = milliseconds(|| Profile::decode(&bytes));
            assert!(decoded.is_ok_and(|decoded| decoded == profile));
            let (predict, expected) = milliseconds(|| profile.predict(&job(8)));
            let predict = (0..2).map(|_| milliseconds(|| profile.predict(&job(8))).0).fold(predict, f64::min);
            let mut changed = job(8);
            changed.words[2] = "--n=17".into();
            let news = milliseconds(|| profile.predict(&changed)).0;
            let known = profile.files().count();
            println!(
                "{name:28} {sizes:16} {known:8} {:6.2} {fold:7.1} {encode:7.1} {decode:7.1} {predict:8.1} {news:8.1} {:9}",
                bytes.len() as f64 / known as f64,
                expected.len()
            );
        }
    }
    plans();
}
