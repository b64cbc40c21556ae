//! Conflicts: the pool's copy changed while the overlay has a newer one. Both are kept, unless the policy says
//! otherwise, and the conflict is reported.
//!
//! If the pool has another version than expected, the bytes are compared first (`same_bytes`): equal bytes are no
//! conflict, whichever client wrote them.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side, Stat};
use forebay_catalog::Link;
use forebay_policy::ConflictPolicy;
use forebay_system::clock::unix_now;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::{Inner, Ino, Txn};
use super::apply::MOVED_ASIDE;
use crate::pool_calls::look_again;

/// The longest name that Linux takes, in bytes.
const NAME_MAX: usize = 255;

impl Inner {
    /// Settles a conflict under a name as the policy of our copy says.
    ///
    /// # Errors
    /// `Conflict` if the policy leaves it to the user.
    pub(super) fn settle_conflict<'a>(
        self: &'a Arc<Self>,
        parent: Ino,
        name: &'a [u8],
        ino: Ino,
        path: &'a PoolPath,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            match self.policy_of(&*self.node(ino)?).conflict {
                // Ours replaces only the content of a file. What is left here is no file on both sides.
                ConflictPolicy::KeepBoth | ConflictPolicy::Ours => self.keep_both(parent, name, ino, path).await,
                ConflictPolicy::Theirs => match self.drop_ours(parent, name, ino, path)? {
                    true => Ok(()),
                    false => self.keep_both(parent, name, ino, path).await,
                },
                ConflictPolicy::Fail => Err(Error::new(
                    ErrorKind::Conflict,
                    Side::Pool,
                    format!(
                        "{path}: changed in the pool and in the mount; its policy says conflict = fail, so nothing is \
                         changed: move or remove one of the copies"
                    ),
                )),
            }
        }
        .boxed()
    }

    /// Whether our copy of a file replaces the pool's copy, which another client changed.
    pub(super) fn replaces_theirs(&self, ino: Ino, theirs: &Stat) -> Result<bool> {
        let node = self.node(ino)?;
        let is_file = theirs.kind == FileKind::File && node.state.lock().record.kind == FileKind::File;
        Ok(is_file && self.policy_of(&node).conflict == ConflictPolicy::Ours)
    }

    /// Whether a file of the pool is an earlier upload of ours whose answer was lost, and which arrived only after the
    /// flush had looked for it.
    pub(super) fn is_late_upload(&self, ino: Ino, theirs: &Stat) -> Result<bool> {
        Ok(self.node(ino)?.state.lock().late_uploads.is_one(theirs))
    }

    /// Gives up our change: the mount shows the pool's copy under the name from now on. If our change was a rename, the
    /// moved file gets its old name back, because the pool has its content nowhere else. `false`: the old name is taken,
    /// and nothing was changed.
    fn drop_ours(&self, parent: Ino, name: &[u8], ino: Ino, path: &PoolPath) -> Result<bool> {
        let mut txn = Txn::begin(self);
        let was = txn.name(parent, name)?;
        if was.here_ino() != Some(ino) {
            return Ok(true);
        }
        let link: Link = (parent, name.into());
        let record = txn.record(ino)?;
        let kind = record.kind;
        if kind == FileKind::Directory {
            let what = format!("{path}: a directory here and something else in the pool: move or remove one of them");
            return Err(Error::new(ErrorKind::Conflict, Side::Pool, what));
        }
        // Without its last name in the mount, the flush would remove its names in the pool.
        let is_moved = was.pool != Some(ino) && record.in_pool() && record.links.iter().all(|known| *known == link);
        let old_name = if is_moved { free_pool_link(&mut txn, ino)? } else { None };
        if is_moved && old_name.is_none() {
            return Ok(false);
        }
        txn.pool_has(parent, name, None)?;
        txn.show(parent, name, None)?;
        let dropped = match &old_name {
            None => {
                txn.unlink(ino, parent, name)?;
                "the local copy is dropped"
            }
            Some((old_parent, old)) => {
                txn.record(ino)?.links = [(*old_parent, old.clone())].into_iter().collect();
                txn.show(*old_parent, old, Some((ino, kind)))?;
                // The kernel's cached listing lacks this name.
                txn.state_at_once(*old_parent)?.kernel.pages_go_stale();
                "the rename in the mount is undone"
            }
        };
        look_again(&mut txn, parent)?;
        txn.commit()?;
        self.report_conflict(format!("{path}: changed in the pool and in the mount; {dropped}, as its policy says"));
        self.tell_kernel_name(parent, name);
        if let Some((parent, name)) = &old_name {
            self.tell_kernel_name(*parent, name);
        }
        Ok(true)
    }

    /// Moves our copy to a name of its own beside the pool's copy, which stays. The next round flushes our copy there.
    async fn keep_both(self: &Arc<Self>, parent: Ino, name: &[u8], ino: Ino, path: &PoolPath) -> Result<()> {
        let (copy, mut txn) = loop {
            let copy = self.free_name(parent, name).await?;
            let txn = Txn::begin(self);
            // Another step may have taken the name since. It is not free any more, so another one is chosen.
            if txn.name(parent, &copy)?.is_empty() {
                break (copy, txn);
            }
        };
        let was = txn.name(parent, name)?;
        if was.here_ino() != Some(ino) {
            return Ok(());
        }
        let record = txn.record(ino)?;
        let kind = record.kind;
        for link in &mut record.links {
            if link.0 == parent && *link.1 == *name {
                link.1 = copy.as_slice().into();
            }
        }
        // The pool's object under this name is another client's by now: the next lookup finds it.
        txn.show(parent, name, None)?;
        txn.pool_has(parent, name, None)?;
        if txn.record(ino)?.file.is_whole() {
            txn.keep_as_only_copy(ino)?;
        }
        look_again(&mut txn, parent)?;
        txn.show(parent, &copy, Some((ino, kind)))?;
        txn.commit()?;
        self.report_conflict(format!(
            "{path}: changed in the pool and in the mount; the pool's copy stays, the local copy is beside it as {}",
            copy.escape_ascii()
        ));
        self.tell_kernel_name(parent, name);
        self.tell_kernel_name(parent, &copy);
        self.flusher.bell.notify_one();
        Ok(())
    }

    /// Returns a name for our copy that neither the mount nor the pool has.
    async fn free_name(&self, parent: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let now = unix_now();
        for number in 0..1000u32 {
            let mut suffix = format!(".conflict-{}-{now}", self.mount.node_name);
            if number > 0 {
                suffix.push_str(&format!("-{number}"));
            }
            let keep = name.len().min(NAME_MAX - suffix.len().min(NAME_MAX));
            let copy = [&name[..keep], suffix.as_bytes()].concat();
            if !self.catalog.name(parent, &copy)?.is_empty() {
                continue;
            }
            let path = self.pool_path_of(parent, &copy)?;
            match self.ask(self.pool.stat(&path)).await {
                Err(e) if e.is(ErrorKind::NotFound) => return Ok(copy),
                Err(e) => return Err(e.context(path)),
                Ok(_) => {}
            }
        }
        Err(Error::new(ErrorKind::Exists, Side::Pool, format!("{}: too many conflicts", name.escape_ascii())))
    }
}

/// Returns a name under which the pool has an inode and the mount shows nothing, in a directory that was not removed in
/// the mount. Not a temporary name of the flush.
fn free_pool_link(txn: &mut Txn<'_>, ino: Ino) -> Result<Option<Link>> {
    for (parent, name) in txn.record(ino)?.pool_links.clone() {
        let is_reachable = parent == Ino::ROOT || !txn.record(parent)?.links.is_empty();
        if is_reachable && !name.starts_with(MOVED_ASIDE.as_bytes()) && txn.name(parent, &name)?.here.is_none() {
            return Ok(Some((parent, name)));
        }
    }
    Ok(None)
}
