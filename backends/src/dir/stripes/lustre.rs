//! Lustre's layout, as the extended attribute `lustre.lov` has it (`lustre_user.h`): no library is asked.

use std::ffi::CStr;

use crate::{Layout, Stripe};

use super::{u16_at, u32_at, u64_at};

pub(super) const XATTR: &CStr = c"lustre.lov";
/// The longest value that the kernel hands out.
pub(super) const XATTR_MAX_BYTES: usize = 65_536;

/// One stripe for all of the file; the newer ones name a pool of targets, too.
const PLAIN: u32 = 0x0bd1_0bd0;
const WITH_POOL: u32 = 0x0bd3_0bd0;
const WITH_POOL_AND_TARGETS: u32 = 0x0bd5_0bd0;
/// Several stripes, each for a part of the file.
const COMPOSITE: u32 = 0x0bd6_0bd0;

/// Where a plain layout has what.
mod plain {
    pub(super) const PATTERN: usize = 4;
    pub(super) const CHUNK_BYTES: usize = 24;
    pub(super) const TARGETS: usize = 28;
    pub(super) const POOL: usize = 32;
    pub(super) const POOL_BYTES: usize = 16;
}

/// Where a composite layout and each of its entries have what.
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

/// An entry of a mirror that is behind the others.
const STALE: u32 = 0x1;
/// An entry that has targets: the file has grown into it.
const INSTANTIATED: u32 = 0x10;
/// The bits of an entry's number that tell its mirror.
const MIRROR: u32 = 0x7fff_0000;
/// Round-robin over targets, which may have several stripes each.
const RAID0: u32 = 0x1;
const OVERSTRIPED: u32 = 0x200;
/// Bits that say something of the file's state and nothing of where it lies.
const STATE: u32 = 0xffff_0000;

/// Chunks are multiples of this.
const CHUNK_UNIT_BYTES: u32 = 64 << 10;
/// The most stripes that a file may have. A directory may say 65,535: as many as there are targets.
const MAX_TARGETS: u32 = 2000;

/// What the attribute says of a file, or of new files in a directory. Of a composite layout: where most of a big file
/// lies, which is the last part that it has grown into.
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
            // Lustre allows no other names.
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
    (stripe.is_some() || storage_pool.is_some()).then_some(Layout { stripe, storage_pool })
}

/// The part of a composite layout that begins last, of the first mirror that is up to date; of those that have targets
/// if any has.
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
