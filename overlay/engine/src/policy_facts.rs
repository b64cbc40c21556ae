//! What must be known of a file before its policy can be decided, and the settings of directories.

use std::sync::Arc;

use forebay_backends::{Error, FileKind, Result, Side};
use forebay_policy::{DIRECTORY_POLICY_XATTR, DirectoryPolicy};

use crate::node::Node;
use crate::{Caller, Inner, Ino};

impl Inner {
    /// Makes sure that the policy of an inode can be decided. What cannot be found out now counts as it was when it was last
    /// known, else as absent.
    pub async fn learn_policy_facts(self: &Arc<Self>, node: &Node) {
        if self.policy().needed().storage_pool {
            self.learn_storage_pool(node).await;
        }
        if let Err(error) = self.learn_directories(self.unknown_directories_above(node)).await {
            tracing::debug!(%error, ino = %node.ino, "the policies of its directories are not known");
        }
    }

    /// Asks the pool for the extended attributes of directories.
    ///
    /// # Errors
    /// Those after which it may tell them later.
    pub(crate) async fn learn_directories(self: &Arc<Self>, dirs: Vec<Ino>) -> Result<()> {
        if dirs.is_empty() {
            return Ok(());
        }
        match self.learn_xattrs(dirs.clone()).await {
            // One of them cannot be read. The other ones can.
            Err(error) if is_refusal(&error) => {}
            learned => return learned,
        }
        for dir in dirs {
            match self.learn_xattrs(vec![dir]).await {
                Err(error) if is_refusal(&error) => self.policies.note_unreadable(dir),
                learned => learned?,
            }
        }
        Ok(())
    }

    /// Checks a change of the settings of a directory, before they become its extended attribute. `value`: `None` if the
    /// attribute is to be removed.
    ///
    /// # Errors
    /// `InvalidInput` if they are wrong, too long or not allowed; `EPERM` if the caller does not own the directory. The
    /// owner is checked even if the site allows no settings: it may allow some later.
    pub(crate) fn check_directory_policy(&self, ino: Ino, value: Option<&[u8]>, caller: Caller) -> Result<()> {
        let node = self.node(ino)?;
        let (kind, owner) = {
            let state = node.state.lock();
            (state.record.kind, state.record.uid)
        };
        if kind != FileKind::Directory {
            return Ok(());
        }
        if caller.uid != 0 && caller.uid != owner {
            let what = format!("{DIRECTORY_POLICY_XATTR}: only the owner of the directory may change it");
            return Err(Error::os(libc::EPERM, Side::Application, what));
        }
        let policy = self.policy();
        let Some(value) = value.filter(|_| !policy.allowed.is_empty()) else { return Ok(()) };
        let checked = DirectoryPolicy::parse(value).and_then(|settings| policy.check_directory(&settings));
        checked.inspect_err(|why| tracing::warn!("{}: {why}", self.display(ino)))
    }
}

/// Whether asking for extended attributes again would lead to the same answer.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error.errno(),
        libc::E2BIG | libc::EACCES | libc::EPERM | libc::EOPNOTSUPP | libc::ENOENT | libc::ENOTDIR | libc::ESTALE
    )
}
