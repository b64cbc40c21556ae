//! Shared by the programs in the kernel and the loader: the records, and the numbers that the loader fills in.
//!
//! This file is compiled on both sides: by `programs/src/lib.rs` for the kernel, and as a module of this crate.

/// Parts that the bitmap of a record divides a file into.
pub const MAP_BITS: u32 = 256;
/// Words of the bitmap.
pub const MAP_WORDS: usize = MAP_BITS as usize / 64;
/// The finest grain of the bitmap, as a power of two in bytes: 64 KiB, which is what a page fault maps at most.
pub const FINEST_SHIFT: u32 = 16;
/// Tasks whose last reads are kept: by the lowest bits of their numbers.
pub const CALLS: u32 = 8192;
/// The most places that one observer watches.
pub const MAX_PLACES: usize = 4;
/// Files that each CPU remembers, so that a repeated read needs no map lookup.
pub const SLOTS: usize = 64;
/// How many directories upwards the root of a place is searched, and names are reported.
pub const MAX_DEPTH: usize = 32;
/// Bytes of all reported names of a path, with a zero after each.
pub const NAMES_BYTES: usize = 4096;
/// The longest name of a file, including its zero.
pub const NAME_BYTES: usize = 256;
/// The job of touches that no rule assigns to a job.
pub const NO_JOB: u32 = 0;

/// Identifies the touches of one file by one job.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub job: u32,
    /// In the format of [`crate::WatchedPlace::device`].
    pub device: u32,
    pub ino: u64,
    pub generation: u32,
    pub reserved: u32,
}

/// How bytes are reached.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// read, pread, readv, io_uring, sendfile, splice, copy_file_range: through the page cache.
    Read = 0,
    /// Pages of a mapping.
    Map = 1,
    /// O_DIRECT.
    DirectRead = 2,
    /// Pages of the page cache that became dirty, by any call or through a mapping.
    Write = 3,
    /// O_DIRECT.
    DirectWrite = 4,
    /// Pages that were added to the page cache: those read from a disk or from the daemon, also by readahead, and
    /// newly written ones.
    Fill = 5,
}

pub const WAYS: usize = 6;

/// The counts of one way.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// A splice, or a read by io_uring, that ends where the one before ended counts as the rest of that one.
    pub calls: u64,
    /// Page-grained, and never beyond the end of the file.
    pub bytes: u64,
}

/// The record of the touches of one key.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Monotonic clock, ns.
    pub first_ns: u64,
    /// Of the last counted touch: the 64-bit jiffies of the kernel.
    pub last_jiffies: u64,
    /// Ascending in the order of first touches of the observer.
    pub rank: u64,
    /// The file's size at the first touch, bytes.
    pub size: u64,
    /// By [`Way`].
    pub ways: [Count; WAYS],
    /// Parts that were read or mapped, each of `1 << shift` bytes; the last one also stands for all bytes beyond it.
    pub read: [u64; MAP_WORDS],
    pub written: [u64; MAP_WORDS],
    pub shift: u32,
    pub reserved: u32,
}

/// The counts of a CPU since it last added them to the record.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Slot {
    /// Incremented when the fields that follow change to another key; `changes_end` is incremented before that.
    pub changes: u64,
    pub key: Key,
    /// The address of the inode, which is searched first. 0: the slot is free.
    pub inode: u64,
    /// When the task began, ns since boot; together with its number it identifies one task.
    pub task_start: u64,
    pub task: u32,
    /// The epoch of the rules of attribution under which the slot was filled.
    pub epoch: u32,
    pub last_jiffies: u64,
    pub ways: [Count; WAYS],
    pub read: [u64; MAP_WORDS],
    pub written: [u64; MAP_WORDS],
    /// The pages of the last mapping.
    pub mapped_from: u64,
    pub mapped_until: u64,
    /// 0: touches of this file by this task do not count.
    pub shift: u32,
    pub reserved: u32,
    pub changes_end: u64,
}

/// The last read of a task. A long read is reported in pieces, and the task may move to another CPU in between.
///
/// The kernel does not report the first pages of a read that had to wait for a page from the disk.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Call {
    pub task_start: u64,
    pub inode: u64,
    /// The number of read calls that the task had made before.
    pub calls: u64,
    /// The range of the file that was left to read.
    pub from: u64,
    pub until: u64,
    /// The last range that the task brought into the cache: after how many calls to read or write, in which file,
    /// which bytes. Pages that were read since are not included.
    pub fill_calls: u64,
    pub fill_inode: u64,
    pub fill_from: u64,
    pub fill_until: u64,
    pub task: u32,
    pub reserved: [u32; 5],
}

/// Offsets of fields in the running kernel, in bytes: read from its BTF.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Offsets {
    pub mapping_host: u32,
    pub inode_sb: u32,
    pub inode_ino: u32,
    pub inode_generation: u32,
    pub inode_size: u32,
    pub inode_dentries: u32,
    pub inode_mode: u32,
    pub sb_dev: u32,
    pub dentry_alias: u32,
    pub dentry_parent: u32,
    pub dentry_inode: u32,
    pub dentry_name: u32,
    pub folio_flags: u32,
    /// For a large folio: its order is in the lowest byte. 0: the kernel has no folios.
    pub folio_order: u32,
    /// The bit of the flags that marks a large folio.
    pub large_folio_bit: u32,
    pub folio_index: u32,
    pub folio_mapping: u32,
    pub iocb_file: u32,
    pub iocb_pos: u32,
    pub iter_count: u32,
    pub iter_source: u32,
    pub file_inode: u32,
    pub task_start: u32,
    pub task_pid: u32,
    pub task_tgid: u32,
    pub task_leader: u32,
    pub task_flags: u32,
    /// The number of read calls of the task,
    pub task_reads: u32,
    /// and of write calls.
    pub task_writes: u32,
    pub task_files: u32,
    pub files_table: u32,
    pub table_files: u32,
    pub file_pos: u32,
    /// The arguments of a task's current system call, as the architecture stores them.
    pub regs_number: u32,
    pub regs_first: u32,
    pub regs_third: u32,
    pub regs_fourth: u32,
    /// Numbers of system calls with the length as third argument; the second has the position as fourth argument.
    pub call_read: u32,
    pub call_pread: u32,
    /// The page cache of a file, and a node of its tree.
    pub mapping_pages: u32,
    pub node_shift: u32,
    pub node_slots: u32,
    /// The tree of the mappings of a file into processes, a node of it,
    pub mapping_areas: u32,
    pub node_left: u32,
    pub node_right: u32,
    /// and a mapping, with its node: its first page, and its addresses.
    pub area_node: u32,
    pub area_first_page: u32,
    pub area_start: u32,
    pub area_end: u32,
}

/// One watched place.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Rule {
    /// The inode of the directory below which files count; 0: all files count.
    pub root: u64,
    /// 0: the rule is not used.
    pub device: u32,
    /// Touches that belong to no job count too.
    pub everybody: u32,
}

/// The values that the loader fills in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Setting {
    pub places: [Rule; MAX_PLACES],
    pub offsets: Offsets,
    /// The process whose own touches do not count.
    pub ignored: u32,
    /// Whether the last page in `mm_filemap_get_pages` is the one after the last page of the read.
    pub last_is_beyond: u32,
    /// The kernel lacks that hook: pages that are added to the page cache count as read.
    pub fills_are_reads: u32,
    /// A fault on a page of a large folio maps the whole folio: since Linux 6.18.
    pub maps_folios: u32,
    pub reserved: u32,
}

/// The structure has no padding.
const _: () = assert!(
    core::mem::size_of::<Setting>()
        == MAX_PLACES * core::mem::size_of::<Rule>() + core::mem::size_of::<Offsets>() + 5 * 4
);

/// The ring of first touches: some fifteen thousand of them. The loader's process maps it twice, end to end.
pub const RING_BYTES: u32 = 2 << 20;
/// The thread that waits for the ring is woken when so much of it is used.
pub const RING_WAKES: u32 = RING_BYTES / 4;

/// A first touch in the ring: the names follow, from the file upwards, with a zero after each.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Touch {
    pub key: Key,
    pub rank: u64,
    pub tgid: u32,
    pub names_len: u32,
}

pub const TOUCH_HEADER_BYTES: usize = core::mem::size_of::<Touch>();

/// The numbers that programs and loader share at run time: the rank of the next first touch,
pub const NEXT_RANK: u32 = 0;
/// the epoch of the rules of attribution,
pub const EPOCH: u32 = 1;
/// and, by the program `measure`, one more than the distance between the pages of a read of one page.
pub const MEASURED: u32 = 2;
pub const NUMBERS: u32 = 3;

/// Why a touch was not recorded.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// The table of records was full.
    Records = 0,
    /// The ring was full: the record exists, its path is missing.
    Ring = 1,
    /// The table of tasks was full: a child process belongs to no job.
    Tasks = 2,
}

pub const DROPS: usize = 3;
