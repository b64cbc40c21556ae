//! The tree that the engine shows and the tree that the pool has, as trees of the model.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use forebay_backends::memory::MemoryPool;
use forebay_backends::{FileKind, Pool, PoolPath, Version};
use forebay_engine::{Ino, Lookup, Overlay};

use super::Failure;
use super::content::Content;
use super::tree::{Body, Id, Node, ROOT, Tree};

/// The number of bytes that one read requests: more than any file has.
const ALL: u32 = 8 << 20;

/// The maximum number of looks. A look starts again if another client just removed what it meets, as the kernel does.
const LOOKS: u32 = 8;

/// Returns everything that the engine shows, read through lookups, listings and opens.
pub async fn shown(overlay: &Overlay) -> Result<Tree, Failure> {
    let stale = std::io::Error::from_raw_os_error(libc::ESTALE).to_string();
    let mut last = Err(String::new());
    for _ in 0..LOOKS {
        last = look(overlay).await;
        if !last.as_ref().is_err_and(|e| e.contains(&stale)) {
            break;
        }
    }
    last
}

async fn look(overlay: &Overlay) -> Result<Tree, Failure> {
    let mut tree = Tree::default();
    tree.node_mut(ROOT).ino = Some(Ino::ROOT);
    let mut known: HashMap<Ino, Id> = HashMap::from([(Ino::ROOT, ROOT)]);
    let mut dirs = vec![(ROOT, Ino::ROOT)];
    while let Some((dir, dir_ino)) = dirs.pop() {
        let listing = overlay.read_dir(dir_ino).await.map_err(|e| format!("list {dir_ino}: {e}"))?;
        for entry in listing.entries.iter() {
            let name = entry.name.escape_ascii();
            // The kernel looks names up, too: a name may refer to another object by now.
            let ino = match overlay.lookup(dir_ino, &entry.name).await.map_err(|e| format!("{name}: {e}"))? {
                Lookup::Found(found) => found.attr.ino,
                Lookup::Negative { .. } => continue,
            };
            overlay.forget(ino, 1);
            if let Some(id) = known.get(&ino) {
                tree.link(*id, dir, &entry.name).map_err(|e| format!("{name} is listed twice: {e:?}"))?;
                continue;
            }
            let node = node(overlay, ino).await.map_err(|e| format!("{name}: {e}"))?;
            if node.kind() != entry.kind && ino == entry.ino {
                return Err(format!("{name} is listed as {:?}, but is {:?}", entry.kind, node.kind()));
            }
            let is_dir = node.kind() == FileKind::Directory;
            let id = tree.make(dir, &entry.name, node).map_err(|e| format!("{name} is listed twice: {e:?}"))?;
            known.insert(ino, id);
            if is_dir {
                dirs.push((id, ino));
            }
        }
    }
    Ok(tree)
}

async fn node(overlay: &Overlay, ino: Ino) -> Result<Node, Failure> {
    let text = |e: forebay_backends::Error| e.to_string();
    let (attr, _) = overlay.getattr(ino).await.map_err(text)?;
    let body = match attr.kind {
        FileKind::Directory => Body::Dir(BTreeMap::new()),
        FileKind::Symlink => Body::Symlink(overlay.readlink(ino).await.map_err(text)?),
        _ => Body::File(content(overlay, ino).await.map_err(text)?),
    };
    let (attr, _) = overlay.getattr(ino).await.map_err(text)?;
    if let Body::File(content) = &body
        && content.len() as u64 != attr.size
    {
        return Err(format!("size {} with {} bytes", attr.size, content.len()));
    }
    let mut node = Node::new(body, attr.mode);
    node.mtime = Some(attr.mtime);
    node.ino = Some(ino);
    for name in overlay.list_xattrs(ino).await.map_err(text)? {
        let value = overlay.get_xattr(ino, &name).await.map_err(text)?;
        node.xattrs.insert(name, value);
    }
    Ok(node)
}

/// Opens a file and returns all of its bytes.
pub async fn content(overlay: &Overlay, ino: Ino) -> forebay_backends::Result<Content> {
    let opened = overlay.open_file(ino, libc::O_RDONLY).await?;
    let read = match &opened.resident {
        Some(content) => {
            let mut bytes = Vec::new();
            let mut at = 0;
            loop {
                let mut buffer = vec![0; 1 << 16];
                let n = std::os::unix::fs::FileExt::read_at(&*content.file, &mut buffer, at).unwrap_or(0);
                if n == 0 {
                    break;
                }
                bytes.extend_from_slice(&buffer[..n]);
                at += n as u64;
            }
            Ok(bytes)
        }
        None => overlay.read(ino, 0, ALL).await.map(|bytes| bytes.to_vec()),
    };
    overlay.release(ino, libc::O_RDONLY);
    Ok(Arc::new(read?))
}

/// Returns everything that the pool has.
pub async fn pooled(pool: &MemoryPool) -> Tree {
    let mut tree = Tree::default();
    let mut dirs: HashMap<PoolPath, Id> = HashMap::from([(PoolPath::root(), ROOT)]);
    let mut objects: HashMap<u64, Id> = HashMap::new();
    for (path, entry) in pool.snapshot() {
        let dir = dirs[&path.parent().expect("not the root")];
        let name = path.name().expect("not the root");
        let stat = pool.stat(&path).await;
        let Ok(Version::Inode { ino, .. }) = stat.as_ref().map(|s| s.version.clone()) else {
            // A reserved name: unfinished work of an upload.
            tree.make(dir, name, Node::new(Body::File(Content::default()), 0)).expect("a name once");
            continue;
        };
        if let Some(id) = objects.get(&ino) {
            tree.link(*id, dir, name).expect("a name once");
            continue;
        }
        let body = match entry.kind {
            FileKind::Directory => Body::Dir(BTreeMap::new()),
            FileKind::Symlink => Body::Symlink(entry.target.clone()),
            _ => Body::File(Arc::new(entry.content.to_vec())),
        };
        let mut node = Node::new(body, entry.mode);
        node.mtime = stat.ok().map(|s| s.mtime);
        node.pool_ino = Some(ino);
        node.xattrs = pool.xattrs(&path).await.unwrap_or_default().into_iter().collect();
        let id = tree.make(dir, name, node).expect("a name once");
        objects.insert(ino, id);
        if entry.kind == FileKind::Directory {
            dirs.insert(path, id);
        }
    }
    tree
}
