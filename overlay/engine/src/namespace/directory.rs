//! Listings of directories.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_backends::{ErrorKind, FileKind, Result};
use futures::{StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;

use super::super::coherence::Age;
use super::super::{CachedPages, Dirent, Inner, Ino, Overlay};

/// Directories of one tree that are listed at the same time.
const LISTED_AT_ONCE: usize = 8;

/// The bytes of each file whose content came with a listing.
#[derive(Debug, Default)]
pub struct Arrivals(pub Mutex<HashMap<Ino, u64>>);

/// What is requested from the pool if the catalog does not have it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ask<'a> {
    Nothing,
    /// Names, as fresh as `Age` requires.
    Names(Age),
    /// Small files, too, if the pool sends them with a listing.
    Contents(Age, &'a Arrivals),
}

impl Overlay {
    /// Makes sure that all names of a directory are known. Returns whether the kernel may keep its cached listing.
    pub async fn open_dir(&self, ino: Ino) -> Result<CachedPages> {
        self.inner.ensure_listed(ino).await?;
        let node = self.inner.node(ino)?;
        let pages = node.state.lock().kernel.pages();
        Ok(pages)
    }
}

impl Inner {
    /// Returns the entries of a directory that the catalog has, sorted by name.
    pub fn entries(&self, dir: Ino) -> Result<Vec<Dirent>> {
        let mut entries = Vec::new();
        self.catalog.names(dir, |name, record| {
            if let Some((ino, kind)) = record.here {
                entries.push(Dirent { name: name.into(), ino, kind });
            }
            Ok(true)
        })?;
        Ok(entries)
    }

    pub(crate) fn is_empty_dir(&self, dir: Ino) -> Result<bool> {
        let mut empty = true;
        self.catalog.names(dir, |_, record| {
            empty = record.here.is_none();
            Ok(empty)
        })?;
        Ok(empty)
    }

    /// Returns every inode below a directory, and the directory itself; directories come before their entries. As `ask`
    /// says, unknown names are requested from the pool first.
    pub async fn tree(self: &Arc<Self>, root: Ino, ask: Ask<'_>) -> Result<Vec<(Ino, FileKind)>> {
        let kind = self.node(root)?.state.lock().record.kind;
        let mut found = vec![(root, kind)];
        let mut level = 0..1;
        while !level.is_empty() {
            let dirs =
                found[level.clone()].iter().filter(|(_, kind)| *kind == FileKind::Directory).map(|(ino, _)| *ino);
            let mut dirs: Vec<Ino> = dirs.collect();
            if !matches!(ask, Ask::Nothing) {
                let listed = stream::iter(dirs).map(|ino| self.listed_if_there(ino, ask)).buffered(LISTED_AT_ONCE);
                dirs = listed.try_filter_map(|listed| async move { Ok(listed) }).try_collect().await?;
            }
            for ino in dirs {
                found.extend(self.entries(ino)?.into_iter().map(|e| (e.ino, e.kind)));
            }
            level = level.end..found.len();
        }
        Ok(found)
    }

    /// Lists a directory as `ask` says; `None` if it is gone.
    async fn listed_if_there(self: &Arc<Self>, ino: Ino, ask: Ask<'_>) -> Result<Option<Ino>> {
        let listed = match ask {
            Ask::Nothing => Ok(()),
            Ask::Names(age) => self.ensure_listed_since(ino, age).await,
            Ask::Contents(age, arrivals) => self.ensure_listed_with_contents(ino, age, arrivals).await,
        };
        match listed {
            Err(e) if e.is(ErrorKind::Stale) || e.is(ErrorKind::NotFound) => Ok(None),
            other => other.map(|()| Some(ino)),
        }
    }
}
