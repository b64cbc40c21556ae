//! `forebay job begin` to `forebay job teardown`: the allocations of batch jobs.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_api::allocations::{Allocation, AllocationPhase, AllocationRequest, AllocationVerb};
use forebay_api::jobs::Members;
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, client, process_discovery};
use forebay_system::identity;
use serde::Serialize;

use crate::args::{AllocationCommand, BeginArgs, JobNameArgs, PathArgs, StartArgs, WaitArgs};
use crate::exit::Exit;
use crate::output::Output;
use crate::registration;
use crate::restarts;
use crate::targets::{self, MountTarget};
use crate::values::{bytes, files, moment, shown};

/// How long one request waits.
const WAIT: Duration = Duration::from_secs(1);

pub fn run(command: AllocationCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        AllocationCommand::Begin(args) => begin(args, output),
        AllocationCommand::StageIn(args) => {
            let verb = |wait_ms| AllocationVerb::StageIn { wait_ms };
            let at = VerbMounts::served(&args.named, output, |_| false)?;
            needed(&args.named, at, output, is_staged, |entry| waited(entry, &args, verb))
        }
        AllocationCommand::Ready(args) => {
            let verb = |wait_ms| AllocationVerb::Ready { wait_ms };
            needed(&args.named, VerbMounts::all(&args.named)?, output, is_staged, |entry| waited(entry, &args, verb))
        }
        AllocationCommand::Start(args) => start(args, output),
        AllocationCommand::End(named) => {
            let at = VerbMounts::all(&named)?;
            Ok(each(at.entries, output, is_done, |entry| send(entry, &named.id, AllocationVerb::End))?.0)
        }
        AllocationCommand::StageOut(args) => {
            let verb = |wait_ms| AllocationVerb::StageOut { wait_ms, is_settled: false };
            let at = VerbMounts::all(&args.named)?;
            Ok(each(at.entries, output, is_written_back, |entry| waited(entry, &args, verb))?.0)
        }
        AllocationCommand::Teardown(named) => {
            let verb =
                |entry: &RegisteredMount| send(entry, &named.id, AllocationVerb::Teardown { gives_up_results: false });
            Ok(each(VerbMounts::all(&named)?.entries, output, is_torn_down, verb)?.0)
        }
    }
}

/// The mounts at which a verb is carried out.
struct VerbMounts {
    entries: Vec<RegisteredMount>,
    /// One that is left out because its daemon is dead.
    left_out: Option<RegisteredMount>,
}

impl VerbMounts {
    /// All mounts. Those without a daemon fail: they may hold what the verb is about.
    fn all(named: &JobNameArgs) -> Result<Self, Failure> {
        Ok(Self { entries: registration::all_mounts(named.mount.as_deref())?, left_out: None })
    }

    /// The mounts that are served, for a verb whose success does not say that nothing is left to be done. Those without a
    /// daemon are noted. `needs`: the verb names paths at this mount, so it fails without the daemon.
    fn served(named: &JobNameArgs, output: &Output, needs: impl Fn(&RegisteredMount) -> bool) -> Result<Self, Failure> {
        let Self { entries, .. } = Self::all(named)?;
        let is_left_out = |entry: &RegisteredMount| named.mount.is_none() && entry.is_dead() && !needs(entry);
        let (mut dead, entries): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_left_out);
        if let (true, Some(entry)) = (entries.is_empty(), dead.first()) {
            return Err(client::dead(entry));
        }
        for failure in dead.iter().map(client::dead) {
            output.note(format!("forebay: left out: {failure}"));
        }
        Ok(Self { entries, left_out: dead.pop() })
    }
}

/// The verb is carried out, whatever the phase is.
fn is_done(_: &Allocation) -> Exit {
    Exit::Done
}

fn is_staged(allocation: &Allocation) -> Exit {
    match allocation.phase {
        _ if allocation.is_staging => Exit::Busy,
        AllocationPhase::Ready | AllocationPhase::Running => Exit::Done,
        _ => Exit::Incomplete,
    }
}

fn is_written_back(allocation: &Allocation) -> Exit {
    match allocation.phase {
        AllocationPhase::Done => Exit::Done,
        AllocationPhase::StagingOut => Exit::Busy,
        // Nothing is written back for an allocation that is cancelled: the verb came too late.
        _ => Exit::Incomplete,
    }
}

/// A teardown gives up no data: a write-back that failed is still to be done.
fn is_torn_down(allocation: &Allocation) -> Exit {
    if allocation.phase == AllocationPhase::Failed { Exit::Incomplete } else { Exit::Done }
}

/// Carries out a verb at one mount. Returns `None` if the allocation is not known there. If the daemon dies meanwhile and
/// is started again, asks again: a verb may be repeated.
pub fn send(entry: &RegisteredMount, id: &str, verb: AllocationVerb) -> Result<Option<Allocation>, Failure> {
    restarts::repeated(entry, || attempt(entry, id, verb.clone()))
}

fn attempt(entry: &RegisteredMount, id: &str, verb: AllocationVerb) -> Result<Option<Allocation>, Failure> {
    let mut known = None;
    for reply in client::call(entry, &Request::Allocation { id: id.to_owned(), verb })? {
        if let Reply::Allocations(mut allocations) = reply? {
            known = allocations.pop();
        }
    }
    Ok(known)
}

/// Returns the allocations of a mount on which work may still be done.
pub fn not_over(entry: &RegisteredMount) -> Result<Vec<Allocation>, Failure> {
    let mut all = Vec::new();
    for reply in client::call(entry, &Request::Allocations)? {
        if let Reply::Allocations(allocations) = reply? {
            all.extend(allocations);
        }
    }
    let over = [AllocationPhase::Done, AllocationPhase::Failed, AllocationPhase::Cancelled];
    all.retain(|allocation| !over.contains(&allocation.phase));
    Ok(all)
}

fn begin(args: BeginArgs, output: &Output) -> Result<Exit, Failure> {
    let found = |paths: Vec<std::ffi::OsString>| match paths.is_empty() {
        true => Ok(Vec::new()),
        false => targets::of(&PathArgs { paths, null: false }),
    };
    let (stage_in, stage_out) = (found(args.stage_in)?, found(args.stage_out)?);
    let is_named = |entry: &RegisteredMount| stage_in.iter().chain(&stage_out).any(|target| is_of(target, entry));
    let VerbMounts { entries, .. } = VerbMounts::served(&args.named, output, is_named)?;
    let strange = stage_in.iter().chain(&stage_out).find(|target| !entries.iter().any(|entry| is_of(target, entry)));
    if let Some(target) = strange {
        let place = target.entry.mountpoint().display();
        return Err(Failure::usage(format!("paths at {place} are named, but the allocation is not to be there"))
            .remedy("leave --mount out"));
    }
    let below = |targets: &[MountTarget], entry: &RegisteredMount| {
        targets.iter().filter(|target| is_of(target, entry)).flat_map(|target| target.paths.clone()).collect()
    };
    // The rights of the job's user count, not those of root.
    let named_user = args.uid.filter(|_| rustix::process::geteuid().is_root());
    let groups = named_user.map(identity::groups_of).transpose();
    let groups = groups.map_err(|e| Failure::io("cannot tell the groups of the job's user", &e))?;
    let invocation = (!args.command.is_empty()).then(|| registration::invocation(&args.command));
    let begun = each(entries, output, is_done, |entry| {
        let request = AllocationRequest {
            uid: args.uid,
            groups: groups.clone(),
            stage_in: below(&stage_in, entry),
            stage_out: below(&stage_out, entry),
            invocation: invocation.clone(),
            lease_secs: args.lease.map(|lease| lease.as_secs()),
            requeues: args.requeues,
            has_results: false,
        };
        send(entry, &args.named.id, AllocationVerb::Begin(request))
    });
    Ok(begun?.0)
}

fn is_of(target: &MountTarget, entry: &RegisteredMount) -> bool {
    target.entry.mountpoint() == entry.mountpoint()
}

fn start(args: StartArgs, output: &Output) -> Result<Exit, Failure> {
    let members = match (&args.cgroup, args.slurm_job) {
        (Some(dir), _) => process_discovery::cgroup(dir)?,
        (None, Some(job)) => Members::SlurmSteps { job },
        (None, None) => Members::Processes(args.pid),
    };
    let at = VerbMounts::served(&args.named, output, |_| false)?;
    needed(&args.named, at, output, is_done, |entry| {
        send(entry, &args.named.id, AllocationVerb::Start { members: members.clone() })
    })
}

/// Carries out a verb, and waits for the work that it begins.
fn waited(
    entry: &RegisteredMount,
    args: &WaitArgs,
    verb: impl Fn(u64) -> AllocationVerb,
) -> Result<Option<Allocation>, Failure> {
    let until = args.wait.and_then(|wait| Instant::now().checked_add(wait));
    let mut known = send(entry, &args.named.id, verb(0))?;
    loop {
        let left = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
        if left.is_zero() || !known.as_ref().is_some_and(Allocation::is_at_work) {
            return Ok(known);
        }
        known = send(entry, &args.named.id, AllocationVerb::Ready { wait_ms: left.min(WAIT).as_millis() as u64 })?;
    }
}

/// Carries out a verb that needs an allocation: it is a mistake if no mount knows it.
fn needed(
    named: &JobNameArgs,
    at: VerbMounts,
    output: &Output,
    exit: impl Fn(&Allocation) -> Exit,
    verb: impl Fn(&RegisteredMount) -> Result<Option<Allocation>, Failure>,
) -> Result<Exit, Failure> {
    let (exit, found) = each(at.entries, output, exit, verb)?;
    if !found && exit == Exit::Done {
        if let Some(entry) = &at.left_out {
            return Err(client::dead(entry));
        }
        return Err(Failure::usage(format!("there is no allocation `{}`", shown(&named.id)))
            .remedy(format!("forebay job begin {}", shown(&named.id))));
    }
    Ok(exit)
}

/// Carries out a verb at each mount. Returns whether any of them knows the allocation.
fn each(
    entries: Vec<RegisteredMount>,
    output: &Output,
    exit: impl Fn(&Allocation) -> Exit,
    verb: impl Fn(&RegisteredMount) -> Result<Option<Allocation>, Failure>,
) -> Result<(Exit, bool), Failure> {
    let mut found = false;
    let exit = targets::each(entries, output, |entry| {
        let Some(allocation) = verb(&entry)? else { return Ok(Exit::Done) };
        found = true;
        present(entry.mountpoint(), &allocation, output);
        Ok(exit(&allocation))
    })?;
    Ok((exit, found))
}

#[derive(Serialize)]
struct AtMount<'a> {
    mountpoint: &'a Path,
    #[serde(flatten)]
    allocation: &'a Allocation,
}

fn present(mountpoint: &Path, allocation: &Allocation, output: &Output) {
    match output.json {
        true => output.json(&AtMount { mountpoint, allocation }),
        false => output.line(summary(mountpoint, allocation)),
    }
}

/// One line about an allocation.
pub fn summary(mountpoint: &Path, allocation: &Allocation) -> String {
    let Allocation { staged, flushed, .. } = allocation;
    let mut line = format!(
        "{} at {}: {} since {}",
        shown(&allocation.id),
        mountpoint.display(),
        allocation.phase.name(),
        moment(allocation.since_unix)
    );
    if staged.files > 0 {
        line.push_str(&format!(", {} staged ({})", files(staged.files), bytes(staged.bytes)));
    }
    if flushed.files > 0 {
        line.push_str(&format!(", {} written back ({})", files(flushed.files), bytes(flushed.bytes)));
    }
    if let Some(reason) = &allocation.reason {
        line.push_str(&format!(": {}", shown(reason)));
    }
    line
}
