//! The fast pool: content files on local devices, the limit of their space, and the I/O on them. This crate knows no
//! names.

mod allocated;
pub mod content_io;
mod copy;
mod device;
mod extents;
mod external_writers;
pub mod group_commit;
pub mod guard;
mod health;
mod preallocated;
pub mod scratch;
mod space;
mod store;
mod tiers;
mod trash;
pub mod views;
mod writeback_errors;

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

use forebay_backends::{Error, Result, Side, Time};
use serde::{Deserialize, Serialize};

pub use allocated::has_space;
pub use copy::CopyEnd;
pub use device::Device;
pub use extents::ExtentSet;
pub use external_writers::is_open_elsewhere;
pub use health::{DeviceHealth, is_device_error};
pub use preallocated::{ContentNumbers, PreallocatedFiles};
pub use space::{Reservation, SpaceBudget};
pub use store::ContentStore;
pub use tiers::{SpaceReservation, StorageTier, TIER_OF_FAST, TierDirectory, TierLayout};
pub use trash::Trash;
pub use writeback_errors::Content;

/// The aligned unit of fetches and of checksums.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// The number of a content file: never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContentId(pub u64);

/// The attributes that change with every write to a content file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stamp {
    pub size: u64,
    pub mtime: Time,
    pub ctime: Time,
}

impl Stamp {
    pub fn of(file: &File) -> Result<Self> {
        let meta = file.metadata().map_err(|e| Error::io(e, Side::Cache, "stat of a content file"))?;
        Ok(Self::from(&meta))
    }
}

impl From<&Metadata> for Stamp {
    fn from(meta: &Metadata) -> Self {
        Self {
            size: meta.size(),
            mtime: Time { secs: meta.mtime(), nanos: meta.mtime_nsec() as u32 },
            ctime: Time { secs: meta.ctime(), nanos: meta.ctime_nsec() as u32 },
        }
    }
}
