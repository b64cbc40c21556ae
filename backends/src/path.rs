//! Paths inside a pool.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{Identity, RESERVED_PREFIX};

/// A path relative to the pool's root. Components are byte strings without `/` and NUL, never empty,
/// `.` or `..`; the empty path is the root.
///
/// A path may carry the identity of the object that it must name, and of the directory that must hold it. A pool with
/// identities then refuses with `NotFound` to act on another object: a user who can rename in the pool must not
/// choose which object the daemon changes with its own privileges. Two paths are equal if their bytes are.
#[derive(Clone, Serialize, Deserialize, Default)]
#[serde(from = "Vec<u8>", into = "Vec<u8>")]
pub struct PoolPath {
    bytes: Vec<u8>,
    object: Option<Identity>,
    holder: Option<Identity>,
}

impl From<Vec<u8>> for PoolPath {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, object: None, holder: None }
    }
}

impl From<PoolPath> for Vec<u8> {
    fn from(path: PoolPath) -> Self {
        path.bytes
    }
}

impl PartialEq for PoolPath {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for PoolPath {}

impl PartialOrd for PoolPath {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PoolPath {
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes.cmp(&other.bytes)
    }
}

impl Hash for PoolPath {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

/// The most bytes that a name may have: Linux's NAME_MAX.
pub const NAME_MAX_BYTES: usize = 255;

/// Whether bytes can be a name in a directory. Names from a server are checked before they are used: a name with a
/// slash in it, or `..`, is a path to another place.
pub fn is_file_name(name: &[u8]) -> bool {
    let step = matches!(name, b"" | b"." | b"..");
    !step && name.len() <= NAME_MAX_BYTES && !name.contains(&b'/') && !name.contains(&0)
}

impl PoolPath {
    pub fn root() -> Self {
        Self::default()
    }

    /// Parses `a/b/c`; `None` if a component is empty, `.`, `..` or contains NUL.
    pub fn parse(path: impl AsRef<[u8]>) -> Option<Self> {
        let path = path.as_ref();
        if path.is_empty() {
            return Some(Self::root());
        }
        let good = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && !name.contains(&0);
        path.split(|b| *b == b'/').all(good).then(|| path.to_vec().into())
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &[u8]) -> Self {
        debug_assert!(!name.is_empty() && !name.contains(&b'/') && !name.contains(&0));
        let mut path = Vec::with_capacity(self.bytes.len() + 1 + name.len());
        path.extend_from_slice(&self.bytes);
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self { bytes: path, object: None, holder: self.object }
    }

    /// The same path, which must name this object.
    pub fn of_object(mut self, object: Option<Identity>) -> Self {
        self.object = object;
        self
    }

    /// The same path, which must name an object in this directory.
    pub fn in_directory(mut self, directory: Option<Identity>) -> Self {
        self.holder = directory;
        self
    }

    /// The object that the path must name.
    pub fn object(&self) -> Option<Identity> {
        self.object
    }

    pub fn is_root(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The directory that holds it; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        if self.is_root() {
            return None;
        }
        let at = self.bytes.iter().rposition(|b| *b == b'/').unwrap_or(0);
        Some(Self::from(self.bytes[..at].to_vec()).of_object(self.holder))
    }

    /// The last component; `None` for the root.
    pub fn name(&self) -> Option<&[u8]> {
        self.bytes.rsplit(|b| *b == b'/').next().filter(|n| !n.is_empty())
    }

    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.split(|b| *b == b'/').filter(|n| !n.is_empty())
    }

    pub fn starts_with(&self, ancestor: &PoolPath) -> bool {
        ancestor.is_root()
            || self.bytes == ancestor.bytes
            || (self.bytes.starts_with(&ancestor.bytes) && self.bytes[ancestor.bytes.len()] == b'/')
    }

    /// Whether a component of the path is a name that pools reserve for their own unfinished work.
    pub fn is_reserved(&self) -> bool {
        self.components().any(|name| name.starts_with(RESERVED_PREFIX))
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.bytes))
    }
}

impl fmt::Display for PoolPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.bytes.escape_ascii())
    }
}

impl fmt::Debug for PoolPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
