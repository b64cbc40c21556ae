//! The policy in force, and what directories said of it when that was last known.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
/// Directories that are remembered as without settings: some 2 MiB of them at most.
const REMEMBERED_WITHOUT: NonZeroUsize = NonZeroUsize::MIN.saturating_add(32_767);
/// How long the pool is not asked again for the settings of a directory after it refused to tell them.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// The interval of log messages while settings of directories are not known.
const TOLD_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Policies {
    in_force: ArcSwap<Policy>,
    /// Held while another policy is put into force.
    pub changes: tokio::sync::Mutex<()>,
    /// Of directories whose extended attributes are not known now: the value of the attribute with their settings when it
    /// was last known; `None` inside: they count as without settings.
    directories: Mutex<LastKnown>,
    /// When a message last told that settings of directories are not known.
    told: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct LastKnown {
    with_settings: LruCache<Ino, Box<[u8]>>,
    without: LruCache<Ino, ()>,
    /// When the pool refused to tell the settings of a directory.
    refused: LruCache<Ino, Instant>,
}

impl LastKnown {
    fn put(&mut self, dir: Ino, value: Option<&[u8]>) {
        match value {
            Some(value) => {
                self.without.pop(&dir);
                self.with_settings.put(dir, value.into());
            }
            None => {
                self.with_settings.pop(&dir);
                self.without.put(dir, ());
            }
        }
    }

    fn get(&mut self, dir: Ino) -> Option<Option<Box<[u8]>>> {
        let value = self.with_settings.get(&dir).cloned();
        value.map(Some).or_else(|| self.without.get(&dir).map(|()| None))
    }

    fn pop(&mut self, dir: Ino) -> Option<Box<[u8]>> {
        self.refused.pop(&dir);
        self.without.pop(&dir);
        self.with_settings.pop(&dir)
    }
}

impl Policies {
    pub fn new(policy: Policy) -> Self {
        Self {
            in_force: ArcSwap::from_pointee(policy),
            changes: tokio::sync::Mutex::default(),
            directories: Mutex::new(LastKnown {
                with_settings: LruCache::new(REMEMBERED),
                without: LruCache::new(REMEMBERED_WITHOUT),
                refused: LruCache::new(REMEMBERED),
            }),
            told: Mutex::default(),
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
                let value = settings_in(known).filter(|value| value.len() <= DIRECTORY_POLICY_MAX);
                self.directories.lock().put(dir, value);
                false
            }
            (None, Some(known)) => {
                let before = self.directories.lock().pop(dir);
                before.as_deref() != settings_in(known)
            }
            _ => false,
        }
    }

    /// Notes that the pool refuses to tell the settings of a directory: it keeps those that it had. `for_now`: the pool is
    /// not asked again for some seconds.
    pub fn note_unreadable(&self, dir: Ino, for_now: bool) {
        let mut directories = self.directories.lock();
        if directories.get(dir).is_none() {
            directories.put(dir, None);
        }
        if for_now {
            directories.refused.put(dir, Instant::now());
        }
    }

    /// Returns whether the pool just refused to tell the settings of a directory.
    pub fn is_refused(&self, dir: Ino) -> bool {
        self.directories.lock().refused.peek(&dir).is_some_and(|at| at.elapsed() < REFUSED_FOR)
    }

    /// Returns whether it is time to tell again that settings are not known.
    pub fn may_tell_unknown(&self) -> bool {
        let mut told = self.told.lock();
        let is_time = told.is_none_or(|told| told.elapsed() >= TOLD_EVERY);
        if is_time {
            *told = Some(Instant::now());
        }
        is_time
    }

    /// Returns the value that a directory had when it was last known; `None` inside: it counts as without settings.
    pub fn last_known(&self, dir: Ino) -> Option<Option<Box<[u8]>>> {
        self.directories.lock().get(dir)
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
