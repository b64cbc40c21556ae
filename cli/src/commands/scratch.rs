//! `forebay scratch`: plain directories on the fast pool, and their commit into the mount.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_api::scratch::{CommitReport, CommitRequest, MergeRequest, ScratchDir, ScratchRequest, ScratchVerb};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::RegisteredMount;
use forebay_daemon::{Failure, FailureKind, client, multi_mount, paths};
use forebay_system::identity;
use rustix::fs::{AtFlags, Mode, OFlags};
use serde::Serialize;

use crate::args::{ScratchCommand, ScratchCreateArgs};
use crate::exit::Exit;
use crate::output::Output;
use crate::registration;
use crate::restarts;
use crate::targets;
use crate::values::{bytes, files, moment, shown};

const STICKY: u32 = 0o1000;

/// What a commit does with a directory that has the name of what is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// It refuses it, unless it is empty.
    Keep,
    Merge,
}

pub fn run(command: ScratchCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        ScratchCommand::Create(args) => create(args, output),
        ScratchCommand::Commit { path, dest, merge } => {
            commit(&path, &dest, if merge { Existing::Merge } else { Existing::Keep }, output)
        }
        ScratchCommand::Discard { path } => discard(&path, output),
        ScratchCommand::List { mount } => list(mount.as_deref(), output),
    }
}

fn create(args: ScratchCreateArgs, output: &Output) -> Result<Exit, Failure> {
    let mut places = targets::meant(args.mount.as_deref())?;
    let (Some(place), true) = (places.pop(), places.is_empty()) else {
        return Err(Failure::usage("this path lies above several mounts").remedy("name one by --mount"));
    };
    let own = rustix::process::geteuid().as_raw();
    let id = args.job.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        format!("scratch-{}-{:x}", std::process::id(), now.as_micros())
    });
    let uid = args.uid.unwrap_or(own);
    let request =
        ScratchRequest { id, uid: args.uid, gid: group(uid, own), limit_bytes: args.size.map(|size| size.as_u64()) };
    for dir in dirs(&place.entry, ScratchVerb::Create(request))? {
        match output.json {
            true => output.json(&at_mount(&place.entry, &dir)),
            false => output.line(shown(&dir.path)),
        }
    }
    Ok(Exit::Done)
}

/// Creates the scratch directory of a job of another user.
pub fn create_for(entry: &RegisteredMount, id: String, uid: u32, bytes: u64) -> Result<PathBuf, Failure> {
    let gid = group(uid, rustix::process::geteuid().as_raw());
    let request = ScratchRequest { id, uid: Some(uid), gid, limit_bytes: Some(bytes) };
    let made = dirs(entry, ScratchVerb::Create(request))?.pop();
    made.map(|dir| dir.path.into()).ok_or_else(|| Failure::new(FailureKind::Other, "no scratch directory was created"))
}

/// Returns the path of a scratch directory of a user.
pub fn find(entry: &RegisteredMount, id: &str, uid: u32) -> Result<Option<PathBuf>, Failure> {
    let all = dirs(entry, ScratchVerb::List)?;
    Ok(all.into_iter().find(|dir| dir.id == id && dir.uid == uid).map(|dir| dir.path.into()))
}

/// Removes a scratch directory with everything in it.
pub fn discard_at(entry: &RegisteredMount, id: String) -> Result<(), Failure> {
    dirs(entry, ScratchVerb::Discard { id }).map(drop)
}

/// A user that the machine does not know has its number as its group.
fn group(uid: u32, own: u32) -> Option<u32> {
    identity::group_of(uid).or((uid != own).then_some(uid))
}

fn commit(path: &Path, dest: &Path, existing: Existing, output: &Output) -> Result<Exit, Failure> {
    let dest = paths::absolute(dest).map_err(|e| Failure::io("cannot tell the working directory", &e))?;
    let report = commit_tree(path, &dest, existing)?;
    let place = shown(&dest.display().to_string());
    match report {
        _ if output.json => output.json(&report),
        Some(report) => output.line(format!(
            "{place}: {} and {} directories, {}; written back by policy",
            files(report.files),
            report.directories,
            bytes(report.bytes)
        )),
        None => output.line(format!("{place}: committed; the daemon was started again before it told the numbers")),
    }
    Ok(Exit::Done)
}

/// Takes a tree of a scratch directory into the mount, with the rights of the directory's user. Returns `None` if the
/// worker died when it had committed the tree, and before it answered.
pub fn commit_tree(path: &Path, dest: &Path, existing: Existing) -> Result<Option<CommitReport>, Failure> {
    let (Some(above), Some(name)) = (dest.parent(), dest.file_name()) else {
        return Err(Failure::usage("the destination is the root of a file system").remedy("give a name in the mount"));
    };
    let mut places = multi_mount::places(above)?;
    let (Some(place), true) = (places.pop(), places.is_empty()) else {
        return Err(Failure::usage(format!("{} lies above several mounts", above.display())));
    };
    let entry = place.entry;
    let (dir, below) = found(path, std::slice::from_ref(&entry))?.ok_or_else(|| {
        Failure::usage(format!("{} is in no scratch directory of {}", path.display(), entry.mountpoint().display()))
            .remedy("forebay scratch list")
    })?;
    // The daemon checks a merge: it alone knows which directories get names.
    let replaced = (existing == Existing::Keep).then_some(name);
    let parent_ino = identity::as_user(dir.uid, || destination(above, replaced, dir.uid, entry.mountpoint()))
        .map_err(|e| Failure::given(format!("user {} cannot write {}", dir.uid, dest.display()), &e))?;
    let request = CommitRequest {
        id: dir.id,
        path: paths::encode(below.as_os_str().as_bytes()),
        parent_ino,
        name: paths::encode(name.as_bytes()),
    };
    let verb = match existing {
        Existing::Keep => ScratchVerb::Commit(request),
        Existing::Merge => {
            let groups = identity::groups_of(dir.uid)
                .map_err(|e| Failure::io(format!("cannot tell the groups of user {}", dir.uid), &e))?;
            ScratchVerb::Merge(MergeRequest { commit: request, groups })
        }
    };
    let request = Request::Scratch(verb);
    let call = || {
        let report = client::call(&entry, &request)?.find_map(|reply| match reply {
            Ok(Reply::Committed(report)) => Some(Ok(report)),
            Ok(_) => None,
            Err(failure) => Some(Err(failure)),
        });
        Ok(report.transpose()?.unwrap_or_default())
    };
    let has_content = || has_content(path, &below).map_err(|e| Failure::given(path.display(), &e));
    if !has_content()? {
        // Of nothing, it could not be told later whether it was taken.
        return call().map(Some);
    }
    restarts::taken_once(&entry, call, || {
        // A worker answers this when it has finished or undone the commits of the one before.
        dirs(&entry, ScratchVerb::List)?;
        has_content()
    })
}

/// Returns whether there is something to commit at a path. A scratch directory stays when all of it was committed.
fn has_content(path: &Path, below: &Path) -> io::Result<bool> {
    if below.as_os_str().is_empty() {
        return Ok(std::fs::read_dir(path)?.next().transpose()?.is_some());
    }
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map(|_| true),
    }
}

/// Returns the inode number of a directory of the mount, if this user reaches it, and may make or replace this name in it.
fn destination(above: &Path, name: Option<&OsStr>, uid: u32, mountpoint: &Path) -> io::Result<u64> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(above, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&dir)?;
    if stat.st_dev != std::fs::metadata(mountpoint)?.dev() {
        return Err(io::Error::other("another file system is mounted there"));
    }
    let Some(name) = name else { return Ok(stat.st_ino) };
    identity::check_may_change(&dir)?;
    let replaced = rustix::fs::statat(&dir, name.as_bytes(), AtFlags::SYMLINK_NOFOLLOW);
    let is_others = |owner: u32| owner != uid && uid != 0;
    if replaced.is_ok_and(|replaced| stat.st_mode & STICKY != 0 && is_others(replaced.st_uid) && is_others(stat.st_uid))
    {
        return Err(rustix::io::Errno::PERM.into());
    }
    Ok(stat.st_ino)
}

fn discard(path: &Path, output: &Output) -> Result<Exit, Failure> {
    let entries = registration::mounts(None)?;
    for entry in entries {
        let Some((dir, below)) = found(path, std::slice::from_ref(&entry))? else { continue };
        if !below.as_os_str().is_empty() {
            return Err(Failure::usage(format!("{} is a part of a scratch directory", path.display()))
                .remedy(format!("remove it by rm, or discard all of {}", dir.path)));
        }
        dirs(&entry, ScratchVerb::Discard { id: dir.id })?;
        if !output.json {
            output.line(format!("{}: removed", shown(&dir.path)));
        }
        return Ok(Exit::Done);
    }
    // One that is not there has perhaps no path.
    for entry in registration::mounts(None)? {
        let is_named = |dir: &ScratchDir| dir.is_missing && Path::new(&dir.id) == path;
        // Another mount may have it.
        let Ok(all) = dirs(&entry, ScratchVerb::List) else { continue };
        if let Some(dir) = all.into_iter().find(is_named) {
            dirs(&entry, ScratchVerb::Discard { id: dir.id.clone() })?;
            if !output.json {
                output.line(format!("{}: given up", shown(&dir.id)));
            }
            return Ok(Exit::Done);
        }
    }
    Err(Failure::usage(format!("{} is no scratch directory", path.display())).remedy("forebay scratch list"))
}

fn list(mount: Option<&Path>, output: &Output) -> Result<Exit, Failure> {
    targets::each(registration::mounts(mount)?, output, |entry| {
        for dir in dirs(&entry, ScratchVerb::List)? {
            match output.json {
                true => output.json(&at_mount(&entry, &dir)),
                false => output.line(line(&dir)),
            }
        }
        Ok(Exit::Done)
    })
}

fn line(dir: &ScratchDir) -> String {
    let limit = dir.limit_bytes.map_or_else(String::new, |limit| format!(" of {}", bytes(limit)));
    let state = match dir {
        ScratchDir { is_missing: true, .. } => ", missing: its file system is not mounted",
        ScratchDir { is_full: true, .. } => ", full: writes are refused",
        _ => "",
    };
    format!(
        "{}: {}{limit} used, user {}, since {}{state}",
        shown(if dir.path.is_empty() { &dir.id } else { &dir.path }),
        bytes(dir.used_bytes),
        dir.uid,
        moment(dir.created_unix)
    )
}

#[derive(Serialize)]
struct ScratchAtMount<'a> {
    mountpoint: &'a Path,
    #[serde(flatten)]
    dir: &'a ScratchDir,
}

fn at_mount<'a>(entry: &'a RegisteredMount, dir: &'a ScratchDir) -> ScratchAtMount<'a> {
    ScratchAtMount { mountpoint: entry.mountpoint(), dir }
}

/// Carries out a verb that may be repeated.
fn dirs(entry: &RegisteredMount, verb: ScratchVerb) -> Result<Vec<ScratchDir>, Failure> {
    let request = Request::Scratch(verb);
    restarts::repeated(entry, || {
        let mut all = Vec::new();
        for reply in client::call(entry, &request)? {
            if let Reply::Scratch(dirs) = reply? {
                all.extend(dirs);
            }
        }
        Ok(all)
    })
}

/// Returns the scratch directory of these mounts that a path lies in, and the rest of the path. A mount that does not answer
/// is an error only if the path lies in its fast pool.
fn found(path: &Path, entries: &[RegisteredMount]) -> Result<Option<(ScratchDir, PathBuf)>, Failure> {
    let path = paths::absolute(path).map_err(|e| Failure::io("cannot tell the working directory", &e))?;
    for entry in entries {
        let all = match dirs(entry, ScratchVerb::List) {
            Err(_) if !entry.state.config.fast.iter().any(|fast| path.starts_with(fast)) => continue,
            all => all?,
        };
        for dir in all {
            if let Ok(below) = path.strip_prefix(&dir.path)
                && !dir.path.is_empty()
            {
                let below = below.to_owned();
                return Ok(Some((dir, below)));
            }
        }
    }
    Ok(None)
}
