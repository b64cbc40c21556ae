//! The possible contents of two names: more than one only if an answer was lost.

use std::collections::BTreeSet;

/// The numbers of the contents under two names; `None` if there is no file.
pub(super) type State = [Option<u64>; 2];

#[derive(Debug, Clone)]
pub(super) struct PossibleStates {
    possible: BTreeSet<State>,
}

impl PossibleStates {
    pub(super) fn empty() -> Self {
        Self { possible: BTreeSet::from([[None, None]]) }
    }

    /// The state, if it is known.
    pub(super) fn known(&self) -> Option<State> {
        self.possible.first().copied().filter(|_| self.possible.len() == 1)
    }

    pub(super) fn allows(&self, state: State) -> bool {
        self.possible.contains(&state)
    }

    /// Records a state that an answer or a look at the names confirmed.
    pub(super) fn is(&mut self, state: State) {
        self.possible = BTreeSet::from([state]);
    }

    /// Records a change that may have happened.
    pub(super) fn may_be(&mut self, state: State) {
        self.possible.insert(state);
    }

    /// All contents that a name may have.
    pub(super) fn contents(&self, name: usize) -> BTreeSet<Option<u64>> {
        self.possible.iter().map(|state| state[name]).collect()
    }
}
