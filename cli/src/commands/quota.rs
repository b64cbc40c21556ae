//! `forebay quota`

use forebay_api::quotas::{QuotaKind, QuotaNumber, QuotaReport, QuotaUse, QuotaVerb};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::{Failure, client};
use forebay_system::identity;

use crate::args::QuotaCommand;
use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, shown, span};

pub fn run(command: QuotaCommand, output: &Output) -> Result<Exit, Failure> {
    let (verb, path) = match command {
        QuotaCommand::Show { path } => (QuotaVerb::Show, path),
        QuotaCommand::Check { path } => (QuotaVerb::Check, path),
    };
    targets::each(targets::meant(path.as_deref())?, output, |place| {
        let mut exit = Exit::Done;
        for reply in client::call(&place.entry, &Request::Quota(verb))? {
            let Reply::Quotas(report) = reply? else { continue };
            if !report.differences.is_empty() {
                exit = Exit::Incomplete;
            }
            match output.json {
                true => output.json(&report),
                false => tell(&report, verb, output),
            }
        }
        Ok(exit)
    })
}

fn tell(report: &QuotaReport, verb: QuotaVerb, output: &Output) {
    if report.quotas.is_empty() {
        output.line("there are no quotas: a policy sets them, by [[quota]]");
        // Counts of quotas that a policy no longer has may still differ.
        report.differences.iter().for_each(|line| output.line(shown(line)));
        return;
    }
    let heads = ["", "bytes", "soft", "hard", "files", "soft", "hard", "staged", "hard", "grace"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(report.quotas.iter().map(row));
    output.table(&rows);
    report.differences.iter().for_each(|line| output.line(shown(line)));
    if verb == QuotaVerb::Check && report.differences.is_empty() {
        output.line("counted again: the same");
    }
}

fn row(quota: &QuotaUse) -> Vec<String> {
    let (kind, name) = match quota.kind {
        QuotaKind::User => ("user", identity::name_of_user(quota.id)),
        QuotaKind::Group => ("group", identity::name_of_group(quota.id)),
    };
    let subject = format!("{kind} {}", name.unwrap_or_else(|| quota.id.to_string()));
    let limit = |limit: Option<u64>, spell: fn(u64) -> String| limit.map_or_else(|| "-".to_owned(), spell);
    let plain = |number: u64| number.to_string();
    let (size, count, staged) = (quota.bytes, quota.files, quota.staged_bytes);
    let graces: Vec<String> =
        [("bytes", size), ("files", count)].iter().filter_map(|(what, number)| grace(what, number)).collect();
    vec![
        shown(&subject),
        bytes(size.used),
        limit(size.soft, bytes),
        limit(size.hard, bytes),
        plain(count.used),
        limit(count.soft, plain),
        limit(count.hard, plain),
        bytes(staged.used),
        limit(staged.hard, bytes),
        graces.join(", "),
    ]
}

/// How long a soft limit may still be exceeded.
fn grace(what: &str, number: &QuotaNumber) -> Option<String> {
    match number.grace_left_secs? {
        0 => Some(format!("{what}: over")),
        left => Some(format!("{what}: {} left", span(left))),
    }
}
