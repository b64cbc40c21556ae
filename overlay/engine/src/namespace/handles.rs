//! File handles: requests in which the kernel has only an inode number, as for `open_by_handle_at` and for servers that
//! export the mount. The catalog knows all numbers that were ever given, after a restart, too.

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};

use super::super::coherence::Age;
use super::super::{Ino, Lookup, Overlay};

impl Overlay {
    /// Returns the generation of an inode number. A number and its generation are given once, even if the catalog is
    /// lost.
    pub fn generation(&self, ino: Ino) -> u64 {
        if ino == Ino::ROOT { 0 } else { u64::from(self.inner.catalog.generation()) }
    }

    /// Returns the inode of a number; counts one lookup.
    ///
    /// # Errors
    /// `Stale` if no name leads to it.
    pub async fn itself(&self, ino: Ino) -> Result<Lookup> {
        let inner = &self.inner;
        let gone = || Error::new(ErrorKind::Stale, Side::Application, format!("inode {ino} was deleted"));
        inner.node(ino)?;
        match inner.revalidate(ino, Age::Metadata).await {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Stale) => return Err(gone()),
            other => other?,
        }
        if inner.node_unless_gone(ino)?.is_none() {
            return Err(gone());
        }
        inner.counted_entry(ino).map(Lookup::Found)
    }

    /// Returns the directory that a directory is in; counts one lookup.
    ///
    /// # Errors
    /// As [`Self::itself`]; `NotDirectory` for other inodes, which may be in several directories.
    pub async fn parent(&self, dir: Ino) -> Result<Lookup> {
        let parent = {
            let node = self.inner.node(dir)?;
            let state = node.state.lock();
            if state.record.kind != FileKind::Directory {
                return Err(Error::new(ErrorKind::NotDirectory, Side::Application, format!("inode {dir}")));
            }
            state.record.links.first().map(|(parent, _)| *parent)
        };
        match parent {
            Some(parent) => self.itself(parent).await,
            None if dir == Ino::ROOT => self.itself(dir).await,
            None => Err(Error::new(ErrorKind::Stale, Side::Application, "the directory was removed")),
        }
    }
}
