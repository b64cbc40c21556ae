//! `forebay job`

use std::path::Path;

use forebay_api::allocations::{Allocation, AllocationVerb};
use forebay_api::jobs::{JobFile, JobSummary};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client};
use serde::Serialize;

use super::allocation;
use crate::args::JobCommand;
use crate::exit::Exit;
use crate::output::Output;
use crate::registration;
use crate::targets;
use crate::values::{bytes, counted, files, moment, shown, span};

pub fn run(command: JobCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        JobCommand::Show(named) => show(&named.id, named.mount.as_deref(), output),
        JobCommand::List { mount } => list(mount.as_deref(), output),
        JobCommand::Allocation(command) => allocation::run(command, output),
    }
}

/// A job with its files, as JSON.
#[derive(Serialize)]
struct JobOutput<'a> {
    mountpoint: &'a Path,
    #[serde(flatten)]
    job: Option<&'a JobSummary>,
    files: &'a [JobFile],
    #[serde(skip_serializing_if = "Option::is_none")]
    allocation: Option<&'a Allocation>,
}

/// Shows a job at each mount that knows it.
fn show(id: &str, mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let mut unknown = Vec::new();
    let mut found = false;
    for entry in registration::mounts(mount)? {
        let allocation = match allocation::send(&entry, id, AllocationVerb::Show) {
            Ok(allocation) => allocation,
            Err(failure) => {
                unknown.push(failure);
                continue;
            }
        };
        match ask(&entry, id) {
            Ok((job, files)) => {
                found = true;
                present(&entry, Some(&job), &files, allocation.as_ref(), output);
            }
            // A job that has not started.
            Err(failure) if failure.kind == FailureKind::Usage && allocation.is_some() => {
                found = true;
                present(&entry, None, &[], allocation.as_ref(), output);
            }
            Err(failure) => unknown.push(failure),
        }
    }
    // A mount that does not know the job is no failure if another mount does. A mount that does not answer is.
    let worst = unknown.iter().position(|failure| failure.kind != FailureKind::Usage);
    match (worst, found) {
        (None, true) => Ok(Exit::Done),
        (worst, _) => Err(unknown.swap_remove(worst.unwrap_or(0))),
    }
}

fn ask(entry: &RegisteredMount, id: &str) -> Result<(JobSummary, Vec<JobFile>), Failure> {
    let (mut job, mut all) = (None, Vec::new());
    for reply in client::call(entry, &Request::Job { id: id.to_owned() })? {
        match reply? {
            Reply::Jobs(mut jobs) => job = jobs.pop(),
            Reply::JobFiles(files) => all.extend(files),
            _ => {}
        }
    }
    let none = || Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the job");
    Ok((job.ok_or_else(none)?, all))
}

fn present(
    entry: &RegisteredMount,
    job: Option<&JobSummary>,
    all: &[JobFile],
    allocation: Option<&Allocation>,
    output: &Output,
) {
    if output.json {
        return output.json(&JobOutput { mountpoint: entry.mountpoint(), job, files: all, allocation });
    }
    if let Some(allocation) = allocation {
        output.line(allocation::summary(entry.mountpoint(), allocation));
    }
    let Some(job) = job else { return };
    let line = |label: &str, text: String| output.line(format!("  {label:<11} {text}"));
    output.line(format!("{} at {}", shown(&job.id), entry.mountpoint().display()));
    line("command", shown(&job.command));
    line("time", format!("{}, {}", moment(job.begun_unix), lasted(job)));
    let traffic = &job.traffic;
    line(
        "read",
        format!(
            "{}: {} from the page cache, {} from the fast pool, {} from the pool",
            bytes(traffic.read_bytes),
            bytes(traffic.cache_bytes),
            bytes(traffic.fast_bytes),
            bytes(traffic.pool_bytes)
        ),
    );
    line("written", bytes(traffic.written_bytes));
    line("used", format!("{}, {}", files(job.file_count + job.omitted_files), counted(traffic.opens, "open")));
    line("seen by", job.observer.name().into());
    job.missing.iter().for_each(|what| line("NOT SEEN", shown(what)));
    if job.interrupted {
        line("NOT SEEN", "some of the time: the daemon, or the process that began the job, died".into());
    }
    if job.omitted_files > 0 {
        line("NOT SHOWN", format!("{} beyond the first {}", files(job.omitted_files), job.file_count));
    }
    let mut rows =
        vec![["rank", "read", "cache", "fast pool", "pool", "written", "opens", "path"].map(String::from).to_vec()];
    rows.extend(all.iter().map(|file| {
        let JobFile { traffic, .. } = file;
        let place = if file.in_pool { "  (in the pool)" } else { "" };
        vec![
            file.first_use_rank.to_string(),
            bytes(traffic.read_bytes),
            bytes(traffic.cache_bytes),
            bytes(traffic.fast_bytes),
            bytes(traffic.pool_bytes),
            bytes(traffic.written_bytes),
            traffic.opens.to_string(),
            format!("{}{place}", shown(&file.path)),
        ]
    }));
    output.table(&rows);
}

fn lasted(job: &JobSummary) -> String {
    match job.ended_unix {
        Some(ended) => format!("for {}", span(ended.saturating_sub(job.begun_unix))),
        None => "still running".into(),
    }
}

fn list(mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let entries = registration::mounts(mount)?;
    let several = entries.len() > 1;
    targets::each(entries, output, |entry| {
        let jobs = registration::jobs(&entry, &Request::Jobs)?;
        if several {
            output.heading(entry.mountpoint());
        }
        if output.json {
            jobs.iter().for_each(|job| output.json(job));
            return Ok(Exit::Done);
        }
        // What holds leases, although no job may run.
        for allocation in allocation::not_over(&entry)? {
            output.line(allocation::summary(entry.mountpoint(), &allocation));
        }
        let rows: Vec<Vec<String>> = jobs
            .iter()
            .map(|job| {
                vec![
                    shown(&job.id),
                    moment(job.begun_unix),
                    lasted(job),
                    files(job.file_count + job.omitted_files),
                    format!("{} read", bytes(job.traffic.read_bytes)),
                    format!("{} written", bytes(job.traffic.written_bytes)),
                    shown(&job.command),
                ]
            })
            .collect();
        output.table(&rows);
        Ok(Exit::Done)
    })
}
