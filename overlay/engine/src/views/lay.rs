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

/// The longest path of a directory in a view, in bytes: far below `PATH_MAX`, so that a name fits behind it.
const PATH_BYTES_MAX: usize = 3_000;

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

/// A directory of a view. Its path is put together when it is needed: the paths of very many directories that are deep
/// below each other would take more memory than there is.
struct LaidDirectory {
    ino: Ino,
    name: Box<[u8]>,
    /// The place in the list of the directory that it is in; `None` for the top.
    above: Option<usize>,
}

/// Returns the path of a directory in its view.
fn path_of(dirs: &[LaidDirectory], at: usize) -> Vec<u8> {
    let above = std::iter::successors(dirs.get(at), |dir| dirs.get(dir.above?));
    let mut names: Vec<&[u8]> = above.map(|dir| &*dir.name).collect();
    names.reverse();
    names.join(&b'/')
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
        tree = self.lay_entries(None, vec![top], tree, &mut dirs).await?;
        let mut next = 0;
        while next < dirs.len() && tree.failed == 0 {
            let (at, ino) = (next, dirs[next].ino);
            next += 1;
            if !matches!(self.node(ino)?.state.lock().record.listing, ListingState::Complete(_)) {
                tree.fail(self.not_staged(ino));
                break;
            }
            let inner = self.clone();
            let entries = blocking(move || inner.entries(ino)).await?;
            for some in entries.chunks(ENTRIES_AT_ONCE) {
                tree = self.lay_entries(Some(at), some.to_vec(), tree, &mut dirs).await?;
            }
        }
        let inner = self.clone();
        blocking(move || {
            // From below: the times of a directory change with its entries.
            for at in (0..dirs.len()).rev() {
                let ino = dirs[at].ino;
                let look = look(&inner.node(ino)?.state.lock().record);
                finish_directory(&tree.view, &path_of(&dirs, at), &look)?;
                inner.table.drop_idle(ino);
            }
            Ok(tree)
        })
        .await
    }

    /// Lays entries of one directory, which is that at `above` in `dirs`. Adds the directories among them to `dirs`.
    async fn lay_entries(
        self: &Arc<Self>,
        above: Option<usize>,
        entries: Vec<Dirent>,
        mut tree: LayingTree,
        dirs: &mut Vec<LaidDirectory>,
    ) -> Result<LayingTree> {
        let path = above.map_or_else(Vec::new, |above| path_of(dirs, above));
        let is_directory = |entry: &&Dirent| entry.kind == FileKind::Directory;
        let longest = entries.iter().filter(is_directory).map(|entry| path.len() + 1 + entry.name.len()).max();
        if let Some(bytes) = longest.filter(|bytes| *bytes > PATH_BYTES_MAX) {
            let what =
                format!("a path in it has {bytes} bytes, of {PATH_BYTES_MAX} at most: name directories below it");
            tree.fail(Error::new(ErrorKind::InvalidInput, Side::Application, what));
            return Ok(tree);
        }
        // What the pool must be asked for.
        let overlay = Overlay { inner: self.clone() };
        for entry in entries.iter().filter(|entry| entry.kind == FileKind::Symlink) {
            overlay.readlink(entry.ino).await?;
        }
        let with_xattrs = entries.iter().filter(|entry| entry.kind != FileKind::Symlink);
        self.learn_xattrs(with_xattrs.map(|entry| entry.ino).collect()).await?;
        for entry in entries.iter().filter(is_directory) {
            dirs.push(LaidDirectory { ino: entry.ino, name: entry.name.to_vec().into(), above });
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
