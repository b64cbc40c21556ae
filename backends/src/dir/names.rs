//! Creates, links, renames and removes names.

use std::os::fd::OwnedFd;

use rustix::fs::{
    AtFlags, Dir as RawEntries, FileType, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, openat, renameat,
    renameat_with, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::{Attrs, ErrorKind, Expected, FileKind, PoolPath, RenameMode, Result, Stat};

use super::attrs::dress;
use super::probe::Abilities;
use super::root::{Dir, PathCall, RootDirectory};
use super::stat::{stat_fd, stat_name};

/// The slot for a new name. Fails with `EXIST` for the root.
fn new_slot<'a>(root: &'a RootDirectory, path: &'a PoolPath) -> rustix::io::Result<(Dir<'a>, &'a [u8])> {
    root.slot(path).map_err(|errno| if errno == Errno::BUSY { Errno::EXIST } else { errno })
}

/// Makes an object of any kind except a file with content. If its attributes cannot be set, the object is removed
/// again.
pub(super) fn make(
    root: &RootDirectory,
    call: PathCall<'_>,
    abilities: &Abilities,
    make: impl FnOnce(&Dir<'_>, &[u8]) -> rustix::io::Result<()>,
    kind: FileKind,
    attrs: &Attrs,
) -> Result<Stat> {
    let (dir, name) = new_slot(root, call.path).map_err(|errno| call.failed(errno))?;
    make(&dir, name).map_err(|errno| call.failed(errno))?;
    let opened = openat(&dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    let object = opened.map_err(|errno| call.failed(errno))?;
    let made = stat_fd(&object).map_err(|errno| call.failed(errno))?;
    if !is_just_made(&object, &made, kind, abilities.public.objects.owners) {
        // The other client's object is neither given away nor removed.
        return Err(call.error(ErrorKind::Conflict, "another client put something else there at the same moment"));
    }
    let dressed = dress(&object, kind, attrs, abilities.public.objects.owners).and_then(|()| Ok(stat_fd(&object)?));
    dressed.map_err(|why| {
        if !stat_name(&dir, name).is_ok_and(|there| there.version.same_object(&made.version)) {
            return why.of(call);
        }
        let flags = if kind == FileKind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        // The caller gets the first error.
        let _ = unlinkat(&dir, name, flags);
        why.of(call)
    })
}

/// Whether the opened object can be the one that this process has just made. A user who may rename in the directory
/// can put another object in its place in between, and that object must not be given to the owner of the new one. An
/// object is a different one if this process does not own it, if other users have access to it, or if it has other
/// names or content.
fn is_just_made(object: &OwnedFd, made: &Stat, kind: FileKind, owners: bool) -> bool {
    let ours = !owners || made.uid == geteuid().as_raw();
    let shut = kind == FileKind::Symlink || made.mode & !(libc::S_ISGID | libc::S_IRWXU) == 0;
    let names = if kind == FileKind::Directory { made.nlink <= 2 } else { made.nlink == 1 };
    let empty = kind != FileKind::File || made.size == 0;
    made.kind == kind && ours && shut && names && empty && (kind != FileKind::Directory || is_empty(object))
}

/// A directory that this process may not read counts as not empty: this process did not make it.
fn is_empty(directory: &OwnedFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(mut entries) = openat(directory, c".", flags, Mode::empty()).and_then(RawEntries::new) else { return false };
    entries.all(|entry| entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b"..")))
}

pub(super) fn mkdir(dir: &Dir<'_>, name: &[u8]) -> rustix::io::Result<()> {
    mkdirat(dir, name, Mode::RWXU)
}

pub(super) fn symlink(target: &[u8], dir: &Dir<'_>, name: &[u8]) -> rustix::io::Result<()> {
    symlinkat(target, dir, name)
}

pub(super) fn mknod(kind: FileKind, rdev: u64, dir: &Dir<'_>, name: &[u8]) -> rustix::io::Result<()> {
    let mode = Mode::RUSR | Mode::WUSR;
    let file_type = match kind {
        FileKind::File => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            return openat(dir, name, flags, mode).map(drop);
        }
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharacterDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::Directory | FileKind::Symlink => return Err(Errno::INVAL),
    };
    mknodat(dir, name, file_type, mode, rdev)
}

pub(super) fn link(
    root: &RootDirectory,
    call: PathCall<'_>,
    existing: &PoolPath,
    abilities: &Abilities,
) -> Result<Stat> {
    let from = root.slot(existing).map_err(|errno| if errno == Errno::BUSY { Errno::PERM } else { errno });
    let (from_dir, from_name) = from.map_err(|errno| call.failed(errno))?;
    let (dir, name) = new_slot(root, call.path).map_err(|errno| call.failed(errno))?;
    let linked = linkat(&from_dir, from_name, &dir, name, AtFlags::empty());
    linked.map_err(|errno| match errno {
        Errno::PERM if !abilities.public.objects.hard_links => call.failed(Errno::OPNOTSUPP),
        _ => call.failed(errno),
    })?;
    stat_name(&dir, name).map_err(|errno| call.failed(errno))
}

/// Returns the removed object's attributes, for readers that keep it open; `None` if nothing was there and nothing
/// was expected.
pub(super) fn remove(root: &RootDirectory, call: PathCall<'_>, expected: &Expected) -> Result<Option<Stat>> {
    let slot = root.slot(call.path);
    let (dir, name) = slot.map_err(|errno| call.failed(if errno == Errno::BUSY { Errno::ISDIR } else { errno }))?;
    let target = match (stat_name(&dir, name), expected) {
        (Ok(target), _) => target,
        (Err(Errno::NOENT), Expected::Absent) => return root.verify().map(|()| None),
        (Err(errno), _) => return Err(call.failed(errno)),
    };
    let as_expected = match expected {
        Expected::Anything => true,
        Expected::Absent => false,
        Expected::Version(version) | Expected::Name(version) => target.version.same_content(version),
    };
    if !as_expected {
        return Err(call.error(ErrorKind::Conflict, "it was changed by another writer"));
    }
    if target.kind == FileKind::Directory {
        return Err(call.failed(Errno::ISDIR));
    }
    unlinkat(&dir, name, AtFlags::empty()).map_err(|errno| call.failed(errno))?;
    Ok(Some(target))
}

pub(super) fn remove_dir(root: &RootDirectory, call: PathCall<'_>) -> Result<()> {
    let (dir, name) = root.slot(call.path).map_err(|errno| call.failed(errno))?;
    unlinkat(&dir, name, AtFlags::REMOVEDIR).map_err(|errno| match errno {
        Errno::EXIST | Errno::NOTEMPTY => call.error(
            ErrorKind::NotEmpty,
            "it has entries; a listing leaves out unfinished .forebay~put- files, which a sweep removes",
        ),
        _ => call.failed(errno),
    })
}

pub(super) fn rename(
    root: &RootDirectory,
    call: PathCall<'_>,
    to: &PoolPath,
    mode: RenameMode,
    abilities: &Abilities,
) -> Result<Stat> {
    let fail = |errno| call.failed(errno).context(format!("rename to {to}"));
    let (from_dir, from_name) = root.slot(call.path).map_err(fail)?;
    let (to_dir, to_name) = root.slot(to).map_err(fail)?;
    let flagged = |flags| renameat_with(&from_dir, from_name, &to_dir, to_name, flags);
    match mode {
        RenameMode::Replace => renameat(&from_dir, from_name, &to_dir, to_name).map_err(|errno| match errno {
            // POSIX allows both errors for a directory that is not empty; xfs returns this one.
            Errno::EXIST => fail(Errno::NOTEMPTY),
            errno => fail(errno),
        })?,
        RenameMode::Exchange if abilities.public.renames.exchange() => flagged(RenameFlags::EXCHANGE).map_err(fail)?,
        RenameMode::Exchange => return Err(fail(Errno::OPNOTSUPP)),
        RenameMode::NoReplace if abilities.rename_noreplace => flagged(RenameFlags::NOREPLACE).map_err(fail)?,
        RenameMode::NoReplace => match stat_name(&to_dir, to_name) {
            Err(Errno::NOENT) => renameat(&from_dir, from_name, &to_dir, to_name).map_err(fail)?,
            Ok(_) => return Err(fail(Errno::EXIST)),
            Err(errno) => return Err(fail(errno)),
        },
    }
    stat_name(&to_dir, to_name).map_err(fail)
}
