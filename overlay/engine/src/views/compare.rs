//! Compares a view with what the pool has now.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay_api::paths;
use forebay_api::views::{ViewChange, ViewChanges};
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result};
use futures::{StreamExt, TryStreamExt, stream};

use super::tree_of;
use crate::coherence::Age;
use crate::namespace::Ask;
use crate::{Inner, Ino, blocking, parse_path};

/// Paths that are named.
const NAMED_MAX: usize = 100;
/// Files that the pool is asked for at the same time.
const ASKED_AT_ONCE: usize = 16;

/// Counts a difference, and names some of them.
fn note(changes: &mut ViewChanges, what: ViewChange, path: &PoolPath) {
    match what {
        ViewChange::Changed => changes.changed += 1,
        ViewChange::Added => changes.added += 1,
        ViewChange::Removed => changes.removed += 1,
    }
    if changes.named.len() < NAMED_MAX {
        changes.named.push((what, paths::encode(path.as_bytes())));
    }
}

impl Inner {
    pub(super) async fn compare(self: Arc<Self>, id: &str) -> Result<ViewChanges> {
        let record = self.laid_view(id)?;
        let root = Ino(record.ino);
        let shown = parse_path(&record.path)?;
        let tree = tree_of(&self.store.view_path(record.device, id)?);
        self.revalidate(root, Age::Now).await?;
        // Makes the names known, and drops what the pool has replaced.
        let begun = Age::Since(Instant::now());
        let now = self.tree(root, Ask::Names(begun)).await?;
        // A listing need not tell of files that changed in place.
        let files = now.into_iter().filter(|(_, kind)| *kind == FileKind::File);
        let asked = stream::iter(files).map(|(ino, _)| {
            let inner = self.clone();
            async move {
                let gone = |e: &Error| matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound);
                let asked = inner.revalidate(ino, begun).await;
                inner.table.drop_idle(ino);
                asked.or_else(|e| if gone(&e) { Ok(()) } else { Err(e) })
            }
        });
        asked.buffer_unordered(ASKED_AT_ONCE).try_collect::<()>().await?;
        let inner = self.clone();
        blocking(move || inner.differences(root, &tree, shown)).await
    }

    fn differences(&self, root: Ino, tree: &Path, shown: PoolPath) -> Result<ViewChanges> {
        let mut changes = ViewChanges::default();
        let kind = self.node(root)?.state.lock().record.kind;
        let mut left = vec![(root, kind, shown, tree.to_owned())];
        while let Some((ino, kind, path, there)) = left.pop() {
            match fs::symlink_metadata(&there) {
                Err(_) => note(&mut changes, ViewChange::Added, &path),
                Ok(meta) if !self.is_shown_by(ino, kind, &meta) => note(&mut changes, ViewChange::Changed, &path),
                Ok(_) if kind == FileKind::Directory => {
                    let mut gone: HashSet<OsString> = names_in(&there);
                    for entry in self.entries(ino)? {
                        let name = OsStr::from_bytes(&entry.name);
                        gone.remove(name);
                        left.push((entry.ino, entry.kind, path.join(&entry.name), there.join(name)));
                    }
                    let mut removed =
                        |name: &OsString| note(&mut changes, ViewChange::Removed, &path.join(name.as_bytes()));
                    gone.iter().for_each(&mut removed);
                }
                Ok(_) => {}
            }
            self.table.drop_idle(ino);
        }
        Ok(changes)
    }

    /// Returns whether an entry of a view is what the mount shows.
    fn is_shown_by(&self, ino: Ino, kind: FileKind, meta: &fs::Metadata) -> bool {
        match kind {
            FileKind::File => {
                let content = self.node(ino).ok().and_then(|node| node.state.lock().record.file.content());
                content.and_then(|id| self.store.stat(id).ok()).is_some_and(|own| own.ino() == meta.ino())
            }
            FileKind::Directory => meta.is_dir(),
            FileKind::Symlink => meta.is_symlink(),
            _ => true,
        }
    }
}

fn names_in(dir: &Path) -> HashSet<OsString> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
}
