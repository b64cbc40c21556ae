//! The reference: a POSIX tree in memory. Each operation does its work, or returns the errors that are right.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_backends::{FileKind, RenameMode, Time};
use forebay_engine::Ino;

use super::Failure;
use super::content::Content;

pub type Id = usize;
pub const ROOT: Id = 0;

/// Errnos, one of which the engine must return.
pub type Refused = Vec<i32>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    File(Content),
    Dir(BTreeMap<Vec<u8>, Id>),
    Symlink(Vec<u8>),
}

#[derive(Debug, Clone)]
pub struct Node {
    pub body: Body,
    pub mode: u32,
    /// Known if it was set and the file was not written since.
    pub mtime: Option<Time>,
    /// Known if the file was written: the mtime is this time or later.
    pub not_before: Option<Time>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The number of names. Not counted for directories.
    pub nlink: u32,
    /// The engine's inode number, once it was seen.
    pub ino: Option<Ino>,
    /// The pool's inode number, in a tree that shows the pool.
    pub pool_ino: Option<u64>,
}

#[derive(Debug, Clone)]
pub struct Tree {
    pub nodes: BTreeMap<Id, Node>,
    next: Id,
}

/// Returns the current time minus one tick. The clock of file times advances in ticks: it may be one tick behind, but
/// never ahead.
pub fn just_now() -> Time {
    const TICK_NS: i64 = 20_000_000;
    const SEC_NS: i64 = 1_000_000_000;
    let now = Time::now();
    let nanos = i64::from(now.nanos) - TICK_NS;
    Time { secs: now.secs + nanos.div_euclid(SEC_NS), nanos: nanos.rem_euclid(SEC_NS) as u32 }
}

impl Node {
    pub fn new(body: Body, mode: u32) -> Self {
        Self { body, mode, mtime: None, not_before: None, xattrs: BTreeMap::new(), nlink: 1, ino: None, pool_ino: None }
    }

    /// Checks that `time` is a possible mtime.
    pub fn modified_at(&self, time: Time) -> Result<(), Failure> {
        match self.not_before {
            Some(written) if self.kind() == FileKind::File && time < written => {
                Err(format!("mtime is {time:?}, before it was written at {written:?}"))
            }
            _ => Ok(()),
        }
    }

    pub fn kind(&self) -> FileKind {
        match self.body {
            Body::File(_) => FileKind::File,
            Body::Dir(_) => FileKind::Directory,
            Body::Symlink(_) => FileKind::Symlink,
        }
    }

    pub fn content(&self) -> Option<&Content> {
        match &self.body {
            Body::File(content) => Some(content),
            _ => None,
        }
    }
}

impl Default for Tree {
    fn default() -> Self {
        let root = Node::new(Body::Dir(BTreeMap::new()), 0o755);
        Self { nodes: BTreeMap::from([(ROOT, root)]), next: ROOT + 1 }
    }
}

impl Tree {
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[&id]
    }

    pub fn node_mut(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).expect("a node of the model")
    }

    pub fn entries(&self, dir: Id) -> &BTreeMap<Vec<u8>, Id> {
        match &self.node(dir).body {
            Body::Dir(entries) => entries,
            _ => panic!("not a directory of the model"),
        }
    }

    fn entries_mut(&mut self, dir: Id) -> &mut BTreeMap<Vec<u8>, Id> {
        match &mut self.node_mut(dir).body {
            Body::Dir(entries) => entries,
            _ => panic!("not a directory of the model"),
        }
    }

    pub fn find(&self, dir: Id, name: &[u8]) -> Option<Id> {
        self.entries(dir).get(name).copied()
    }

    /// Returns all directories with their paths, the root first.
    pub fn dirs(&self) -> Vec<(Id, Vec<Vec<u8>>)> {
        let mut found = vec![(ROOT, Vec::new())];
        let mut next = 0;
        while next < found.len() {
            let (dir, path) = found[next].clone();
            next += 1;
            for (name, id) in self.entries(dir) {
                if let Body::Dir(_) = self.node(*id).body {
                    let mut path = path.clone();
                    path.push(name.clone());
                    found.push((*id, path));
                }
            }
        }
        found
    }

    /// Returns everything but the root, by path. The parts of a path are joined by `/`.
    pub fn paths(&self) -> BTreeMap<Vec<u8>, Id> {
        let mut all = BTreeMap::new();
        for (dir, path) in self.dirs() {
            for (name, id) in self.entries(dir) {
                let parts: Vec<&[u8]> = path.iter().map(Vec::as_slice).chain([name.as_slice()]).collect();
                all.insert(parts.join(&b'/'), *id);
            }
        }
        all
    }

    /// Returns whether `dir` is `above`, or lies below it.
    pub fn is_below(&self, dir: Id, above: Id) -> bool {
        let Body::Dir(entries) = &self.node(above).body else { return false };
        dir == above || entries.values().any(|child| self.is_below(dir, *child))
    }

    pub fn dir_nlink(&self, dir: Id) -> u32 {
        2 + self.entries(dir).values().filter(|id| self.node(**id).kind() == FileKind::Directory).count() as u32
    }

    /// Adds an object without a name.
    pub fn add(&mut self, node: Node) -> Id {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, node);
        id
    }

    pub fn make(&mut self, dir: Id, name: &[u8], node: Node) -> Result<Id, Refused> {
        if self.find(dir, name).is_some() {
            return Err(vec![libc::EEXIST]);
        }
        let id = self.add(node);
        self.entries_mut(dir).insert(name.to_vec(), id);
        Ok(id)
    }

    pub fn link(&mut self, id: Id, dir: Id, name: &[u8]) -> Result<(), Refused> {
        let is_dir = self.node(id).kind() == FileKind::Directory;
        match (is_dir, self.find(dir, name).is_some()) {
            (true, true) => return Err(vec![libc::EPERM, libc::EEXIST]),
            (true, false) => return Err(vec![libc::EPERM]),
            (false, true) => return Err(vec![libc::EEXIST]),
            (false, false) => {}
        }
        self.node_mut(id).nlink += 1;
        self.entries_mut(dir).insert(name.to_vec(), id);
        Ok(())
    }

    pub fn unlink(&mut self, dir: Id, name: &[u8]) -> Result<Id, Refused> {
        let id = self.find(dir, name).ok_or(vec![libc::ENOENT])?;
        if self.node(id).kind() == FileKind::Directory {
            return Err(vec![libc::EISDIR]);
        }
        self.entries_mut(dir).remove(name);
        self.drop_name(id);
        Ok(id)
    }

    fn drop_name(&mut self, id: Id) {
        let node = self.node_mut(id);
        node.nlink = node.nlink.saturating_sub(1);
    }

    pub fn rmdir(&mut self, dir: Id, name: &[u8]) -> Result<(), Refused> {
        let id = self.find(dir, name).ok_or(vec![libc::ENOENT])?;
        match &self.node(id).body {
            Body::Dir(entries) if entries.is_empty() => {}
            Body::Dir(_) => return Err(vec![libc::ENOTEMPTY]),
            _ => return Err(vec![libc::ENOTDIR]),
        }
        self.entries_mut(dir).remove(name);
        self.nodes.remove(&id);
        Ok(())
    }

    /// Returns the object that was replaced, if any.
    pub fn rename(&mut self, from: (Id, &[u8]), to: (Id, &[u8]), mode: RenameMode) -> Result<Option<Id>, Refused> {
        let moved = self.find(from.0, from.1).ok_or(vec![libc::ENOENT])?;
        let target = self.find(to.0, to.1);
        let mut refused = Vec::new();
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(vec![libc::EEXIST]),
            (RenameMode::Exchange, None) => return Err(vec![libc::ENOENT]),
            (_, Some(target)) if target == moved => return Ok(None),
            _ => {}
        }
        if self.is_below(to.0, moved) {
            refused.push(libc::EINVAL);
        }
        if let (Some(target), RenameMode::Exchange) = (target, mode) {
            if self.is_below(from.0, target) {
                refused.push(libc::EINVAL);
            }
        } else if let Some(target) = target {
            match (&self.node(moved).body, &self.node(target).body) {
                (Body::Dir(_), Body::Dir(entries)) if entries.is_empty() => {}
                (Body::Dir(_), Body::Dir(_)) => refused.push(libc::ENOTEMPTY),
                (Body::Dir(_), _) => refused.push(libc::ENOTDIR),
                (_, Body::Dir(_)) => refused.extend([libc::EISDIR, libc::ENOTEMPTY]),
                _ => {}
            }
        }
        if !refused.is_empty() {
            return Err(refused);
        }
        if let (Some(target), RenameMode::Exchange) = (target, mode) {
            self.entries_mut(from.0).insert(from.1.to_vec(), target);
            self.entries_mut(to.0).insert(to.1.to_vec(), moved);
            return Ok(None);
        }
        self.entries_mut(from.0).remove(from.1);
        self.entries_mut(to.0).insert(to.1.to_vec(), moved);
        if let Some(target) = target {
            match self.node(target).kind() {
                FileKind::Directory => _ = self.nodes.remove(&target),
                _ => self.drop_name(target),
            }
        }
        Ok(target)
    }

    /// Removes objects without a name, except those in `open`.
    pub fn sweep(&mut self, open: &[Id]) {
        self.nodes.retain(|id, node| node.kind() == FileKind::Directory || node.nlink > 0 || open.contains(id));
    }

    /// Sets a file's content. `since` is the start of the operation that changed it, if known.
    pub fn set_content(&mut self, id: Id, content: Content, since: Option<Time>) {
        let node = self.node_mut(id);
        node.body = Body::File(content);
        (node.mtime, node.not_before) = (None, since);
    }

    pub fn empty() -> Content {
        Arc::default()
    }
}
