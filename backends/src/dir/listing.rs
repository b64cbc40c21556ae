//! Lists directories page by page, and removes the unfinished files of dead writers.

use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Dir as Entries, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

use crate::unfinished::{boot_id, is_alive, is_of, writer};
use crate::{DirEntry, RESERVED_PREFIX, Result};

use super::probe::PROBED_LINK;
use super::root::{PathCall, RootDirectory};
use super::stat::{stat_fd, stat_name, stat_name_cached};

/// Entries in one page.
const PAGE_ENTRIES: usize = 1_000;

/// A directory that is being listed.
pub(super) struct OpenListing {
    entries: Entries,
    any: bool,
}

impl OpenListing {
    pub(super) fn open(root: &RootDirectory, call: PathCall<'_>) -> Result<Self> {
        let opened = root.open_directory(call.path).and_then(Entries::new);
        Ok(Self { entries: opened.map_err(|errno| call.failed(errno))?, any: false })
    }

    /// The next entries; `None` at the end.
    pub(super) fn next_page(&mut self, root: &RootDirectory, call: PathCall<'_>) -> Result<Option<Vec<DirEntry>>> {
        let mut page = Vec::new();
        while page.len() < PAGE_ENTRIES {
            let Some(entry) = self.entries.read() else { break };
            let entry = entry.map_err(|errno| call.failed(errno))?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." || name.starts_with(RESERVED_PREFIX) {
                continue;
            }
            let dir = self.entries.fd().map_err(|errno| call.failed(errno))?;
            match stat_name_cached(dir, name) {
                Ok(stat) => page.push(DirEntry::new(name.to_vec(), stat)),
                Err(Errno::NOENT) => {}
                // If the directory itself is stale, its cached entries are not a listing.
                Err(Errno::STALE) => drop(stat_fd(dir).map_err(|errno| call.failed(errno))?),
                Err(errno) => return Err(call.failed(errno).context(format!("stat {}", name.escape_ascii()))),
            }
        }
        if !page.is_empty() {
            self.any = true;
            return Ok(Some(page));
        }
        if !self.any {
            // A pool that was unmounted also shows an empty directory.
            root.verify()?;
        }
        Ok(None)
    }
}

/// Removes the unfinished files of dead writers that are at least `age` old from one directory, or only counts them.
/// Returns their number.
pub(super) fn sweep(root: &RootDirectory, call: PathCall<'_>, age: Duration, remove: bool) -> Result<u64> {
    sweep_where(root, call, remove, |dir, name| is_abandoned(name) && is_old(dir, name, age))
}

/// Like [`sweep`], for a directory that is to be removed. Files of this machine's writers need not be old: if such a
/// writer still lives, in a container, its file loses its directory anyway.
pub(super) fn sweep_before_removal(root: &RootDirectory, call: PathCall<'_>, age: Duration) -> Result<u64> {
    let own = |name: &[u8]| writer(name).is_some_and(|(boot, _)| boot == boot_id());
    sweep_where(root, call, true, |dir, name| is_abandoned(name) && (own(name) || is_old(dir, name, age)))
}

/// Like [`sweep`], for these writers, regardless of age.
pub(super) fn sweep_of(root: &RootDirectory, call: PathCall<'_>, writers: &[String]) -> Result<u64> {
    sweep_where(root, call, true, |_, name| is_of(name, writers))
}

fn sweep_where(
    root: &RootDirectory,
    call: PathCall<'_>,
    remove: bool,
    abandoned: impl Fn(&OwnedFd, &[u8]) -> bool,
) -> Result<u64> {
    let dir = root.open_directory(call.path).map_err(|errno| call.failed(errno))?;
    let mut entries = Entries::read_from(&dir).map_err(|errno| call.failed(errno))?;
    let (mut removed, mut failed) = (0, None);
    while let Some(entry) = entries.read() {
        let entry = entry.map_err(|errno| call.failed(errno))?;
        let name = entry.file_name().to_bytes();
        if !abandoned(&dir, name) {
            continue;
        }
        if !remove {
            removed += 1;
            continue;
        }
        match remove_unfinished(&dir, name) {
            Ok(()) => removed += 1,
            Err(Errno::NOENT) => {}
            // The other names are removed all the same.
            Err(errno) if failed.is_none() => failed = Some((errno, name.escape_ascii().to_string())),
            Err(_) => {}
        }
    }
    match failed {
        Some((errno, name)) => Err(call.failed(errno).context(format!("remove {name}"))),
        None => Ok(removed),
    }
}

fn remove_unfinished(dir: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        removed => return removed,
    }
    // The directory of a probe.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match unlinkat(openat(dir, name, flags, Mode::empty())?, PROBED_LINK, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => unlinkat(dir, name, AtFlags::REMOVEDIR),
        Err(errno) => Err(errno),
    }
}

fn is_abandoned(name: &[u8]) -> bool {
    writer(name).is_some_and(|(boot, pid)| boot != boot_id() || !is_alive(pid))
}

/// By `ctime`, because a finished file already has the times of the original.
fn is_old(dir: &OwnedFd, name: &[u8], min_age: Duration) -> bool {
    stat_name(dir, name)
        .is_ok_and(|stat| SystemTime::now().duration_since(stat.ctime.into()).is_ok_and(|age| age >= min_age))
}
