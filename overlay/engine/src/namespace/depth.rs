//! How many directories lie above a name. Each call on a path takes time in proportion to that, so there is a bound.
//!
//! A rename costs the same however much is below what is moved, so what is below is not gone through while no name of the
//! mount is so deep that it could pass the bound. The depth of the deepest name is kept for that.
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
/// Names of a tree that is moved to deeper places that are gone through each time.
const NAMES_LOOKED_AT: usize = 1024;
/// The depth that is kept may be more than it is by so much; then all directories are gone through once.
const EXCESS_MAX: usize = DEPTH_MAX / 4;
/// The catalog is told when the depth passes a multiple of this, and has the most that there may be before the next one.
const STEP: usize = 128;
/// Of the catalog.
const KEY: &str = "deepest";

/// The depth of the deepest name of the mount: it may be less by now.
#[derive(Debug)]
pub(crate) struct Deepest {
    depth: AtomicUsize,
    /// By so much it was raised without a look.
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
    /// `NameTooLong` where nothing may be made in a directory because of its depth.
    pub(super) fn check_depth_in(&self, parent: Ino, name: &[u8]) -> Result<()> {
        let depth = self.depth(parent) + 1;
        if depth > DEPTH_MAX { Err(too_deep(name)) } else { self.note_depth(depth) }
    }

    /// There are names in a directory, whoever made them.
    pub(crate) fn note_names_in(&self, dir: Ino) -> Result<()> {
        self.note_depth(self.depth(dir) + 1)
    }

    fn note_depth(&self, depth: usize) -> Result<()> {
        if depth <= self.deepest.depth.load(Ordering::Relaxed) {
            return Ok(());
        }
        let was = self.deepest.depth.fetch_max(depth, Ordering::Relaxed);
        if depth / STEP > was / STEP {
            self.catalog.set_meta(KEY, &((depth / STEP + 1) * STEP - 1))?;
        }
        Ok(())
    }

    /// Before a name moves: with what is known below it. The kernel moves one directory at a time to another one.
    ///
    /// # Errors
    /// `NameTooLong` where something would get too deep by that.
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

    /// Whether nothing gets too deep, whatever is moved to places deeper by so much: counted as if the deepest name was.
    fn may_deepen(&self, by: usize) -> Result<bool> {
        let Deepest { depth, excess } = &self.deepest;
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

    /// Levels of names below a directory, as far as they are known here. `None`: it has more than `most` names, or more
    /// levels than there may be.
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
