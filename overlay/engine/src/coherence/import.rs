//! Changes that other clients made in the pool, one object at a time.
//!
//! **Hard links.** An inode knows its names in the mount, its names in the pool, and how many more names the pool
//! counts (`unseen_links`): no program has looked these up yet. `stat` shows the sum. That the pool still has one name
//! of a file says nothing about its other names, so each name is confirmed by itself. While there are unseen names,
//! unlinking the last known name does not discard unflushed content. When another name is looked up, the column family
//! `objects` leads from the identity of the pool's object to its inode.

use std::time::Instant;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side, Stat, Version};
use forebay_catalog::{FileState, InodeRecord, Link, NameRecord};

use super::super::{Inner, Ino, Txn};
use super::Growth;
use crate::pool_calls::{NameQuery, QueryStamp, look_again};
use crate::txn::identity;

impl Inner {
    /// Adds an object of the pool to the catalog under a name that the catalog does not have. `None`: the answer came
    /// too late to count, the mount hides the name by now, or the directory is gone.
    pub(super) fn import(&self, parent: Ino, name: &[u8], stat: &Stat, watched: &NameQuery<'_>) -> Result<Option<Ino>> {
        self.note_names_in(parent)?;
        let mut txn = Txn::begin(self);
        let was = txn.name(parent, name)?;
        if !was.is_empty() {
            return Ok(was.here_ino());
        }
        if !watched.holds(name) || !txn.is_dir_in_pool(parent)? {
            return Ok(None);
        }
        let ino = self.import_in(&mut txn, parent, name, stat, watched.began())?;
        // A listing that is under way may have passed the name before another client created it.
        self.pool_calls.watches.name_found(parent, name, watched.began());
        txn.commit()?;
        if let Ok(node) = self.node(ino) {
            node.state.lock().take_answer_of(watched.began());
        }
        Ok(Some(ino))
    }

    /// Like [`Self::import`], inside a larger change. `asked`: when the pool was asked.
    pub(super) fn import_in(
        &self,
        txn: &mut Txn<'_>,
        parent: Ino,
        name: &[u8],
        stat: &Stat,
        asked: Instant,
    ) -> Result<Ino> {
        let link = (parent, Box::from(name));
        // The kernel's cached listing lacks this name.
        txn.state_at_once(parent)?.kernel.pages_go_stale();
        let identity = identity(stat);
        if let Some(known) = self.known_object(txn, identity.as_deref(), stat)? {
            // Each write to it brings a version that may be newer than this answer.
            if !txn.record(known)?.file.is_written_through() && !txn.state(known)?.is_overtaken(asked, Some(stat)) {
                self.take_news(txn, known, stat, asked)?;
            }
            let record = txn.record(known)?;
            record.links.push(link.clone());
            record.pool_links.push(link);
            record.count_links(stat);
            txn.set_name(parent, name, NameRecord::clean(known, stat.kind))?;
            return Ok(known);
        }
        let several = identity.filter(|_| stat.nlink > 1);
        if let Some(ino) = several.as_ref().and_then(|id| txn.link_new(id, &link, stat)) {
            txn.set_name(parent, name, NameRecord::clean(ino, stat.kind))?;
            return Ok(ino);
        }
        let ino = txn.create(InodeRecord::from_pool(stat, Some(link)))?;
        if let Some(identity) = several {
            txn.put_object(identity, ino);
        }
        txn.set_name(parent, name, NameRecord::clean(ino, stat.kind))?;
        Ok(ino)
    }

    /// Returns the inode of a pool object, if the object is known as one with several names.
    pub(crate) fn known_as(&self, stat: &Stat) -> Result<Option<Ino>> {
        let Some(known) = identity(stat).map(|id| self.catalog.object(&id)).transpose()?.flatten() else {
            return Ok(None);
        };
        let record = self.catalog.inode(known)?;
        let same = record.is_some_and(|r| r.version.is_some_and(|v| v.same_object(&stat.version)));
        Ok(same.then_some(known))
    }

    /// Resolves the doubt about requests that were sent to an object that is known under other names. Returns whether
    /// there were any.
    pub(super) async fn resolve_doubt_of_object(&self, stat: &Stat) -> Result<bool> {
        if stat.nlink < 2 {
            return Ok(false);
        }
        match self.known_as(stat)? {
            Some(known) => self.resolve_doubt(known).await,
            None => Ok(false),
        }
    }

    /// Returns the inode that an object of the pool has under its other names. Not an inode whose old version is open:
    /// the new name must not show the old version.
    fn known_object(&self, txn: &mut Txn<'_>, identity: Option<&[u8]>, stat: &Stat) -> Result<Option<Ino>> {
        let Some(id) = identity else { return Ok(None) };
        let Some(known) = self.catalog.object(id)? else { return Ok(None) };
        if self.catalog.inode(known)?.is_none() {
            return Ok(None);
        }
        let record = txn.record(known)?;
        let version = record.version.clone();
        let same_object = record.is_object(stat);
        let same_content = version.as_ref().is_some_and(|v| v.same_content(&stat.version));
        let dirty = record.file.is_dirty() || record.file.is_written_through();
        // If the local content is dirty, the flush finds out whether the pool's copy changed, too, and keeps both.
        if same_object && (same_content || dirty || !txn.state(known)?.opens.any()) {
            return Ok(Some(known));
        }
        if same_object {
            return Ok(None);
        }
        if txn.has_object(known, id)? {
            // Its number was used again: other clients removed its last names before a program in the mount looked them up.
            txn.record(known)?.unseen_links = 0;
            txn.reap(known)?;
        } else {
            // The inode has another object by now.
            txn.forget_object(id);
        }
        Ok(None)
    }

    /// Updates a clean inode to the pool's present copy.
    fn take_news(&self, txn: &mut Txn<'_>, ino: Ino, stat: &Stat, asked: Instant) -> Result<()> {
        let record = txn.record(ino)?;
        if record.file.is_dirty() || record.version.as_ref() == Some(&stat.version) {
            return Ok(());
        }
        let bytes = txn.counted_bytes(ino)?;
        let record = txn.record(ino)?;
        let before = record.version.as_ref();
        if before.is_some_and(|v| !v.same_object(&stat.version)) {
            // Unflushed changes of attributes were meant for the object that is gone.
            record.dirty = Default::default();
            record.dirty_xattrs.clear();
        }
        let behind = txn.state(ino)?.version_behind.clone();
        let record = txn.record(ino)?;
        let ours = is_ours(record, behind.as_ref(), stat);
        let changed = record.version.as_ref().is_some_and(|v| !v.same_content(&stat.version));
        record.changed_since_removal |= changed && record.has_removed_names();
        if !ours {
            txn.pool_changed(ino, bytes)?;
        }
        txn.take_attrs(ino, stat)?;
        let record = txn.record(ino)?;
        record.version = Some(stat.version.clone());
        record.xattrs = None;
        record.target = None;
        txn.on_commit(ino, move |state| {
            state.take_answer_of(asked);
            if !ours {
                state.kernel.pages_go_stale();
                state.growth = Growth::default();
            }
            state.names.negative.clear();
        })?;
        txn.note_object(ino, stat);
        Ok(())
    }

    /// Fails if `stat`, which the pool reports of its root, belongs to another directory than the root that the catalog
    /// knows. Its names would be taken for those of the pool: the known names would be forgotten, and dirty files flushed
    /// to where they do not belong.
    pub(crate) fn refuse_other_root(&self, known: &InodeRecord, stat: &Stat) -> Result<()> {
        if !self.pool.capabilities().versions.outlive_mounts || !is_other_root(known, stat) {
            return Ok(());
        }
        let what = format!(
            "{} is another directory than before: mount the file system that holds the pool; if the pool was replaced on \
             purpose, unmount Forebay and give its fast directory to `forebay fsck --new-root`",
            self.pool.url()
        );
        Err(Error::new(ErrorKind::Unavailable, Side::Pool, what))
    }

    /// Handles a new version of an inode in the pool, seen under `link`. `false`: the answer came too late to count.
    ///
    /// # Errors
    /// `Stale` if the name now stands for another inode; `Unavailable` if the pool's root is another directory.
    pub(super) fn changed(&self, ino: Ino, link: Option<&Link>, stat: &Stat, asked: QueryStamp) -> Result<bool> {
        let mut txn = Txn::begin(self);
        let record = txn.record(ino)?;
        if ino == Ino::ROOT {
            self.refuse_other_root(record, stat)?;
        }
        if record.file.is_dirty() {
            return Ok(true);
        }
        if !record.pending_at.is_empty() || !txn.believes(ino, asked)? {
            return Ok(false);
        }
        if txn.state(ino)?.is_overtaken(asked.at(), Some(stat)) {
            return Ok(true);
        }
        if txn.record(ino)?.file.is_whole() && txn.state(ino)?.opens.has_writer() {
            // A replacement would lose what these writers write. The flush finds the new version, and keeps both.
            return Ok(true);
        }
        let behind = txn.state(ino)?.version_behind.clone();
        let record = txn.record(ino)?;
        let same_object = record.version.as_ref().is_none_or(|v| v.same_object(&stat.version));
        // One of several names of an object now belongs to another object.
        let parted = !same_object && record.pool_links.len() > 1;
        let other_kind = record.kind != stat.kind;
        let same_version = record.version.as_ref() == Some(&stat.version);
        let other_bytes = stat.kind == FileKind::File && !same_version && !is_ours(record, behind.as_ref(), stat);
        let in_use = other_bytes && txn.state(ino)?.opens.any();
        // The object may be known under another name.
        let shared = !same_object && stat.nlink > 1 && stat.kind != FileKind::Directory;
        // The cached content and the access rights of a directory do not hold for another directory under its name.
        let other_dir = !same_object && stat.kind == FileKind::Directory && stat.version.identity().is_some();
        if other_kind || parted || in_use || shared || (other_dir && ino != Ino::ROOT) {
            return self.replaced(txn, ino, link, stat, asked.at());
        }
        self.take_news(&mut txn, ino, stat, asked.at())?;
        txn.commit()?;
        if !(stat.kind == FileKind::Directory && self.is_answered_anyway(ino)) {
            self.tell_kernel_inode(ino, true);
        }
        Ok(true)
    }

    /// Returns whether the kernel waits for attributes of an inode and will get the present ones. If the kernel were
    /// notified to forget the old ones, it would discard that answer, and decide on permissions by older attributes.
    fn is_answered_anyway(&self, ino: Ino) -> bool {
        let Some(node) = self.table.peek(ino) else { return false };
        let mut state = node.state.lock();
        state.kernel.news_withheld |= state.kernel.answering > 0;
        state.kernel.answering > 0
    }

    /// Handles a name that now stands for another object, or for a version that programs with the old version open must
    /// not see. These programs keep the old inode. `txn`: in which the caller found out that the answer counts. `at`: when
    /// the pool was asked. `false`: the answer does not count any more.
    fn replaced<'a>(
        &'a self,
        mut txn: Txn<'a>,
        ino: Ino,
        link: Option<&Link>,
        stat: &Stat,
        at: Instant,
    ) -> Result<bool> {
        let Some((parent, name)) = link else { return Ok(true) };
        let record = txn.record(ino)?;
        let in_place = record.version.as_ref().is_some_and(|v| v.same_object(&stat.version));
        let names: Vec<Link> = record.links.iter().chain(&record.pool_links).cloned().collect();
        if in_place && record.kind == stat.kind {
            // A change in place shows under all names of the object.
            self.part_from_open(&mut txn, ino, &names, stat, at)?;
        } else {
            let asked = self.asked(txn.state(ino)?);
            let counts = |txn: &mut Txn<'_>| txn.believes(ino, asked);
            let Some(rest) = self.forget_pool_name(txn, ino, *parent, name, &counts)? else { return Ok(false) };
            txn = rest;
            look_again(&mut txn, *parent)?;
            // In the same batch: no lookup may find that the name is absent.
            if txn.name(*parent, name)?.is_empty() {
                self.import_in(&mut txn, *parent, name, stat, at)?;
            }
        }
        txn.commit()?;
        for (parent, name) in &names {
            self.tell_kernel_name(*parent, name);
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: replaced in the pool", name.escape_ascii())))
    }

    /// Moves all names of an inode to another inode, of the version that the pool has now. Programs that have the old
    /// inode open keep it. `at`: when the pool was asked.
    fn part_from_open(&self, txn: &mut Txn<'_>, ino: Ino, names: &[Link], stat: &Stat, at: Instant) -> Result<()> {
        let heir = self.known_object(txn, identity(stat).as_deref(), stat)?.filter(|known| *known != ino);
        let old = txn.record(ino)?;
        let mut new = old.clone();
        old.links.clear();
        old.pool_links.clear();
        old.unseen_links = 0;
        old.dirty = Default::default();
        old.dirty_xattrs.clear();
        new.file = FileState::absent();
        new.take_attrs(stat);
        new.version = Some(stat.version.clone());
        new.target = None;
        new.xattrs = None;
        let heir = match heir {
            // The object was found under one of its other names before.
            Some(known) => {
                let record = txn.record(known)?;
                record.links.extend(new.links);
                record.pool_links.extend(new.pool_links);
                record.count_links(stat);
                known
            }
            None => {
                let heir = txn.create(new)?;
                txn.note_object(heir, stat);
                heir
            }
        };
        for (parent, name) in names {
            let mut record = txn.name(*parent, name)?;
            record.here = record.here.map(|(i, kind)| (if i == ino { heir } else { i }, kind));
            record.pool = record.pool.map(|i| if i == ino { heir } else { i });
            txn.set_name(*parent, name, record)?;
            // A listing that is under way may have the old version: it is not the heir's.
            self.pool_calls.watches.name_found(*parent, name, at);
        }
        txn.on_commit(ino, |state| state.attachment.supersede())?;
        txn.reap(ino)
    }

    /// Handles one of several names of an inode that now stands for nothing, or for another object: `there`. `watched`: the
    /// question about the name. An answer on the object says nothing about the name.
    pub(super) fn parted(
        &self,
        ino: Ino,
        link: &Link,
        there: Option<&Stat>,
        asked: QueryStamp,
        watched: &NameQuery<'_>,
    ) -> Result<()> {
        let mut txn = Txn::begin(self);
        let record = txn.record(ino)?;
        let same = there.is_some_and(|stat| record.is_object(stat));
        if same || !record.pool_links.contains(link) || !txn.believes(ino, asked)? {
            return Ok(());
        }
        if there.is_none() && watched.was_found(&link.1) {
            return Ok(());
        }
        match there {
            Some(stat) => self.replaced(txn, ino, Some(link), stat, asked.at()).map(drop),
            None => {
                let counts = |txn: &mut Txn<'_>| txn.believes(ino, asked);
                if let Some(txn) = self.forget_pool_name(txn, ino, link.0, &link.1, &counts)? {
                    txn.commit()?;
                }
                self.tell_kernel_name(link.0, &link.1);
                Ok(())
            }
        }
    }

    /// Handles an inode that the pool does not have under its known path: a flush whose answer was lost moved it, or
    /// another client removed it. `false`: the answer does not count, because a change of ours explains it.
    ///
    /// # Errors
    /// `Stale` if the inode is gone with its name.
    pub(crate) async fn missing(&self, ino: Ino, asked: QueryStamp) -> Result<bool> {
        match self.resolve_doubt(ino).await {
            Ok(false) => self.vanished(ino, asked),
            // The next question uses the inode's new path.
            Ok(true) => Ok(false),
            Err(e) if e.tells_nothing() => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Handles an inode that the pool no longer has under its known name. `false`: the answer does not count.
    fn vanished(&self, ino: Ino, asked: QueryStamp) -> Result<bool> {
        let mut txn = Txn::begin(self);
        if ino == Ino::ROOT {
            return Ok(true);
        }
        if !txn.believes(ino, asked)? {
            return Ok(false);
        }
        if txn.state(ino)?.is_overtaken(asked.at(), None) {
            return Ok(true);
        }
        let record = txn.record(ino)?;
        let dirty = record.file.is_dirty();
        // If it has a single name, the flush finds out.
        if dirty && record.pool_links.len() < 2 || record.links.is_empty() {
            return Ok(true);
        }
        let Some((parent, name)) = record.pool_link().cloned() else { return Ok(true) };
        let counts = |txn: &mut Txn<'_>| txn.believes(ino, asked);
        let Some(mut txn) = self.forget_pool_name(txn, ino, parent, &name, &counts)? else { return Ok(false) };
        let links = txn.state(ino)?.record.links.clone();
        let moved = !links.contains(&(parent, name.clone()));
        let gone = txn.record(ino)?.links.is_empty();
        if moved {
            look_again(&mut txn, parent)?;
        }
        txn.commit()?;
        self.tell_kernel_name(parent, &name);
        if (moved || dirty) && !gone {
            // The flush creates it in the pool again.
            return Ok(true);
        }
        for (parent, name) in &links {
            self.tell_kernel_name(*parent, name);
        }
        Err(Error::new(ErrorKind::Stale, Side::Pool, format!("{}: removed in the pool", name.escape_ascii())))
    }
}

/// Returns whether `stat` is of another directory than the root that the catalog knows. Object stores have no identities.
pub(crate) fn is_other_root(known: &InodeRecord, stat: &Stat) -> bool {
    let identity = |version: &Version| version.identity();
    match (known.version.as_ref().and_then(identity), identity(&stat.version)) {
        (Some(known), Some(now)) => !known.is_same(now),
        _ => false,
    }
}

/// Returns whether the daemon's own flush made this version, of the same bytes: the flush sent attributes, or changed
/// one of the object's names, and the answer was lost. `behind`: `NodeState::version_behind`. Of a file that is written
/// through no bytes are resident, so any version of the object will do.
fn is_ours(record: &InodeRecord, behind: Option<&Version>, stat: &Stat) -> bool {
    let Some(known) = &record.version else { return false };
    if record.file.is_written_through() {
        return known.same_object(&stat.version);
    }
    (record.is_dirty() || behind == Some(known)) && known.same_content(&stat.version)
}
