//! Content files that are made ahead of need: making one is the longest step of a create, and another processor can do
//! it meanwhile.
//!
//! No record names a spare content file. Those that a killed daemon leaves are removed by the sweep of orphans after
//! the next start.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_backends::{Error, Result, Side};
use parking_lot::Mutex;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW};

use forebay_system::descriptors::for_spares;

use crate::{Content, ContentId, ContentStore};

/// Gives out the numbers of content files, each once.
pub trait ContentNumbers: Send + Sync {
    fn new_content(&self) -> Result<ContentId>;
}

pub struct PreallocatedFiles {
    store: Arc<ContentStore>,
    numbers: Arc<dyn ContentNumbers>,
    ready: Mutex<VecDeque<Arc<Content>>>,
    refilling: AtomicBool,
    /// Held while files are made. `true`: no more are made.
    closed: Mutex<bool>,
}

impl PreallocatedFiles {
    pub fn new(store: Arc<ContentStore>, numbers: Arc<dyn ContentNumbers>) -> Arc<Self> {
        let (ready, closed) = Default::default();
        Arc::new(Self { store, numbers, ready, refilling: AtomicBool::new(false), closed })
    }

    /// Returns a content file for content that is about to be written. It looks newly created. Within a runtime, makes
    /// more in the background.
    ///
    /// # Errors
    /// The errors of the fast pool.
    pub fn take(self: &Arc<Self>) -> Result<Arc<Content>> {
        // With several devices, the one with the most free space must be determined each time.
        if self.store.devices().len() > 1 {
            return self.make(self.store.tier_for_writes());
        }
        self.take_spare()
    }

    /// The same on a tier.
    pub fn take_on(self: &Arc<Self>, tier: usize) -> Result<Arc<Content>> {
        if self.store.devices().len() > 1 {
            return self.make(tier);
        }
        self.take_spare()
    }

    fn take_spare(self: &Arc<Self>) -> Result<Arc<Content>> {
        let (taken, left) = {
            let mut ready = self.ready.lock();
            (ready.pop_front(), ready.len())
        };
        if left <= for_spares() / 4 * 3
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
            && !self.refilling.swap(true, Ordering::AcqRel)
        {
            let preallocated = Arc::clone(self);
            runtime.spawn_blocking(move || preallocated.refill());
        }
        let Some(content) = taken else { return self.make(0) };
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        rustix::fs::futimens(&content.file, &Timestamps { last_access: now, last_modification: now })
            .map_err(|e| Error::os(e.raw_os_error(), Side::Cache, "set the times of a content file"))?;
        Ok(content)
    }

    /// Makes a content file on a tier; on another one if no device of that tier works.
    fn make(&self, tier: usize) -> Result<Arc<Content>> {
        loop {
            let id = self.store.place(self.numbers.new_content()?, tier);
            match self.store.create(id) {
                // The failure takes the device out of the choice.
                Err(error) if self.store.takes_content_elsewhere(id, &error) => {}
                made => return made,
            }
        }
    }

    fn refill(&self) {
        while self.ready.lock().len() < for_spares() {
            let closed = self.closed.lock();
            if *closed {
                break;
            }
            match self.make(0) {
                Ok(content) => self.ready.lock().push_back(content),
                Err(error) => {
                    // A caller that needs a content file gets this error from its own attempt.
                    tracing::debug!(%error, "no spare content files");
                    break;
                }
            }
        }
        self.refilling.store(false, Ordering::Release);
    }

    /// Removes all untaken files, and makes no more.
    pub fn close(&self) {
        *self.closed.lock() = true;
        for content in self.ready.lock().drain(..) {
            if let Err(error) = self.store.remove(ContentId(content.id)) {
                tracing::debug!(%error, "a spare content file is left to the sweep after the next start");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::AtomicU64;
    use std::time::{Duration, SystemTime};

    use super::*;

    #[derive(Default)]
    struct Counter(AtomicU64);

    impl ContentNumbers for Counter {
        fn new_content(&self) -> Result<ContentId> {
            Ok(ContentId(self.0.fetch_add(1, Ordering::Relaxed)))
        }
    }

    fn preallocated(dir: &std::path::Path) -> Arc<PreallocatedFiles> {
        let store = Arc::new(ContentStore::open(&[dir.to_owned()], Some(1 << 20)).unwrap());
        PreallocatedFiles::new(store, Arc::new(Counter::default()))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_is_given_once_and_is_as_new() {
        let dir = tempfile::tempdir().unwrap();
        let preallocated = preallocated(dir.path());
        let mut given = std::collections::HashSet::new();
        for _ in 0..3 * for_spares() {
            let begun = SystemTime::now();
            let content = preallocated.take().unwrap();
            let meta = content.file.metadata().unwrap();
            assert!(given.insert(content.id), "{:x} twice", content.id);
            assert_eq!((meta.size(), meta.nlink()), (0, 1));
            // File systems count time in ticks.
            assert!(meta.modified().unwrap() + Duration::from_millis(20) >= begun);
            assert!(preallocated.ready.lock().len() <= for_spares());
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn unused_spares_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let preallocated = preallocated(dir.path());
        let taken = preallocated.take().unwrap();
        while preallocated.refilling.load(Ordering::Acquire) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let count = || {
            let mut ids = Vec::new();
            let mut add = |id: ContentId, _| {
                ids.push(id.0);
                Ok(())
            };
            preallocated.store.walk(&mut add).unwrap();
            ids
        };
        assert_eq!(count().len(), for_spares() + 1);
        preallocated.close();
        assert_eq!(count(), [taken.id]);
    }
}
