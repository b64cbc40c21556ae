//! Inode numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The number of an overlay inode: never reused, stored in the catalog, and used as the kernel's node id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ino(pub u64);

impl Ino {
    /// The root of the mount, as FUSE numbers it.
    pub const ROOT: Self = Self(1);
}

impl fmt::Display for Ino {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}
