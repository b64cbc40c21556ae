//! The mount: what it was started with, and what the kernel is told.

mod pinned;

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use forebay_backends::{Error, ErrorKind, Result, Side};
use parking_lot::Mutex;

use self::pinned::PinnedNames;
use crate::{Inner, Ino, KernelCache};

/// What the mount was started with, and what the kernel knows of it.
pub(crate) struct MountFacts {
    /// The name of this node, for the names of conflicting copies.
    pub node_name: String,
    pub read_only: bool,
    /// Whether the mount was taken over from a daemon that died.
    pub reattached: bool,
    pub opened_at: Instant,
    /// Files that the kernel holds open since before this daemon started, until the daemon has opened them again.
    pub inherited: Mutex<HashSet<Ino>>,
    kernel: OnceLock<Arc<dyn KernelCache>>,
    pinned: PinnedNames,
    mountpoint: Mutex<Option<String>>,
    passthrough: OnceLock<bool>,
}

impl MountFacts {
    pub fn new(node_name: String, read_only: bool, reattached: bool) -> Self {
        Self {
            node_name,
            read_only,
            reattached,
            opened_at: Instant::now(),
            inherited: Mutex::default(),
            kernel: OnceLock::new(),
            pinned: PinnedNames::default(),
            mountpoint: Mutex::default(),
            passthrough: OnceLock::new(),
        }
    }

    /// Returns the receiver of notifications; `None` without a mount in the kernel.
    pub fn kernel(&self) -> Option<&Arc<dyn KernelCache>> {
        self.kernel.get()
    }

    pub fn set_kernel(&self, kernel: Arc<dyn KernelCache>) {
        let _ = self.kernel.set(kernel);
    }

    /// Sets what `status` shows.
    pub fn set_up(&self, mountpoint: &str, passthrough: bool) {
        *self.mountpoint.lock() = Some(mountpoint.to_owned());
        let _ = self.passthrough.set(passthrough);
    }

    pub fn mountpoint(&self) -> Option<String> {
        self.mountpoint.lock().clone()
    }

    pub fn passes_through(&self) -> bool {
        self.passthrough.get().copied().unwrap_or(false)
    }
}

impl Inner {
    pub fn check_writable(&self) -> Result<()> {
        if self.mount.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, Side::Application, "the mount is read-only"));
        }
        Ok(())
    }

    /// Notifies the kernel to forget what it has cached of an inode; `data`: the cached bytes too.
    pub fn tell_kernel_inode(&self, ino: Ino, data: bool) {
        if let Some(kernel) = self.mount.kernel() {
            kernel.invalidate_inode(ino, data);
        }
    }

    /// Notifies the kernel to forget a name. One above a mounted view stays.
    pub fn tell_kernel_name(&self, parent: Ino, name: &[u8]) {
        if self.is_pinned_name(parent, name) {
            return;
        }
        if let Some(kernel) = self.mount.kernel() {
            kernel.invalidate_name(parent, name);
        }
    }

    /// Drops the content file that is kept for the next open through the kernel, and with it the descriptor.
    pub fn release_content(&self, ino: Ino) {
        if let Some(kernel) = self.mount.kernel() {
            kernel.release_content(ino);
        }
    }
}
