//! `forebay policy`: check, compare, explain and exchange the rules of a mount.

use std::path::Path;
use std::time::Duration;

use forebay_api::policy::{FileSum, PolicyEffect, PolicyExplanation, PolicyVerb};
use forebay_daemon::multi_mount::MountPath;
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::{Failure, client, policy_files};

use crate::args::PolicyCommand;
use crate::exit::Exit;
use crate::output::Output;
use crate::targets;
use crate::values::{bytes, files, shown};

pub fn run(command: PolicyCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        PolicyCommand::Check { file } => check(&file, output),
        PolicyCommand::Diff { old, new } => diff(&old, &new, output),
        PolicyCommand::Explain { path } => {
            targets::each(targets::meant(Some(&path))?, output, |place| explain(place, output))
        }
        PolicyCommand::Apply { file, path, dry_run } => apply(&file, path.as_deref(), dry_run, output),
    }
}

fn check(file: &Path, output: &Output) -> Result<Exit, Failure> {
    let read = policy_files::read(file)?;
    policy_files::compile(&read, "")?;
    if output.json {
        output.json(&serde_json::json!({ "files": read.0.iter().map(|file| &file.name).collect::<Vec<_>>() }));
    }
    Ok(Exit::Done)
}

fn diff(old: &Path, new: &Path, output: &Output) -> Result<Exit, Failure> {
    let policy = |file| policy_files::compile(&policy_files::read(file)?, "");
    let differences: Vec<String> = policy(old)?.differences(&policy(new)?).iter().map(ToString::to_string).collect();
    match output.json {
        true => output.json(&serde_json::json!({ "differences": differences })),
        false => differences.iter().for_each(|line| output.line(shown(line))),
    }
    Ok(if differences.is_empty() { Exit::Done } else { Exit::Incomplete })
}

fn explain(place: MountPath, output: &Output) -> Result<Exit, Failure> {
    for reply in client::call(&place.entry, &Request::Policy(PolicyVerb::Explain { path: place.inner }))? {
        let Reply::PolicyExplanation(explanation) = reply? else { continue };
        if output.json {
            output.json(&explanation);
            continue;
        }
        let PolicyExplanation { path, settings, next } = explanation;
        output.line(shown(path.trim_start_matches('/')));
        let rows: Vec<Vec<String>> = settings
            .into_iter()
            .map(|setting| vec![format!("  {}", setting.name), setting.value, shown(&setting.origin)])
            .collect();
        output.table(&rows);
        next.iter().for_each(|line| output.line(format!("  {}", shown(line))));
    }
    Ok(Exit::Done)
}

fn apply(file: &Path, path: Option<&Path>, dry_run: bool, output: &Output) -> Result<Exit, Failure> {
    let read = policy_files::read(file)?;
    policy_files::compile(&read, "")?;
    let texts = policy_files::to_wire(read);
    targets::each(targets::meant(path)?, output, |place| {
        let verb = PolicyVerb::Apply { files: texts.clone(), dry_run };
        for reply in client::call(&place.entry, &Request::Policy(verb))? {
            let Reply::PolicyEffect(effect) = reply? else { continue };
            match output.json {
                true => output.json(&effect),
                false => tell(&effect, dry_run, output),
            }
        }
        Ok(Exit::Done)
    })
}

fn tell(effect: &PolicyEffect, dry_run: bool, output: &Output) {
    let verb = if dry_run { "would change" } else { "changed" };
    if effect.differences.is_empty() {
        output.line("nothing differs from the policy in force");
        return;
    }
    output.line(format!("{verb}:"));
    effect.differences.iter().for_each(|line| output.line(format!("  {}", shown(line))));
    output.line(format!("  other settings for {}", files(effect.changed_files)));
    let sum = |what: &str, sum: FileSum| {
        if sum.files > 0 {
            output.line(format!("  {what}: {}, {}", files(sum.files), bytes(sum.bytes)));
        }
    };
    sum("flushed by policy from now on, instead of by `forebay flush`", effect.flushed);
    if effect.flushed.files > 0 {
        let time = Duration::from_secs(effect.seconds.ceil().clamp(1.0, 1e9) as u64);
        output.line(format!("    which takes {} at the pool's present speed", humantime::format_duration(time)));
    }
    sum("no longer flushed by policy, but by `forebay flush`", effect.held_back);
    sum("never sent to the pool", effect.kept_local);
    sum("no longer evicted to make room", effect.pinned);
    sum("evicted again to make room", effect.unpinned);
    for line in &effect.at_next_mount {
        output.line(format!("  only at the next mount: {}", shown(line)));
    }
}
