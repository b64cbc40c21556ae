//! `forebay doctor`.

use std::path::PathBuf;
use std::time::Duration;

use forebay_daemon::Failure;
use forebay_daemon::doctor::pool::{CandidatePool, CaseEnd, CheckOutcome, CheckStep, SuiteSummary};
use forebay_daemon::doctor::{self, Check, CheckVerdict};
use indicatif::{ProgressBar, ProgressStyle};

use crate::exit::Exit;
use crate::output::Output;
use crate::values::{counted, shown};

pub fn run(pool: Option<&str>, fast: &[PathBuf], dry_run: bool, output: &Output) -> Result<Exit, Failure> {
    let candidate = pool.map(CandidatePool::parse).transpose()?;
    let mut exit = Exit::Done;
    for check in doctor::machine().into_iter().chain(doctor::places(fast)) {
        if check.verdict == CheckVerdict::Needed {
            exit = Exit::Missing;
        }
        show(&check, output);
    }
    let Some(candidate) = candidate else { return Ok(exit) };
    let bar = bar(output);
    let outcome = candidate.examine(dry_run, &mut |step| follow(step, &bar, output));
    bar.finish_and_clear();
    Ok(match outcome? {
        CheckOutcome::NotThere => Exit::Missing,
        CheckOutcome::Planned => exit,
        // The user asked about the pool, so its faults determine the exit code.
        CheckOutcome::Tried(summary) if summary.failed > 0 => Exit::Unfit,
        CheckOutcome::Tried(summary) if summary.not_run > 0 || summary.left_behind.is_some() => Exit::Incomplete,
        CheckOutcome::Tried(_) => exit,
    })
}

fn show(check: &Check, output: &Output) {
    if output.json {
        return output.json(check);
    }
    let verdict = match check.verdict {
        CheckVerdict::Ok => "ok",
        CheckVerdict::Missing => "missing",
        CheckVerdict::Needed => "NEEDED",
    };
    output.line(format!("{verdict:<8} {:<16} {}", check.name, check.found));
    if let Some(costs) = check.costs {
        output.line(format!("{:25} costs: {costs}", ""));
    }
    if let Some(remedy) = &check.remedy {
        output.line(format!("{:25} try: {remedy}", ""));
    }
}

fn follow(step: &CheckStep, bar: &ProgressBar, output: &Output) {
    if output.json {
        return match step {
            CheckStep::Looked(check) => output.json(check),
            _ => output.json(step),
        };
    }
    match step {
        CheckStep::Looked(check) => show(check, output),
        CheckStep::Attached { pool, capabilities } => {
            output.line(format!("{pool}:"));
            let rows = capabilities.rows().into_iter().map(|(name, value)| vec![format!("  {name}"), value]);
            output.table(&rows.collect::<Vec<_>>());
        }
        CheckStep::Planned { scratch, cases, dry_run: true } => output.line(format!(
            "would make {scratch} in the pool, run {} of the conformance suite there, with files of up to 64 MiB, and \
             remove it",
            counted(*cases as u64, "case"),
        )),
        CheckStep::Planned { scratch, cases, dry_run: false } => {
            bar.set_length(*cases as u64);
            bar.suspend(|| output.line(format!("{} in {scratch}:", counted(*cases as u64, "case"))));
        }
        CheckStep::Begun { case } => bar.set_message(*case),
        CheckStep::Ended { case, result, reason } => {
            bar.inc(1);
            let word = match result {
                CaseEnd::Passed => "ok",
                CaseEnd::Failed => "FAILED",
                CaseEnd::NotApplicable => "n/a",
            };
            bar.suspend(|| {
                output.line(format!("{word:<8} {case}"));
                if let Some(reason) = reason {
                    output.line(format!("{:9}{}", "", shown(reason)));
                }
            });
        }
        CheckStep::Done(summary) => bar.suspend(|| summarise(summary, output)),
    }
}

fn summarise(summary: &SuiteSummary, output: &Output) {
    let SuiteSummary { passed, failed, not_applicable, not_run, left_behind } = summary;
    let mut line = format!("{passed} passed, {failed} failed, {not_applicable} not applicable");
    if *not_run > 0 {
        line += &format!(", {not_run} NOT RUN");
    }
    output.line(line);
    if let Some(what) = left_behind {
        output.note(format!("forebay: {}\n  try: remove it", shown(what)));
    }
}

fn bar(output: &Output) -> ProgressBar {
    const TEMPLATE: &str = "checking {bar:30} {pos}/{len} {elapsed} {msg}";
    if !output.animated() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
