//! The steps that change names in the pool, each with its commit to the catalog.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Expected, FileKind, PoolPath, RenameMode, Result, Side, Stat};
use forebay_catalog::{Link, NameRecord, PendingChange};

use super::super::pool_calls::PoolChange;
use super::super::{Inner, Ino, Txn};
use super::reconcile::{NextStep, ReconcileStep, leads_to_unseen};
use super::steps::{note_name_flushed, take_version};
use crate::node::Node;
use crate::pool_calls::look_again;

/// Prefix of the name under which an object is parked in the pool while other objects take its place.
pub(super) const MOVED_ASIDE: &str = ".forebay-moving-";

/// What the pool has under the name to which something is to be moved.
enum TargetOccupant {
    /// What the catalog expects, or nothing.
    Ours,
    Theirs,
}

impl Inner {
    pub(super) async fn take_step(
        self: &Arc<Self>,
        parent: Ino,
        name: &[u8],
        record: &NameRecord,
        step: ReconcileStep,
    ) -> Result<()> {
        self.may_request().await;
        let (subject, other) = match &step {
            ReconcileStep::Remove { occupant } => (*occupant, None),
            ReconcileStep::Rename { moved, occupant, .. } => (*moved, *occupant),
            ReconcileStep::Link { ino, .. } => (*ino, None),
            ReconcileStep::Create { ino, occupant } => (*ino, *occupant),
        };
        let moves_dir =
            matches!(&step, ReconcileStep::Rename { moved, .. } if self.record_of(*moved)?.kind == FileKind::Directory);
        let nodes = self.nodes_in_order([subject].into_iter().chain(other))?;
        let nodes: Vec<&Node> = nodes.iter().map(|node| &**node).collect();
        let _locks = self.hold_paths(&nodes, &[parent], moves_dir.then_some(subject)).await;
        if self.catalog.name(parent, name)? != *record {
            // Another step changed the name first: the caller looks again.
            return Ok(());
        }
        // A step on another name of the same inode may also have come first.
        if !matches!(self.next(parent, name, record)?, NextStep::Step(again) if again == step) {
            return Ok(());
        }
        // And the answer to that step may have been lost.
        for ino in [parent, subject].into_iter().chain(other) {
            if self.is_in_doubt(ino)? {
                return Ok(());
            }
        }
        let mut touched = vec![parent, subject];
        touched.extend(other);
        if let ReconcileStep::Rename { from, .. } = &step {
            touched.push(from.0);
        }
        let at: Link = (parent, name.into());
        // The step sends what is recorded as sent, even if the overlay changes meanwhile.
        let sent = self.record_of(subject)?;
        let what = match &step {
            // `remove` records it, once nothing speaks against the removal.
            ReconcileStep::Remove { .. } => None,
            ReconcileStep::Rename { from, .. } => Some(PendingChange::Moved { from: from.clone() }),
            ReconcileStep::Link { .. } => Some(PendingChange::Linked),
            // For a file, the upload records what is sent.
            ReconcileStep::Create { .. } if sent.kind == FileKind::File => None,
            ReconcileStep::Create { .. } => Some(PendingChange::Made { mode: sent.mode, uid: sent.uid, gid: sent.gid }),
        };
        // A directory that is replaced has a path that leads to the moved one.
        let moved: Vec<Ino> = if moves_dir { [subject].into_iter().chain(other).collect() } else { Vec::new() };
        // The step counts as under way before the name is in doubt: a request that meets the doubt must not wait for it.
        let _change = PoolChange::begin_any(self, &touched, &moved)?;
        if let Some(what) = what
            && !self.about_to_send(&at, subject, what).await?
        {
            return Ok(());
        }
        let path = self.pool_path_of(parent, name)?;
        let from_path = match &step {
            ReconcileStep::Rename { from, .. } => self.pool_path_of(from.0, &from.1).ok(),
            _ => None,
        };
        match step {
            ReconcileStep::Remove { occupant } => self.remove(parent, name, occupant, &path).await,
            ReconcileStep::Rename { from, moved, occupant } => {
                self.move_to(parent, name, &from, moved, occupant, &path).await
            }
            ReconcileStep::Link { ino, existing } => self.link_to(parent, name, ino, &existing, &path).await,
            ReconcileStep::Create { ino, occupant } => self.create_at(parent, name, (ino, sent), occupant, &path).await,
        }?;
        [Some(path), from_path].iter().flatten().for_each(|path| self.announce(path));
        Ok(())
    }

    async fn remove(self: &Arc<Self>, parent: Ino, name: &[u8], occupant: Ino, path: &PoolPath) -> Result<()> {
        let record = self.record_of(occupant)?;
        let mut is_gone = true;
        let removed = match record.kind {
            FileKind::Directory => {
                self.sync_written().await?;
                self.ask(self.pool.remove_dir(path)).await
            }
            _ => {
                self.ready_to_go(occupant).await?;
                if !self.about_to_send(&(parent, name.into()), occupant, PendingChange::Removed).await? {
                    return Ok(());
                }
                self.expect_version_to_move(occupant)?;
                match record.removed_version() {
                    Some(version) => self.ask(self.pool.remove(path, &Expected::Version(version))).await,
                    // Its upload was interrupted, and the pool has something else under the name: the upload never
                    // arrived.
                    None if record.kind == FileKind::File => {
                        is_gone = false;
                        Ok(())
                    }
                    None => self.ask(self.pool.remove(path, &Expected::Anything)).await,
                }
            }
        };
        match removed {
            Ok(()) => {}
            Err(e) if e.is(ErrorKind::NotFound) => {}
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::Conflict | ErrorKind::NotEmpty | ErrorKind::IsDirectory | ErrorKind::NotDirectory
                ) =>
            {
                self.report_conflict(format!(
                    "{path}: removed in the mount, but changed in the pool since: the pool's copy stays"
                ));
                is_gone = false;
                let mut txn = Txn::begin(self);
                look_again(&mut txn, parent)?;
                txn.commit()?;
                self.tell_kernel_name(parent, name);
            }
            Err(e) => {
                if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::NotPermitted | ErrorKind::ReadOnly) {
                    // The pool refused it: it has the name as before.
                    let mut txn = Txn::begin(self);
                    if txn.name(parent, name)?.pool == Some(occupant) {
                        txn.pool_has(parent, name, Some(occupant))?;
                    }
                    txn.commit()?;
                }
                return Err(e.context(path));
            }
        }
        self.sync_names(parent).await?;
        self.commit_vacated(parent, name, occupant, is_gone)?;
        self.refresh_version(occupant).await
    }

    /// Called before a name in the pool is removed or replaced. If it is the last name of a file that a program has
    /// open, what only the pool has is fetched. If the object has other names that were never looked up
    /// (`unseen_links`), what a program still writes must first reach the pool by this name.
    pub(super) async fn ready_to_go(self: &Arc<Self>, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let (missing, written) = {
            let state = node.state.lock();
            let record = &state.record;
            let last = record.kind == FileKind::File && record.links.is_empty() && record.pool_links.len() == 1;
            let is_here = record.file.is_whole() || record.file.is_dirty();
            let missing = (last && state.opens.any() && !is_here).then_some(record.size);
            (missing, leads_to_unseen(record) && state.may_be_written())
        };
        if written {
            return Err(Error::new(
                ErrorKind::Busy,
                Side::Application,
                "removed while it is open for writing, or mapped; its name in the pool is removed when it is closed",
            ));
        }
        let Some(size) = missing else { return Ok(()) };
        match self.fetch_as_known(&node, 0..size).await {
            Err(e) if e.is(ErrorKind::NoSpace) => Err(Error::new(
                ErrorKind::Busy,
                Side::Application,
                "removed while it is open, and too large for the fast pool; its name in the pool is removed when it is closed",
            )),
            other => other,
        }
    }

    /// Records that the pool no longer has an inode under a name. `is_gone`: it has nothing else there, either.
    fn commit_vacated(&self, parent: Ino, name: &[u8], occupant: Ino, is_gone: bool) -> Result<()> {
        let mut txn = Txn::begin(self);
        if txn.name(parent, name)?.pool == Some(occupant) {
            txn.pool_has(parent, name, None)?;
            if is_gone {
                note_name_flushed(&mut txn, parent)?;
                txn.state_at_once(parent)?.names.note_absent(name);
            }
        }
        txn.commit()
    }

    /// Marks the version of an inode as one that a step of ours on its names changes. Called before the step, because
    /// the answer to the step, or to the `stat` of [`Inner::refresh_version`] after it, may be lost.
    pub(super) fn expect_version_to_move(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let mut state = node.state.lock();
        state.version_behind = state.record.version.clone();
        Ok(())
    }

    /// Reads the version of an inode again: a step on one of its names changed the change time that its other names
    /// show, too.
    pub(super) async fn refresh_version(self: &Arc<Self>, ino: Ino) -> Result<()> {
        let Ok(node) = self.node(ino) else { return Ok(()) };
        if !node.state.lock().record.in_pool() {
            return Ok(());
        }
        let path = self.pool_path(ino)?;
        match self.ask(self.pool.stat(&path)).await {
            Ok(stat) => {
                let mut txn = Txn::begin(self);
                take_version(&mut txn, ino, &stat)?;
                txn.commit()
            }
            // The next look at the name finds the version.
            Err(_) => Ok(()),
        }
    }

    async fn move_to(
        self: &Arc<Self>,
        parent: Ino,
        name: &[u8],
        from: &Link,
        moved: Ino,
        occupant: Option<Ino>,
        path: &PoolPath,
    ) -> Result<()> {
        let source = self.pool_path_of(from.0, &from.1)?;
        let record = self.record_of(moved)?;
        if let Some(occupant) = occupant {
            self.ready_to_go(occupant).await?;
            match self.at_target(occupant, path).await? {
                TargetOccupant::Ours => self.expect_version_to_move(occupant)?,
                TargetOccupant::Theirs => return self.settle_conflict(parent, name, moved, path).await,
            }
        }
        let mode = if occupant.is_some() { RenameMode::Replace } else { RenameMode::NoReplace };
        let there = match self.ask(self.pool.stat(&source)).await {
            Ok(stat) if record.is_object(&stat) => self.ask(self.pool.rename(&source, path, mode)).await,
            Ok(_) => Err(Error::new(ErrorKind::NotFound, Side::Pool, source.to_string())),
            Err(e) => Err(e),
        };
        let stat = match there {
            Ok(stat) => stat,
            Err(e) if e.is(ErrorKind::Exists) => return self.settle_conflict(parent, name, moved, path).await,
            Err(e) if e.is(ErrorKind::NotFound) => return self.source_lost(moved, from),
            Err(e) => return Err(e.context(format!("{source} to {path}"))),
        };
        self.sync_names(parent).await?;
        self.sync_names(from.0).await?;
        self.commit_moved(parent, name, from, moved, &stat)?;
        match occupant {
            Some(occupant) => self.refresh_version(occupant).await,
            None => Ok(()),
        }
    }

    fn commit_moved(&self, parent: Ino, name: &[u8], from: &Link, moved: Ino, stat: &Stat) -> Result<()> {
        let mut txn = Txn::begin(self);
        txn.pool_has(parent, name, Some(moved))?;
        if txn.name(from.0, &from.1)?.pool == Some(moved) {
            txn.pool_has(from.0, &from.1, None)?;
            txn.state_at_once(from.0)?.names.note_absent(&from.1);
        }
        note_name_flushed(&mut txn, parent)?;
        note_name_flushed(&mut txn, from.0)?;
        take_version(&mut txn, moved, stat)?;
        txn.commit()
    }

    /// Returns what the pool has under a path that is to be taken from `occupant`.
    async fn at_target(&self, occupant: Ino, path: &PoolPath) -> Result<TargetOccupant> {
        let ours = self.record_of(occupant)?.removed_version();
        match self.ask(self.pool.stat(path)).await {
            Ok(stat) if ours.is_none_or(|v| v.same_content(&stat.version)) => Ok(TargetOccupant::Ours),
            Ok(_) => Ok(TargetOccupant::Theirs),
            Err(e) if e.is(ErrorKind::NotFound) => Ok(TargetOccupant::Ours),
            Err(e) => Err(e.context(path)),
        }
    }

    /// The object that was to be moved is no longer in the pool: what the fast pool has of it is created anew.
    pub(crate) fn source_lost(&self, ino: Ino, from: &Link) -> Result<()> {
        let is_there = |txn: &mut Txn<'_>| Ok(txn.name(from.0, &from.1)?.pool == Some(ino));
        let mut txn = Txn::begin(self);
        if is_there(&mut txn)? && txn.record(ino)?.kind == FileKind::Directory {
            txn = match self.forget_below(txn, ino, &is_there)? {
                Some(rest) => rest,
                // Another request found out, too.
                None => Txn::begin(self),
            };
        }
        if is_there(&mut txn)? {
            txn.pool_lacks(from.0, &from.1, ino)?;
            // An object of another client may be there instead.
            look_again(&mut txn, from.0)?;
        }
        self.lost_in_pool(&mut txn, ino)?;
        txn.commit()
    }

    async fn link_to(
        self: &Arc<Self>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
        existing: &Link,
        path: &PoolPath,
    ) -> Result<()> {
        let source = self.pool_path_of(existing.0, &existing.1)?;
        let record = self.record_of(ino)?;
        let linked = match self.ask(self.pool.stat(&source)).await {
            Ok(stat) if record.is_object(&stat) => self.ask(self.pool.link(&source, path)).await,
            Ok(_) => Err(Error::new(ErrorKind::NotFound, Side::Pool, source.to_string())),
            Err(e) => Err(e),
        };
        let stat = match linked {
            Ok(stat) if record.is_object(&stat) => stat,
            // Another client put another object there between the `stat` and the link.
            Ok(stat) => {
                self.ask(self.pool.remove(path, &Expected::Version(stat.version)))
                    .await
                    .map_err(|e| e.context(path))?;
                return self.source_lost(ino, existing);
            }
            Err(e) if e.is(ErrorKind::Exists) => match self.ask(self.pool.stat(path)).await {
                Ok(stat) if record.is_object(&stat) => stat,
                _ => return self.settle_conflict(parent, name, ino, path).await,
            },
            Err(e) if e.is(ErrorKind::NotFound) => return self.source_lost(ino, existing),
            Err(e) => return Err(e.context(format!("link {source} as {path}"))),
        };
        self.sync_names(parent).await?;
        let mut txn = Txn::begin(self);
        txn.pool_has(parent, name, Some(ino))?;
        note_name_flushed(&mut txn, parent)?;
        take_version(&mut txn, ino, &stat)?;
        txn.commit()
    }

    /// Moves the pool's occupant of a name to a temporary name: names that wait for each other in a circle need one
    /// free place. The mount never shows the temporary name; other nodes do. Returns `false` if nothing was changed,
    /// because another step is about the same name or object.
    pub(super) async fn move_aside(
        self: &Arc<Self>,
        record: &NameRecord,
        occupant: Ino,
        (parent, name): (Ino, &[u8]),
    ) -> Result<bool> {
        let aside = self.name_aside(occupant);
        let link: Link = (parent, name.into());
        let node = self.node(occupant)?;
        let moves_dir = node.state.lock().record.kind == FileKind::Directory;
        let _locks = self.hold_paths(&[&node], &[parent], moves_dir.then_some(occupant)).await;
        if self.catalog.name(parent, name)? != *record || self.is_in_doubt(parent)? || self.is_in_doubt(occupant)? {
            return Ok(false);
        }
        let what = PendingChange::Moved { from: link.clone() };
        let moved: &[Ino] = if moves_dir { &[occupant] } else { &[] };
        let _change = PoolChange::begin_any(self, &[parent, occupant], moved)?;
        if !self.about_to_send(&(parent, aside.as_slice().into()), occupant, what).await? {
            return Ok(false);
        }
        let dir = self.pool_path(parent)?;
        let (from, to) = (dir.join(name), dir.join(&aside));
        let there = match self.ask(self.pool.stat(&from)).await {
            Ok(stat) if self.record_of(occupant)?.is_object(&stat) => {
                self.ask(self.pool.rename(&from, &to, RenameMode::NoReplace)).await
            }
            Ok(_) => Err(Error::new(ErrorKind::NotFound, Side::Pool, from.to_string())),
            Err(e) => Err(e),
        };
        let stat = match there {
            Err(e) if e.is(ErrorKind::NotFound) => return self.source_lost(occupant, &link).map(|()| true),
            other => other.map_err(|e| e.context(&from))?,
        };
        self.sync_names(parent).await?;
        self.commit_moved(parent, &aside, &link, occupant, &stat)?;
        Ok(true)
    }

    /// Returns a name that neither the mount nor the pool has.
    fn name_aside(&self, ino: Ino) -> Vec<u8> {
        // Not a reserved name: reserved names belong to the pool. A program could take a name that it can foretell.
        format!("{MOVED_ASIDE}{}-{}-{:016x}", self.mount.node_name, ino.0, rand::random::<u64>()).into_bytes()
    }
}
