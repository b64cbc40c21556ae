//! The names above views, which the kernel must not have to look up again.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use tokio::sync::oneshot::Receiver;

use crate::acl;
use crate::coherence::Age;
use crate::{Inner, Ino};

/// For each view: the inodes above it, and its own, with the name by which each was reached.
#[derive(Debug, Default)]
pub(super) struct PinnedNames {
    any: AtomicBool,
    of_views: RwLock<BTreeMap<String, Vec<PinnedName>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PinnedName {
    ino: Ino,
    /// `None` for the root of the mount.
    link: Option<(Ino, Box<[u8]>)>,
}

impl PinnedNames {
    fn has(&self, is_wanted: impl Fn(&PinnedName) -> bool) -> bool {
        self.any.load(Ordering::Acquire) && self.of_views.read().values().flatten().any(is_wanted)
    }
}

impl Inner {
    /// Returns whether the kernel may keep what it knows of an inode, because a view is mounted at or below it.
    pub(crate) fn is_pinned(&self, ino: Ino) -> bool {
        self.views.pinned.has(|name| name.ino == ino)
    }

    /// Returns whether the kernel must keep a name.
    pub(crate) fn is_pinned_name(&self, parent: Ino, name: &[u8]) -> bool {
        self.views
            .pinned
            .has(|pinned| pinned.link.as_ref().is_some_and(|(dir, known)| *dir == parent && **known == *name))
    }

    /// Pins the names above a view of this inode. The kernel may have been told to keep them for a short time only: the
    /// receivers are notified when it will look them up again.
    pub(super) fn pin_names(&self, view: &str, ino: Ino) -> Vec<Receiver<()>> {
        let Some(path) = self.overlay_path(ino) else { return Vec::new() };
        let mut pinned = vec![PinnedName { ino: Ino::ROOT, link: None }];
        let mut at = Ino::ROOT;
        for name in path.components() {
            let found = self.catalog.name(at, name).ok().and_then(|record| record.here_ino());
            let Some(found) = found else { break };
            pinned.push(PinnedName { ino: found, link: Some((at, name.into())) });
            at = found;
        }
        let links: Vec<_> = pinned.iter().filter_map(|name| name.link.clone()).collect();
        {
            let mut all = self.views.pinned.of_views.write();
            all.insert(view.to_owned(), pinned);
            self.views.pinned.any.store(true, Ordering::Release);
        }
        let Some(kernel) = self.kernel.get() else { return Vec::new() };
        kernel.keep_names(true);
        links.iter().map(|(dir, name)| kernel.expire_name(*dir, name)).collect()
    }

    /// Unpins the names above a view that is not mounted any more.
    pub(super) fn unpin_names(&self, view: &str) {
        let unpinned = {
            let mut all = self.views.pinned.of_views.write();
            let unpinned = all.remove(view).unwrap_or_default();
            self.views.pinned.any.store(!all.is_empty(), Ordering::Release);
            if all.is_empty() {
                self.keep_kernel_names(false);
            }
            unpinned
        };
        for name in unpinned.into_iter().filter(|name| !self.is_pinned(name.ino)) {
            // The kernel was told that it may keep them.
            self.tell_kernel_inode(name.ino, false);
            if let (Some((parent, name)), Some(kernel)) = (name.link, self.kernel.get()) {
                drop(kernel.expire_name(parent, &name));
            }
        }
    }

    fn keep_kernel_names(&self, keep: bool) {
        if let Some(kernel) = self.kernel.get() {
            kernel.keep_names(keep);
        }
    }

    /// Called when the kernel's caches are known: views of the last daemon may be mounted.
    pub(crate) fn keep_names_above_views(&self) {
        self.keep_kernel_names(self.views.pinned.any.load(Ordering::Acquire));
    }

    /// Asks the pool for the attributes above views, as the policy says, and tells the kernel which of them changed.
    pub(super) async fn look_at_pinned_names(&self) {
        let inos: HashSet<Ino> = self.views.pinned.of_views.read().values().flatten().map(|name| name.ino).collect();
        for ino in inos {
            let before = self.rights_above(ino).await;
            // What is gone stays in the kernel while the view lasts.
            let _ = self.revalidate(ino, Age::Metadata).await;
            // Only then: the kernel would also forget the ACL, without which other users than the owner cannot pass.
            if self.rights_above(ino).await != before {
                self.tell_kernel_inode(ino, false);
            }
        }
    }

    async fn rights_above(&self, ino: Ino) -> Option<(u32, u32, u32, Option<Box<[u8]>>)> {
        let acl = self.xattr(ino, acl::ACCESS).await.ok()?;
        let node = self.node(ino).ok()?;
        let record = &node.state.lock().record;
        Some((record.mode, record.uid, record.gid, acl))
    }
}
