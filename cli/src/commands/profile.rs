//! `forebay profile`

use std::io::Read;
use std::path::Path;

use forebay_api::foresight::ProfileSummary;
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client};
use forebay_prefetch::profile::ProfileDocument;
use serde::Serialize;

use crate::args::ProfileCommand;
use crate::exit::Exit;
use crate::output::Output;
use crate::registration;
use crate::targets;
use crate::values::{bytes, counted, files, moment, shown};

pub fn run(command: ProfileCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        ProfileCommand::List { mount } => list(mount.as_deref(), output),
        ProfileCommand::Show { profile, mount } => show(&profile, mount.as_deref(), output),
        ProfileCommand::Export { profile, toml, mount } => export(&profile, toml, mount.as_deref(), output),
        ProfileCommand::Import { file, mount } => import(&file, mount.as_deref(), output),
        ProfileCommand::Forget { profile, all: _, mount } => forget(profile.as_deref(), mount.as_deref(), output),
    }
}

fn list(mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let entries = registration::mounts(mount)?;
    let several = entries.len() > 1;
    targets::each(entries, output, |entry| {
        let profiles = summaries(&entry, &Request::Profiles)?;
        if several {
            output.heading(entry.mountpoint());
        }
        if output.json {
            profiles.iter().for_each(|profile| output.json(profile));
            return Ok(Exit::Done);
        }
        output.table(&profiles.iter().map(row).collect::<Vec<_>>());
        Ok(Exit::Done)
    })
}

fn row(profile: &ProfileSummary) -> Vec<String> {
    vec![
        profile.id.clone(),
        moment(profile.last_seen_unix),
        counted(profile.runs, "run"),
        files(profile.files),
        bytes(profile.encoded_bytes),
        profile.accuracy.map_or_else(|| "-".into(), |accuracy| format!("{:.0} % used", accuracy * 100.0)),
        shown(profile.signature.as_str()),
    ]
}

fn summaries(entry: &RegisteredMount, request: &Request) -> Result<Vec<ProfileSummary>, Failure> {
    let mut all = Vec::new();
    for reply in client::call(entry, request)? {
        if let Reply::Profiles(profiles) = reply? {
            all.extend(profiles);
        }
    }
    Ok(all)
}

/// A profile, from the first mount that knows it.
fn find(profile: &str, mount: Option<&Path>) -> Result<(ProfileSummary, ProfileDocument), Failure> {
    let mut failures = Vec::new();
    for entry in registration::mounts(mount)? {
        match ask(&entry, profile) {
            Ok(found) => return Ok(found),
            Err(failure) => failures.push(failure),
        }
    }
    let worst = failures.iter().position(|failure| failure.kind != FailureKind::Usage);
    Err(failures.swap_remove(worst.unwrap_or(0)))
}

fn ask(entry: &RegisteredMount, profile: &str) -> Result<(ProfileSummary, ProfileDocument), Failure> {
    let (mut summary, mut document) = (None, None);
    for reply in client::call(entry, &Request::Profile { profile: profile.to_owned() })? {
        match reply? {
            Reply::Profiles(mut profiles) => summary = profiles.pop(),
            Reply::Profile(whole) => document = Some(*whole),
            _ => {}
        }
    }
    let none = || Failure::new(FailureKind::NoDaemon, "the daemon ended its answer before the profile");
    summary.zip(document).ok_or_else(none)
}

#[derive(Serialize)]
struct ProfileOutput<'a> {
    #[serde(flatten)]
    summary: &'a ProfileSummary,
    profile: &'a ProfileDocument,
}

fn show(profile: &str, mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let (summary, document) = find(profile, mount)?;
    if output.json {
        output.json(&ProfileOutput { summary: &summary, profile: &document });
        return Ok(Exit::Done);
    }
    output.line(shown(summary.signature.as_str()));
    output.line(format!(
        "  {}, the last {}; {}; {}",
        counted(summary.runs, "run"),
        moment(summary.last_seen_unix),
        files(summary.files),
        summary.accuracy.map_or_else(
            || "nothing was staged by it yet".into(),
            |accuracy| format!("{:.0} % of the bytes that it staged were used", accuracy * 100.0)
        ),
    ));
    let mut rows = vec![["rank", "size", "runs", "parts", "path"].map(String::from).to_vec()];
    let mut ranked: Vec<_> = document.files.iter().collect();
    ranked.sort_by_key(|file| file.rank);
    rows.extend(ranked.into_iter().map(|file| {
        let parts = file.parts.clone().unwrap_or_else(|| "all".into());
        vec![file.rank.to_string(), bytes(file.size_bytes), file.runs.clone(), parts, shown(&file.path)]
    }));
    output.table(&rows);
    Ok(Exit::Done)
}

fn export(profile: &str, toml: bool, mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let (_, document) = find(profile, mount)?;
    let failed = |e: String| Failure::new(FailureKind::Other, format!("the profile cannot be written: {e}"));
    let text = match toml {
        true => toml::to_string_pretty(&document).map_err(|e| failed(e.to_string()))?,
        false => serde_json::to_string_pretty(&document).map_err(|e| failed(e.to_string()))?,
    };
    output.line(text.trim_end());
    Ok(Exit::Done)
}

fn import(file: &Path, mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    let (name, text) = if file.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|e| Failure::io("standard input", &e))?;
        ("standard input".to_owned(), text)
    } else {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|e| Failure::given(format!("profile {name}"), &e))?;
        (name, text)
    };
    let wrong = |e: String| {
        Failure::usage(format!("{name} is not a profile: {e}"))
            .remedy("give a file that `forebay profile export` wrote")
    };
    let document: ProfileDocument = match text.trim_start().starts_with('{') {
        true => serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?,
        false => toml::from_str(&text).map_err(|e| wrong(e.to_string()))?,
    };
    targets::each(registration::mounts(mount)?, output, |entry| {
        for profile in summaries(&entry, &Request::ImportProfile(Box::new(document.clone())))? {
            match output.json {
                true => output.json(&profile),
                false => output.line(format!("imported: {} at {}", profile.id, entry.mountpoint().display())),
            }
        }
        Ok(Exit::Done)
    })
}

fn forget(profile: Option<&str>, mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    targets::each(registration::mounts(mount)?, output, |entry| {
        for reply in client::call(&entry, &Request::ForgetProfiles { profile: profile.map(str::to_owned) })? {
            if let Reply::Forgotten(count) = reply? {
                match output.json {
                    true => output.json(&serde_json::json!({ "mountpoint": entry.mountpoint(), "forgotten": count })),
                    false => output.line(format!(
                        "forgotten: {} at {}",
                        counted(count, "profile"),
                        entry.mountpoint().display()
                    )),
                }
            }
        }
        Ok(Exit::Done)
    })
}
