//! `forebay top`

use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_api::jobs::{JobSample, ObserverKind, Sample, Traffic};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client};

use crate::exit::Exit;
use crate::output::Output;
use crate::registration;
use crate::values::{bytes, shown};

/// Moves the cursor to the upper left corner, and clears the screen below.
const REDRAW: &str = "\x1b[H\x1b[J";

pub fn run(path: Option<&Path>, interval: Duration, count: Option<u32>, output: &Output) -> Result<Exit, Failure> {
    let redraws = !output.json && std::io::stdout().is_terminal();
    let mut last: HashMap<PathBuf, Sample> = HashMap::new();
    let mut left = count;
    // Rates are differences: the first output shows the changes since this sample.
    look(path, interval, &mut last, |_, _, _| {})?;
    while left != Some(0) {
        std::thread::sleep(interval);
        let mut screen = Vec::new();
        let next = if left == Some(1) { Duration::ZERO } else { interval };
        look(path, next, &mut last, |entry, sample, ms| match output.json {
            true => output.json(&serde_json::json!({
                "mountpoint": entry.mountpoint(), "interval_ms": ms, "observer": sample.observer,
                "jobs": sample.jobs, "others": sample.others,
            })),
            false => screen.push((entry.mountpoint().to_path_buf(), sample, ms)),
        })?;
        if redraws {
            output.line(REDRAW);
        }
        screen.iter().for_each(|(mountpoint, sample, ms)| show(mountpoint, sample, *ms, output));
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

fn ask(entry: &RegisteredMount, interval: Duration) -> Result<Sample, Failure> {
    let interval_ms = interval.as_millis().try_into().unwrap_or(u64::MAX);
    for reply in client::call(entry, &Request::Sample { interval_ms })? {
        if let Reply::Sample(sample) = reply? {
            return Ok(sample);
        }
    }
    Err(Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the sample"))
}

fn difference(mut sample: Sample, before: &Sample) -> Sample {
    for job in &mut sample.jobs {
        let earlier = before.jobs.iter().find(|known| known.id == job.id);
        job.traffic = job.traffic.since(&earlier.map_or(Traffic::default(), |known| known.traffic));
    }
    sample.others = sample.others.since(&before.others);
    sample
}

fn show(mountpoint: &Path, sample: &Sample, ms: u64, output: &Output) {
    let unobserved =
        if sample.observer.kind == ObserverKind::Ebpf { "" } else { "  (without eBPF: requests to the daemon alone)" };
    output.line(format!("{}{unobserved}", mountpoint.display()));
    let rate = |count: u64| format!("{}/s", bytes(per_second(count, ms)));
    let row = |name: String, files: String, traffic: &Traffic| {
        vec![
            rate(traffic.read_bytes),
            rate(traffic.cache_bytes),
            rate(traffic.fast_bytes),
            rate(traffic.pool_bytes),
            rate(traffic.written_bytes),
            format!("{}/s", per_second(traffic.opens, ms)),
            files,
            name,
        ]
    };
    let mut rows = vec![
        ["read", "page cache", "fast pool", "pool", "written", "opens", "files", "job"].map(String::from).to_vec(),
    ];
    let mut jobs: Vec<&JobSample> = sample.jobs.iter().collect();
    jobs.sort_by_key(|job| std::cmp::Reverse(job.traffic.read_bytes + job.traffic.written_bytes));
    rows.extend(jobs.into_iter().map(|job| row(shown(&job.id), job.files.to_string(), &job.traffic)));
    rows.push(row("(no job)".into(), String::new(), &sample.others));
    output.table(&rows);
}

fn per_second(count: u64, ms: u64) -> u64 {
    count.saturating_mul(1000).checked_div(ms).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_what_came_in_between() {
        let traffic = |read_bytes| Traffic { read_bytes, ..Traffic::default() };
        let job = |id: &str, read| JobSample { id: id.into(), uid: 0, files: 1, traffic: traffic(read) };
        let sample =
            |at_ms, jobs, others| Sample { at_ms, jobs, others: traffic(others), observer: Default::default() };
        let before = sample(1_000, vec![job("a", 500), job("over", 1)], 7);
        let now = difference(sample(3_000, vec![job("a", 900), job("new", 30)], 8), &before);
        assert_eq!(now.jobs.iter().map(|job| job.traffic.read_bytes).collect::<Vec<_>>(), [400, 30]);
        assert_eq!(now.others.read_bytes, 1);
        assert_eq!(per_second(400, 2_000), 200);
        assert_eq!(per_second(400, 0), 0);
    }
}
