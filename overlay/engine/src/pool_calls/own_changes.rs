//! The daemon's own changes of the pool: whether an answer of the pool was given beside one of them, and the wait for
//! their end.

use std::time::Instant;

use forebay_backends::{Error, Side, Version};
use tokio::time::timeout;

use super::CONFIRM_WITHIN;
use crate::Inner;
use crate::node::{Node, NodeState};

/// How often a question to the pool is repeated because of the daemon's own changes.
pub(crate) const OWN_CHANGES: u32 = 16;

/// The moment at which the pool was asked. An answer counts only if none of the daemon's own calls changed the object
/// in the pool meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryStamp {
    /// Own calls that change the object or, for a directory, its names: how many had begun and ended.
    calls: (u64, u64),
    /// Own calls that move directories, and thus all paths below them: how many had begun and ended. `None`: the caller
    /// knows that the path of the question held.
    moves: Option<(u64, u64)>,
    /// Orders the answers to questions of which none ran beside an own call.
    at: Instant,
}

impl QueryStamp {
    /// Returns whether no call of the daemon was under way.
    pub fn is_quiet(self) -> bool {
        !self.is_object_changing() && self.moves.is_none_or(|(begun, ended)| begun == ended)
    }

    /// Returns the moment.
    pub fn at(self) -> Instant {
        self.at
    }

    /// Returns the stamp of an answer to an earlier question, during which no call of the daemon changed the object.
    pub fn since(self, at: Instant) -> Self {
        Self { at, ..self }
    }

    /// Returns the same moment, for an answer whose path is known to have held: moves of directories do not matter.
    pub fn of_object(self) -> Self {
        Self { moves: None, ..self }
    }

    /// Returns whether a call of the daemon was changing the object itself.
    pub fn is_object_changing(self) -> bool {
        self.calls.0 != self.calls.1
    }
}

impl Inner {
    /// Returns the present moment, for a question about an inode.
    pub fn asked(&self, state: &NodeState) -> QueryStamp {
        QueryStamp { calls: state.pool_calls, moves: Some(self.pool_calls.dir_moves()), at: Instant::now() }
    }

    /// Returns whether the answer to a question that was asked at that moment still holds for the inode.
    pub fn still_holds(&self, asked: QueryStamp, state: &NodeState) -> bool {
        let same_paths = asked.moves.is_none_or(|moves| moves == self.pool_calls.dir_moves());
        asked.is_quiet() && same_paths && asked.calls == state.pool_calls
    }

    /// Like [`Self::still_holds`], for answers that do not depend on the path to the inode's directory: a pool that gives
    /// them finds the directory by its identity.
    pub fn still_holds_of_object(&self, asked: QueryStamp, state: &NodeState) -> bool {
        !asked.is_object_changing() && asked.calls == state.pool_calls
    }

    /// Returns whether one of the daemon's own changes explains the error: a flush moved the file, or changed its
    /// version by changing names or attributes.
    pub(crate) fn is_own_change(&self, node: &Node, asked: QueryStamp, error: &Error, left: &mut u32) -> bool {
        // Another object, even of another kind, may have the old path, so the error can be of almost any kind.
        let changed = error.side() == Side::Pool && !error.is_unreachable();
        let ours = changed && *left > 0 && !self.still_holds(asked, &node.state.lock());
        *left -= u32::from(ours);
        ours
    }

    /// Waits, if the daemon is changing the pool's copy of a clean file: the pool's answer counts only afterwards. A move
    /// of a directory, which concerns all files, is not waited for: it may take long.
    pub(crate) async fn await_own_change(&self, node: &Node) {
        if self.asked(&node.state.lock()).is_object_changing() {
            // If it takes longer, the caller goes on with what is known.
            let _ = timeout(CONFIRM_WITHIN, node.flush.lock()).await;
        }
    }

    /// Returns what is known of a file when its bytes are requested: for [`Inner::ask_again`].
    pub fn known(&self, node: &Node) -> (QueryStamp, Option<Version>) {
        let state = node.state.lock();
        (self.asked(&state), state.record.version.clone())
    }

    /// Waits until the daemon's own changes of a file have ended and their results are known.
    pub(crate) async fn own_change(&self, node: &Node) {
        self.pool_calls.paths.until_moved().await;
        drop(node.flush.lock().await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_was_asked_for_during_an_own_call_does_not_count() {
        let stamp = |calls, moves| QueryStamp { calls, moves, at: Instant::now() };
        for (calls, moves, changing, quiet) in [
            ((2, 2), Some((1, 1)), false, true),
            ((2, 1), Some((1, 1)), true, false),
            ((2, 2), Some((2, 1)), false, false),
            ((2, 2), None, false, true),
            ((2, 1), None, true, false),
        ] {
            let asked = stamp(calls, moves);
            assert_eq!((asked.is_object_changing(), asked.is_quiet()), (changing, quiet), "{asked:?}");
            assert!(asked.of_object().is_object_changing() == changing && asked.of_object().is_quiet() != changing);
        }
    }
}
