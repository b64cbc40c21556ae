//! How long the kernel may keep what it is told.
//!
//! What is told may have been confirmed a while ago: of `metadata-ttl` the kernel is given what is left of it. Otherwise
//! names would lag by both times together.

use std::time::{Duration, Instant};

use super::{Inner, Ino};
use crate::node::Node;
use forebay_catalog::Listing;
use forebay_policy::Consistency;

/// What could not be confirmed in time, as the pool does not answer, is asked about again after this time.
const UNCONFIRMED: Duration = Duration::from_secs(1);

/// What is left of `ttl` for what was confirmed at that moment.
fn left(ttl: Duration, confirmed: Option<Instant>) -> Duration {
    let left = confirmed.map_or(Duration::ZERO, |at| ttl.saturating_sub(at.elapsed()));
    if left.is_zero() { ttl.min(UNCONFIRMED) } else { left }
}

impl Inner {
    /// For a name of an inode, and for its attributes.
    pub(super) fn ttl_of(&self, node: &Node) -> Duration {
        let policy = self.policy_of(node);
        let ttl = policy.metadata_ttl;
        let (confirmed, dir) = {
            let state = node.state.lock();
            if state.written_past.is_some() {
                // Its size and times move without a request: by writes past the daemon, and by stores through mappings.
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
        let listed = dir.and_then(|dir| dir.state.lock().listed_at);
        left(ttl, confirmed.max(listed))
    }

    /// For that a name does not exist.
    pub(super) fn ttl_of_absence(&self, dir: &Node, name: &[u8]) -> Duration {
        let policy = self.policy_of(dir);
        let ttl = policy.metadata_ttl;
        let state = dir.state.lock();
        let ours = !state.record.in_pool() && dir.ino != Ino::ROOT;
        if ours || policy.consistency == Consistency::Immutable {
            return ttl;
        }
        let mut confirmed = state.negative.get(name).copied();
        if matches!(state.record.listing, Listing::Complete(_)) {
            confirmed = confirmed.max(state.listed_at);
            // Its version tells of its names.
            if state.record.listing == Listing::Complete(state.record.version.clone()) {
                confirmed = confirmed.max(state.validated);
            }
        }
        left(ttl, confirmed)
    }
}
