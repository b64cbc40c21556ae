//! Group commit: one of several callers that wait at the same time syncs for all of them.
//!
//! A caller asks, then takes the lock that holds [`ServedTurns`], and looks whether another caller has served it
//! meanwhile. If not, it syncs, for all callers that have asked by then. The lock belongs to the users of this module: a
//! thread waits for one kind of lock, a task for another.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the callers that asked.
#[derive(Debug, Default)]
pub struct GroupCommit {
    asked: AtomicU64,
}

/// How many of the callers that asked were served. The lock holds it.
#[derive(Debug, Default)]
pub struct ServedTurns(u64);

/// The place of one caller among those that asked.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Turn(u64);

/// The callers that asked before a sync began: it serves them.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Waiting(u64);

impl GroupCommit {
    /// Before the caller waits for the lock. What it changed before this call is in the sync that serves it.
    pub fn ask(&self) -> Turn {
        Turn(self.asked.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// Under the lock: returns `None` if another caller has served this one. Otherwise this one syncs, and then calls
    /// [`ServedTurns::serve`] if the sync succeeded.
    pub fn begin(&self, turn: Turn, served: &ServedTurns) -> Option<Waiting> {
        (served.0 < turn.0).then(|| self.waiting())
    }

    /// Returns all callers that have asked by now.
    pub fn waiting(&self) -> Waiting {
        Waiting(self.asked.load(Ordering::SeqCst))
    }
}

impl ServedTurns {
    pub fn serve(&mut self, waiting: Waiting) {
        self.0 = waiting.0;
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn a_sync_serves_the_callers_before_it_and_a_failed_one_serves_none() {
        let (commit, mut served) = (GroupCommit::default(), ServedTurns::default());
        let (first, second) = (commit.ask(), commit.ask());
        let waiting = commit.begin(first, &served).unwrap();
        let late = commit.ask();
        served.serve(waiting);
        assert!(commit.begin(first, &served).is_none() && commit.begin(second, &served).is_none());
        // This one failed.
        let _ = commit.begin(late, &served).unwrap();
        assert!(commit.begin(late, &served).is_some());
    }

    #[test]
    fn what_a_caller_wrote_is_in_the_sync_that_served_it() {
        let commit = GroupCommit::default();
        let (written, synced) = (AtomicU64::new(0), Mutex::new((ServedTurns::default(), 0)));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let mine = written.fetch_add(1, Ordering::SeqCst) + 1;
                        let turn = commit.ask();
                        let mut state = synced.lock();
                        if let Some(waiting) = commit.begin(turn, &state.0) {
                            state.1 = written.load(Ordering::SeqCst);
                            state.0.serve(waiting);
                        }
                        assert!(state.1 >= mine, "served before it was synced");
                    }
                });
            }
        });
    }
}
