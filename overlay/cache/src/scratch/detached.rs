//! A tree that is being taken from a scratch directory into the content store, by renames.
//!
//! ```text
//!   detach            the origin is recorded, the tree is moved to `commits/N/tree`: its user cannot reach it by a path
//!   read              the entries are listed; each file gets the number of a content file
//!   move_into_store   the moves are recorded in `commits/N/moves`, then each file is moved into the content store
//!   (the caller makes the records of the catalog, in one batch)
//!   finish, or undo   the rest of the tree is removed; or everything moves back
//! ```
//!
//! A daemon that dies in the middle leaves `commits/N`. If the catalog has the mark of the batch, the next daemon
//! finishes the commit; else it undoes it.
//!
//! The user may still hold directories and files of the tree open, and change what it reaches through them. So entries
//! are found from descriptors without following links, and a file is looked at again after it was moved to where its
//! user has no access. A file that has names elsewhere, through which its user could go on to change it, is refused.
//! What appears in the tree meanwhile goes back to its user.

mod moves;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_backends::{Error, ErrorKind, Result, Side, XATTRS_MAX_BYTES};
use rustix::fs::{Dir, FileType, RenameFlags};
use serde::{Deserialize, Serialize};

use super::make_dir;
use super::prune::{Prune, prune};
use super::tree::{TreeEntry, TreeKind, TreeXattrs, entry_of, kind_of, open_below, open_dir, stat_of};
use crate::{ContentId, ContentStore};

const COMMITS: &str = "commits";
const ORIGIN: &str = "origin";
const MOVES: &str = "moves";
const TREE: &str = "tree";
/// The most entries of one tree: the catalog takes them in one batch, and takes some 1 KiB of memory for each.
const ENTRIES_MAX: usize = 500_000;

/// The most bytes of paths, targets of symbolic links, and attributes of one tree.
const HELD_BYTES_MAX: usize = 256 << 20;

/// Where a tree comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ScratchOrigin {
    id: String,
    /// Below the scratch directory; empty: all of it.
    path: Vec<u8>,
}

/// A path in a scratch directory.
struct ScratchSource {
    /// The open directory that its name is in.
    parent: OwnedFd,
    name: Vec<u8>,
    /// Below the scratch directory, without empty parts.
    path: Vec<u8>,
    shown: PathBuf,
}

impl ScratchSource {
    fn failed(&self, error: io::Error) -> Error {
        Error::io(error, Side::Application, self.shown.display().to_string())
    }
}

/// A tree that was taken out of a scratch directory.
#[derive(Debug)]
pub struct DetachedTree {
    pub number: u64,
    device: usize,
    dir: PathBuf,
}

impl ContentStore {
    /// Takes a file, a directory or a symbolic link out of a scratch directory. `path` is relative to it; empty: all of
    /// it, which leaves it empty. `number` must be new.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if the path leaves the directory, or names another kind of file.
    pub fn detach(&self, device: usize, id: &str, path: &[u8], number: u64) -> Result<DetachedTree> {
        let source = self.source(device, id, path)?;
        let commits = self.numbered_device(device)?.path.join(COMMITS);
        make_dir(&commits, 0o700)?;
        let tree = DetachedTree { number, device, dir: commits.join(number.to_string()) };
        make_dir(&tree.dir, 0o700)?;
        let origin = ScratchOrigin { id: id.to_owned(), path: source.path.clone() };
        tree.write(ORIGIN, &encode(&origin)?)?;
        sync_dir(&commits)?;
        if let Err(error) =
            rustix::fs::renameat(&source.parent, source.name.as_slice(), rustix::fs::CWD, tree.dir.join(TREE))
        {
            tree.close()?;
            return Err(source.failed(error.into()));
        }
        if source.path.is_empty() {
            let meta = fs::symlink_metadata(tree.dir.join(TREE)).map_err(|e| tree.failed(e));
            let made = meta.and_then(|meta| self.make_scratch(device, id, (meta.uid(), meta.gid())));
            if let Err(error) = made {
                // Nothing has moved but the tree itself.
                tree.undo(self, |_| Ok(true))?;
                return Err(error);
            }
        }
        Ok(tree)
    }

    /// Returns what kind of file a path in a scratch directory leads to.
    ///
    /// # Errors
    /// As [`Self::detach`].
    pub fn kind_in_scratch(&self, device: usize, id: &str, path: &[u8]) -> Result<FileType> {
        let source = self.source(device, id, path)?;
        let kind = kind_of(&stat_of(&source.parent, &source.name).map_err(|e| source.failed(e))?);
        match kind {
            FileType::Directory | FileType::RegularFile | FileType::Symlink => Ok(kind),
            _ => {
                let what = format!("{}: neither a file nor a directory", source.shown.display());
                Err(Error::new(ErrorKind::InvalidInput, Side::Application, what))
            }
        }
    }

    fn source(&self, device: usize, id: &str, path: &[u8]) -> Result<ScratchSource> {
        let scratch = self.scratch_path(device, id)?;
        let shown = scratch.join(std::ffi::OsStr::from_bytes(path));
        let failed = |e: io::Error| Error::io(e, Side::Application, shown.display().to_string());
        let parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
        if parts.contains(&b"..".as_slice()) {
            let what = format!("{}: a path in a scratch directory must not contain `..`", shown.display());
            return Err(Error::new(ErrorKind::InvalidInput, Side::Application, what));
        }
        let (parent, name) = match parts.split_last() {
            None => {
                let above = scratch.parent().unwrap_or(Path::new("/"));
                let dir = open_dir(rustix::fs::CWD, above.as_os_str().as_bytes()).map_err(failed)?;
                (dir, id.as_bytes().to_vec())
            }
            Some((name, above)) => {
                let root = open_dir(rustix::fs::CWD, scratch.as_os_str().as_bytes()).map_err(failed)?;
                let above = above.join(&b'/');
                let parent = if above.is_empty() { root } else { open_below(&root, &above).map_err(failed)? };
                (parent, name.to_vec())
            }
        };
        Ok(ScratchSource { parent, name, path: parts.join(&b'/'), shown })
    }

    /// Returns the trees that the last daemon did not finish.
    pub fn detached(&self) -> Vec<DetachedTree> {
        let mut all = Vec::new();
        for at in self.devices() {
            let Ok(trees) = fs::read_dir(at.path.join(COMMITS)) else { continue };
            for dir in trees.flatten() {
                if let Some(number) = dir.file_name().to_str().and_then(|name| name.parse().ok()) {
                    all.push(DetachedTree { number, device: at.number, dir: dir.path() });
                }
            }
        }
        all
    }
}

/// What was listed of a tree until now.
#[derive(Default)]
struct TreeListing {
    entries: Vec<TreeEntry>,
    /// The number of the entry that is the first name of a file.
    files: HashMap<(u64, u64), usize>,
    /// The length of the path of each entry.
    path_bytes: Vec<usize>,
    held_bytes: usize,
    held_bytes_max: usize,
}

impl DetachedTree {
    /// Lists the tree. `content` gives each file a content number, once.
    ///
    /// # Errors
    /// `InvalidInput` if the tree is too large or too deep for one commit, or if a file has too many attributes.
    pub fn read(&self, content: impl Fn() -> Result<ContentId>) -> Result<Vec<TreeEntry>> {
        self.read_within(HELD_BYTES_MAX, content)
    }

    fn read_within(&self, held_bytes_max: usize, content: impl Fn() -> Result<ContentId>) -> Result<Vec<TreeEntry>> {
        let base = open_dir(rustix::fs::CWD, self.dir.as_os_str().as_bytes()).map_err(|e| self.failed(e))?;
        let mut listing = TreeListing { held_bytes_max, ..TreeListing::default() };
        let top = entry_of(&base, TREE.as_bytes(), None).map_err(|e| self.failed(e))?;
        self.add(top, &mut listing, &content)?;
        let mut next = 0;
        while next < listing.entries.len() {
            let at = next;
            next += 1;
            if listing.entries[at].kind != TreeKind::Directory {
                continue;
            }
            let path = path_in_tree(&listing.entries, at);
            let dir = open_below(&base, &path).map_err(|e| self.failed(e).context(shown(&path)))?;
            let mut names = Dir::read_from(&dir).map_err(|e| self.failed(e.into()))?;
            while let Some(name) = names.read() {
                let name = name.map_err(|e| self.failed(e.into()))?;
                let name = name.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let entry = match entry_of(&dir, name, Some(at)) {
                    // Removed meanwhile.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    entry => entry.map_err(|e| self.failed(e).context(shown(&path)))?,
                };
                self.add(entry, &mut listing, &content)?;
            }
        }
        Ok(listing.entries)
    }

    fn add(
        &self,
        mut entry: TreeEntry,
        listing: &mut TreeListing,
        content: &impl Fn() -> Result<ContentId>,
    ) -> Result<()> {
        let refused = |what: String| Err(Error::new(ErrorKind::InvalidInput, Side::Application, what));
        let TreeListing { entries, files, path_bytes, held_bytes, held_bytes_max } = listing;
        if entries.len() == ENTRIES_MAX {
            return refused(format!(
                "a commit takes {ENTRIES_MAX} files and directories at most: commit parts of the tree"
            ));
        }
        let attributes: usize = entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        if attributes > XATTRS_MAX_BYTES {
            return refused(format!(
                "{}: its extended attributes have {attributes} bytes, of {XATTRS_MAX_BYTES} at most: remove some",
                entry.name.escape_ascii()
            ));
        }
        if let TreeKind::File { .. } = entry.kind {
            match files.get(&entry.identity) {
                Some(of) => {
                    entry.kind = TreeKind::HardLink { of: *of };
                    // Those of the first name.
                    entry.xattrs = TreeXattrs::new();
                }
                None => {
                    files.insert(entry.identity, entries.len());
                    entry.kind = TreeKind::File { content: self.on_device(content()?), occupied_bytes: 0 };
                }
            }
        }
        // The whole path, not only the name: the journal of the moves has it.
        let above = entry.parent.and_then(|parent| path_bytes.get(parent)).map_or(0, |bytes| bytes + 1);
        *held_bytes += above + entry.name.len();
        *held_bytes += entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        if let TreeKind::Symlink { target } = &entry.kind {
            *held_bytes += target.len();
        }
        if held_bytes > held_bytes_max {
            return refused(format!(
                "the paths and attributes of the tree have more than {} MiB: commit parts of the tree",
                HELD_BYTES_MAX >> 20
            ));
        }
        path_bytes.push(above + entry.name.len());
        entries.push(entry);
        Ok(())
    }

    fn on_device(&self, number: ContentId) -> ContentId {
        crate::store::on_device(number, self.device)
    }

    /// Checks that the tree holds nothing but what was listed and has not moved.
    ///
    /// # Errors
    /// `Busy` with the name of what appeared.
    pub fn check_unchanged(&self, entries: &[TreeEntry]) -> Result<()> {
        if fs::symlink_metadata(self.dir.join(TREE)).is_err() {
            // A tree of one file, which has moved.
            return Ok(());
        }
        let known: HashSet<(u64, u64)> = entries.iter().map(|entry| entry.identity).collect();
        match self.read(|| Ok(ContentId(0)))?.iter().find(|entry| !known.contains(&entry.identity)) {
            Some(new) => Err(changed(&new.name, &io::Error::from(io::ErrorKind::AlreadyExists))),
            None => Ok(()),
        }
    }

    /// Moves everything back to where it was. `is_kept` tells whether a record of the catalog has this content file.
    /// What its user made at the same place meanwhile stays, and what moves back gets another name beside it.
    ///
    /// # Errors
    /// The call can be repeated.
    pub fn undo(&self, store: &ContentStore, is_kept: impl Fn(ContentId) -> Result<bool>) -> Result<()> {
        let origin: Option<ScratchOrigin> = self.read_file(ORIGIN)?.and_then(|bytes| Some(decode(&bytes)?.0));
        let Some(origin) = origin else { return self.close() };
        let scratch = store.scratch_path(self.device, &origin.id)?;
        self.move_files_back(store, is_kept, &scratch)?;
        self.move_tree_back(&origin, &scratch, &origin.path)?;
        self.close()
    }

    /// Moves the tree to a path in the scratch directory, if it is there.
    fn move_tree_back(&self, origin: &ScratchOrigin, scratch: &Path, path: &[u8]) -> Result<()> {
        let tree = self.dir.join(TREE);
        if fs::symlink_metadata(&tree).is_err() {
            return Ok(());
        }
        let is_all = origin.path.is_empty();
        // The empty directory that was made in its place.
        if is_all && (fs::remove_dir(scratch).is_ok() || !scratch.exists()) {
            return fs::rename(&tree, scratch).map_err(|e| self.failed(e));
        }
        make_dir(scratch, 0o700)?;
        let root = open_dir(rustix::fs::CWD, scratch.as_os_str().as_bytes()).map_err(|e| self.failed(e))?;
        self.put_back(&tree, &root, if is_all { TREE.as_bytes() } else { path }, &root)
    }

    /// Moves to a path below a directory. If the path is taken, to a name beside it; if its directory is gone, to a name
    /// in another directory. Follows no links.
    fn put_back(&self, from: &Path, root: &OwnedFd, path: &[u8], other: &OwnedFd) -> Result<()> {
        let (above, name) = split(path);
        let parent = match above.is_empty() {
            true => None,
            false => Some(open_below(root, above)),
        };
        let rename = |dir: &OwnedFd, name: &[u8]| {
            rustix::fs::renameat_with(rustix::fs::CWD, from, dir, name, RenameFlags::NOREPLACE)
        };
        let beside = [name, format!(".uncommitted-{}", self.number).as_bytes()].concat();
        let id = from.file_name().unwrap_or_default().as_bytes();
        let unnamed = [format!("uncommitted-{}-", self.number).as_bytes(), id].concat();
        let named = match &parent {
            Some(Err(_)) => Err(rustix::io::Errno::NOENT),
            Some(Ok(dir)) => rename(dir, name).or_else(|_| rename(dir, &beside)),
            None => rename(root, name).or_else(|_| rename(root, &beside)),
        };
        named
            .or_else(|_| rename(other, &unnamed))
            .map_err(|e| Error::io(e.into(), Side::Cache, format!("move {} back as {}", from.display(), shown(path))))
    }

    /// Removes what a commit leaves of the tree: directories, links, and further names of committed files. Files that
    /// appeared in it meanwhile go back to the scratch directory.
    ///
    /// # Errors
    /// The call can be repeated.
    pub fn finish(&self, store: &ContentStore) -> Result<()> {
        let base = open_dir(rustix::fs::CWD, self.dir.as_os_str().as_bytes()).map_err(|e| self.failed(e))?;
        let is_gone = prune(&base, TREE.as_bytes(), Prune::SparesFiles, |_| ()).map_err(|e| self.failed(e))?;
        let origin: Option<ScratchOrigin> = self.read_file(ORIGIN)?.and_then(|bytes| Some(decode(&bytes)?.0));
        if let (false, Some(origin)) = (is_gone, origin) {
            let scratch = store.scratch_path(self.device, &origin.id)?;
            let name = [&origin.path, format!(".uncommitted-{}", self.number).as_bytes()].concat();
            self.move_tree_back(&origin, &scratch, &name)?;
        }
        self.close()
    }

    /// Removes the records of the commit. The tree must be gone.
    fn close(&self) -> Result<()> {
        // The origin goes last: without it, nothing is left to move back.
        for name in [MOVES, ORIGIN] {
            match fs::remove_file(self.dir.join(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.failed(e)),
                _ => {}
            }
        }
        fs::remove_dir(&self.dir).map_err(|e| self.failed(e))?;
        // Durable before the catalog forgets that the commit was finished.
        sync_dir(self.dir.parent().unwrap_or(&self.dir))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let write = || -> io::Result<()> {
            let mut file = File::create(self.dir.join(name))?;
            file.write_all(bytes)?;
            file.sync_all()?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|e| self.failed(e))
    }

    fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match fs::read(self.dir.join(name)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.failed(e)),
        }
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::io(error, Side::Cache, self.dir.display().to_string())
    }
}

fn changed(path: &[u8], error: &io::Error) -> Error {
    let what =
        format!("{}: it was changed while it was committed ({error}): end its programs, and repeat", shown(path));
    Error::new(ErrorKind::Busy, Side::Application, what)
}

/// Returns a path below `commits/N` as its user knows it.
fn shown(path: &[u8]) -> String {
    let below = path.strip_prefix(TREE.as_bytes()).unwrap_or(path);
    let below = below.strip_prefix(b"/").unwrap_or(below);
    if below.is_empty() { "the file".to_owned() } else { below.escape_ascii().to_string() }
}

/// Returns the path of an entry below `commits/N`.
fn path_in_tree(entries: &[TreeEntry], at: usize) -> Vec<u8> {
    let above = std::iter::successors(Some(&entries[at]), |entry| Some(&entries[entry.parent?]));
    let mut names: Vec<&[u8]> = above.map(|entry| entry.name.as_slice()).collect();
    names.reverse();
    names.join(&b'/')
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|e| Error::new(ErrorKind::Corrupt, Side::Cache, format!("a record of a commit: {e}")))
}

/// Decodes the first record. `None`: the rest was never written.
fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<(T, &[u8])> {
    postcard::take_from_bytes(bytes).ok()
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| Error::io(e, Side::Cache, format!("sync {}", dir.display())))
}

#[cfg(test)]
mod tests;
