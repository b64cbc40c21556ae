//! What must be known of a file before its policy can be decided, and the settings of directories.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_policy::{DIRECTORY_POLICY_XATTR, DirectoryPolicy, SettingName, Write};
use futures::FutureExt;
use futures::future::BoxFuture;

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

    /// Asks the pool for the extended attributes of directories. One that cannot be read does not stop the other ones.
    ///
    /// # Errors
    /// The last one of those after which it may tell them later.
    pub(crate) async fn learn_directories(self: &Arc<Self>, mut dirs: Vec<Ino>) -> Result<()> {
        dirs.retain(|dir| !self.policies.is_refused(*dir));
        if dirs.len() > 1 {
            match self.learn_xattrs(dirs.clone()).await {
                // Some of them failed. They are found one by one: what is known by now is not asked for again.
                Err(error) if !error.is_unreachable() => {}
                learned => return learned,
            }
        }
        let mut learned = Ok(());
        for dir in dirs {
            match self.learn_xattrs(vec![dir]).await {
                Ok(()) => {}
                Err(error) if is_refusal(&error) => self.policies.note_unreadable(dir, !error.is_gone()),
                Err(error) if error.is_unreachable() => return Err(error),
                Err(error) => learned = Err(error),
            }
        }
        learned
    }

    /// Makes sure that it is known, now or from earlier, whether an inode is local: that may depend on the settings of
    /// directories and on its storage pool.
    ///
    /// # Errors
    /// Of the pool, and `Busy` if it does not come to an answer: it is not known.
    pub(crate) fn learn_whether_local<'a>(self: &'a Arc<Self>, node: &'a Node) -> BoxFuture<'a, Result<()>> {
        async move {
            let (by_owner, by_storage_pool) = {
                let policy = self.policy();
                if !policy.may_write(Write::Local) || !node.state.lock().record.is_made_here() {
                    return Ok(());
                }
                (policy.allowed.contains(&SettingName::Write), policy.may_be_local_by_storage_pool())
            };
            if by_owner {
                let learned = self.learn_directories(self.unknown_directories_above(node)).await;
                if !self.knows_directory_policies(node) {
                    return Err(learned.err().unwrap_or_else(|| self.unknown_whether_local(node)));
                }
            }
            if by_storage_pool {
                match self.ask_layout(node).await {
                    Err(error) if error.is_gone() => {
                        // Another client removed the directory that new files would be in: the one above it tells.
                        let above = node.state.lock().record.links.first().map(|(dir, _)| *dir);
                        if let Some(dir) = above {
                            self.look_above(dir).await?;
                        }
                        self.ask_layout(node).await?;
                    }
                    told => _ = told?,
                }
            }
            Ok(())
        }
        .boxed()
    }

    /// The error if it is not known whether an inode is local.
    pub(crate) fn unknown_whether_local(&self, node: &Node) -> Error {
        let what = format!("{}: it is not known yet whether it may go to the pool", self.display(node.ino));
        Error::new(ErrorKind::Busy, Side::Pool, what)
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
