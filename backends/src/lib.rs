//! Access to the pool: the [`Pool`] trait, one module for each kind of pool, decorators, and the conformance suite
//! that every pool must pass. This crate knows neither FUSE nor the catalog nor policy.

mod abandoned;
pub mod conformance;
pub mod decorators;
pub mod dir;
mod error;
mod hollow;
mod late;
pub mod latency;
pub mod memory;
mod narrowed;
pub mod nfs;
mod open;
mod outage;
mod path;
mod pieces;
mod pool;
pub mod s3;
pub mod store;
mod types;
mod unfinished;

pub use error::{Error, ErrorKind, Result, Retry, Side};
pub use hollow::HollowPool;
pub use late::{AttachTimes, OpenedPool, PoolDescription};
pub use open::PoolLocation;
pub use path::{NAME_MAX_BYTES, PoolPath, is_file_name};
pub use pool::{
    Content, LISTED_CONTENT_BYTES, Listing, Part, Piece, Pieces, Pool, RESERVED_PREFIX, SentPart, UNFINISHED_XATTR,
    XATTRS_MAX_BYTES, unfinished_mark,
};
pub use types::{
    Attrs, Capabilities, ConditionalPut, DirEntry, Expected, FileKind, Identity, Layout, ListingSupport, Objects,
    RenameMode, Renames, SetAttrs, Space, Stat, Stripe, Time, Version, Versions, WorkProgress,
};
pub use unfinished::this_writer;
