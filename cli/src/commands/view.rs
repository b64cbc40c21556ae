//! `forebay view`, and `forebay stage --view`: staged trees that programs read without the daemon.

use std::path::{Path, PathBuf};

use forebay_api::operator::{Progress, StageRequest, Summary};
use forebay_api::views::{View, ViewChanges, ViewPhase, ViewRequest, ViewVerb};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::view_mounts::AttachedView;
use forebay_daemon::{Failure, FailureKind, client, view_mounts};
use serde::Serialize;

use super::transfer::STAGE;
use crate::args::{PathArgs, StageArgs, ViewCommand};
use crate::exit::Exit;
use crate::output::Output;
use crate::progress;
use crate::registration;
use crate::targets;
use crate::values::{bytes, files, moment, shown};

/// How often files are staged again because they changed before the view was laid.
const ATTEMPTS: u32 = 3;

pub fn run(command: ViewCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        ViewCommand::List { path } => list(path.as_deref(), output),
        ViewCommand::Show { view } => show(&view, output),
        ViewCommand::End { view, lazy } => end(&view, lazy, output),
        ViewCommand::Restore { path } => restore(path.as_deref(), output),
    }
}

/// Stages each path, and mounts a view of it.
pub fn make(args: StageArgs, job: Option<String>, output: &Output) -> Result<Exit, Failure> {
    let targets = targets::of(&PathArgs { paths: args.paths.clone(), null: args.null })?;
    for target in targets {
        for path in target.paths {
            let request = ViewRequest {
                path,
                // The owner of the leases is the view; it ends with the job.
                job: job.clone().or(args.owner.clone()),
                lease_secs: args.lease.map(|lease| lease.as_secs()),
                for_job: args.view.for_job.is_some(),
                user: None,
            };
            let terms =
                ViewTerms { rate: args.rate, allow_copy: args.view.allow_copy, namespace_of: args.view.for_job };
            let made = one(&target.entry, &request, &terms, &mut |stage| {
                let summary = progress::follow(&target.entry, stage, STAGE, output)?;
                if is_short(&summary) {
                    progress::summarise(&summary, STAGE, false, output);
                }
                Ok(summary)
            })?;
            let Some(view) = made else { return Ok(Exit::Incomplete) };
            match output.json {
                true => output.json(&at_mount(&target.entry, &view)),
                false => output.line(line(&target.entry, &view)),
            }
        }
    }
    Ok(Exit::Done)
}

/// How a view is made.
#[derive(Debug, Clone, Copy, Default)]
struct ViewTerms {
    rate: Option<u64>,
    allow_copy: bool,
    namespace_of: Option<u32>,
}

/// Makes a view for a batch job, of what is staged for it.
pub fn of_job(entry: &RegisteredMount, request: &ViewRequest) -> Result<(), Failure> {
    let mut why = None;
    let made = one(entry, request, &ViewTerms::default(), &mut |stage| {
        let mut last = Summary::default();
        for reply in client::call(entry, stage)? {
            match reply? {
                Reply::Progress(Progress::Failed { path, reason }) => why = Some(format!("{path}: {reason}")),
                Reply::Progress(Progress::Done(summary)) => last = summary,
                _ => {}
            }
        }
        Ok(last)
    })?;
    match made {
        Some(_) => Ok(()),
        None => Err(Failure::new(FailureKind::Incomplete, why.unwrap_or_else(|| "not all of it can be staged".into()))),
    }
}

/// Makes one view. What changes between the staging and the laying of its tree is staged again. Returns `None` if not all
/// of it can be staged.
fn one(
    entry: &RegisteredMount,
    request: &ViewRequest,
    terms: &ViewTerms,
    stage: &mut dyn FnMut(&Request) -> Result<Summary, Failure>,
) -> Result<Option<View>, Failure> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let view = answer(entry, ViewVerb::Begin(request.clone()))?;
        let made = complete(entry, &view, request, terms, stage);
        if let Ok(Some(view)) = made {
            return Ok(Some(view));
        }
        let _ = verb(entry, ViewVerb::End { id: view.id });
        match made {
            Err(failure) if failure.kind == FailureKind::Busy && attempt < ATTEMPTS => {}
            made => return made,
        }
    }
}

/// Stages the files of a view, lays its tree, and mounts it.
fn complete(
    entry: &RegisteredMount,
    view: &View,
    request: &ViewRequest,
    terms: &ViewTerms,
    stage: &mut dyn FnMut(&Request) -> Result<Summary, Failure>,
) -> Result<Option<View>, Failure> {
    let staging = StageRequest {
        paths: vec![view.path.clone()],
        lease_owner: view.id.clone(),
        lease_secs: request.lease_secs,
        bytes_per_second: terms.rate,
        user: request.user.clone(),
        ..StageRequest::default()
    };
    if is_short(&stage(&Request::Stage(staging))?) {
        return Ok(None);
    }
    let lay = ViewVerb::Lay { id: view.id.clone(), allow_copy: terms.allow_copy, awaits_mount: true };
    let laid = answer(entry, lay)?;
    mount(entry, &laid, terms.namespace_of)?;
    Ok(Some(laid))
}

/// Mounts a view, and tells the daemon. If the view has ended meanwhile, or the daemon does not answer, it is not mounted:
/// nothing else would take an empty tree away.
fn mount(entry: &RegisteredMount, view: &View, namespace_of: Option<u32>) -> Result<(), Failure> {
    let attached = view_mounts::attach(entry, view, namespace_of)?;
    tell_mounted(entry, view).map_err(|failure| taken_away(attached, failure))
}

/// Mounts a view again, and tells the daemon. It stays mounted if the daemon does not answer, as those stay that were mounted
/// before the daemon was gone.
fn mount_again(entry: &RegisteredMount, view: &View) -> Result<(), Failure> {
    let attached = view_mounts::attach(entry, view, None)?;
    tell_mounted(entry, view).map_err(|failure| match failure.kind {
        // `Stale` and `NotFound` in the daemon.
        FailureKind::Other | FailureKind::Incomplete => taken_away(attached, failure),
        _ => failure,
    })
}

fn taken_away(attached: AttachedView, failure: Failure) -> Failure {
    match attached.take_away() {
        Ok(()) => failure,
        Err(stays) => Failure { what: format!("{}; {}", failure.what, stays.what), ..failure },
    }
}

/// Tells the daemon that a view is mounted. An older daemon does not know this request, and does not wait for it.
fn tell_mounted(entry: &RegisteredMount, view: &View) -> Result<(), Failure> {
    match verb(entry, ViewVerb::Mounted { id: view.id.clone() }) {
        Err(failure) if failure.kind == FailureKind::Usage => Ok(()),
        other => other.map(drop),
    }
}

fn is_short(summary: &Summary) -> bool {
    summary.failed > 0 || summary.refused.is_some()
}

fn list(path: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    targets::each(registration::mounts(path)?, output, |entry| {
        for view in views(&entry)? {
            match output.json {
                true => output.json(&at_mount(&entry, &view)),
                false => output.line(line(&entry, &view)),
            }
        }
        Ok(Exit::Done)
    })
}

fn show(named: &Path, output: &Output) -> Result<Exit, Failure> {
    let (entry, view) = find(named)?;
    let changes = verb(&entry, ViewVerb::Compare { id: view.id.clone() })?.into_iter().find_map(|reply| match reply {
        Reply::ViewChanges(changes) => Some(changes),
        _ => None,
    });
    let changes = changes.unwrap_or_default();
    if output.json {
        output.json(&ViewWithChanges { view: at_mount(&entry, &view), changes: &changes });
        return Ok(Exit::Done);
    }
    output.line(line(&entry, &view));
    output.line(newer(&changes));
    for (what, path) in &changes.named {
        output.line(format!("{what}: {}", shown(path)));
    }
    Ok(Exit::Done)
}

fn newer(changes: &ViewChanges) -> String {
    match changes.changed + changes.added + changes.removed {
        0 => "the pool has nothing newer".into(),
        _ => format!(
            "newer in the pool: {} changed, {} added, {} removed; `forebay view end`, then `forebay stage --view` shows them",
            changes.changed, changes.added, changes.removed
        ),
    }
}

fn end(named: &Path, lazy: bool, output: &Output) -> Result<Exit, Failure> {
    let (entry, view) = find(named)?;
    view_mounts::detach(&view, lazy)?;
    verb(&entry, ViewVerb::End { id: view.id.clone() })?;
    if !output.json {
        output.line(format!("{}: ended", view.id));
    }
    Ok(Exit::Done)
}

fn restore(path: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    targets::each(registration::mounts(path)?, output, |entry| {
        let to_restore =
            |view: &View| view.phase == ViewPhase::Laid && !view.for_job && !view_mounts::is_mounted(&entry, view);
        for view in views(&entry)?.into_iter().filter(to_restore) {
            mount_again(&entry, &view)?;
            match output.json {
                true => output.json(&at_mount(&entry, &view)),
                false => output.line(line(&entry, &view)),
            }
        }
        Ok(Exit::Done)
    })
}

/// Mounts the views of a mount that was just made. A failure is a note: the mount serves.
pub fn restore_after_mount(mountpoint: &Path, output: &Output) {
    let Ok(found) = registry::locate(mountpoint) else { return };
    for view in views(&found.entry).unwrap_or_default() {
        if view.phase == ViewPhase::Laid
            && !view.for_job
            && let Err(failure) = mount_again(&found.entry, &view)
        {
            output.note(format!("{}: {failure}", view.id));
        }
    }
}

/// Returns the view that is named, or that shows a path or what is above it.
fn find(named: &Path) -> Result<(RegisteredMount, View), Failure> {
    let by_path = forebay_daemon::paths::absolute(named).unwrap_or_else(|_| named.to_owned());
    let is_meant = |entry: &RegisteredMount, view: &View| {
        Path::new(&view.id) == named || by_path.starts_with(view_mounts::place(entry, view))
    };
    let mut failed = None;
    for entry in registration::mounts(None)? {
        match views(&entry) {
            Ok(views) => {
                if let Some(view) = views.into_iter().find(|view| is_meant(&entry, view)) {
                    return Ok((entry, view));
                }
            }
            // Another mount may have it.
            Err(failure) if by_path.starts_with(entry.mountpoint()) => failed = Some(failure),
            Err(_) => {}
        }
    }
    Err(failed.unwrap_or_else(|| {
        Failure::new(FailureKind::Usage, format!("there is no view {}", named.display())).remedy("forebay view list")
    }))
}

fn views(entry: &RegisteredMount) -> Result<Vec<View>, Failure> {
    let replies = verb(entry, ViewVerb::List)?;
    Ok(replies
        .into_iter()
        .filter_map(|reply| if let Reply::Views(views) = reply { Some(views) } else { None })
        .flatten()
        .collect())
}

/// Carries out a verb whose answer is one view.
fn answer(entry: &RegisteredMount, request: ViewVerb) -> Result<View, Failure> {
    for reply in verb(entry, request)? {
        if let Reply::Views(mut views) = reply
            && let Some(view) = views.pop()
        {
            return Ok(view);
        }
    }
    Err(Failure::new(FailureKind::Other, "the daemon answered with no view"))
}

fn verb(entry: &RegisteredMount, verb: ViewVerb) -> Result<Vec<Reply>, Failure> {
    client::call(entry, &Request::View(verb))?.collect()
}

fn line(entry: &RegisteredMount, view: &View) -> String {
    let place = view_mounts::place(entry, view);
    let until = match (&view.job, view.expires_unix) {
        (Some(job), _) => format!("until job {} ends", shown(job)),
        (None, Some(at)) => format!("until {}", moment(at)),
        (None, None) => "until it is ended".into(),
    };
    let state = match view.phase {
        ViewPhase::Staging => "being staged".to_owned(),
        ViewPhase::Ending => "ending".to_owned(),
        ViewPhase::Laid if view.for_job => "in its job's namespace".to_owned(),
        ViewPhase::Laid if view_mounts::is_mounted(entry, view) => "mounted".to_owned(),
        ViewPhase::Laid => "not mounted: forebay view restore".to_owned(),
    };
    let copied =
        if view.copied_bytes > 0 { format!(", {} of it copied", bytes(view.copied_bytes)) } else { String::new() };
    format!(
        "{}: {}: {} and {} directories, {}{copied}; as of {}; {until}; {state}",
        shown(&place.display().to_string()),
        view.id,
        files(view.files),
        view.directories,
        bytes(view.bytes),
        moment(view.created_unix)
    )
}

#[derive(Serialize)]
struct ViewAtMount<'a> {
    mountpoint: &'a Path,
    place: PathBuf,
    mounted: bool,
    #[serde(flatten)]
    view: &'a View,
}

#[derive(Serialize)]
struct ViewWithChanges<'a> {
    #[serde(flatten)]
    view: ViewAtMount<'a>,
    #[serde(flatten)]
    changes: &'a ViewChanges,
}

fn at_mount<'a>(entry: &'a RegisteredMount, view: &'a View) -> ViewAtMount<'a> {
    ViewAtMount {
        mountpoint: entry.mountpoint(),
        place: view_mounts::place(entry, view),
        mounted: view_mounts::is_mounted(entry, view),
        view,
    }
}
