mod moving;
mod stored;

use super::*;

/// Files with at least this probability count as staged.
const STAGED_MIN: f64 = 0.5;

/// One run: its invocation, and the files that it read, in order.
struct Job {
    invocation: Invocation,
    reads: Vec<String>,
}

fn job(line: &str, reads: impl IntoIterator<Item = String>) -> Job {
    let words = line.split(' ').map(Into::into).collect();
    Job { invocation: Invocation { user: 1, words, ..Invocation::default() }, reads: reads.into_iter().collect() }
}

fn task(line: &str, index: u64, reads: impl IntoIterator<Item = String>) -> Job {
    let mut job = job(line, reads);
    job.invocation.array_index = Some(index);
    job
}

const DAY: u64 = 86_400;

/// Returns the time of a daily run, from 2024-01-25 on, at 03:30.
fn at_day(run: usize) -> u64 {
    (19_747 + run as u64) * DAY + 12_600
}

fn uses(reads: &[String]) -> Vec<FileUse> {
    let of = |(rank, path): (u32, &String)| FileUse { path: path.clone(), size_bytes: 1 << 20, rank, parts: None };
    (1..).zip(reads).map(of).collect()
}

fn learnt(runs: usize, of: impl Fn(usize) -> Job) -> Profile {
    let mut profile = Profile::new(&of(0).invocation);
    for run in 0..runs {
        let job = of(run);
        profile.fold(&job.invocation, at_day(run), uses(&job.reads));
    }
    profile
}

/// Returns coverage and accuracy for the run after `runs`: the share of its reads that was expected, and the share of
/// the expected files that it reads.
fn foresight(runs: usize, of: impl Fn(usize) -> Job) -> (f64, f64) {
    let profile = learnt(runs, &of);
    let job = of(runs);
    foresight_of(&profile.predict(&job.invocation), &job)
}

fn foresight_of(expected: &[ExpectedRead], job: &Job) -> (f64, f64) {
    let staged: Vec<&ExpectedRead> = expected.iter().filter(|e| e.probability >= STAGED_MIN).collect();
    let hits = staged.iter().filter(|e| job.reads.contains(&e.path)).count() as f64;
    (hits / job.reads.len() as f64, if staged.is_empty() { 0.0 } else { hits / staged.len() as f64 })
}

fn date(run: usize) -> crate::signature::calendar::Date {
    crate::signature::calendar::Date::of_days((at_day(run) / DAY) as i64)
}

/// Returns the date, `2024-01-25` and on, with this text between its parts.
fn day(run: usize, between: &str) -> String {
    let date = date(run);
    format!("{:04}{between}{:02}{between}{:02}", date.year, date.month, date.day)
}
