//! A tree of new inodes that gets its names in one step.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_catalog::Batch;
use forebay_system::clock::stamp_now;

use super::super::{Inner, Ino, Txn};
use super::not_found;
use super::remove::not_empty;
use crate::node::Node;

/// A name in a directory that a tree gets.
#[derive(Debug, Clone)]
pub(crate) struct GraftPoint {
    pub parent: Ino,
    pub name: Vec<u8>,
}

/// A new inode that gets a name in a directory which exists.
#[derive(Debug)]
pub(crate) struct Graft {
    pub at: GraftPoint,
    pub ino: Ino,
    pub kind: FileKind,
    pub owner: u32,
    /// The inode that it replaces.
    pub target: Option<Ino>,
}

impl Inner {
    /// Checks that a tree can get a name. A file may replace a file, and a directory an empty directory, as in a rename.
    /// Returns the inode that is replaced.
    pub(crate) async fn check_graft(self: &Arc<Self>, at: &GraftPoint, kind: FileKind) -> Result<Option<Ino>> {
        if self.node(at.parent)?.state.lock().record.kind != FileKind::Directory {
            return Err(Error::new(ErrorKind::NotDirectory, Side::Application, self.display(at.parent)));
        }
        self.check_new_name(at.parent, &at.name)?;
        let Some(target) = self.find(at.parent, &at.name).await? else { return Ok(None) };
        let target_kind = self.node(target)?.state.lock().record.kind;
        match (kind == FileKind::Directory, target_kind == FileKind::Directory) {
            (true, true) => self.check_dir_can_go(target).await?,
            (false, false) => {}
            (is_dir, _) => return Err(kinds_differ(&self.display(target), is_dir)),
        }
        self.check_not_shown(at.parent, &at.name, target)?;
        Ok(Some(target))
    }

    /// Refuses to replace a name at which a view is mounted, as a rename does.
    pub(crate) fn check_not_shown(&self, parent: Ino, name: &[u8], target: Ino) -> Result<()> {
        if !self.is_pinned_name(parent, name) {
            return Ok(());
        }
        let what = format!("{}: a view is shown there: `forebay view end` ends it", self.display(target));
        Err(Error::new(ErrorKind::Os(libc::EBUSY), Side::Application, what))
    }

    /// Writes the records of a tree, and shows it under its names, in one batch. `kept` are the directories that get
    /// parts of it, with the names under which they were found.
    ///
    /// # Errors
    /// `Stale` if what was found is not there any more, or if something else is.
    pub(crate) fn graft<'a>(&'a self, grafts: &[Graft], kept: &[(GraftPoint, Ino)], tree: Batch<'a>) -> Result<()> {
        // Other changes of names need not wait while these are read from the catalog.
        let _in_memory: Vec<Arc<Node>> = grafts.iter().filter_map(|graft| self.node(graft.target?).ok()).collect();
        let owners: HashMap<Ino, u32> = grafts.iter().map(|graft| (graft.ino, graft.owner)).collect();
        let mut txn = Txn::begin_with(self, tree, owners);
        let found = |txn: &Txn<'_>, at: &GraftPoint, ino: Option<Ino>| match txn.name(at.parent, &at.name)?.here_ino() {
            here if here == ino => Ok(()),
            _ => Err(Error::new(ErrorKind::Stale, Side::Application, "the names changed meanwhile")),
        };
        for (at, dir) in kept {
            found(&txn, at, Some(*dir))?;
        }
        let mut changed: BTreeMap<Ino, i32> = BTreeMap::new();
        for Graft { at, ino, kind, target, .. } in grafts {
            txn.live_dir(at.parent)?;
            found(&txn, at, *target)?;
            let mut subdirs = i32::from(*kind == FileKind::Directory);
            if let Some(target) = *target {
                let record = txn.record(target)?;
                let is_dir = record.kind == FileKind::Directory;
                record.ctime = stamp_now();
                if is_dir && !self.is_empty_dir(target)? {
                    return Err(not_empty(&at.name));
                }
                subdirs -= i32::from(is_dir);
                txn.unlink(target, at.parent, &at.name)?;
            }
            txn.show(at.parent, &at.name, Some((*ino, *kind)))?;
            txn.state_at_once(at.parent)?.names.negative.remove(at.name.as_slice());
            *changed.entry(at.parent).or_default() += subdirs;
        }
        for (dir, subdirs) in changed {
            txn.touch_dir(dir, subdirs)?;
        }
        txn.commit()?;
        self.rules_may_differ();
        self.flusher.bell.notify_one();
        Ok(())
    }

    /// Returns the directory and the name that a path in the mount stands for.
    pub(crate) fn graft_point(&self, parent: Ino, name: &[u8]) -> Result<GraftPoint> {
        match self.node_unless_gone(parent)? {
            Some(_) => Ok(GraftPoint { parent, name: name.to_vec() }),
            None => Err(not_found(name)),
        }
    }
}

/// The error for a path that has a directory where the tree has something else (`is_dir` is false), or the reverse.
pub(crate) fn kinds_differ(path: &str, is_dir: bool) -> Error {
    let (here, new) = if is_dir { ("no directory", "one") } else { ("a directory", "none") };
    let what = format!("{path}: it is {here}, and what is committed has {new} there: move or remove one of the two");
    Error::new(ErrorKind::Exists, Side::Application, what)
}
