//! What the programs share with each other and with the loader.

use core::ptr::read_volatile;

use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, PerCpuArray, RingBuf};

use crate::layout::{self, Call, DROPS, Drop, Key, Offsets, Record, Rule, SLOTS, Setting, Slot};

/// BPF_F_NO_PREALLOC: the memory grows with what is seen.
const AS_NEEDED: u32 = 1;

/// Filled in by the loader; the kernel takes it for constant.
#[unsafe(no_mangle)]
pub static SETTING: Setting = Setting {
    places: [Rule { root: 0, device: 0, everybody: 0 }; layout::MAX_PLACES],
    offsets: Offsets {
        mapping_host: 0,
        inode_sb: 0,
        inode_ino: 0,
        inode_generation: 0,
        inode_size: 0,
        inode_dentries: 0,
        inode_mode: 0,
        sb_dev: 0,
        dentry_alias: 0,
        dentry_parent: 0,
        dentry_inode: 0,
        dentry_name: 0,
        folio_flags: 0,
        folio_order: 0,
        large_folio_bit: 0,
        folio_index: 0,
        folio_mapping: 0,
        iocb_file: 0,
        iocb_pos: 0,
        iter_count: 0,
        iter_source: 0,
        file_inode: 0,
        task_start: 0,
        task_pid: 0,
        task_tgid: 0,
        task_leader: 0,
        task_flags: 0,
        task_reads: 0,
        task_writes: 0,
        task_files: 0,
        files_table: 0,
        table_files: 0,
        file_pos: 0,
        regs_number: 0,
        regs_first: 0,
        regs_third: 0,
        regs_fourth: 0,
        call_read: 0,
        call_pread: 0,
        mapping_pages: 0,
        node_shift: 0,
        node_slots: 0,
        mapping_areas: 0,
        node_left: 0,
        node_right: 0,
        area_node: 0,
        area_first_page: 0,
        area_start: 0,
        area_end: 0,
    },
    ignored: 0,
    last_is_beyond: 0,
    fills_are_reads: 0,
    maps_folios: 0,
    reserved: 0,
};

macro_rules! setting {
    ($($field:tt)+) => {
        unsafe { core::ptr::read_volatile(core::ptr::addr_of!(crate::maps::SETTING.$($field)+)) }
    };
}
macro_rules! offset {
    ($field:ident) => {
        crate::maps::setting!(offsets.$field)
    };
}
pub(crate) use {offset, setting};

#[map]
pub static RECORDS: HashMap<Key, Record> = HashMap::with_max_entries(262_144, AS_NEEDED);
#[map]
pub static CPU: PerCpuArray<[Slot; SLOTS]> = PerCpuArray::with_max_entries(1, 0);
#[map]
pub static CALLS: Array<Call> = Array::with_max_entries(layout::CALLS, 0);
#[map]
pub static TOUCHES: RingBuf = RingBuf::with_byte_size(layout::RING_BYTES, 0);
#[map]
pub static NUMBERS: Array<u64> = Array::with_max_entries(layout::NUMBERS, 0);
#[map]
static DROPPED: PerCpuArray<[u64; DROPS]> = PerCpuArray::with_max_entries(1, 0);
/// Processes that belong to a job because they, or the processes that forked them, were named.
#[map]
pub static TASKS: HashMap<u32, u32> = HashMap::with_max_entries(65_536, AS_NEEDED);
/// cgroups of version 2 that are a job, by the number of their directory's inode.
#[map]
pub static CGROUPS: HashMap<u64, u32> = HashMap::with_max_entries(4096, AS_NEEDED);

#[inline(always)]
pub fn dropped(why: Drop) {
    if let Some(counts) = DROPPED.get_ptr_mut(0) {
        unsafe { (*counts)[why as usize] += 1 };
    }
}

/// A field of a kernel object whose type the verifier knows.
#[inline(always)]
pub fn load<T: Copy>(object: *const u8, offset: u32) -> T {
    unsafe { read_volatile(object.add(offset as usize).cast()) }
}
