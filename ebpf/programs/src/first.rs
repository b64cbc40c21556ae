//! First touches: whether the file is one that is watched, its record, and its path for the ring.

use core::ptr::{read_volatile, write_volatile};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::SeqCst;

use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::{
    bpf_ktime_get_ns, bpf_probe_read_kernel_str, bpf_ringbuf_output, bpf_ringbuf_query,
};
use aya_ebpf::macros::map;
use aya_ebpf::maps::PerCpuArray;

use crate::layout::{
    Count, Drop, FINEST_SHIFT, Key, MAP_BITS, MAP_WORDS, MAX_DEPTH, MAX_PLACES, NAME_BYTES, NAMES_BYTES, NEXT_RANK,
    NO_JOB, RING_WAKES, Record, TOUCH_HEADER_BYTES, Touch, WAYS,
};
use crate::maps::{NUMBERS, RECORDS, TOUCHES, dropped, load, offset, setting};

const S_IFMT: u16 = 0o170000;
const S_IFREG: u16 = 0o100000;

/// Where things are put together: the stack is too small for them.
#[map]
static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

#[repr(C)]
#[derive(Clone, Copy)]
struct Scratch {
    touch: Touch,
    /// One name more than is told: a name is copied whole, wherever it begins.
    names: [u8; NAMES_BYTES + NAME_BYTES],
    record: Record,
    /// The directories that are looked for; 0 is none's number.
    roots: [u64; MAX_PLACES],
    takes_all: u64,
    /// Bytes of `names` that are used.
    names_len: u32,
}

/// The grain of the bitmap of a record; the record is made where there is none. 0: touches of this file do not count.
#[inline(always)]
pub fn shift_of(key: &Key, inode: *const u8, size: u64, tgid: u32) -> u32 {
    if let Some(record) = RECORDS.get_ptr(key) {
        return unsafe { (*record).shift };
    }
    let mode: u16 = load(inode, offset!(inode_mode));
    if mode & S_IFMT != S_IFREG {
        return 0;
    }
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else { return 0 };
    let scratch = unsafe { &mut *scratch };
    let Some(names_len) = look_up(key, inode, scratch) else { return 0 };
    let Some(rank) = make(&mut scratch.record, size) else { return 0 };
    let shift = scratch.record.shift;
    if RECORDS.insert(key, &scratch.record, 1).is_err() {
        // Another CPU was first, or the table is full.
        return match RECORDS.get_ptr(key) {
            Some(record) => unsafe { (*record).shift },
            None => {
                dropped(Drop::Records);
                0
            }
        };
    }
    scratch.touch = Touch { key: *key, rank, tgid, names_len };
    let len = TOUCH_HEADER_BYTES as u64 + (names_len as u64 & (NAMES_BYTES as u64 - 1));
    let from = (&raw mut scratch.touch).cast();
    let ring = (&raw const TOUCHES).cast_mut().cast();
    // A wake-up costs more than all the rest.
    let used = unsafe { bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA.into()) };
    let wake = if used < RING_WAKES.into() { BPF_RB_NO_WAKEUP } else { BPF_RB_FORCE_WAKEUP };
    if unsafe { bpf_ringbuf_output(ring, from, len, wake.into()) } != 0 {
        dropped(Drop::Ring);
    }
    shift
}

/// Whether the file lies in a place that is watched for this job. Puts its names into `scratch`, from the file up to the
/// place's directory, and returns how many bytes they are.
///
/// What was found out is kept in memory and not in variables: else the verifier would follow every combination.
#[inline(always)]
fn look_up(key: &Key, inode: *const u8, scratch: &mut Scratch) -> Option<u32> {
    unsafe { write_volatile(&mut scratch.takes_all, 0) };
    for place in 0..MAX_PLACES {
        let mut root = 0;
        if setting!(places[place].device) == key.device && (key.job != NO_JOB || setting!(places[place].everybody) != 0)
        {
            root = setting!(places[place].root);
            if root == 0 {
                unsafe { write_volatile(&mut scratch.takes_all, 1) };
            }
        }
        unsafe { write_volatile(&mut scratch.roots[place], root) };
    }
    unsafe { write_volatile(&mut scratch.names_len, 0) };
    let first: u64 = load(inode, offset!(inode_dentries));
    // Without one it has no name any more.
    if first != 0 {
        let mut dentry = first.wrapping_sub(offset!(dentry_alias) as u64);
        for _ in 0..MAX_DEPTH {
            let parent: u64 = field(dentry, offset!(dentry_parent))?;
            if parent == dentry {
                break;
            }
            let name: u64 = field(dentry, offset!(dentry_name))?;
            // Verifiers before Linux 6.9 must see the bound right here, where the compiler would leave it out if it could.
            let at = unsafe { read_volatile(&scratch.names_len) } & (NAMES_BYTES as u32 - 1);
            let into = unsafe { scratch.names.as_mut_ptr().add(at as usize) };
            let copied = unsafe { bpf_probe_read_kernel_str(into.cast(), NAME_BYTES as u32, name as *const _) };
            let end = at + (copied as u32 & (2 * NAME_BYTES as u32 - 1));
            if end >= NAMES_BYTES as u32 {
                break;
            }
            unsafe { write_volatile(&mut scratch.names_len, end) };
            let directory: u64 = field(parent, offset!(dentry_inode))?;
            let ino: u64 = field(directory, offset!(inode_ino))?;
            for place in 0..MAX_PLACES {
                if unsafe { read_volatile(&scratch.roots[place]) } == ino {
                    return Some(end);
                }
            }
            dentry = parent;
        }
    }
    let len = unsafe { read_volatile(&scratch.names_len) };
    if unsafe { read_volatile(&scratch.takes_all) } != 0 { Some(len) } else { None }
}

#[inline(always)]
fn field(object: u64, offset: u32) -> Option<u64> {
    unsafe { bpf_probe_read_kernel((object + offset as u64) as *const u64) }.ok()
}

/// Makes a record of no touches yet, and returns its rank.
#[inline(always)]
fn make(record: &mut Record, size: u64) -> Option<u64> {
    let mut shift = FINEST_SHIFT;
    while shift < 48 && size > (MAP_BITS as u64) << shift {
        shift += 1;
    }
    // Relaxed would be an addition that gives nothing back: LLVM takes the sum for the value before it.
    let rank = unsafe { AtomicU64::from_ptr(NUMBERS.get_ptr_mut(NEXT_RANK)?) }.fetch_add(1, SeqCst);
    record.first_ns = unsafe { bpf_ktime_get_ns() };
    record.last_jiffies = 0;
    record.rank = rank;
    record.size = size;
    record.ways = [Count { calls: 0, bytes: 0 }; WAYS];
    record.read = [0; MAP_WORDS];
    record.written = [0; MAP_WORDS];
    record.shift = shift;
    record.reserved = 0;
    Some(rank)
}
