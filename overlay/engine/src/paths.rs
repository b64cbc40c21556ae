//! From inodes to paths, in the overlay and in the pool.

use std::collections::{HashSet, VecDeque};

use forebay_api::operator::TypedPath;
use forebay_api::paths::encode;
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side, Version};
use forebay_catalog::{InodeRecord, Link};

use super::{Inner, Ino, Overlay};

/// Deeper trees than a path of `PATH_MAX` bytes can name exist; a loop would be damage.
const MAX_DEPTH: usize = 65_536;

/// A path has more bytes than the caller takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathTooLong;

type PathWithin<T> = std::result::Result<T, PathTooLong>;

impl Overlay {
    /// Returns the path of an inode in the mount, of `bytes_max` at most. `None`: it has no name any more. Names may be
    /// nested 2,048 deep, so a path may have half a MiB.
    ///
    /// # Errors
    /// The path is longer.
    pub fn path_within(&self, ino: Ino, bytes_max: usize) -> PathWithin<Option<PoolPath>> {
        self.inner.walk_up_within(ino, bytes_max, |record| record.links.first().cloned())
    }
}

impl Inner {
    /// Returns the path of an inode in the mount, by one of its names, or `None` if it has no name.
    pub fn overlay_path(&self, ino: Ino) -> Option<PoolPath> {
        self.walk_up(ino, |record| record.links.first().cloned())
    }

    /// Returns the path under which the pool has an inode now, regardless of renames in the mount since.
    ///
    /// # Errors
    /// `NotFound` if the pool does not have the inode.
    pub fn pool_path(&self, ino: Ino) -> Result<PoolPath> {
        self.walk_up(ino, |record| record.pool_link().cloned()).ok_or_else(|| not_in_pool(ino))
    }

    /// Returns the pool's path of a name in a directory.
    pub fn pool_path_of(&self, parent: Ino, name: &[u8]) -> Result<PoolPath> {
        Ok(self.pool_path(parent)?.join(name))
    }

    fn walk_up(&self, ino: Ino, link: impl Fn(&InodeRecord) -> Option<Link>) -> Option<PoolPath> {
        self.walk_up_within(ino, usize::MAX, link).ok().flatten()
    }

    fn walk_up_within(
        &self,
        ino: Ino,
        bytes_max: usize,
        link: impl Fn(&InodeRecord) -> Option<Link>,
    ) -> PathWithin<Option<PoolPath>> {
        let mut names = Vec::new();
        let mut bytes = 0;
        // The directories that the pool must find on the path: the named one, and the one that holds the named object.
        // Not files: renames replace them all the time, and a call that changes a file names its identity as well.
        let (mut object, mut holder) = (None, None);
        let mut at = ino;
        while at != Ino::ROOT {
            let Ok(node) = self.node(at) else { return Ok(None) };
            let (identity, up) = {
                let state = node.state.lock();
                let record = &state.record;
                let version = record.version.as_ref().filter(|_| record.kind == FileKind::Directory);
                (version.and_then(Version::identity), link(record))
            };
            match names.len() {
                0 => object = identity,
                1 => holder = identity,
                _ => {}
            }
            let Some((parent, name)) = up else { return Ok(None) };
            // With the slash that separates it from the next name.
            bytes += name.len() + usize::from(!names.is_empty());
            if bytes > bytes_max {
                return Err(PathTooLong);
            }
            names.push(name);
            at = parent;
            if names.len() > MAX_DEPTH {
                return Ok(None);
            }
        }
        let path = PoolPath::parse(names.iter().rev().map(AsRef::as_ref).collect::<Vec<&[u8]>>().join(&b'/'));
        Ok(path.map(|path| path.of_object(object).in_directory(holder)))
    }

    /// Visits an inode and the directories above it in the pool, under all of its names, until `each` returns `false`.
    pub(crate) fn visit_above_in_pool(&self, ino: Ino, mut each: impl FnMut(Ino, &InodeRecord) -> bool) {
        let mut next = VecDeque::from([ino]);
        let mut seen = HashSet::from([ino]);
        while let Some(at) = next.pop_front() {
            // A directory that another client removed is not known any more.
            let Ok(node) = self.node(at) else { continue };
            let state = node.state.lock();
            if !each(at, &state.record) {
                return;
            }
            next.extend(state.record.pool_links.iter().map(|(parent, _)| *parent).filter(|p| seen.insert(*p)));
        }
    }

    /// Returns how many directories are above an inode in the mount.
    pub fn depth(&self, ino: Ino) -> usize {
        self.count_up(ino, |record| record.links.first().map(|(parent, _)| *parent))
    }

    /// Returns how many directories are above an inode in the pool.
    pub fn pool_depth(&self, ino: Ino) -> usize {
        self.count_up(ino, |record| record.pool_link().map(|(parent, _)| *parent))
    }

    fn count_up(&self, ino: Ino, mut parent: impl FnMut(&InodeRecord) -> Option<Ino>) -> usize {
        let (mut at, mut depth) = (ino, 0);
        while at != Ino::ROOT && depth <= MAX_DEPTH {
            let Ok(node) = self.node(at) else { break };
            let Some(next) = parent(&node.state.lock().record) else { break };
            at = next;
            depth += 1;
        }
        depth
    }

    /// Returns an inode and all directories that are above it in the pool.
    pub(crate) fn pool_ancestors(&self, ino: Ino) -> HashSet<Ino> {
        let mut path = HashSet::from([ino]);
        self.count_up(ino, |record| {
            let (parent, _) = record.pool_link()?;
            path.insert(*parent).then_some(*parent)
        });
        path
    }

    /// Returns whether `ino` is `ancestor` or below it in the mount.
    pub fn is_below(&self, ino: Ino, ancestor: Ino) -> bool {
        let mut at = ino;
        for _ in 0..MAX_DEPTH {
            if at == ancestor {
                return true;
            }
            if at == Ino::ROOT {
                return false;
            }
            let Ok(node) = self.node(at) else { return false };
            let parent = node.state.lock().record.links.first().map(|(p, _)| *p);
            match parent {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        false
    }

    /// Returns the path of an inode for messages.
    pub fn display(&self, ino: Ino) -> String {
        self.overlay_path(ino).map_or_else(|| format!("(unlinked {ino})"), |p| p.to_string())
    }

    /// Returns the path of an inode as requests and replies spell it.
    pub fn typed_path(&self, ino: Ino) -> TypedPath {
        self.overlay_path(ino).map_or_else(|| format!("(unlinked {ino})"), |path| typed(&path))
    }
}

/// Spells a path of the mount as requests and replies do. `parse_path` undoes it for every name; what
/// [`PoolPath`] shows is for messages, and cannot be undone.
pub(crate) fn typed(path: &PoolPath) -> TypedPath {
    format!("/{}", encode(path.as_bytes()))
}

fn not_in_pool(ino: Ino) -> Error {
    Error::new(ErrorKind::NotFound, Side::Pool, format!("inode {ino} is not in the pool"))
}
