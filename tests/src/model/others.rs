//! Other clients that change the pool, and the model that learns what the engine shows of that.

use std::collections::HashMap;

use bytes::Bytes;
use forebay_api::operator::Difference;
use forebay_api::operator::FlushRequest;
use forebay_backends::{Attrs, Expected, FileKind, Piece, Pool, PoolPath, RenameMode, SetAttrs, Time};
use forebay_engine::{Ino, summary};
use futures::StreamExt;

use super::Failure;
use super::check::{Compared, same};
use super::config::Flushing;
use super::content::{self, Content, describe};
use super::op::{Other, Spot};
use super::run::Run;
use super::tree::{Body, Tree};
use super::view;

/// The maximum number of looks at the whole tree until a look changes nothing.
const LOOKS: u32 = 4;

impl Run {
    pub fn other(&mut self, other: Other) -> Result<(), Failure> {
        let before = futures::executor::block_on(view::pooled(&self.machine.memory));
        let pool = self.machine.memory.clone();
        let tag = self.tag();
        self.grows = self.stays_when_it_grows(other, &before)?;
        futures::executor::block_on(change(&*pool, &before, other, tag));
        let after = futures::executor::block_on(view::pooled(&self.machine.memory));
        self.effects.take_all(&after);
        // The other clients knew the contents that they removed, and the contents that they wrote must not be lost.
        let contents =
            |tree: &Tree| -> Vec<Content> { tree.nodes.values().filter_map(|n| n.content().cloned()).collect() };
        self.gone_with_last_name(&before, &after);
        let (before, after) = (contents(&before), contents(&after));
        for gone in before.iter().filter(|c| !after.contains(c)) {
            self.effects.given_up(gone);
        }
        for new in after.iter().filter(|c| !before.contains(c)) {
            self.effects.replaced(&Tree::empty(), new);
        }
        self.outdated = true;
        Ok(())
    }

    /// Returns the path and the inode of a clean file that is open only for reading, and that another client appends
    /// to. The inode must stay.
    fn stays_when_it_grows(&self, other: Other, before: &Tree) -> Result<Option<(Vec<u8>, Ino)>, Failure> {
        let Other::Append { at, .. } = other else { return Ok(None) };
        let path = path_of(before, at).to_string().into_bytes();
        let (shown, pooled) = (self.model.paths(), before.paths());
        let (Some(id), Some(theirs)) = (shown.get(&path), pooled.get(&path)) else { return Ok(None) };
        let (node, theirs) = (self.model.node(*id), before.node(*theirs));
        let same =
            node.content().is_some() && node.content() == theirs.content() && (node.nlink, theirs.nlink) == (1, 1);
        let readers = self.handles.iter().filter(|h| h.id == *id).count();
        let writers = self.handles.iter().filter(|h| h.id == *id && h.writes()).count();
        let dirty = self.machine.run(self.overlay().dirty()).map_err(|e| e.to_string())?;
        let clean = dirty.iter().all(|d| d.path.as_bytes().strip_prefix(b"/").unwrap_or(d.path.as_bytes()) != path);
        let stays = same && readers > 0 && writers == 0 && clean;
        Ok(node.ino.filter(|_| stays).map(|ino| (path, ino)))
    }

    /// If the mount knows only one of several names of a file, a client that removes this name, or puts another object
    /// there, gives up the content, whether or not it knew the latest content.
    fn gone_with_last_name(&mut self, before: &Tree, after: &Tree) {
        let (paths, left, shown) = (before.paths(), after.paths(), self.model.paths());
        for (path, id) in &paths {
            let shared = before.node(*id).nlink > 1;
            let known = shown.get(path).map(|id| self.model.node(*id)).filter(|node| node.nlink == 1);
            let stays = left.get(path).is_some_and(|left| after.node(*left).pool_ino == before.node(*id).pool_ino);
            if let (true, false, Some(content)) = (shared, stays, known.and_then(|n| n.content())) {
                self.effects.given_up(content);
            }
        }
    }

    /// Adopts what the engine shows, once each content is known to come from some client.
    pub fn catch_up(&mut self) -> Result<(), Failure> {
        let overlay = self.overlay();
        if self.machine.config.flushing != Flushing::Manual {
            // A flush that meets another client's change after the look would change what was seen.
            let request = FlushRequest { wait: true, ..FlushRequest::default() };
            self.machine.run(async { summary(overlay.flush(request)).await });
        }
        let look = |run: &Self| {
            let shown = run.machine.run(view::shown(&overlay));
            shown.map_err(|e| format!("after a change by another client: {e}"))
        };
        // Checked before the look: a flush that ends between the look and the check would make the look outdated.
        let clean = self.is_clean()?;
        // A look at one name may reveal a change that affects what another name shows.
        let mut shown = look(self)?;
        for _ in 0..LOOKS {
            let again = look(self)?;
            let settled = same(&again, &shown, Compared { contents: true, mtimes: true }).is_ok();
            shown = again;
            if settled {
                break;
            }
        }
        for (path, id) in shown.paths() {
            if let Body::File(content) = &shown.node(id).body
                && !self.effects.is_known(content)
            {
                return Err(format!("{} holds what no client wrote: {}", path.escape_ascii(), describe(content)));
            }
        }
        if clean && self.machine.config.fresh {
            self.check_fresh(&shown)?;
        }
        if let Some((path, ino)) = self.grows.take() {
            let is = shown.paths().get(&path).and_then(|id| shown.node(*id).ino);
            if is != Some(ino) {
                return Err(format!("{}: {is:?} instead of {ino}, after it was appended to", path.escape_ascii()));
            }
        }
        self.adopt(shown)?;
        self.outdated = false;
        Ok(())
    }

    /// Returns whether no file is open, and nothing but times differs from the pool.
    fn is_clean(&self) -> Result<bool, Failure> {
        let dirty = self.machine.run(self.overlay().dirty()).map_err(|e| e.to_string())?;
        Ok(self.handles.is_empty() && dirty.iter().all(|d| d.what == Difference::Times))
    }

    /// Checks that the engine shows what the pool has, if nothing local differs from the pool.
    fn check_fresh(&self, shown: &Tree) -> Result<(), Failure> {
        if !self.is_clean()? {
            return Ok(());
        }
        let pooled = futures::executor::block_on(view::pooled(&self.machine.memory));
        same(shown, &pooled, Compared { contents: true, mtimes: true })
            .map_err(|e| format!("all is clean, but what is shown is not what the pool has: {e}"))
    }

    /// Replaces the model with what the engine shows; open files stay open.
    fn adopt(&mut self, shown: Tree) -> Result<(), Failure> {
        let by_ino: HashMap<_, _> = shown.nodes.iter().filter_map(|(id, n)| n.ino.map(|ino| (ino, *id))).collect();
        let old = std::mem::replace(&mut self.model, shown);
        let mut moved = HashMap::new();
        let handles = std::mem::take(&mut self.handles);
        for mut handle in handles {
            let was = handle.id;
            handle.id = match by_ino.get(&handle.ino) {
                Some(id) => *id,
                None => *moved.entry(was).or_insert_with(|| {
                    let mut node = old.node(was).clone();
                    node.nlink = 0;
                    self.model.add(node)
                }),
            };
            self.handles.push(handle);
        }
        // Conflicting copies have links that the model did not make, and the engine decides the mtimes.
        for node in self.model.nodes.values_mut() {
            (node.mtime, node.not_before) = (None, None);
        }
        Ok(())
    }
}

fn path_of(tree: &Tree, at: Spot) -> PoolPath {
    let dirs = tree.dirs();
    let dir = &dirs[at.dir as usize % dirs.len()].1;
    let name: &[u8] = [b"a", b"b", b"c", b"d"][at.name as usize];
    dir.iter().fold(PoolPath::root(), |p, name| p.join(name)).join(name)
}

async fn change(pool: &dyn Pool, tree: &Tree, other: Other, tag: u32) {
    let path = |at: Spot| path_of(tree, at);
    let attrs = Attrs { mode: 0o604, uid: 0, gid: 0, atime: Time::now(), mtime: Time::now(), xattrs: Vec::new() };
    // A change that is impossible is skipped.
    match other {
        Other::Put { at, len } => {
            let data = Bytes::from(content::pattern(tag, 0, len as usize));
            let pieces = if len == 0 { Vec::new() } else { vec![Ok(Piece { offset: 0, data })] };
            let pieces = futures::stream::iter(pieces).boxed();
            let _ = pool.put(&path(at), len.into(), pieces, &attrs, &Expected::Anything).await;
        }
        Other::WriteAt { at, offset, len } => {
            let data = content::pattern(tag, offset.into(), len as usize + 1);
            let _ = pool.write_at(&path(at), offset.into(), data.into()).await;
        }
        Other::Append { at, len } => {
            if let Ok(stat) = pool.stat(&path(at)).await {
                let data = content::pattern(tag, stat.size, len as usize + 1);
                let _ = pool.write_at(&path(at), stat.size, data.into()).await;
            }
        }
        Other::Remove { at } => {
            let path = path(at);
            if pool.stat(&path).await.is_ok_and(|s| s.kind == FileKind::Directory) {
                let _ = pool.remove_dir(&path).await;
            } else {
                let _ = pool.remove(&path, &Expected::Anything).await;
            }
        }
        Other::Mkdir { at } => _ = pool.mkdir(&path(at), &Attrs { mode: 0o755, ..attrs }).await,
        Other::Rename { from, to } => _ = pool.rename(&path(from), &path(to), RenameMode::Replace).await,
        Other::Swap { a, b } => _ = pool.rename(&path(a), &path(b), RenameMode::Exchange).await,
        Other::Chmod { at, mode } => {
            let changes = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
            let _ = pool.set_attrs(&path(at), &changes).await;
        }
    }
}
