//! A CPU's slots: what is counted before it is added to the records.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_jiffies64};

use crate::first;
use crate::layout::{self, Count, EPOCH, Key, MAP_BITS, MAP_WORDS, SLOTS, Slot, WAYS, Way};
use crate::maps::{CALLS, CPU, NUMBERS, RECORDS, load, offset, setting};
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
    let Some(epoch) = NUMBERS.get(EPOCH) else { return };
    let epoch = *epoch as u32;
    let Some(slots) = CPU.get_ptr_mut(0) else { return };
    let task = unsafe { bpf_get_current_task_btf() }.cast::<u8>().cast_const();
    let pid: u32 = load(task, offset!(task_pid));
    let at = ((inode as u64 >> 9) ^ (pid as u64)) as usize & (SLOTS - 1);
    let slot = unsafe { &mut *slots.cast::<Slot>().add(at) };
    // Each is read right where it is compared: there are few registers.
    let same = slot.inode == inode as u64
        && slot.task == pid
        && slot.epoch == epoch
        && slot.key.device == device
        && slot.task_start == load::<u64>(task, offset!(task_start))
        && slot.key.ino == load::<u64>(inode, offset!(inode_ino))
        && slot.key.generation == load::<u32>(inode, offset!(inode_generation));
    if !same {
        slot.changes_end += 1;
        add_to_record(slot);
        take(slot, inode, task, device, size);
        slot.epoch = epoch;
    }
    if slot.shift == 0 {
        return;
    }
    slot.last_jiffies = unsafe { bpf_jiffies64() };
    let mut from = from;
    if matches!(way, Way::Read | Way::Fill) {
        let Some(last) = CALLS.get_ptr_mut(pid & (layout::CALLS - 1)) else { return };
        let last = unsafe { &mut *last };
        if last.task_start != slot.task_start || last.task != pid {
            last.task_start = slot.task_start;
            last.task = pid;
            last.inode = 0;
            last.fill_inode = 0;
        }
        if matches!(way, Way::Fill) {
            read::fills(last, task, inode as u64, from, until);
        } else if read::goes_on(last, inode as u64, load(task, offset!(task_reads)), from, until) {
            return;
        } else {
            from = read::begin(last, task, from, until, wanted);
            if from == wanted {
                return;
            }
        }
    }
    let mut bytes = until - from;
    if matches!(way, Way::Map) {
        // A page that is not there is told twice, with those around it and alone, and the pages around it at each fault.
        if from >= slot.mapped_from && until <= slot.mapped_until {
            return;
        }
        let both_from = if from > slot.mapped_from { from } else { slot.mapped_from };
        let both_until = if until < slot.mapped_until { until } else { slot.mapped_until };
        if both_from < both_until {
            bytes -= both_until - both_from;
        }
        slot.mapped_from = from;
        slot.mapped_until = until;
    }
    let count = &mut slot.ways[way as usize & 7];
    count.calls += 1;
    count.bytes += bytes;
    if matches!(way, Way::Fill) {
        if setting!(fills_are_reads) != 0 && from < size {
            let until = if until < size { until } else { size };
            let count = &mut slot.ways[Way::Read as usize];
            count.calls += 1;
            count.bytes += until - from;
            mark(&mut slot.read, slot.shift, from, until);
        }
    } else {
        mark(if writes { &mut slot.written } else { &mut slot.read }, slot.shift, from, until);
    }
}

/// Gives a slot to a file and a task.
#[inline(always)]
fn take(slot: &mut Slot, inode: *const u8, task: *const u8, device: u32, size: u64) {
    let tgid: u32 = load(task, offset!(task_tgid));
    let key = Key {
        job: task::job(tgid),
        device,
        ino: load(inode, offset!(inode_ino)),
        generation: load(inode, offset!(inode_generation)),
        reserved: 0,
    };
    let shift = if task::is_ignored() { 0 } else { first::shift_of(&key, inode, size, tgid) };
    slot.key = key;
    slot.inode = inode as u64;
    slot.task_start = load(task, offset!(task_start));
    slot.task = load(task, offset!(task_pid));
    slot.ways = [Count { calls: 0, bytes: 0 }; WAYS];
    slot.read = [0; MAP_WORDS];
    slot.written = [0; MAP_WORDS];
    slot.mapped_from = 0;
    slot.mapped_until = 0;
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
    // Most reads are of one part, and this must cost little.
    if first == last {
        map[(first >> 6) as usize & (MAP_WORDS - 1)] |= 1 << (first & 63);
        return;
    }
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

/// Adds what the slot has counted to the record. If the record was given up meanwhile, the counts are not needed.
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
