//! The names above views, which the kernel must not have to look up again.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_catalog::Link;
use parking_lot::RwLock;
use tokio::sync::oneshot::Receiver;

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
        let names = &self.mount.pinned;
        names.any() && names.set.read().inos.contains(&ino)
    }

    /// Returns whether the kernel must keep a name.
    pub(crate) fn is_pinned_name(&self, parent: Ino, name: &[u8]) -> bool {
        let names = &self.mount.pinned;
        names.any() && names.set.read().links.contains(&(parent, name.into()))
    }

    /// Returns the inodes of the names that the kernel must keep.
    pub(crate) fn pinned_inodes(&self) -> HashSet<Ino> {
        self.mount.pinned.set.read().inos.clone()
    }

    /// Pins the names above a view of this inode. The kernel may have been told to keep them for a short time only: the
    /// receivers are notified when it will look them up again.
    pub(crate) fn pin_names(&self, view: &str, ino: Ino) -> Vec<Receiver<()>> {
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
        self.mount.pinned.change(|all| all.insert(view.to_owned(), pinned));
        let Some(kernel) = self.mount.kernel() else { return Vec::new() };
        kernel.keep_names(true);
        links.iter().map(|(dir, name)| kernel.expire_name(*dir, name)).collect()
    }

    /// Unpins the names above a view that is not mounted any more.
    pub(crate) fn unpin_names(&self, view: &str) {
        let unpinned = self.mount.pinned.change(|all| all.remove(view)).unwrap_or_default();
        self.keep_names_above_views();
        for name in unpinned.into_iter().filter(|name| !self.is_pinned(name.ino)) {
            // The kernel was told that it may keep them.
            self.tell_kernel_inode(name.ino, false);
            if let (Some((parent, name)), Some(kernel)) = (name.link, self.mount.kernel()) {
                drop(kernel.expire_name(parent, &name));
            }
        }
    }

    /// Tells whether the kernel must keep names. Called when one is pinned or unpinned, and when the kernel is known: views
    /// of the last daemon may be mounted.
    pub(crate) fn keep_names_above_views(&self) {
        if let Some(kernel) = self.mount.kernel() {
            kernel.keep_names(self.mount.pinned.any());
        }
    }
}
