//! One change of names and inodes: collected, written as one batch, and then made visible in memory.

mod collected;
mod objects;
mod only_copy;

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_backends::{FileKind, Result};
use forebay_cache::{Content, ContentId};
use forebay_catalog::{Batch, ContentRecord, InodeRecord, Leases, Link, NameRecord, PendingCall, PendingChange};
use forebay_system::clock::unix_now;
use parking_lot::{ArcMutexGuard, Mutex, RawMutex};

use self::collected::{CollectedState, Edit};
pub(crate) use self::objects::identity;
use crate::node::{Attachment, NodeState};
use crate::{Inner, Ino};

/// How many unanswered requests the record of one name remembers; older ones are forgotten.
const PENDING_REMEMBERED: usize = 16;

type Guard<T> = ArcMutexGuard<RawMutex, T>;

/// A change that is being collected. It holds the namespace lock and the lock of every inode that it touched. If it is
/// dropped without [`Txn::commit`], no record changes.
pub(crate) struct Txn<'a> {
    inner: &'a Inner,
    edits: BTreeMap<Ino, Edit<'a>>,
    new: Vec<(Ino, InodeRecord)>,
    /// For each changed name: the record before and after the change.
    names: HashMap<Link, (NameRecord, NameRecord)>,
    /// The name that was read last. It is usually the next one to be changed.
    looked_at: Mutex<Option<(Link, NameRecord)>>,
    /// Pool objects with several names whose inodes this change adds.
    objects: HashMap<Vec<u8>, Ino>,
    /// Owners of inodes whose records the batch had from the beginning.
    owners: HashMap<Ino, u32>,
    /// Content files to remove after the batch is written, each with the bytes that the space budget counts for it.
    trash: Vec<(ContentId, u64)>,
    /// Content that the batch needs: it is durable before the batch.
    sync_first: Vec<Arc<Content>>,
    pub batch: Batch<'a>,
    _namespace: Guard<()>,
}

impl<'a> Txn<'a> {
    pub fn begin(inner: &'a Inner) -> Self {
        Self {
            inner,
            edits: BTreeMap::new(),
            new: Vec::new(),
            names: HashMap::new(),
            looked_at: Mutex::default(),
            objects: HashMap::new(),
            owners: HashMap::new(),
            trash: Vec::new(),
            sync_first: Vec::new(),
            batch: inner.catalog.batch(),
            _namespace: Mutex::lock_arc(&inner.names.changes),
        }
    }

    /// Begins with a batch that has the records of inodes which no name shows yet. `owners`: those of the inodes that get
    /// names by this change.
    pub fn begin_with(inner: &'a Inner, batch: Batch<'a>, owners: HashMap<Ino, u32>) -> Self {
        Self { batch, owners, ..Self::begin(inner) }
    }

    pub(crate) fn inner(&self) -> &'a Inner {
        self.inner
    }

    fn edit(&mut self, ino: Ino) -> Result<&mut Edit<'a>> {
        match self.edits.entry(ino) {
            Slot::Occupied(slot) => Ok(slot.into_mut()),
            Slot::Vacant(slot) => {
                let node = self.inner.node(ino)?;
                let guard = Mutex::lock_arc(&node.state);
                let record = guard.record.clone();
                Ok(slot.insert(Edit { guard, node, record, gone: false, collected: CollectedState::default() }))
            }
        }
    }

    /// Returns the size of this change: names or inodes, of which it has more.
    pub fn touched(&self) -> usize {
        self.names.len().max(self.edits.len())
    }

    /// The record of an inode, to read or to change.
    pub fn record(&mut self, ino: Ino) -> Result<&mut InodeRecord> {
        Ok(&mut self.edit(ino)?.record)
    }

    /// Returns the state of an inode, as it was before this change.
    pub fn state(&mut self, ino: Ino) -> Result<&NodeState> {
        Ok(&self.edit(ino)?.guard)
    }

    /// Changes the state of an inode beside its record as soon as the batch is written. If the write fails, nothing
    /// changes.
    pub fn on_commit(&mut self, ino: Ino, change: impl FnOnce(&mut NodeState) + 'a) -> Result<()> {
        self.edit(ino)?.collected.changes.push(Box::new(change));
        Ok(())
    }

    /// Returns the state of an inode, to change it at once, whether or not the batch is written. Only for what is right
    /// in both cases: caches, counts of what a content file occupies, and marks that make the daemon ask or send once
    /// more. All else: [`Self::on_commit`].
    pub fn state_at_once(&mut self, ino: Ino) -> Result<&mut NodeState> {
        Ok(&mut self.edit(ino)?.guard)
    }

    /// Opens the content file of an inode, if it is not open.
    pub fn content(&mut self, ino: Ino) -> Result<Arc<Content>> {
        let inner = self.inner;
        inner.content(ino, self.state_at_once(ino)?)
    }

    /// Returns the record of the valid bytes of an inode's content file.
    pub fn residency(&mut self, ino: Ino) -> Result<ContentRecord> {
        let inner = self.inner;
        Ok(inner.residency(self.state_at_once(ino)?)?.clone())
    }

    /// Returns the bytes that the budget counts for an inode's content.
    pub fn counted_bytes(&mut self, ino: Ino) -> Result<u64> {
        let inner = self.inner;
        Ok(inner.counted_bytes(self.state_at_once(ino)?))
    }

    /// Counts the bytes that an inode's content occupies now.
    pub fn count(&mut self, ino: Ino, occupied: u64) -> Result<()> {
        let inner = self.inner;
        inner.count(self.state_at_once(ino)?, occupied)
    }

    pub fn name(&self, parent: Ino, name: &[u8]) -> Result<NameRecord> {
        let link = (parent, name.into());
        match self.names.get(&link) {
            Some((_, is)) => Ok(is.clone()),
            None => self.stored(&link),
        }
    }

    /// Returns the catalog's record of a name. The namespace lock excludes other changes, so the record may be kept.
    fn stored(&self, link: &Link) -> Result<NameRecord> {
        let mut looked_at = self.looked_at.lock();
        if let Some((_, record)) = looked_at.as_ref().filter(|(known, _)| known == link) {
            return Ok(record.clone());
        }
        let record = self.inner.catalog.name(link.0, &link.1)?;
        *looked_at = Some((link.clone(), record.clone()));
        Ok(record)
    }

    pub fn set_name(&mut self, parent: Ino, name: &[u8], record: NameRecord) -> Result<()> {
        let link = (parent, name.into());
        match self.names.get_mut(&link) {
            Some((_, is)) => *is = record,
            None => {
                let was = self.stored(&link)?;
                self.names.insert(link, (was, record));
            }
        }
        Ok(())
    }

    /// Sets what the mount shows under a name.
    pub fn show(&mut self, parent: Ino, name: &[u8], here: Option<(Ino, FileKind)>) -> Result<()> {
        let was = self.name(parent, name)?;
        self.set_name(parent, name, was.showing(here))
    }

    /// Records that a change of a name is about to be sent to the pool. Until the answer arrives, the name is in doubt.
    pub fn send(&mut self, parent: Ino, name: &[u8], call: PendingCall) -> Result<()> {
        let mut record = self.name(parent, name)?;
        if record.pending.contains(&call) {
            return Ok(());
        }
        if record.pending.len() >= PENDING_REMEMBERED {
            let oldest = record.pending.remove(0);
            if !record.pending.iter().any(|s| s.ino == oldest.ino) {
                self.record(oldest.ino)?.pending_at.retain(|(p, n)| *p != parent || **n != *name);
            }
        }
        let pending_at = &mut self.record(call.ino)?.pending_at;
        let link = (parent, name.into());
        if !pending_at.contains(&link) {
            pending_at.push(link);
        }
        record.pending.push(call);
        self.set_name(parent, name, record)
    }

    /// Records what the pool is known to have under a name. Nothing that was sent to this name is in doubt any more.
    /// The names in the inodes' records are updated, and an inode without names is reaped.
    pub fn pool_has(&mut self, parent: Ino, name: &[u8], ino: Option<Ino>) -> Result<()> {
        let was = self.name(parent, name)?;
        self.inner.pool_calls.watches.name_changed(parent, name);
        let link: Link = (parent, name.into());
        let mut touched: Vec<Ino> = was.pending.iter().map(|s| s.ino).collect();
        for ino in &touched {
            self.record(*ino)?.pending_at.retain(|l| *l != link);
        }
        if was.pool != ino {
            touched.extend(was.pool);
            self.occupy(&link, was.pool, ino)?;
        }
        self.set_name(parent, name, NameRecord { here: was.here, pool: ino, pending: Vec::new() })?;
        touched.into_iter().try_for_each(|ino| self.left_by(ino))
    }

    /// Records that a call on the pool's object of an inode succeeded: what was sent of the inode to its names in the
    /// pool is no longer in doubt. What was sent of other inodes to these names stays in doubt, and so does a removal:
    /// the object may have other names.
    pub fn pool_still_has(&mut self, ino: Ino) -> Result<()> {
        for link in self.record(ino)?.pool_links.clone() {
            let (parent, name) = &link;
            self.inner.pool_calls.watches.name_changed(*parent, name);
            let mut record = self.name(*parent, name)?;
            let is_settled = |call: &PendingCall| call.ino == ino && call.what != PendingChange::Removed;
            if record.pending.iter().any(is_settled) {
                record.pending.retain(|call| !is_settled(call));
                if !record.pending.iter().any(|call| call.ino == ino) {
                    self.record(ino)?.pending_at.retain(|to| *to != link);
                }
                self.set_name(*parent, name, record)?;
            }
        }
        Ok(())
    }

    /// Records that the pool no longer has an inode under a name. What was sent to the name stays in doubt.
    pub fn pool_lacks(&mut self, parent: Ino, name: &[u8], ino: Ino) -> Result<()> {
        let was = self.name(parent, name)?;
        if was.pool != Some(ino) {
            return Ok(());
        }
        self.inner.pool_calls.watches.name_changed(parent, name);
        self.occupy(&(parent, name.into()), was.pool, None)?;
        self.set_name(parent, name, NameRecord { pool: None, ..was })?;
        self.left_by(ino)
    }

    fn occupy(&mut self, link: &Link, was: Option<Ino>, is: Option<Ino>) -> Result<()> {
        if let Some(occupant) = was {
            self.record(occupant)?.remove_pool_link(link);
        }
        if let Some(ino) = is {
            self.record(ino)?.pool_links.push(link.clone());
        }
        Ok(())
    }

    /// Updates an inode that may have fewer names in the pool than before.
    fn left_by(&mut self, ino: Ino) -> Result<()> {
        let record = self.record(ino)?;
        if record.pool_links.is_empty() && !(record.links.is_empty() && record.unseen_links > 0) {
            record.version = None;
            record.unseen_links = 0;
        }
        if record.links.is_empty() { self.reap(ino) } else { Ok(()) }
    }

    /// Adds an inode. It enters the table at the commit.
    pub fn create(&mut self, record: InodeRecord) -> Result<Ino> {
        let ino = self.inner.catalog.new_ino()?;
        self.batch.put_inode(ino, &record, false);
        self.new.push((ino, record));
        Ok(ino)
    }

    /// Removes a name from an inode. If it was the last name and nothing needs the inode any more, the same batch
    /// removes the inode and its content.
    pub fn unlink(&mut self, ino: Ino, parent: Ino, name: &[u8]) -> Result<()> {
        let edit = self.edit(ino)?;
        let record = &mut edit.record;
        record.changed_since_removal &= record.has_removed_names();
        record.links.retain(|(p, n)| *p != parent || **n != *name);
        if record.kind == FileKind::Directory {
            record.dir_nlink = 0;
        }
        if record.links.is_empty() {
            self.reap(ino)?;
        }
        Ok(())
    }

    /// Deletes an inode that has no name in the mount and is not open. If the pool has it or may have it under a known
    /// name, only the content is deleted: the record stays until the name is removed from the pool. An inode with
    /// unseen names in the pool stays, with its unflushed content. An inode that is being flushed stays, too, because
    /// the pool may be getting a name that must be removed again: the end of the flush reaps it.
    pub fn reap(&mut self, ino: Ino) -> Result<()> {
        let inner = self.inner;
        let edit = self.edit(ino)?;
        let flushing = edit.guard.pool_calls.0 != edit.guard.pool_calls.1;
        let is_gone = edit.gone || edit.guard.is_deleted();
        if ino == Ino::ROOT || edit.record.has_names() || edit.guard.opens.any() || flushing || is_gone {
            return Ok(());
        }
        if edit.record.kind != FileKind::Directory && inner.mount.kernel().is_some() && inner.table.outlives_names(ino)
        {
            // The kernel may be about to open the inode by a name that it looked up before. `Overlay::forget` reaps it.
            return Ok(());
        }
        let content = edit.record.file.content();
        let bytes = inner.counted_bytes(&mut edit.guard);
        if edit.record.pool_links.is_empty() && edit.record.pending_at.is_empty() {
            edit.gone = true;
        } else {
            // Only the removal from the pool is left to do.
            edit.record.file = forebay_catalog::FileState::absent();
            edit.record.dirty = Default::default();
            edit.record.dirty_xattrs.clear();
        }
        edit.collected.drop_content();
        if let Some(content) = content {
            self.discard(content, bytes);
        }
        Ok(())
    }

    /// Marks whole content dirty: it is about to become newer than the pool's. Bytes that were appended to the content
    /// file but are not in the record (`coherence/grown`) are cut off first, because the content file's own size counts
    /// from now on.
    pub fn modify(&mut self, ino: Ino) -> Result<()> {
        let inner = self.inner;
        let edit = self.edit(ino)?;
        if !edit.record.file.is_dirty() {
            edit.guard.growth.under_way = false;
            // If the content file is missing, its next use reports that.
            if let Ok(content) = inner.content(ino, &mut edit.guard) {
                content.cut(edit.record.size)?;
            }
        }
        edit.record.file = edit.record.file.modify(unix_now())?;
        edit.collected.evictable = Some(None);
        inner.note_modified(ino, &edit.guard);
        Ok(())
    }

    /// Gives up the clean content of an inode. Returns the bytes that it occupied.
    pub fn give_up(&mut self, ino: Ino) -> Result<u64> {
        let bytes = self.give_up_chosen(ino)?;
        self.collected(ino)?.evictable = Some(None);
        Ok(bytes)
    }

    /// Gives up clean content that the eviction policy chose. The policy goes on remembering what it chose.
    pub fn give_up_chosen(&mut self, ino: Ino) -> Result<u64> {
        let bytes = self.counted_bytes(ino)?;
        self.on_commit(ino, NodeState::content_goes)?;
        let record = self.record(ino)?;
        let (file, content) = record.file.evict()?;
        record.file = file;
        self.discard(content, bytes);
        let collected = self.collected(ino)?;
        collected.drop_content();
        collected.evictable = None;
        Ok(bytes)
    }

    /// Gives up content with spilled ranges that the pool has by now.
    pub fn give_up_spilled(&mut self, ino: Ino) -> Result<()> {
        let bytes = self.counted_bytes(ino)?;
        self.on_commit(ino, |state| {
            state.content_goes();
            state.spilled();
        })?;
        let record = self.record(ino)?;
        let (file, content) = record.file.flushed_in_parts()?;
        record.file = file;
        self.discard(content, bytes);
        self.collected(ino)?.drop_content();
        Ok(())
    }

    fn collected(&mut self, ino: Ino) -> Result<&mut CollectedState<'a>> {
        Ok(&mut self.edit(ino)?.collected)
    }

    /// Gives an inode a new content file without valid bytes.
    pub fn put_content(&mut self, ino: Ino, content: Arc<Content>, residency: ContentRecord) -> Result<()> {
        self.batch.put_content(ContentId(content.id), &residency);
        let edit = self.edit(ino)?;
        edit.collected.content = Some(Some((content, residency)));
        // Content that is about to be fetched is not reported to the eviction policy yet: the policy may remember it
        // from the time before it was evicted.
        if edit.record.file.is_dirty() {
            edit.collected.evictable = Some(None);
        }
        Ok(())
    }

    /// Records that the bytes of an inode are in another content file, `content`, and no longer in `from`.
    pub fn move_content(
        &mut self,
        ino: Ino,
        from: ContentId,
        content: Arc<Content>,
        residency: ContentRecord,
    ) -> Result<()> {
        self.batch.put_moved_content(from, ContentId(content.id), &residency)?;
        let edit = self.edit(ino)?;
        let is_clean = !edit.record.file.is_dirty();
        edit.collected.evictable = Some(is_clean.then_some(residency.bytes));
        edit.collected.content = Some(Some((content, residency)));
        Ok(())
    }

    /// Records that the content file is about to get other bytes than the fetched ones, so that the checksums are void.
    pub fn put_dirty_content(&mut self, ino: Ino, id: ContentId) -> Result<()> {
        let mut residency = self.residency(ino)?;
        self.batch.put_unproven_content(id, &mut residency);
        let collected = self.collected(ino)?;
        collected.residency = Some(residency);
        collected.count_saved = true;
        Ok(())
    }

    /// Records that the pool has exactly the bytes that were written to the content file, in the present epoch or before.
    /// The caller has counted the space.
    pub fn put_clean_content(&mut self, ino: Ino, id: ContentId) -> Result<()> {
        let inner = self.inner;
        let mut residency = self.residency(ino)?;
        // The content may not be durable yet, so it gets the epoch of what is fetched now.
        residency.epoch = inner.catalog.epoch();
        inner.epochs.fetched.fetch_max(residency.epoch, Ordering::Relaxed);
        self.batch.put_unproven_content(id, &mut residency);
        let collected = self.collected(ino)?;
        collected.evictable = Some(Some(residency.bytes));
        collected.residency = Some(residency);
        collected.count_saved = true;
        Ok(())
    }

    /// Forgets the short chunk at the old end of a file that grew, if it was fetched.
    pub fn forget_short_chunk(&mut self, ino: Ino, id: ContentId, size: u64) -> Result<()> {
        let mut residency = self.residency(ino)?;
        if let Some(chunk) = residency.forget_short_chunk(size) {
            self.batch.put_chunk(id, &residency, chunk);
            self.collected(ino)?.residency = Some(residency);
        }
        Ok(())
    }

    /// Records that the content of an inode is another version's than the pool has now. It is discarded. `bytes`: what
    /// the space budget counts for it.
    pub fn pool_changed(&mut self, ino: Ino, bytes: u64) -> Result<()> {
        let record = self.record(ino)?;
        let (file, content) = record.file.pool_changed()?;
        record.file = file;
        self.collected(ino)?.drop_content();
        if let Some(content) = content {
            self.discard(content, bytes);
        }
        Ok(())
    }

    /// Saves the byte count of the content of an inode, if the catalog does not have it yet.
    pub fn save_count(&mut self, ino: Ino) -> Result<()> {
        let inner = self.inner;
        let state = self.state_at_once(ino)?;
        let unsaved = state.count_unsaved && !state.is_deleted();
        if let (true, Some(id)) = (unsaved, state.record.file.content()) {
            // If the file is open, it is counted again.
            let is_open = state.opens.any();
            let residency = inner.residency(state)?.clone();
            self.batch.put_content(id, &residency);
            self.collected(ino)?.count_saved = !is_open;
        }
        Ok(())
    }

    /// Gives up a content file with the same batch. `bytes`: what the space budget counts for it.
    pub fn discard(&mut self, content: ContentId, bytes: u64) {
        self.batch.delete_content(content);
        self.trash.push((content, bytes));
    }

    /// Returns the user in whose turn a name is flushed: the owner of the inode that the mount shows under the name or,
    /// if the name was removed, of the inode that the pool has there.
    fn user_of(&self, parent: Ino, (was, is): &(NameRecord, NameRecord)) -> u32 {
        if was.differs() || !is.differs() {
            return 0;
        }
        let of = |ino: Ino| {
            let edited = self.edits.get(&ino).map(|edit| edit.record.uid);
            let grafted = || self.owners.get(&ino).copied();
            let made = || self.new.iter().find(|(new, _)| *new == ino).map(|(_, record)| record.uid);
            // This change does not hold the inode's lock. If another thread holds it, the owner counts as unknown.
            let known = || Some(self.inner.table.peek(ino)?.state.try_lock()?.record.uid);
            edited.or_else(grafted).or_else(made).or_else(known)
        };
        is.here_ino().or(is.pool).and_then(of).or_else(|| of(parent)).unwrap_or(0)
    }

    /// Writes the batch and makes the change visible.
    pub fn commit(mut self) -> Result<()> {
        let users: Vec<u32> = self.names.iter().map(|((parent, _), records)| self.user_of(*parent, records)).collect();
        let mut changed_dirs = HashSet::new();
        for (((parent, name), (was, is)), user) in self.names.into_iter().zip(users) {
            if was.here != is.here {
                changed_dirs.insert(parent);
            }
            self.batch.put_name(parent, &name, &was, &is, user);
        }
        for (ino, edit) in &self.edits {
            if edit.ends_leases(*ino) {
                self.batch.delete_leases(*ino);
            }
            if let Some(object) = objects::given_up(edit)
                && objects::leads_to(self.inner, &self.objects, &object, *ino)?
            {
                self.batch.delete_object(&object);
            }
            if edit.gone {
                self.batch.delete_inode(*ino, edit.guard.indexed_dirty);
            } else if !edit.guard.is_deleted() && edit.record != edit.guard.record {
                self.batch.put_inode(*ino, &edit.record, edit.guard.indexed_dirty);
            }
        }
        if !self.batch.is_empty() {
            self.inner.catalog.sync_first(self.sync_first);
            self.inner.catalog.write(self.batch)?;
        }
        for dir in changed_dirs {
            if let Some(node) = self.inner.table.peek(dir) {
                node.names_state.changed();
            }
        }
        let mut gone = Vec::new();
        for (ino, mut edit) in self.edits {
            if edit.ends_leases(ino) {
                edit.guard.leases = Leases::default();
            }
            // A program may still have a handle of a deleted directory, and change its attributes: only in memory.
            edit.guard.indexed_dirty = !edit.gone && !edit.guard.is_deleted() && edit.record.is_dirty();
            if self.inner.policies.note_directory(ino, &edit.guard.record, &edit.record) {
                self.inner.rules_may_differ();
            }
            edit.guard.record = edit.record;
            edit.collected.apply(ino, &mut edit.guard, self.inner);
            if edit.gone {
                edit.guard.attachment = Attachment::Deleted;
                gone.push(ino);
            }
            self.inner.charge(ino, &mut edit.guard);
            drop(edit.guard);
            drop(edit.node);
        }
        for (ino, record) in self.new {
            let is_counted = record.file.is_dirty() && self.inner.quotas.count();
            self.inner.table.insert(ino, record);
            if is_counted && let Ok(node) = self.inner.node(ino) {
                self.inner.charge(ino, &mut node.state.lock());
            }
        }
        for ino in gone {
            self.inner.table.drop_deleted(ino);
        }
        for (content, bytes) in self.trash {
            self.inner.trash.discard(content, bytes);
        }
        Ok(())
    }
}
