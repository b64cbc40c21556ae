//! Paths in the pool that steps of the write-back rely on, and directories that steps move there.
//!
//! A step names the inodes whose paths it uses, with all directories above them. A step that moves a directory waits for
//! the earlier steps that use a path through it, and a later step that uses such a path waits for the move. No step waits
//! for a later one, so each gets its turn; a long upload delays only the moves of directories above its file.
//!
//! A step may wait for its turn and for flush locks while the directories above change. So once it has both, it compares
//! the directories above with those that it named, and begins again if there are others.

use std::collections::{BTreeMap, HashSet};
use std::pin::pin;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{MutexGuard, Notify};

use crate::node::Node;
use crate::{Inner, Ino};

/// The steps that use paths of the pool.
#[derive(Debug, Default)]
pub(crate) struct PathUses {
    steps: Mutex<PathSteps>,
    /// Notified when a step ends.
    ended: Notify,
}

#[derive(Debug, Default)]
struct PathSteps {
    next: u64,
    /// In the order in which they came.
    by_number: BTreeMap<u64, PathStep>,
}

#[derive(Debug)]
struct PathStep {
    used: Arc<HashSet<Ino>>,
    moved: Option<Ino>,
    /// It no longer waits for earlier steps.
    runs: bool,
}

/// The turn of a step. It ends when this is dropped.
struct PathTurn<'a> {
    uses: &'a PathUses,
    number: u64,
    used: Arc<HashSet<Ino>>,
}

/// The locks of a step: while this lives, no step of this daemon moves a directory above the inodes that the step named,
/// and no other step changes the pool's copies of the inodes that it locked.
pub(crate) struct PathLocks<'a> {
    _flush: Vec<MutexGuard<'a, ()>>,
    _turn: PathTurn<'a>,
}

impl PathStep {
    fn excludes(&self, other: &Self) -> bool {
        let moves_path_of = |a: &Self, b: &Self| a.moved.is_some_and(|moved| b.used.contains(&moved));
        moves_path_of(self, other) || moves_path_of(other, self)
    }
}

impl PathUses {
    /// Waits until no earlier step moves one of the used inodes, or uses the moved one.
    async fn begin(&self, used: HashSet<Ino>, moved: Option<Ino>) -> PathTurn<'_> {
        let used = Arc::new(used);
        let turn = {
            let mut steps = self.steps.lock();
            let number = steps.next;
            steps.next += 1;
            steps.by_number.insert(number, PathStep { used: used.clone(), moved, runs: false });
            PathTurn { uses: self, number, used }
        };
        loop {
            let mut ended = pin!(self.ended.notified());
            // A step that ends from now on is noticed.
            ended.as_mut().enable();
            if self.may_run(turn.number) {
                return turn;
            }
            ended.await;
        }
    }

    fn may_run(&self, number: u64) -> bool {
        let mut steps = self.steps.lock();
        let waits = steps
            .by_number
            .get(&number)
            .is_some_and(|step| steps.by_number.range(..number).any(|(_, earlier)| earlier.excludes(step)));
        if let (false, Some(step)) = (waits, steps.by_number.get_mut(&number)) {
            step.runs = true;
        }
        !waits
    }

    /// Waits until the moves of directories that run now have ended, and not for those that still wait for their turn.
    pub async fn until_moved(&self) {
        let running = |step: &PathStep| step.runs && step.moved.is_some();
        let moves: Vec<u64> = {
            let steps = self.steps.lock();
            steps.by_number.iter().filter(|(_, step)| running(step)).map(|(number, _)| *number).collect()
        };
        loop {
            let mut ended = pin!(self.ended.notified());
            ended.as_mut().enable();
            let is_over = {
                let steps = self.steps.lock();
                moves.iter().all(|number| !steps.by_number.contains_key(number))
            };
            if is_over {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for PathTurn<'_> {
    fn drop(&mut self) {
        self.uses.steps.lock().by_number.remove(&self.number);
        self.uses.ended.notify_waiters();
    }
}

impl Inner {
    /// Locks the pool's copy of an inode, under the path that it has there.
    pub(crate) async fn hold_path<'a>(&'a self, node: &'a Node) -> PathLocks<'a> {
        self.hold_paths(&[node], &[], None).await
    }

    /// Locks the pool's copies of several inodes, which are in the order of their numbers, and keeps the paths of these
    /// and of `dirs`. `moved`: the directory that the caller moves, one of the locked inodes. The caller holds no lock of
    /// the flusher.
    pub(crate) async fn hold_paths<'a>(
        &'a self,
        nodes: &[&'a Node],
        dirs: &[Ino],
        moved: Option<Ino>,
    ) -> PathLocks<'a> {
        let used = || {
            let mut used = HashSet::new();
            for ino in nodes.iter().map(|node| node.ino).chain(dirs.iter().copied()) {
                used.insert(ino);
                self.visit_above_in_pool(ino, |above, _| {
                    used.insert(above);
                    true
                });
            }
            used
        };
        loop {
            let turn = self.pool_calls.paths.begin(used(), moved).await;
            let mut flush = Vec::with_capacity(nodes.len());
            for node in nodes {
                flush.push(node.flush.lock().await);
            }
            if used().is_subset(&turn.used) {
                return PathLocks { _flush: flush, _turn: turn };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn inos(numbers: &[u64]) -> HashSet<Ino> {
        numbers.iter().copied().map(Ino).collect()
    }

    #[tokio::test]
    async fn a_move_waits_for_the_steps_below_the_directory_alone() {
        let uses = PathUses::default();
        let below = uses.begin(inos(&[2, 20]), None).await;
        let beside = uses.begin(inos(&[3, 30]), None).await;
        let mut waits = Box::pin(uses.begin(inos(&[2]), Some(Ino(2))));
        assert!(waits.as_mut().now_or_never().is_none(), "a step uses a path below it");
        assert!(uses.begin(inos(&[4]), Some(Ino(4))).now_or_never().is_some(), "a move of another directory");
        assert!(uses.begin(inos(&[3, 31]), None).now_or_never().is_some(), "a step in another directory");
        assert!(uses.until_moved().now_or_never().is_some(), "the move does not run yet");
        // Later steps below the directory do not overtake the move.
        let mut later = Box::pin(uses.begin(inos(&[2, 21]), None));
        assert!(later.as_mut().now_or_never().is_none());
        drop(beside);
        assert!(waits.as_mut().now_or_never().is_none());
        drop(below);
        let moves = waits.await;
        assert!(later.as_mut().now_or_never().is_none() && uses.until_moved().now_or_never().is_none());
        drop(moves);
        later.await;
        assert!(uses.steps.lock().by_number.is_empty() && uses.until_moved().now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_step_that_is_given_up_while_it_waits_delays_no_other() {
        let uses = PathUses::default();
        let below = uses.begin(inos(&[2, 20]), None).await;
        let mut waits = Box::pin(uses.begin(inos(&[2]), Some(Ino(2))));
        assert!(waits.as_mut().now_or_never().is_none());
        let mut later = Box::pin(uses.begin(inos(&[2, 21]), None));
        assert!(later.as_mut().now_or_never().is_none());
        drop(waits);
        assert!(later.as_mut().now_or_never().is_some());
        drop(below);
        assert!(uses.steps.lock().by_number.len() <= 1);
    }

    #[tokio::test]
    async fn a_move_into_a_directory_that_moves_waits() {
        let uses = PathUses::default();
        let first = uses.begin(inos(&[2]), Some(Ino(2))).await;
        let mut second = Box::pin(uses.begin(inos(&[2, 3]), Some(Ino(3))));
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        second.await;
    }
}
