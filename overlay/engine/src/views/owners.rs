//! Views as owners of leases: a view holds what it shows by leases in its name.

use forebay_api::views::ViewPhase;

use super::{PREFIX, ViewRecord};
use crate::Inner;

impl Inner {
    /// Returns whether the leases in this name belong to a view.
    pub(crate) fn is_view(&self, owner: &str) -> bool {
        is_view_name(owner) && self.views.known.lock().contains_key(owner)
    }

    /// Returns whether an owner of leases is a view that is ending, or gone.
    pub(crate) fn is_view_over(&self, owner: &str) -> bool {
        let is_there = |record: &ViewRecord| record.phase != ViewPhase::Ending;
        is_view_name(owner) && !self.views.known.lock().get(owner).is_some_and(is_there)
    }
}

/// Whether a name is that of a view, which may be gone.
pub(super) fn is_view_name(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}
