//! How many bytes of each directory are on the fast pool.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use forebay_api::paths;
use forebay_backends::{PoolPath, Result};
use forebay_catalog::Ino;
use forebay_system::clock::unix_now;

use crate::{Inner, Overlay, blocking};

/// The largest files of a directory, which are shown by their names.
const NAMED_FILES: usize = 12;
/// Entries of a directory that are shown; the rest is one entry.
const SHOWN: usize = 200;
/// Directories above one that are followed: more than a path can have.
const DEPTH_MAX: usize = 4096;

/// The content of the fast pool by directory, at one moment. It takes memory for each directory, not for each file.
#[derive(Debug, Default)]
pub struct ResidentTree {
    /// Seconds since 1970.
    pub counted_unix: u64,
    /// How long the count took.
    pub took: Duration,
    directories: HashMap<Ino, DirectoryTotals>,
}

#[derive(Debug, Default)]
struct DirectoryTotals {
    name: Vec<u8>,
    parent: Option<Ino>,
    children: Vec<Ino>,
    /// In files directly in it.
    own: Amount,
    /// In all files below it.
    all: Amount,
    /// The largest files directly in it.
    largest: Vec<(u64, Ino)>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Amount {
    files: u64,
    bytes: u64,
}

impl Amount {
    fn add(&mut self, other: Self) {
        self.files += other.files;
        self.bytes += other.bytes;
    }
}

/// The resident content of one directory.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ResidentDirectory {
    pub path: String,
    pub files: u64,
    pub bytes: u64,
    /// By bytes, the largest first. Their bytes add up to those of the directory.
    pub entries: Vec<ResidentEntry>,
}

/// A directory, a file, or several of them, and what is resident.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ResidentEntry {
    /// `None`: the files of the directory that are not named, or the entries that are not shown.
    pub name: Option<String>,
    pub is_directory: bool,
    pub files: u64,
    pub bytes: u64,
}

impl Overlay {
    /// Counts the content of the fast pool. Reads the records of all resident files.
    pub async fn resident_tree(&self) -> Result<ResidentTree> {
        let inner = self.inner.clone();
        blocking(move || inner.resident_tree()).await
    }

    /// Returns the entries of a directory in a tree. `None`: the tree does not have the directory.
    pub fn resident_directory(&self, tree: &ResidentTree, path: &PoolPath) -> Option<ResidentDirectory> {
        let mut at = Ino::ROOT;
        for name in path.components() {
            let node = tree.directories.get(&at)?;
            at = *node.children.iter().find(|child| tree.directories.get(child).is_some_and(|c| c.name == name))?;
        }
        let empty = DirectoryTotals::default();
        let node =
            if at == Ino::ROOT { tree.directories.get(&at).unwrap_or(&empty) } else { tree.directories.get(&at)? };
        let mut entries: Vec<ResidentEntry> = Vec::new();
        for child in node.children.iter().filter_map(|child| tree.directories.get(child)) {
            let name = Some(paths::encode(&child.name));
            entries.push(ResidentEntry { name, is_directory: true, files: child.all.files, bytes: child.all.bytes });
        }
        let mut unnamed = node.own;
        for (bytes, ino) in &node.largest {
            // It may be gone since: then it stays among those without a name.
            let Some((_, name)) = self.inner.first_link(*ino) else { continue };
            unnamed = Amount { files: unnamed.files - 1, bytes: unnamed.bytes - bytes };
            entries.push(ResidentEntry {
                name: Some(paths::encode(&name)),
                is_directory: false,
                files: 1,
                bytes: *bytes,
            });
        }
        entries.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        for entry in entries.drain(SHOWN.min(entries.len())..) {
            unnamed.add(Amount { files: entry.files, bytes: entry.bytes });
        }
        if unnamed.files > 0 {
            let Amount { files, bytes } = unnamed;
            entries.push(ResidentEntry { name: None, is_directory: false, files, bytes });
        }
        let Amount { files, bytes } = node.all;
        Some(ResidentDirectory { path: paths::encode(path.as_bytes()), files, bytes, entries })
    }
}

impl Inner {
    fn first_link(&self, ino: Ino) -> Option<(Ino, Box<[u8]>)> {
        self.catalog.inode(ino).ok()??.links.first().cloned()
    }

    /// Counts. What has no name does not count. Blocks.
    fn resident_tree(&self) -> Result<ResidentTree> {
        let begun = Instant::now();
        let mut tree = ResidentTree { counted_unix: unix_now(), ..ResidentTree::default() };
        self.catalog.contents(|_, record| {
            if record.bytes > 0
                && let Some((directory, _)) = self.first_link(record.ino)
            {
                let node = tree.directories.entry(directory).or_default();
                node.own.add(Amount { files: 1, bytes: record.bytes });
                keep_largest(&mut node.largest, record.bytes, record.ino);
            }
            Ok(true)
        })?;
        let with_files: Vec<(Ino, Amount)> = tree.directories.iter().map(|(ino, node)| (*ino, node.own)).collect();
        for (ino, own) in with_files {
            self.add_to_ancestors(&mut tree, ino, own);
        }
        tree.took = begun.elapsed();
        Ok(tree)
    }

    /// Adds the files of a directory to its total, and to those of all directories above it.
    fn add_to_ancestors(&self, tree: &mut ResidentTree, ino: Ino, own: Amount) {
        let mut at = ino;
        for _ in 0..DEPTH_MAX {
            let node = tree.directories.entry(at).or_default();
            node.all.add(own);
            if at == Ino::ROOT {
                return;
            }
            let (parent, is_new) = match node.parent {
                Some(parent) => (parent, false),
                None => {
                    let Some((parent, name)) = self.first_link(at) else { return };
                    (node.parent, node.name) = (Some(parent), name.into_vec());
                    (parent, true)
                }
            };
            if is_new {
                tree.directories.entry(parent).or_default().children.push(at);
            }
            at = parent;
        }
    }
}

fn keep_largest(largest: &mut Vec<(u64, Ino)>, bytes: u64, ino: Ino) {
    if largest.len() < NAMED_FILES {
        largest.push((bytes, ino));
    } else if let Some(smallest) = largest.iter_mut().min_by_key(|(bytes, _)| *bytes)
        && smallest.0 < bytes
    {
        *smallest = (bytes, ino);
    }
}
