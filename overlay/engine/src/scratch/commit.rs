//! Takes a tree from a scratch directory into the overlay: its files become content files by renames, whatever their
//! size, and all records are written in one batch.
//!
//! The batch has a mark. A tree that is still detached after the death of a daemon belongs to a finished commit if its
//! mark is in the catalog; else it is moved back.

use std::sync::Arc;
use std::time::Duration;

use forebay_api::scratch::{CommitReport, CommitRequest};
use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::ContentNumbers;
use forebay_cache::scratch::{DetachedTree, FileType, TreeEntry, TreeKind};
use forebay_catalog::{Batch, ContentRecord, DirtyAttrs, FileState, InodeRecord, Link, ListingState, NameRecord};
use forebay_system::clock::{stamp_now, unix_now};
use smallvec::SmallVec;

use super::{ScratchUse, TakenScratch};
use crate::namespace::GraftPoint;
use crate::{Inner, Ino, blocking, parse_path};

/// The key in the catalog of the mark of a commit: this and its number.
const MARK: &str = "scratch-commit-";

/// How long a commit waits for the kernel to forget what it knows of the name.
const KERNEL_FORGETS: Duration = Duration::from_secs(2);

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

/// A tree that is in the mount.
struct Committed {
    report: CommitReport,
    /// Whether it survives a power cut.
    synced: Result<()>,
}

/// The inodes and the content of a tree.
struct NewTree<'a> {
    batch: Batch<'a>,
    top: (Ino, FileKind),
    /// Owner and occupied bytes of each file.
    files: Vec<(Ino, u32, u64)>,
    report: CommitReport,
}

impl Inner {
    pub(super) async fn commit_scratch(self: Arc<Self>, request: CommitRequest) -> Result<CommitReport> {
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
        let target = self.check_graft(&at, kind).await?;
        let inner = self.clone();
        let (done, at) = blocking(move || Ok((inner.commit_tree(&taken, &path, &at, (kind, target))?, at))).await?;
        self.scratch.bell.notify_one();
        // The kernel may remember that the name did not exist.
        if let Some(kernel) = self.kernel.get() {
            let _ = tokio::time::timeout(KERNEL_FORGETS, kernel.invalidate_name_and_tell(at.parent, &at.name)).await;
        }
        done.synced.map_err(|error| error.context("committed and in the mount, but a power cut may undo it"))?;
        Ok(done.report)
    }

    fn commit_tree(
        &self,
        taken: &TakenScratch,
        path: &[u8],
        at: &GraftPoint,
        (kind, target): (FileKind, Option<Ino>),
    ) -> Result<Committed> {
        let number = self.catalog.new_content()?.0;
        let tree = self.store.detach(taken.record.device, &taken.id, path, number)?;
        let mut detached = Detached { tree, inner: self, is_committed: false };
        let mut entries = detached.tree.read(|| self.catalog.new_content())?;
        self.check_entries(&entries, at)?;
        detached.tree.adopt(&self.store, &mut entries)?;
        detached.tree.check_unchanged(&entries)?;
        let mut new = self.new_tree(&entries, at)?;
        if new.top.1 != kind {
            let what = "it was changed while it was committed: end its programs, and repeat";
            return Err(Error::new(ErrorKind::Busy, Side::Application, what));
        }
        let single = match entries.first().map(|top| &top.kind) {
            Some(TreeKind::File { content, .. }) => Some(self.store.open_content(*content)?),
            _ => None,
        };
        drop(entries);
        let mark = format!("{MARK}{number}");
        new.batch.put_meta(&mark, &(at.parent, &at.name));
        self.graft(at, new.top, target, single.as_ref(), new.batch)?;
        detached.is_committed = true;
        self.count_committed(taken, &new.files, new.report.bytes);
        // Until the records are durable, the tree must not lose what a power cut would need to move it back.
        let synced = self.catalog.sync();
        if synced.is_ok()
            && let Err(error) = detached.tree.finish(&self.store).and_then(|()| self.catalog.delete_meta(&[mark]))
        {
            tracing::warn!(%error, "what is left of a commit is removed at the next start of the daemon");
        }
        Ok(Committed { report: new.report, synced })
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
        let mut paths = Vec::new();
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
                let path = match entry.parent {
                    None => above.join(&at.name),
                    Some(parent) => {
                        let above: &forebay_backends::PoolPath = &paths[parent];
                        above.join(&entry.name)
                    }
                };
                self.pool.check_path(&path)?;
                paths.push(path);
            }
        }
        self.check_depth_below(at.parent, &at.name, levels.into_iter().max().unwrap_or(0))
    }

    /// Makes the records of a tree whose files are in the content store.
    fn new_tree(&self, entries: &[TreeEntry], at: &GraftPoint) -> Result<NewTree<'_>> {
        let inos = entries.iter().map(|_| self.catalog.new_ino()).collect::<Result<Vec<Ino>>>()?;
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
        for (number, entry) in entries.iter().enumerate() {
            let kind = kind_of(entry, entries);
            if entry.parent.is_some() {
                let (parent, name) = (inos[entry.parent.unwrap_or_default()], entry.name.as_slice());
                let shown = NameRecord::default().showing(Some((ino_of(number), kind)));
                batch.put_name(parent, name, &NameRecord::default(), &shown, entry.uid);
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
                    files.push((inos[number], entry.uid, *occupied_bytes));
                    report.files += 1;
                    report.bytes += occupied_bytes;
                }
                _ => {}
            }
            batch.put_inode(inos[number], &record, false);
        }
        let top = entries.first().map_or(FileKind::File, |top| kind_of(top, entries));
        let first = inos.first().copied().unwrap_or(Ino::ROOT);
        Ok(NewTree { batch, top: (first, top), files, report })
    }

    /// Counts what was a part of the scratch directory as dirty content.
    fn count_committed(&self, taken: &TakenScratch, files: &[(Ino, u32, u64)], bytes: u64) {
        if let Some(known) = self.scratch.known.lock().get_mut(&taken.id) {
            let charged = known.charged_bytes.saturating_sub(bytes);
            self.store.budget.account(known.charged_bytes, charged);
            known.charged_bytes = charged;
            known.used_bytes = known.used_bytes.saturating_sub(bytes);
        }
        self.store.budget.account(0, bytes);
        for (ino, uid, bytes) in files.iter().filter(|(_, uid, _)| self.shares.has_share(*uid)) {
            self.shares.charge(*ino, Some((*uid, *bytes)));
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
        for mark in &marks {
            let name: Option<(Ino, Vec<u8>)> = self.catalog.meta(mark)?;
            self.scratch.appeared.lock().extend(name);
        }
        self.catalog.delete_meta(&marks)
    }

    /// Tells the kernel of the names that the last daemon did not tell it of: it may remember that they do not exist.
    pub(crate) fn tell_kernel_of_commits(&self) {
        let appeared = std::mem::take(&mut *self.scratch.appeared.lock());
        appeared.iter().for_each(|(parent, name)| self.tell_kernel_name(*parent, name));
    }
}

fn kind_of(entry: &TreeEntry, entries: &[TreeEntry]) -> FileKind {
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
        sent_to: SmallVec::new(),
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
