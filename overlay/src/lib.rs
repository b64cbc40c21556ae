//! The overlay: the merged view of the pool and our newer local changes. [`Overlay`] is the engine; the front
//! ends (`fuse`, `control`) turn a request into one call of it.

mod acl;
pub mod control;
mod engine;
pub mod foresight;
pub mod fuse;
pub mod jobs;
mod node;
mod salvage;
mod shares;

pub use engine::{
    Attr, Caller, Change, DirOrder, DirSnapshot, Dirent, Entry, Ino, KernelCache, Lookup, Opened, Options, Overlay,
    Placed, Seek, SetTime, Space, summary,
};
pub use forebay_api::operator;
pub use forebay_backends as backends;
use forebay_cache as content;
pub use forebay_cache::{Content, content_io};
use forebay_catalog as catalog;
pub use forebay_policy as policy;
use forebay_system::descriptors;
pub use forebay_system::{clock, process};
pub use policy::Policy;
