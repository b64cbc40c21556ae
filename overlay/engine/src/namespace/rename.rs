//! Moves of names.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, RenameMode, Result, Side};
use forebay_cache::{Content, ContentId};
use forebay_system::clock::stamp_now;

use super::super::{Caller, Inner, Ino, Overlay, Txn};
use super::create::NewInode;
use super::remove::not_empty;
use super::{exists, not_found};

/// A name in a directory.
#[derive(Clone, Copy)]
struct RenameEndpoint<'a> {
    parent: Ino,
    name: &'a [u8],
}

impl Overlay {
    /// Moves a name. The pool learns of it at the flush.
    pub async fn rename(
        &self,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let (from, to) = (RenameEndpoint { parent, name }, RenameEndpoint { parent: new_parent, name: new_name });
        self.inner.move_name(from, to, mode, None).await
    }

    /// Moves a name, and leaves a whiteout in its place, in one step.
    ///
    /// # Errors
    /// `InvalidInput` if the pool cannot hold a whiteout: file systems report this error if they have no whiteouts.
    pub async fn rename_leaving_whiteout(
        &self,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        mode: RenameMode,
        caller: Caller,
    ) -> Result<()> {
        if !self.inner.pool.capabilities().objects.special_files {
            return Err(Error::new(ErrorKind::InvalidInput, Side::Pool, "the pool cannot hold whiteouts"));
        }
        let (from, to) = (RenameEndpoint { parent, name }, RenameEndpoint { parent: new_parent, name: new_name });
        self.inner.move_name(from, to, mode, Some(caller)).await
    }
}

impl Inner {
    async fn move_name(
        self: &Arc<Self>,
        from: RenameEndpoint<'_>,
        to: RenameEndpoint<'_>,
        mode: RenameMode,
        whiteout: Option<Caller>,
    ) -> Result<()> {
        let inner = self;
        let (RenameEndpoint { parent, name }, RenameEndpoint { parent: new_parent, name: new_name }) = (from, to);
        inner.check_new_name(new_parent, new_name)?;
        inner.sync_many_replaced().await;
        let moved = inner.find(parent, name).await?.ok_or_else(|| not_found(name))?;
        let target = inner.find(new_parent, new_name).await?;
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(exists(new_name)),
            (RenameMode::Exchange, None) => return Err(not_found(new_name)),
            (_, Some(target)) if target == moved => return Ok(()),
            (RenameMode::Replace, Some(target)) => {
                inner.check_replaceable(moved, target)?;
                if inner.node(target)?.state.lock().record.kind == FileKind::Directory {
                    inner.check_dir_can_go(target).await?;
                }
            }
            _ => {}
        }
        inner.check_depth_of_moved(moved, parent, new_parent, new_name)?;
        if let (RenameMode::Exchange, Some(target)) = (mode, target) {
            inner.check_depth_of_moved(target, new_parent, parent, name)?;
        }
        if target.is_some() {
            inner.start_write_back(moved).await;
        }
        let mut synced = None;
        while let Some(content) = inner.commit_move(from, to, mode, whiteout, (moved, target), synced)? {
            if let Err(error) = inner.sync_content(&content).await
                && inner.catalog.lost(ContentId(content.id)).is_none()
            {
                return Err(error);
            }
            synced = Some(content.id);
        }
        inner.rules_may_differ();
        inner.flusher.bell.notify_one();
        Ok(())
    }

    /// The change of a move over `target`. `synced`: content that was synced since the move began. If the content of `moved`
    /// is to be synced first, changes nothing and returns it.
    fn commit_move(
        &self,
        from: RenameEndpoint<'_>,
        to: RenameEndpoint<'_>,
        mode: RenameMode,
        whiteout: Option<Caller>,
        (moved, target): (Ino, Option<Ino>),
        synced: Option<u64>,
    ) -> Result<Option<Arc<Content>>> {
        let inner = self;
        let (RenameEndpoint { parent, name }, RenameEndpoint { parent: new_parent, name: new_name }) = (from, to);
        let mut txn = Txn::begin(inner);
        if inner.is_below(new_parent, moved) || (mode == RenameMode::Exchange && is_around(inner, parent, target)) {
            return Err(Error::new(ErrorKind::InvalidInput, Side::Application, "a directory cannot go below itself"));
        }
        let was_from = txn.name(parent, name)?;
        let was_to = txn.name(new_parent, new_name)?;
        if was_from.here_ino() != Some(moved) || was_to.here_ino() != target {
            return Err(Error::new(ErrorKind::Stale, Side::Application, "the names changed meanwhile"));
        }
        txn.live_dir(parent)?;
        txn.live_dir(new_parent)?;
        match (mode, target) {
            (RenameMode::Exchange, Some(target)) => swap(&mut txn, from, to, moved, target)?,
            _ => shift(inner, &mut txn, from, to, moved, target)?,
        }
        if let Some(caller) = whiteout {
            let mut record = inner.new_record(&mut txn, parent, &NewInode::whiteout(caller), None)?;
            record.links.push((parent, name.into()));
            let ino = txn.create(record)?;
            txn.show(parent, name, Some((ino, FileKind::CharDevice)))?;
        }
        if target.is_some() && txn.record(moved)?.file.is_dirty() {
            // ext4 does the same for programs that replace a file without a sync.
            let content = txn.content(moved)?;
            // A bypassed device is not synced: that would fail, and make intact content count as lost.
            let is_due = synced != Some(content.id) && inner.store.is_used(ContentId(content.id));
            if is_due && !inner.catalog.try_sync_first(content.clone()) {
                return Ok(Some(content));
            }
        }
        txn.state_at_once(new_parent)?.names.negative.remove(new_name);
        txn.commit()?;
        Ok(None)
    }

    fn check_replaceable(&self, moved: Ino, target: Ino) -> Result<()> {
        let kind = |ino: Ino| -> Result<FileKind> { Ok(self.node(ino)?.state.lock().record.kind) };
        match (kind(moved)? == FileKind::Directory, kind(target)? == FileKind::Directory) {
            (true, false) => Err(Error::new(ErrorKind::NotDirectory, Side::Application, self.display(target))),
            (false, true) => Err(Error::new(ErrorKind::IsDirectory, Side::Application, self.display(target))),
            _ => Ok(()),
        }
    }
}

/// Returns whether the target of an exchange is a directory above its partner.
fn is_around(inner: &Inner, parent: Ino, target: Option<Ino>) -> bool {
    target.is_some_and(|t| inner.is_below(parent, t))
}

/// Moves `moved` from one name to another, over `target`.
fn shift(
    inner: &Inner,
    txn: &mut Txn<'_>,
    from: RenameEndpoint<'_>,
    to: RenameEndpoint<'_>,
    moved: Ino,
    target: Option<Ino>,
) -> Result<()> {
    let mut target_is_dir = false;
    if let Some(target) = target {
        target_is_dir = txn.record(target)?.kind == FileKind::Directory;
        if target_is_dir && !inner.is_empty_dir(target)? {
            return Err(not_empty(to.name));
        }
        txn.record(target)?.ctime = stamp_now();
        txn.unlink(target, to.parent, to.name)?;
    }
    let kind = relink(txn, moved, from, to)?;
    txn.show(to.parent, to.name, Some((moved, kind)))?;
    txn.show(from.parent, from.name, None)?;
    let moved_dir = i32::from(kind == FileKind::Directory);
    txn.touch_dir(from.parent, -moved_dir)?;
    txn.touch_dir(to.parent, moved_dir - i32::from(target_is_dir))
}

/// Makes two names change places.
fn swap(txn: &mut Txn<'_>, a: RenameEndpoint<'_>, b: RenameEndpoint<'_>, first: Ino, second: Ino) -> Result<()> {
    let first_kind = relink(txn, first, a, b)?;
    let second_kind = relink(txn, second, b, a)?;
    txn.show(a.parent, a.name, Some((second, second_kind)))?;
    txn.show(b.parent, b.name, Some((first, first_kind)))?;
    let dirs = |kind: FileKind| i32::from(kind == FileKind::Directory);
    txn.touch_dir(a.parent, dirs(second_kind) - dirs(first_kind))?;
    txn.touch_dir(b.parent, dirs(first_kind) - dirs(second_kind))
}

fn relink(txn: &mut Txn<'_>, ino: Ino, from: RenameEndpoint<'_>, to: RenameEndpoint<'_>) -> Result<FileKind> {
    let record = txn.record(ino)?;
    for link in &mut record.links {
        if link.0 == from.parent && *link.1 == *from.name {
            *link = (to.parent, to.name.into());
            break;
        }
    }
    record.ctime = stamp_now();
    Ok(record.kind)
}
