//! Operations that change content: make it writable, allocate space for it, truncate it, empty it.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::{CHUNK_BYTES, Content, ContentId};
use forebay_catalog::ContentRecord;
use forebay_system::clock::{stamp_now, unix_now};

use super::super::{Inner, Ino, Overlay, Txn, blocking};
use super::open::{check_current, is_given_up};
use crate::fetch::FetchPriority;
use crate::node::{Node, PoolSync};

/// How often a change is tried again because the writers of the file were stopped meanwhile.
const ATTEMPTS: u32 = 20;

impl Overlay {
    /// `fallocate(2)`: all modes that the fast pool's file system supports.
    pub async fn fallocate(&self, ino: Ino, mode: i32, offset: u64, len: u64) -> Result<()> {
        let inner = self.inner.clone();
        let node = inner.node(ino)?;
        let takes_space = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_COLLAPSE_RANGE) == 0;
        if takes_space {
            inner.pace_writer(&node, offset, len).await;
        }
        let _writing = inner.begin_writing(&node);
        if node.is_written_through() || node.is_spilled() {
            let what = "fallocate on a file that does not fit into the fast pool";
            return Err(Error::os(libc::EOPNOTSUPP, Side::Application, what));
        }
        let flags = rustix::fs::FallocateFlags::from_bits_retain(mode as u32);
        let allocate = |content: &Arc<Content>| {
            let file = content.file.clone();
            blocking(move || {
                rustix::fs::fallocate(&*file, flags, offset, len)
                    .map_err(|e| Error::os(e.raw_os_error(), Side::Application, "fallocate"))
            })
        };
        let (content, _room, space) = match takes_space {
            true => {
                let in_room = || async {
                    let content = inner.writable_content(&node).await?;
                    let room = inner.room_for_file(&node, len).await?;
                    let space = inner.with_room(|| inner.reserve(len)).await?;
                    allocate(&content).await?;
                    Ok((content, room, Some(space)))
                };
                inner.change_with_room(&node, in_room).await?
            }
            false => {
                let content = inner.changeable_content(&node).await?;
                let room = inner.room_for_file(&node, 0).await?;
                inner.change_without_room(&node, &content, || allocate(&content)).await?;
                (content, room, None)
            }
        };
        node.state.lock().changed();
        inner.account_reserved(&node, &content, space)
    }
}

impl Inner {
    /// Returns the content file of a file for changes: the content is complete, and durably marked dirty.
    pub async fn make_writable(self: &Arc<Self>, node: &Arc<Node>) -> Result<Arc<Content>> {
        self.check_writable()?;
        for _ in 0..5 {
            self.leave_memory(node).await?;
            {
                let mut state = node.state.lock();
                if state.record.file.is_dirty() && state.dirty_content.is_durable() {
                    return self.content(node.ino, &mut state);
                }
            }
            let (whole, size) = {
                let state = node.state.lock();
                (state.record.file.is_whole(), state.record.size)
            };
            if !whole {
                self.ensure(node, 0..size, FetchPriority::Demand).await?;
            }
            match self.mark_dirty(node).await {
                // Evicted in between: fetch again.
                Err(e) if is_given_up(node, &e) => {}
                other => other?,
            }
        }
        Err(Error::new(ErrorKind::Busy, Side::Cache, format!("{}: changes all the time", self.display(node.ino))))
    }

    /// Empties a file without fetching its old content.
    pub async fn truncate_to_zero(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        self.try_end_abandoned_write_through(node).await;
        // So that the version is known that the new content replaces. What a killed daemon left, while the pool does not
        // answer, is not waited for: if its last write had no answer, the flush keeps both contents.
        if node.is_written_through() && node.state.lock().opens.has_writer() {
            self.truncate_through(node, 0).await?;
        }
        // First, because what is found out below must still hold when the content is replaced.
        let room = self.room_for_file(node, 0).await?;
        let was_open = node.state.lock().opens.any();
        let _writing = self.begin_writing(node);
        check_current(&node.state.lock())?;
        let mut missing = false;
        // From now on, no view is laid of it: it counts as written.
        let is_in_view = node.state.lock().record.file.content().is_some_and(|id| self.is_in_view(id));
        if is_in_view && was_open {
            return Err(self.in_use_by_view(node));
        }
        // Content with spilled ranges is replaced: no program has its file open.
        if !is_in_view && !node.is_spilled() && node.state.lock().record.file.is_dirty() {
            let content = self.content(node.ino, &mut node.state.lock());
            missing = content.as_ref().is_err_and(|e| e.is(ErrorKind::Corrupt));
            // A missing content file is replaced by a new one.
            if !missing {
                let content = content?;
                return self.empty(node, &content).await;
            }
        }
        // What is in memory is open by no passthrough file that would go on using it.
        let in_memory = node.state.lock().record.file.content().is_some_and(|id| self.store.is_volatile(id));
        if was_open && !missing && !in_memory && node.state.lock().record.file.is_whole() {
            // A program that has the content file open goes on using it, so the file is emptied in place.
            drop(room);
            match self.mark_dirty(node).await {
                // The content was given up meanwhile: there is nothing to empty. An attempt finds the file as it is now.
                Err(e) if is_given_up(node, &e) => return Box::pin(self.truncate_to_zero(node)).await,
                marked => {
                    marked?;
                    let content = self.content(node.ino, &mut node.state.lock())?;
                    return self.empty(node, &content).await;
                }
            }
        }
        self.sync_many_replaced().await;
        let content = self.preallocated.take()?;
        let id = ContentId(content.id);
        let mut txn = Txn::begin(self);
        let old_bytes = txn.counted_bytes(node.ino)?;
        let record = txn.record(node.ino)?;
        let old = record.file.content();
        record.file = record.file.replace(id, unix_now());
        record.size = 0;
        record.mtime = stamp_now();
        record.ctime = record.mtime;
        txn.put_content(node.ino, content, ContentRecord::empty(node.ino, 0))?;
        if let Some(old) = old {
            txn.discard(old, old_bytes);
        }
        txn.on_commit(node.ino, |state| {
            state.spilled();
            state.emptied = true;
            state.pool_sync = PoolSync::default();
            state.kernel.pages_go_stale();
        })?;
        // If no record names the new content file, it goes.
        txn.commit().inspect_err(|_| self.trash.discard(id, 0))?;
        self.keep_open(node.ino);
        if old.is_some() {
            // The kernel may keep the old content file for the next open, which would pin its space.
            self.tell_kernel_inode(node.ino, true);
        }
        self.flusher.bell.notify_one();
        Ok(())
    }

    /// Sets the size of a file.
    pub async fn truncate(self: &Arc<Self>, node: &Arc<Node>, size: u64) -> Result<()> {
        if size == 0 {
            return self.truncate_to_zero(node).await;
        }
        self.leave_views(node).await?;
        let _writing = self.begin_writing(node);
        if node.state.lock().record.file.content().is_some_and(|id| self.is_in_view(id)) {
            // A view was laid meanwhile.
            return Err(self.in_use_by_view(node));
        }
        if node.is_written_through() && self.truncate_through(node, size).await? {
            return Ok(());
        }
        if node.is_spilled() && self.truncate_spilled(node, size).await? {
            return Ok(());
        }
        let content = self.make_writable(node).await?;
        self.set_len(node, &content, size).await?;
        node.state.lock().changed();
        self.account(node, &content)
    }

    /// Gives up clean content that is damaged.
    pub fn discard_clean(&self, node: &Arc<Node>) -> Result<()> {
        let mut txn = Txn::begin(self);
        txn.give_up(node.ino)?;
        txn.commit()
    }
}

impl Inner {
    /// Empties content in place. A loss of its old bytes is forgotten, because they are gone anyway.
    async fn empty(&self, node: &Arc<Node>, content: &Arc<Content>) -> Result<()> {
        // Collect a pending write-back error now, because an error that is reported later may concern bytes that are
        // written next. A caller that is syncing at this moment may get an error of the old bytes. It then counts as
        // one of the new bytes.
        let _ = self.catalog.glance_written_back(content);
        let id = ContentId(content.id);
        let lost = self.catalog.lost(id);
        self.set_len(node, content, 0).await?;
        if let Some(lost) = lost {
            self.catalog.forget_lost(id, &lost)?;
        }
        node.state.lock().changed();
        self.account(node, content)
    }

    pub(super) async fn set_len(&self, node: &Node, content: &Arc<Content>, size: u64) -> Result<()> {
        self.change_without_room(node, content, || set_len(content, size)).await
    }

    /// Changes a content file in a way that takes no room. So writers that were stopped for want of room go on.
    pub(super) async fn change_without_room<F>(
        &self,
        node: &Node,
        content: &Arc<Content>,
        change: impl Fn() -> F,
    ) -> Result<()>
    where
        F: Future<Output = Result<()>>,
    {
        for _ in 0..ATTEMPTS {
            self.resume_writers(node, content);
            match change().await {
                Err(e) if e.is(ErrorKind::NotPermitted) => {}
                other => return other,
            }
        }
        Err(self.stopped_again(node))
    }

    /// Changes a content file in a way that takes room. The content file may be made immutable meanwhile, because the room
    /// ran out and passthrough writers were stopped. Then the attempt is repeated. It begins with
    /// [`Self::writable_content`], which decides what to do. What the pool does not permit is not repeated.
    pub(super) async fn change_with_room<T, F>(&self, node: &Node, attempt: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        for _ in 0..ATTEMPTS {
            match attempt().await {
                Err(e) if e.is(ErrorKind::NotPermitted) && e.side() != Side::Pool => {}
                other => return other,
            }
        }
        Err(self.stopped_again(node))
    }

    fn stopped_again(&self, node: &Node) -> Error {
        let what = format!("{}: its writers are stopped again and again", self.display(node.ino));
        Error::new(ErrorKind::Busy, Side::Cache, what)
    }
}

/// Sets the size of a content file. With many blocks that takes long, so a blocking thread does it.
async fn set_len(content: &Content, size: u64) -> Result<()> {
    let file = content.file.clone();
    if file.metadata().map_err(crate::contents::failed)?.blocks() * 512 <= CHUNK_BYTES {
        return file.set_len(size).map_err(crate::contents::failed);
    }
    blocking(move || file.set_len(size).map_err(crate::contents::failed)).await
}
