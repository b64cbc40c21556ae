//! What the pool no longer has where we know it: a flush whose answer was lost moved it, or somebody removed it.

use forebay_backends::{Error, ErrorKind, Result, Side};

use super::super::{Inner, Ino};
use super::Asked;
use crate::catalog::{InodeRecord, Link};

impl Inner {
    /// The pool does not have an inode where we know it.
    ///
    /// # Errors
    /// `Stale` where it is gone with its name.
    pub(in crate::engine) async fn missing(&self, ino: Ino, asked: Asked) -> Result<()> {
        match self.ascertain(ino).await {
            Ok(false) => {}
            // The next look asks where it is known now.
            Ok(true) => return Ok(()),
            Err(e) if matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => return Ok(()),
            Err(e) => return Err(e),
        }
        let (record, holds) = {
            let node = self.node(ino)?;
            let state = node.state.lock();
            (state.record.clone(), asked.holds(&state))
        };
        let Some(from) = source(&record) else { return self.vanished(ino, asked) };
        if !holds {
            return Ok(());
        }
        self.source_lost(ino, &from)?;
        match self.node(ino)?.state.lock().record.links.is_empty() {
            true => {
                Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: removed in the pool", from.1.escape_ascii())))
            }
            false => Ok(()),
        }
    }
}

/// Where alone the pool has an inode that was moved here.
fn source(record: &InodeRecord) -> Option<Link> {
    let there = record.pool_links.first()?;
    let moved = record.pool_links.len() == 1 && !record.links.is_empty() && !record.links.contains(there);
    moved.then(|| there.clone())
}
