//! Questions to the pool whose answer one of the daemon's own changes may have spoiled.

use forebay_backends::{Error, ErrorKind, PoolPath, Result, Version};

use super::Age;
use crate::node::Node;
use crate::pool_calls::{OWN_CHANGES, QueryStamp};
use crate::{Inner, Ino};

impl Inner {
    /// Returns whether a question that ended with an error is worth repeating: an own change explains the error, or the
    /// inode has another version by now.
    pub async fn ask_again(
        &self,
        node: &Node,
        known: &(QueryStamp, Option<Version>),
        error: &Error,
        left: &mut u32,
    ) -> bool {
        let (asked, version) = known;
        if self.is_own_change(node, *asked, error, left) {
            self.own_change(node).await;
            return true;
        }
        // A flush of attributes, whose answer was lost, made another version of the same bytes, or another client
        // appended to the file.
        if *left == 0 || !error.is(ErrorKind::Stale) || node.state.lock().record.file.is_dirty() {
            return false;
        }
        *left -= 1;
        self.revalidate(node.ino, Age::Now).await.is_ok() && node.state.lock().record.version != *version
    }

    /// Asks the pool about an inode, by its known path. If the pool does not find it, a flush may be moving it, or may
    /// have moved it without an answer. The doubt is resolved, and the question is asked again.
    ///
    /// # Errors
    /// `Stale` and `NotFound`: the pool no longer has it.
    pub async fn ask_of<T, F>(&self, ino: Ino, question: impl Fn(PoolPath) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let node = self.node(ino)?;
        let mut left = OWN_CHANGES;
        loop {
            let asked = self.asked(&node.state.lock());
            let path = self.pool_path(ino)?;
            let error = match self.ask(question(path.clone())).await {
                Err(e) if left > 0 => e.context(path),
                other => return other.map_err(|e| e.context(path)),
            };
            if self.is_own_change(&node, asked, &error, &mut left) {
                self.own_change(&node).await;
            } else if error.is(ErrorKind::NotFound) {
                left -= 1;
                self.missing(ino, asked).await?;
            } else {
                return Err(error);
            }
        }
    }
}
