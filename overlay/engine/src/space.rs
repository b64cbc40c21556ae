//! Space in the fast pool.
//!
//! | module | does |
//! |---|---|
//! | `eviction` | reserves space, and evicts clean content by the policy |
//! | `order` | the eviction policy, and the uses that it does not know yet |
//! | `write_throttle` | keeps passthrough writers below the hard limit |
//! | `write_pacing` | slows writers to the rate of the flush before there is no room |
//! | `owner_room` | room for what a user changes, by its share and its quotas |
//! | `room` | lets writers wait while the flush can make space |

pub mod eviction;
pub mod order;
pub mod owner_room;
pub mod room;
pub mod write_pacing;
pub mod write_throttle;

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;

use forebay_backends::Result;
use forebay_cache::{Content, has_space};
use forebay_prefetch::eviction::Evictor;
use parking_lot::Mutex;

use crate::Ino;
use crate::contents::failed;

/// What is known of the fast pool's space between two calls.
pub(crate) struct SpaceState {
    pub evictor: order::EvictionOrder,
    /// Files that are open for writing.
    pub writing: Mutex<HashSet<Ino>>,
    making_room: eviction::MakingRoom,
    throttle: write_throttle::WriteThrottle,
    room: room::WaitingWriters,
    pacer: write_pacing::WritePacer,
}

impl SpaceState {
    pub fn new(evictor: Box<dyn Evictor>) -> Self {
        Self {
            evictor: order::EvictionOrder::new(evictor),
            writing: Mutex::default(),
            making_room: eviction::MakingRoom::default(),
            throttle: write_throttle::WriteThrottle::default(),
            room: room::WaitingWriters::default(),
            pacer: write_pacing::WritePacer::default(),
        }
    }
}

/// Returns the bytes that a write may need in addition.
pub(crate) fn space_for_write(content: &Content, offset: u64, len: u64) -> Result<u64> {
    let meta = content.file.metadata().map_err(failed)?;
    let (end, allocated) = (offset.saturating_add(len), meta.blocks() * 512);
    // Blocks may lie behind the end of the file, so their number does not say that there is no hole.
    let overwrites =
        end <= meta.size() && allocated >= meta.size() && has_space(&content.file, offset..end) != Some(false);
    Ok(if overwrites { 0 } else { len })
}
