//! Attributes: read and changed.
//!
//! When the kernel is notified to forget an inode, it drops the attributes that a running GETATTR is about to return.
//! It may then decide by older attributes, or by none. So while the engine prepares an answer on attributes, it
//! withholds notifications that this answer makes unnecessary (`Answering`).

use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_cache::Stamp;
use forebay_policy::{FlushPolicy, QuotaSubject};
use forebay_system::clock::stamp_now;

use super::coherence::{Age, chmod_acl};
use super::set_id::{content_now, is_written_since, note_set_id};
use super::{Attr, Caller, Change, Inner, Ino, Overlay, SetTime, Space, Txn};
use crate::node::Node;
use crate::quotas::{QuotaPromise, QuotaRoom};
use crate::set_id::drop_set_id;

/// The kernel waits for attributes of an inode, so it needs no notification of changes that the answer shows.
struct Answering<'a> {
    inner: &'a Inner,
    node: Arc<Node>,
    ended: bool,
}

impl<'a> Answering<'a> {
    fn begin(inner: &'a Inner, node: Arc<Node>) -> Self {
        node.state.lock().kernel.answering += 1;
        Self { inner, node, ended: false }
    }

    /// The answer is built from the present state.
    fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        let withheld = {
            let mut state = self.node.state.lock();
            state.kernel.answering -= 1;
            if state.kernel.answering == 0 { std::mem::take(&mut state.kernel.news_withheld) } else { false }
        };
        if withheld && !self.ended {
            // There is no answer: the request failed, or was cancelled.
            self.inner.tell_kernel_inode(self.node.ino, true);
        }
    }
}

impl Overlay {
    /// Returns the attributes of an inode, and how long the kernel may cache them.
    pub async fn getattr(&self, ino: Ino) -> Result<(Attr, Duration)> {
        let inner = &self.inner;
        let answering = Answering::begin(inner, inner.node(ino)?);
        match inner.revalidate(ino, Age::Metadata).await {
            // Removed in the pool while open: the last known attributes are shown.
            Err(e) if e.is(ErrorKind::Stale) && inner.table.peek(ino).is_some() => {}
            other => other?,
        }
        let node = inner.node(ino)?;
        match inner.take_set_id(&node) {
            // The bits are not shown, although that cannot be recorded now.
            Err(e) if e.is(ErrorKind::NoSpace) => {}
            recorded => recorded?,
        }
        // Later changes may be too late for this answer.
        answering.end();
        Ok((inner.attr_of(&node)?, inner.ttl_of(&node)))
    }

    /// Changes attributes. The kernel checks whether the caller may (`default_permissions`).
    pub async fn setattr(&self, ino: Ino, change: &Change, caller: Caller) -> Result<(Attr, Duration)> {
        let inner = &self.inner;
        inner.check_writable()?;
        let node = inner.node(ino)?;
        if let Some(size) = change.size {
            inner.file_node(ino)?;
            inner.truncate(&node, size).await?;
        }
        let _room = inner.room_for_new_group(&node, change, caller).await?;
        inner.apply(&node, change, caller)?;
        if change.size.is_some() && !node.state.lock().opens.any() {
            inner.flusher.bell.notify_one();
        }
        Ok((inner.attr_of(&node)?, inner.ttl_of(&node)))
    }

    /// Returns the sizes of the pool, where files end up, less the bytes that are not flushed yet. `status` shows the
    /// sizes of the fast pool. Below the directory of a project whose changes stay on this node until an operator flushes
    /// them, there is no more than the project's quota allows.
    pub async fn statfs(&self, ino: Ino) -> Result<Space> {
        let space = self.pool_space().await?;
        Ok(self.inner.project_room(ino).map_or(space, |room| room.bounding(space)))
    }

    async fn pool_space(&self) -> Result<Space> {
        match self.inner.ask(self.inner.pool.space()).await {
            Err(e) if e.is_unreachable() => {
                let budget = &self.inner.store.budget;
                let free = budget.limit().saturating_sub(budget.used());
                Ok(Space {
                    total_bytes: budget.limit(),
                    free_bytes: free,
                    available_bytes: free,
                    total_files: 0,
                    free_files: 0,
                })
            }
            Err(e) => Err(e),
            Ok(space) => {
                let inner = self.inner.clone();
                let dirty = super::blocking(move || inner.dirty_bytes_lately()).await?;
                Ok(Space {
                    free_bytes: space.free_bytes.saturating_sub(dirty),
                    available_bytes: space.available_bytes.saturating_sub(dirty),
                    ..space
                })
            }
        }
    }
}

impl Inner {
    /// Returns what the quota of a project allows at a file or directory: that of the group of its setgid directory.
    /// `None`: there is no such quota, or the flush makes room by itself.
    fn project_room(&self, ino: Ino) -> Option<QuotaRoom> {
        if !self.quotas.count() {
            return None;
        }
        let mut node = self.node(ino).ok()?;
        let parent = {
            let state = node.state.lock();
            let is_directory = state.record.kind == FileKind::Directory;
            if is_directory { None } else { Some(state.record.links.first()?.0) }
        };
        if let Some(parent) = parent {
            node = self.node(parent).ok()?;
        }
        let policy = self.policy_of(&node);
        if policy.flush() != FlushPolicy::Manual {
            return None;
        }
        let state = node.state.lock();
        let is_project = state.record.mode & libc::S_ISGID != 0;
        is_project.then(|| self.quotas.room_of(QuotaSubject::Group(state.record.gid)))
    }

    /// Promises room in the quota of the group that an ordinary user gives a file to.
    ///
    /// # Errors
    /// `Quota` with the numbers.
    async fn room_for_new_group(&self, node: &Node, change: &Change, caller: Caller) -> Result<Option<QuotaPromise>> {
        let Some(gid) = change.gid.filter(|_| caller.uid != 0 && self.quotas.count()) else { return Ok(None) };
        let bytes = {
            let mut state = node.state.lock();
            if state.record.gid == gid || !state.record.file.is_dirty() {
                return Ok(None);
            }
            self.counted_bytes(&mut state)
        };
        self.quota_room(&[QuotaSubject::Group(gid)], bytes, 1).await.map(Some)
    }

    fn apply(&self, node: &Arc<Node>, change: &Change, caller: Caller) -> Result<()> {
        let now = stamp_now();
        let at = |time: SetTime| match time {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        let mut txn = Txn::begin(self);
        let has_content = txn.record(node.ino)?.file.is_dirty();
        let content = match has_content {
            true => Some(txn.content(node.ino)?),
            false => None,
        };
        let written = is_written_since(txn.state(node.ino)?)?;
        let record = txn.record(node.ino)?;
        if written {
            drop_set_id(&mut record.mode);
            record.dirty.mode = true;
        }
        if change.uid.is_some() || change.gid.is_some() {
            record.uid = change.uid.unwrap_or(record.uid);
            record.gid = change.gid.unwrap_or(record.gid);
            record.dirty.owner = true;
            if record.kind != FileKind::Directory && change.mode.is_none() && record.mode & 0o6000 != 0 {
                // chown removes set-id bits, as on every file system.
                drop_set_id(&mut record.mode);
                record.dirty.mode = true;
            }
        }
        if let Some(mode) = change.mode {
            record.mode = mode & 0o7777;
            record.dirty.mode = true;
            chmod_acl(record)?;
        }
        if change.size.is_some() && caller.uid != 0 && record.mode & 0o6000 != 0 && record.mode & 0o111 != 0 {
            drop_set_id(&mut record.mode);
            record.dirty.mode = true;
        }
        let sets_times = change.atime.is_some() || change.mtime.is_some();
        if sets_times {
            record.atime = change.atime.map_or(record.atime, at);
            let current = match &content {
                Some(content) => Stamp::of(&content.file)?.mtime,
                None => record.mtime,
            };
            record.mtime = change.mtime.map_or(current, at);
            record.dirty.times = true;
        }
        if *change != Change::default() {
            record.ctime = now;
        }
        let (kind, mode, atime) = (record.kind, record.mode, record.atime);
        let before = content_now(txn.state(node.ino)?)?;
        if let (true, Some(content)) = (sets_times, &content) {
            let set = || crate::contents::set_times(&content.file, Some(atime), change.mtime.map(at));
            self.change_of_stopped(txn.state_at_once(node.ino)?, content, set)?;
        }
        let after = content_now(txn.state(node.ino)?)?;
        if txn.state(node.ino)?.bypass.set_id_since().is_some_and(|since| Some(since) == before) {
            // The times changed, and no write: that is so, whether or not the change is recorded.
            txn.state_at_once(node.ino)?.bypass.note_set_id(after);
        }
        txn.on_commit(node.ino, move |state| note_set_id(state, kind, mode, after))?;
        let committed = txn.commit();
        if let (true, Err(_), Some(content), Some((_, mtime))) = (sets_times, &committed, &content, before) {
            let mut state = node.state.lock();
            let set = || crate::contents::set_times(&content.file, None, Some(mtime));
            self.change_of_stopped(&mut state, content, set)?;
            if state.bypass.set_id_since().is_some_and(|since| Some(since) == after) {
                state.bypass.note_set_id(before);
            }
        }
        if change.uid.is_some() || change.gid.is_some() || change.size.is_some() || change.mtime.is_some() {
            self.rules_of_file_may_differ(node.ino);
        }
        committed
    }
}
