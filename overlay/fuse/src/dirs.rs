//! Open directories.
//!
//! All handles that read the same state of a directory share one snapshot of its names. The snapshots of all
//! directories have one bound in bytes.
//!
//! The kernel fills a cache with the entries that it gets. If the last one ends exactly at the end of a page, a reader
//! whose position the cache does not have gets the end of the directory, and not the rest of its names: the loop of
//! `fuse_readdir_cached` (Linux 6.18, fs/fuse/readdir.c) then finds nothing left in the next page. So the pages are
//! dropped before the end of such a listing is answered: a cache without its first page is not used.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use forebay_backends::Result;
use forebay_engine::{DirOrder, Ino, Overlay};
use fuser::{FileHandle, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use lru::LruCache;
use parking_lot::Mutex;

use super::convert;

/// Open directories that may have a snapshot. The snapshot is taken at the first read, since for most opens the kernel
/// answers every read from its cache. More directories can be open: their names are read anew for each part of the
/// listing.
const OPEN_MAX: usize = 64 << 10;
/// Bound on all snapshots together. A larger snapshot is kept alone. If a snapshot was dropped, the next part of the
/// listing collects the names anew: cookies belong to names, not to snapshots.
const SNAPSHOTS_BYTES: usize = 8 << 20;
const EPOCH_SHIFT: u32 = 32;

/// The cookies of `.` and `..`; entries have larger ones. A listing continues after the entry that its cookie names.
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;
/// The bytes of `struct fuse_dirent` before the name (include/uapi/linux/fuse.h).
const DIRENT_HEAD_BYTES: usize = 24;
static PAGE_BYTES: LazyLock<usize> = LazyLock::new(|| {
    // SAFETY: takes and returns numbers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
});

/// The open directories by the handle that the kernel has, and their snapshots. All handles of one state of a directory
/// share one snapshot.
pub struct DirHandles {
    epoch: u32,
    open: Mutex<OpenDirs>,
}

struct OpenDirs {
    next: u32,
    by_handle: HashMap<u64, OpenDir>,
    /// By directory and state.
    snapshots: LruCache<(Ino, u64), Arc<DirOrder>>,
    bytes: usize,
}

/// How far the kernel's cache would be filled by what a handle has read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct CacheFill {
    /// The cookie of the last entry.
    at: u64,
    /// The bytes of entries in the last page.
    in_page: usize,
}

impl CacheFill {
    /// Counts an entry. The kernel stores it as it gets it without attributes (`struct fuse_dirent`), never across pages.
    fn add(&mut self, cookie: u64, name: &OsStr) {
        let bytes = (DIRENT_HEAD_BYTES + name.len()).next_multiple_of(8);
        let fits = self.in_page + bytes <= *PAGE_BYTES;
        *self = Self { at: cookie, in_page: if fits { self.in_page + bytes } else { bytes } };
    }

    fn ends_a_page(self) -> bool {
        self.in_page == *PAGE_BYTES
    }
}

/// A part of a listing that is being sent.
struct ListingPart {
    /// `None`: it is unknown what the kernel got before.
    fill: Option<CacheFill>,
    is_empty: bool,
}

impl ListingPart {
    fn add(&mut self, cookie: u64, name: &OsStr) {
        self.is_empty = false;
        self.fill.iter_mut().for_each(|fill| fill.add(cookie, name));
    }
}

#[derive(Default)]
struct OpenDir {
    snapshot: Weak<DirOrder>,
    /// `None`: the last part did not follow the one before.
    fill: Option<CacheFill>,
    /// A second read from the start is `rewinddir`, which must show the present names.
    started: bool,
}

impl OpenDirs {
    fn drop_snapshot(&mut self, key: &(Ino, u64)) {
        if let Some(order) = self.snapshots.pop(key) {
            self.bytes -= order.bytes();
        }
    }

    /// Keeps a snapshot. While all snapshots are too large, drops the least recently used one.
    fn keep(&mut self, order: &Arc<DirOrder>) {
        let key = (order.dir, order.state());
        if self.snapshots.get(&key).is_some() {
            return;
        }
        self.bytes += order.bytes();
        self.snapshots.put(key, order.clone());
        while self.bytes > SNAPSHOTS_BYTES && self.snapshots.len() > 1 {
            let Some((_, oldest)) = self.snapshots.pop_lru() else { return };
            self.bytes -= oldest.bytes();
        }
    }
}

impl DirHandles {
    pub fn new(epoch: u32) -> Self {
        let open = OpenDirs { next: 0, by_handle: HashMap::new(), snapshots: LruCache::unbounded(), bytes: 0 };
        Self { epoch, open: Mutex::new(open) }
    }

    /// Returns a handle for a directory that was opened.
    pub fn insert(&self) -> FileHandle {
        let mut open = self.open.lock();
        let epoch = u64::from(self.epoch) << EPOCH_SHIFT;
        if open.by_handle.len() >= OPEN_MAX {
            return FileHandle(epoch);
        }
        loop {
            open.next = open.next.wrapping_add(1);
            let handle = epoch | u64::from(open.next);
            if open.next != 0 && !open.by_handle.contains_key(&handle) {
                open.by_handle.insert(handle, OpenDir::default());
                return FileHandle(handle);
            }
        }
    }

    pub fn remove(&self, handle: FileHandle) {
        let mut open = self.open.lock();
        let Some(snapshot) = open.by_handle.remove(&handle.0).and_then(|dir| dir.snapshot.upgrade()) else { return };
        let key = (snapshot.dir, snapshot.state());
        // Each handle holds a weak reference: with none left, no other handle reads this snapshot.
        if Arc::weak_count(&snapshot) == 0 {
            open.drop_snapshot(&key);
        }
    }

    /// Returns the snapshot from which `ino` is read at `offset`.
    async fn snapshot(&self, overlay: &Overlay, ino: Ino, handle: FileHandle, offset: u64) -> Result<Arc<DirOrder>> {
        if let Some(snapshot) = self.known(handle, offset) {
            return Ok(snapshot);
        }
        let shared = |state| self.open.lock().snapshots.get(&(ino, state)).cloned();
        let snapshot = overlay.dir_order(ino, shared).await?;
        let mut open = self.open.lock();
        if let Some(dir) = open.by_handle.get_mut(&handle.0) {
            dir.snapshot = Arc::downgrade(&snapshot);
            open.keep(&snapshot);
        }
        Ok(snapshot)
    }

    fn known(&self, handle: FileHandle, offset: u64) -> Option<Arc<DirOrder>> {
        let mut open = self.open.lock();
        if handle.0 as u32 != 0 && open.by_handle.len() < OPEN_MAX {
            // A previous process issued this handle. Its reader continues, and closes it eventually.
            open.by_handle.entry(handle.0).or_default();
        }
        let dir = open.by_handle.get_mut(&handle.0)?;
        let again = std::mem::replace(&mut dir.started, true) && offset == 0;
        let snapshot = dir.snapshot.upgrade().filter(|_| !again)?;
        open.snapshots.promote(&(snapshot.dir, snapshot.state()));
        Some(snapshot)
    }

    fn begin_part(&self, handle: FileHandle, offset: u64) -> ListingPart {
        let fill = match offset {
            0 => Some(CacheFill::default()),
            _ => self.open.lock().by_handle.get(&handle.0).and_then(|dir| dir.fill).filter(|fill| fill.at == offset),
        };
        ListingPart { fill, is_empty: true }
    }

    /// Returns whether the kernel's pages of the directory must be dropped before the answer.
    fn end_part(&self, handle: FileHandle, part: &ListingPart) -> bool {
        if part.is_empty {
            return part.fill.is_none_or(CacheFill::ends_a_page);
        }
        if let Some(dir) = self.open.lock().by_handle.get_mut(&handle.0) {
            dir.fill = part.fill;
        }
        false
    }

    /// Fills `reply` with names. Returns whether the kernel's pages of the directory must be dropped before the answer.
    pub async fn read(
        &self,
        overlay: &Overlay,
        ino: Ino,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<bool> {
        let snapshot = self.snapshot(overlay, ino, handle, offset).await?;
        let mut part = self.begin_part(handle, offset);
        for (cookie, dot, name) in dots(&snapshot).into_iter().filter(|(cookie, ..)| *cookie > offset) {
            if reply.add(INodeNo(dot.0), cookie, FileType::Directory, name) {
                return Ok(self.end_part(handle, &part));
            }
            part.add(cookie, OsStr::new(name));
        }
        for placed in snapshot.after(offset) {
            let (kind, name) = (convert::file_type(placed.kind), OsStr::from_bytes(placed.name));
            if reply.add(INodeNo(placed.ino.0), placed.cookie, kind, name) {
                break;
            }
            part.add(placed.cookie, name);
        }
        Ok(self.end_part(handle, &part))
    }

    /// As [`Self::read`], with attributes. Each entry counts as a lookup, except `.` and `..`.
    pub async fn read_plus(
        &self,
        overlay: &Overlay,
        ino: Ino,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<bool> {
        let snapshot = self.snapshot(overlay, ino, handle, offset).await?;
        let mut part = self.begin_part(handle, offset);
        for (cookie, dot, name) in dots(&snapshot).into_iter().filter(|(cookie, ..)| *cookie > offset) {
            // The kernel uses only the inode number and the type of these two.
            if reply.add(INodeNo(dot.0), cookie, name, &Duration::ZERO, &convert::directory(dot), Generation(0)) {
                return Ok(self.end_part(handle, &part));
            }
            part.add(cookie, OsStr::new(name));
        }
        let mut filled = offset < DOT_DOT;
        for placed in snapshot.after(offset) {
            let entry = match overlay.placed_entry(&snapshot, placed).await {
                Ok(Some(entry)) => entry,
                Ok(None) => continue,
                // The entries so far are valid; the error is returned with the next part.
                Err(_) if filled => break,
                Err(error) => return Err(error),
            };
            let (attr, name) = (convert::attr(&entry.attr), OsStr::from_bytes(placed.name));
            let generation = Generation(overlay.generation(entry.attr.ino));
            if reply.add(attr.ino, placed.cookie, name, &entry.ttl, &attr, generation) {
                overlay.forget(entry.attr.ino, 1);
                break;
            }
            part.add(placed.cookie, name);
            filled = true;
        }
        Ok(self.end_part(handle, &part))
    }
}

fn dots(snapshot: &DirOrder) -> [(u64, Ino, &'static str); 2] {
    [(DOT, snapshot.dir, "."), (DOT_DOT, snapshot.parent, "..")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_pages_are_counted_as_it_fills_them() {
        let mut fill = CacheFill::default();
        let page = *PAGE_BYTES;
        // 24 and 5 bytes take 32.
        for number in 1..=page / 32 {
            assert!(!fill.ends_a_page());
            fill.add(number as u64, OsStr::new("f0000"));
        }
        assert!(fill.ends_a_page() && fill.at == (page / 32) as u64);
        fill.add(9, OsStr::new("a name of more than 8 bytes"));
        assert_eq!(fill, CacheFill { at: 9, in_page: 56 });
        for _ in 0..page / 32 - 2 {
            fill.add(9, OsStr::new("f"));
        }
        assert_eq!(fill.in_page, page - 8);
        fill.add(9, OsStr::new("f"));
        assert_eq!(fill.in_page, 32, "it did not fit");
    }
}
