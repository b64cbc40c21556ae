//! What must be known of a file before its policy can be decided, and the settings of directories.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_policy::DIRECTORY_POLICY_XATTR;

use crate::node::Node;
use crate::{Caller, Inner, Ino};

impl Inner {
    /// Makes sure that the policy of an inode can be decided. What cannot be found out now counts as absent.
    pub async fn learn_policy_facts(self: &Arc<Self>, node: &Node) {
        if self.policy().needed().storage_pool {
            self.learn_storage_pool(node).await;
        }
        if self.policy().allowed.is_empty() {
            return;
        }
        if let Err(error) = self.learn_xattrs(self.all_directories_above(node)).await {
            tracing::debug!(%error, ino = %node.ino, "the policies of its directories are not known");
        }
    }

    /// Checks the settings of a directory, before they become its extended attribute.
    ///
    /// # Errors
    /// `InvalidInput` if they are wrong or not allowed; `NotPermitted` if the caller does not own the directory.
    pub(crate) fn check_directory_policy(&self, ino: Ino, value: &[u8], caller: Caller) -> Result<()> {
        let policy = self.policy();
        let node = self.node(ino)?;
        let (kind, owner) = {
            let state = node.state.lock();
            (state.record.kind, state.record.uid)
        };
        if policy.allowed.is_empty() || kind != FileKind::Directory {
            return Ok(());
        }
        if caller.uid != 0 && caller.uid != owner {
            let what = format!("{DIRECTORY_POLICY_XATTR}: only the owner of the directory may set it");
            return Err(Error::os(libc::EPERM, Side::Application, what));
        }
        let refused = |why: &dyn std::fmt::Display| {
            tracing::warn!("{}: {why}", self.display(ino));
            Error::new(ErrorKind::InvalidInput, Side::Application, why.to_string())
        };
        let text = std::str::from_utf8(value).map_err(|_| refused(&"a policy is text"))?;
        policy.parse_directory(text).map(drop).map_err(|e| refused(&e))
    }
}
