//! The reasons of failed attempts to flush.

use forebay_catalog::Ino;
use parking_lot::Mutex;

/// The reasons of failed attempts, for operators, of the files that failed last.
#[derive(Debug)]
pub(crate) struct FlushErrors(Mutex<lru::LruCache<Ino, String>>);

impl Default for FlushErrors {
    fn default() -> Self {
        Self(Mutex::new(lru::LruCache::new(Self::REMEMBERED)))
    }
}

impl FlushErrors {
    const REMEMBERED: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN.saturating_add(4095);

    /// Remembers a file's error. Returns whether it differs from the one before.
    pub fn note(&self, ino: Ino, error: String) -> bool {
        let mut errors = self.0.lock();
        errors.put(ino, error.clone()).is_none_or(|before| before != error)
    }

    pub fn forget(&self, ino: Ino) {
        self.0.lock().pop(&ino);
    }

    pub fn of(&self, ino: Ino) -> Option<String> {
        self.0.lock().peek(&ino).cloned()
    }
}
