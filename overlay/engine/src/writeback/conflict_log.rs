//! What operators are told of conflicts.

use std::sync::atomic::Ordering;

use crate::Inner;

/// Conflicts that are remembered for `status`.
const REMEMBERED: usize = 1000;

impl Inner {
    pub(crate) fn report_conflict(&self, text: String) {
        tracing::warn!(conflict = text);
        self.counters.conflicts.fetch_add(1, Ordering::Relaxed);
        let mut conflicts = self.flusher.conflicts.lock();
        if conflicts.len() >= REMEMBERED {
            conflicts.remove(0);
        }
        conflicts.push(text);
        if let Err(error) = self.catalog.set_meta("conflicts", &*conflicts) {
            tracing::error!(%error, "the conflict is not in the catalog");
        }
    }
}
