//! What two names may hold: more than one thing only where an answer was lost.

use std::collections::BTreeSet;

/// The numbers of the contents under two names; `None` where there is nothing.
pub(super) type State = [Option<u64>; 2];

#[derive(Debug, Clone)]
pub(super) struct Ledger {
    possible: BTreeSet<State>,
}

impl Ledger {
    pub(super) fn empty() -> Self {
        Self { possible: BTreeSet::from([[None, None]]) }
    }

    /// What is there, if that is known.
    pub(super) fn known(&self) -> Option<State> {
        self.possible.first().copied().filter(|_| self.possible.len() == 1)
    }

    pub(super) fn allows(&self, state: State) -> bool {
        self.possible.contains(&state)
    }

    /// It was answered, or looked at.
    pub(super) fn is(&mut self, state: State) {
        self.possible = BTreeSet::from([state]);
    }

    /// It may have happened.
    pub(super) fn may_be(&mut self, state: State) {
        self.possible.insert(state);
    }

    /// All contents that may be under a name.
    pub(super) fn contents(&self, name: usize) -> BTreeSet<Option<u64>> {
        self.possible.iter().map(|state| state[name]).collect()
    }
}
