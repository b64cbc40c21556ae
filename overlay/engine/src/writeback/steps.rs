//! What all steps of a flush share: the locks that they take, and what they record of their result.

use std::sync::Arc;

use forebay_backends::{ErrorKind, FileKind, Result, Stat};
use forebay_catalog::InodeRecord;

use crate::node::Node;
use crate::{Inner, Ino, Txn};

impl Inner {
    /// Another client removed the pool's copy of an inode that the mount shows. The flush creates it anew if the fast
    /// pool has what it needs, for a file its whole content. If not, the names are removed.
    pub(crate) fn lost_in_pool(&self, txn: &mut Txn<'_>, ino: Ino) -> Result<()> {
        let record = txn.record(ino)?;
        if record.in_pool() || record.links.is_empty() || !record.pending_at.is_empty() {
            return Ok(());
        }
        let known = match record.kind {
            FileKind::File => record.file.is_whole() || record.file.is_dirty(),
            FileKind::Symlink => record.target.is_some(),
            _ => true,
        };
        if record.file.is_whole() {
            txn.keep_as_only_copy(ino)?;
        }
        if known {
            return Ok(());
        }
        for (parent, name) in txn.record(ino)?.links.clone() {
            txn.show(parent, &name, None)?;
            txn.unlink(ino, parent, &name)?;
            let inner = txn.inner();
            txn.on_commit(ino, move |_| {
                inner.report_conflict(format!(
                    "{}: removed in the pool, but renamed or linked here before its content was",
                    name.escape_ascii()
                ));
            })?;
        }
        Ok(())
    }

    pub(crate) fn record_of(&self, ino: Ino) -> Result<InodeRecord> {
        Ok(self.node(ino)?.state.lock().record.clone())
    }

    pub(super) fn nodes_in_order(&self, inos: impl Iterator<Item = Ino>) -> Result<Vec<Arc<Node>>> {
        let mut inos: Vec<Ino> = inos.collect();
        inos.sort();
        inos.dedup();
        inos.into_iter().map(|ino| self.node(ino)).collect()
    }
}

/// Takes the version after a change of names. Only the change time in it is different, unless another client changed
/// the object, too.
pub(super) fn take_version(txn: &mut Txn<'_>, ino: Ino, stat: &Stat) -> Result<()> {
    let record = txn.record(ino)?;
    if record.version.as_ref().is_some_and(|known| !known.same_object(&stat.version)) {
        // Another client put another object there: the next look finds it.
        return Ok(());
    }
    match (&record.version, record.kind) {
        (Some(known), FileKind::File) if !known.same_content(&stat.version) => {}
        _ => {
            record.version = Some(stat.version.clone());
            txn.take_access(ino, stat)?;
            // Not for a directory: its new name says nothing of the names in it.
            if stat.kind != FileKind::Directory {
                txn.on_commit(ino, |state| state.validated = Some(std::time::Instant::now()))?;
            }
        }
    }
    txn.record(ino)?.count_links(stat);
    txn.note_object(ino, stat);
    Ok(())
}

/// Notes that a flush changed a name of a directory in the pool. That changed the directory's times there, so the times
/// that the mount shows are sent again.
pub(super) fn note_name_flushed(txn: &mut Txn<'_>, dir: Ino) -> Result<()> {
    match txn.state_at_once(dir) {
        // Another client removed the directory: it has no times to send.
        Err(e) if e.is(ErrorKind::Stale) => return Ok(()),
        state => state?.names.flushed += 1,
    }
    let record = txn.record(dir)?;
    // The mount does not show the times of a removed directory.
    record.dirty.times |= dir == Ino::ROOT || !record.links.is_empty();
    Ok(())
}

pub(super) fn all_attrs_differ(record: &mut InodeRecord) {
    record.dirty.mode = record.kind != FileKind::Symlink;
    record.dirty.owner = true;
    record.dirty.times = true;
    record.all_xattrs_differ();
}
