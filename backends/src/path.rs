//! Paths inside a pool.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::RESERVED_PREFIX;

/// A path relative to the pool's root. Components are byte strings without `/` and NUL, never empty,
/// `.` or `..`; the empty path is the root.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct PoolPath(Vec<u8>);

/// The most bytes that a name may have: Linux's NAME_MAX.
pub const NAME_MAX_BYTES: usize = 255;

/// Whether bytes are a name that a directory can have. What a server tells is asked this before it is believed: a name
/// with a slash in it, or `..`, is a path to somewhere else.
pub fn is_file_name(name: &[u8]) -> bool {
    let step = matches!(name, b"" | b"." | b"..");
    !step && name.len() <= NAME_MAX_BYTES && !name.contains(&b'/') && !name.contains(&0)
}

impl PoolPath {
    pub fn root() -> Self {
        Self::default()
    }

    /// Parses `a/b/c`; `None` where a component is empty, `.`, `..` or contains NUL.
    pub fn parse(path: impl AsRef<[u8]>) -> Option<Self> {
        let path = path.as_ref();
        if path.is_empty() {
            return Some(Self::root());
        }
        let good = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && !name.contains(&0);
        path.split(|b| *b == b'/').all(good).then(|| Self(path.to_vec()))
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &[u8]) -> Self {
        debug_assert!(!name.is_empty() && !name.contains(&b'/') && !name.contains(&0));
        let mut path = Vec::with_capacity(self.0.len() + 1 + name.len());
        path.extend_from_slice(&self.0);
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self(path)
    }

    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The directory that holds it; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        if self.is_root() {
            return None;
        }
        Some(match self.0.iter().rposition(|b| *b == b'/') {
            Some(at) => Self(self.0[..at].to_vec()),
            None => Self::root(),
        })
    }

    /// The last component; `None` for the root.
    pub fn name(&self) -> Option<&[u8]> {
        self.0.rsplit(|b| *b == b'/').next().filter(|n| !n.is_empty())
    }

    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/').filter(|n| !n.is_empty())
    }

    pub fn starts_with(&self, ancestor: &PoolPath) -> bool {
        ancestor.is_root()
            || self.0 == ancestor.0
            || (self.0.starts_with(&ancestor.0) && self.0[ancestor.0.len()] == b'/')
    }

    /// Whether a name on the path is one that pools keep for their own unfinished work.
    pub fn is_reserved(&self) -> bool {
        self.components().any(|name| name.starts_with(RESERVED_PREFIX))
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

impl fmt::Display for PoolPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for PoolPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
