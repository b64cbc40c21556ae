//! What the hooks tell, as bytes of a file.

use crate::layout::{MAX_PLACES, Way};
use crate::maps::{load, offset, setting};
use crate::{folio, slot};

pub const PAGE_SHIFT: u32 = 12;

/// Pages `from..until` of a mapping.
#[inline(always)]
pub fn pages(mapping: *const u8, from: u64, until: u64, way: Way) {
    let inode: *const u8 = load(mapping, offset!(mapping_host));
    if inode.is_null() {
        return;
    }
    let device = device(inode);
    if is_watched(device) {
        slot::touched(inode, device, from << PAGE_SHIFT, until << PAGE_SHIFT, way);
    }
}

/// Pages `first..=last` of a mapping are mapped into a process, and with them the large folios that they lie in, if those
/// end `before_end` pages before the end of the file at least.
#[inline(always)]
pub fn mapped(mapping: *const u8, first: u64, last: u64, before_end: u64) {
    let inode: *const u8 = load(mapping, offset!(mapping_host));
    if inode.is_null() {
        return;
    }
    let device = device(inode);
    if !is_watched(device) {
        return;
    }
    let (mut from, mut until) = (first, last + 1);
    if setting!(maps_folios) != 0 {
        let size: u64 = load(inode, offset!(inode_size));
        let end = (size + (1 << PAGE_SHIFT) - 1) >> PAGE_SHIFT;
        let whole = folio::mapped_whole(mapping as u64, first, end - before_end);
        if whole.from < from {
            from = whole.from;
        }
        if whole.until > until {
            until = whole.until;
        } else {
            let whole = folio::mapped_whole(mapping as u64, last, end - before_end);
            if whole.until > until {
                until = whole.until;
            }
        }
    }
    slot::touched(inode, device, from << PAGE_SHIFT, until << PAGE_SHIFT, Way::Map);
}

#[inline(always)]
pub fn dirty(folio: *const u8, mapping: *const u8) {
    if mapping.is_null() {
        return;
    }
    of_folio(folio, mapping, Way::Write);
}

#[inline(always)]
pub fn added(folio: *const u8) {
    let mapping: *const u8 = load(folio, offset!(folio_mapping));
    if mapping.is_null() {
        return;
    }
    of_folio(folio, mapping, Way::Fill);
}

#[inline(always)]
fn of_folio(folio: *const u8, mapping: *const u8, way: Way) {
    let index: u64 = load(folio, offset!(folio_index));
    let mut order = 0;
    if offset!(folio_order) != 0 {
        let flags: u64 = load(folio, offset!(folio_flags));
        if flags >> (offset!(large_folio_bit) & 63) & 1 != 0 {
            order = load::<u8>(folio, offset!(folio_order)) & 31;
        }
    }
    pages(mapping, index, index + (1 << order), way);
}

#[inline(always)]
pub fn direct(iocb: *const u8, iter: *const u8) {
    let file: *const u8 = load(iocb, offset!(iocb_file));
    let inode: *const u8 = load(file, offset!(file_inode));
    let device = device(inode);
    if is_watched(device) {
        let from: u64 = load(iocb, offset!(iocb_pos));
        let count: u64 = load(iter, offset!(iter_count));
        let is_source: u8 = load(iter, offset!(iter_source));
        let way = if is_source != 0 { Way::DirectWrite } else { Way::DirectRead };
        slot::touched(inode, device, from, from + count, way);
    }
}

#[inline(always)]
fn device(inode: *const u8) -> u32 {
    let sb: *const u8 = load(inode, offset!(inode_sb));
    load(sb, offset!(sb_dev))
}

/// The devices of places are known when the program is loaded: the kernel leaves out the places that are not used.
#[inline(always)]
fn is_watched(device: u32) -> bool {
    for place in 0..MAX_PLACES {
        let watched = setting!(places[place].device);
        if watched != 0 && watched == device {
            return true;
        }
    }
    false
}
