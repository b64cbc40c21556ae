//! Listings of directories.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result};
use futures::{StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;
use tokio::task::coop::consume_budget;

use super::super::coherence::Age;
use super::super::permission::UserGroups;
use super::super::{CachedPages, Dirent, Inner, Ino, Overlay};

/// Directories of one tree that are listed at the same time.
const LISTED_AT_ONCE: usize = 8;
/// Inodes of one tree whose rights are asked for at the same time.
const JUDGED_AT_ONCE: usize = 16;

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
            for ino in self.listed_dirs(dirs.collect(), ask).await? {
                found.extend(self.entries(ino)?.into_iter().map(|e| (e.ino, e.kind)));
            }
            level = level.end..found.len();
        }
        Ok(found)
    }

    /// As [`Self::tree`], for a user. What the user may not read is returned beside the tree, with the reason, and nothing
    /// below it is looked at.
    pub async fn tree_for(
        self: &Arc<Self>,
        root: Ino,
        ask: Ask<'_>,
        user: &UserGroups,
    ) -> Result<(Vec<(Ino, FileKind)>, Vec<(Ino, Error)>)> {
        let kind = self.node(root)?.state.lock().record.kind;
        let (mut found, mut refused) = (Vec::new(), Vec::new());
        let mut level = vec![(root, kind)];
        while !level.is_empty() {
            let readable = level.iter().filter(|(_, kind)| matches!(kind, FileKind::File | FileKind::Directory));
            let readable: Vec<Ino> = readable.map(|(ino, _)| *ino).collect();
            self.learn_acls(readable, user).await?;
            let judged = stream::iter(level).map(|(ino, kind)| async move {
                // Of most inodes, all is known: without this, the task would not yield.
                consume_budget().await;
                (ino, kind, self.check_readable(ino, kind, user).await)
            });
            let judged: Vec<_> = judged.buffered(JUDGED_AT_ONCE).collect().await;
            let mut dirs = Vec::new();
            for (ino, kind, allowed) in judged {
                match allowed {
                    Err(e) if e.is_gone() && ino != root => {}
                    Err(e) => refused.push((ino, e)),
                    Ok(()) => {
                        found.push((ino, kind));
                        dirs.extend((kind == FileKind::Directory).then_some(ino));
                    }
                }
            }
            level = Vec::new();
            for ino in self.listed_dirs(dirs, ask).await? {
                level.extend(self.entries(ino)?.into_iter().map(|e| (e.ino, e.kind)));
            }
        }
        Ok((found, refused))
    }

    /// Lists directories as `ask` says. Returns those that are still there, in the same order.
    async fn listed_dirs(self: &Arc<Self>, dirs: Vec<Ino>, ask: Ask<'_>) -> Result<Vec<Ino>> {
        if matches!(ask, Ask::Nothing) {
            return Ok(dirs);
        }
        let listed = stream::iter(dirs).map(|ino| self.listed_if_there(ino, ask)).buffered(LISTED_AT_ONCE);
        listed.try_filter_map(|listed| async move { Ok(listed) }).try_collect().await
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
