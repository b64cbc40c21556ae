//! How long the kernel may cache an answer.
//!
//! The state in an answer may have been confirmed a while ago, so the kernel gets the rest of `metadata-ttl`. Otherwise
//! names would lag by the age of the state and the whole `metadata-ttl` together.

use std::time::{Duration, Instant};

use super::{Inner, Ino};
use crate::node::Node;
use forebay_catalog::ListingState;
use forebay_policy::Consistency;

/// State that could not be confirmed, because the pool does not answer, is revalidated after this time.
const UNCONFIRMED: Duration = Duration::from_secs(1);
/// For what lies above a mounted view: longer than any view lasts.
const WHILE_PINNED: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Returns the rest of `ttl` for state that was confirmed at that moment.
fn left(ttl: Duration, confirmed: Option<Instant>) -> Duration {
    let left = confirmed.map_or(Duration::ZERO, |at| ttl.saturating_sub(at.elapsed()));
    if left.is_zero() { ttl.min(UNCONFIRMED) } else { left }
}

impl Inner {
    /// Returns the time for a name of an inode, and for its attributes.
    pub(super) fn ttl_of(&self, node: &Node) -> Duration {
        if self.is_pinned(node.ino) {
            return WHILE_PINNED;
        }
        let policy = self.policy_of(node);
        let ttl = policy.metadata_ttl;
        let (confirmed, dir) = {
            let state = node.state.lock();
            if !state.bypass.is_none() {
                // Its size and times change without a request: by writes past the daemon, and by stores through
                // mappings.
                return Duration::ZERO;
            }
            let ours = !state.record.in_pool() && node.ino != Ino::ROOT || state.record.file.is_dirty();
            if ours || policy.consistency == Consistency::Immutable {
                return ttl;
            }
            let listed = state.record.links.first().filter(|link| state.record.pool_links.contains(link));
            (state.validated, listed.map(|(dir, _)| *dir))
        };
        let dir = dir.and_then(|dir| self.table.peek(dir));
        let listed = dir.and_then(|dir| dir.state.lock().names.listed_at);
        left(ttl, confirmed.max(listed))
    }

    /// Returns the time for the absence of a name.
    pub(super) fn ttl_of_absence(&self, dir: &Node, name: &[u8]) -> Duration {
        let policy = self.policy_of(dir);
        let ttl = policy.metadata_ttl;
        let state = dir.state.lock();
        let ours = !state.record.in_pool() && dir.ino != Ino::ROOT;
        if ours || policy.consistency == Consistency::Immutable {
            return ttl;
        }
        let mut confirmed = state.names.negative.get(name).copied();
        if matches!(state.record.listing, ListingState::Complete(_)) {
            confirmed = confirmed.max(state.names.listed_at);
            // The directory's version also confirms its names.
            if state.record.listing == ListingState::Complete(state.record.version.clone()) {
                confirmed = confirmed.max(state.validated);
            }
        }
        left(ttl, confirmed)
    }
}
