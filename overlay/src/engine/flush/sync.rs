//! Names that flushes change in the pool, made durable there.
//!
//! Which directories have some is in the catalog, ahead of every call that changes a name: whoever takes over after a
//! kill syncs them, though their files are clean by then.

use std::collections::HashMap;

use forebay_backends::{ErrorKind, Result};
use parking_lot::Mutex;

use super::super::{Inner, Ino};
use crate::catalog::Catalog;

/// Directories of the pool that are not synced yet.
#[derive(Debug, Default)]
pub(crate) struct PoolDirs {
    dirs: Mutex<HashMap<Ino, Unsynced>>,
    /// Held while they are synced.
    syncing: tokio::sync::Mutex<()>,
}

/// One of them. It is marked in the catalog as long as it is known here.
#[derive(Debug, Default)]
struct Unsynced {
    /// Changes under way: a sync does not cover them.
    changing: u32,
    changed: bool,
}

/// Names of the pool are being changed.
pub(super) struct NamesChange<'a> {
    dirs: &'a PoolDirs,
    inos: Vec<Ino>,
}

impl Drop for NamesChange<'_> {
    fn drop(&mut self) {
        let mut dirs = self.dirs.dirs.lock();
        for ino in &self.inos {
            let dir = dirs.entry(*ino).or_default();
            dir.changing -= 1;
            // Also where the call failed: its answer may be lost.
            dir.changed = true;
        }
    }
}

impl PoolDirs {
    /// What was left unsynced by whoever had the catalog before.
    pub fn load(catalog: &Catalog) -> Result<Self> {
        let mut dirs = HashMap::new();
        catalog.unsynced(|ino| _ = dirs.insert(ino, Unsynced { changing: 0, changed: true }))?;
        Ok(Self { dirs: Mutex::new(dirs), ..Self::default() })
    }

    pub fn have_changed(&self) -> bool {
        self.dirs.lock().values().any(|dir| dir.changed)
    }

    fn take_changed(&self) -> Vec<Ino> {
        let mut dirs = self.dirs.lock();
        let taken = |(ino, dir): (&Ino, &mut Unsynced)| std::mem::take(&mut dir.changed).then_some(*ino);
        dirs.iter_mut().filter_map(taken).collect()
    }
}

impl Inner {
    /// Names are about to change in directories of the pool. The caller keeps what it gets until it has the answer.
    pub(super) fn change_names(&self, inos: &[Ino]) -> Result<NamesChange<'_>> {
        let pool_dirs = &self.flusher.pool_dirs;
        let mut dirs = pool_dirs.dirs.lock();
        let mut batch = self.catalog.batch();
        inos.iter().filter(|ino| !dirs.contains_key(ino)).for_each(|ino| batch.set_unsynced(*ino, true));
        if !batch.is_empty() {
            self.catalog.write(batch)?;
        }
        inos.iter().for_each(|ino| dirs.entry(*ino).or_default().changing += 1);
        Ok(NamesChange { dirs: pool_dirs, inos: inos.to_vec() })
    }

    /// Makes the names that flushes changed durable in the pool. No lock of the flusher may be held.
    pub async fn sync_pool_dirs(&self) -> Result<()> {
        let pool_dirs = &self.flusher.pool_dirs;
        // Who finds nothing to do waits for who does it.
        let _syncing = pool_dirs.syncing.lock().await;
        let mut first = None;
        for ino in pool_dirs.take_changed() {
            let pool = &self.pool;
            let synced = match self.ask_of(ino, async |path| pool.sync_dir(&path).await).await {
                // Removed since, which changed its parent.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory | ErrorKind::Stale) => {
                    Ok(())
                }
                synced => synced,
            };
            let mut dirs = pool_dirs.dirs.lock();
            let Some(dir) = dirs.get_mut(&ino) else { continue };
            match synced {
                Ok(()) if dir.changing == 0 && !dir.changed => {
                    let mut batch = self.catalog.batch();
                    batch.set_unsynced(ino, false);
                    self.catalog.write(batch)?;
                    dirs.remove(&ino);
                }
                Ok(()) => {}
                Err(e) => {
                    dir.changed = true;
                    first.get_or_insert(e);
                }
            }
        }
        first.map_or(Ok(()), Err)
    }
}
