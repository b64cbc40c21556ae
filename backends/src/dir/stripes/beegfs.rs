//! BeeGFS' public ioctl interface (`uapi/beegfs_client.h` of its client), as far as it concerns layouts.
//!
//! `GET_STRIPEINFO` is as old as the interface. It returns chunk size and number of targets of an open file, which
//! the client has remembered since the open. `GETENTRYINFO_V2` is recent and asks the metadata server. Only it
//! returns the storage pool, by number: only the management service knows the names of storage pools.

use rustix::ioctl::opcode;

use crate::{Layout, Stripe};

use super::calls::IoctlRequest;
use super::{u16_at, u32_at};

const GROUP: u8 = b'f';

/// Pattern type, chunk size, number of targets, and two bytes of padding.
pub(super) const STRIPE_INFO_BYTES: usize = 12;
pub(super) const GET_STRIPE_INFO: IoctlRequest =
    IoctlRequest { opcode: opcode::read::<[u8; STRIPE_INFO_BYTES]>(GROUP, 25), bytes: STRIPE_INFO_BYTES };

pub(super) const ENTRY_INFO_BYTES: usize = 1944;
pub(super) const GET_ENTRY_INFO_V2: IoctlRequest =
    IoctlRequest { opcode: opcode::read_write::<[u8; ENTRY_INFO_BYTES]>(GROUP, 34), bytes: ENTRY_INFO_BYTES };

/// The name in the argument, including the terminating zero.
const NAME_BYTES: usize = 256;

/// Offsets in the answer.
mod at {
    pub(super) const ENTRY_ID: usize = 287;
    pub(super) const PATTERN: usize = 324;
    pub(super) const CHUNK_BYTES: usize = 328;
    pub(super) const STORAGE_POOL: usize = 332;
    /// For a directory: the number of targets of new files in it.
    pub(super) const DEFAULT_TARGETS: usize = 336;
    pub(super) const TARGETS: usize = 340;
    /// Not zero: only the identity above is filled in.
    pub(super) const RESULT: usize = 1940;
}

/// RAID0, RAID10 and buddy mirrors.
const PATTERNS: std::ops::RangeInclusive<u32> = 1..=3;
/// Chunk sizes are powers of two, at least this one.
const MIN_CHUNK_BYTES: u32 = 64 << 10;
/// The most targets that the metadata server gives a file.
const MAX_TARGETS: u32 = 256;

/// The answer of [`GET_STRIPE_INFO`].
pub(super) fn stripe_info(answer: &[u8]) -> Option<Layout> {
    let stripe = stripe(u32_at(answer, 0)?, u32_at(answer, 4)?, u32::from(u16_at(answer, 8)?))?;
    Some(Layout { stripe: Some(stripe), storage_pool: None, is_storage_pool_untold: false })
}

/// The argument of [`GET_ENTRY_INFO_V2`] about a name in the directory that the call is made on, or about the
/// directory itself if the name is empty. `None` if the name does not fit.
pub(super) fn entry_info_argument(name: &[u8]) -> Option<Box<[u8; ENTRY_INFO_BYTES]>> {
    let mut argument = Box::new([0; ENTRY_INFO_BYTES]);
    if name.len() >= NAME_BYTES {
        return None;
    }
    argument[..name.len()].copy_from_slice(name);
    Some(argument)
}

/// Whether the metadata server did not tell the layout.
pub(super) fn is_refusal(answer: &[u8]) -> bool {
    u32_at(answer, at::RESULT).is_some_and(|result| result != 0)
}

/// The answer of [`GET_ENTRY_INFO_V2`].
pub(super) fn entry_info(answer: &[u8]) -> Option<Layout> {
    if is_refusal(answer) || *answer.get(at::ENTRY_ID)? == 0 {
        return None;
    }
    let targets = match u16_at(answer, at::TARGETS)? {
        0 => u32_at(answer, at::DEFAULT_TARGETS)?,
        targets => u32::from(targets),
    };
    let stripe = stripe(u32_at(answer, at::PATTERN)?, u32_at(answer, at::CHUNK_BYTES)?, targets)?;
    // Storage pools are numbered from 1 in 16 bits.
    let pool = u32_at(answer, at::STORAGE_POOL)?;
    let known = (1..=u32::from(u16::MAX)).contains(&pool);
    let storage_pool = known.then(|| pool.to_string());
    Some(Layout { stripe: Some(stripe), storage_pool, is_storage_pool_untold: false })
}

fn stripe(pattern: u32, chunk_bytes: u32, targets: u32) -> Option<Stripe> {
    let sound = PATTERNS.contains(&pattern)
        && chunk_bytes >= MIN_CHUNK_BYTES
        && chunk_bytes.is_power_of_two()
        && (1..=MAX_TARGETS).contains(&targets);
    sound.then(|| Stripe { chunk_bytes: u64::from(chunk_bytes), targets })
}
