//! The files of a tree that is being committed: they move into the content store, or back. A journal, `commits/N/moves`, is
//! written before. It is written and read move by move: the paths of all files may be very long.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;

use forebay_backends::{Error, ErrorKind, Result, Side};
use rustix::fs::{FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{DetachedTree, MOVES, TREE, changed, decode, encode, path_in_tree, shown, split, sync_dir};
use crate::scratch::limit::set_immutable;
use crate::scratch::make_dir;
use crate::scratch::tree::{TreeEntry, TreeKind, kind_of, open_below, open_dir};
use crate::{ContentId, ContentStore};

/// So much of the journal is read at once.
const READ_BYTES: u64 = 64 << 10;
/// No move takes more bytes in the journal: its path is below `PATH_MAX`, but for the name.
const MOVE_BYTES_MAX: usize = 16 << 10;

/// A file that moves from the tree into the content store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ContentMove {
    content: ContentId,
    /// Below `commits/N`.
    path: Vec<u8>,
    mode: u32,
    uid: u32,
    gid: u32,
    /// Device and inode.
    identity: (u64, u64),
}

/// Returns the move of an entry that is the first name of a file.
fn move_of(entries: &[TreeEntry], at: usize) -> Option<ContentMove> {
    let TreeEntry { kind: TreeKind::File { content, .. }, mode, uid, gid, identity, .. } = entries.get(at)? else {
        return None;
    };
    let (mode, uid, gid, identity) = (*mode, *uid, *gid, *identity);
    Some(ContentMove { content: *content, path: path_in_tree(entries, at), mode, uid, gid, identity })
}

/// Reads the moves of a journal.
struct MoveReader {
    journal: File,
    bytes: Vec<u8>,
    /// How much of `bytes` was decoded.
    at: usize,
    is_read: bool,
}

impl MoveReader {
    /// `None`: there is no journal.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(journal) => Ok(Some(Self { journal, bytes: Vec::new(), at: 0, is_read: false })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns the next move. `None`: the rest was never written.
    fn next(&mut self) -> io::Result<Option<ContentMove>> {
        loop {
            let left = &self.bytes[self.at..];
            if let Some((one, rest)) = decode::<ContentMove>(left) {
                self.at += left.len() - rest.len();
                return Ok(Some(one));
            }
            if self.is_read || left.len() > MOVE_BYTES_MAX {
                return Ok(None);
            }
            self.bytes.drain(..self.at);
            self.at = 0;
            let read = Read::take(&mut self.journal, READ_BYTES).read_to_end(&mut self.bytes)?;
            self.is_read = (read as u64) < READ_BYTES;
        }
    }
}

impl DetachedTree {
    /// Writes the journal. It survives a power cut.
    fn write_moves(&self, entries: &[TreeEntry]) -> Result<()> {
        let failed = |e: io::Error| self.failed(e);
        let mut journal = BufWriter::new(File::create(self.dir.join(MOVES)).map_err(failed)?);
        for one in (0..entries.len()).filter_map(|at| move_of(entries, at)) {
            journal.write_all(&encode(&one)?).map_err(failed)?;
        }
        journal.into_inner().map_err(|e| failed(e.into_error()))?.sync_all().map_err(failed)?;
        sync_dir(&self.dir)
    }

    /// Moves all files into the content store, where they belong to the daemon's user. The moves survive a power cut.
    ///
    /// # Errors
    /// `Busy` if the tree was changed meanwhile. [`Self::undo`] moves back what was moved.
    pub fn move_into_store(&self, store: &ContentStore, entries: &mut [TreeEntry]) -> Result<()> {
        let mut names: HashMap<usize, u64> = HashMap::new();
        for entry in entries.iter() {
            if let TreeKind::HardLink { of } = entry.kind {
                *names.entry(of).or_insert(1) += 1;
            }
        }
        self.write_moves(entries)?;
        let base = open_dir(rustix::fs::CWD, self.dir.as_os_str().as_bytes()).map_err(|e| self.failed(e))?;
        let mut open: Option<(Vec<u8>, OwnedFd)> = None;
        let mut touched = BTreeSet::new();
        for at in 0..entries.len() {
            let Some(one) = move_of(entries, at) else { continue };
            let (above, name) = split(&one.path);
            if open.as_ref().is_none_or(|(known, _)| known != above) {
                let dir = match above.is_empty() {
                    true => base.try_clone(),
                    false => open_below(&base, above),
                };
                open = Some((above.to_vec(), dir.map_err(|e| changed(&one.path, &e))?));
            }
            let Some((_, dir)) = &open else { continue };
            let target = store.path(one.content)?;
            let into = target.parent().unwrap_or(&self.dir).to_owned();
            let rename = || rustix::fs::renameat_with(dir, name, rustix::fs::CWD, &target, RenameFlags::NOREPLACE);
            match rename() {
                Err(rustix::io::Errno::NOENT) if !into.exists() => {
                    make_dir(&into, 0o700)?;
                    touched.extend(into.parent().map(Path::to_owned));
                    rename()
                }
                // A daemon that died while the directory was full has left it immutable.
                Err(rustix::io::Errno::PERM) => {
                    set_immutable(dir, name, false);
                    rename()
                }
                // A file that a power cut left under the same number.
                Err(rustix::io::Errno::EXIST) => {
                    store.remove(one.content)?;
                    rename()
                }
                other => other,
            }
            .map_err(|e| changed(&one.path, &e.into()))?;
            touched.insert(into);
            let most = names.get(&at).copied().unwrap_or(1);
            let occupied = secure(&one, &target, most)?;
            entries[at].kind = TreeKind::File { content: one.content, occupied_bytes: occupied };
        }
        touched.iter().try_for_each(|dir| sync_dir(dir))
    }

    /// Moves the files of a tree back to where they were.
    pub(super) fn move_files_back(
        &self,
        store: &ContentStore,
        is_kept: impl Fn(ContentId) -> Result<bool>,
        scratch: &Path,
    ) -> Result<()> {
        let Some(mut moves) = MoveReader::open(&self.dir.join(MOVES)).map_err(|e| self.failed(e))? else {
            return Ok(());
        };
        let base = open_dir(rustix::fs::CWD, self.dir.as_os_str().as_bytes()).map_err(|e| self.failed(e))?;
        // For files whose directory is gone.
        let other = open_below(&base, TREE.as_bytes())
            .or_else(|_| open_dir(rustix::fs::CWD, scratch.as_os_str().as_bytes()))
            .map_err(|e| self.failed(e))?;
        while let Some(one) = moves.next().map_err(|e| self.failed(e))? {
            let from = store.path(one.content)?;
            if fs::symlink_metadata(&from).is_err() || is_kept(one.content)? {
                continue;
            }
            give_back(&from, &one).map_err(|e| Error::io(e, Side::Cache, from.display().to_string()))?;
            self.put_back(&from, &base, &one.path, &other)?;
        }
        Ok(())
    }
}

/// Makes a moved file the daemon's own. Returns the bytes that it occupies. `names`: how many names it has in the tree.
fn secure(of: &ContentMove, target: &Path, names: u64) -> Result<u64> {
    let failed = |e: io::Error| Error::io(e, Side::Cache, target.display().to_string());
    let looked = || fs::symlink_metadata(target).map_err(failed);
    let meta = looked()?;
    let access = (meta.uid(), meta.gid(), meta.mode() & 0o7777);
    if (meta.dev(), meta.ino()) != of.identity || !meta.is_file() || access != (of.uid, of.gid, of.mode) {
        return Err(changed(&of.path, &io::Error::from(io::ErrorKind::ResourceBusy)));
    }
    if meta.nlink() > names {
        return Err(named_elsewhere(&of.path));
    }
    let own = own_identity();
    if (meta.uid(), meta.gid()) != own {
        lchown(target, Some(own.0), Some(own.1)).map_err(failed)?;
    }
    if meta.mode() & 0o7777 != 0o600 {
        // It is a regular file, in a directory that no other user can change.
        fs::set_permissions(target, Permissions::from_mode(0o600)).map_err(failed)?;
    }
    check_free(of, target)?;
    // From here on, its user can make no further name of it (`fs.protected_hardlinks`).
    let meta = looked()?;
    if meta.nlink() > names {
        return Err(named_elsewhere(&of.path));
    }
    Ok(meta.blocks() * 512)
}

/// Checks that a file can be opened for writing at once. A process that holds a lease on it (`F_SETLEASE`) would let the
/// daemon wait for `/proc/sys/fs/lease-break-time`, 45 s, whenever it opens the file. From now on, its user can take no
/// further lease: it belongs to the daemon.
fn check_free(of: &ContentMove, target: &Path) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(target, flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(error @ (Errno::WOULDBLOCK | Errno::TXTBSY)) => Err(changed(&of.path, &error.into())),
        Err(error) => Err(Error::io(error.into(), Side::Cache, target.display().to_string())),
    }
}

/// Gives a file that the daemon made its own the owner and the mode that it had in the tree. Anything else stays as it
/// is: its user has put it in the file's place.
fn give_back(file: &Path, of: &ContentMove) -> io::Result<()> {
    let file = rustix::fs::open(file, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let is_own = (stat.st_dev, stat.st_ino) == of.identity && stat.st_uid == own_identity().0;
    if kind_of(&stat) != FileType::RegularFile || !is_own {
        return Ok(());
    }
    // The owner first: a change of it takes the set-id bits away. The path leads to the open file itself.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::os::unix::fs::chown(&path, Some(of.uid), Some(of.gid))?;
    fs::set_permissions(&path, Permissions::from_mode(of.mode & 0o7777))
}

fn own_identity() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

fn named_elsewhere(path: &[u8]) -> Error {
    let what = format!(
        "{}: it has another name outside of what is committed, through which it could change: remove that name, or copy \
         the file",
        shown(path)
    );
    Error::new(ErrorKind::InvalidInput, Side::Application, what)
}
