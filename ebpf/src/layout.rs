//! What the programs in the kernel and the loader share: the records, and the numbers that the loader fills in.
//!
//! This file is compiled on both sides: by `programs/src/lib.rs` for the kernel, and as a module of this crate.

/// Parts that the bitmap of a record divides a file into.
pub const MAP_BITS: u32 = 256;
/// Words of the bitmap.
pub const MAP_WORDS: usize = MAP_BITS as usize / 64;
/// The finest grain of the bitmap, as a power of two in bytes: 64 KiB, which is what a page fault maps at most.
pub const FINEST_SHIFT: u32 = 16;
/// Tasks whose last reads are known: by the lowest bits of their numbers.
pub const CALLS: u32 = 8192;
/// Places that one observer watches at most.
pub const MAX_PLACES: usize = 4;
/// Files that each CPU remembers, so that what is read again costs no look into a map.
pub const SLOTS: usize = 64;
/// How many directories up the root of a place is looked for, and names are told.
pub const MAX_DEPTH: usize = 32;
/// Bytes of all names of a path that are told, with a zero after each.
pub const NAMES_BYTES: usize = 4096;
/// The longest name of a file, and its zero.
pub const NAME_BYTES: usize = 256;
/// The job of what no rule claims.
pub const NO_JOB: u32 = 0;

/// Whose touches of which file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub job: u32,
    /// As [`crate::Place::device`].
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
    /// Pages that came into the page cache: those read from a disk or from the daemon, ahead too, and those written
    /// anew.
    Fill = 5,
}

pub const WAYS: usize = 6;

/// What was counted of one way.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// A splice, or a read by io_uring, that ends where the one before ended is taken for the rest of it.
    pub calls: u64,
    /// Page-grained, and never beyond the end of the file.
    pub bytes: u64,
}

/// What is known of the touches of one key.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Monotonic clock, ns.
    pub first_ns: u64,
    /// Of the last touch that was counted: the jiffies of the kernel, 64 bits of them.
    pub last_jiffies: u64,
    /// Ascending in the order of first touches of the observer.
    pub rank: u64,
    /// The file's size when it was touched first, bytes.
    pub size: u64,
    /// By [`Way`].
    pub ways: [Count; WAYS],
    /// Parts that were read or mapped, each of `1 << shift` bytes; the last stands for all beyond it as well.
    pub read: [u64; MAP_WORDS],
    pub written: [u64; MAP_WORDS],
    pub shift: u32,
    pub reserved: u32,
}

/// What a CPU counted since it last added it to the record.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Slot {
    /// Grows when what follows is of another key from now on; `changes_end` grows before that.
    pub changes: u64,
    pub key: Key,
    /// The address of the inode: what is looked for first. 0: the slot is free.
    pub inode: u64,
    /// When the task began, ns since boot, and its number: together they are one task's alone.
    pub task_start: u64,
    pub task: u32,
    /// The rules of attribution that it was made under.
    pub epoch: u32,
    pub last_jiffies: u64,
    pub ways: [Count; WAYS],
    pub read: [u64; MAP_WORDS],
    pub written: [u64; MAP_WORDS],
    /// The pages that were mapped last.
    pub mapped_from: u64,
    pub mapped_until: u64,
    /// 0: touches of this file by this task do not count.
    pub shift: u32,
    pub reserved: u32,
    pub changes_end: u64,
}

/// The last read of a task. A long read is told in pieces, and in between the task may have gone to another CPU.
///
/// The kernel tells nothing of the first pages of a read that had to wait for a page on its way from the disk.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Call {
    pub task_start: u64,
    pub inode: u64,
    /// Read calls that the task had made before.
    pub calls: u64,
    /// Bytes of the file that were left to read.
    pub from: u64,
    pub until: u64,
    /// What the task brought into the cache last: after how many calls to read or write, of which file, which bytes.
    /// What was read since is not among them.
    pub fill_calls: u64,
    pub fill_inode: u64,
    pub fill_from: u64,
    pub fill_until: u64,
    pub task: u32,
    pub reserved: [u32; 5],
}

/// Where fields lie in the running kernel, in bytes: read from its BTF.
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
    /// Of a large folio: its order is in the lowest byte. 0: the kernel has no folios.
    pub folio_order: u32,
    /// The bit of the flags that says that a folio is large.
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
    /// How many calls to read it has made,
    pub task_reads: u32,
    /// and to write.
    pub task_writes: u32,
    pub task_files: u32,
    pub files_table: u32,
    pub table_files: u32,
    pub file_pos: u32,
    /// The arguments of the system call that a task is in, as the architecture keeps them.
    pub regs_number: u32,
    pub regs_first: u32,
    pub regs_third: u32,
    pub regs_fourth: u32,
    /// Numbers of the system calls whose length is their third argument; the position of the second of them is the fourth.
    pub call_read: u32,
    pub call_pread: u32,
    /// The page cache of a file, and a node of it.
    pub mapping_pages: u32,
    pub node_shift: u32,
    pub node_slots: u32,
    /// The tree of a file's mappings into processes, a node of it,
    pub mapping_areas: u32,
    pub node_left: u32,
    pub node_right: u32,
    /// and a mapping, with its node: its first page, and its addresses.
    pub area_node: u32,
    pub area_first_page: u32,
    pub area_start: u32,
    pub area_end: u32,
}

/// One place that is watched.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Rule {
    /// The inode of the directory below which files count; 0: all do.
    pub root: u64,
    /// 0: the rule is not used.
    pub device: u32,
    /// Touches of no job count too.
    pub everybody: u32,
}

/// What the loader fills in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Setting {
    pub places: [Rule; MAX_PLACES],
    pub offsets: Offsets,
    /// The process whose own touches do not count.
    pub ignored: u32,
    /// Whether the last page that `mm_filemap_get_pages` tells is the one after the last that is read.
    pub last_is_beyond: u32,
    /// The kernel does not have that one: what comes into the page cache counts as read.
    pub fills_are_reads: u32,
    /// Whoever maps a page of a large folio has all of it mapped: since Linux 6.18.
    pub maps_folios: u32,
    pub reserved: u32,
}

/// No byte of it is padding.
const _: () = assert!(
    core::mem::size_of::<Setting>()
        == MAX_PLACES * core::mem::size_of::<Rule>() + core::mem::size_of::<Offsets>() + 5 * 4
);

/// The ring of first touches: some fifteen thousand of them. The loader's process has it mapped twice, end to end.
pub const RING_BYTES: u32 = 2 << 20;
/// Who waits for the ring is woken when so much of it is used.
pub const RING_WAKES: u32 = RING_BYTES / 4;

/// A first touch, as the ring tells it: then follow the names, from the file up, with a zero after each.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Touch {
    pub key: Key,
    pub rank: u64,
    pub tgid: u32,
    pub names_len: u32,
}

pub const TOUCH_HEADER_BYTES: usize = core::mem::size_of::<Touch>();

/// The numbers that programs and loader share while they run: the rank of the next first touch,
pub const NEXT_RANK: u32 = 0;
/// how often the rules of attribution have changed,
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
    /// The ring was full: the record is there, its path is not.
    Ring = 1,
    /// The table of tasks was full: a child process belongs to no job.
    Tasks = 2,
}

pub const DROPS: usize = 3;
