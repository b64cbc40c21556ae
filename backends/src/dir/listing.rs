//! Directories, page by page, and the removal of what dead writers left in them.

use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Dir as Entries, unlinkat};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::{DirEntry, RESERVED_PREFIX, Result};

use super::root::{Call, Root};
use super::staging::{PUT_PREFIX, boot_id};
use super::stat::{stat_name, stat_name_cached};

/// Entries in one page.
const PAGE_ENTRIES: usize = 1_000;

/// A directory that is being listed.
pub(super) struct OpenListing {
    entries: Entries,
    any: bool,
}

impl OpenListing {
    pub(super) fn open(root: &Root, call: Call<'_>) -> Result<Self> {
        let opened = root.open_directory(call.path).and_then(Entries::new);
        Ok(Self { entries: opened.map_err(|errno| call.failed(errno))?, any: false })
    }

    /// The next entries; `None` at the end.
    pub(super) fn next_page(&mut self, root: &Root, call: Call<'_>) -> Result<Option<Vec<DirEntry>>> {
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
                Ok(stat) => page.push(DirEntry { name: name.to_vec(), stat }),
                Err(Errno::NOENT | Errno::STALE) => {}
                Err(errno) => return Err(call.failed(errno).context(format!("stat {}", name.escape_ascii()))),
            }
        }
        if !page.is_empty() {
            self.any = true;
            return Ok(Some(page));
        }
        if !self.any {
            // Nothing at all is what a pool that was unmounted shows, too.
            root.verify()?;
        }
        Ok(None)
    }
}

/// Removes the unfinished files of dead writers from one directory and returns how many there were. Those of other
/// machines must be at least `age` old.
pub(super) fn sweep(root: &Root, call: Call<'_>, age: Duration) -> Result<u64> {
    let dir = root.open_directory(call.path).map_err(|errno| call.failed(errno))?;
    let mut entries = Entries::read_from(&dir).map_err(|errno| call.failed(errno))?;
    let mut removed = 0;
    while let Some(entry) = entries.read() {
        let entry = entry.map_err(|errno| call.failed(errno))?;
        let name = entry.file_name().to_bytes();
        if !is_abandoned(&dir, name, age) {
            continue;
        }
        match unlinkat(&dir, name, AtFlags::empty()) {
            Ok(()) => removed += 1,
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(call.failed(errno).context(format!("remove {}", name.escape_ascii()))),
        }
    }
    Ok(removed)
}

/// Whether the writer that left a file is dead. One of another machine, or of this one before it was booted, counts
/// as alive until the file is `min_age` old; one of this boot needs no such caution.
fn is_abandoned(dir: &OwnedFd, name: &[u8], min_age: Duration) -> bool {
    let Some(writer) = name.strip_prefix(PUT_PREFIX).and_then(|rest| std::str::from_utf8(rest).ok()) else {
        return false;
    };
    let mut parts = writer.split('-');
    let (Some(boot), Some(pid)) = (parts.next(), parts.next().and_then(|pid| pid.parse::<i32>().ok())) else {
        return false;
    };
    if boot == boot_id() {
        return !is_alive(pid);
    }
    // `ctime`, because a finished file has been given the times of the original.
    stat_name(dir, name)
        .is_ok_and(|stat| SystemTime::now().duration_since(stat.ctime.into()).is_ok_and(|age| age >= min_age))
}

fn is_alive(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}
