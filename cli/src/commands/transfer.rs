//! `forebay stage`, `flush` and `evict`: long operations that move bytes.

use forebay_api::operator::{EvictRequest, FlushRequest, ReleaseRequest, StageRequest};
use forebay_daemon::protocol::Request;
use forebay_daemon::{Failure, FailureKind};

use super::view;
use crate::args::{self, PathArgs};
use crate::exit::Exit;
use crate::output::Output;
use crate::progress::{self, Verb};
use crate::registration;
use crate::targets::{self, MountTarget};

pub const STAGE: Verb = Verb { doing: "staging", done: "staged", of: "file" };
pub const FLUSH: Verb = Verb { doing: "flushing", done: "flushed", of: "change" };
const EVICT: Verb = Verb { doing: "evicting", done: "evicted", of: "file" };
const RELEASE: Verb = Verb { doing: "releasing", done: "released", of: "lease" };

pub fn stage(args: args::StageArgs, output: &Output) -> Result<Exit, Failure> {
    let (job, lease_owner) = registration::owner(args.owner.clone());
    if args.view.view {
        return view::make(args, job, output);
    }
    let mut targets = Vec::new();
    if !args.paths.is_empty() {
        targets = targets::of(&PathArgs { paths: args.paths, null: args.null })?;
    }
    let invocation = (!args.command.is_empty()).then(|| registration::invocation(&args.command));
    if invocation.is_some() {
        // Ask every mount: each may know the command.
        for entry in registration::mounts(args.mount.as_deref())? {
            if !targets.iter().any(|target| target.entry.mountpoint() == entry.mountpoint()) {
                targets.push(MountTarget { entry, paths: Vec::new() });
            }
        }
    }
    on_each(targets, STAGE, args.dry_run, output, |paths| {
        Request::Stage(StageRequest {
            paths,
            invocation: invocation.clone(),
            job: job.clone(),
            lease_owner: lease_owner.clone(),
            lease_secs: args.lease.map(|l| l.as_secs()),
            bytes_per_second: args.rate,
            within_ms: args.within.map(|within| u64::try_from(within.as_millis()).unwrap_or(u64::MAX)),
            cluster: args.cluster.map(Into::into),
            user: None,
            dry_run: args.dry_run,
        })
    })
}

pub fn flush(args: args::FlushArgs, output: &Output) -> Result<Exit, Failure> {
    let verb = if args.wait { FLUSH } else { Verb { done: "queued", ..FLUSH } };
    let targets = targets::of(&PathArgs { paths: args.paths, null: args.null })?;
    on_each(targets, verb, args.dry_run, output, |paths| {
        Request::Flush(FlushRequest { paths, wait: args.wait, dry_run: args.dry_run })
    })
}

pub fn evict(args: args::EvictArgs, output: &Output) -> Result<Exit, Failure> {
    on_each(targets::of(&args.paths)?, EVICT, args.dry_run, output, |paths| {
        Request::Evict(EvictRequest { paths, release_leases: args.release_leases, dry_run: args.dry_run })
    })
}

pub fn release(args: args::ReleaseArgs, output: &Output) -> Result<Exit, Failure> {
    let (job, owner) = registration::owner(args.owner);
    let targets = match args.paths.is_empty() {
        true => {
            registration::all_mounts(None)?.into_iter().map(|entry| MountTarget { entry, paths: Vec::new() }).collect()
        }
        false => targets::of(&PathArgs { paths: args.paths, null: args.null })?,
    };
    on_each(targets, RELEASE, args.dry_run, output, |paths| {
        Request::Release(ReleaseRequest { paths, job: job.clone(), owner: owner.clone(), dry_run: args.dry_run })
    })
}

fn on_each(
    targets: Vec<MountTarget>,
    verb: Verb,
    dry_run: bool,
    output: &Output,
    request: impl Fn(Vec<String>) -> Request,
) -> Result<Exit, Failure> {
    let several = targets.len() > 1;
    targets::each(targets, output, |MountTarget { entry, paths }| {
        if several {
            output.heading(entry.mountpoint());
        }
        let request = request(paths);
        let summary = progress::follow(&entry, &request, verb, output)?;
        let is_for_cluster = matches!(&request, Request::Stage(stage) if stage.cluster.is_some());
        if is_for_cluster && summary.members.is_empty() {
            // An older daemon ignores the field that it does not know.
            let daemon = &entry.state.version;
            let what =
                format!("the daemon (forebay {daemon}) has staged on this node only: it does not know --cluster");
            return Err(Failure::new(FailureKind::Incomplete, what)
                .remedy("`umount --flush`, and mount again with this version of forebay"));
        }
        progress::summarise(&summary, verb, dry_run, output);
        Ok(match summary.refused {
            Some(errno) if errno == rustix::io::Errno::NOENT.raw_os_error() => Exit::Incomplete,
            Some(errno) => Exit::from(Failure::io("refused", &std::io::Error::from_raw_os_error(errno)).kind),
            None if summary.failed > 0 => Exit::Incomplete,
            None => Exit::Done,
        })
    })
}
