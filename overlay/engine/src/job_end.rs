//! The end of a job: what waited for it is flushed, and what was kept for it alone is removed.

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_policy::Write;

use crate::{Ino, Overlay};

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
    /// job uses, with the directories that only they were in. `used`: the files that the job used.
    ///
    /// # Errors
    /// Of the first file that could not be removed. The files after it are removed all the same.
    pub async fn job_ended(&self, used: Vec<Ino>) -> Result<()> {
        let mut outcome = Ok(());
        for ino in used {
            self.inner.hasten(ino);
            outcome = outcome.and(self.remove_local(ino).await);
        }
        self.inner.flusher.bell.notify_one();
        outcome
    }

    /// Removes a file that never goes to the pool and that no job uses, and the directories that only it was in.
    async fn remove_local(&self, ino: Ino) -> Result<()> {
        let inner = &self.inner;
        let Some(node) = inner.node_unless_gone(ino)? else { return Ok(()) };
        let is_file = node.state.lock().record.kind != FileKind::Directory;
        if !is_file || !inner.is_local(&node) || !inner.advisor().jobs_of(ino).is_empty() {
            return Ok(());
        }
        let links = node.state.lock().record.links.clone();
        drop(node);
        let mut outcome = Ok(());
        for (parent, name) in links {
            match self.unlink(parent, &name).await {
                Ok(()) => inner.tell_kernel_name(parent, &name),
                Err(e) if e.is(ErrorKind::NotFound) => {}
                Err(e) => outcome = outcome.and(Err(e)),
            }
            outcome = outcome.and(self.remove_empty_local(parent).await);
        }
        outcome
    }

    /// Removes a directory that never goes to the pool, if it is empty, and then those above it.
    async fn remove_empty_local(&self, mut dir: Ino) -> Result<()> {
        loop {
            let Some(node) = self.inner.node_unless_gone(dir)? else { return Ok(()) };
            let link = node.state.lock().record.links.first().cloned();
            let (true, Some((parent, name))) = (self.inner.is_local(&node), link) else { return Ok(()) };
            match self.rmdir(parent, &name).await {
                Ok(()) => self.inner.tell_kernel_name(parent, &name),
                Err(e) if matches!(e.kind(), ErrorKind::NotEmpty | ErrorKind::NotFound) => return Ok(()),
                Err(e) => return Err(e),
            }
            dir = parent;
        }
    }
}
