//! The steps that change names in the pool, each with its commit to the catalog.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Expected, FileKind, PoolPath, RenameMode, Result, Side, Stat};
use tokio::sync::MutexGuard;

use super::super::pool_view::PoolChange;
use super::super::{Inner, Ino, Txn};
use super::conflict::look_again;
use super::place::{Next, Step};
use crate::catalog::{Link, NameRecord, Sent};
use crate::node::Node;

/// What the pool has where something is to be moved.
enum Target {
    /// What we think is there, or nothing.
    Ours,
    /// What is to be moved.
    Moved(Stat),
    Theirs,
}

impl Inner {
    pub(super) async fn take_step(
        self: &Arc<Self>,
        parent: Ino,
        name: &[u8],
        record: &NameRecord,
        step: Step,
    ) -> Result<()> {
        let (subject, other) = match &step {
            Step::Remove { occupant } => (*occupant, None),
            Step::Rename { moved, occupant, .. } => (*moved, *occupant),
            Step::Link { ino, .. } => (*ino, None),
            Step::Create { ino, occupant } => (*ino, *occupant),
        };
        let moves_dir =
            matches!(&step, Step::Rename { moved, .. } if self.record_of(*moved)?.kind == FileKind::Directory);
        let (_exclusive, _shared) = match moves_dir {
            true => (Some(self.flusher.moves.write().await), None),
            false => (None, Some(self.flusher.moves.read().await)),
        };
        let nodes = self.nodes_in_order(subject, other)?;
        let _locks = lock_all(&nodes).await;
        self.recognise(parent, name, &self.pool_path(parent)?.join(name)).await?;
        if let Step::Rename { from, .. } = &step {
            self.recognise(from.0, &from.1, &self.pool_path(from.0)?.join(&from.1)).await?;
        }
        if self.catalog.name(parent, name)? != *record {
            // Somebody else was here first: look again.
            return Ok(());
        }
        // A step on another name of the same inode may have come first, too.
        if !matches!(self.next(parent, name, record)?, Next::Step(again) if again == step) {
            return Ok(());
        }
        let mut touched = vec![parent, subject];
        touched.extend(other);
        if let Step::Rename { from, .. } = &step {
            touched.push(from.0);
        }
        if !matches!(step, Step::Remove { .. }) {
            self.catalog.add_sent(parent, name, Sent::name_of(subject))?;
        }
        let _change = PoolChange::begin(self, &touched)?;
        let dir = self.pool_path(parent)?;
        let path = dir.join(name);
        self.names_changed_in(&dir);
        match step {
            Step::Remove { occupant } => self.remove(parent, name, occupant, &path).await,
            Step::Rename { from, moved, occupant } => self.move_to(parent, name, &from, moved, occupant, &path).await,
            Step::Link { ino, existing } => self.link_to(parent, name, ino, &existing, &path).await,
            Step::Create { ino, occupant } => self.create_at(parent, name, ino, occupant, &path).await,
        }
    }

    fn nodes_in_order(&self, first: Ino, second: Option<Ino>) -> Result<Vec<Arc<Node>>> {
        let mut inos = vec![first];
        inos.extend(second);
        inos.sort();
        inos.dedup();
        inos.into_iter().map(|ino| self.node(ino)).collect()
    }

    async fn remove(self: &Arc<Self>, parent: Ino, name: &[u8], occupant: Ino, path: &PoolPath) -> Result<()> {
        let record = self.record_of(occupant)?;
        let removed = match record.kind {
            FileKind::Directory => self.ask(self.pool.remove_dir(path)).await,
            _ => {
                self.wait_for_readers(occupant)?;
                match record.version.clone() {
                    Some(version) => self.ask(self.pool.remove(path, &Expected::Version(version))).await,
                    // Its upload was cut off, and what is there is not what was sent: it never arrived.
                    None if record.kind == FileKind::File => Ok(()),
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
                    "{path}: removed here, but changed in the pool since: the pool's copy stays"
                ));
                let mut txn = Txn::begin(self);
                look_again(&mut txn, parent)?;
                txn.commit()?;
                self.tell_kernel_name(parent, name);
            }
            Err(e) => return Err(e.context(path)),
        }
        self.commit_vacated(parent, name, occupant)?;
        self.refresh_version(occupant).await
    }

    /// A file that was removed here while its bytes are still only in the pool and somebody reads it.
    fn wait_for_readers(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?;
        let state = node.state.lock();
        if state.is_unlinked(ino) && state.is_open() && !state.record.file.is_whole() {
            return Err(Error::new(
                ErrorKind::Busy,
                Side::Application,
                "removed while it is open; the pool's copy goes when it is closed",
            ));
        }
        Ok(())
    }

    /// The pool no longer has an inode under a name.
    fn commit_vacated(&self, parent: Ino, name: &[u8], occupant: Ino) -> Result<()> {
        let mut txn = Txn::begin(self);
        let was = txn.name(parent, name)?;
        if was.pool == Some(occupant) {
            txn.set_name(parent, name, &was, &NameRecord { here: was.here, pool: None });
        }
        drop_pool_link(&mut txn, occupant, parent, name)?;
        txn.commit()
    }

    /// A step on one of an inode's names moved its change time under the others.
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
            // The next look at the name finds out.
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
        let source_dir = self.pool_path(from.0)?;
        let source = source_dir.join(&from.1);
        self.names_changed_in(&source_dir);
        let record = self.record_of(moved)?;
        if let Some(occupant) = occupant {
            match self.at_target(occupant, moved, path).await? {
                Target::Ours => {}
                // Done before the answer was lost.
                Target::Moved(stat) => {
                    self.commit_moved(parent, name, from, moved, Some(occupant), &stat)?;
                    return self.refresh_version(occupant).await;
                }
                Target::Theirs => return self.keep_both(parent, name, moved, path).await,
            }
        }
        let mode = if occupant.is_some() { RenameMode::Replace } else { RenameMode::NoReplace };
        let there = match self.ask(self.pool.stat(&source)).await {
            Ok(stat) if record.version.as_ref().is_some_and(|v| v.same_object(&stat.version)) => {
                self.ask(self.pool.rename(&source, path, mode)).await
            }
            Ok(_) => Err(Error::new(ErrorKind::NotFound, Side::Pool, source.to_string())),
            Err(e) => Err(e),
        };
        let stat = match there {
            Ok(stat) => stat,
            Err(e) if e.is(ErrorKind::Exists) => return self.keep_both(parent, name, moved, path).await,
            Err(e) if e.is(ErrorKind::NotFound) => match self.ask(self.pool.stat(path)).await {
                // Done before a crash cut off the commit.
                Ok(stat) if record.version.as_ref().is_some_and(|v| v.same_object(&stat.version)) => stat,
                Ok(_) => return self.parked_or_lost(moved, from).await,
                Err(e) if e.is(ErrorKind::NotFound) => return self.parked_or_lost(moved, from).await,
                Err(e) => return Err(e.context(path)),
            },
            Err(e) => return Err(e.context(format!("{source} to {path}"))),
        };
        self.commit_moved(parent, name, from, moved, occupant, &stat)?;
        match occupant {
            Some(occupant) => self.refresh_version(occupant).await,
            None => Ok(()),
        }
    }

    pub(in crate::engine) fn commit_moved(
        &self,
        parent: Ino,
        name: &[u8],
        from: &Link,
        moved: Ino,
        occupant: Option<Ino>,
        stat: &Stat,
    ) -> Result<()> {
        let mut txn = Txn::begin(self);
        let was_from = txn.name(from.0, &from.1)?;
        if was_from.pool == Some(moved) {
            txn.set_name(from.0, &from.1, &was_from, &NameRecord { here: was_from.here, pool: None });
        }
        txn.batch.delete_sent(from.0, &from.1);
        txn.record(moved)?.pool_links.retain(|l| l != from);
        take_name(&mut txn, parent, name, moved, occupant)?;
        take_version(&mut txn, moved, stat)?;
        txn.commit()
    }

    /// What the pool has under a path that `moved` is to take from `occupant`.
    async fn at_target(&self, occupant: Ino, moved: Ino, path: &PoolPath) -> Result<Target> {
        let (ours, moved) = (self.record_of(occupant)?.version, self.record_of(moved)?.version);
        match self.ask(self.pool.stat(path)).await {
            Ok(stat) if moved.is_some_and(|v| v.same_object(&stat.version)) => Ok(Target::Moved(stat)),
            Ok(stat) if ours.is_none_or(|v| v.same_content(&stat.version)) => Ok(Target::Ours),
            Ok(_) => Ok(Target::Theirs),
            Err(e) if e.is(ErrorKind::NotFound) => Ok(Target::Ours),
            Err(e) => Err(e.context(path)),
        }
    }

    /// What we wanted to move is no longer in the pool: what is here of it is made anew.
    pub(in crate::engine) fn source_lost(&self, ino: Ino, from: &Link) -> Result<()> {
        let mut txn = Txn::begin(self);
        let was = txn.name(from.0, &from.1)?;
        if was.pool == Some(ino) {
            txn.set_name(from.0, &from.1, &was, &NameRecord { here: was.here, pool: None });
        }
        let record = txn.record(ino)?;
        record.pool_links.retain(|l| l != from);
        if record.pool_links.is_empty() {
            record.version = None;
        }
        let elsewhere = !record.pool_links.is_empty();
        let known = match record.kind {
            FileKind::File => record.file.is_whole(),
            FileKind::Symlink => record.target.is_some(),
            _ => true,
        };
        let lost = !known && !elsewhere;
        if record.file.is_whole() && !elsewhere {
            record.file = record.file.modify(crate::clock::unix_now())?;
            self.evictor.lock().remove(ino.0);
        }
        let links = record.links.clone();
        if lost {
            for (parent, name) in &links {
                let was = txn.name(*parent, name)?;
                txn.set_name(*parent, name, &was, &NameRecord { here: None, pool: was.pool });
                txn.unlink(ino, *parent, name)?;
            }
        }
        txn.commit()?;
        if lost {
            self.report_conflict(format!("{}: removed in the pool while it was renamed here", from.1.escape_ascii()));
        }
        Ok(())
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
        let version = self.record_of(ino)?.version;
        let stat = match self.ask(self.pool.link(&source, path)).await {
            Ok(stat) => stat,
            Err(e) if e.is(ErrorKind::Exists) => match self.ask(self.pool.stat(path)).await {
                Ok(stat) if version.is_some_and(|v| v.same_object(&stat.version)) => stat,
                _ => return self.keep_both(parent, name, ino, path).await,
            },
            Err(e) if e.is(ErrorKind::NotFound) => return self.source_lost(ino, existing),
            Err(e) => return Err(e.context(format!("link {source} as {path}"))),
        };
        let mut txn = Txn::begin(self);
        take_name(&mut txn, parent, name, ino, None)?;
        take_version(&mut txn, ino, &stat)?;
        txn.commit()
    }

    /// Moves the pool's occupant of a name out of the way: names that wait for each other in a circle need one
    /// free place. The mount never shows the name that it has meanwhile; other nodes do.
    pub(super) async fn park(self: &Arc<Self>, record: &NameRecord, parent: Ino, name: &[u8]) -> Result<()> {
        let Some(occupant) = record.pool else {
            return Err(Error::new(ErrorKind::Corrupt, Side::Cache, "names wait for each other"));
        };
        let parked = self.parked_name(occupant);
        let _exclusive = self.flusher.moves.write().await;
        let _change = PoolChange::begin(self, &[parent, occupant])?;
        let dir = self.pool_path(parent)?;
        let (from, to) = (dir.join(name), dir.join(&parked));
        let stat = match self.ask(self.pool.rename(&from, &to, RenameMode::NoReplace)).await {
            Err(e) if e.is(ErrorKind::NotFound) => self.ask(self.pool.stat(&to)).await,
            other => other,
        };
        let stat = match stat {
            Err(e) if e.is(ErrorKind::NotFound) => return self.source_lost(occupant, &(parent, name.into())),
            other => other.map_err(|e| e.context(&from))?,
        };
        self.commit_moved(parent, &parked, &(parent, name.into()), occupant, None, &stat)
    }

    fn parked_name(&self, ino: Ino) -> Vec<u8> {
        // Not a reserved name: those are the pool's own.
        format!(".forebay-moving-{}-{}", self.node_name, ino.0).into_bytes()
    }

    /// What is no longer in the pool where it was: an earlier flush that was cut off may have parked it.
    pub(in crate::engine) async fn parked_or_lost(&self, ino: Ino, from: &Link) -> Result<()> {
        let parked = self.parked_name(ino);
        let record = self.record_of(ino)?;
        let path = self.pool_path_of(from.0, &parked)?;
        match self.ask(self.pool.stat(&path)).await {
            Ok(stat) if record.version.as_ref().is_some_and(|v| v.same_object(&stat.version)) => {
                self.commit_moved(from.0, &parked, from, ino, None, &stat)
            }
            Ok(_) => self.source_lost(ino, from),
            Err(e) if e.is(ErrorKind::NotFound) => self.source_lost(ino, from),
            Err(e) => Err(e.context(path)),
        }
    }
}

/// The pool has an inode under a name from now on, instead of `occupant`.
pub(super) fn take_name(txn: &mut Txn<'_>, parent: Ino, name: &[u8], ino: Ino, occupant: Option<Ino>) -> Result<()> {
    let was = txn.name(parent, name)?;
    txn.set_name(parent, name, &was, &NameRecord { here: was.here, pool: Some(ino) });
    txn.batch.delete_sent(parent, name);
    txn.record(ino)?.pool_links.push((parent, name.into()));
    if let Some(occupant) = occupant.filter(|o| *o != ino) {
        drop_pool_link(txn, occupant, parent, name)?;
    }
    Ok(())
}

fn drop_pool_link(txn: &mut Txn<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Result<()> {
    txn.batch.delete_sent(parent, name);
    let record = txn.record(ino)?;
    record.pool_links.retain(|(p, n)| *p != parent || **n != *name);
    if record.pool_links.is_empty() {
        record.version = None;
    }
    if record.links.is_empty() {
        txn.reap(ino)?;
    }
    Ok(())
}

/// After a change of names: the version moved by its change time alone, unless somebody else was there too.
pub(super) fn take_version(txn: &mut Txn<'_>, ino: Ino, stat: &Stat) -> Result<()> {
    let record = txn.record(ino)?;
    match (&record.version, record.kind) {
        (Some(known), FileKind::File) if !known.same_content(&stat.version) => {}
        _ => record.version = Some(stat.version.clone()),
    }
    Ok(())
}

async fn lock_all(nodes: &[Arc<Node>]) -> Vec<MutexGuard<'_, ()>> {
    let mut guards = Vec::with_capacity(nodes.len());
    for node in nodes {
        guards.push(node.flush.lock().await);
    }
    guards
}
