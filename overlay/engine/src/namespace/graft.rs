//! A tree of new inodes that gets its name in one step.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::Content;
use forebay_catalog::Batch;
use forebay_system::clock::stamp_now;

use super::super::{Inner, Ino, Txn};
use super::remove::not_empty;
use super::{exists, not_found};

/// A name in a directory that a tree gets.
#[derive(Debug, Clone)]
pub(crate) struct GraftPoint {
    pub parent: Ino,
    pub name: Vec<u8>,
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
            _ => return Err(exists(&at.name)),
        }
        Ok(Some(target))
    }

    /// Writes the records of a tree, and shows it under its name, in one batch. `target` is what the check returned;
    /// `content` is that of a single file.
    pub(crate) fn graft<'a>(
        &'a self,
        at: &GraftPoint,
        (top, kind): (Ino, FileKind),
        target: Option<Ino>,
        content: Option<&Arc<Content>>,
        tree: Batch<'a>,
    ) -> Result<()> {
        let mut txn = Txn::begin_with(self, tree);
        txn.live_dir(at.parent)?;
        if txn.name(at.parent, &at.name)?.here_ino() != target {
            return Err(Error::new(ErrorKind::Stale, Side::Application, "the names changed meanwhile"));
        }
        let mut subdirs = i32::from(kind == FileKind::Directory);
        if let Some(target) = target {
            let record = txn.record(target)?;
            let is_dir = record.kind == FileKind::Directory;
            record.ctime = stamp_now();
            if is_dir && !self.is_empty_dir(target)? {
                return Err(not_empty(&at.name));
            }
            subdirs -= i32::from(is_dir);
            txn.unlink(target, at.parent, &at.name)?;
            if let Some(content) = content {
                // As for a rename: a power cut must leave the old bytes or the new ones.
                self.catalog.sync_first(content.clone());
            }
        }
        txn.show(at.parent, &at.name, Some((top, kind)))?;
        txn.touch_dir(at.parent, subdirs)?;
        txn.state(at.parent)?.names.negative.remove(at.name.as_slice());
        txn.commit()?;
        self.rules_may_differ();
        self.flush_bell.notify_one();
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
