//! The end of a job: what waited for it is flushed, and what was kept for it alone is removed.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result};
use forebay_catalog::{FileOfJob, InodeRecord, Link};
use forebay_policy::Write;
use smallvec::SmallVec;

use crate::node::Node;
use crate::{Inner, Ino, Overlay, Txn};

/// A job that has ended.
#[derive(Debug, Clone, Default)]
pub struct EndedJob {
    /// The user of the job. `None`: that is not known any more.
    pub user: Option<u32>,
    /// The files that the job used.
    pub files: Vec<FileOfJob>,
}

/// Which local files the end of a job may remove: another user's files are removed only if the job made or wrote them.
#[derive(Debug, Clone, Copy)]
struct RemovalRights {
    user: Option<u32>,
    is_changed: bool,
}

impl RemovalRights {
    fn may_remove(self, file: &InodeRecord) -> bool {
        file.kind != FileKind::Directory && (self.is_changed || self.user == Some(file.uid))
    }

    /// `owner`: the owner of the file that was removed from it. A job of root may have run as that user.
    fn may_remove_dir(self, dir: &InodeRecord, owner: u32) -> bool {
        self.user == Some(dir.uid) || (self.user == Some(0) && dir.uid == owner)
    }
}

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
    /// job uses, with the directories that only they were in. Afterwards, the files of the job are those for
    /// [`Self::remove_local_files`] to try again.
    ///
    /// # Errors
    /// Those of [`Self::remove_local_files`].
    pub async fn job_ended(&self, job: &mut EndedJob) -> Result<()> {
        self.job_left(&job.files);
        let removed = self.remove_local_files(job).await;
        self.inner.flusher.bell.notify_one();
        removed
    }

    /// Flushes the files that waited for the end of a job. `used`: the files that the job used. Its processes may go on,
    /// so nothing is removed.
    pub fn job_left(&self, used: &[FileOfJob]) {
        let decides_by_jobs = self.inner.policy().needed().jobs;
        for file in used {
            self.inner.hasten(file.ino);
            if decides_by_jobs {
                self.inner.rules_of_file_may_differ(file.ino);
            }
        }
        self.inner.flusher.bell.notify_one();
    }

    /// Removes those of a job's files that never go to the pool and that no other job uses, with the directories that only
    /// they were in: files of its user, and files that it made or wrote. Afterwards, the files of the job are those of which
    /// it is not known whether they are local, because the pool does not answer. A file that was decided is not decided
    /// again: what becomes local after the end of its job stays. What another job uses is removed by the end of that job.
    ///
    /// # Errors
    /// Of the first file that could not be removed. The files after it are removed all the same.
    pub async fn remove_local_files(&self, job: &mut EndedJob) -> Result<()> {
        let mut outcome: Result<()> = Ok(());
        let mut unknown = Vec::new();
        for file in std::mem::take(&mut job.files) {
            let rights = RemovalRights { user: job.user, is_changed: file.is_changed };
            let removed = self.remove_local(file.ino, rights).await;
            if removed.as_ref().is_err_and(Error::tells_nothing) {
                unknown.push(file);
            }
            outcome = outcome.and(removed);
        }
        job.files = unknown;
        outcome
    }

    /// Removes a file that never goes to the pool and that no job uses, and the directories that only it was in.
    async fn remove_local(&self, ino: Ino, rights: RemovalRights) -> Result<()> {
        let inner = &self.inner;
        if !inner.policy().may_write(Write::Local) {
            return Ok(());
        }
        let Some(node) = inner.node_unless_gone(ino)? else { return Ok(()) };
        inner.learn_whether_local(&node).await?;
        let (owner, may_go) = {
            let record = &node.state.lock().record;
            (record.uid, rights.may_remove(record))
        };
        if !may_go || !inner.is_local(&node) || inner.advisor().takes_over(ino) {
            return Ok(());
        }
        let names = match inner.unlink_local(&node, rights) {
            // A program removed it meanwhile.
            Err(e) if matches!(e.kind(), ErrorKind::Stale | ErrorKind::NotFound) => return Ok(()),
            names => names?,
        };
        drop(node);
        let mut outcome = Ok(());
        for (parent, name) in names {
            inner.tell_kernel_name(parent, &name);
            outcome = outcome.and(self.remove_empty_local(parent, |dir| rights.may_remove_dir(dir, owner)).await);
        }
        outcome
    }

    /// Removes a directory that never goes to the pool, if it is empty, and then those above it.
    async fn remove_empty_local(&self, mut dir: Ino, may_go: impl Fn(&InodeRecord) -> bool) -> Result<()> {
        loop {
            let Some(node) = self.inner.node_unless_gone(dir)? else { return Ok(()) };
            self.inner.learn_whether_local(&node).await?;
            let may_go = may_go(&node.state.lock().record);
            if !may_go || !self.inner.is_local(&node) {
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
    fn unlink_local(&self, node: &Node, rights: RemovalRights) -> Result<SmallVec<[Link; 1]>> {
        self.check_writable()?;
        let mut txn = Txn::begin(self);
        // Names change only under the lock of the change, which has locked no inode yet.
        if !self.knows_whether_local(node) {
            return Err(self.unknown_whether_local(node));
        }
        if !self.is_local(node) {
            return Ok(SmallVec::new());
        }
        let record = txn.record(node.ino)?;
        if !rights.may_remove(record) {
            return Ok(SmallVec::new());
        }
        let names = record.links.clone();
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
