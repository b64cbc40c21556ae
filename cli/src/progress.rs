//! Follows a long operation of the daemon: a bar at a terminal, JSON for programs, a summary for both.

use std::time::Duration;

use forebay_api::foresight::PlannedFile;
use forebay_api::operator::{Progress, Summary};
use forebay_api::peers::{MemberStage, MemberStageState};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client};
use forebay_system::terminal::visible;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::Output;
use crate::values;

/// The words for an operation.
#[derive(Debug, Clone, Copy)]
pub struct Verb {
    /// "staging"
    pub doing: &'static str,
    /// "staged"
    pub done: &'static str,
    /// The counted things: "file"
    pub of: &'static str,
}

/// Requests the operation and follows it to its end.
pub fn follow(entry: &RegisteredMount, request: &Request, verb: Verb, output: &Output) -> Result<Summary, Failure> {
    let bar = bar(verb, output);
    let mut summary = None;
    for reply in client::call(entry, request)? {
        let Reply::Progress(step) = reply? else { continue };
        if output.json {
            output.json(&step);
        }
        match step {
            Progress::Planned { bytes, .. } => bar.set_length(bytes),
            Progress::Advanced { files, bytes } => {
                bar.set_position(bytes);
                bar.set_message(values::counted(files, verb.of));
            }
            Progress::UnderWay(works) => {
                if let Some(work) = works.first() {
                    bar.set_message(values::under_way(work));
                }
            }
            Progress::Wanted(wanted) if !output.json => {
                let PlannedFile { path, bytes, probability, why } = wanted;
                let percent = probability * 100.0;
                output.line(format!(
                    "{percent:3.0} %  {:>10}  {}  ({why})",
                    values::bytes(bytes),
                    values::shown(&path)
                ));
            }
            Progress::Wanted(_) => {}
            Progress::Failed { path, reason } if !output.json => {
                bar.suspend(|| output.note(format!("{}: {}", values::shown(&path), visible(&reason))));
            }
            Progress::Failed { .. } => {}
            Progress::Done(done) => summary = Some(done),
        }
    }
    bar.finish_and_clear();
    summary.ok_or_else(|| Failure::new(FailureKind::Other, "the daemon ended its answer without a summary"))
}

/// Prints a summary in one line.
pub fn summarise(summary: &Summary, verb: Verb, dry_run: bool, output: &Output) {
    if output.json {
        return;
    }
    let Verb { done, of, .. } = verb;
    let mut line = if dry_run { format!("would be {done}: ") } else { format!("{done}: ") };
    line += &format!("{}, {}", values::counted(summary.files, of), values::bytes(summary.bytes));
    if summary.skipped > 0 {
        line += &format!("; {} skipped", values::counted(summary.skipped, of));
    }
    if summary.failed > 0 {
        line += &format!("; {} FAILED", values::counted(summary.failed, of));
    }
    if !dry_run && summary.elapsed_ms > 0 {
        let elapsed = Duration::from_millis(summary.elapsed_ms);
        line += &format!(" in {}", humantime::format_duration(elapsed));
        if summary.bytes > 0 {
            let rate = summary.bytes.saturating_mul(1000) / summary.elapsed_ms;
            line += &format!(" ({}/s)", values::bytes(rate));
        }
    }
    output.line(line);
    if let Some(message) = &summary.message {
        output.line(format!("  {}", visible(message)));
    }
    for member in &summary.members {
        output.line(format!("  {}", told(member, verb, dry_run)));
    }
}

/// One line on what a member of the cluster did.
fn told(member: &MemberStage, verb: Verb, dry_run: bool) -> String {
    let MemberStage { node, state, files, bytes, failed, message, .. } = member;
    let would = if dry_run && *state == MemberStageState::Staged { "would be " } else { "" };
    let mut line =
        format!("{node}: {would}{}: {}, {}", state.name(), values::counted(*files, verb.of), values::bytes(*bytes));
    if *state == MemberStageState::Incomplete {
        line += &format!("; {} FAILED", values::counted(*failed, verb.of));
    }
    if let Some(message) = message {
        line += &format!(": {}", values::shown(message));
    }
    line
}

fn bar(verb: Verb, output: &Output) -> ProgressBar {
    const TEMPLATE: &str = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} {msg}";
    if !output.animated() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style).with_prefix(verb.doing);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
