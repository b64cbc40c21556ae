//! Changes of names whose callers gave up before they ended.
//!
//! A call that waits for a server cannot be taken back: it may be carried out later. Until it has ended, a look at its
//! names does not tell what will be there, so a pool does not answer such a look.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::PoolPath;

/// The names that abandoned changes of one pool may still change, each with the number of these changes.
#[derive(Debug, Default)]
pub(crate) struct AbandonedChanges(Mutex<HashMap<PoolPath, usize>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeStage {
    Wanted,
    Abandoned,
    Ended,
}

#[derive(Debug)]
struct NamesChange {
    pool: Arc<AbandonedChanges>,
    names: Vec<PoolPath>,
    stage: Mutex<ChangeStage>,
}

/// Held while the caller waits for a change.
#[derive(Debug)]
pub(crate) struct ChangeCaller(Arc<NamesChange>);

/// Held by the work of a change until it has ended.
#[derive(Debug)]
pub(crate) struct ChangeWork(Arc<NamesChange>);

impl AbandonedChanges {
    /// Begins a change of these names.
    pub(crate) fn begin(self: &Arc<Self>, names: Vec<PoolPath>) -> (ChangeCaller, ChangeWork) {
        let change = NamesChange { pool: self.clone(), names, stage: Mutex::new(ChangeStage::Wanted) };
        let change = Arc::new(change);
        (ChangeCaller(change.clone()), ChangeWork(change))
    }

    /// Whether an abandoned change may still change this name.
    pub(crate) fn may_change(&self, name: &PoolPath) -> bool {
        self.0.lock().contains_key(name)
    }
}

impl ChangeWork {
    /// Whether the caller gave up. Then the work is not to do what it has not done yet.
    pub(crate) fn is_abandoned(&self) -> bool {
        *self.0.stage.lock() == ChangeStage::Abandoned
    }
}

impl Drop for ChangeCaller {
    fn drop(&mut self) {
        let mut stage = self.0.stage.lock();
        if *stage == ChangeStage::Wanted {
            *stage = ChangeStage::Abandoned;
            let mut names = self.0.pool.0.lock();
            self.0.names.iter().for_each(|name| *names.entry(name.clone()).or_default() += 1);
        }
    }
}

impl Drop for ChangeWork {
    fn drop(&mut self) {
        let mut stage = self.0.stage.lock();
        if std::mem::replace(&mut *stage, ChangeStage::Ended) != ChangeStage::Abandoned {
            return;
        }
        let mut names = self.0.pool.0.lock();
        for name in &self.0.names {
            if let Some(changes) = names.get_mut(name) {
                *changes -= 1;
                if *changes == 0 {
                    names.remove(name);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_unsure_from_the_end_of_the_wait_to_the_end_of_the_work() {
        let changes = Arc::new(AbandonedChanges::default());
        let name = PoolPath::root().join(b"a");
        let (first, work) = changes.begin(vec![name.clone()]);
        let (second, other) = changes.begin(vec![name.clone()]);
        assert!(!changes.may_change(&name) && !work.is_abandoned());
        drop((first, second));
        assert!(changes.may_change(&name) && work.is_abandoned());
        drop(work);
        assert!(changes.may_change(&name), "another change is under way");
        drop(other);
        assert!(!changes.may_change(&name));
    }

    #[test]
    fn a_change_that_ended_in_time_leaves_nothing() {
        let changes = Arc::new(AbandonedChanges::default());
        let name = PoolPath::root().join(b"a");
        let (caller, work) = changes.begin(vec![name.clone()]);
        drop(work);
        drop(caller);
        assert!(!changes.may_change(&name));
    }
}
