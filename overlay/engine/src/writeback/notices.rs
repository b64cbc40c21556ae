//! What other parts of the engine tell the queue of the flush.

use std::collections::HashSet;

use forebay_catalog::Intent;

use crate::{Inner, Ino};

/// Closed files that are looked at earlier than planned, at most. Any further file is looked at when its time comes.
const HASTENED: usize = 64 << 10;

/// Manual entries that are looked at one by one, at most. If there are more, all are looked at.
const DOUBTFUL: usize = 64 << 10;

/// What other parts of the engine tell the queue.
#[derive(Debug, Default)]
pub(crate) struct QueueNotices {
    /// Files that waited in the queue for the close of their last writer, which has come.
    pub hastened: HashSet<Ino>,
    /// Manual entries whose verdict may not hold any more, and files of which that is so for all entries.
    pub doubtful: HashSet<Intent>,
    /// Names moved, or directories have other settings: other rules of the policy may hold for what is below them.
    pub moved: bool,
    /// Another policy is in force.
    pub policy_changed: bool,
}

impl QueueNotices {
    /// Notes that the verdict on an entry, or on all entries of an inode, may not hold any more.
    pub(super) fn doubt(&mut self, intent: Intent) {
        match self.doubtful.len() < DOUBTFUL {
            true => _ = self.doubtful.insert(intent),
            // All of them are looked at.
            false => self.moved = true,
        }
    }

    /// Takes back what could not be done. What came meanwhile stays.
    pub(super) fn put_back(&mut self, undone: Self) {
        self.moved |= undone.moved;
        self.policy_changed |= undone.policy_changed;
        undone.doubtful.into_iter().for_each(|intent| self.doubt(intent));
        let room = HASTENED.saturating_sub(self.hastened.len());
        self.hastened.extend(undone.hastened.into_iter().take(room));
    }
}

impl Inner {
    /// Notes that the last writer closed a file that the queue holds off until then.
    pub(crate) fn hasten(&self, ino: Ino) {
        let mut calls = self.flusher.calls.lock();
        if calls.hastened.len() < HASTENED {
            calls.hastened.insert(ino);
        }
    }

    /// Notes that another policy is in force: all entries get their times anew.
    pub(crate) fn policy_changed(&self) {
        self.flusher.tell(|calls| calls.policy_changed = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_that_could_not_be_followed_are_not_lost() {
        let inos = |from: u64, to: u64| (from..to).map(Ino).collect();
        let mut notices = QueueNotices { hastened: inos(0, 3), ..QueueNotices::default() };
        notices.put_back(QueueNotices { hastened: inos(2, 5), moved: true, policy_changed: true, ..notices_of(7) });
        assert!(notices.moved && notices.policy_changed && notices.hastened == inos(0, 5));
        notices.put_back(QueueNotices::default());
        assert!(notices.moved && notices.policy_changed && notices.hastened.len() == 5);
        notices.put_back(QueueNotices { hastened: inos(0, 2 * HASTENED as u64), ..QueueNotices::default() });
        assert!(notices.hastened.len() <= HASTENED);
        assert!(notices.doubtful.contains(&Intent::Inode(Ino(7))));
    }

    fn notices_of(doubtful: u64) -> QueueNotices {
        QueueNotices { doubtful: HashSet::from([Intent::Inode(Ino(doubtful))]), ..QueueNotices::default() }
    }

    #[test]
    fn too_many_doubtful_entries_stand_for_all() {
        let mut notices = QueueNotices::default();
        (0..DOUBTFUL as u64).for_each(|ino| notices.doubt(Intent::Inode(Ino(ino))));
        assert!(!notices.moved);
        notices.put_back(notices_of(u64::MAX));
        assert!(notices.moved && notices.doubtful.len() == DOUBTFUL);
    }
}
