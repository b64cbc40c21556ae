//! Lays the tree of a view: directories, symbolic links, and hard links to content files.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::views::{View, ViewPhase};
use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::Reservation;
use forebay_cache::views::{EntryLook, LaidFile, TOP, finish_directory, lay_other, open_in_view};
use forebay_catalog::{InodeRecord, ListingState};
use forebay_system::clock::unix_now;
use tokio::sync::oneshot::Receiver;

use super::ViewRecord;
use crate::node::Node;
use crate::{Dirent, Inner, Ino, Overlay, blocking};

/// Entries that are laid in a row before others get the thread.
const ENTRIES_AT_ONCE: usize = 1_024;
/// Failures that the message names.
const NAMED_FAILURES: usize = 3;

/// How long a client waits for the kernel to forget how long it may keep a name.
const KERNEL_FORGETS: Duration = Duration::from_secs(2);

/// A tree that is being laid.
struct LayingTree {
    id: String,
    device: usize,
    allow_copy: bool,
    awaits_mount: bool,
    view: OwnedFd,
    files: u64,
    directories: u64,
    bytes: u64,
    copied_bytes: u64,
    failures: Vec<Error>,
    failed: u64,
}

/// A directory whose entries are to be laid, by its path in the view.
struct LaidDirectory {
    ino: Ino,
    path: Vec<u8>,
}

impl LayingTree {
    fn fail(&mut self, error: Error) {
        self.failed += 1;
        if self.failures.len() < NAMED_FAILURES {
            self.failures.push(error);
        }
    }
}

impl Inner {
    pub(super) async fn lay(self: Arc<Self>, id: &str, allow_copy: bool, awaits_mount: bool) -> Result<View> {
        let record = self.views.known.lock().get(id).cloned().ok_or_else(|| super::unknown(id))?;
        if record.phase != ViewPhase::Staging {
            return Err(Error::new(ErrorKind::Busy, Side::Application, format!("{id} is laid already, or is ending")));
        }
        let (inner, device, name) = (self.clone(), record.device, id.to_owned());
        let view = blocking(move || inner.store.make_view(device, &name)).await?;
        let tree = LayingTree {
            id: id.to_owned(),
            device,
            allow_copy,
            awaits_mount,
            view,
            files: 0,
            directories: 0,
            bytes: 0,
            copied_bytes: 0,
            failures: Vec::new(),
            failed: 0,
        };
        let tree = self.lay_tree(Ino(record.ino), tree).await?;
        if let Some(first) = tree.failures.first() {
            let named: Vec<String> = tree.failures.iter().map(ToString::to_string).collect();
            let more = if tree.failed > named.len() as u64 { "; ..." } else { "" };
            let what = format!("{} of {} cannot be in a view: {}{more}", tree.failed, record.path, named.join("; "));
            return Err(Error::new(first.kind(), first.side(), what));
        }
        let inner = self.clone();
        let (laid, expired) = blocking(move || inner.finish_laying(tree)).await?;
        for expired in expired {
            let _ = tokio::time::timeout(KERNEL_FORGETS, expired).await;
        }
        Ok(laid)
    }

    /// Makes a tree durable, and then its record.
    fn finish_laying(self: &Arc<Self>, tree: LayingTree) -> Result<(View, Vec<Receiver<()>>)> {
        // The content, and the names that the view gives to it.
        self.close_epoch()?;
        let mut known = self.views.known.lock();
        let record = known.get_mut(&tree.id).ok_or_else(|| super::unknown(&tree.id))?;
        record.note_end(unix_now());
        if record.phase != ViewPhase::Staging {
            return Err(Error::new(ErrorKind::Busy, Side::Application, format!("{} was ended", tree.id)));
        }
        let LayingTree { awaits_mount, files, directories, bytes, copied_bytes, .. } = tree;
        let maker = record.maker.filter(|_| awaits_mount);
        *record =
            ViewRecord { phase: ViewPhase::Laid, maker, files, directories, bytes, copied_bytes, ..record.clone() };
        let shown = self.shown_view(&tree.id, record)?;
        self.save_views(&known)?;
        drop(known);
        self.catalog.sync()?;
        let expired = self.pin_names(&tree.id, Ino(shown.ino));
        self.views.bell.notify_one();
        Ok((shown, expired))
    }

    async fn lay_tree(self: &Arc<Self>, root: Ino, mut tree: LayingTree) -> Result<LayingTree> {
        let kind = self.node(root)?.state.lock().record.kind;
        let top = Dirent { name: TOP.as_bytes().into(), ino: root, kind };
        let mut dirs = Vec::new();
        tree = self.lay_entries(Vec::new(), vec![top], tree, &mut dirs).await?;
        let mut next = 0;
        while next < dirs.len() && tree.failed == 0 {
            let LaidDirectory { ino, path } = &dirs[next];
            let (ino, path) = (*ino, path.clone());
            next += 1;
            if !matches!(self.node(ino)?.state.lock().record.listing, ListingState::Complete(_)) {
                tree.fail(self.not_staged(ino));
                break;
            }
            let inner = self.clone();
            let entries = blocking(move || inner.entries(ino)).await?;
            for some in entries.chunks(ENTRIES_AT_ONCE) {
                tree = self.lay_entries(path.clone(), some.to_vec(), tree, &mut dirs).await?;
            }
        }
        let inner = self.clone();
        blocking(move || {
            // From below: the times of a directory change with its entries.
            for dir in dirs.iter().rev() {
                let look = look(&inner.node(dir.ino)?.state.lock().record);
                finish_directory(&tree.view, &dir.path, &look)?;
                inner.table.drop_idle(dir.ino);
            }
            Ok(tree)
        })
        .await
    }

    /// Lays entries of one directory. Adds the directories among them to `dirs`.
    async fn lay_entries(
        self: &Arc<Self>,
        path: Vec<u8>,
        entries: Vec<Dirent>,
        mut tree: LayingTree,
        dirs: &mut Vec<LaidDirectory>,
    ) -> Result<LayingTree> {
        // What the pool must be asked for.
        let overlay = Overlay { inner: self.clone() };
        for entry in entries.iter().filter(|entry| entry.kind == FileKind::Symlink) {
            overlay.readlink(entry.ino).await?;
        }
        let with_xattrs = entries.iter().filter(|entry| entry.kind != FileKind::Symlink);
        self.learn_xattrs(with_xattrs.map(|entry| entry.ino).collect()).await?;
        for entry in entries.iter().filter(|entry| entry.kind == FileKind::Directory) {
            let below = if path.is_empty() { entry.name.to_vec() } else { [&path, &b"/"[..], &entry.name].concat() };
            dirs.push(LaidDirectory { ino: entry.ino, path: below });
        }
        let inner = self.clone();
        blocking(move || {
            let opened = (!path.is_empty()).then(|| open_in_view(&tree.view, &path)).transpose()?;
            for entry in &entries {
                let dir = opened.as_ref().unwrap_or(&tree.view);
                match inner.lay_entry(dir, entry, &tree) {
                    Ok(laid) => {
                        tree.directories += u64::from(entry.kind == FileKind::Directory);
                        if let Some((laid, bytes)) = laid {
                            tree.files += 1;
                            tree.bytes = tree.bytes.saturating_add(bytes);
                            if let LaidFile::Copied(bytes) = laid {
                                inner.store.count_copy(tree.device, bytes);
                                tree.copied_bytes = tree.copied_bytes.saturating_add(bytes);
                            }
                        }
                    }
                    Err(error) => tree.fail(error),
                }
                inner.table.drop_idle(entry.ino);
            }
            Ok(tree)
        })
        .await
    }

    /// Lays one entry. Returns what became of a file, and its size.
    fn lay_entry(
        self: &Arc<Self>,
        dir: &OwnedFd,
        entry: &Dirent,
        tree: &LayingTree,
    ) -> Result<Option<(LaidFile, u64)>> {
        let node = self.node(entry.ino)?;
        self.leave_memory_for_link(&node, tree.device)?;
        let _space = if tree.allow_copy { self.space_for_copy(&node, tree.device)? } else { None };
        // Held until the name is there: what changes the file afterwards finds that a view has it.
        let state = node.state.lock();
        let record = &state.record;
        let lacks_xattrs = record.xattrs.is_none() && record.in_pool() && self.pool.capabilities().objects.xattrs;
        let is_unknown = if entry.kind == FileKind::Symlink { record.target.is_none() } else { lacks_xattrs };
        if is_unknown {
            // They changed while the pool was asked for them.
            drop(state);
            return Err(self.not_staged(entry.ino));
        }
        let look = look(record);
        let Some(content) = state.record.file.content().filter(|_| entry.kind == FileKind::File) else {
            if entry.kind == FileKind::File {
                drop(state);
                return Err(self.not_staged(entry.ino));
            }
            return lay_other(dir, &entry.name, &look).map(|()| None);
        };
        let refused = |why: &str| {
            let path = self.overlay_path(entry.ino).map_or_else(String::new, |path| path.to_string());
            Error::new(ErrorKind::Busy, Side::Application, format!("{path}: {why}"))
        };
        let (is_dirty, is_written) = (state.record.file.is_dirty(), state.may_be_written());
        let is_staged = state.record.file.is_whole() && state.leases.of(&tree.id, unix_now()).is_some();
        if is_dirty || is_written || !is_staged {
            drop(state);
            return Err(match () {
                () if is_written => refused("it is open for writing"),
                () if is_dirty => refused("it is not in the pool yet: forebay flush --wait"),
                () => self.not_staged(entry.ino),
            });
        }
        let laid = self.store.lay_file(content, tree.device, (dir, &entry.name), &look, tree.allow_copy)?;
        Ok(Some((laid, look.size)))
    }

    /// Reserves the space of a file that has to be copied into a view.
    fn space_for_copy(&self, node: &Node, device: usize) -> Result<Option<Reservation>> {
        let (content, bytes) = {
            let state = node.state.lock();
            (state.record.file.content(), state.record.size)
        };
        if content.is_none_or(|content| self.store.device_of(content) == device) {
            return Ok(None);
        }
        if let Some(space) = self.store.budget.reserve(bytes) {
            return Ok(Some(space));
        }
        self.make_room(bytes)?;
        let full = || Error::new(ErrorKind::NoSpace, Side::Cache, "no room in the fast pool for the copies of a view");
        self.store.budget.reserve(bytes).map(Some).ok_or_else(full)
    }

    fn not_staged(&self, ino: Ino) -> Error {
        let path = self.overlay_path(ino).map_or_else(|| ino.to_string(), |path| path.to_string());
        Error::new(ErrorKind::Busy, Side::Application, format!("{path}: it changed since it was staged: repeat"))
    }
}

fn look(record: &InodeRecord) -> EntryLook {
    EntryLook {
        kind: record.kind,
        mode: record.mode,
        uid: record.uid,
        gid: record.gid,
        size: record.size,
        rdev: record.rdev,
        target: record.target.clone(),
        atime: record.atime,
        mtime: record.mtime,
        xattrs: record.xattrs.clone().unwrap_or_default(),
    }
}
