//! Nodes are loaded from the catalog when they are first needed.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_catalog::InodeRecord;

use super::Node;
use crate::{Inner, Ino};

impl Inner {
    /// Returns the node of an inode.
    ///
    /// # Errors
    /// `Stale` if there is no such inode.
    pub fn node(&self, ino: Ino) -> Result<Arc<Node>> {
        self.table
            .get(&self.catalog, ino, |record| self.distrust(ino, record))?
            .ok_or_else(|| Error::new(ErrorKind::Stale, Side::Application, format!("inode {ino} was deleted")))
    }

    /// Returns the node of a file that the caller found a while ago, or `None` if the file was removed since.
    pub fn node_unless_gone(&self, ino: Ino) -> Result<Option<Arc<Node>>> {
        let node = match self.node(ino) {
            Err(e) if e.is(ErrorKind::Stale) => return Ok(None),
            node => node?,
        };
        let is_gone = {
            let state = node.state.lock();
            state.is_deleted() || state.is_unlinked(ino)
        };
        Ok((!is_gone).then_some(node))
    }

    /// Gives up clean content whose last bytes were fetched in an epoch that ended in a power cut: they may
    /// never have reached the disk.
    fn distrust(&self, ino: Ino, record: &mut InodeRecord) -> Result<()> {
        let (false, Some(id)) = (record.file.is_dirty(), record.file.content()) else { return Ok(()) };
        if !self.catalog.has_dead_epochs() {
            return Ok(());
        }
        let content = self.catalog.content(id)?;
        if !content.as_ref().is_none_or(|c| self.catalog.is_dead(c.epoch)) {
            return Ok(());
        }
        (record.file, _) = record.file.evict()?;
        let mut batch = self.catalog.batch();
        batch.put_inode(ino, record, record.is_dirty());
        batch.delete_content(id);
        self.catalog.write(batch)?;
        self.trash.discard(id, content.map_or(0, |c| c.bytes));
        Ok(())
    }
}
