//! Where fetched content goes: its tier, and the space for it.

use std::sync::Arc;

use forebay_backends::{Error, ErrorKind, Result, Side};
use forebay_cache::SpaceReservation;

use crate::node::Node;
use crate::{Inner, blocking};

impl Inner {
    /// Reserves space for bytes that are fetched into a file. Makes room in its tier, too.
    ///
    /// # Errors
    /// `NoSpace` with the numbers.
    pub(crate) async fn reserve_for_fetch(self: &Arc<Self>, node: &Node, bytes: u64) -> Result<SpaceReservation> {
        let mut space = SpaceReservation::from(self.reserve_fetched(bytes).await?);
        if !self.store.has_tiers() {
            return Ok(space);
        }
        let content = node.state.lock().record.file.content();
        let tier = content.and_then(|id| self.store.tier_of(id)).unwrap_or_else(|| self.tier_for_fetch(node, bytes));
        let budget = self.store.tiers()[tier].budget.clone();
        space.in_tier = budget.reserve(bytes);
        if space.in_tier.is_some() {
            return Ok(space);
        }
        let inner = self.clone();
        space.in_tier = blocking(move || {
            inner.make_room_in(tier, bytes)?;
            inner.trash.drain();
            Ok(inner.store.tiers()[tier].budget.reserve(bytes))
        })
        .await?;
        if space.in_tier.is_none() {
            self.flusher.bell.notify_one();
            let name = &self.store.tiers()[tier].name;
            let what = format!(
                "{bytes} bytes do not fit into tier {name}: {} of {} are used, and nothing more may be evicted",
                budget.used(),
                budget.limit()
            );
            return Err(Error::new(ErrorKind::NoSpace, Side::Cache, what));
        }
        Ok(space)
    }

    /// Returns the tier for new content that is fetched: the one that a rule names, if it survives a reboot and works,
    /// else the slowest one.
    pub(crate) fn tier_for_fetch(&self, node: &Node, bytes: u64) -> usize {
        let by_rule = || {
            let policy = self.policy_of(node);
            let name = policy.tier.as_deref()?;
            let tier = self.store.tiers().iter().position(|tier| tier.name == name && !tier.is_volatile)?;
            self.store.takes_content(tier).then_some(tier)
        };
        let by_rule = if self.store.has_tiers() { by_rule() } else { None };
        by_rule.unwrap_or_else(|| self.store.tier_for_fetches(bytes))
    }
}
