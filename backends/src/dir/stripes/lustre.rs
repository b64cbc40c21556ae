//! Lustre's layout, as stored in the extended attribute `lustre.lov` (`lustre_user.h`); no library is used.

use std::ffi::CStr;

use crate::{Layout, Stripe};

use super::{u16_at, u32_at, u64_at};

pub(super) const XATTR: &CStr = c"lustre.lov";
/// The longest value that the kernel returns.
pub(super) const XATTR_MAX_BYTES: usize = 65_536;

/// One stripe pattern for the whole file; the newer formats also name a pool of targets.
const PLAIN: u32 = 0x0bd1_0bd0;
const WITH_POOL: u32 = 0x0bd3_0bd0;
const WITH_POOL_AND_TARGETS: u32 = 0x0bd5_0bd0;
/// Several stripe patterns, each for a part of the file.
const COMPOSITE: u32 = 0x0bd6_0bd0;

/// Offsets in a plain layout.
mod plain {
    pub(super) const PATTERN: usize = 4;
    pub(super) const CHUNK_BYTES: usize = 24;
    pub(super) const TARGETS: usize = 28;
    pub(super) const POOL: usize = 32;
    pub(super) const POOL_BYTES: usize = 16;
}

/// Offsets in a composite layout and in each of its entries.
mod composite {
    pub(super) const ENTRIES: usize = 14;
    pub(super) const HEADER_BYTES: usize = 32;
    pub(super) const ENTRY_BYTES: usize = 48;
    pub(super) const ID: usize = 0;
    pub(super) const FLAGS: usize = 4;
    pub(super) const START: usize = 8;
    pub(super) const PART_OFFSET: usize = 24;
    pub(super) const PART_BYTES: usize = 28;
}

/// An entry of an outdated mirror.
const STALE: u32 = 0x1;
/// An entry with targets: the file has grown into it.
const INSTANTIATED: u32 = 0x10;
/// The bits of an entry's number that hold the number of its mirror.
const MIRROR: u32 = 0x7fff_0000;
/// Round-robin over targets, which may hold several stripes each.
const RAID0: u32 = 0x1;
const OVERSTRIPED: u32 = 0x200;
/// Bits for the file's state, not for its place.
const STATE: u32 = 0xffff_0000;

/// Chunks are multiples of this.
const CHUNK_UNIT_BYTES: u32 = 64 << 10;
/// The most stripes of a file. A directory may say 65,535: as many as there are targets.
const MAX_TARGETS: u32 = 2000;

/// The layout in the attribute of a file, or for new files in a directory. For a composite layout: the layout of the
/// last part that the file has grown into, which holds most of a big file.
pub(super) fn layout(value: &[u8]) -> Option<Layout> {
    match u32_at(value, 0)? {
        COMPOSITE => part(last_part(value)?),
        _ => part(value),
    }
}

fn part(value: &[u8]) -> Option<Layout> {
    let storage_pool = match u32_at(value, 0)? {
        PLAIN => None,
        WITH_POOL | WITH_POOL_AND_TARGETS => {
            let name = value.get(plain::POOL..plain::POOL + plain::POOL_BYTES)?;
            let name = name.split(|byte| *byte == 0).next()?;
            // Lustre allows no other characters in names.
            let sound = name.iter().all(|byte| byte.is_ascii_graphic());
            (sound && !name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
        }
        _ => return None,
    };
    let pattern = u32_at(value, plain::PATTERN)? & !STATE;
    let chunk_bytes = u32_at(value, plain::CHUNK_BYTES)?;
    let targets = u32::from(u16_at(value, plain::TARGETS)?);
    let sound = (pattern == RAID0 || pattern == RAID0 | OVERSTRIPED)
        && chunk_bytes != 0
        && chunk_bytes.is_multiple_of(CHUNK_UNIT_BYTES)
        && (1..=MAX_TARGETS).contains(&targets);
    let stripe = sound.then(|| Stripe { chunk_bytes: u64::from(chunk_bytes), targets });
    (stripe.is_some() || storage_pool.is_some()).then_some(Layout {
        stripe,
        storage_pool,
        is_storage_pool_untold: false,
    })
}

/// The last part of a composite layout, of the first up-to-date mirror; among the parts with targets if any part has
/// some.
fn last_part(value: &[u8]) -> Option<&[u8]> {
    let count = usize::from(u16_at(value, composite::ENTRIES)?);
    let entries = value.get(composite::HEADER_BYTES..)?.chunks_exact(composite::ENTRY_BYTES).take(count);
    let flags = |entry: &[u8]| u32_at(entry, composite::FLAGS).unwrap_or(STALE);
    let mirror = |entry: &[u8]| u32_at(entry, composite::ID).unwrap_or(0) & MIRROR;
    let current = entries.filter(|entry| flags(entry) & STALE == 0);
    let first = mirror(current.clone().next()?);
    let last = current
        .filter(|entry| mirror(entry) == first)
        .max_by_key(|entry| (flags(entry) & INSTANTIATED, u64_at(entry, composite::START)))?;
    let offset = u32_at(last, composite::PART_OFFSET)? as usize;
    let bytes = u32_at(last, composite::PART_BYTES)? as usize;
    value.get(offset..offset.checked_add(bytes)?)
}
