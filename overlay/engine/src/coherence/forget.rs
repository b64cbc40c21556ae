//! Names that another client removed from the pool, with all that the catalog has below them.
//!
//! A directory may have any number of names below it, at any depth. They are forgotten leaves first, in changes of bounded
//! size, and other requests run between two changes. A lookup in between finds a name that is not forgotten yet, or asks
//! the pool. The last change also forgets the directory, so nothing that entered the catalog meanwhile is left below it.
//! If the daemon dies in between, the next question about the directory goes on. Each change but the last marks the
//! listings of the directories that it leaves half emptied as incomplete: such a directory may be found again elsewhere.

use forebay_backends::{ErrorKind, FileKind, Result};

use crate::pool_calls::look_again;
use crate::{Inner, Ino, Txn};

/// Names that one change forgets, about. A large tree in one change would be in memory several times, and all its inodes locked.
pub(super) const FORGOTTEN_AT_ONCE: usize = 1_000;

/// Whether the answer of the pool still counts, for a change that is about to forget names because of it.
type StillCounts<'c> = dyn Fn(&mut Txn<'_>) -> Result<bool> + 'c;

/// A name, and what the pool has there; `None`: something was sent there.
type NameOfPool = (Box<[u8]>, Option<Ino>);

/// A directory whose names are being forgotten.
struct EmptyingDir {
    ino: Ino,
    /// Its name in the directory before it in the list. The caller forgets the name of the first one.
    name: Box<[u8]>,
    /// From which name on the visit goes on.
    next: Vec<u8>,
    /// A change was committed during the visit: names may have come to the part that was visited.
    is_interrupted: bool,
}

impl EmptyingDir {
    fn new(ino: Ino, name: Box<[u8]>) -> Self {
        Self { ino, name, next: Vec::new(), is_interrupted: false }
    }

    fn visit_again(&mut self) {
        (self.next, self.is_interrupted) = (Vec::new(), false);
    }
}

impl Inner {
    /// Handles a name that another client removed from the pool: the mount removes it, too, unless it shows newer state
    /// there. Returns the change that does it, not committed. What is below a directory may be forgotten by changes
    /// before it, in each of which the answer must count. `None`: it does not count any more.
    pub(super) fn forget_pool_name<'a>(
        &'a self,
        mut txn: Txn<'a>,
        ino: Ino,
        parent: Ino,
        name: &[u8],
        counts: &StillCounts<'_>,
    ) -> Result<Option<Txn<'a>>> {
        if !is_settled(&mut txn, ino, parent, name)? {
            return Ok(Some(txn));
        }
        if txn.record(ino)?.kind == FileKind::Directory {
            let counts = |txn: &mut Txn<'_>| Ok(is_settled(txn, ino, parent, name)? && counts(txn)?);
            let Some(rest) = self.forget_below(txn, ino, &counts)? else { return Ok(None) };
            txn = rest;
        }
        self.forget_emptied(&mut txn, ino, parent, name)?;
        Ok(Some(txn))
    }

    /// Forgets what the pool had in a directory that is gone. Returns the change that forgets the last names, not
    /// committed. `None`: the answer does not count any more.
    ///
    /// The directories that are being visited are a list, not recursive calls: a tree may have any depth.
    pub(crate) fn forget_below<'a>(
        &'a self,
        mut txn: Txn<'a>,
        top: Ino,
        counts: &StillCounts<'_>,
    ) -> Result<Option<Txn<'a>>> {
        let mut dirs = vec![EmptyingDir::new(top, Box::default())];
        while let Some(dir) = dirs.last_mut() {
            if txn.touched() >= FORGOTTEN_AT_ONCE {
                for dir in &dirs {
                    match look_again(&mut txn, dir.ino) {
                        // It was removed between two changes.
                        Err(e) if e.is(ErrorKind::Stale) => {}
                        marked => marked?,
                    }
                }
                txn.commit()?;
                txn = Txn::begin(self);
                if !counts(&mut txn)? {
                    return Ok(None);
                }
                dirs.iter_mut().for_each(|dir| dir.is_interrupted = true);
                continue;
            }
            let at = dir.ino;
            if let Some((name, child)) = self.next_of_pool(&txn, dir)? {
                match child {
                    Some(child) if txn.record(child)?.kind == FileKind::Directory => {
                        dirs.push(EmptyingDir::new(child, name));
                    }
                    child => self.forget_in(&mut txn, at, &name, child)?,
                }
            } else if dir.is_interrupted {
                dir.visit_again();
            } else if let Some(emptied) = dirs.pop()
                && let Some(parent) = dirs.last()
                && txn.name(parent.ino, &emptied.name)?.pool == Some(emptied.ino)
            {
                self.forget_in(&mut txn, parent.ino, &emptied.name, Some(emptied.ino))?;
            }
        }
        Ok(Some(txn))
    }

    /// Returns the next name of a directory that the pool had, or to which something was sent, and what the pool had
    /// there.
    fn next_of_pool(&self, txn: &Txn<'_>, dir: &mut EmptyingDir) -> Result<Option<NameOfPool>> {
        let mut found = None;
        self.catalog.names_from(dir.ino, &dir.next, |name, record| {
            if record.pool.is_some() || !record.pending.is_empty() {
                // This change may have forgotten it already.
                let now = txn.name(dir.ino, name)?;
                if now.pool.is_some() || !now.pending.is_empty() {
                    found = Some((Box::<[u8]>::from(name), now.pool));
                }
            }
            Ok(found.is_none())
        })?;
        if let Some((name, _)) = &found {
            // The first name after this one.
            dir.next = [&**name, &[0]].concat();
        }
        Ok(found)
    }

    /// Forgets one name of a directory that is gone. If `child` is a directory, nothing is left below it.
    fn forget_in(&self, txn: &mut Txn<'_>, dir: Ino, name: &[u8], child: Option<Ino>) -> Result<()> {
        // Nothing that was sent to this name is there, either.
        txn.pool_has(dir, name, child)?;
        let Some(child) = child else { return Ok(()) };
        if txn.record(child)?.pending_at.is_empty() {
            self.forget_emptied(txn, child, dir, name)
        } else {
            txn.pool_lacks(dir, name, child)
        }
    }

    /// Forgets a name. If it is one of a directory, what the pool had below it is forgotten, so what the mount still shows
    /// there is newer than the removal.
    fn forget_emptied(&self, txn: &mut Txn<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Result<()> {
        let record = txn.record(ino)?;
        let is_dir = record.kind == FileKind::Directory;
        let keep = record.file.is_dirty() || is_dir && self.shows_names(txn, ino)?;
        let is_here = txn.name(parent, name)?.here_ino() == Some(ino);
        txn.state_at_once(parent)?.kernel.pages_go_stale();
        txn.pool_has(parent, name, None)?;
        if is_here && !keep {
            txn.show(parent, name, None)?;
            txn.unlink(ino, parent, name)?;
            if txn.record(ino)?.links.is_empty() {
                txn.on_commit(ino, |state| state.attachment.supersede())?;
            }
        } else if keep && !txn.record(ino)?.in_pool() {
            // The local state is newer than the removal: the flush will create the name again.
            let record = txn.record(ino)?;
            record.dirty.mode = true;
            record.dirty.owner = true;
        }
        self.lost_in_pool(txn, ino)
    }

    /// Returns whether the mount shows a name in a directory, after this change.
    fn shows_names(&self, txn: &Txn<'_>, dir: Ino) -> Result<bool> {
        let mut found = false;
        self.catalog.names(dir, |name, record| {
            found = record.here.is_some() && txn.name(dir, name)?.here.is_some();
            Ok(!found)
        })?;
        Ok(found)
    }
}

/// Returns whether the pool is known to have had an inode under a name: nothing that was sent of it, or to the name, is
/// in doubt.
fn is_settled(txn: &mut Txn<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Result<bool> {
    let was = txn.name(parent, name)?;
    Ok(was.pool == Some(ino) && was.pending.is_empty() && txn.record(ino)?.pending_at.is_empty())
}
