//! The renames in progress, their progress, and the directories that they leave in doubt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::WorkProgress;

#[derive(Debug, Default)]
pub(crate) struct Moves {
    shown: Arc<Mutex<Vec<Arc<Moving>>>>,
    open: Arc<Mutex<Vec<Arc<MovingDirectory>>>>,
}

/// The prefixes of a directory whose rename has begun and is not finished.
#[derive(Debug)]
struct MovingDirectory {
    from: String,
    to: String,
    /// The last failure.
    failure: Mutex<Option<String>>,
}

/// The rename of a directory is unfinished as long as this lives.
#[derive(Debug)]
pub(crate) struct OpenMove {
    all: Arc<Mutex<Vec<Arc<MovingDirectory>>>>,
    this: Arc<MovingDirectory>,
}

impl OpenMove {
    /// Notes why it could not be finished.
    pub(crate) fn failed(&self, why: String) {
        *self.this.failure.lock() = Some(why);
    }
}

impl Drop for OpenMove {
    fn drop(&mut self) {
        self.all.lock().retain(|open| !Arc::ptr_eq(open, &self.this));
    }
}

/// One rename: keys are copied, then the sources are removed.
#[derive(Debug)]
struct Moving {
    what: String,
    copied: AtomicU64,
    removed: AtomicU64,
    all_copied: AtomicBool,
}

/// The rename is shown as long as this lives.
#[derive(Debug)]
pub(crate) struct ShownMove {
    moves: Arc<Mutex<Vec<Arc<Moving>>>>,
    moving: Arc<Moving>,
}

impl Moves {
    pub(crate) fn begin(&self, from: &str, to: &str) -> ShownMove {
        let what = format!("rename of {from} to {to}");
        let (copied, removed, all_copied) = Default::default();
        let moving = Arc::new(Moving { what, copied, removed, all_copied });
        self.shown.lock().push(moving.clone());
        ShownMove { moves: Arc::clone(&self.shown), moving }
    }

    /// Begins the rename of a directory. Both prefixes end with a slash.
    pub(crate) fn open(&self, from: &str, to: &str) -> OpenMove {
        let this = MovingDirectory { from: from.to_owned(), to: to.to_owned(), failure: Mutex::new(None) };
        let this = Arc::new(this);
        self.open.lock().push(Arc::clone(&this));
        OpenMove { all: Arc::clone(&self.open), this }
    }

    /// Whether a directory is being renamed to this prefix; says so, and why the last try failed.
    pub(crate) fn open_to(&self, directory: &str) -> Option<String> {
        self.find_open(|open| open.to == directory)
    }

    /// Whether a directory is being renamed from or to this prefix.
    pub(crate) fn open_at(&self, directory: &str) -> Option<String> {
        self.find_open(|open| open.from == directory || open.to == directory)
    }

    fn find_open(&self, is_it: impl Fn(&MovingDirectory) -> bool) -> Option<String> {
        let all = self.open.lock();
        let open = all.iter().find(|open| is_it(open))?;
        let said = format!("the rename of {} to {} is not finished", open.from, open.to);
        Some(match &*open.failure.lock() {
            Some(failure) => format!("{said}: {failure}"),
            None => said,
        })
    }

    pub(crate) fn under_way(&self) -> Vec<WorkProgress> {
        self.shown.lock().iter().map(|moving| moving.as_it_stands()).collect()
    }
}

impl Moving {
    fn as_it_stands(&self) -> WorkProgress {
        let copied = self.copied.load(Ordering::Relaxed);
        match self.all_copied.load(Ordering::Relaxed) {
            false => WorkProgress { what: format!("{}, objects copied", self.what), done: copied, of: None },
            true => WorkProgress {
                what: format!("{}, objects removed at the source", self.what),
                done: self.removed.load(Ordering::Relaxed),
                of: Some(copied),
            },
        }
    }
}

impl ShownMove {
    pub(crate) fn copied(&self) {
        self.moving.copied.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn all_copied(&self) {
        self.moving.all_copied.store(true, Ordering::Relaxed);
    }

    pub(crate) fn removed(&self) {
        self.moving.removed.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for ShownMove {
    fn drop(&mut self) {
        self.moves.lock().retain(|moving| !Arc::ptr_eq(moving, &self.moving));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renames_are_shown_while_they_last() {
        let moves = Moves::default();
        assert_eq!(moves.under_way(), []);
        let (first, second) = (moves.begin("a/", "b/"), moves.begin("c/", "d/"));
        (0..3).for_each(|_| first.copied());
        assert_eq!(
            moves.under_way()[0],
            WorkProgress { what: "rename of a/ to b/, objects copied".into(), done: 3, of: None }
        );
        first.all_copied();
        first.removed();
        let what = "rename of a/ to b/, objects removed at the source".into();
        assert_eq!(moves.under_way()[0], WorkProgress { what, done: 1, of: Some(3) });
        drop(first);
        assert_eq!(moves.under_way().len(), 1);
        drop(second);
        assert_eq!(moves.under_way(), []);
    }

    #[test]
    fn a_directory_is_in_doubt_until_its_rename_is_finished() {
        let moves = Moves::default();
        let open = moves.open("a/", "b/");
        assert_eq!(moves.open_to("b/").unwrap(), "the rename of a/ to b/ is not finished");
        open.failed("503".into());
        assert_eq!(moves.open_at("a/").unwrap(), "the rename of a/ to b/ is not finished: 503");
        assert_eq!((moves.open_to("a/"), moves.open_at("b/c/")), (None, None));
        drop(open);
        assert_eq!(moves.open_at("b/"), None);
    }
}
