//! Sweeps unfinished files that a killed daemon left in the pool. Their names tell which process wrote them.
//!
//! The directories of uploads, and the processes that uploaded from this fast pool, are in the catalog before the first
//! byte is sent. After the next start, the files of processes that ended are removed from these directories.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{ErrorKind, PoolPath, Result, this_writer};
use parking_lot::Mutex;

use super::super::{Inner, Ino};

/// Prefix of the key of each directory that is uploaded to.
const DIRECTORY: &str = "uploading/";
/// Key of the processes that may have left files.
const WRITERS: &str = "writers";
/// Processes that are remembered, at most: a daemon that never lives until all is swept cannot reach its pool.
const WRITERS_MAX: usize = 256;
/// A directory that could not be swept is tried again after this.
const AGAIN: Duration = Duration::from_secs(60);

/// Uploads in progress in each directory. A directory without uploads stays until the next sync of the catalog.
#[derive(Debug, Default)]
pub(crate) struct Uploading(Mutex<UploadDirs>);

#[derive(Debug, Default)]
struct UploadDirs {
    uploads: HashMap<Ino, u32>,
    /// Directories from which the files of earlier daemons are not removed yet.
    unswept: HashSet<Ino>,
}

/// One upload in progress.
pub(super) struct Noted<'a> {
    uploading: &'a Uploading,
    dir: Ino,
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        if let Some(uploads) = self.uploading.0.lock().uploads.get_mut(&self.dir) {
            *uploads = uploads.saturating_sub(1);
        }
    }
}

/// What earlier daemons may have left.
pub(crate) struct Left {
    dirs: Vec<Ino>,
    writers: Vec<String>,
}

impl Inner {
    /// Notes that a file is about to be created in a directory of the pool. The note must be durable before that: see
    /// `about_to_send`.
    pub(super) fn note_upload(&self, dir: Ino) -> Result<Noted<'_>> {
        let uploading = &self.flusher.uploading;
        let mut dirs = uploading.0.lock();
        if !dirs.uploads.contains_key(&dir) {
            self.catalog.set_meta(&key(&dir), &())?;
        }
        *dirs.uploads.entry(dir).or_default() += 1;
        Ok(Noted { uploading, dir })
    }

    /// Forgets directories without uploads. Blocks.
    pub(crate) fn forget_uploads(&self) -> Result<()> {
        let mut dirs = self.flusher.uploading.0.lock();
        let ended = dirs.uploads.iter().filter(|(_, uploads)| **uploads == 0).map(|(dir, _)| dir);
        let keys: Vec<String> = ended.filter(|dir| !dirs.unswept.contains(dir)).map(key).collect();
        if !keys.is_empty() {
            self.catalog.delete_meta(&keys)?;
        }
        dirs.uploads.retain(|_, uploads| *uploads > 0);
        Ok(())
    }

    /// Returns what is to be swept. Called before this daemon uploads anything itself.
    pub(crate) fn left_uploads(&self) -> Result<Left> {
        let mut writers: Vec<String> = self.catalog.meta(WRITERS)?.unwrap_or_default();
        let dirs = self.catalog.meta_keys(DIRECTORY)?;
        let dirs: Vec<Ino> =
            dirs.iter().filter_map(|key| Some(Ino(key.strip_prefix(DIRECTORY)?.parse().ok()?))).collect();
        self.flusher.uploading.0.lock().unswept.extend(&dirs);
        if !writers.iter().any(|writer| writer == this_writer()) {
            writers.push(this_writer().to_owned());
            let first = writers.len().saturating_sub(WRITERS_MAX);
            writers.drain(..first);
            self.catalog.set_meta(WRITERS, &writers)?;
        }
        writers.retain(|writer| writer != this_writer());
        Ok(Left { dirs, writers })
    }

    /// Sweeps what is left, and retries as long as the pool cannot be reached.
    pub(crate) async fn sweep_pool(self: Arc<Self>, mut left: Left) {
        while !left.writers.is_empty() {
            let mut again = Vec::new();
            for dir in std::mem::take(&mut left.dirs) {
                match self.sweep_directory(dir, &left.writers).await {
                    Ok(removed) => {
                        if removed > 0 {
                            let path = self.pool_path(dir).unwrap_or_default();
                            tracing::info!(%path, removed, "unfinished uploads of a daemon that died are removed");
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%dir, %error, "unfinished uploads are not removed yet");
                        again.push(dir);
                    }
                }
            }
            left.dirs = again;
            if left.dirs.is_empty() {
                if let Err(error) = self.all_swept() {
                    tracing::warn!(%error, "the sweep is repeated after the next start");
                }
                break;
            }
            tokio::time::sleep(AGAIN).await;
        }
        std::future::pending().await
    }

    async fn sweep_directory(&self, dir: Ino, writers: &[String]) -> Result<u64> {
        let path: PoolPath = match self.pool_path(dir) {
            // Removed since, with everything in it.
            Err(e) if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound) => return Ok(0),
            path => path?,
        };
        match self.ask(self.pool.sweep_unfinished(&path, writers)).await {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => Ok(0),
            Err(e) if e.is(ErrorKind::ReadOnly) => Ok(0),
            removed => removed,
        }
    }

    /// Records that nothing is left of earlier daemons.
    fn all_swept(&self) -> Result<()> {
        self.catalog.set_meta(WRITERS, &vec![this_writer()])?;
        let mut dirs = self.flusher.uploading.0.lock();
        let swept = dirs.unswept.iter().filter(|dir| !dirs.uploads.contains_key(dir));
        self.catalog.delete_meta(&swept.map(key).collect::<Vec<_>>())?;
        dirs.unswept.clear();
        Ok(())
    }
}

fn key(dir: &Ino) -> String {
    format!("{DIRECTORY}{}", dir.0)
}
