//! `forebay fsck`.

use std::path::Path;

use forebay_api::operator::FsckReport;
use forebay_daemon::multi_mount::MultiMountRoot;
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, FailureKind, client, offline};

use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, files, shown};

pub fn run(place: &Path, repair: bool, new_root: bool, output: &Output) -> Result<Exit, Failure> {
    let served = || {
        Failure::usage(format!(
            "--new-root is for a fast directory that no daemon has open, unlike {}",
            place.display()
        ))
        .remedy("unmount Forebay, and give the directory that was named to `forebay mount --fast`")
    };
    if let Some(root) = MultiMountRoot::meant_by(place) {
        if new_root {
            return Err(served());
        }
        return targets::each(root.places()?, output, |place| {
            output.heading(place.entry.mountpoint());
            Ok(told(&online(&place.entry, repair)?, output))
        });
    }
    let report = match user_of(place) {
        Some(_) if new_root => return Err(served()),
        Some(entry) => online(&entry, repair)?,
        None => {
            let fast = place.canonicalize().map_err(|e| Failure::given(place.display(), &e))?;
            offline::fsck(&offline::recall(&fast)?, repair, new_root)?
        }
    };
    Ok(told(&report, output))
}

fn told(report: &FsckReport, output: &Output) -> Exit {
    if output.json {
        output.json(report);
    } else {
        summarise(report, output);
    }
    if report.has_damage_left() { Exit::Corrupt } else { Exit::Done }
}

/// The mount that contains this place or uses it as a fast directory.
fn user_of(place: &Path) -> Option<RegisteredMount> {
    if let Ok(located) = registry::locate(place) {
        return Some(located.entry);
    }
    let fast = place.canonicalize().ok()?;
    registry::entries().into_iter().find(|e| e.supervisor_alive() && e.state.config.fast.contains(&fast))
}

fn online(entry: &RegisteredMount, repair: bool) -> Result<FsckReport, Failure> {
    for reply in client::call(entry, &Request::Fsck { repair })? {
        if let Reply::Fsck(report) = reply? {
            return Ok(report);
        }
    }
    Err(Failure::new(FailureKind::Other, "the daemon ended its answer without a report"))
}

fn summarise(report: &FsckReport, output: &Output) {
    for problem in &report.problems {
        output.line(shown(problem));
    }
    for note in &report.notes {
        output.line(shown(note));
    }
    output.line(format!(
        "checked {}, {}: {} problems, {} repaired, {} orphans removed",
        files(report.checked_files),
        bytes(report.checked_bytes),
        report.problems.len(),
        report.repaired,
        report.orphans_removed
    ));
}
