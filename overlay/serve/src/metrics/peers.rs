//! The other nodes of a cluster.

use std::fmt;

use forebay_api::peers::{PeerState, PeersStatus};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::exposition::Exposition;

/// Exports what a node knows of its peers. A node without a peers file exports no sample with a label.
pub struct PeerMetrics<F>(F);

impl<F: Fn() -> Option<PeersStatus> + Send + Sync + 'static> PeerMetrics<F> {
    /// `status` returns what is known at the present moment.
    pub fn new(status: F) -> Self {
        Self(status)
    }
}

impl<F> fmt::Debug for PeerMetrics<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerMetrics")
    }
}

impl<F: Fn() -> Option<PeersStatus> + Send + Sync + 'static> Collector for PeerMetrics<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = (self.0)();
        let mut out = Exposition(encoder);
        let given = status.as_ref().map_or(0, |status| status.given_bytes);
        out.counter("peer_given_bytes", "Content bytes that this node gave to other nodes", given)?;
        let count = |state| {
            let members = status.iter().flat_map(|status| &status.members);
            members.filter(|member| member.state == state).count() as f64
        };
        let states = [("trusted", PeerState::Trusted), ("suspected", PeerState::Suspected)];
        let known = states.into_iter().filter(|_| status.is_some());
        out.gauges(
            "peer_members",
            "Other members of the cluster: those that are asked, and those that failed a short while ago",
            known.map(|(name, state)| ([("state", name)], count(state))),
        )?;
        let told = status.iter().flat_map(|s| [("told", s.announced), ("lost", s.announcements_lost)]);
        out.counters(
            "peer_announcements",
            "Changes of the pool by this node, for each other node: those that it was told, and those that it was not",
            told.map(|(outcome, count)| ([("outcome", outcome)], count)),
        )?;
        let reasons = status.iter().flat_map(|status| &status.passed_over);
        out.counters(
            "peer_passed_over",
            "Requests for which a member was passed over, by reason",
            reasons.map(|(reason, count)| ([("reason", reason.as_str())], *count)),
        )
    }
}
