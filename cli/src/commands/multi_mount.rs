//! `forebay mount --config`, and `forebay umount` of such a mount.

use std::path::{Path, PathBuf};

use forebay_api::operator::Status;
use forebay_daemon::config::MountConfig;
use forebay_daemon::multi_mount::{self, MultiMountPlan, MultiMountRoot};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client, mounts};

use super::{mount, processes, umount};
use crate::args;
use crate::exit::Exit;
use crate::output::Output;

/// The entry of fstab in place of a URL.
const NO_URL: &str = "none";

/// The arguments of a mount whose pools are in a file: the only word, or the last one, is the mountpoint.
pub fn without_url(mut args: args::MountArgs) -> Result<args::MountArgs, Failure> {
    args.mountpoint = match (args.url.take(), args.mountpoint.take()) {
        (Some(place), None) => Some(PathBuf::from(place)),
        (Some(url), place) if url == NO_URL => place,
        (None, place) => place,
        (Some(_), _) => {
            return Err(Failure::usage("both a pool and a file of pools were given")
                .remedy("forebay mount --config FILE MOUNTPOINT"));
        }
    };
    if args.mountpoint.is_none() {
        return Err(Failure::usage("no mountpoint was given").remedy("forebay mount --config FILE MOUNTPOINT"));
    }
    if args.policy.is_some() {
        return Err(Failure::usage("both --policy and --config were given")
            .remedy("put the policy into the file beside its [[pool]] tables, or as policy = \"FILE\" into one"));
    }
    if args.peers.is_some() {
        return Err(Failure::usage("both --peers and --config were given: each pool has a daemon of its own")
            .remedy("put peers = \"FILE\" into the [[pool]] tables, each with an address of its own"));
    }
    if args.metrics.is_some() {
        return Err(Failure::usage("both --metrics and --config were given: each pool has a daemon of its own")
            .remedy("put metrics = \"PORT\" into the [[pool]] tables, each with a port of its own"));
    }
    Ok(args)
}

pub fn run(
    file: &Path,
    common: &MountConfig,
    foreground: bool,
    dry_run: bool,
    output: &Output,
) -> Result<Exit, Failure> {
    let plan = multi_mount::check(&common.mountpoint, file, multi_mount::read(file, common)?)?;
    if dry_run {
        show(&plan, output);
        return Ok(Exit::Done);
    }
    for place in &plan.dead_mounts {
        output.note(format!("a dead mount at {} is detached", place.display()));
    }
    if foreground {
        processes::log();
        multi_mount::keep(&plan, &|ready| {
            ready.iter().for_each(|one| mount::told(one, output));
            mount::notify_systemd();
        })?;
    } else {
        let (_, ready) = multi_mount::mount(&plan)?;
        ready.iter().for_each(|one| mount::told(one, output));
    }
    Ok(Exit::Done)
}

fn show(plan: &MultiMountPlan, output: &Output) {
    for pool in &plan.pools {
        mount::show(pool, output);
    }
    if output.json {
        return;
    }
    for place in &plan.dead_mounts {
        output.line(format!("would detach the dead mount at {}", place.display()));
    }
    if plan.hides_files {
        output.line(format!("would hide the files in {}", plan.root.mountpoint.display()));
    }
}

/// Unmounts a mixed root: all of it or nothing.
pub fn take_away(root: &MultiMountRoot, args: &args::UmountArgs, output: &Output) -> Result<Exit, Failure> {
    if !args.lazy {
        multi_mount::refuse_in_use(root)?;
    }
    let (known, unknown): (Vec<_>, Vec<_>) = root.mounts().into_iter().partition(|(_, entry)| entry.is_some());
    // Without its daemon, nothing is flushed: what is not in the pool yet would stay behind in silence.
    let mut left = unknown.into_iter().filter(|(name, _)| args.flush && mounts::is_ours(&root.path_of(name)));
    if let Some((name, _)) = left.next() {
        return Err(no_daemon(root, name));
    }
    let mounts: Vec<_> = known.into_iter().filter_map(|(_, entry)| entry).collect();
    if args.flush {
        mounts.iter().try_for_each(|entry| umount::flush(entry, args.dry_run, output))?;
    }
    let statuses = statuses(&mounts);
    if !args.dry_run {
        multi_mount::umount(root, args.lazy)?;
    }
    for (entry, status) in mounts.iter().zip(&statuses) {
        umount::tell(entry.mountpoint(), status.as_ref(), args.dry_run, output);
    }
    Ok(Exit::Done)
}

fn no_daemon(root: &MultiMountRoot, pool: &str) -> Failure {
    let place = root.path_of(pool);
    let what = format!("{} is mounted, but its daemon is not known here; nothing was unmounted", place.display());
    Failure::new(FailureKind::NoDaemon, what).remedy(format!(
        "run this as the user who mounted it; without --flush it unmounts, and the fast pool keeps what is not in the pool: \
         forebay umount {}",
        root.mountpoint.display()
    ))
}

/// The status of each daemon. All are asked concurrently, because one that hangs is waited for. `None`: no daemon
/// runs.
fn statuses(mounts: &[RegisteredMount]) -> Vec<Option<Result<Status, Failure>>> {
    let ask = |entry: &RegisteredMount| entry.worker_alive().then(|| client::status(entry));
    std::thread::scope(|scope| {
        let asked: Vec<_> = mounts.iter().map(|entry| scope.spawn(move || ask(entry))).collect();
        asked.into_iter().map(|thread| thread.join().ok().flatten()).collect()
    })
}
