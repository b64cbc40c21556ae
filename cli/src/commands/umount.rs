//! `forebay umount`

use std::path::Path;

use forebay_api::operator::{FlushRequest, Status};
use forebay_daemon::multi_mount::MultiMountRoot;
use forebay_daemon::protocol::Request;
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, FailureKind, client, mounts, paths, unmount};

use super::multi_mount;
use super::transfer::FLUSH;
use crate::args::UmountArgs;
use crate::exit::Exit;
use crate::output::Output;
use crate::{progress, values};

pub fn run(args: &UmountArgs, output: &Output) -> Result<Exit, Failure> {
    let place = paths::absolute(&args.mountpoint).map_err(|e| Failure::io("mountpoint", &e))?;
    if let Some(root) = MultiMountRoot::meant_by(&place) {
        return multi_mount::take_away(&root, args, output);
    }
    let entry = match registry::locate(&place) {
        Ok(found) if found.inner.is_empty() => Some(found.entry),
        Ok(found) => {
            return Err(Failure::usage(format!("{} is not a mountpoint", place.display()))
                .remedy(format!("it lies in the mount {}", found.entry.mountpoint().display())));
        }
        // Without its daemon, nothing is flushed: what is not in the pool yet would stay behind in silence.
        Err(failure) if args.flush => return Err(failure),
        Err(_) if mounts::is_ours(&place) => None,
        Err(failure) => return Err(failure),
    };
    if let Some(entry) = entry.as_ref().filter(|entry| entry.is_cache_node()) {
        if entry.is_dead() {
            if !args.dry_run {
                entry.runtime.remove_if_over(&entry.state);
            }
            tell(entry.mountpoint(), None, args.dry_run, output);
            return Ok(Exit::Done);
        }
        let pid = entry.state.supervisor.pid;
        return Err(Failure::usage(format!("{} is a cache node, and nothing is mounted there", place.display()))
            .remedy(format!("`kill {pid}` ends it, once the requests under way are answered")));
    }
    let mountpoint = entry.as_ref().map_or(place.as_path(), RegisteredMount::mountpoint).to_path_buf();
    if let Some(entry) = entry.as_ref().filter(|_| args.flush) {
        flush(entry, args.dry_run, output)?;
    }
    let status = entry.as_ref().filter(|e| e.worker_alive()).map(client::status);
    if args.dry_run {
        tell(&mountpoint, status.as_ref(), true, output);
        return Ok(Exit::Done);
    }
    unmount::detach(&mountpoint, args.lazy)?;
    if let Some(entry) = &entry {
        unmount::settle(entry, args.lazy)?;
    }
    tell(&mountpoint, status.as_ref(), false, output);
    Ok(Exit::Done)
}

pub(super) fn flush(entry: &RegisteredMount, dry_run: bool, output: &Output) -> Result<(), Failure> {
    let request = Request::Flush(FlushRequest { paths: Vec::new(), wait: true, dry_run });
    let summary = progress::follow(entry, &request, FLUSH, output)?;
    progress::summarise(&summary, FLUSH, dry_run, output);
    if summary.failed == 0 {
        return Ok(());
    }
    let what = format!(
        "{} could not be written to the pool; nothing was unmounted",
        values::counted(summary.failed, FLUSH.of)
    );
    Err(Failure::new(FailureKind::Incomplete, what).remedy("`forebay dirty` says why; without --flush it unmounts"))
}

/// `status`: the daemon's status before the unmount, if there was a daemon.
pub(super) fn tell(mountpoint: &Path, status: Option<&Result<Status, Failure>>, dry_run: bool, output: &Output) {
    let place = mountpoint.display();
    if let Some(Err(failure)) = status {
        output.note(format!("{place}: could not find out what is not in the pool yet: {failure}"));
    }
    let status = status.and_then(|s| s.as_ref().ok());
    if output.json {
        output.json(&serde_json::json!({
            "mountpoint": mountpoint, "unmounted": !dry_run,
            "dirty_files": status.map(|s| s.dirty_files), "dirty_bytes": status.map(|s| s.dirty_bytes),
        }));
        return;
    }
    if dry_run {
        output.line(format!("would unmount {place}"));
    }
    if let Some(status) = status.filter(|s| s.dirty_files > 0) {
        output.note(format!(
            "{} ({}) not in the pool yet; the fast pool keeps them for the next mount.\n  try: `forebay flush --wait {place}` \
             while it is mounted, or `forebay umount --flush {place}`",
            values::files(status.dirty_files),
            values::bytes(status.dirty_bytes),
        ));
    }
}
