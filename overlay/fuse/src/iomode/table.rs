//! The opens that the kernel holds, in a file for the next process.
//!
//! The kernel keeps files open when the daemon dies, and refuses opens that are incompatible with them. So each change
//! of the counts is stored in shared memory before the kernel gets the reply. The file needs no sync: it is meaningless
//! once the mount is gone, so a reboot may lose it. It belongs on a tmpfs, such as /run.
//!
//! A page of it that the file system has no room for would end the process by SIGBUS at the first access. So a page is
//! allocated, by a call that can fail, before it is used.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

const MAGIC: u64 = u64::from_le_bytes(*b"fbiomod1");
/// How many inodes may be on record at once. The file is sparse: 16 MiB of address space, 64 B for each.
const SLOTS_MAX: usize = 1 << 18;

/// The unit in which the file is allocated. Slots lie in one page each.
const PAGE_BYTES: u64 = 4096;
/// The length of the file. It ends within a page.
const FILE_BYTES: u64 = size_of::<TableLayout>() as u64;

/// The opens of one inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenRecord {
    pub ino: u64,
    /// The content file that is registered as `backing`.
    pub content: u64,
    /// Backing id that is registered with the kernel; 0 for none.
    pub backing: u32,
    pub cached: u32,
    /// Opens in passthrough, and beside it.
    pub passthrough: u32,
    pub direct: u32,
    /// How many of the opens are for writing.
    pub writers: u32,
}

#[repr(C, align(64))]
struct OpenSlot {
    /// 0 for a free slot. Stored last when a slot is taken, first when it is given back.
    ino: AtomicU64,
    content: AtomicU64,
    backing: AtomicU32,
    cached: AtomicU32,
    passthrough: AtomicU32,
    direct: AtomicU32,
    writers: AtomicU32,
}

/// [`OpenTable::open`] reads its two words by their offsets, too.
#[repr(C, align(64))]
struct Header {
    magic: AtomicU64,
    /// Slots from this index on were never used.
    high_water: AtomicU64,
}

#[repr(C)]
struct TableLayout {
    header: Header,
    slots: [OpenSlot; SLOTS_MAX],
}

/// The slot of a record. Not `Clone`, since it is given back once.
#[derive(Debug)]
pub struct SlotId(usize);

pub struct OpenTable {
    map: NonNull<TableLayout>,
    slots: Mutex<SlotSupply>,
    file: File,
}

struct SlotSupply {
    free: Vec<usize>,
    /// The part of the file, from its start, that is allocated: whole pages, or all of it.
    allocated_bytes: u64,
}

// SAFETY: the mapping is only accessed through atomics and lives as long as the table.
unsafe impl Send for OpenTable {}
// SAFETY: as above.
unsafe impl Sync for OpenTable {}

impl OpenTable {
    /// Creates an empty table.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(FILE_BYTES)?;
        allocate(&file, 0)?;
        let table = Self::map(file, PAGE_BYTES)?;
        table.layout().header.magic.store(MAGIC, Ordering::Release);
        Ok(table)
    }

    /// Opens the table that a previous process left. Returns it with its records.
    pub fn open(path: &Path) -> io::Result<(Self, Vec<(SlotId, OpenRecord)>)> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != FILE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a table of open modes: wrong size"));
        }
        // Not by the mapping: the file may be another one, without any page.
        let word = |at| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).map(|()| u64::from_ne_bytes(bytes))
        };
        if word(0)? != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a table of open modes: wrong magic"));
        }
        let used = word(8)?.min(SLOTS_MAX as u64) as usize;
        let allocated_bytes = end_of(used).next_multiple_of(PAGE_BYTES).min(FILE_BYTES);
        // An older program left the last page to the first access.
        match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, allocated_bytes) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(e) => return Err(e.into()),
        }
        let table = Self::map(file, allocated_bytes)?;
        let mut records = Vec::new();
        for at in 0..used {
            match table.load(at) {
                OpenRecord { ino: 0, .. } => table.slots.lock().free.push(at),
                record => records.push((SlotId(at), record)),
            }
        }
        Ok((table, records))
    }

    /// Puts `record` into a free slot. Returns `None` if the table or its file system is full.
    pub fn insert(&self, record: &OpenRecord) -> Option<SlotId> {
        let at = {
            let mut slots = self.slots.lock();
            slots.free.pop().or_else(|| self.grow(&mut slots))?
        };
        let slot = SlotId(at);
        self.store(&slot, record);
        Some(slot)
    }

    /// Replaces the record in a slot that is taken.
    pub fn store(&self, slot: &SlotId, record: &OpenRecord) {
        let to = &self.layout().slots[slot.0];
        to.content.store(record.content, Ordering::Relaxed);
        to.backing.store(record.backing, Ordering::Relaxed);
        to.cached.store(record.cached, Ordering::Relaxed);
        to.passthrough.store(record.passthrough, Ordering::Relaxed);
        to.direct.store(record.direct, Ordering::Relaxed);
        to.writers.store(record.writers, Ordering::Relaxed);
        to.ino.store(record.ino, Ordering::Release);
    }

    pub fn remove(&self, slot: SlotId) {
        self.layout().slots[slot.0].ino.store(0, Ordering::Release);
        self.slots.lock().free.push(slot.0);
    }

    fn load(&self, at: usize) -> OpenRecord {
        let from = &self.layout().slots[at];
        OpenRecord {
            ino: from.ino.load(Ordering::Acquire),
            content: from.content.load(Ordering::Relaxed),
            backing: from.backing.load(Ordering::Relaxed),
            cached: from.cached.load(Ordering::Relaxed),
            passthrough: from.passthrough.load(Ordering::Relaxed),
            direct: from.direct.load(Ordering::Relaxed),
            writers: from.writers.load(Ordering::Relaxed),
        }
    }

    /// Takes the next slot that was never used.
    fn grow(&self, slots: &mut SlotSupply) -> Option<usize> {
        let high_water = &self.layout().header.high_water;
        let used = high_water.load(Ordering::Acquire) as usize;
        if used >= SLOTS_MAX {
            return None;
        }
        if end_of(used + 1) > slots.allocated_bytes {
            allocate(&self.file, slots.allocated_bytes).ok()?;
            slots.allocated_bytes = FILE_BYTES.min(slots.allocated_bytes + PAGE_BYTES);
        }
        high_water.store(used as u64 + 1, Ordering::Release);
        Some(used)
    }

    fn layout(&self) -> &TableLayout {
        // SAFETY: the mapping has the size of a layout, is aligned to a page, and all bit patterns are valid.
        unsafe { self.map.as_ref() }
    }

    fn map(file: File, allocated_bytes: u64) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses; nothing else refers to it.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<TableLayout>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(address.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { map, slots: Mutex::new(SlotSupply { free: Vec::new(), allocated_bytes }), file })
    }
}

impl Drop for OpenTable {
    fn drop(&mut self) {
        // SAFETY: the address and length of the mapping that `map` made; no reference outlives the table.
        unsafe { libc::munmap(self.map.as_ptr().cast(), size_of::<TableLayout>()) };
    }
}

/// Returns where the first `slots` slots end in the file.
fn end_of(slots: usize) -> u64 {
    (size_of::<Header>() + slots * size_of::<OpenSlot>()) as u64
}

/// Allocates a page that was never used, as far as it is in the file. On a tmpfs this copies 4 KiB of memory, as the first
/// access would.
fn allocate(file: &File, at: u64) -> io::Result<()> {
    let bytes = PAGE_BYTES.min(FILE_BYTES.saturating_sub(at));
    file.write_all_at(&[0; PAGE_BYTES as usize][..bytes as usize], at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_finds_what_this_one_stored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("modes");
        let table = OpenTable::create(&path).unwrap();
        let record =
            |ino| OpenRecord { ino, content: ino + 1, backing: 3, cached: 0, passthrough: 2, direct: 1, writers: 1 };
        let slots: Vec<_> = (1..=100).map(|ino| table.insert(&record(ino)).unwrap()).collect();
        for slot in slots.into_iter().take(50) {
            table.remove(slot);
        }
        let (again, records) = OpenTable::open(&path).unwrap();
        let mut found: Vec<_> = records.iter().map(|(_, record)| *record).collect();
        found.sort_by_key(|record| record.ino);
        assert_eq!(found, (51..=100).map(record).collect::<Vec<_>>());
        for ino in 1..=50 {
            again.insert(&record(ino)).unwrap();
        }
        assert_eq!(OpenTable::open(&path).unwrap().1.len(), 100);
        for ino in 101..=1000 {
            again.insert(&record(ino)).unwrap();
        }
        assert_eq!(OpenTable::open(&path).unwrap().1.len(), 1000);
    }

    #[test]
    fn a_table_without_room_for_another_page_takes_no_more_and_keeps_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("modes");
        let mut table = OpenTable::create(&path).unwrap();
        let record = |ino| OpenRecord { ino, ..OpenRecord::default() };
        // Writes of a descriptor that was opened for reading fail, as those to a full file system do.
        table.file = File::open(&path).unwrap();
        let mut slots: Vec<_> = (1..).map_while(|ino| table.insert(&record(ino))).collect();
        assert_eq!(slots.len(), (PAGE_BYTES as usize - size_of::<Header>()) / size_of::<OpenSlot>());
        assert_eq!(OpenTable::open(&path).unwrap().1.len(), slots.len());
        table.remove(slots.pop().unwrap());
        assert!(table.insert(&record(500)).is_some() && table.insert(&record(501)).is_none());
        table.file = OpenOptions::new().write(true).open(&path).unwrap();
        assert!(table.insert(&record(501)).is_some(), "there is room again");
    }

    #[test]
    fn a_table_with_all_slots_in_use_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("modes");
        let table = OpenTable::create(&path).unwrap();
        let record = |ino| OpenRecord { ino, ..OpenRecord::default() };
        let slots = (1..).map_while(|ino| table.insert(&record(ino))).count();
        assert_eq!(slots, SLOTS_MAX);
        for _ in 0..2 {
            assert_eq!(std::fs::metadata(&path).unwrap().len(), FILE_BYTES);
            assert_eq!(OpenTable::open(&path).unwrap().1.len(), SLOTS_MAX);
        }
    }

    #[test]
    fn something_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("modes");
        std::fs::write(&path, b"no table").unwrap();
        assert!(OpenTable::open(&path).is_err());
        File::create(&path).unwrap().set_len(size_of::<TableLayout>() as u64).unwrap();
        assert!(OpenTable::open(&path).is_err());
    }
}
