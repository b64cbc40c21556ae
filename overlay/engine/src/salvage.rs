//! Saves what can be saved of a fast pool whose catalog cannot be opened any more.
//!
//! A catalog that was rebuilt from pieces may say that a file is clean, or gone, because the piece with its newer state
//! is lost. So no mount uses it: content that the pool may not have is set aside, under its name if that is known, and
//! the next mount begins with an empty catalog. No content is removed unless its checksums prove that it was fetched
//! from the pool.

mod aside;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side};
use forebay_cache::{CHUNK_BYTES, ContentId, ContentStore};
use forebay_catalog::{Catalog, InodeRecord, Intent, Link, rebuild};
use forebay_system::clock::unix_now;

use crate::Ino;
use aside::Aside;

/// A deeper tree would be a loop.
const MAX_DEPTH: usize = 65_536;

/// The result of salvaging a damaged catalog.
#[derive(Debug, Default)]
pub struct Salvage {
    /// What was kept, and where.
    pub notes: Vec<String>,
    /// Changes that did not reach the pool, and never will.
    pub lost: Vec<String>,
}

/// Sets aside what a damaged catalog and its content files hold. `tiers`: the directories of other tiers; those that are
/// not part of this fast pool, or not there, are left alone. Returns `None` if the catalog is sound.
///
/// # Errors
/// `Busy` if a daemon uses the fast pool; `InvalidInput` if one of its directories is not there. The call can be repeated
/// after any error: what was set aside stays.
pub fn salvage(fast: &[PathBuf], tiers: &[PathBuf]) -> Result<Option<Salvage>> {
    let mut store = ContentStore::open(fast, None)?;
    let Some(first) = store.devices().first().map(|d| d.path.clone()) else { return Ok(None) };
    let catalog = first.join("catalog");
    match sound(&first).and_then(|()| rebuild::check(&catalog)) {
        Ok(()) => return Ok(None),
        Err(e) if e.is(ErrorKind::Corrupt) => {}
        // Some blocks of the catalog cannot be read. Of a device that does not work, nothing is known.
        Err(e) if e.is(ErrorKind::Os(libc::EIO)) && store.devices().first().is_some_and(|at| at.probe().is_ok()) => {}
        Err(e) => return Err(e),
    }
    // An earlier call may have been interrupted after it took the catalog away.
    if fs::read_dir(&catalog).is_ok_and(|mut files| files.next().is_some()) {
        store.check_marks()?;
    }
    store.add_marked(tiers)?;
    let rebuilt = first.join("catalog.rebuilt");
    let read = rebuild::rebuild(&catalog, &rebuilt)?;
    let mut work = Work { catalog: read, store: &store, told: Salvage::default() };
    work.undo_commits();
    work.set_aside()?;
    work.tell_changes()?;
    let mut told = work.told;
    drop(work.catalog);
    fs::remove_dir_all(&rebuilt).map_err(|e| failed(&rebuilt, e))?;
    let kept = first.join(format!("catalog.damaged-{}", unix_now()));
    if catalog.exists() {
        fs::rename(&catalog, &kept).map_err(|e| failed(&kept, e))?;
        let note =
            format!("the damaged catalog is kept as {}; the next mount begins with an empty one", kept.display());
        told.notes.push(note);
    }
    // The mark of the first directory goes last: by it, a call that repeats this one finds the others.
    for device in store.devices().iter().rev() {
        // The file names the catalog that the device belongs to. The next catalog is a new one.
        let mark = device.path.join("device");
        match fs::remove_file(&mark) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&mark, e)),
            _ => {}
        }
    }
    Ok(Some(told))
}

/// Checks that a fast directory that was used before still has its catalog: RocksDB would create an empty one.
///
/// # Errors
/// `Corrupt` if the catalog is gone; another error if that cannot be told.
pub fn sound(fast: &Path) -> Result<()> {
    let catalog = fast.join("catalog");
    let is_there = |path: PathBuf| path.try_exists().map_err(|e| failed(&path, e));
    match is_there(fast.join("device"))? && !is_there(catalog.join("CURRENT"))? {
        true => Err(forebay_catalog::damaged(&catalog)),
        false => Ok(()),
    }
}

fn failed(what: &Path, error: io::Error) -> Error {
    Error::io(error, Side::Cache, what.display().to_string())
}

struct Work<'a> {
    catalog: Catalog,
    store: &'a ContentStore,
    told: Salvage,
}

impl Work<'_> {
    /// Moves the files of unfinished commits back to their scratch directories, unless the catalog has records of them.
    fn undo_commits(&mut self) {
        for tree in self.store.detached() {
            let undone = tree.undo(self.store, |id| Ok(self.catalog.content(id).is_ok_and(|record| record.is_some())));
            if let Err(error) = undone {
                self.told.notes.push(format!("a commit of a scratch directory is not undone: {error}"));
            }
        }
    }

    /// Takes every content file out of the store.
    fn set_aside(&mut self) -> Result<()> {
        let mut aside = Aside::default();
        let mut made_here = Vec::new();
        let mut lost = Vec::new();
        let mut above = BTreeMap::new();
        let catalog = &self.catalog;
        let read = catalog.inodes(|ino, record| {
            match (record.kind, record.file.content()) {
                (FileKind::File, Some(id)) if record.file.is_dirty() && !record.links.is_empty() => {
                    let paths: Vec<PoolPath> = record.links.iter().filter_map(|l| self.path(l)).collect();
                    match self.store.path(id) {
                        Ok(content) if content.exists() => {
                            record.links.iter().for_each(|link| self.note_directories(link, &mut above));
                            let spilled = self.catalog.spilled(id).unwrap_or_default();
                            if record.file.is_spilled() {
                                let what = "bytes of it are zeros in the copy: they are in parts in the pool, under";
                                let parts: Vec<&str> =
                                    spilled.ranges().iter().map(|range| range.part.name.as_str()).collect();
                                let shown = self.shown(ino, &record);
                                lost.push(format!(
                                    "{shown}: {} {what} .forebay~parts/: {}",
                                    spilled.bytes(),
                                    parts.join(", ")
                                ));
                            }
                            aside.file(&self.root(id)?, id, &content, &paths, &record)?
                        }
                        Ok(_) => lost.push(format!("{}: its content file is missing", self.shown(ino, &record))),
                        Err(error) => lost.push(format!("{}: {error}", self.shown(ino, &record))),
                    }
                }
                (FileKind::File, Some(id)) if self.is_fetched(id, &record)? => self.store.remove(id)?,
                (FileKind::Directory | FileKind::Symlink, _) if record.pool_links.is_empty() => {
                    made_here.push((self.path_of(&record), ino, record));
                }
                _ => {}
            }
            Ok(true)
        });
        if let Err(error) = read {
            lost.push(format!("some inodes cannot be read: {error}"));
        }
        let root = self.store.devices().first().map(|d| d.path.clone()).unwrap_or_default();
        for (path, ino, record) in made_here {
            if let Some(path) = path.filter(|p| !p.is_root()) {
                aside.made_here(&root, &path, &record);
                record.links.first().into_iter().for_each(|link| self.note_directories(link, &mut above));
                if record.kind == FileKind::Directory {
                    above.insert(path, ino);
                }
            }
        }
        // The deepest first: a daemon without root may have no access to what is in a directory afterwards.
        for (path, ino) in above.iter().rev() {
            match catalog.inode(*ino).ok().flatten() {
                Some(record) => {
                    self.store.devices().iter().for_each(|at| aside.dress_directory(&at.path, path, &record));
                }
                None => self.told.notes.push(format!(
                    "owner and mode of directory /{path} are lost: set them again after what was set aside is put back"
                )),
            }
        }
        self.store.walk(|id, _| aside.unknown(&self.root(id)?, id, &self.store.path(id)?))?;
        self.told.notes.extend(aside.told());
        self.told.lost.extend(lost);
        Ok(())
    }

    /// Adds the directories above a name with their paths, the root included.
    fn note_directories(&self, link: &Link, known: &mut BTreeMap<PoolPath, Ino>) {
        let mut at = link.0;
        let mut path = self.path(link).and_then(|path| path.parent());
        while let Some(dir) = path.take_if(|dir| !known.contains_key(dir)) {
            path = dir.parent();
            known.insert(dir, at);
            let above = self.catalog.inode(at).ok().flatten().and_then(|record| record.links.first().cloned());
            let Some((parent, _)) = above else { break };
            at = parent;
        }
    }

    fn root(&self, id: ContentId) -> Result<PathBuf> {
        let content = self.store.path(id)?;
        let device = self.store.devices().iter().find(|d| content.starts_with(&d.path));
        Ok(device.map(|d| d.path.clone()).unwrap_or_default())
    }

    /// Whether every byte is what was fetched from the pool.
    fn is_fetched(&self, id: ContentId, record: &InodeRecord) -> Result<bool> {
        let (Ok(content), Ok(Some(residency))) = (self.store.open_content(id), self.catalog.content(id)) else {
            return Ok(false);
        };
        let size = content.file.metadata().map_or(u64::MAX, |m| m.len());
        if record.file.is_dirty() || size != record.size {
            return Ok(false);
        }
        let Ok(checksums) = self.catalog.checksums(id, &residency) else { return Ok(false) };
        let checksums: std::collections::HashMap<_, _> = checksums.into_iter().collect();
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for chunk in 0..size.div_ceil(CHUNK_BYTES) {
            let start = chunk * CHUNK_BYTES;
            let bytes = &mut buffer[..CHUNK_BYTES.min(size - start) as usize];
            let read = std::os::unix::fs::FileExt::read_exact_at(&*content.file, bytes, start);
            let known = u32::try_from(chunk).ok().and_then(|c| checksums.get(&c));
            if read.is_err() || known != Some(&crc32c::crc32c(bytes)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reports the changes other than content that did not reach the pool: they are lost.
    fn tell_changes(&mut self) -> Result<()> {
        let mut lost = Vec::new();
        let read = self.catalog.intents(|intent, _| {
            match intent {
                Intent::Name(parent, name) => {
                    let Ok(record) = self.catalog.name(parent, &name) else { return Ok(true) };
                    let path = self.path(&(parent, name.clone())).map_or_else(
                        || format!("{} in directory #{}", name.escape_ascii(), parent.0),
                        |p| p.to_string(),
                    );
                    let ino = record.here_ino();
                    let moved = |ino| self.catalog.inode(ino).ok().flatten().is_some_and(|r| r.in_pool());
                    match ino {
                        None => lost.push(format!("{path}: was removed in the mount; the pool still has it")),
                        Some(ino) if moved(ino) => {
                            lost.push(format!("{path}: was named in the mount; the pool has it under its old name"));
                        }
                        Some(_) => {}
                    }
                }
                Intent::Inode(ino) => {
                    let Ok(Some(record)) = self.catalog.inode(ino) else { return Ok(true) };
                    let attributes = record.dirty.mode || record.dirty.owner || !record.dirty_xattrs.is_empty();
                    if attributes && !record.file.is_dirty() && record.in_pool() {
                        lost.push(format!("{}: attributes were changed in the mount", self.shown(ino, &record)));
                    }
                }
            }
            Ok(true)
        });
        if let Err(error) = read {
            lost.push(format!("some changes cannot be read: {error}"));
        }
        self.told.lost.extend(lost);
        Ok(())
    }

    fn shown(&self, ino: Ino, record: &InodeRecord) -> String {
        self.path_of(record).map_or_else(|| format!("file #{}", ino.0), |p| p.to_string())
    }

    fn path_of(&self, record: &InodeRecord) -> Option<PoolPath> {
        record.links.first().and_then(|link| self.path(link))
    }

    /// Returns the path of a name, up to the root; `None` if a directory on the way is lost.
    fn path(&self, link: &Link) -> Option<PoolPath> {
        let mut names = vec![link.1.clone()];
        let mut at = link.0;
        while at != Ino::ROOT {
            let (parent, name) = self.catalog.inode(at).ok()??.links.first().cloned()?;
            names.push(name);
            at = parent;
            if names.len() > MAX_DEPTH {
                return None;
            }
        }
        PoolPath::parse(names.iter().rev().map(AsRef::as_ref).collect::<Vec<&[u8]>>().join(&b'/'))
    }
}
