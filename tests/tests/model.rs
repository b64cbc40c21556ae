//! Random operations, outages, changes by other clients, kills and power cuts, against a model of the overlay.
//!
//! `FOREBAY_CASES` sets the number of cases, and `FOREBAY_SEED` the seed, which is printed. With `FOREBAY_REPLAY=FILE`,
//! the test runs the failed cases in the output FILE instead, each [`REPLAYS`] times, to find a failure that happens
//! once in a hundred runs.

use std::cell::Cell;
use std::sync::mpsc;
use std::time::Duration;

use forebay_tests::model;
use forebay_tests::settings::{number, seed};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// A share of the million cases of `make nightly`: each run draws another seed.
const CASES: u32 = 1_500;
/// The number of threads that run cases in parallel. It is fixed, so a seed means the same cases on every machine.
const LANES: u32 = 2;
const SHRINKS: u32 = 3_000;
const REPLAYS: usize = 500;
/// A case takes less than a hundredth of this. A case that reaches it never ends.
const CASE_LIMIT: Duration = Duration::from_secs(60);

fn replay(file: &str) {
    let output = std::fs::read(file).unwrap_or_else(|error| panic!("FOREBAY_REPLAY={file}: {error}"));
    let cases = model::Case::reported(&String::from_utf8_lossy(&output)).expect("a case");
    assert!(!cases.is_empty(), "FOREBAY_REPLAY={file}: no case that failed is in it");
    for case in cases {
        for round in 0..REPLAYS {
            run(&case).unwrap_or_else(|failure| panic!("round {round}: {failure}\n{case}"));
        }
    }
}

/// Runs a case. A case that does not end aborts the test.
fn run(case: &model::Case) -> Result<(), model::Failure> {
    let (done, running) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if running.recv_timeout(CASE_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("does not end within {CASE_LIMIT:?}:\n{case}");
                std::process::abort();
            }
        });
        let outcome = model::run(case);
        drop(done);
        outcome
    })
}

fn lane(seed: u64, lane: u32, cases: u32) -> Result<(), String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8] = lane as u8;
    let config = Config {
        cases,
        max_shrink_iters: SHRINKS,
        failure_persistence: None,
        // Failures are reported below.
        verbose: 0,
        ..Config::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let seen = Cell::new(false);
    let outcome = runner.run(&model::case(), |case| {
        run(&case).map_err(|failure| {
            // The first failure is printed at once, because shrinking may take long.
            if !seen.replace(true) {
                eprintln!("first seen: {failure}\n{case}");
            }
            TestCaseError::fail(failure)
        })
    });
    outcome.map_err(|error| match error {
        TestError::Fail(reason, case) => format!("{reason}\n{case}"),
        TestError::Abort(reason) => reason.to_string(),
    })
}

/// SEMANTICS 5: "Changes that `fsync` acknowledged survive a power cut."
/// SEMANTICS 6: "A read returns bytes of one version only."
#[test]
fn engine_behaves_as_the_model_says() {
    if let Ok(file) = std::env::var("FOREBAY_REPLAY") {
        return replay(&file);
    }
    let seed = seed();
    let cases = number("FOREBAY_CASES").map_or(CASES, |n| n as u32);
    println!("{cases} cases");
    let lanes: Vec<_> = (0..LANES).map(|n| std::thread::spawn(move || lane(seed, n, cases.div_ceil(LANES)))).collect();
    let outcomes: Vec<_> = lanes.into_iter().map(|lane| lane.join().expect("a lane")).collect();
    let failed: Vec<String> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "FOREBAY_SEED={seed} FOREBAY_CASES={cases}:\n{}", failed.join("\n"));
}
