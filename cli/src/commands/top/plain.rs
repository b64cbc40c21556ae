//! Plain lines: what each job did between two samples.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_api::jobs::{JobSample, ObserverKind, Sample, Traffic};
use forebay_daemon::Failure;
use forebay_daemon::registry::RegisteredMount;

use super::mount_sample::{ask, by_traffic, byte_rates, difference, per_second};
use crate::exit::Exit;
use crate::output::Output;
use crate::registration;
use crate::values::{bytes, shown};

pub fn run(path: Option<&Path>, interval: Duration, count: Option<u32>, output: &Output) -> Result<Exit, Failure> {
    let mut last: HashMap<PathBuf, Sample> = HashMap::new();
    let mut left = count;
    // Rates are differences: the first output shows the changes since this sample.
    look(path, interval, &mut last, |_, _, _| {})?;
    while left != Some(0) {
        std::thread::sleep(interval);
        let next = if left == Some(1) { Duration::ZERO } else { interval };
        look(path, next, &mut last, |entry, sample, ms| match output.json {
            true => output.json(&serde_json::json!({
                "mountpoint": entry.mountpoint(), "interval_ms": ms, "observer": sample.observer,
                "jobs": sample.jobs, "others": sample.others,
            })),
            false => show(entry.mountpoint(), &sample, ms, output),
        })?;
        left = left.map(|left| left - 1);
    }
    Ok(Exit::Done)
}

/// Samples all mounts. Passes `each` the changes since the previous sample and the milliseconds between both. `next`:
/// the time until the next sample.
fn look(
    path: Option<&Path>,
    next: Duration,
    last: &mut HashMap<PathBuf, Sample>,
    mut each: impl FnMut(&RegisteredMount, Sample, u64),
) -> Result<(), Failure> {
    for entry in registration::mounts(path)? {
        let sample = ask(&entry, next)?;
        let before = last.insert(entry.mountpoint().to_path_buf(), sample.clone());
        // A new daemon counts from zero.
        if let Some(before) = before.filter(|before| before.at_ms < sample.at_ms) {
            let ms = sample.at_ms - before.at_ms;
            each(&entry, difference(sample, &before), ms);
        }
    }
    Ok(())
}

fn show(mountpoint: &Path, sample: &Sample, ms: u64, output: &Output) {
    let unobserved =
        if sample.observer.kind == ObserverKind::Ebpf { "" } else { "  (without eBPF: requests to the daemon alone)" };
    output.line(format!("{}{unobserved}", mountpoint.display()));
    let row = |name: String, files: String, traffic: &Traffic| {
        let bytes = byte_rates(traffic, ms).map(|rate| format!("{}/s", bytes(rate)));
        bytes.into_iter().chain([format!("{}/s", per_second(traffic.opens, ms)), files, name]).collect()
    };
    let mut rows = vec![
        ["read", "page cache", "fast pool", "pool", "written", "opens", "files", "job"].map(String::from).to_vec(),
    ];
    let mut jobs: Vec<&JobSample> = sample.jobs.iter().collect();
    jobs.sort_by_key(|job| by_traffic(&job.traffic));
    rows.extend(jobs.into_iter().map(|job| row(shown(&job.id), job.files.to_string(), &job.traffic)));
    rows.push(row("(no job)".into(), String::new(), &sample.others));
    output.table(&rows);
}
