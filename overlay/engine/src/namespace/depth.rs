//! Limits how many directories lie above a name, since each call on a path takes time in proportion to their number.
//!
//! The cost of a rename does not depend on how much is below the moved directory. So the names below are not read as
//! long as no name of the mount is deep enough to pass the limit. For this, the depth of the deepest name is kept.
//!
//! When a directory moves to a deeper place, at most `NAMES_LOOKED_AT` names below it are read. If it has more, the
//! engine assumes that the deepest name of the mount is among them. If the assumption passes the bound, all names below
//! the directory are read. Assumptions make the kept depth too large: if they may have added `EXCESS_MAX`, and one more
//! would pass the bound, the names of the whole mount are read first, and the depth is exact again.

use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_catalog::Catalog;

use super::super::{Inner, Ino};

/// Directories above a name, at most: as many as one path of `PATH_MAX` bytes can name.
const DEPTH_MAX: usize = 2048;
/// How many names below a directory are read each time that it moves to a deeper place.
const NAMES_LOOKED_AT: usize = 1024;
/// How much assumptions may add to the kept depth. Then all directories are read once.
const EXCESS_MAX: usize = DEPTH_MAX / 4;
/// When the depth passes a multiple of this, the catalog gets the largest depth below the next multiple.
const STEP: usize = 128;
/// The key in the catalog.
const KEY: &str = "deepest";

/// The depth of the deepest name of the mount. The real depth may be less by now.
#[derive(Debug)]
pub(crate) struct Deepest {
    depth: AtomicUsize,
    /// By how much the depth was raised by assumption.
    excess: AtomicUsize,
}

impl Deepest {
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let depth = AtomicUsize::new(catalog.meta(KEY)?.unwrap_or(STEP - 1));
        Ok(Self { depth, excess: AtomicUsize::new(0) })
    }
}

impl Inner {
    /// # Errors
    /// `NameTooLong` if the directory is too deep for another name.
    pub(super) fn check_depth_in(&self, parent: Ino, name: &[u8]) -> Result<()> {
        let depth = self.depth(parent) + 1;
        if depth > DEPTH_MAX { Err(too_deep(name)) } else { self.note_depth(depth) }
    }

    /// Notes the depth of the names in a directory, whether they are of the mount or of the pool.
    pub(crate) fn note_names_in(&self, dir: Ino) -> Result<()> {
        self.note_depth(self.depth(dir) + 1)
    }

    /// Checks the depth before a name appears with a tree of so many levels of names below it.
    ///
    /// # Errors
    /// `NameTooLong` if a name would be too deep.
    pub(crate) fn check_depth_below(&self, parent: Ino, name: &[u8], levels: usize) -> Result<()> {
        let depth = self.depth(parent) + 1 + levels;
        if depth > DEPTH_MAX { Err(too_deep(name)) } else { self.note_depth(depth) }
    }

    fn note_depth(&self, depth: usize) -> Result<()> {
        if depth <= self.names.deepest.depth.load(Ordering::Relaxed) {
            return Ok(());
        }
        let was = self.names.deepest.depth.fetch_max(depth, Ordering::Relaxed);
        if depth / STEP > was / STEP {
            self.catalog.set_meta(KEY, &((depth / STEP + 1) * STEP - 1))?;
        }
        Ok(())
    }

    /// Checks the depth before a name moves, with the known names below it. The kernel moves one directory at a time to
    /// another parent.
    ///
    /// # Errors
    /// `NameTooLong` if a name would get too deep.
    pub(super) fn check_depth_of_moved(&self, moved: Ino, from: Ino, to: Ino, name: &[u8]) -> Result<()> {
        if self.node(moved)?.state.lock().record.kind != FileKind::Directory {
            return Ok(());
        }
        let (was, is) = (self.depth(from), self.depth(to));
        if is <= was {
            return Ok(());
        }
        let by = is - was;
        let depth = match self.levels_below(moved, NAMES_LOOKED_AT)? {
            Some(levels) => is + 1 + levels,
            None if self.may_deepen(by)? => return Ok(()),
            None => is + 1 + self.levels_below(moved, usize::MAX)?.unwrap_or(DEPTH_MAX),
        };
        if depth > DEPTH_MAX { Err(too_deep(name)) } else { self.note_depth(depth) }
    }

    /// Returns whether nothing gets too deep if anything moves deeper by so much: the deepest name is assumed to move.
    fn may_deepen(&self, by: usize) -> Result<bool> {
        let Deepest { depth, excess } = &self.names.deepest;
        if depth.load(Ordering::Relaxed) + by > DEPTH_MAX && excess.load(Ordering::Relaxed) >= EXCESS_MAX {
            depth.store(0, Ordering::Relaxed);
            excess.store(0, Ordering::Relaxed);
            self.note_depth(self.levels_below(Ino::ROOT, usize::MAX)?.unwrap_or(DEPTH_MAX))?;
        }
        let deepened = depth.load(Ordering::Relaxed) + by;
        if deepened > DEPTH_MAX {
            return Ok(false);
        }
        excess.fetch_add(by, Ordering::Relaxed);
        self.note_depth(deepened).map(|()| true)
    }

    /// Returns the known levels of names below a directory. `None`: it has more than `most` names, or more levels than
    /// allowed.
    fn levels_below(&self, dir: Ino, most: usize) -> Result<Option<usize>> {
        let (mut level, mut levels, mut left) = (vec![dir], 0, most);
        while !level.is_empty() {
            let (mut next, mut any) = (Vec::new(), false);
            for dir in level {
                self.catalog.names(dir, |_, record| {
                    if let Some((ino, kind)) = record.here {
                        any = true;
                        next.extend((kind == FileKind::Directory).then_some(ino));
                    }
                    left = left.saturating_sub(1);
                    Ok(left > 0)
                })?;
                if left == 0 {
                    return Ok(None);
                }
            }
            levels += usize::from(any);
            if levels > DEPTH_MAX {
                return Ok(None);
            }
            level = next;
        }
        Ok(Some(levels))
    }
}

fn too_deep(name: &[u8]) -> Error {
    let what = format!("{}: more than {DEPTH_MAX} directories deep, with what is below it", name.escape_ascii());
    Error::new(ErrorKind::NameTooLong, Side::Application, what)
}
