//! The programs of the observer: what runs in the kernel at each touch of a page.
//!
//! Most touches are of files that are not watched, or of parts that were touched before; both must cost next to
//! nothing. So each program first compares the device; then looks into the CPU's own slots, where a file that the same
//! task touched before has its counters and its bitmap; and only then takes the way through the maps.
#![no_std]
#![allow(static_mut_refs)]

mod first;
mod folio;
#[path = "../../src/layout.rs"]
mod layout;
mod maps;
mod read;
mod slot;
mod task;
mod touch;

use aya_ebpf::macros::btf_tracepoint;
use aya_ebpf::programs::BtfTracePointContext;

use layout::{MEASURED, Way};

/// mm_filemap_get_pages(mapping, index, last_index): a read through the page cache wants these pages.
#[btf_tracepoint(function = "mm_filemap_get_pages")]
pub fn get_pages(ctx: BtfTracePointContext) -> i32 {
    let mapping: *const u8 = ctx.arg(0);
    let last: u64 = ctx.arg(2);
    let until = last + 1 - u64::from(maps::setting!(last_is_beyond));
    touch::pages(mapping, ctx.arg(1), until, Way::Read);
    0
}

/// Of the same, by the thread that loads the programs, which stands for the process that is ignored: how the kernel
/// counts. Other threads of that process may read just then.
#[btf_tracepoint(function = "mm_filemap_get_pages")]
pub fn measure(ctx: BtfTracePointContext) -> i32 {
    let (first, last): (u64, u64) = (ctx.arg(1), ctx.arg(2));
    if task::thread() == maps::setting!(ignored) {
        if let Some(number) = maps::NUMBERS.get_ptr_mut(MEASURED) {
            unsafe { *number = last - first + 1 };
        }
    }
    0
}

/// mm_filemap_map_pages(mapping, start, end): pages of the cache are mapped, those around a fault included. The end is
/// the last of them that were asked for. A large folio is mapped as a whole if it ends a page before the file does.
#[btf_tracepoint(function = "mm_filemap_map_pages")]
pub fn map_pages(ctx: BtfTracePointContext) -> i32 {
    let mapping: *const u8 = ctx.arg(0);
    touch::mapped(mapping, ctx.arg(1), ctx.arg(2), 1);
    0
}

/// mm_filemap_fault(mapping, index): a page is mapped that was not in the cache, or that was not to be had there at once.
/// A large folio is mapped as a whole if all of it is within the file.
#[btf_tracepoint(function = "mm_filemap_fault")]
pub fn fault(ctx: BtfTracePointContext) -> i32 {
    let mapping: *const u8 = ctx.arg(0);
    let index: u64 = ctx.arg(1);
    touch::mapped(mapping, index, index, 0);
    0
}

/// mm_filemap_add_to_page_cache(folio): pages came into the cache.
#[btf_tracepoint(function = "mm_filemap_add_to_page_cache")]
pub fn add_page(ctx: BtfTracePointContext) -> i32 {
    touch::added(ctx.arg(0));
    0
}

/// writeback_dirty_folio(folio, mapping): a page became dirty.
#[btf_tracepoint(function = "writeback_dirty_folio")]
pub fn dirty_folio(ctx: BtfTracePointContext) -> i32 {
    touch::dirty(ctx.arg(0), ctx.arg(1));
    0
}

/// iomap_dio_rw_begin(iocb, iter, flags, done_before): direct I/O begins.
#[btf_tracepoint(function = "iomap_dio_rw_begin")]
pub fn direct(ctx: BtfTracePointContext) -> i32 {
    touch::direct(ctx.arg(0), ctx.arg(1));
    0
}

/// sched_process_fork(parent, child).
#[btf_tracepoint(function = "sched_process_fork")]
pub fn fork(ctx: BtfTracePointContext) -> i32 {
    task::forked(ctx.arg(0), ctx.arg(1));
    0
}

/// sched_process_exit(task, group_dead): the second argument is new, and not needed.
#[btf_tracepoint(function = "sched_process_exit")]
pub fn exit(ctx: BtfTracePointContext) -> i32 {
    task::exited(ctx.arg(0));
    0
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // A program that could panic would not pass the verifier.
    loop {}
}

/// Some helpers are for programs under the GPL alone, which is one of the two that these are under.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
