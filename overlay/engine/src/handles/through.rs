//! Files that do not fit into the fast pool: programs write them through to the pool's copy.
//!
//! If the flush can make no room for a write, what the fast pool has of the file is flushed and given up. From then on,
//! each write goes to the pool's object before it returns, and each read comes from there: no bytes are resident, and
//! none are only here. The record gets the new version after each write. The daemon may be killed in between, so a
//! version of the same object that it does not know counts as its own (`coherence/import`). This ends with the last
//! close.
//!
//! The pool must be able to write a range of an object (`ranged_write`). A file that the kernel writes or reads past the
//! daemon stays as it is, because the kernel would go on using the content file.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use forebay_backends::{Error, ErrorKind, PoolPath, Result, SetAttrs, Side, Stat, Version};
use forebay_cache::is_open_elsewhere;
use forebay_catalog::InodeRecord;
use forebay_policy::{FlushPolicy, Write};
use forebay_system::clock::stamp_now;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::pool_calls::PoolChange;
use super::super::{Inner, Txn};
use super::open::check_current;
use crate::node::{Node, NodeState};

/// How often it is tried to give up the content of a file: other writers may be about to change it.
const ATTEMPTS: u32 = 20;
/// How often the content is uploaded for that.
const UPLOADS: u32 = 2;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// How often attributes are flushed before a write goes to the pool.
const SETTLE_ATTEMPTS: u32 = 3;
/// The extended attribute of file capabilities: a privilege that new content must not have.
const CAPABILITIES: &[u8] = b"security.capability";

/// Whether a write failed because the fast pool, or a user's share of it, has no room and the flush can make none.
pub(super) fn is_full(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Quota) && error.side() == Side::Cache
}

/// Whether the pool still has privileges of a file that new content must not have.
fn has_privileges_to_drop(record: &InodeRecord) -> bool {
    let capabilities = record.dirty_xattrs.iter().any(|(name, _)| **name == *CAPABILITIES);
    record.dirty.mode || record.dirty.owner || capabilities
}

impl Node {
    /// Whether a descriptor of the content file may be that of a write which the daemon carries out: it may have been
    /// opened before the one that the daemon has now.
    pub(super) fn is_changed_by_daemon(&self) -> bool {
        let opens = &self.state.lock().opens;
        opens.is_changing() && !opens.may_bypass() && !opens.may_pass_through()
    }
}

impl Inner {
    /// Returns whether the content of a file can never be in the fast pool as a whole.
    pub(super) fn exceeds_fast_pool(&self, node: &Node) -> bool {
        let record = &node.state.lock().record;
        !record.file.is_whole() && !record.file.is_dirty() && record.clean_bytes() > self.store.budget.limit()
    }

    /// Begins to write a file through. `full`: why a write to the content file failed. Returns `false` if other programs
    /// change the file just now: then the write may be tried again.
    ///
    /// # Errors
    /// `full` if the file cannot be written through.
    pub(super) fn begin_write_through<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        full: &'a Error,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let refused = || Error::new(full.kind(), full.side(), full.to_string());
            if !self.may_write_through(node) {
                return Err(refused());
            }
            let _waiting = self.wait_for_room();
            let (mut uploads, mut is_refused) = (0..UPLOADS, false);
            for _ in 0..ATTEMPTS {
                let (file, is_uploaded) = {
                    let state = node.state.lock();
                    (state.record.file, state.is_uploaded())
                };
                if file.is_written_through() {
                    return Ok(true);
                }
                let is_used = self.is_used_past_daemon(node)?;
                is_refused = is_used && !node.is_changed_by_daemon();
                if is_used {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                if file.is_dirty() && !is_uploaded {
                    if uploads.next().is_none() {
                        return Ok(false);
                    }
                    match self.flush_inode_now(node.ino).await {
                        Ok(()) => {}
                        // It was written meanwhile.
                        Err(e) if matches!(e.kind(), ErrorKind::Busy | ErrorKind::Conflict) => return Ok(false),
                        Err(error) => {
                            let path = self.display(node.ino);
                            tracing::warn!(%path, %error, "it does not fit into the fast pool, and cannot be written through");
                            return Err(refused());
                        }
                    }
                }
                if self.try_begin_write_through(node).await? {
                    let path = self.display(node.ino);
                    tracing::info!(%path, "it does not fit into the fast pool: it is written through to the pool");
                    return Ok(true);
                }
                tokio::time::sleep(PAUSE).await;
            }
            if is_refused { Err(refused()) } else { Ok(false) }
        }
        .boxed()
    }

    /// Whether the kernel reads or writes the content file of a file without the daemon.
    pub(super) fn is_used_past_daemon(&self, node: &Node) -> Result<bool> {
        // Kept for the next open, it would count as a user of the content file.
        self.release_content(node.ino);
        let mut state = node.state.lock();
        if state.record.file.content().is_none() {
            return Ok(false);
        }
        // Without a descriptor of its own, the daemon would not see that the kernel has one.
        let content = self.content(node.ino, &mut state)?;
        Ok(state.opens.may_bypass() || is_open_elsewhere(&content.file))
    }

    /// Returns whether the policy lets bytes of a file go to the pool without a request. While it is not known what
    /// directories and the storage pool say, it does not.
    pub(super) fn goes_to_pool(&self, node: &Node) -> bool {
        if !self.knows_flush_settings(node) || !self.knows_whether_local(node) {
            return false;
        }
        let policy = self.policy_of(node);
        policy.write != Write::Local && policy.flush() != FlushPolicy::Manual
    }

    fn may_write_through(&self, node: &Node) -> bool {
        let goes_to_pool = self.goes_to_pool(node);
        let record = &node.state.lock().record;
        let has_set_id = record.mode & 0o6000 != 0;
        self.pool.capabilities().ranged_write && goes_to_pool && record.has_names() && !has_set_id
    }

    /// Gives up the content of a file that the pool has. Returns `false` if the pool does not have all of it, or a
    /// program may change or read the content file.
    async fn try_begin_write_through(self: &Arc<Self>, node: &Arc<Node>) -> Result<bool> {
        let ino = node.ino;
        // Kept for the next open, it would count as a user of the content file.
        self.release_content(ino);
        let (is_dirty, stamp) = {
            let state = node.state.lock();
            (state.record.file.is_dirty(), state.dirty_content.pool_stamp())
        };
        if is_dirty {
            let Some(stamp) = stamp else { return Ok(false) };
            if !self.unmark_dirty_unless(node, stamp, |opens| opens.is_changing() || opens.may_bypass())? {
                return Ok(false);
            }
            // The content file is removed only after the catalog durably has the file as clean.
            self.sync_flushed().await?;
        }
        let mut txn = Txn::begin(self);
        let state = txn.state(ino)?;
        check_current(state)?;
        let content = match state.record.file.content() {
            // Without a descriptor of its own, the daemon would not see that the kernel has one.
            Some(_) => Some(txn.content(ino)?),
            None => None,
        };
        let state = txn.state(ino)?;
        let is_open_outside = content.is_some_and(|content| is_open_elsewhere(&content.file));
        let is_used = state.opens.is_changing() || state.opens.may_bypass() || is_open_outside;
        let record = txn.record(ino)?;
        if is_used || record.file.is_dirty() || !record.in_pool() {
            return Ok(false);
        }
        if record.file.is_written_through() {
            return Ok(true);
        }
        if !record.file.is_absent() {
            txn.give_up(ino)?;
        }
        let record = txn.record(ino)?;
        record.file = record.file.begin_write_through()?;
        txn.on_commit(ino, NodeState::changed)?;
        txn.commit()?;
        self.tell_kernel_inode(ino, true);
        Ok(true)
    }

    /// Writes a range of a file that is written through; `None`: it no longer is.
    pub(super) fn write_through<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        offset: u64,
        data: Bytes,
    ) -> BoxFuture<'a, Result<Option<u32>>> {
        async move {
            let bytes = data.len() as u64;
            self.may_request().await;
            self.may_send(bytes).await;
            let write = |path| async move { self.pool.write_at(&path, offset, data).await };
            let written = self.change_pool_copy(node, bytes, write).await?;
            self.counters.pool_written_bytes.fetch_add(if written { bytes } else { 0 }, Ordering::Relaxed);
            Ok(written.then_some(bytes as u32))
        }
        .boxed()
    }

    /// Sets the size of a file that is written through. Returns `false` if it no longer is.
    pub(super) fn truncate_through<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        size: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let change = SetAttrs { size: Some(size), ..SetAttrs::default() };
            self.may_request().await;
            let cut = |path| async move { self.pool.set_attrs(&path, &change).await };
            self.change_pool_copy(node, 0, cut).await
        }
        .boxed()
    }

    /// Changes the pool's copy of a file that is written through, and records its new version. Returns `false`, without
    /// a change, if the file is no longer written through. `bytes`: how many are written.
    async fn change_pool_copy<F>(
        self: &Arc<Self>,
        node: &Arc<Node>,
        bytes: u64,
        change: impl FnOnce(PoolPath) -> F + Send,
    ) -> Result<bool>
    where
        F: Future<Output = Result<Stat>> + Send,
    {
        let ino = node.ino;
        self.check_writable()?;
        for _ in 0..SETTLE_ATTEMPTS {
            self.resolve_doubt(ino).await?;
            if has_privileges_to_drop(&self.record_of(ino)?) {
                self.flush_inode(ino).await?;
            }
            let _locks = self.hold_path(node).await;
            let record = {
                let state = node.state.lock();
                check_current(&state)?;
                state.record.clone()
            };
            if !record.file.is_written_through() {
                return Ok(false);
            }
            if has_privileges_to_drop(&record) || self.is_in_doubt(ino)? {
                continue;
            }
            // The directories, too: a listing that was requested before has the old size.
            let mut touched = vec![ino];
            touched.extend(record.pool_links.iter().map(|(parent, _)| *parent));
            let _change = PoolChange::begin(self, &touched)?;
            let path = self.pool_path(ino)?.of_object(record.version.as_ref().and_then(Version::identity));
            return match self.ask(change(path)).await {
                Ok(stat) => {
                    self.take_pool_copy(node, &stat, Some(stamp_now()))?;
                    let due = {
                        let mut state = node.state.lock();
                        state.pool_sync.wrote(bytes);
                        state.pool_sync.is_due()
                    };
                    if due {
                        self.sync_pool_copy(node).await?;
                    }
                    Ok(true)
                }
                Err(error) => {
                    // It may have reached the pool all the same.
                    let _ = self.look_at_pool_copy(node).await;
                    // Or it may reach it later.
                    node.state.lock().validated = None;
                    Err(self.no_longer_there(node, error.context(self.display(ino))))
                }
            };
        }
        let what = format!("{}: its attributes cannot be brought to the pool", self.display(ino));
        Err(Error::new(ErrorKind::Busy, Side::Pool, what))
    }

    /// Reads a range of a file that is written through. No write of this daemon changes the version meanwhile.
    pub(super) fn read_through<'a>(
        self: &'a Arc<Self>,
        node: &'a Arc<Node>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<Bytes>> {
        async move {
            {
                let _locks = self.hold_path(node).await;
                match self.read_as_known(node, range.clone()).await {
                    Err(e) if e.is(ErrorKind::Stale) => {
                        self.look_at_pool_copy(node).await.map_err(|e| self.no_longer_there(node, e))?;
                        if let Ok(data) = self.read_as_known(node, range.clone()).await {
                            return Ok(data);
                        }
                    }
                    // It is no longer written through, or removed.
                    Err(e) if e.is(ErrorKind::NotFound) => {}
                    other => return other,
                }
            }
            self.read_uncached(node, range).await
        }
        .boxed()
    }
}
