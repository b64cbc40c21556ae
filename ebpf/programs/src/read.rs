//! What a read is, of which the kernel tells in pieces, and not always of the first.

use aya_ebpf::helpers::bpf_probe_read_kernel;
use aya_ebpf::helpers::generated::bpf_task_pt_regs;

use crate::layout::{self, Call};
use crate::maps::{CALLS, load, offset};

const PAGE: u64 = 1 << crate::touch::PAGE_SHIFT;
/// PF_IO_WORKER: a thread of io_uring, for what the one that asked for it would have had to wait for.
const IO_WORKER: u32 = 0x10;

/// Notes that the task brings bytes into the cache. A write does so too.
#[inline(always)]
pub fn fills(last: &mut Call, task: *const u8, inode: u64, from: u64, until: u64) {
    let calls = calls(task);
    let goes_on = last.fill_calls == calls && last.fill_inode == inode && last.fill_until == from;
    if !goes_on {
        last.fill_calls = calls;
        last.fill_inode = inode;
        last.fill_from = from;
    }
    last.fill_until = until;
}

/// Whether this is of a read that was counted already: it is told once for each batch of pages, with what is left of it.
#[inline(always)]
pub fn goes_on(last: &mut Call, inode: u64, calls: u64, from: u64, until: u64) -> bool {
    let same = last.calls == calls && last.until == until && last.from < from && last.inode == inode;
    last.inode = inode;
    last.calls = calls;
    last.until = until;
    last.from = from;
    same
}

/// Where a read begins whose first piece to be told of is `from..wanted`: the pages before it may have been read untold.
/// `wanted`: nowhere, it was counted already.
#[inline(always)]
pub fn begin(last: &mut Call, task: *const u8, from: u64, until: u64, wanted: u64) -> u64 {
    let begins = use_up(last, last.inode, calls(task), from, until);
    if load::<u32>(task, offset!(task_flags)) & IO_WORKER != 0 {
        return taken_over(last.inode, task, begins, from, until, wanted);
    }
    if begins < from {
        return begins;
    }
    let regs = unsafe { bpf_task_pt_regs(task.cast_mut().cast()) } as *const u8;
    if regs.is_null() {
        return from;
    }
    let number = load::<u64>(regs, offset!(regs_number)) as u32;
    if number != offset!(call_read) && number != offset!(call_pread) {
        return from;
    }
    let len: u64 = load(regs, offset!(regs_third));
    // It ends in the last of the pages.
    if len >= wanted || wanted - len >= from {
        return from;
    }
    let position = if number == offset!(call_pread) {
        Some(load(regs, offset!(regs_fourth)))
    } else {
        position(task, load(regs, offset!(regs_first)))
    };
    match position {
        Some(position) if position < from && position + len + PAGE > wanted => position & !(PAGE - 1),
        _ => from,
    }
}

/// The same of a read that a worker of io_uring goes on with: its process's first thread, if it was that one which asked
/// for it, may have brought the pages into the cache, and have read the first of them.
#[inline(always)]
fn taken_over(inode: u64, task: *const u8, begins: u64, from: u64, until: u64, wanted: u64) -> u64 {
    let process: u32 = load(task, offset!(task_tgid));
    let Some(asked) = CALLS.get_ptr_mut(process & (layout::CALLS - 1)) else { return begins };
    let asked = unsafe { &mut *asked };
    let Some(first) = field(task as u64, offset!(task_leader)) else { return begins };
    let Some(start) = field(first, offset!(task_start)) else { return begins };
    let (Some(reads), Some(writes)) = (field(first, offset!(task_reads)), field(first, offset!(task_writes))) else {
        return begins;
    };
    if asked.task != process || asked.task_start != start {
        return begins;
    }
    let filled = use_up(asked, inode, reads + writes, from, until);
    if asked.inode == inode && asked.calls == reads && asked.until == until && asked.from < from {
        return wanted;
    }
    if filled < begins { filled } else { begins }
}

/// Where a read of `from..until` begins by what was brought into the cache last, of which that is read then.
#[inline(always)]
fn use_up(call: &mut Call, inode: u64, calls: u64, from: u64, until: u64) -> u64 {
    if call.fill_inode != inode || call.fill_from >= until {
        return from;
    }
    let begins = call.fill_from;
    call.fill_from = until;
    if begins < from && call.fill_until >= from && call.fill_calls == calls { begins } else { from }
}

/// How many calls to read and to write the task has made.
#[inline(always)]
fn calls(task: *const u8) -> u64 {
    load::<u64>(task, offset!(task_reads)) + load::<u64>(task, offset!(task_writes))
}

/// The position of an open file.
#[inline(always)]
fn position(task: *const u8, descriptor: u64) -> Option<u64> {
    let files = field(task as u64, offset!(task_files))?;
    let table = field(files, offset!(files_table))?;
    let array = field(table, offset!(table_files))?;
    let file = field(array + (descriptor & 0xffff_ffff) * 8, 0)?;
    field(file, offset!(file_pos))
}

#[inline(always)]
fn field(object: u64, offset: u32) -> Option<u64> {
    unsafe { bpf_probe_read_kernel((object + offset as u64) as *const u64) }.ok()
}
