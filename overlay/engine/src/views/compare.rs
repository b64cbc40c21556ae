//! Compares a view with what the pool has now.

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Instant;

use forebay_api::paths;
use forebay_api::views::ViewChanges;
use forebay_backends::{FileKind, PoolPath, Result};

use super::tree_of;
use crate::coherence::Age;
use crate::namespace::Ask;
use crate::{Inner, Ino, blocking, parse_path};

/// Paths that are named.
const NAMED_MAX: usize = 100;

impl ViewChangesExt for ViewChanges {
    fn name(&mut self, what: &str, path: &[u8]) {
        match what {
            "changed" => self.changed += 1,
            "added" => self.added += 1,
            _ => self.removed += 1,
        }
        if self.named.len() < NAMED_MAX {
            self.named.push((what.to_owned(), paths::encode(path)));
        }
    }
}

trait ViewChangesExt {
    fn name(&mut self, what: &str, path: &[u8]);
}

impl Inner {
    pub(super) async fn compare(self: Arc<Self>, id: &str) -> Result<ViewChanges> {
        let record = self.laid_view(id)?;
        let root = Ino(record.ino);
        let shown = parse_path(&record.path)?;
        let tree = tree_of(&self.store.view_path(record.device, id)?);
        self.revalidate(root, Age::Now).await?;
        let now = self.tree(root, Ask::Names(Age::Since(Instant::now()))).await?;
        let inner = self.clone();
        blocking(move || inner.differences(&tree, &shown, &now)).await
    }

    fn differences(&self, tree: &std::path::Path, shown: &PoolPath, now: &[(Ino, FileKind)]) -> Result<ViewChanges> {
        let mut changes = ViewChanges::default();
        let mut known: HashSet<Vec<u8>> = HashSet::new();
        for (ino, kind) in now {
            // Each name of an inode below the tree.
            let Some(path) = self.overlay_path(*ino) else { continue };
            let Ok(below) = path.as_path().strip_prefix(shown.as_path()) else { continue };
            let there = if below.as_os_str().is_empty() { tree.to_owned() } else { tree.join(below) };
            known.insert(path.as_bytes().to_vec());
            match std::fs::symlink_metadata(&there) {
                Err(_) => changes.name("added", path.as_bytes()),
                Ok(meta) if !self.is_shown_by(*ino, *kind, &meta) => changes.name("changed", path.as_bytes()),
                Ok(_) => {}
            }
            self.table.drop_idle(*ino);
        }
        let mut left = vec![tree.to_owned()];
        while let Some(path) = left.pop() {
            let Ok(below) = path.strip_prefix(tree) else { continue };
            let in_mount =
                if below.as_os_str().is_empty() { shown.clone() } else { shown.join(below.as_os_str().as_bytes()) };
            if !known.contains(in_mount.as_bytes()) {
                changes.name("removed", in_mount.as_bytes());
                continue;
            }
            if std::fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir()) {
                left.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
            }
        }
        Ok(changes)
    }

    /// Returns whether an entry of a view is what the mount shows.
    fn is_shown_by(&self, ino: Ino, kind: FileKind, meta: &std::fs::Metadata) -> bool {
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
