//! Takes a tree from a scratch directory into the overlay: its files become content files by renames, whatever their
//! size, and all records are written in one batch.
//!
//! A tree that is merged into a directory gets several names there, and replaces others (`merge`). All of that is in the
//! same batch.
//!
//! The batch has a mark. A tree that is still detached after the death of a daemon belongs to a finished commit if its
//! mark is in the catalog; else it is moved back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::scratch::{CommitReport, CommitRequest};
use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::ContentNumbers;
use forebay_cache::scratch::{DetachedTree, FileType, TreeEntry, TreeKind};
use forebay_catalog::{Batch, ContentRecord, DirtyAttrs, FileState, InodeRecord, Link, ListingState, NameRecord};
use forebay_system::clock::{stamp_now, unix_now};
use futures::FutureExt;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::merge::MergePlan;
use super::{ScratchUse, TakenScratch};
use crate::namespace::{Graft, GraftPoint};
use crate::permission::{CHANGE, SEARCH, UserGroups};
use crate::quotas::FileOwner;
use crate::{Inner, Ino, blocking, parse_path, to_its_end};

/// The key in the catalog of the mark of a commit: this and its number.
const MARK: &str = "scratch-commit-";
/// The key of the directories in which a commit made names, if there are several.
const MERGED: &str = "scratch-merge-";

/// How long a commit waits for the kernel to forget what it knows of the names.
const KERNEL_FORGETS: Duration = Duration::from_secs(2);
/// So many notes for the kernel are sent before the next ones are made.
const NOTES_AT_ONCE: usize = 16_000;
/// How often a merge looks again at the directories, because their names changed meanwhile.
const ATTEMPTS: usize = 4;
/// More files than this are synced together.
const SYNCED_ALONE: usize = 64;

/// A detached tree. It is moved back when this is dropped, unless its records were written.
struct Detached<'a> {
    tree: DetachedTree,
    inner: &'a Inner,
    is_committed: bool,
}

impl Drop for Detached<'_> {
    fn drop(&mut self) {
        if !self.is_committed
            && let Err(error) = self.inner.undo_commit(&self.tree)
        {
            tracing::error!(%error, "a commit is undone at the next start of the daemon");
        }
    }
}

/// What a tree gets its name over.
enum Onto {
    /// Nothing, or this inode is replaced.
    Whole(Option<Ino>),
    /// It is merged into a directory, with the rights of a user.
    Directory(Ino, UserGroups),
}

/// A tree that is in the mount.
struct Committed {
    report: CommitReport,
    /// What the kernel may know wrongly.
    grafts: Vec<Graft>,
    /// The marks of the commit, if nothing but that is left to do.
    marks: Vec<String>,
    /// Whether it survives a power cut.
    synced: Result<()>,
}

/// The inodes and the content of a tree.
struct NewTree<'a> {
    batch: Batch<'a>,
    grafts: Vec<Graft>,
    /// Directories that stay, with the names under which they were found.
    kept: Vec<(GraftPoint, Ino)>,
    /// Owner and occupied bytes of each file.
    files: Vec<(Ino, FileOwner, u64)>,
    report: CommitReport,
}

impl Inner {
    /// `merge_groups`: the tree is merged into what has its name, and the scratch directory's user has these groups.
    pub(super) async fn commit_scratch(
        self: Arc<Self>,
        request: CommitRequest,
        merge_groups: Option<Vec<u32>>,
    ) -> Result<CommitReport> {
        self.check_writable()?;
        let path = parse_path(&request.path)?.as_bytes().to_vec();
        let name = parse_path(&request.name)?.as_bytes().to_vec();
        let at = self.graft_point(Ino(request.parent_ino), &name)?;
        let (inner, id) = (self.clone(), request.id);
        let (taken, path, kind) = blocking(move || {
            let taken = inner.take_scratch(&id, ScratchUse::Change)?;
            // Immutable files cannot be moved.
            inner.unseal(&taken.id, &taken.record)?;
            let kind = file_kind(inner.store.kind_in_scratch(taken.record.device, &taken.id, &path)?);
            Ok((taken, path, kind))
        })
        .await?;
        let user = merge_groups.map(|groups| UserGroups { uid: taken.record.uid, groups });
        let onto = self.check_onto(&at, kind, user).await?;
        // This may ask the pool. It is not given up when the client goes away.
        let commit = self.commit_and_tell(move |inner| inner.commit_tree(&taken, &path, &at, (kind, onto)));
        let done = to_its_end(commit).await?;
        done.synced.map_err(|error| error.context("committed and in the mount, but a power cut may undo it"))?;
        Ok(done.report)
    }

    /// Carries out a commit, and makes the kernel forget what it knows wrongly then.
    async fn commit_and_tell(
        self: Arc<Self>,
        commit: impl FnOnce(&Self) -> Result<Committed> + Send + 'static,
    ) -> Result<Committed> {
        let inner = self.clone();
        let mut done = blocking(move || commit(&inner)).await?;
        self.scratch.bell.notify_one();
        let is_told = self.tell_kernel_of_grafts(&done.grafts).await;
        let marks = std::mem::take(&mut done.marks);
        if is_told {
            self.forget_marks(marks).await;
        }
        Ok(done)
    }

    /// Deletes the marks of commits that the kernel knows of.
    async fn forget_marks(self: &Arc<Self>, marks: Vec<String>) {
        let inner = self.clone();
        if let Err(error) = blocking(move || inner.catalog.delete_meta(&marks)).await {
            tracing::warn!(%error, "the next daemon tells the kernel again of what was committed");
        }
    }

    /// Checks what a tree gets its name over. `user`: the tree may be merged, and the user's rights are checked.
    async fn check_onto(self: &Arc<Self>, at: &GraftPoint, kind: FileKind, user: Option<UserGroups>) -> Result<Onto> {
        let Some(user) = user else {
            return Ok(Onto::Whole(self.check_graft(at, kind).await.map_err(|error| match error.kind() {
                ErrorKind::NotEmpty => {
                    let above = self.overlay_path(at.parent).unwrap_or_default();
                    let what = format!("{}: --merge merges the tree into it", above.join(&at.name));
                    Error::new(ErrorKind::NotEmpty, Side::Application, what)
                }
                _ => error,
            })?));
        };
        self.check_allowed(at.parent, &user, SEARCH).await?;
        if kind == FileKind::Directory
            && let Some(target) = self.find(at.parent, &at.name).await?
            && self.node(target)?.state.lock().record.kind == FileKind::Directory
        {
            return Ok(Onto::Directory(target, user));
        }
        let target = self.check_graft(at, kind).await?;
        self.check_allowed(at.parent, &user, CHANGE).await?;
        if let Some(target) = target {
            self.check_replaceable_by(at.parent, target, &user)?;
        }
        Ok(Onto::Whole(target))
    }

    fn commit_tree(
        &self,
        taken: &TakenScratch,
        path: &[u8],
        at: &GraftPoint,
        (kind, onto): (FileKind, Onto),
    ) -> Result<Committed> {
        let number = self.catalog.new_content()?.0;
        let tree = self.store.detach(taken.record.device, &taken.id, path, number)?;
        let mut detached = Detached { tree, inner: self, is_committed: false };
        let mut entries = detached.tree.read(|| self.catalog.new_content())?;
        if entries.first().is_none_or(|top| kind_of(top, &entries) != kind) {
            let what = "it was changed while it was committed: end its programs, and repeat";
            return Err(Error::new(ErrorKind::Busy, Side::Application, what));
        }
        self.check_entries(&entries, at)?;
        let mut plan = self.plan_onto(&entries, at, &onto)?;
        detached.tree.move_into_store(&self.store, &mut entries)?;
        detached.tree.check_unchanged(&entries)?;
        self.sync_replacing(&entries, &plan)?;
        let mark = format!("{MARK}{number}");
        let merged = format!("{MERGED}{number}");
        let mut left = ATTEMPTS;
        let (files, report, grafts) = loop {
            let NewTree { mut batch, grafts, kept, files, report } = self.new_tree(&entries, at, &plan)?;
            batch.put_meta(&mark, &(at.parent, &at.name));
            if !kept.is_empty() {
                let dirs: BTreeSet<u64> = grafts.iter().map(|graft| graft.at.parent.0).collect();
                batch.put_meta(&merged, &dirs);
            }
            left -= 1;
            match self.graft(&grafts, &kept, batch) {
                Ok(()) => break (files, report, grafts),
                Err(error) if error.is(ErrorKind::Stale) && left > 0 && matches!(onto, Onto::Directory(..)) => {
                    plan = self.plan_onto(&entries, at, &onto)?;
                    self.sync_replacing(&entries, &plan)?;
                }
                Err(error) => return Err(error),
            }
        };
        detached.is_committed = true;
        self.count_committed(taken, &files, report.bytes);
        // Until the records are durable, the tree must not lose what a power cut would need to move it back.
        let synced = self.catalog.sync();
        let mut marks = Vec::new();
        if synced.is_ok() {
            match detached.tree.finish(&self.store) {
                Ok(()) => marks.extend([mark, merged]),
                Err(error) => {
                    tracing::warn!(%error, "what is left of a commit is removed at the next start of the daemon");
                }
            }
        }
        Ok(Committed { report, grafts, marks, synced })
    }

    /// Finds what a tree meets. Blocks. Runs on a thread of a runtime.
    fn plan_onto(&self, entries: &[TreeEntry], at: &GraftPoint, onto: &Onto) -> Result<MergePlan> {
        match onto {
            Onto::Whole(target) => Ok(MergePlan::whole(entries, *target)),
            Onto::Directory(into, user) => {
                tokio::runtime::Handle::current().block_on(self.plan_merge(entries, at, *into, user).boxed_local())
            }
        }
    }

    /// Makes the bytes of files that replace others survive a power cut: as after a rename, there are the old bytes or
    /// the new ones.
    fn sync_replacing(&self, entries: &[TreeEntry], plan: &MergePlan) -> Result<()> {
        // One sync of a file takes as long as the device needs to empty its cache.
        let are_synced = plan.replaced.len() > SYNCED_ALONE && self.store.write_out().is_ok();
        for number in plan.replaced.keys() {
            let holder = match entries[*number].kind {
                TreeKind::HardLink { of } => of,
                _ => *number,
            };
            let TreeKind::File { content, .. } = entries[holder].kind else { continue };
            let content = self.store.open_content(content)?;
            match are_synced {
                true => self.catalog.check_written_back(&content)?,
                false => self.catalog.sync_content(&content, true)?,
            }
        }
        Ok(())
    }

    /// Makes the kernel forget names that a commit made or replaced, and attributes that it changed. Waits for it, but
    /// not for long. Returns whether it has.
    async fn tell_kernel_of_grafts(&self, grafts: &[Graft]) -> bool {
        let Some(kernel) = self.mount.kernel() else { return true };
        let mut is_told = true;
        let until = tokio::time::Instant::now() + KERNEL_FORGETS;
        // If the kernel does not know a name, the note of the name says nothing about the directory.
        let dirs: BTreeSet<Ino> = grafts.iter().map(|graft| graft.at.parent).collect();
        let mut changed: Vec<Ino> = dirs.into_iter().collect();
        changed
            .extend(grafts.iter().filter_map(|graft| graft.target).filter(|ino| self.table.is_known_to_kernel(*ino)));
        let attributes = changed.chunks(2 * NOTES_AT_ONCE).chain(std::iter::repeat(&[][..]));
        for (some, attributes) in grafts.chunks(NOTES_AT_ONCE).zip(attributes) {
            attributes.iter().for_each(|ino| kernel.invalidate_inode(*ino, false));
            let Some((last, names)) = some.split_last() else { continue };
            names.iter().for_each(|Graft { at, .. }| self.tell_kernel_name(at.parent, &at.name));
            // What is mounted at a pinned name must stay.
            let told = match self.is_pinned_name(last.at.parent, &last.at.name) {
                true => kernel.expire_name(last.at.parent, &last.at.name),
                false => kernel.invalidate_name_and_tell(last.at.parent, &last.at.name),
            };
            is_told &= tokio::time::timeout_at(until, told).await.is_ok();
        }
        is_told
    }

    /// Checks that the pool can hold the tree at its place.
    fn check_entries(&self, entries: &[TreeEntry], at: &GraftPoint) -> Result<()> {
        let can = self.pool.capabilities();
        let refused = |entry: &TreeEntry, what: &str| {
            let what =
                format!("{}: the pool cannot hold {what}: remove it, or commit other parts", entry.name.escape_ascii());
            Err(Error::new(ErrorKind::NotPermitted, Side::Pool, what))
        };
        let above = self.overlay_path(at.parent).unwrap_or_default();
        let mut levels = vec![0usize; entries.len()];
        for (number, entry) in entries.iter().enumerate() {
            levels[number] = entry.parent.map_or(0, |parent| levels[parent] + 1);
            match entry.kind {
                TreeKind::Special { .. } if !can.objects.special_files => return refused(entry, "special files"),
                TreeKind::Symlink { .. } if !can.objects.symlinks => return refused(entry, "symbolic links"),
                TreeKind::HardLink { .. } if !can.objects.hard_links => return refused(entry, "hard links"),
                _ => {}
            }
            if entry.parent.is_some() {
                self.check_name_alone(&entry.name)?;
            }
            if can.path_max.is_some() {
                let below = std::iter::successors(Some(entry), |entry| entry.parent.map(|parent| &entries[parent]));
                let mut names: Vec<&[u8]> =
                    below.filter(|entry| entry.parent.is_some()).map(|entry| entry.name.as_slice()).collect();
                names.push(&at.name);
                let path = names.iter().rev().fold(above.clone(), |path, name| path.join(name));
                self.pool.check_path(&path)?;
            }
        }
        self.check_depth_below(at.parent, &at.name, levels.into_iter().max().unwrap_or(0))
    }

    /// Makes the records of a tree whose files are in the content store.
    fn new_tree(&self, entries: &[TreeEntry], at: &GraftPoint, plan: &MergePlan) -> Result<NewTree<'_>> {
        let ino = |kept: &Option<Ino>| kept.map_or_else(|| self.catalog.new_ino(), Ok);
        let inos = plan.kept.iter().map(ino).collect::<Result<Vec<Ino>>>()?;
        // A further name of a file leads to the file's inode.
        let ino_of = |number: usize| match entries[number].kind {
            TreeKind::HardLink { of } => inos[of],
            _ => inos[number],
        };
        let mut links: Vec<SmallVec<[Link; 1]>> = vec![SmallVec::new(); entries.len()];
        let mut subdirs = vec![0u32; entries.len()];
        for (number, entry) in entries.iter().enumerate() {
            let holder = match entry.kind {
                TreeKind::HardLink { of } => of,
                _ => number,
            };
            links[holder].push(match entry.parent {
                Some(parent) => (inos[parent], entry.name.as_slice().into()),
                None => (at.parent, at.name.as_slice().into()),
            });
            if let (TreeKind::Directory, Some(parent)) = (&entry.kind, entry.parent) {
                subdirs[parent] += 1;
            }
        }
        let with_xattrs = self.pool.capabilities().objects.xattrs;
        let now = unix_now();
        let (mut batch, mut files, mut report) = (self.catalog.batch(), Vec::new(), CommitReport::default());
        let (mut grafts, mut kept) = (Vec::new(), Vec::new());
        for (number, entry) in entries.iter().enumerate() {
            let kind = kind_of(entry, entries);
            let point = || match entry.parent {
                Some(parent) => GraftPoint { parent: inos[parent], name: entry.name.clone() },
                None => at.clone(),
            };
            if let Some(dir) = plan.kept[number] {
                kept.push((point(), dir));
                continue;
            }
            if plan.is_graft(number, entry) {
                let target = plan.replaced.get(&number).copied();
                grafts.push(Graft { at: point(), ino: ino_of(number), kind, owner: entry.uid, target });
            } else if let Some(parent) = entry.parent {
                let shown = NameRecord::default().showing(Some((ino_of(number), kind)));
                batch.put_name(inos[parent], &entry.name, &NameRecord::default(), &shown, entry.uid);
            }
            if matches!(entry.kind, TreeKind::HardLink { .. }) {
                continue;
            }
            let mut record = record_of(entry, kind, std::mem::take(&mut links[number]), with_xattrs);
            match &entry.kind {
                TreeKind::Directory => {
                    record.dir_nlink = 2 + subdirs[number];
                    report.directories += 1;
                }
                TreeKind::File { content, occupied_bytes } => {
                    record.file = FileState::created(*content, now);
                    let mut residency = ContentRecord::empty(inos[number], 0);
                    residency.bytes = *occupied_bytes;
                    batch.put_content(*content, &residency);
                    files.push((inos[number], FileOwner::of(&record), *occupied_bytes));
                    report.files += 1;
                    report.bytes += occupied_bytes;
                }
                _ => {}
            }
            batch.put_inode(inos[number], &record, false);
        }
        Ok(NewTree { batch, grafts, kept, files, report })
    }

    /// Counts what was a part of the scratch directory as dirty content.
    fn count_committed(&self, taken: &TakenScratch, files: &[(Ino, FileOwner, u64)], bytes: u64) {
        // The directory first: what is counted twice for a moment could stop other writers of the user.
        if let Some(known) = self.scratch.known.lock().get_mut(&taken.id) {
            let charged = known.charged_bytes.saturating_sub(bytes);
            self.store.account_on(taken.record.device, known.charged_bytes, charged);
            known.charged_bytes = charged;
            known.used_bytes = known.used_bytes.saturating_sub(bytes);
            self.charge_owner_of_scratch(&taken.id, Some(known));
        }
        self.store.account_on(taken.record.device, 0, bytes);
        for (ino, owner, bytes) in files {
            if self.quotas.count() {
                // A program may have changed the file since the commit.
                let Ok(node) = self.node(*ino) else { continue };
                self.charge(*ino, &mut node.state.lock());
                drop(node);
                self.table.drop_idle(*ino);
            } else if self.shares.has_share(owner.uid) {
                self.shares.charge(*ino, Some((owner.uid, *bytes)));
            }
        }
    }

    fn undo_commit(&self, tree: &DetachedTree) -> Result<()> {
        tree.undo(&self.store, |content| Ok(self.catalog.content(content)?.is_some()))
    }

    /// Finishes or undoes the commits of the last daemon.
    pub(super) fn take_up_commits(&self) -> Result<()> {
        let mut marks = self.catalog.meta_keys(MARK)?;
        for tree in self.store.detached() {
            let mark = format!("{MARK}{}", tree.number);
            if !marks.contains(&mark) {
                tracing::info!("a commit of the last daemon is undone: nothing of it is in the mount");
                self.undo_commit(&tree)?;
            } else if let Err(error) = tree.finish(&self.store) {
                tracing::warn!(%error, "what is left of a commit is removed at the next start of the daemon");
                marks.retain(|known| *known != mark);
            }
        }
        for mark in marks.clone() {
            let name: Option<(Ino, Vec<u8>)> = self.catalog.meta(&mark)?;
            self.scratch.appeared.lock().extend(name);
            let merged = mark.replace(MARK, MERGED);
            let dirs: BTreeSet<u64> = self.catalog.meta(&merged)?.unwrap_or_default();
            self.scratch.merged.lock().extend(dirs.into_iter().map(Ino));
            marks.push(merged);
        }
        *self.scratch.marks.lock() = marks;
        Ok(())
    }

    /// Tells the kernel of the names that the last daemon did not tell it of: it may remember that they do not exist.
    /// Waits for it, but not for long. For an answer, the kernel may need the mount to be served.
    pub(crate) async fn tell_kernel_of_commits(self: &Arc<Self>) {
        let inner = self.clone();
        let told = blocking(move || Ok(inner.note_commits())).await.unwrap_or_default();
        let until = tokio::time::Instant::now() + KERNEL_FORGETS;
        let mut are_told = true;
        for told in told {
            are_told &= tokio::time::timeout_at(until, told).await.is_ok();
        }
        let marks = std::mem::take(&mut *self.scratch.marks.lock());
        if are_told {
            self.forget_marks(marks).await;
        }
    }

    /// Sends notes of what the last daemon committed. The last ones tell when the kernel has them.
    fn note_commits(&self) -> Vec<oneshot::Receiver<()>> {
        for dir in std::mem::take(&mut *self.scratch.merged.lock()) {
            self.tell_kernel_inode(dir, false);
            // It is not recorded which of its names are new.
            let told = self.catalog.names(dir, |name, _| {
                self.tell_kernel_name(dir, name);
                Ok(true)
            });
            if let Err(error) = told {
                tracing::warn!(%error, "the kernel shows what was committed when its caches expire");
            }
        }
        let Some(kernel) = self.mount.kernel() else { return Vec::new() };
        let appeared = std::mem::take(&mut *self.scratch.appeared.lock());
        let tell = |(parent, name): &(Ino, Vec<u8>)| match self.is_pinned_name(*parent, name) {
            true => kernel.expire_name(*parent, name),
            false => kernel.invalidate_name_and_tell(*parent, name),
        };
        appeared.iter().map(tell).collect()
    }
}

pub(super) fn kind_of(entry: &TreeEntry, entries: &[TreeEntry]) -> FileKind {
    match &entry.kind {
        TreeKind::Directory => FileKind::Directory,
        TreeKind::File { .. } => FileKind::File,
        TreeKind::HardLink { of } => kind_of(&entries[*of], entries),
        TreeKind::Symlink { .. } => FileKind::Symlink,
        TreeKind::Special { kind, .. } => file_kind(*kind),
    }
}

fn file_kind(kind: FileType) -> FileKind {
    match kind {
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        _ => FileKind::File,
    }
}

fn record_of(entry: &TreeEntry, kind: FileKind, links: SmallVec<[Link; 1]>, with_xattrs: bool) -> InodeRecord {
    let xattrs = if with_xattrs { entry.xattrs.clone() } else { Vec::new() };
    let target = match &entry.kind {
        TreeKind::Symlink { target } => Some(target.as_slice()),
        _ => None,
    };
    InodeRecord {
        kind,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        dir_nlink: 0,
        unseen_links: 0,
        rdev: match entry.kind {
            TreeKind::Special { rdev, .. } => rdev,
            _ => 0,
        },
        size: target.map_or(0, |target| target.len() as u64),
        occupied_in_pool: None,
        atime: entry.atime,
        mtime: entry.mtime,
        ctime: stamp_now(),
        links,
        pool_links: SmallVec::new(),
        pending_at: SmallVec::new(),
        version: None,
        file: FileState::absent(),
        listing: ListingState::Complete(None),
        target: target.map(Into::into),
        dirty_xattrs: xattrs.iter().map(|(name, value)| (name.clone(), Some(value.clone()))).collect(),
        changed_since_removal: false,
        xattrs: Some(xattrs),
        // The flush creates an inode in the pool with its attributes. It would set the times of a directory too early.
        dirty: DirtyAttrs { times: kind == FileKind::Directory, ..DirtyAttrs::default() },
    }
}
