//! New files, directories, links and special files.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::ContentId;
use forebay_catalog::{ContentRecord, DirtyAttrs, FileState, InodeRecord, ListingState, Xattrs};
use forebay_system::clock::{stamp_now, unix_now};

use super::super::{CachedPages, Caller, Entry, Inner, Ino, Opened, Overlay, Txn, is_writable};
use super::{TARGET_MAX, exists};
use crate::acl::{self, Acl};
use crate::handles::{Writing, is_given_up};
use crate::quotas::FileOwner;

/// The properties of a new inode.
pub(super) struct NewInode<'a> {
    kind: FileKind,
    mode: u32,
    umask: u32,
    rdev: u64,
    target: Option<&'a [u8]>,
    caller: Caller,
}

impl NewInode<'_> {
    /// A device 0:0. overlayfs takes it for a removed name, whatever the lower layers have there.
    pub fn whiteout(caller: Caller) -> Self {
        Self { kind: FileKind::CharDevice, mode: 0, umask: 0, rdev: 0, target: None, caller }
    }
}

impl Overlay {
    #[allow(clippy::too_many_arguments, reason = "they are what the kernel sends with the request")]
    pub async fn mknod(
        &self,
        parent: Ino,
        name: &[u8],
        kind: FileKind,
        mode: u32,
        umask: u32,
        rdev: u64,
        caller: Caller,
    ) -> Result<Entry> {
        self.inner.check_writable()?;
        if kind != FileKind::File && !self.inner.pool.capabilities().objects.special_files {
            return Err(Error::new(ErrorKind::NotPermitted, Side::Pool, "the pool cannot hold special files"));
        }
        let ino = self.inner.make(parent, name, NewInode { kind, mode, umask, rdev, target: None, caller }).await?;
        self.inner.counted_entry(ino)
    }

    pub async fn mkdir(&self, parent: Ino, name: &[u8], mode: u32, umask: u32, caller: Caller) -> Result<Entry> {
        let new = NewInode { kind: FileKind::Directory, mode, umask, rdev: 0, target: None, caller };
        let ino = self.inner.make(parent, name, new).await?;
        self.inner.counted_entry(ino)
    }

    pub async fn symlink(&self, parent: Ino, name: &[u8], target: &[u8], caller: Caller) -> Result<Entry> {
        self.inner.check_writable()?;
        if !self.inner.pool.capabilities().objects.symlinks {
            return Err(Error::new(ErrorKind::NotPermitted, Side::Pool, "the pool cannot hold symlinks"));
        }
        if target.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, Side::Application, "an empty symlink target"));
        }
        if target.len() > TARGET_MAX {
            return Err(Error::new(
                ErrorKind::NameTooLong,
                Side::Application,
                "a symlink target of 4096 bytes or more",
            ));
        }
        let new = NewInode { kind: FileKind::Symlink, mode: 0o777, umask: 0, rdev: 0, target: Some(target), caller };
        let ino = self.inner.make(parent, name, new).await?;
        self.inner.counted_entry(ino)
    }

    /// Creates a regular file and opens it.
    pub async fn create(
        &self,
        parent: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
        flags: i32,
        caller: Caller,
    ) -> Result<(Entry, Opened)> {
        let new = NewInode { kind: FileKind::File, mode, umask, rdev: 0, target: None, caller };
        let ino = self.inner.make(parent, name, new).await?;
        self.inner.learn_policy_facts(&*self.inner.node(ino)?).await;
        self.opened(ino, flags)
    }

    fn opened(&self, ino: Ino, flags: i32) -> Result<(Entry, Opened)> {
        let inner = &self.inner;
        let node = inner.node(ino)?;
        let entry = inner.counted_entry(ino)?;
        let no_flush = !is_writable(flags) || !inner.policy().may_flush_on_close();
        // What a program writes past the daemon cannot be written through when the fast pool is full.
        let stays = !inner.policy_of(&node).goes_through();
        let mut state = node.state.lock();
        let content = match inner.content(ino, &mut state) {
            Ok(content) => content,
            Err(error) => {
                drop(state);
                inner.forget(ino, 1);
                return Err(error);
            }
        };
        let bypasses = !is_writable(flags) || (stays && inner.may_bypass(FileOwner::of(&state.record)));
        inner.count_open(ino, &mut state, flags, bypasses);
        if bypasses {
            state.opens.note_passthrough();
        }
        drop(state);
        let resident = bypasses.then_some(content);
        Ok((entry, Opened { resident, pages: CachedPages::default(), no_flush, missed: false, fetched_bytes: 0 }))
    }

    /// Gives an inode another name.
    pub async fn link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Entry> {
        let inner = &self.inner;
        inner.check_new_name(parent, name)?;
        if !inner.pool.capabilities().objects.hard_links {
            return Err(Error::new(ErrorKind::NotPermitted, Side::Pool, "the pool cannot hold hard links"));
        }
        if inner.find(parent, name).await?.is_some() {
            return Err(exists(name));
        }
        let _writing = inner.make_only_copy(ino).await?;
        let mut txn = Txn::begin(inner);
        txn.live_dir(parent)?;
        if txn.name(parent, name)?.here.is_some() {
            return Err(exists(name));
        }
        let state = txn.state(ino)?;
        let outlives_names = state.opens.any() && !state.is_superseded();
        let record = txn.record(ino)?;
        if record.kind == FileKind::Directory {
            return Err(Error::new(ErrorKind::NotPermitted, Side::Application, "a hard link to a directory"));
        }
        if record.links.is_empty() {
            // Nothing else has its content, so it must be dirty.
            if !outlives_names || !record.pool_links.is_empty() || !record.file.is_dirty() {
                // The kernel looks the name up again.
                return Err(removed());
            }
        }
        let record = txn.record(ino)?;
        record.links.push((parent, name.into()));
        record.ctime = stamp_now();
        let kind = record.kind;
        txn.show(parent, name, Some((ino, kind)))?;
        txn.touch_dir(parent, 0)?;
        txn.commit()?;
        // A file that was local may not be so under the new name.
        inner.rules_of_file_may_differ(ino);
        inner.flusher.bell.notify_one();
        inner.counted_entry(ino)
    }
}

impl Inner {
    /// Marks the content of a file dirty that has no names any more, as for a write: a link to the file makes this its only
    /// copy. While the result lives, no flush takes the mark back.
    async fn make_only_copy(self: &Arc<Self>, ino: Ino) -> Result<Option<Writing<'_>>> {
        let node = self.node(ino)?;
        let is_only_copy = {
            let state = node.state.lock();
            let record = &state.record;
            let is_nameless = record.links.is_empty() && record.pool_links.is_empty();
            let is_clean = record.file.is_whole() && !record.file.is_dirty();
            is_nameless && is_clean && state.opens.any() && !state.is_superseded()
        };
        if !is_only_copy {
            return Ok(None);
        }
        let writing = self.begin_writing(&node);
        self.leave_memory(&node).await?;
        match self.mark_dirty(&node).await {
            Err(e) if is_given_up(&node, &e) => Err(removed()),
            marked => marked.map(|()| Some(writing)),
        }
    }

    async fn make(self: &Arc<Self>, parent: Ino, name: &[u8], new: NewInode<'_>) -> Result<Ino> {
        self.check_new_name(parent, name)?;
        if self.find(parent, name).await?.is_some() {
            return Err(exists(name));
        }
        let defaults = self.default_acl(parent).await?;
        let _room = match new.kind {
            FileKind::File => Some(self.room_for_new(self.owner_of_new(parent, &new)?).await?),
            _ => None,
        };
        let mut txn = Txn::begin(self);
        txn.live_dir(parent)?;
        if txn.name(parent, name)?.here.is_some() {
            return Err(exists(name));
        }
        let mut record = self.new_record(&mut txn, parent, &new, defaults.as_deref())?;
        record.links.push((parent, name.into()));
        let opened = match new.kind {
            FileKind::File => Some(self.preallocated.take()?),
            _ => None,
        };
        let content = opened.as_ref().map(|content| ContentId(content.id));
        if let Some(id) = content {
            record.file = FileState::created(id, unix_now());
        }
        let ino = txn.create(record)?;
        let residency = content.map(|_| ContentRecord::empty(ino, 0));
        if let (Some(id), Some(residency)) = (content, &residency) {
            txn.batch.put_content(id, residency);
        }
        txn.show(parent, name, Some((ino, new.kind)))?;
        txn.touch_dir(parent, i32::from(new.kind == FileKind::Directory))?;
        txn.state_at_once(parent)?.names.negative.remove(name);
        // If no record names its content file, it goes.
        txn.commit().inspect_err(|_| content.into_iter().for_each(|id| self.trash.discard(id, 0)))?;
        if opened.is_some() {
            let node = self.node(ino)?;
            let mut state = node.state.lock();
            (state.content, state.residency) = (opened, residency);
            drop(state);
            self.keep_open(ino);
        }
        self.flusher.bell.notify_one();
        Ok(ino)
    }

    fn owner_of_new(&self, parent: Ino, new: &NewInode<'_>) -> Result<FileOwner> {
        let node = self.node(parent)?;
        let dir = &node.state.lock().record;
        Ok(FileOwner { uid: new.caller.uid, gid: gid_of_new(dir, new) })
    }

    /// Returns the default ACL that a directory gives to new entries.
    async fn default_acl(&self, parent: Ino) -> Result<Option<Box<[u8]>>> {
        if !self.pool.capabilities().objects.xattrs {
            return Ok(None);
        }
        let xattrs = match self.known_xattrs(parent).await {
            // Another client changed the directory, and the pool stopped answering before its ACL was read again.
            Err(e) if e.is_unreachable() => {
                let before = self.node(parent)?.state.lock().rights.default_acl_before.clone();
                return before.ok_or(e);
            }
            known => known?,
        };
        Ok(xattrs.into_iter().find(|(name, _)| **name == *acl::DEFAULT).map(|(_, value)| value))
    }

    pub(super) fn new_record(
        &self,
        txn: &mut Txn<'_>,
        parent: Ino,
        new: &NewInode<'_>,
        default_acl: Option<&[u8]>,
    ) -> Result<InodeRecord> {
        let dir = txn.live_dir(parent)?;
        let inherits_group = dir.mode & libc::S_ISGID != 0;
        let gid = gid_of_new(dir, new);
        let is_dir = new.kind == FileKind::Directory;
        let default = default_acl.map(Acl::parse).transpose()?.flatten();
        let inherited = acl::inherit(new.kind, new.mode & 0o7777, new.umask, default.as_ref());
        let mut mode = inherited.mode;
        let mut xattrs = Xattrs::new();
        xattrs.extend(inherited.access.map(|acl| (acl::ACCESS.into(), acl.encode().into())));
        xattrs.extend(inherited.default.map(|acl| (acl::DEFAULT.into(), acl.encode().into())));
        if inherits_group && is_dir {
            mode |= libc::S_ISGID;
        }
        let now = stamp_now();
        Ok(InodeRecord {
            kind: new.kind,
            mode,
            uid: new.caller.uid,
            gid,
            dir_nlink: if is_dir { 2 } else { 0 },
            unseen_links: 0,
            rdev: new.rdev,
            size: new.target.map_or(0, |t| t.len() as u64),
            occupied_in_pool: None,
            atime: now,
            mtime: now,
            ctime: now,
            links: Default::default(),
            pool_links: Default::default(),
            pending_at: Default::default(),
            version: None,
            file: FileState::absent(),
            listing: ListingState::Complete(None),
            target: new.target.map(Into::into),
            dirty_xattrs: xattrs.iter().map(|(name, value)| (name.clone(), Some(value.clone()))).collect(),
            changed_since_removal: false,
            xattrs: Some(xattrs),
            // The flush creates an inode in the pool with its attributes, so only the name differs.
            dirty: DirtyAttrs::default(),
        })
    }
}

fn removed() -> Error {
    Error::new(ErrorKind::Stale, Side::Application, "the file was removed")
}

/// Returns the group of a new inode.
fn gid_of_new(dir: &InodeRecord, new: &NewInode<'_>) -> u32 {
    if dir.mode & libc::S_ISGID != 0 { dir.gid } else { new.caller.gid }
}
