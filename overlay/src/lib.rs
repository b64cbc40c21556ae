//! The overlay: the merged view of the pool and our newer local changes. [`Overlay`] is the engine; the front
//! ends (`fuse`, `control`) turn a request into one call of it.

mod acl;
mod catalog;
pub mod clock;
mod content;
pub mod content_io;
pub mod control;
mod descriptors;
mod engine;
mod extents;
pub mod foresight;
pub mod fuse;
pub mod jobs;
mod node;
pub mod policy;
pub mod process;
mod salvage;
mod shares;
mod state;

pub use engine::operator;
pub use engine::{
    Attr, Caller, Change, Content, DirOrder, DirSnapshot, Dirent, Entry, Ino, KernelCache, Lookup, Opened, Options,
    Overlay, Placed, Seek, SetTime, Space, summary,
};
pub use forebay_backends as backends;
pub use policy::Policy;
