//! `forebay explain`

use std::path::Path;

use forebay_api::foresight::Explanation;
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::{Failure, client};

use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, moment, shown};

pub fn run(path: &Path, output: &Output) -> Result<Exit, Failure> {
    targets::each(targets::meant(Some(path))?, output, |place| {
        for reply in client::call(&place.entry, &Request::Explain { path: place.inner })? {
            if let Reply::Explanation(explanation) = reply? {
                match output.json {
                    true => output.json(&explanation),
                    false => tell(&explanation, output),
                }
            }
        }
        Ok(Exit::Done)
    })
}

fn tell(explanation: &Explanation, output: &Output) {
    let Explanation { file, why, goes, read_by } = explanation;
    output.line(shown(file.path.trim_start_matches('/')));
    output.line(format!(
        "  {}: {} of {} are resident",
        file.state.name(),
        bytes(file.resident_bytes),
        bytes(file.size)
    ));
    output.line(format!("  {}", shown(why)));
    output.line(format!("  {goes}"));
    if read_by.is_empty() {
        output.line("  no run of a job that is remembered has read it");
    }
    for reader in read_by {
        output.line(format!(
            "  {:.0} % probable at the next run of {} `{}`: read by {} of its last {} runs, the last {}",
            reader.probability * 100.0,
            reader.profile,
            shown(&reader.signature),
            reader.used,
            reader.seen,
            moment(reader.last_seen_unix),
        ));
    }
}
