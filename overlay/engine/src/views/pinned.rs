//! The names above views, which the kernel must not have to look up again.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_catalog::Link;
use parking_lot::RwLock;
use tokio::sync::oneshot::Receiver;

use crate::acl;
use crate::coherence::Age;
use crate::{Inner, Ino};

/// The names that views pin.
#[derive(Debug, Default)]
pub(super) struct PinnedNames {
    any: AtomicBool,
    set: RwLock<PinnedSet>,
}

#[derive(Debug, Default)]
struct PinnedSet {
    /// For each view: the inodes above it, and its own, with the name by which each was reached.
    of_views: BTreeMap<String, Vec<PinnedName>>,
    inos: HashSet<Ino>,
    links: HashSet<Link>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PinnedName {
    ino: Ino,
    /// `None` for the root of the mount.
    link: Option<Link>,
}

/// The mode, the owner, the group and the ACL of an inode.
type Rights = (u32, u32, u32, Option<Box<[u8]>>);

impl PinnedNames {
    fn change<T>(&self, change: impl FnOnce(&mut BTreeMap<String, Vec<PinnedName>>) -> T) -> T {
        let mut set = self.set.write();
        let changed = change(&mut set.of_views);
        set.inos = set.of_views.values().flatten().map(|name| name.ino).collect();
        set.links = set.of_views.values().flatten().filter_map(|name| name.link.clone()).collect();
        self.any.store(!set.of_views.is_empty(), Ordering::Release);
        changed
    }

    fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }
}

impl Inner {
    /// Returns whether the kernel may keep what it knows of an inode, because a view is mounted at or below it.
    pub(crate) fn is_pinned(&self, ino: Ino) -> bool {
        let names = &self.views.pinned;
        names.any() && names.set.read().inos.contains(&ino)
    }

    /// Returns whether the kernel must keep a name.
    pub(crate) fn is_pinned_name(&self, parent: Ino, name: &[u8]) -> bool {
        let names = &self.views.pinned;
        names.any() && names.set.read().links.contains(&(parent, name.into()))
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
        let links: Vec<Link> = pinned.iter().filter_map(|name| name.link.clone()).collect();
        self.views.pinned.change(|all| all.insert(view.to_owned(), pinned));
        let Some(kernel) = self.kernel.get() else { return Vec::new() };
        kernel.keep_names(true);
        links.iter().map(|(dir, name)| kernel.expire_name(*dir, name)).collect()
    }

    /// Unpins the names above a view that is not mounted any more.
    pub(super) fn unpin_names(&self, view: &str) {
        let unpinned = self.views.pinned.change(|all| all.remove(view)).unwrap_or_default();
        self.keep_names_above_views();
        for name in unpinned.into_iter().filter(|name| !self.is_pinned(name.ino)) {
            // The kernel was told that it may keep them.
            self.tell_kernel_inode(name.ino, false);
            if let (Some((parent, name)), Some(kernel)) = (name.link, self.kernel.get()) {
                drop(kernel.expire_name(parent, &name));
            }
        }
    }

    /// Tells whether the kernel must keep names. Called when one is pinned or unpinned, and when the kernel is known: views
    /// of the last daemon may be mounted.
    pub(crate) fn keep_names_above_views(&self) {
        if let Some(kernel) = self.kernel.get() {
            kernel.keep_names(self.views.pinned.any());
        }
    }

    /// Asks the pool for the attributes above views, as the policy says, and tells the kernel which of them changed.
    pub(super) async fn look_at_pinned_names(&self) {
        let inos = self.views.pinned.set.read().inos.clone();
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

    async fn rights_above(&self, ino: Ino) -> Option<Rights> {
        let acl = self.xattr(ino, acl::ACCESS).await.ok()?;
        let node = self.node(ino).ok()?;
        let record = &node.state.lock().record;
        Some((record.mode, record.uid, record.gid, acl))
    }
}
