//! The reasons of failed attempts to flush.

use forebay_backends::Error;
use forebay_catalog::Ino;
use parking_lot::Mutex;

/// The reasons of failed attempts, for operators, of the files that failed last.
#[derive(Debug)]
pub(crate) struct FlushErrors(Mutex<lru::LruCache<Ino, FlushFailure>>);

#[derive(Debug, PartialEq, Eq)]
struct FlushFailure {
    why: String,
    /// The pool did not answer: the next attempt may succeed.
    is_unreachable: bool,
}

impl Default for FlushErrors {
    fn default() -> Self {
        Self(Mutex::new(lru::LruCache::new(Self::REMEMBERED)))
    }
}

impl FlushErrors {
    const REMEMBERED: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN.saturating_add(4095);

    /// Remembers a file's error. Returns whether it differs from the one before.
    pub fn note(&self, ino: Ino, error: &Error) -> bool {
        let failure = || FlushFailure { why: error.to_string(), is_unreachable: error.is_unreachable() };
        self.0.lock().put(ino, failure()).is_none_or(|before| before != failure())
    }

    pub fn forget(&self, ino: Ino) {
        self.0.lock().pop(&ino);
    }

    pub fn of(&self, ino: Ino) -> Option<String> {
        self.0.lock().peek(&ino).map(|failure| failure.why.clone())
    }

    /// Returns whether a file failed for a reason of its own: it is not expected that the next attempt succeeds.
    pub fn holds_back(&self, ino: Ino) -> bool {
        self.0.lock().peek(&ino).is_some_and(|failure| !failure.is_unreachable)
    }
}

#[cfg(test)]
mod tests {
    use forebay_backends::{ErrorKind, Side};

    use super::*;

    #[test]
    fn a_file_is_held_back_by_a_refusal_and_not_by_a_pool_that_is_away() {
        let (errors, ino) = (FlushErrors::default(), Ino(7));
        assert!(!errors.holds_back(ino));
        let failed = |kind| Error::new(kind, Side::Pool, "put /f");
        assert!(errors.note(ino, &failed(ErrorKind::Unavailable)));
        assert!(!errors.note(ino, &failed(ErrorKind::Unavailable)), "it is no news");
        assert!(!errors.holds_back(ino) && errors.of(ino).is_some());
        assert!(errors.note(ino, &failed(ErrorKind::PermissionDenied)));
        assert!(errors.holds_back(ino));
        errors.forget(ino);
        assert!(!errors.holds_back(ino) && errors.of(ino).is_none());
    }
}
