//! The policy in force, and what directories said of it when that was last known.

use std::num::NonZeroUsize;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use forebay_backends::FileKind;
use forebay_catalog::InodeRecord;
use forebay_policy::{DIRECTORY_POLICY_MAX, Policy};
use lru::LruCache;
use parking_lot::Mutex;

use super::{Inner, Ino, Overlay};
use crate::node::settings_in;

/// Directories whose last known settings are remembered: 16 MiB of them at most.
const REMEMBERED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4095);

#[derive(Debug)]
pub(crate) struct Policies {
    in_force: ArcSwap<Policy>,
    /// Held while another policy is put into force.
    pub changes: tokio::sync::Mutex<()>,
    /// Of directories whose extended attributes are not known now: the value of the attribute with their settings when it
    /// was last known; `None` inside: they count as without settings.
    directories: Mutex<LruCache<Ino, Option<Box<[u8]>>>>,
}

impl Policies {
    pub fn new(policy: Policy) -> Self {
        Self {
            in_force: ArcSwap::from_pointee(policy),
            changes: tokio::sync::Mutex::default(),
            directories: Mutex::new(LruCache::new(REMEMBERED)),
        }
    }

    /// Puts a policy into force.
    pub fn set(&self, policy: Policy) {
        self.in_force.store(Arc::new(policy));
    }

    /// Remembers the settings of a directory if a change makes them unknown. Returns whether a change makes them known that
    /// were other ones before.
    pub fn note_directory(&self, dir: Ino, was: &InodeRecord, is: &InodeRecord) -> bool {
        if is.kind != FileKind::Directory {
            return false;
        }
        match (&was.xattrs, &is.xattrs) {
            (Some(known), None) => {
                if let Some(value) = settings_in(known).filter(|value| value.len() <= DIRECTORY_POLICY_MAX) {
                    self.directories.lock().put(dir, Some(value.into()));
                }
                false
            }
            (None, Some(known)) => {
                let before = self.directories.lock().pop(&dir).flatten();
                before.as_deref() != settings_in(known)
            }
            _ => false,
        }
    }

    /// Notes that the pool refuses to tell the settings of a directory: it keeps those that it had.
    pub fn note_unreadable(&self, dir: Ino) {
        self.directories.lock().get_or_insert(dir, || None);
    }

    /// Returns the value that a directory had when it was last known; `None` inside: it counts as without settings.
    pub fn last_known(&self, dir: Ino) -> Option<Option<Box<[u8]>>> {
        self.directories.lock().get(&dir).cloned()
    }
}

impl Inner {
    pub fn policy(&self) -> Guard<Arc<Policy>> {
        self.policies.in_force.load()
    }
}

impl Overlay {
    /// Returns the policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policies.in_force.load_full()
    }
}
