//! The end of a job: what waited for it is flushed, and what was kept for it alone is removed.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result};
use forebay_catalog::Link;
use forebay_policy::Write;
use smallvec::SmallVec;

use crate::node::Node;
use crate::{Inner, Ino, Overlay, Txn};

impl Overlay {
    /// Returns whether a file never goes to the pool, and is removed when the last job that uses it ends.
    pub fn is_local_file(&self, ino: Ino) -> bool {
        let inner = &self.inner;
        if !inner.policy().may_write(Write::Local) {
            return false;
        }
        let is_local = inner.node(ino).is_ok_and(|node| inner.is_local(&node));
        inner.table.drop_idle(ino);
        is_local
    }

    /// Flushes the files that waited for the end of a job, and removes those that never go to the pool and that no other
    /// job uses, with the directories that only they were in. `used`: the files that the job used. Afterwards, those for
    /// [`Self::remove_local_files`] to try again.
    ///
    /// # Errors
    /// Those of [`Self::remove_local_files`].
    pub async fn job_ended(&self, used: &mut Vec<Ino>) -> Result<()> {
        self.job_left(used);
        let removed = self.remove_local_files(used).await;
        self.inner.flusher.bell.notify_one();
        removed
    }

    /// Flushes the files that waited for the end of a job. `used`: the files that the job used. Its processes may go on,
    /// so nothing is removed.
    pub fn job_left(&self, used: &[Ino]) {
        let decides_by_jobs = self.inner.policy().needed().jobs;
        for ino in used {
            self.inner.hasten(*ino);
            if decides_by_jobs {
                self.inner.rules_of_file_may_differ(*ino);
            }
        }
        self.inner.flusher.bell.notify_one();
    }

    /// Removes those of some files that never go to the pool and that no job uses, with the directories that only they were
    /// in. Afterwards, `files` are those of which that is not known, because the pool does not answer. A file that was
    /// decided is not decided again: what becomes local after the end of its job stays.
    ///
    /// # Errors
    /// Of the first file that could not be removed. The files after it are removed all the same.
    pub async fn remove_local_files(&self, files: &mut Vec<Ino>) -> Result<()> {
        let mut outcome: Result<()> = Ok(());
        let mut unknown = Vec::new();
        for ino in std::mem::take(files) {
            let removed = self.remove_local(ino).await;
            if removed.as_ref().is_err_and(Error::tells_nothing) {
                unknown.push(ino);
            }
            outcome = outcome.and(removed);
        }
        *files = unknown;
        outcome
    }

    /// Removes a file that never goes to the pool and that no job uses, and the directories that only it was in.
    async fn remove_local(&self, ino: Ino) -> Result<()> {
        let inner = &self.inner;
        if !inner.policy().may_write(Write::Local) {
            return Ok(());
        }
        let Some(node) = inner.node_unless_gone(ino)? else { return Ok(()) };
        inner.learn_whether_local(&node).await?;
        let is_file = node.state.lock().record.kind != FileKind::Directory;
        if !is_file || !inner.is_local(&node) || !inner.advisor().jobs_of(ino).is_empty() {
            return Ok(());
        }
        let names = match inner.unlink_local(&node) {
            // A program removed it meanwhile.
            Err(e) if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound) => return Ok(()),
            names => names?,
        };
        drop(node);
        let mut outcome = Ok(());
        for (parent, name) in names {
            inner.tell_kernel_name(parent, &name);
            outcome = outcome.and(self.remove_empty_local(parent).await);
        }
        outcome
    }

    /// Removes a directory that never goes to the pool, if it is empty, and then those above it.
    async fn remove_empty_local(&self, mut dir: Ino) -> Result<()> {
        loop {
            let Some(node) = self.inner.node_unless_gone(dir)? else { return Ok(()) };
            self.inner.learn_whether_local(&node).await?;
            if !self.inner.is_local(&node) {
                return Ok(());
            }
            match self.inner.rmdir_local(&node).await {
                Ok(Some((parent, name))) => {
                    self.inner.tell_kernel_name(parent, &name);
                    dir = parent;
                }
                Ok(None) => return Ok(()),
                // A program filled or removed it meanwhile.
                Err(e) if matches!(e.kind(), ErrorKind::NotEmpty | ErrorKind::NotFound | ErrorKind::Stale) => {
                    return Ok(());
                }
                Err(e) => return Err(e),
            }
        }
    }
}

impl Inner {
    /// Removes all names of a file by one change, if the file is still local then. Returns the names.
    fn unlink_local(&self, node: &Node) -> Result<SmallVec<[Link; 1]>> {
        self.check_writable()?;
        let mut txn = Txn::begin(self);
        // Names change only under the lock of the change, which has locked no inode yet.
        if !self.knows_whether_local(node) {
            return Err(self.unknown_whether_local(node));
        }
        if !self.is_local(node) {
            return Ok(SmallVec::new());
        }
        let names = txn.record(node.ino)?.links.clone();
        for (parent, name) in &names {
            self.take_name(&mut txn, *parent, name, node.ino)?;
            txn.touch_dir(*parent, 0)?;
        }
        txn.commit()?;
        self.flusher.bell.notify_one();
        Ok(names)
    }

    /// Removes a directory that is empty, if it is still local then. Returns the name that it had.
    async fn rmdir_local(self: &Arc<Self>, node: &Node) -> Result<Option<Link>> {
        self.check_writable()?;
        self.check_dir_can_go(node.ino).await?;
        let mut txn = Txn::begin(self);
        if !self.knows_whether_local(node) {
            return Err(self.unknown_whether_local(node));
        }
        if !self.is_local(node) || !self.is_empty_dir(node.ino)? {
            return Ok(None);
        }
        let Some((parent, name)) = txn.record(node.ino)?.links.first().cloned() else { return Ok(None) };
        self.take_name(&mut txn, parent, &name, node.ino)?;
        txn.touch_dir(parent, -1)?;
        txn.commit()?;
        self.flusher.bell.notify_one();
        Ok(Some((parent, name)))
    }
}
