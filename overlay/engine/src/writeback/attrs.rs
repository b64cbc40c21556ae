//! Flushes one inode that the pool has under the right names: content, attributes, extended attributes.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Expected, FileKind, PoolPath, Result, SetAttrs, Side, Stat, Version};
use forebay_cache::{Stamp, is_open_elsewhere};
use forebay_catalog::{InodeRecord, PendingChange};
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::pool_calls::PoolChange;
use super::super::{Inner, Ino, Txn};
use super::create::settle_attrs;
use super::reconcile::is_news_of_parents;
use super::refused::mode_without;
use super::steps::note_name_flushed;
use super::upload::Uploaded;
use crate::node::Node;
use crate::pool_calls::look_again;

/// How often an upload is tried while other clients change the file, and how often a flush looks again.
const ATTEMPTS: u32 = 3;
/// How many steps a flush of an inode has: its name, what is in doubt, and what differs.
const STEPS: u32 = 3;

/// How an attempt to flush an inode in place ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlushAttempt {
    /// The pool has what the inode had when the attempt began.
    Sent,
    /// Not everything was sent, because something else must come first or has changed: the caller looks again.
    LookAgain,
    /// The pool has the content of another client, and the conflict is settled: ours has another name, or is given up.
    /// Nothing of it was sent: the caller looks again.
    Conflict,
}

impl Inner {
    /// Flushes what differs of one inode; first its name, if the pool does not have it yet.
    ///
    /// # Errors
    /// `Busy` if something changes all the time that must stay as it is while the inode is flushed.
    pub async fn flush_inode(self: &Arc<Self>, ino: Ino) -> Result<()> {
        self.take_set_id(&self.node(ino)?)?;
        let mut looked = false;
        let (mut steps, mut meetings) = (0..STEPS, 0..ATTEMPTS);
        while steps.next().is_some() {
            let record = self.record_of(ino)?;
            if !record.is_dirty() {
                return Ok(());
            }
            if !record.in_pool() && ino != Ino::ROOT {
                let Some((parent, name)) = record.links.first().cloned() else { return Ok(()) };
                if !self.catalog.name(parent, &name)?.differs() {
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        Side::Cache,
                        format!("inode {ino} has no way to the pool"),
                    ));
                }
                self.reconcile_name(parent, &name).await?;
                continue;
            }
            if !record.has_names() && ino != Ino::ROOT {
                // Unlinked: the pool needs only its removal.
                return Ok(());
            }
            if !self.resolve_doubt(ino).await? {
                match self.flush_in_place(ino).await {
                    Err(e) if is_news_of_parents(&e) && !looked => {
                        looked = true;
                        let Some((parent, _)) = record.links.first() else { return Err(e) };
                        self.look_above(*parent).await?;
                    }
                    // Another client wrote it meanwhile: the next attempt sees what it wrote.
                    Err(e) if e.is(ErrorKind::Busy) && e.side() == Side::Pool && meetings.next().is_some() => {
                        steps = 0..STEPS;
                    }
                    Ok(FlushAttempt::LookAgain | FlushAttempt::Conflict) if meetings.next().is_some() => {
                        steps = 0..STEPS;
                    }
                    Ok(FlushAttempt::LookAgain | FlushAttempt::Conflict) => {}
                    other => return other.map(drop),
                }
            }
        }
        if !self.record_of(ino)?.is_dirty() {
            return Ok(());
        }
        let what = format!("{}: its name or its state changes all the time while it is flushed", self.display(ino));
        Err(Error::new(ErrorKind::Busy, Side::Application, what))
    }

    /// Takes attributes that another client changed on a file whose content is newer in the overlay: the new copy must
    /// have them.
    async fn learn_attrs(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let asked = self.asked(&node.state.lock());
        if !self.record_of(ino)?.in_pool() {
            return Ok(());
        }
        let stat = match self.ask_of(ino, |path| async move { self.pool.stat(&path).await }).await {
            // The flush finds out what became of it.
            Err(e) if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound) => return Ok(()),
            answer => answer?,
        };
        let mut txn = Txn::begin(self);
        if !txn.believes(ino, asked)? {
            return Ok(());
        }
        let record = txn.record(ino)?;
        let known = record.version.as_ref();
        if known.is_none_or(|known| *known == stat.version || !known.same_content(&stat.version)) {
            return Ok(());
        }
        txn.take_access(ino, &stat)?;
        let record = txn.record(ino)?;
        record.xattrs = None;
        record.version = Some(stat.version);
        txn.commit()
    }

    /// Sends what differs of an inode to the object that the pool has of it. What programs change meanwhile stays
    /// unsent, and so does what the pool refuses.
    pub(super) fn flush_in_place(self: &Arc<Self>, ino: Ino) -> BoxFuture<'_, Result<FlushAttempt>> {
        async move {
            let node = self.node(ino)?;
            let record = self.record_of(ino)?;
            if record.file.is_dirty() || record.dirty.any() || !record.dirty_xattrs.is_empty() {
                self.may_request().await;
            }
            if self.record_of(ino)?.file.is_dirty() {
                // The new copy gets only the attributes that are sent with it. These calls to the pool must not be made
                // under a lock.
                self.learn_attrs(ino).await?;
                self.known_xattrs(ino).await?;
            }
            let _locks = self.hold_path(&node).await;
            let record = self.record_of(ino)?;
            if (!record.in_pool() && ino != Ino::ROOT) || self.is_in_doubt(ino)? {
                return Ok(FlushAttempt::LookAgain);
            }
            if record.file.is_dirty() && record.xattrs.is_none() && self.pool.capabilities().objects.xattrs {
                // It became dirty just now: the next attempt has its extended attributes.
                return Ok(FlushAttempt::LookAgain);
            }
            if record.file.is_dirty() && !self.uploaded_already(&node).await? {
                let mut touched = vec![ino];
                touched.extend(record.pool_links.iter().map(|(p, _)| *p));
                let _change = PoolChange::begin(self, &touched)?;
                match self.replace_content(ino).await? {
                    FlushAttempt::Sent => {}
                    unsent => return Ok(unsent),
                }
                self.announce_object(ino);
                // Attributes that the pool refused with the content are sent by themselves, and their errors reported.
                let record = self.record_of(ino)?;
                if !self.flusher.refused.is_any(ino) || !record.in_pool() || self.is_in_doubt(ino)? {
                    return Ok(FlushAttempt::Sent);
                }
            }
            // The directories, too: a listing that was requested before has the old attributes.
            let mut touched = vec![ino];
            touched.extend(record.pool_links.iter().map(|(p, _)| *p));
            let _change = PoolChange::begin(self, &touched)?;
            loop {
                let record = self.record_of(ino)?;
                if !record.dirty.any() && record.dirty_xattrs.is_empty() {
                    return Ok(FlushAttempt::Sent);
                }
                let object = record.version.as_ref().and_then(Version::identity);
                match self.send_attrs(ino, &record, &self.pool_path(ino)?.of_object(object)).await {
                    Err(e) if e.is(ErrorKind::NotFound) => {
                        if !self.has_other_name(ino)? {
                            // Another client removed it: there is no object to set attributes on.
                            let mut txn = Txn::begin(self);
                            clear(txn.record(ino)?);
                            return txn.commit().map(|()| FlushAttempt::Sent);
                        }
                    }
                    sent => {
                        self.announce_object(ino);
                        return sent;
                    }
                }
            }
        }
        .boxed()
    }

    /// Called if the pool does not have an inode under the name of the last request: another client removed the name,
    /// or a removal of ours was not answered. Drops the name. Returns whether the inode has another name in the pool.
    fn has_other_name(&self, ino: Ino) -> Result<bool> {
        let mut txn = Txn::begin(self);
        let record = txn.record(ino)?;
        let others = record.pool_links.len() > 1;
        let (Some((parent, name)), true) = (record.pool_link().cloned(), others) else { return Ok(false) };
        let newer = record.file.is_dirty();
        txn.pool_has(parent, &name, None)?;
        if !newer && txn.name(parent, &name)?.here_ino() == Some(ino) {
            txn.show(parent, &name, None)?;
            txn.unlink(ino, parent, &name)?;
        }
        look_again(&mut txn, parent)?;
        txn.commit()?;
        self.tell_kernel_name(parent, &name);
        Ok(true)
    }

    /// Whether the pool has the present content. It was not clean when it was sent, because a program had it open for
    /// writing, or mapped. It becomes clean now if no program has it open or mapped any more.
    async fn uploaded_already(&self, node: &Arc<Node>) -> Result<bool> {
        let stamp = {
            let state = node.state.lock();
            if !state.record.file.is_dirty() {
                // Its last writer closed it just now.
                return Ok(true);
            }
            match state.dirty_content.uploaded_stamp() {
                Some(stamp) => stamp,
                None => return Ok(false),
            }
        };
        self.write_back_mapped(node.ino).await?;
        if self.unmark_dirty(node, stamp)? {
            return Ok(true);
        }
        let mut state = node.state.lock();
        if !state.record.file.is_dirty() {
            return Ok(true);
        }
        let content = self.content(node.ino, &mut state)?;
        let held = state.opens.has_writer() || is_open_elsewhere(&content.file);
        Ok(held && Stamp::of(&content.file)? == stamp)
    }

    async fn replace_content(self: &Arc<Self>, ino: Ino) -> Result<FlushAttempt> {
        let mut expected = self.record_of(ino)?.version.map_or(Expected::Absent, Expected::Version);
        let mut attempts = 0..ATTEMPTS;
        while attempts.next().is_some() {
            let record = self.record_of(ino)?;
            let Some(link) = record.pool_link() else { return Ok(FlushAttempt::LookAgain) };
            let path = self.pool_path(ino)?;
            let moved = self.is_as_known(link.0).await.then_some(link.0);
            match self.upload(ino, link, &path, &expected).await {
                Ok(None) => return Ok(FlushAttempt::LookAgain),
                Ok(Some(uploaded)) => return self.commit_replaced(ino, link.0, moved, uploaded).await,
                Err(e) if e.is(ErrorKind::Conflict) => {}
                Err(e) => return Err(e),
            }
            match self.ask(self.pool.stat(&path)).await {
                Err(e) if e.is(ErrorKind::NotFound) && self.has_other_name(ino)? => attempts = 0..ATTEMPTS,
                Err(e) if e.is(ErrorKind::NotFound) => expected = Expected::Absent,
                Err(e) => return Err(e.context(path)),
                // Another client changed only names or attributes: ours are newer.
                Ok(stat)
                    if record.version.as_ref().is_some_and(|v| *v != stat.version && v.same_content(&stat.version)) =>
                {
                    expected = Expected::Version(stat.version);
                }
                Ok(stat) => match self.same_bytes(ino, &path, &stat).await? {
                    // Another client wrote these bytes, and with them the times of the directory.
                    Some(uploaded) => return self.commit_replaced(ino, link.0, None, uploaded).await,
                    None if self.replaces_theirs(ino, &stat)? || self.is_late_upload(ino, &stat)? => {
                        expected = Expected::Version(stat.version);
                    }
                    // All of its names in the pool refer to the object that another client changed.
                    None => {
                        for (parent, name) in &record.pool_links {
                            let path = self.pool_path_of(*parent, name)?;
                            self.settle_conflict(*parent, name, ino, &path).await?;
                        }
                        return Ok(FlushAttempt::Conflict);
                    }
                },
            }
        }
        let path = self.pool_path(ino)?;
        Err(Error::new(ErrorKind::Conflict, Side::Pool, format!("{path}: changes all the time")))
    }

    /// Commits replaced content. `moved`: the directory, if the times that the mount shows of it are to be sent again.
    /// A pool replaces content under its name, and that changes the directory's times.
    async fn commit_replaced(
        &self,
        ino: Ino,
        dir: Ino,
        moved: Option<Ino>,
        uploaded: Uploaded,
    ) -> Result<FlushAttempt> {
        self.sync_names(dir).await?;
        let replaced = |txn: &mut Txn<'_>| moved.map_or(Ok(()), |dir| note_name_flushed(txn, dir));
        self.commit_uploaded(ino, uploaded, &replaced).await?;
        Ok(FlushAttempt::Sent)
    }

    /// Whether the pool has a directory as the catalog knows it, apart from what our own calls change there. If not,
    /// its times are not sent: they would set back newer ones of another client. The caller's call on the directory has
    /// begun.
    async fn is_as_known(&self, dir: Ino) -> bool {
        if !self.pool.capabilities().versions.of_directories {
            return false;
        }
        let known = {
            let Ok(node) = self.node(dir) else { return false };
            let state = node.state.lock();
            let (begun, ended) = state.pool_calls;
            if state.record.dirty.times || begun - ended > 1 {
                return true;
            }
            state.record.version.clone()
        };
        let Ok(path) = self.pool_path(dir) else { return false };
        self.ask(self.pool.stat(&path)).await.is_ok_and(|stat| known == Some(stat.version))
    }

    /// Sends attributes to the pool. Also returns whether the pool refused the times: a daemon that does not run as
    /// root may change names and content in a directory of another user, but may not set its times.
    async fn set_attrs_allowed(&self, path: &PoolPath, changes: &SetAttrs, there: &Stat) -> Result<(Stat, bool)> {
        let times = changes.atime.is_some() || changes.mtime.is_some();
        let of_another = there.uid != rustix::process::geteuid().as_raw();
        match self.ask(self.pool.set_attrs(path, changes)).await {
            Err(e)
                if times && of_another && !self.pool.capabilities().objects.owners && e.is(ErrorKind::NotPermitted) =>
            {
                let without = SetAttrs { atime: None, mtime: None, only_if: None, ..changes.clone() };
                let stat = match without == SetAttrs::default() {
                    true => self.ask(self.pool.stat(path)).await?,
                    false => self.ask(self.pool.set_attrs(path, &without)).await?,
                };
                Ok((stat, true))
            }
            answer => Ok((answer?, false)),
        }
    }

    /// # Errors
    /// `NotFound` if the pool does not have the inode under this path. `Busy` if another client writes the file just
    /// now: a later attempt sees its content.
    async fn send_attrs(self: &Arc<Self>, ino: Ino, record: &InodeRecord, path: &PoolPath) -> Result<FlushAttempt> {
        let owner = record.dirty.owner && self.pool.capabilities().objects.owners;
        let times = record.dirty.times;
        let mut changes = SetAttrs {
            // A change of the owner clears set-id bits: the mode is sent after it.
            mode: (record.dirty.mode || owner).then_some(record.mode).filter(|_| record.kind != FileKind::Symlink),
            uid: owner.then_some(record.uid),
            gid: owner.then_some(record.gid),
            size: None,
            atime: times.then_some(record.atime),
            mtime: times.then_some(record.mtime),
            only_if: None,
        };
        let there = self.ask(self.pool.stat(path)).await.map_err(|e| e.context(path))?;
        if there.kind != record.kind {
            // The attributes are not meant for an object that another client put in its place.
            return Err(Error::new(ErrorKind::NotFound, Side::Pool, format!("{path}: replaced by another client")));
        }
        // If our times are sent, they hide those of the pool: only this `stat` shows whether another client wrote the
        // content.
        let content_is_ours = match (record.kind, times) {
            (FileKind::File, true) => record.version.as_ref().is_some_and(|v| v.same_content(&there.version)),
            _ => true,
        };
        if !content_is_ours {
            // With our times, content of the same size could be taken for ours later.
            (changes.atime, changes.mtime) = (None, None);
        }
        let moves_version = record.kind == FileKind::File && times && content_is_ours;
        changes.only_if = moves_version.then(|| there.version.clone());
        if let (true, Some((parent, name))) = (moves_version, record.pool_link()) {
            // The times change the version, which must be known again after a crash.
            let size = record.version.as_ref().map_or(record.size, |v| v.size());
            let what = PendingChange::Content { size, mtime: record.mtime };
            if !self.about_to_send(&(*parent, name.clone()), ino, what).await? {
                return Ok(FlushAttempt::LookAgain);
            }
        } else {
            self.sync_written().await?;
        }
        if owner && !record.dirty_xattrs.is_empty() {
            // A change of the owner removes `security.capability`, so the owner is sent before it. The mode goes with the
            // owner as it is without ACLs, and again after them, because they change it.
            let sent: Vec<_> = record.dirty_xattrs.iter().map(|(name, value)| (name, value.as_deref())).collect();
            let acls: Vec<_> = sent.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            let mode = changes.mode.map(|mode| mode_without(mode, &acls));
            let first = SetAttrs { mode, uid: changes.uid, gid: changes.gid, ..SetAttrs::default() };
            self.ask(self.pool.set_attrs(path, &first)).await.map_err(|e| e.context(path))?;
            (changes.uid, changes.gid) = (None, None);
        }
        let (mut refused, mut why) = (Vec::new(), None);
        for (name, value) in &record.dirty_xattrs {
            let sent = match value {
                Some(value) => self.ask(self.pool.set_xattr(path, name, value)).await,
                None => self.ask(self.pool.remove_xattr(path, name)).await,
            };
            match sent {
                Err(e) if e.is(ErrorKind::NoAttribute) => {}
                // The other attributes are sent all the same.
                Err(e) if e.attribute().is_some() => {
                    self.flusher.refused.note(ino, &e);
                    refused.push((name.clone(), value.clone().unwrap_or_default()));
                    why = why.or(Some(e.context(path)));
                    continue;
                }
                other => other.map_err(|e| e.context(path))?,
            }
            self.flusher.refused.take_back(ino, name);
        }
        changes.mode = changes.mode.map(|mode| mode_without(mode, &refused));
        let names_flushed = self.node(ino)?.state.lock().names.flushed;
        let (stat, keeps_times) = self.set_attrs_allowed(path, &changes, &there).await.map_err(|e| e.context(path))?;
        // Takes rights that were sent from the record, and the other ones from the pool.
        let owner_is_ours = record.dirty.owner || !self.pool.capabilities().objects.owners;
        let rights = |stat: &Stat| {
            let mode = if changes.mode.is_some() { record.mode } else { stat.mode };
            let (uid, gid) = if owner_is_ours { (record.uid, record.gid) } else { (stat.uid, stat.gid) };
            (mode, uid, gid)
        };
        let others_changed = record.version.as_ref() != Some(&there.version) || rights(&stat) != rights(&there);
        let mut txn = Txn::begin(self);
        // Another step that changed a name meanwhile may have changed the directory's times after they were sent.
        let names_changed = txn.state(ino)?.names.flushed != names_flushed;
        let now = txn.record(ino)?;
        let mut sent = record.clone();
        sent.dirty_xattrs.retain(|(name, _)| refused.iter().all(|(refused, _)| refused != name));
        settle_attrs(now, &sent);
        if now.kind == FileKind::Directory {
            now.dirty.times = names_changed || (now.atime, now.mtime) != (record.atime, record.mtime);
        }
        if keeps_times && !now.dirty.times {
            (now.atime, now.mtime) = (stat.atime, stat.mtime);
        }
        let only_attrs = (times && !keeps_times) || now.version.as_ref().is_none_or(|v| v.same_content(&stat.version));
        let mut news = false;
        let is_version_known = now.kind != FileKind::File || (content_is_ours && only_attrs);
        if is_version_known {
            now.occupied_in_pool = stat.occupied;
            now.version = Some(stat.version.clone());
            // From now on the version does not show what other clients changed beside the attributes that were sent.
            news = others_changed;
            if news {
                let (mode, uid, gid) = rights(&stat);
                txn.take_access(ino, &Stat { mode, uid, gid, ..stat })?;
                let now = txn.record(ino)?;
                // The version of a directory changes with its names, so a listing finds out about its ACL. But if the mode was
                // sent, it changed whatever ACL the pool has.
                if now.kind != FileKind::Directory || changes.mode.is_some() {
                    now.xattrs = None;
                }
            }
        }
        txn.pool_still_has(ino)?;
        if is_version_known {
            txn.on_commit(ino, |state| state.validated = Some(std::time::Instant::now()))?;
        }
        txn.commit()?;
        if news || keeps_times {
            self.tell_kernel_inode(ino, false);
        }
        why.map_or(Ok(FlushAttempt::Sent), Err)
    }
}

fn clear(record: &mut InodeRecord) {
    record.dirty = Default::default();
    record.dirty_xattrs.clear();
}
