//! Calls in doubt: what was sent to the pool and never answered, because the call failed or the daemon was killed. A
//! look at the name resolves the doubt, before anything else is done there.
//!
//! Before a call that gives a name of the pool something, or removes the name of a file, the call is recorded with the
//! name (`pending`), and the name with the inode (`pending_at`). The catalog is synced before the call, so the pool is
//! never ahead of it, not even after a power cut. The commit of the answer removes both. If the call fails or the daemon is killed, both stay. Then the
//! object's identity, or its size and modification time, tells whether what was sent arrived. Until that is known, the
//! name is not taken for one that another client made or removed. (A removed directory never gets its name back, so
//! its removal is not recorded.)

use std::collections::HashSet;

use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Stat, Time, UNFINISHED_XATTR, unfinished_mark};
use forebay_catalog::{InodeRecord, Link, NameRecord, PendingCall, PendingChange};
use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt};

use super::super::{Inner, Ino, Txn, blocking};
use super::steps::{all_attrs_differ, note_name_flushed, take_version};
use crate::node::Node;
use crate::pool_calls::look_again;

impl Inner {
    /// Finds out where the pool has an inode and the directories above it, if that is in doubt. Returns whether it was.
    ///
    /// The caller holds no lock of the flusher.
    ///
    /// # Errors
    /// Those of the pool: what is in doubt stays in doubt.
    pub async fn resolve_doubt(&self, ino: Ino) -> Result<bool> {
        if !self.is_in_doubt(ino)? {
            return Ok(false);
        }
        self.resolve_doubt_once(ino, &mut HashSet::new()).await?;
        for (parent, name) in self.pool_links_of(ino) {
            self.resolve_doubt_of_name(parent, &name).await?;
        }
        Ok(true)
    }

    /// Whether a call in doubt may have moved an inode or a directory above it, or may have given one of the inode's
    /// names in the pool to another inode.
    pub(crate) fn is_in_doubt(&self, ino: Ino) -> Result<bool> {
        let mut unsure = false;
        self.visit_above_in_pool(ino, |_, record| {
            unsure |= !record.pending_at.is_empty();
            !unsure
        });
        for (parent, name) in self.pool_links_of(ino) {
            unsure = unsure || !self.catalog.name(parent, &name)?.pending.is_empty();
        }
        Ok(unsure)
    }

    /// Returns the names of an inode in the pool. An inode that is gone has none.
    fn pool_links_of(&self, ino: Ino) -> Vec<Link> {
        self.node(ino).map(|node| node.state.lock().record.pool_links.to_vec()).unwrap_or_default()
    }

    /// `begun`: the inodes whose doubt the caller is resolving.
    fn resolve_doubt_once<'a>(&'a self, ino: Ino, begun: &'a mut HashSet<Ino>) -> BoxFuture<'a, Result<()>> {
        async move {
            // From the root down, because the path of an inode depends on the directories above it.
            let mut above = Vec::new();
            self.visit_above_in_pool(ino, |at, _| {
                above.push(at);
                true
            });
            for at in above.into_iter().rev() {
                if !begun.insert(at) {
                    continue;
                }
                let Ok(record) = self.record_of(at) else { continue };
                for (parent, name) in record.pending_at {
                    self.resolve_doubt_once(parent, begun).await?;
                    self.resolve_doubt_of_name(parent, &name).await?;
                }
            }
            Ok(())
        }
        .boxed()
    }

    /// Finds out what the pool has under a name to which something was sent.
    pub(super) fn resolve_doubt_of_name<'a>(&'a self, parent: Ino, name: &'a [u8]) -> BoxFuture<'a, Result<()>> {
        async move {
            let record = self.catalog.name(parent, name)?;
            if record.pending.is_empty() {
                return Ok(());
            }
            let nodes = match self.nodes_in_order(record.pending.iter().map(|s| s.ino).chain(record.pool)) {
                // An inode is gone: the step that sent it has had its answer meanwhile.
                Err(_) if self.catalog.name(parent, name)?.pending != record.pending => return Ok(()),
                nodes => nodes?,
            };
            // What was moved there may have left its old directory.
            let from = record.pending.iter().filter_map(|sent| match &sent.what {
                PendingChange::Moved { from } => Some(from.0),
                _ => None,
            });
            let dirs: Vec<Ino> = from.chain([parent]).collect();
            let nodes: Vec<&Node> = nodes.iter().map(|node| &**node).collect();
            let _locks = self.hold_paths(&nodes, &dirs, None).await;
            if self.catalog.name(parent, name)?.pending != record.pending {
                // The step that sent it held the lock, and has had its answer.
                return Ok(());
            }
            let path = self.pool_path_of(parent, name);
            let stat = match &path {
                Ok(path) => match self.ask(self.pool.stat(path)).await {
                    Ok(stat) => Some(stat),
                    Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => None,
                    Err(e) => return Err(e.context(path)),
                },
                // The directory itself was never created in the pool.
                Err(_) => None,
            };
            let (mut arrived, mut half) = (None, None);
            if let (Some(stat), Ok(path)) = (&stat, &path) {
                for sent in record.pending.iter().rev() {
                    if self.arrived(sent, &record, stat, path).await? {
                        arrived = Some((sent, stat));
                        break;
                    }
                    if self.is_half_written(sent, stat, path).await? {
                        half = Some((sent.ino, stat));
                    }
                }
            }
            let Some((sent, stat)) = arrived else {
                let is_removed = self.is_removed(&record, stat.as_ref())?;
                if is_removed {
                    self.sync_names(parent).await?;
                }
                let mut txn = Txn::begin(self);
                let pool = txn.name(parent, name)?.pool.filter(|_| !is_removed);
                txn.pool_has(parent, name, pool)?;
                if is_removed {
                    note_name_flushed(&mut txn, parent)?;
                    if stat.is_some() {
                        // Another client made something there since.
                        look_again(&mut txn, parent)?;
                    }
                }
                if let Some((ino, stat)) = half {
                    // A file that this daemon left half written is not a change of another client: the next upload
                    // overwrites it.
                    txn.record(ino)?.version = Some(stat.version.clone());
                }
                // If another client removed the object meanwhile, this name was the last one where it could be.
                for sent in &record.pending {
                    self.lost_in_pool(&mut txn, sent.ino)?;
                }
                txn.commit()?;
                path.iter().filter(|_| is_removed).for_each(|path| self.announce(path));
                return Ok(());
            };
            let path = path.unwrap_or_default();
            tracing::info!(%path, "an interrupted change had reached the pool");
            self.sync_names(parent).await?;
            if let PendingChange::Moved { from } = &sent.what {
                self.sync_names(from.0).await?;
            }
            let mut txn = Txn::begin(self);
            // The new name is recorded first: an inode without names in the pool forgets its version.
            txn.pool_has(parent, name, Some(sent.ino))?;
            note_name_flushed(&mut txn, parent)?;
            if let PendingChange::Moved { from } = &sent.what {
                txn.pool_lacks(from.0, &from.1, sent.ino)?;
                note_name_flushed(&mut txn, from.0)?;
            }
            match sent.what {
                PendingChange::Content { .. } => {
                    let record = txn.record(sent.ino)?;
                    record.version = Some(stat.version.clone());
                    record.occupied_in_pool = stat.occupied;
                    record.count_links(stat);
                }
                // It is certain that the object exists, but not that it got all of its attributes.
                PendingChange::Made { .. } => {
                    let record = txn.record(sent.ino)?;
                    record.version = Some(stat.version.clone());
                    all_attrs_differ(record);
                }
                PendingChange::Moved { .. } | PendingChange::Linked | PendingChange::Removed => {
                    take_version(&mut txn, sent.ino, stat)?;
                }
            }
            txn.commit()?;
            self.announce(&path);
            if let PendingChange::Moved { from } = &sent.what
                && let Ok(from) = self.pool_path_of(from.0, &from.1)
            {
                self.announce(&from);
            }
            Ok(())
        }
        .boxed()
    }

    /// Whether what the pool has under a name is what was sent there.
    async fn arrived(&self, sent: &PendingCall, name: &NameRecord, stat: &Stat, path: &PoolPath) -> Result<bool> {
        let record = self.record_of(sent.ino)?;
        let before = match name.pool {
            Some(before) => self.record_of(before)?.version.map(|version| (before, version)),
            None => None,
        };
        let (mut is_before, mut is_unchanged) = (false, false);
        if let Some((before, version)) = before {
            is_before = version.same_object(&stat.version);
            // A new file is another object, and a file that was written anew has another version. Sizes and times tell
            // less: two files may well have the same.
            is_unchanged = version == stat.version || (is_before && before != sent.ino);
        }
        Ok(match &sent.what {
            PendingChange::Content { .. } if is_unchanged => false,
            PendingChange::Content { size, mtime } => {
                let granularity = self.pool.capabilities().time_granularity_ns;
                stat.kind == FileKind::File && stat.size == *size && same_tick(stat.mtime, *mtime, granularity)
            }
            // In a pool that renames by copies, any directory may look like ours, and part of it be still at the source.
            PendingChange::Moved { from }
                if stat.kind == FileKind::Directory && self.pool.capabilities().renames.copy() =>
            {
                record.is_object(stat) && self.has_left(from, sent.ino, path).await?
            }
            PendingChange::Moved { .. } | PendingChange::Linked => record.is_object(stat),
            PendingChange::Made { .. } if is_before || record.kind != stat.kind => false,
            // Seen by what is no longer there.
            PendingChange::Removed => false,
            &PendingChange::Made { mode, uid, gid } => {
                // The attributes that it was created with, not those that the overlay gave it since.
                self.is_as_made(&InodeRecord { mode, uid, gid, ..record }, stat, path).await?
            }
        })
    }

    /// Whether a directory that is at its new path has left its old name. What the pool still has there may be another
    /// client's, or an object that the pool could copy but not remove: a known name that is not at the new path counts.
    async fn has_left(&self, from: &Link, dir: Ino, to: &PoolPath) -> Result<bool> {
        let Ok(path) = self.pool_path_of(from.0, &from.1) else { return Ok(true) };
        let is_missing = |e: &Error| matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory);
        let mut is_known = false;
        self.catalog.names(dir, |_, record| {
            is_known |= record.pool.is_some();
            Ok(!is_known)
        })?;
        if !is_known {
            // Nothing distinguishes the directory from another one.
            return match self.ask(self.pool.stat(&path)).await {
                Ok(_) => Ok(false),
                Err(e) if is_missing(&e) => Ok(true),
                Err(e) => Err(e.context(&path)),
            };
        }
        let left = async {
            let mut listing = self.pool.list(&path).await?;
            while let Some(page) = listing.try_next().await? {
                for entry in page {
                    if self.catalog.name(dir, &entry.name)?.pool.is_none() {
                        continue;
                    }
                    match self.pool.stat(&to.join(&entry.name)).await {
                        Err(e) if is_missing(&e) => return Ok(false),
                        there => there?,
                    };
                }
            }
            Ok(true)
        };
        match self.ask(left).await {
            Err(e) if is_missing(&e) => Ok(true),
            left => left.map_err(|e| e.context(&path)),
        }
    }

    /// Whether the removal of a name was sent, and the pool no longer has the object there.
    fn is_removed(&self, name: &NameRecord, stat: Option<&Stat>) -> Result<bool> {
        let Some(ino) = name.pool else { return Ok(false) };
        if !name.pending.iter().any(|sent| sent.ino == ino && sent.what == PendingChange::Removed) {
            return Ok(false);
        }
        let record = self.record_of(ino)?;
        Ok(stat.is_none_or(|stat| !record.is_object(stat)))
    }

    /// Whether the pool's file under a name has several names and was being written in place when the answer was lost.
    async fn is_half_written(&self, sent: &PendingCall, stat: &Stat, path: &PoolPath) -> Result<bool> {
        let PendingChange::Content { size, mtime } = sent.what else { return Ok(false) };
        let same = self.record_of(sent.ino)?.version.is_some_and(|v| v.same_object(&stat.version));
        if !same || stat.nlink < 2 || !self.pool.capabilities().objects.xattrs {
            return Ok(false);
        }
        let mark = (UNFINISHED_XATTR.to_vec(), unfinished_mark(size, mtime));
        Ok(self.ask(self.pool.xattrs(path)).await.map_err(|e| e.context(path))?.contains(&mark))
    }

    /// Whether an object of the pool is what creating an inode there would create, apart from attributes.
    pub(super) async fn is_as_made(&self, record: &InodeRecord, stat: &Stat, path: &PoolPath) -> Result<bool> {
        Ok(stat.kind == record.kind
            && match stat.kind {
                FileKind::Directory => !self.pool.capabilities().objects.owners || lets_in_as_many(stat, record),
                FileKind::Symlink => {
                    let target = self.ask(self.pool.readlink(path)).await.map_err(|e| e.context(path))?;
                    record.target.as_deref() == Some(&target)
                }
                FileKind::File => false,
                _ => stat.rdev == record.rdev,
            })
    }

    /// Records what is about to be sent to a name; the record survives a power cut when this returns. The caller holds
    /// the flush lock of the inode. Returns `false` if the name belongs to another inode by now, or something else is
    /// in flight to it: then nothing may be sent.
    pub(super) async fn about_to_send(&self, at: &Link, ino: Ino, what: PendingChange) -> Result<bool> {
        {
            let mut txn = Txn::begin(self);
            let name = txn.name(at.0, &at.1)?;
            let anothers = name.here_ino().is_some_and(|here| here != ino) || name.pending.iter().any(|s| s.ino != ino);
            if anothers && name.pool != Some(ino) {
                return Ok(false);
            }
            txn.send(at.0, &at.1, PendingCall { ino, what })?;
            txn.commit()?;
        }
        self.sync_written().await?;
        Ok(true)
    }

    /// Syncs the catalog before a call to the pool: the pool must never be ahead of it, not even after a power cut.
    pub(super) async fn sync_written(&self) -> Result<()> {
        let catalog = self.catalog.clone();
        blocking(move || catalog.sync_written()).await
    }
}

fn same_tick(a: Time, b: Time, granularity_ns: u32) -> bool {
    let ticks = |time: Time| (time.secs, time.nanos / granularity_ns.clamp(1, 1_000_000_000));
    ticks(a) == ticks(b)
}

/// Whether a directory of the pool admits all users that may have written to ours: its owner, and those whom its mode
/// lets write. Files that were created in ours must not go to a directory that is closed to their creators.
fn lets_in_as_many(theirs: &Stat, ours: &InodeRecord) -> bool {
    const GROUP: u32 = 0o030;
    const OTHERS: u32 = 0o003;
    const WRITE: u32 = 0o022;
    let grants = |bits: u32| theirs.mode & bits == bits;
    let owner = theirs.uid == ours.uid || grants(OTHERS) || (theirs.gid == ours.gid && grants(GROUP));
    owner && ours.mode & !theirs.mode & WRITE == 0
}
