//! Write-back: makes the pool equal to the overlay, in an order that respects dependencies.
//!
//! For every name, the catalog holds what the mount shows and what the pool has. A flush makes the second equal to the
//! first. So changes that cancel out (a file created and removed before its flush) leave nothing to do. A flush that
//! was interrupted goes on from what the pool has by then: every step first checks whether it was done already.
//!
//! Locks: a step holds the paths that it uses (`pool_calls/moves.rs`), and a step that moves a directory excludes those below
//! it. So no upload lands under a path that belongs to another directory by then. Steps on one inode hold its `flush`
//! lock. Neither is held while a step waits for another step that it depends on.

mod apply;
mod attrs;
mod clean;
pub(super) mod conflict;
mod conflict_log;
mod create;
mod due;
mod errors;
mod in_doubt;
mod large_uploads;
mod manual_look;
mod notices;
mod parts;
mod rate;
mod reconcile;
mod refused;
pub(super) mod rounds;
mod state;
mod steps;
pub(super) mod sweep;
pub(crate) mod sync;
mod upload;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_backends::{Error, ErrorKind, FileKind, Result};
use forebay_catalog::Intent;
use forebay_policy::Write;
use futures::StreamExt;
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub(crate) use self::state::Flusher;
use super::layout::ASKED_AT_ONCE;
use super::{Inner, Ino};
pub(crate) use upload::{next_data, written_meanwhile};

/// Steps that run at the same time.
const CONCURRENCY: usize = 16;
/// Failures of one flush that are logged one by one.
const LOGGED: usize = 20;

/// What is to be flushed, in the order of the flush.
#[derive(Debug, Default)]
pub(crate) struct FlushPlan {
    /// Names that the mount gave to directories.
    made_dirs: Vec<Intent>,
    made: Vec<Intent>,
    removed: Vec<Intent>,
    files: Vec<Intent>,
    dirs: Vec<Intent>,
    /// Inodes that `made` names: they are counted there.
    named: HashSet<Ino>,
    /// Counts names, and files under names that the pool has. Directories whose names changed are not counted.
    pub changes: u64,
    /// Bytes of content to send.
    pub bytes: u64,
}

impl FlushPlan {
    pub fn is_empty(&self) -> bool {
        [&self.made_dirs, &self.made, &self.removed, &self.files, &self.dirs].iter().all(|intents| intents.is_empty())
    }
}

/// What was not flushed, and why.
pub(crate) struct NotFlushed {
    pub intent: Intent,
    /// The path that operators know.
    pub path: String,
    pub error: Error,
}

pub(crate) type Failed = Vec<NotFlushed>;

/// Returns the intents about names in groups of the same level of their directories, in its order.
fn by_level<L: Ord>(intents: Vec<Intent>, level: impl Fn(Ino) -> L) -> Vec<Vec<Intent>> {
    let mut levels = BTreeMap::<L, Vec<Intent>>::new();
    for intent in intents {
        let (Intent::Name(dir, _) | Intent::Inode(dir)) = &intent;
        levels.entry(level(*dir)).or_default().push(intent);
    }
    levels.into_values().collect()
}

impl Inner {
    /// Flushes one file with everything that it depends on, unless it is local: `close` under `flush = "on-close"` waits for
    /// it.
    pub async fn flush_inode_now(self: &Arc<Self>, ino: Ino) -> Result<()> {
        if !self.may_be_sent(ino).await? {
            return Ok(());
        }
        let links = self.node(ino)?.state.lock().record.links.clone();
        for (parent, name) in links {
            self.reconcile_name(parent, &name).await?;
        }
        self.flush_inode(ino).await?;
        self.sync_flushed().await
    }

    /// Asks for the storage pools of what is to be flushed, if rules name any.
    pub async fn learn_storage_pools_of(&self, intents: &[Intent]) {
        if !self.policy().needed().storage_pool || !self.pool.capabilities().layouts {
            return;
        }
        for some in intents.chunks(ASKED_AT_ONCE) {
            let asked = some.iter().map(|intent| async move {
                if let Some(node) = self.subject_of(intent).and_then(|ino| self.node(ino).ok()) {
                    self.learn_storage_pool(&node).await;
                }
            });
            join_all(asked).await;
        }
    }

    /// Returns whether an inode may be sent to the pool: not if it is local.
    ///
    /// # Errors
    /// Those of [`Self::learn_whether_local`].
    async fn may_be_sent(self: &Arc<Self>, ino: Ino) -> Result<bool> {
        if !self.policy().may_write(Write::Local) {
            return Ok(true);
        }
        let Ok(node) = self.node(ino) else { return Ok(true) };
        self.learn_whether_local(&node).await?;
        Ok(!self.is_local(&node))
    }

    /// Syncs the catalog, so that no flushed file is dirty again after a power cut: it would be sent again, or be in
    /// conflict with what another client wrote meanwhile.
    pub async fn sync_flushed(self: &Arc<Self>) -> Result<()> {
        let inner = self.clone();
        super::blocking(move || inner.catalog.sync()).await
    }

    /// Returns everything that differs below `root`, or everywhere.
    pub async fn differences_below(&self, root: Option<Ino>) -> Result<Vec<Intent>> {
        let mut intents = Vec::new();
        self.catalog.intents(|intent, _| {
            intents.push(intent);
            Ok(true)
        })?;
        let Some(root) = root.filter(|r| *r != Ino::ROOT) else { return Ok(intents) };
        let pool_root = self.pool_path(root).ok();
        intents.retain(|intent| {
            let at = match intent {
                Intent::Inode(ino) => *ino,
                Intent::Name(parent, name) => {
                    let record = self.catalog.name(*parent, name).unwrap_or_default();
                    if record.here_ino() == Some(root) || record.pool == Some(root) {
                        return true;
                    }
                    *parent
                }
            };
            self.is_below(at, root)
                || match (&pool_root, self.pool_path(at)) {
                    (Some(root), Ok(path)) => path.starts_with(root),
                    _ => false,
                }
        });
        Ok(intents)
    }

    /// Returns the directories that have to be asked of the pool before the policy decides about intents.
    pub(crate) fn directories_to_ask<'i>(&self, intents: impl Iterator<Item = &'i Intent>) -> Vec<Ino> {
        if !self.policy().owners_decide_flush() {
            return Vec::new();
        }
        let mut dirs = HashSet::new();
        for intent in intents {
            let (Intent::Name(dir, _) | Intent::Inode(dir)) = intent;
            if let Ok(node) = self.node(self.subject_of(intent).unwrap_or(*dir)) {
                dirs.extend(self.unknown_directories_above(&node));
            }
        }
        dirs.into_iter().collect()
    }

    /// Sorts intents into a plan, without those of files that never go to the pool. If it is not known whether a file does,
    /// its step asks, and fails if the pool does not tell.
    pub fn plan_flush(&self, intents: Vec<Intent>) -> FlushPlan {
        let mut plan = FlushPlan::default();
        for intent in intents {
            if self.policy().may_write(Write::Local) {
                let subject = self.subject_of(&intent).and_then(|ino| self.node(ino).ok());
                if subject.is_some_and(|node| self.is_local(&node) && self.knows_whether_local(&node)) {
                    continue;
                }
            }
            match &intent {
                Intent::Name(parent, name) => {
                    match self.catalog.name(*parent, name).ok().and_then(|record| record.here) {
                        Some((ino, kind)) => {
                            plan.named.insert(ino);
                            if kind == FileKind::Directory { &mut plan.made_dirs } else { &mut plan.made }.push(intent);
                        }
                        None => plan.removed.push(intent),
                    }
                }
                Intent::Inode(ino) => {
                    let node = self.node(*ino);
                    let is_dir = node.is_ok_and(|n| n.state.lock().record.kind == FileKind::Directory);
                    plan.bytes = plan.bytes.saturating_add(self.bytes_of(*ino));
                    if is_dir { &mut plan.dirs } else { &mut plan.files }.push(intent);
                }
            }
        }
        let unnamed = |intent: &&Intent| matches!(intent, Intent::Inode(ino) if !plan.named.contains(ino));
        plan.changes =
            (plan.made_dirs.len() + plan.made.len() + plan.removed.len() + plan.files.iter().filter(unnamed).count())
                as u64;
        plan
    }

    /// Returns the bytes that a flush of an inode has to send.
    fn bytes_of(&self, ino: Ino) -> u64 {
        let Ok(node) = self.node(ino) else { return 0 };
        let dirty = {
            let state = node.state.lock();
            state.record.file.is_dirty() && !state.is_uploaded()
        };
        if dirty { self.attr_of(&node).map_or(0, |a| a.size.min(a.blocks * 512)) } else { 0 }
    }

    /// Flushes a plan. `progress` is called for each change that succeeded, with its bytes.
    pub async fn flush_all(self: &Arc<Self>, plan: FlushPlan, progress: impl Fn(u64) + Sync) -> Failed {
        self.flush_some(plan, forebay_system::descriptors::for_flush(CONCURRENCY), progress).await
    }

    /// The same, with at most `steps` steps at the same time.
    async fn flush_some(self: &Arc<Self>, plan: FlushPlan, steps: usize, progress: impl Fn(u64) + Sync) -> Failed {
        let failed = Mutex::new(Failed::new());
        let FlushPlan { made_dirs, made, removed, files, mut dirs, named, .. } = plan;
        let running = Semaphore::new(steps);
        let run = async |group: Vec<Intent>| {
            let one = async |intent| {
                let _running = running.acquire().await;
                let counted = !matches!(&intent, Intent::Inode(ino) if named.contains(ino));
                if let (Some(bytes), true) = (self.step(intent, &failed).await, counted) {
                    progress(bytes);
                }
            };
            futures::stream::iter(group).for_each_concurrent(steps, one).await;
        };
        // A directory is made before what is in it, and removed after it. So these are done level by level: steps at the
        // same time would wait for each other, in chains as long as the tree is deep. Files do not wait for all
        // directories: writers may wait for the room of any file.
        let made_dirs = by_level(made_dirs, |parent| self.depth(parent));
        let removed = by_level(removed, |parent| Reverse(self.pool_depth(parent)));
        let make_dirs = async {
            for level in made_dirs {
                run(level).await;
            }
        };
        futures::join!(make_dirs, run(made));
        for group in removed.into_iter().chain([files]) {
            run(group).await;
        }
        // A name that is created in a directory changes the directory's times. So they are set last, the deepest first.
        dirs.sort_by_cached_key(|intent| match intent {
            Intent::Inode(ino) => Reverse(self.depth(*ino)),
            Intent::Name(..) => Reverse(0),
        });
        for intent in dirs {
            self.step(intent, &failed).await;
        }
        failed.into_inner()
    }

    /// Returns the path of what an intent is about, for operators.
    fn path_of(&self, intent: &Intent) -> String {
        match intent {
            Intent::Name(parent, name) => {
                let dir = self.overlay_path(*parent).or_else(|| self.pool_path(*parent).ok());
                dir.unwrap_or_default().join(name).to_string()
            }
            Intent::Inode(ino) => self.display(*ino),
        }
    }

    /// Flushes one intent. Returns the bytes that it had to send, if it succeeded.
    async fn step(self: &Arc<Self>, intent: Intent, failed: &Mutex<Failed>) -> Option<u64> {
        let subject = self.subject_of(&intent);
        let bytes = subject.map_or(0, |ino| self.bytes_of(ino));
        let _turn = match subject {
            Some(ino) => self.turn_of_upload(ino, bytes).await,
            None => None,
        };
        let may_be_sent = match subject {
            Some(ino) => self.may_be_sent(ino).await,
            None => Ok(true),
        };
        let result = match (may_be_sent, &intent) {
            (Ok(false), _) => return None,
            (Err(error), _) => Err(error),
            (Ok(true), Intent::Inode(ino)) => self.flush_inode(*ino).await,
            (Ok(true), Intent::Name(parent, name)) => self.reconcile_name(*parent, name).await,
        };
        let node = subject.and_then(|ino| self.table.peek(ino));
        match result {
            Ok(()) => {
                if let Some(node) = node {
                    if let (Intent::Inode(ino), Err(error)) = (&intent, self.drop_written_around(&node)) {
                        tracing::warn!(%error, %ino, "what was written around the fast pool was not dropped");
                    }
                    self.flusher.errors.forget(node.ino);
                    let ino = node.ino;
                    drop(node);
                    self.table.drop_idle(ino);
                }
                Some(bytes)
            }
            // It is gone, or another flush was faster: nothing to flush.
            Err(e) if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound) && !self.still_differs(&intent) => {
                None
            }
            Err(e) => {
                self.counters.flush_failures.fetch_add(1, Ordering::Relaxed);
                let path = self.path_of(&intent);
                let is_news = subject.is_none_or(|ino| self.flusher.errors.note(ino, &e));
                let mut failed = failed.lock();
                // Further failures are in the summary of the round, and their reasons in `dirty`.
                if is_news && failed.len() < LOGGED {
                    tracing::warn!(path, error = %e, "not flushed; it stays in the fast pool");
                }
                failed.push(NotFlushed { intent, path, error: e });
                None
            }
        }
    }
}
