//! Open directories.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use forebay_backends::{ErrorKind, Result};
use fuser::{FileHandle, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use parking_lot::Mutex;

use super::convert;
use crate::{DirSnapshot, Ino, Overlay};

/// Directories that may be open with a snapshot of their own, which is taken at the first read: of most opens
/// the kernel answers every read from its cache. More of them can be open; those are read anew for
/// each part of the listing.
const OPEN_MAX: usize = 64 << 10;
const EPOCH_SHIFT: u32 = 32;

/// The cookie of an entry is its index plus this: 1 is `.`, 2 is `..`. A cookie names where to go on, after.
const FIRST_COOKIE: u64 = 3;

/// The snapshots of open directories, by the handle that the kernel was given. A handle of another process, and
/// one beyond the limit, has no snapshot.
pub struct Dirs {
    epoch: u32,
    open: Mutex<OpenDirs>,
}

#[derive(Default)]
struct OpenDirs {
    next: u32,
    by_number: HashMap<u32, OpenDir>,
}

struct OpenDir {
    snapshot: Option<DirSnapshot>,
    /// Reading from the start a second time is `rewinddir`, which must show what is there now.
    started: bool,
}

impl Dirs {
    pub fn new(epoch: u32) -> Self {
        Self { epoch, open: Mutex::default() }
    }

    /// A handle for a directory that was opened.
    pub fn insert(&self) -> FileHandle {
        let mut open = self.open.lock();
        let epoch = u64::from(self.epoch) << EPOCH_SHIFT;
        if open.by_number.len() >= OPEN_MAX {
            return FileHandle(epoch);
        }
        loop {
            open.next = open.next.wrapping_add(1);
            let number = open.next;
            if number != 0 && !open.by_number.contains_key(&number) {
                open.by_number.insert(number, OpenDir { snapshot: None, started: false });
                return FileHandle(epoch | u64::from(number));
            }
        }
    }

    pub fn remove(&self, handle: FileHandle) {
        if let Some(number) = self.number(handle) {
            self.open.lock().by_number.remove(&number);
        }
    }

    /// The snapshot to read `ino` from, at `offset`.
    async fn snapshot(&self, overlay: &Overlay, ino: Ino, handle: FileHandle, offset: u64) -> Result<DirSnapshot> {
        if let Some(snapshot) = self.known(handle, offset) {
            return Ok(snapshot);
        }
        let snapshot = overlay.read_dir(ino).await?;
        if let Some(number) = self.number(handle)
            && let Some(dir) = self.open.lock().by_number.get_mut(&number)
        {
            dir.snapshot = Some(snapshot.clone());
        }
        Ok(snapshot)
    }

    fn known(&self, handle: FileHandle, offset: u64) -> Option<DirSnapshot> {
        let number = self.number(handle)?;
        let mut open = self.open.lock();
        let dir = open.by_number.get_mut(&number)?;
        let again = std::mem::replace(&mut dir.started, true) && offset == 0;
        dir.snapshot.clone().filter(|_| !again)
    }

    fn number(&self, handle: FileHandle) -> Option<u32> {
        let epoch = (handle.0 >> EPOCH_SHIFT) as u32;
        (epoch == self.epoch).then_some(handle.0 as u32).filter(|number| *number != 0)
    }

    /// Fills `reply` with names.
    pub async fn read(
        &self,
        overlay: &Overlay,
        ino: Ino,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<()> {
        let snapshot = self.snapshot(overlay, ino, handle, offset).await?;
        for (cookie, dot, name) in dots(ino, &snapshot).into_iter().skip(offset.min(2) as usize) {
            if reply.add(INodeNo(dot.0), cookie, FileType::Directory, name) {
                return Ok(());
            }
        }
        let first = offset.saturating_sub(2) as usize;
        for (index, entry) in snapshot.entries.iter().enumerate().skip(first) {
            let (kind, name) = (convert::file_type(entry.kind), OsStr::from_bytes(&entry.name));
            if reply.add(INodeNo(entry.ino.0), index as u64 + FIRST_COOKIE, kind, name) {
                break;
            }
        }
        Ok(())
    }

    /// Fills `reply` with names and attributes. Each entry in it counts as a lookup, `.` and `..` don't.
    pub async fn read_plus(
        &self,
        overlay: &Overlay,
        ino: Ino,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let snapshot = self.snapshot(overlay, ino, handle, offset).await?;
        for (cookie, dot, name) in dots(ino, &snapshot).into_iter().skip(offset.min(2) as usize) {
            // The kernel takes only the number and the kind of these two.
            if reply.add(INodeNo(dot.0), cookie, name, &Duration::ZERO, &convert::directory(dot), Generation(0)) {
                return Ok(());
            }
        }
        let mut filled = offset < 2;
        let first = offset.saturating_sub(2) as usize;
        for (index, dirent) in snapshot.entries.iter().enumerate().skip(first) {
            let entry = match overlay.entry(dirent.ino).await {
                Ok(entry) => entry,
                // Removed since the snapshot.
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale) => continue,
                // What is there already is good; the error comes back with the next part.
                Err(_) if filled => break,
                Err(error) => return Err(error),
            };
            let (attr, name) = (convert::attr(&entry.attr), OsStr::from_bytes(&dirent.name));
            let cookie = index as u64 + FIRST_COOKIE;
            if reply.add(attr.ino, cookie, name, &entry.ttl, &attr, Generation(0)) {
                overlay.forget(entry.attr.ino, 1);
                break;
            }
            filled = true;
        }
        Ok(())
    }
}

fn dots(ino: Ino, snapshot: &DirSnapshot) -> [(u64, Ino, &'static str); 2] {
    [(1, ino, "."), (2, snapshot.parent, "..")]
}
