//! The tree of a pool in memory: POSIX semantics without permissions. All of it is synchronous.

use std::collections::{BTreeMap, HashMap};

use crate::{Attrs, ErrorKind, FileKind, PoolPath, RenameMode, SetAttrs, Stat, Time, Version};

use super::content::MemoryContent;

pub(super) type Ino = u64;
pub(super) type Outcome<T> = std::result::Result<T, ErrorKind>;

pub(super) const ROOT: Ino = 1;
const DEVICE: u64 = 0x4d45_4d00;
/// The logical clock starts at a moment in 2023 and moves a microsecond with each change.
const FIRST_SECOND: i64 = 1_700_000_000;
const TICK_NS: u64 = 1_000;
const NAME_MAX: usize = 255;
const MAX_LINKS: u32 = 65_000;

#[derive(Debug)]
pub(super) enum Body {
    File(MemoryContent),
    Directory(BTreeMap<Vec<u8>, Ino>),
    Symlink(Vec<u8>),
    Special(FileKind, u64),
}

#[derive(Debug)]
pub(super) struct TreeNode {
    pub(super) body: Body,
    pub(super) mode: u32,
    uid: u32,
    gid: u32,
    pub(super) nlink: u32,
    atime: Time,
    mtime: Time,
    ctime: Time,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl TreeNode {
    pub(super) fn kind(&self) -> FileKind {
        match self.body {
            Body::File(_) => FileKind::File,
            Body::Directory(_) => FileKind::Directory,
            Body::Symlink(_) => FileKind::Symlink,
            Body::Special(kind, _) => kind,
        }
    }

    fn size(&self) -> u64 {
        match &self.body {
            Body::File(content) => content.size(),
            Body::Directory(entries) => entries.len() as u64,
            Body::Symlink(target) => target.len() as u64,
            Body::Special(..) => 0,
        }
    }
}

#[derive(Debug)]
pub(super) struct Tree {
    nodes: HashMap<Ino, TreeNode>,
    next_ino: Ino,
    ticks: u64,
    /// Bytes that the files hold; holes and names cost nothing.
    pub(super) used_bytes: u64,
    pub(super) capacity_bytes: u64,
}

impl Tree {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        let mut tree = Self { nodes: HashMap::new(), next_ino: ROOT, ticks: 0, used_bytes: 0, capacity_bytes };
        let now = tree.tick();
        let attrs = Attrs { mode: 0o755, uid: 0, gid: 0, atime: now, mtime: now, xattrs: Vec::new() };
        tree.add(Body::Directory(BTreeMap::new()), &attrs);
        tree
    }

    /// The next moment of the logical clock; no two moments are equal.
    fn tick(&mut self) -> Time {
        self.ticks += 1;
        let ns = self.ticks * TICK_NS;
        Time { secs: FIRST_SECOND + (ns / 1_000_000_000) as i64, nanos: (ns % 1_000_000_000) as u32 }
    }

    fn add(&mut self, body: Body, attrs: &Attrs) -> Ino {
        let ino = self.next_ino;
        self.next_ino += 1;
        let ctime = self.tick();
        let nlink = if matches!(body, Body::Directory(_)) { 2 } else { 1 };
        let node = TreeNode {
            body,
            mode: attrs.mode & 0o7777,
            uid: attrs.uid,
            gid: attrs.gid,
            nlink,
            atime: attrs.atime,
            mtime: attrs.mtime,
            ctime,
            xattrs: attrs.xattrs.iter().cloned().collect(),
        };
        self.nodes.insert(ino, node);
        ino
    }

    pub(super) fn node(&self, ino: Ino) -> Outcome<&TreeNode> {
        self.nodes.get(&ino).ok_or(ErrorKind::Corrupt)
    }

    pub(super) fn node_mut(&mut self, ino: Ino) -> Outcome<&mut TreeNode> {
        self.nodes.get_mut(&ino).ok_or(ErrorKind::Corrupt)
    }

    pub(super) fn len(&self) -> u64 {
        self.nodes.len() as u64
    }

    pub(super) fn entries(&self, ino: Ino) -> Outcome<&BTreeMap<Vec<u8>, Ino>> {
        match &self.node(ino)?.body {
            Body::Directory(entries) => Ok(entries),
            _ => Err(ErrorKind::NotDirectory),
        }
    }

    fn entries_mut(&mut self, ino: Ino) -> Outcome<&mut BTreeMap<Vec<u8>, Ino>> {
        match &mut self.node_mut(ino)?.body {
            Body::Directory(entries) => Ok(entries),
            _ => Err(ErrorKind::NotDirectory),
        }
    }

    pub(super) fn lookup(&self, path: &PoolPath) -> Outcome<Ino> {
        if path.is_root() {
            return Ok(ROOT);
        }
        let ino = self.slot(path)?.ino.ok_or(ErrorKind::NotFound)?;
        check_object(path, ino)?;
        Ok(ino)
    }

    /// The directory that holds `path`, its last name, and the object at that name.
    pub(super) fn slot(&self, path: &PoolPath) -> Outcome<TreeName> {
        let (Some(parent), Some(name)) = (path.parent(), path.name()) else {
            return Err(ErrorKind::Busy);
        };
        let mut dir = ROOT;
        for name in parent.components() {
            dir = self.entry(dir, name)?.ok_or(ErrorKind::NotFound)?;
        }
        check_object(&parent, dir)?;
        Ok(TreeName { parent: dir, name: name.to_vec(), ino: self.entry(dir, name)? })
    }

    fn entry(&self, dir: Ino, name: &[u8]) -> Outcome<Option<Ino>> {
        let entries = self.entries(dir)?;
        if name.len() > NAME_MAX {
            return Err(ErrorKind::NameTooLong);
        }
        Ok(entries.get(name).copied())
    }

    pub(super) fn stat(&self, ino: Ino) -> Outcome<Stat> {
        let node = self.node(ino)?;
        let rdev = if let Body::Special(_, rdev) = node.body { rdev } else { 0 };
        let size = node.size();
        Ok(Stat {
            kind: node.kind(),
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            nlink: node.nlink,
            rdev,
            size,
            occupied: None,
            atime: node.atime,
            mtime: node.mtime,
            ctime: node.ctime,
            version: Version::Inode {
                dev: DEVICE,
                ino,
                born: Time::default(),
                mtime: node.mtime,
                ctime: node.ctime,
                size,
            },
        })
    }

    /// Makes a new object at a free name.
    pub(super) fn create(&mut self, path: &PoolPath, body: Body, attrs: &Attrs) -> Outcome<Ino> {
        if path.is_root() {
            return Err(ErrorKind::Exists);
        }
        let slot = self.slot(path)?;
        if slot.ino.is_some() {
            return Err(ErrorKind::Exists);
        }
        let ino = self.add(body, attrs);
        self.insert(&slot, ino)?;
        Ok(ino)
    }

    /// Puts `content` at `slot` under a new inode. If the file has other names that must stay `together` with this
    /// one, puts it into the existing inode.
    pub(super) fn replace(
        &mut self,
        slot: &TreeName,
        content: MemoryContent,
        attrs: &Attrs,
        together: bool,
    ) -> Outcome<Ino> {
        let old = slot.ino.map(|ino| self.node(ino)).transpose()?;
        let (old_bytes, linked) = match old {
            Some(TreeNode { body: Body::Directory(_), .. }) => return Err(ErrorKind::IsDirectory),
            // The other names keep the old content.
            Some(TreeNode { body: Body::File(_), nlink, .. }) if *nlink > 1 && !together => (0, false),
            Some(TreeNode { body: Body::File(content), nlink, .. }) => (content.held_bytes(), *nlink > 1),
            _ => (0, false),
        };
        self.charge(old_bytes, content.held_bytes())?;
        let Some(ino) = slot.ino.filter(|_| linked) else {
            if let Some(ino) = slot.ino {
                // `charge` has already subtracted these bytes, and `detach` subtracts them again.
                self.used_bytes += old_bytes;
                self.detach(slot, ino)?;
            }
            let ino = self.add(Body::File(content), attrs);
            self.insert(slot, ino)?;
            return Ok(ino);
        };
        let ctime = self.tick();
        let node = self.node_mut(ino)?;
        node.body = Body::File(content);
        (node.mode, node.uid, node.gid) = (attrs.mode & 0o7777, attrs.uid, attrs.gid);
        (node.atime, node.mtime, node.ctime) = (attrs.atime, attrs.mtime, ctime);
        node.xattrs = attrs.xattrs.iter().cloned().collect();
        Ok(ino)
    }

    /// Changes the content of a file and its times.
    pub(super) fn rewrite(&mut self, ino: Ino, change: impl FnOnce(&mut MemoryContent)) -> Outcome<()> {
        let mut content = match &self.node(ino)?.body {
            Body::File(content) => content.clone(),
            Body::Directory(_) => return Err(ErrorKind::IsDirectory),
            _ => return Err(ErrorKind::InvalidInput),
        };
        let before = content.held_bytes();
        change(&mut content);
        self.charge(before, content.held_bytes())?;
        let now = self.tick();
        let node = self.node_mut(ino)?;
        node.body = Body::File(content);
        (node.mtime, node.ctime) = (now, now);
        Ok(())
    }

    fn charge(&mut self, before: u64, after: u64) -> Outcome<()> {
        let used = self.used_bytes - before + after;
        if after > before && used > self.capacity_bytes {
            return Err(ErrorKind::NoSpace);
        }
        self.used_bytes = used;
        Ok(())
    }

    pub(super) fn link(&mut self, existing: &PoolPath, new: &PoolPath) -> Outcome<Ino> {
        let ino = self.lookup(existing)?;
        if new.is_root() {
            return Err(ErrorKind::Exists);
        }
        let slot = self.slot(new)?;
        if slot.ino.is_some() {
            return Err(ErrorKind::Exists);
        }
        let now = self.tick();
        let node = self.node_mut(ino)?;
        if matches!(node.body, Body::Directory(_)) {
            return Err(ErrorKind::NotPermitted);
        }
        if node.nlink >= MAX_LINKS {
            return Err(ErrorKind::TooManyLinks);
        }
        node.nlink += 1;
        node.ctime = now;
        self.insert(&slot, ino)?;
        Ok(ino)
    }

    pub(super) fn remove_dir(&mut self, path: &PoolPath) -> Outcome<()> {
        let slot = self.slot(path)?;
        let ino = slot.ino.ok_or(ErrorKind::NotFound)?;
        if !self.entries(ino)?.is_empty() {
            return Err(ErrorKind::NotEmpty);
        }
        self.detach(&slot, ino)
    }

    /// Removes the name at `slot` from `ino`, and the object if this was its last name.
    pub(super) fn detach(&mut self, slot: &TreeName, ino: Ino) -> Outcome<()> {
        self.entries_mut(slot.parent)?.remove(&slot.name);
        let now = self.tick();
        self.touch(slot.parent, now)?;
        let node = self.node_mut(ino)?;
        if let Body::Directory(_) = node.body {
            self.nodes.remove(&ino);
            self.node_mut(slot.parent)?.nlink -= 1;
            return Ok(());
        }
        node.nlink -= 1;
        node.ctime = now;
        if node.nlink == 0
            && let Some(TreeNode { body: Body::File(content), .. }) = self.nodes.remove(&ino)
        {
            self.used_bytes -= content.held_bytes();
        }
        Ok(())
    }

    fn insert(&mut self, slot: &TreeName, ino: Ino) -> Outcome<()> {
        let is_dir = matches!(self.node(ino)?.body, Body::Directory(_));
        self.entries_mut(slot.parent)?.insert(slot.name.clone(), ino);
        let now = self.tick();
        self.touch(slot.parent, now)?;
        if is_dir {
            self.node_mut(slot.parent)?.nlink += 1;
        }
        Ok(())
    }

    fn touch(&mut self, directory: Ino, now: Time) -> Outcome<()> {
        let node = self.node_mut(directory)?;
        (node.mtime, node.ctime) = (now, now);
        Ok(())
    }

    pub(super) fn rename(&mut self, from: &PoolPath, to: &PoolPath, mode: RenameMode) -> Outcome<Ino> {
        let source = self.slot(from)?;
        let target = self.slot(to)?;
        let ino = source.ino.ok_or(ErrorKind::NotFound)?;
        match (mode, target.ino) {
            (RenameMode::NoReplace, Some(_)) => return Err(ErrorKind::Exists),
            (RenameMode::Exchange, None) => return Err(ErrorKind::NotFound),
            _ => {}
        }
        if from != to && to.starts_with(from) {
            return Err(ErrorKind::InvalidInput);
        }
        if from != to && from.starts_with(to) {
            return Err(if mode == RenameMode::Exchange { ErrorKind::InvalidInput } else { ErrorKind::NotEmpty });
        }
        // POSIX: if both names are links to one file, nothing happens.
        if target.ino == Some(ino) {
            return Ok(ino);
        }
        if let (RenameMode::Exchange, Some(other)) = (mode, target.ino) {
            self.unhook(&source, ino)?;
            self.unhook(&target, other)?;
            self.hook(&source, other)?;
            self.hook(&target, ino)?;
            return Ok(ino);
        }
        if let Some(other) = target.ino {
            self.check_replaceable(ino, other)?;
            self.detach(&target, other)?;
        }
        self.unhook(&source, ino)?;
        self.hook(&target, ino)?;
        Ok(ino)
    }

    fn check_replaceable(&self, ino: Ino, victim: Ino) -> Outcome<()> {
        match (&self.node(ino)?.body, &self.node(victim)?.body) {
            (Body::Directory(_), Body::Directory(entries)) if entries.is_empty() => Ok(()),
            (Body::Directory(_), Body::Directory(_)) => Err(ErrorKind::NotEmpty),
            (Body::Directory(_), _) => Err(ErrorKind::NotDirectory),
            (_, Body::Directory(_)) => Err(ErrorKind::IsDirectory),
            _ => Ok(()),
        }
    }

    fn unhook(&mut self, slot: &TreeName, ino: Ino) -> Outcome<()> {
        self.entries_mut(slot.parent)?.remove(&slot.name);
        let now = self.tick();
        self.touch(slot.parent, now)?;
        if matches!(self.node(ino)?.body, Body::Directory(_)) {
            self.node_mut(slot.parent)?.nlink -= 1;
        }
        Ok(())
    }

    fn hook(&mut self, slot: &TreeName, ino: Ino) -> Outcome<()> {
        self.insert(slot, ino)?;
        let now = self.tick();
        self.node_mut(ino)?.ctime = now;
        Ok(())
    }

    pub(super) fn set_attrs(&mut self, ino: Ino, changes: &SetAttrs) -> Outcome<()> {
        if changes.mode.is_some() && matches!(self.node(ino)?.body, Body::Symlink(_)) {
            return Err(ErrorKind::Unsupported);
        }
        if let Some(size) = changes.size {
            self.rewrite(ino, |content| content.truncate(size))?;
        }
        let now = self.tick();
        let node = self.node_mut(ino)?;
        node.uid = changes.uid.unwrap_or(node.uid);
        node.gid = changes.gid.unwrap_or(node.gid);
        node.mode = changes.mode.map_or(node.mode, |mode| mode & 0o7777);
        node.atime = changes.atime.unwrap_or(node.atime);
        node.mtime = changes.mtime.unwrap_or(node.mtime);
        node.ctime = now;
        Ok(())
    }

    pub(super) fn change_xattrs<T>(
        &mut self,
        ino: Ino,
        change: impl FnOnce(&mut BTreeMap<Vec<u8>, Vec<u8>>) -> Outcome<T>,
    ) -> Outcome<T> {
        let now = self.tick();
        let node = self.node_mut(ino)?;
        let answer = change(&mut node.xattrs)?;
        node.ctime = now;
        Ok(answer)
    }
}

/// `NotFound` if the path must name another object: the required object is gone. Numbers are never reused.
fn check_object(path: &PoolPath, found: Ino) -> Outcome<()> {
    match path.object() {
        Some(meant) if (meant.dev, meant.ino) != (DEVICE, found) => Err(ErrorKind::NotFound),
        _ => Ok(()),
    }
}

/// A name in a directory and the object at it.
#[derive(Debug)]
pub(super) struct TreeName {
    pub(super) parent: Ino,
    pub(super) name: Vec<u8>,
    pub(super) ino: Option<Ino>,
}
