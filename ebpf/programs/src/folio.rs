//! Which pages the kernel maps together with one: those of its large folio.
//!
//! The hooks that tell of mappings tell which pages were asked for, and the kernel maps all of a large folio at once if it
//! lies within the mapping and within one page table. The folio is looked for in the page cache, and the mapping among
//! those of the file, both as the kernel does, but without its locks: what is read may be changing. So all that is found
//! is compared with what it should be, and where it does not fit only the page counts.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_probe_read_kernel;

use crate::maps::offset;
use crate::touch::PAGE_SHIFT;

/// Entries of a node of the page cache: XA_CHUNK_SIZE.
const CHUNK: u64 = 64;
/// Levels of the page cache that are gone through: enough for a file of four terabytes.
const LEVELS: u32 = 5;
/// What one page table maps, as a power of two in bytes.
const TABLE_SHIFT: u32 = 21;

/// Pages, or none.
pub struct Pages {
    pub from: u64,
    pub until: u64,
}

const NONE: Pages = Pages { from: u64::MAX, until: 0 };

/// The folio of page `index`, if the kernel maps all of it with this page. `end`: where it must have ended.
#[inline(always)]
pub fn mapped_whole(mapping: u64, index: u64, end: u64) -> Pages {
    let pages = found(mapping, index);
    if pages.until == 0 || pages.until - pages.from == 1 || pages.until > end {
        return NONE;
    }
    if is_within_mapping(mapping, &pages) { pages } else { NONE }
}

/// The folio of page `index` in the page cache of a file; [`NONE`] where there is none.
#[inline(always)]
fn found(mapping: u64, index: u64) -> Pages {
    let mut entry = word(mapping, offset!(mapping_pages));
    for _ in 0..LEVELS {
        // xa_is_node()
        if entry & 3 != 2 || entry <= 4096 {
            break;
        }
        let node = entry - 2;
        let slots = node + offset!(node_slots) as u64;
        entry = word(slots + (index >> (byte(node, offset!(node_shift)) & 63)) % CHUNK * 8, 0);
        // A folio of several entries is in the first of them, which the other entries name.
        if entry & 3 == 2 && entry >> 2 < CHUNK {
            entry = word(slots + (entry >> 2) * 8, 0);
        }
    }
    // Numbers are what is left of pages that were given up.
    if entry == 0 || entry & 3 != 0 || word(entry, offset!(folio_mapping)) != mapping {
        return NONE;
    }
    let is_large = word(entry, offset!(folio_flags)) >> (offset!(large_folio_bit) & 63) & 1;
    let order = byte(entry, offset!(folio_order)) & 31;
    let from = word(entry, offset!(folio_index));
    let until = from + if is_large != 0 { 1 << order } else { 1 };
    if from <= index && index < until { Pages { from, until } } else { NONE }
}

/// Whether these pages lie within the mapping of the file, and in it in one page table. A file that is mapped several times
/// is taken to be mapped where they are: which of its mappings this is would be to be searched for.
#[inline(always)]
fn is_within_mapping(mapping: u64, pages: &Pages) -> bool {
    let node = word(mapping, offset!(mapping_areas));
    if node == 0 {
        return false;
    }
    if word(node, offset!(node_left)) | word(node, offset!(node_right)) != 0 {
        return true;
    }
    let area = node - offset!(area_node) as u64;
    let (first, start) = (word(area, offset!(area_first_page)), word(area, offset!(area_start)));
    let beyond = first + ((word(area, offset!(area_end)) - start) >> PAGE_SHIFT);
    if pages.from < first || pages.until > beyond {
        return false;
    }
    let address = start + ((pages.from - first) << PAGE_SHIFT);
    let last = address + ((pages.until - pages.from) << PAGE_SHIFT) - 1;
    address >> TABLE_SHIFT == last >> TABLE_SHIFT
}

/// 0 where nothing can be read.
#[inline(always)]
fn word(object: u64, offset: u32) -> u64 {
    let mut value = 0u64;
    unsafe { bpf_probe_read_kernel((&raw mut value).cast(), 8, (object + offset as u64) as *const c_void) };
    value
}

#[inline(always)]
fn byte(object: u64, offset: u32) -> u32 {
    let mut value = 0u8;
    unsafe { bpf_probe_read_kernel((&raw mut value).cast(), 1, (object + offset as u64) as *const c_void) };
    value as u32
}
