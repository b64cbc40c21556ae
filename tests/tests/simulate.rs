//! `forebay simulate`: what it prints for a trace whose misses are known and for small clusters, and what it refuses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use forebay_tests::process::{Answer, forebay, run};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const USAGE: i32 = 2;

/// A record of the oracleGeneral format.
fn record(time: u32, object: u64, bytes: u32) -> Vec<u8> {
    let mut record = time.to_le_bytes().to_vec();
    record.extend(object.to_le_bytes());
    record.extend(bytes.to_le_bytes());
    record.extend((-1i64).to_le_bytes());
    record
}

/// Returns ten epochs over 100 contents of 10 bytes: LRU misses everything, Belady only what does not fit.
fn epochs() -> Vec<u8> {
    (0..1000).flat_map(|at| record(at, u64::from(at) % 100, 10)).collect()
}

fn write(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn simulate(trace: &Path, args: &[&str]) -> Answer {
    run(Command::new(forebay()).args(["simulate", "eviction"]).arg(trace).args(args), LIMIT)
}

fn json(answer: &Answer) -> Vec<Value> {
    answer.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ratio(shown: &Value, policy: &str) -> f64 {
    let ratios = &shown["policies"][policy];
    assert_eq!(ratios["object_miss_ratio"], ratios["byte_miss_ratio"], "all sizes are the same");
    ratios["object_miss_ratio"].as_f64().unwrap_or_else(|| panic!("no {policy} in {shown}"))
}

#[test]
fn epochs_show_lru_missing_everything_and_the_default_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let plain = write(dir.path(), "epochs.oracleGeneral", epochs());
    let packed = write(dir.path(), "epochs.oracleGeneral.zst", zstd::encode_all(&epochs()[..], 0).unwrap());
    let fraction = ["--cache-fraction", "0.5", "--json"];
    let (plain, packed) = (json(&simulate(&plain, &fraction).ok()), json(&simulate(&packed, &fraction).ok()));
    let shown = &plain[0];
    assert_eq!((plain.len(), &shown["policies"]), (1, &packed[0]["policies"]));
    assert_eq!(
        (&shown["requests"], &shown["contents"], &shown["cache_bytes"]),
        (&1000.into(), &100.into(), &500.into())
    );
    let default = shown["default"].as_str().unwrap();
    assert_eq!(ratio(shown, "lru"), 1.0);
    assert!((ratio(shown, "belady") - 0.55).abs() < 0.002, "{shown}");
    assert!(ratio(shown, default) <= ratio(shown, "belady") + 0.01, "{shown}");
    for policy in ["s3fifo", "sieve", "wtinylfu", "gdsf", "epoch"] {
        assert!(ratio(shown, policy) >= ratio(shown, "belady"), "{policy}: {shown}");
    }
}

#[test]
fn several_sizes_and_one_policy_are_shown_to_people_and_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let trace = write(dir.path(), "trace", epochs());
    let plot = dir.path().join("plot.svg");
    let args = ["--cache-fraction", "0.25,0.5", "--policy", "sieve", "--plot", plot.to_str().unwrap()];
    let answer = simulate(&trace, &args).ok();
    for word in ["1000 requests", "a cache of 250 B", "a cache of 500 B", "lru", "sieve", "belady", "objects missed"] {
        assert!(answer.out.contains(word), "no `{word}`: {answer}");
    }
    assert!(!answer.out.contains("s3fifo"), "{answer}");
    let svg = fs::read_to_string(&plot).unwrap();
    for word in ["<svg", "</svg>", "bytes missed", "belady", "sieve", "<polyline"] {
        assert!(svg.contains(word), "no `{word}` in the plot");
    }
    // The option may be repeated: each size has a line of its own.
    let lines = json(&simulate(&trace, &["--json", "--cache-fraction", "0.1", "--cache-fraction", "1"]).ok());
    assert_eq!(lines.len(), 2);
    assert_eq!(ratio(&lines[1], "lru"), 0.1, "where everything fits only first requests miss");
}

#[test]
fn jobs_are_traces_too() {
    let dir = tempfile::tempdir().unwrap();
    let job = r#"{"id":"a","files":[{"path":"b","bytes":10,"opens":1,"first_use_rank":2},
        {"path":"a","bytes":10,"opens":1,"first_use_rank":1}]}"#;
    let trace = write(dir.path(), "jobs", format!("{0}\n{0}\n", job.replace('\n', "")));
    let shown = &json(&simulate(&trace, &["--json", "--cache-fraction", "1"]).ok())[0];
    assert_eq!((&shown["requests"], ratio(shown, "lru")), (&4.into(), 0.5));
}

#[test]
fn what_makes_no_sense_is_refused_with_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str, bytes: &[u8]| write(dir.path(), name, bytes);
    let packed = zstd::encode_all(&epochs()[..], 0).unwrap();
    let half = &["--cache-fraction", "0.5"][..];
    for (trace, args, words) in [
        (at("cut", &epochs()[..100]), half, &["cut", "4 bytes are left over", "4 records", "cut short"][..]),
        (at("cut.zst", &packed[..packed.len() / 2]), half, &["cut.zst", "cannot be decompressed", "cut short"]),
        (at("text", b"path,bytes\n"), half, &["text", "is no trace", "oracleGeneral"]),
        (at("zeros", &[0; 48]), half, &["zeros", "record 0", "oracleGeneral"]),
        (at("empty", b""), half, &["empty", "no requests"]),
        (at("other.json", b"{\"id\": 1}\n"), half, &["line 1", "files", "job show"]),
        (dir.path().join("none"), half, &["none", "No such file"]),
        (at("good", &epochs()), &["--cache-fraction", "0"], &["--cache-fraction", "above 0", "0.1"]),
        (at("good", &epochs()), &["--cache-fraction", "1.5"], &["--cache-fraction", "at most 1"]),
        (at("good", &epochs()), &["--cache-fraction", "a tenth"], &["a tenth", "such as 0.1"]),
        (at("good", &epochs()), &["--cache-fraction", "0.5", "--policy", "best"], &["best", "lru", "s3fifo", "gdsf"]),
        (at("good", &epochs()), &[], &["--cache-fraction"]),
    ] {
        let answer = simulate(&trace, args).refused(USAGE, words);
        assert!(!answer.err.contains("panicked"), "{answer}");
        assert!(answer.out.is_empty(), "a refusal is no output: {answer}");
    }
}

fn simulate_cluster(args: &[&str]) -> Answer {
    run(Command::new(forebay()).args(["simulate", "cluster"]).args(args), LIMIT)
}

#[test]
fn a_cluster_reads_the_pool_once_and_each_node_for_itself_without_peers() {
    let small = ["--nodes", "30", "--bytes", "2GiB", "--scenario", "storm", "--json"];
    let shared = &json(&simulate_cluster(&small).ok())[0];
    assert_eq!((&shared["pool_copies"], &shared["jobs_finished"]), (&1.0.into(), &30.into()), "{shared}");
    assert!(shared["of_bound"].as_f64().unwrap() >= 1.0, "{shared}");
    let alone = &json(&simulate_cluster(&[&small[..], &["--placement", "pool"]].concat()).ok())[0];
    assert_eq!((&alone["pool_copies"], &alone["peer_bytes"]), (&30.0.into(), &0.into()), "{alone}");
    let again = &json(&simulate_cluster(&small).ok())[0];
    assert_eq!(again, shared, "the same arguments give the same result");
}

#[test]
fn all_scenarios_are_shown_to_people_and_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("cluster.svg");
    let args = ["--nodes", "40", "--bytes", "4GiB", "--affected", "0.1", "--plot", plot.to_str().unwrap()];
    let answer = simulate_cluster(&args).ok();
    for word in ["40 nodes", "storm", "loss", "slow", "rolling", "copies", "of bound", "passed over", "gone"] {
        assert!(answer.out.contains(word), "no `{word}`: {answer}");
    }
    let svg = fs::read_to_string(&plot).unwrap();
    for word in ["<svg", "</svg>", "read by the jobs", "sent by the pool", "rolling", "<polyline"] {
        assert!(svg.contains(word), "no `{word}` in the plot");
    }
}

#[test]
fn clusters_that_make_no_sense_are_refused() {
    for (args, words) in [
        (&["--nodes", "0"][..], &["--nodes", "10000"][..]),
        (&["--nodes", "ten"], &["--nodes", "ten"]),
        (&["--bytes", "0"], &["bytes", "above zero"]),
        (&["--scenario", "flood"], &["flood", "storm", "rolling"]),
        (&["--affected", "1", "--nodes", "10"], &["share of lost or slow nodes", "below 1"]),
        (&["--affected=-1"], &["--affected"]),
        (&["--bytes", "100EB"], &["at most 1 PiB"]),
        (&["--bytes", "1TB", "--nodes", "10", "--pool", "1kB/s"], &["more than 30 days", "higher rates"]),
        (&["--network", "fast"], &["--network", "100MB/s"]),
        (&["--placement", "dedicated"], &["dedicated", "cache nodes"]),
        (&["--placement", "everywhere"], &["everywhere", "dedicated"]),
    ] {
        let answer = simulate_cluster(args).refused(USAGE, words);
        assert!(!answer.err.contains("panicked") && answer.out.is_empty(), "{answer}");
    }
}
