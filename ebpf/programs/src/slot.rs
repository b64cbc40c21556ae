//! A CPU's slots: what is counted before it is added to the records.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_jiffies64};

use crate::first;
use crate::layout::{self, Count, EPOCH, Key, MAP_BITS, MAP_WORDS, SLOTS, Slot, WAYS, Way};
use crate::maps::{CALLS, CPU, NUMBERS, RECORDS, load, offset};
use crate::{read, task};

/// Bytes `from..until` of a file on a watched device. A read may want more than the file has.
#[inline(always)]
pub fn touched(inode: *const u8, device: u32, from: u64, wanted: u64, way: Way) {
    let size: u64 = load(inode, offset!(inode_size));
    let writes = matches!(way, Way::Write | Way::DirectWrite | Way::Fill);
    let until = if writes || wanted <= size { wanted } else { size };
    if until <= from {
        return;
    }
    let task = unsafe { bpf_get_current_task_btf() }.cast::<u8>().cast_const();
    let pid: u32 = load(task, offset!(task_pid));
    let start: u64 = load(task, offset!(task_start));
    let ino: u64 = load(inode, offset!(inode_ino));
    let generation: u32 = load(inode, offset!(inode_generation));
    let Some(epoch) = NUMBERS.get(EPOCH) else { return };
    let epoch = *epoch as u32;
    let Some(slots) = CPU.get_ptr_mut(0) else { return };
    let at = ((inode as u64 >> 9) ^ (pid as u64)) as usize & (SLOTS - 1);
    let slot = unsafe { &mut *slots.cast::<Slot>().add(at) };
    let same = slot.inode == inode as u64
        && slot.key.ino == ino
        && slot.key.generation == generation
        && slot.key.device == device
        && slot.task_start == start
        && slot.task == pid
        && slot.epoch == epoch;
    if !same {
        slot.changes_end += 1;
        add_to_record(slot);
        let key = Key { job: 0, device, ino, generation, reserved: 0 };
        take(slot, inode, task, Owner { key, start, pid, epoch }, size);
    }
    if slot.shift == 0 {
        return;
    }
    slot.last_jiffies = unsafe { bpf_jiffies64() };
    let mut from = from;
    if matches!(way, Way::Read | Way::Fill) {
        let Some(last) = CALLS.get_ptr_mut(pid & (layout::CALLS - 1)) else { return };
        let last = unsafe { &mut *last };
        if last.task_start != start || last.task != pid {
            last.task_start = start;
            last.task = pid;
            last.inode = 0;
            last.fill_inode = 0;
        }
        let calls: u64 = load(task, offset!(task_reads));
        if matches!(way, Way::Fill) {
            read::fills(last, inode as u64, calls, from, until);
        } else if read::goes_on(last, inode as u64, calls, from, until) {
            return;
        } else {
            from = read::begin(last, task, from, wanted);
        }
    }
    let count = &mut slot.ways[way as usize & 7];
    count.calls += 1;
    count.bytes += until - from;
    if !matches!(way, Way::Fill) {
        mark(if writes { &mut slot.written } else { &mut slot.read }, slot.shift, from, until);
    }
}

struct Owner {
    key: Key,
    start: u64,
    pid: u32,
    epoch: u32,
}

/// Gives a slot to a file and a task.
#[inline(always)]
fn take(slot: &mut Slot, inode: *const u8, task: *const u8, owner: Owner, size: u64) {
    let tgid: u32 = load(task, offset!(task_tgid));
    let mut key = owner.key;
    key.job = task::job(tgid);
    let shift = if task::is_ignored() { 0 } else { first::shift_of(&key, inode, size, tgid) };
    slot.key = key;
    slot.inode = inode as u64;
    slot.task_start = owner.start;
    slot.task = owner.pid;
    slot.epoch = owner.epoch;
    slot.ways = [Count { calls: 0, bytes: 0 }; WAYS];
    slot.read = [0; MAP_WORDS];
    slot.written = [0; MAP_WORDS];
    slot.shift = shift;
    slot.changes = slot.changes_end;
}

/// The part of the bitmap that `offset` lies in.
#[inline(always)]
fn part(offset: u64, shift: u32) -> u32 {
    let part = offset >> (shift & 63);
    if part >= MAP_BITS as u64 { MAP_BITS - 1 } else { part as u32 }
}

#[inline(always)]
fn mark(map: &mut [u64; MAP_WORDS], shift: u32, from: u64, until: u64) {
    let (first, last) = (part(from, shift), part(until - 1, shift));
    for word in 0..MAP_WORDS as u32 {
        let base = word * 64;
        if last < base || first >= base + 64 {
            continue;
        }
        let low = if first > base { first - base } else { 0 };
        let high = if last < base + 63 { last - base } else { 63 };
        let bits = (u64::MAX << (low & 63)) & (u64::MAX >> ((63 - high) & 63));
        map[word as usize] |= bits;
    }
}

/// Adds what the slot has counted to the record. Where that was given up meanwhile nobody wants it any more.
#[inline(always)]
fn add_to_record(slot: &Slot) {
    if slot.inode == 0 || slot.shift == 0 {
        return;
    }
    let Some(record) = RECORDS.get_ptr_mut(&slot.key) else { return };
    let record = unsafe { &mut *record };
    for way in 0..WAYS {
        add(&mut record.ways[way].calls, slot.ways[way].calls);
        add(&mut record.ways[way].bytes, slot.ways[way].bytes);
    }
    for word in 0..MAP_WORDS {
        or(&mut record.read[word], slot.read[word]);
        or(&mut record.written[word], slot.written[word]);
    }
    record.last_jiffies = slot.last_jiffies;
}

/// Other CPUs add to the same record.
#[inline(always)]
fn add(to: &mut u64, more: u64) {
    if more != 0 {
        unsafe { AtomicU64::from_ptr(to) }.fetch_add(more, Relaxed);
    }
}

#[inline(always)]
fn or(to: &mut u64, bits: u64) {
    if bits != 0 {
        unsafe { AtomicU64::from_ptr(to) }.fetch_or(bits, Relaxed);
    }
}
