//! The renames in progress, and their progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::WorkProgress;

#[derive(Debug, Default)]
pub(crate) struct Moves(Arc<Mutex<Vec<Arc<Moving>>>>);

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
        self.0.lock().push(moving.clone());
        ShownMove { moves: Arc::clone(&self.0), moving }
    }

    pub(crate) fn under_way(&self) -> Vec<WorkProgress> {
        self.0.lock().iter().map(|moving| moving.as_it_stands()).collect()
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
}
