//! A policy is put into force, its effect is foretold, and its decisions are explained.

use forebay_api::policy::{ExplainedSetting, PolicyEffect, PolicyExplanation};
use forebay_backends::{FileKind, PoolPath, Result};
use forebay_catalog::Intent;
use forebay_policy::{FlushPolicy, PathPolicy, Policy, Read, SettingName, TakesEffect, Verdict, Write};

use crate::node::Node;
use crate::{Inner, Ino, Overlay, blocking};

impl Overlay {
    /// Returns the settings of an inode, and what made each of them.
    ///
    /// # Errors
    /// `Stale` if the inode is gone.
    pub async fn policy_verdict(&self, ino: Ino) -> Result<Verdict> {
        let node = self.inner.node(ino)?;
        self.inner.learn_policy_facts(&node).await;
        Ok(self.inner.verdict_of(&node))
    }

    /// Explains the settings of a path, and what happens next to it.
    ///
    /// # Errors
    /// `NotFound` if there is nothing at the path.
    pub async fn explain_policy(&self, path: &PoolPath) -> Result<PolicyExplanation> {
        let ino = self.resolve(path).await?;
        let verdict = self.policy_verdict(ino).await?;
        let settings = SettingName::ALL.into_iter().zip(&verdict.origins).map(|(name, origin)| ExplainedSetting {
            name: name.to_string(),
            value: verdict.policy.value(name),
            origin: origin.to_string(),
        });
        let inner = self.inner.clone();
        let next = blocking(move || inner.next_for(ino)).await?;
        Ok(PolicyExplanation { path: self.inner.typed_path(ino), settings: settings.collect(), next })
    }

    /// Begins to put another policy into force, when no other change of it is under way.
    pub async fn begin_policy_change(&self) -> PolicyChange<'_> {
        PolicyChange { overlay: self, _turn: self.inner.policies.changes.lock().await }
    }

    /// Puts a policy into force. What waits in the queue of the flush gets its time by the new rules.
    pub async fn set_policy(&self, policy: Policy) {
        self.begin_policy_change().await.put_into_force(policy);
    }

    /// Returns what a policy would change, from the catalog alone: nothing is asked of the pool.
    pub async fn policy_effect(&self, new: Policy) -> Result<PolicyEffect> {
        let inner = self.inner.clone();
        let speed = self.inner.fetcher.bandwidth.speed();
        blocking(move || {
            let differences = inner.policy().differences(&new);
            let late = differences.iter().filter(|found| found.takes_effect == TakesEffect::AtNextMount);
            let mut effect = PolicyEffect {
                differences: differences.iter().map(ToString::to_string).collect(),
                at_next_mount: late.map(ToString::to_string).collect(),
                ..PolicyEffect::default()
            };
            let mut changed = Vec::new();
            inner.catalog.inodes(|ino, _| {
                changed.push(ino);
                Ok(true)
            })?;
            for ino in changed {
                let Some(node) = inner.node_unless_gone(ino)? else { continue };
                let before = inner.policy_of(&node);
                let after = inner.decide(&new, &node);
                inner.count_effect(&node, &before, &after, &mut effect)?;
                drop(node);
                inner.table.drop_idle(ino);
            }
            effect.seconds = effect.flushed.bytes as f64 / speed.bytes_per_second.max(1.0);
            Ok(effect)
        })
        .await
    }
}

/// A change of the policy. While it lives, no other one begins: what is kept for a restart, the quotas and the rules are
/// those of one policy.
pub struct PolicyChange<'a> {
    overlay: &'a Overlay,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

impl PolicyChange<'_> {
    /// Ends the change: see [`Overlay::set_policy`].
    pub fn put_into_force(self, policy: Policy) {
        let inner = &self.overlay.inner;
        inner.catalog.set_queue_delay(policy.shortest_idle());
        let policy = policy.with_tiers_of(&inner.policy());
        let must_count = inner.quotas.set_policy(&policy.quotas);
        inner.policies.set(policy);
        if let Some(count) = must_count {
            inner.begin_counting_quotas(count);
        }
        inner.policy_changed();
    }
}

impl Inner {
    fn count_effect(
        &self,
        node: &Node,
        before: &PathPolicy,
        after: &PathPolicy,
        effect: &mut PolicyEffect,
    ) -> Result<()> {
        if before == after {
            return Ok(());
        }
        effect.changed_files += 1;
        let (kind, is_dirty, resident, is_made_here) = {
            let state = node.state.lock();
            let record = &state.record;
            (record.kind, record.is_dirty(), !record.file.is_absent(), record.is_made_here())
        };
        let attr = self.attr_of(node)?;
        let bytes = if kind == FileKind::File && resident { attr.blocks * 512 } else { 0 };
        let waits = |policy: &PathPolicy| policy.flush() == FlushPolicy::Manual;
        if is_dirty {
            match (waits(before), waits(after)) {
                (true, false) => effect.flushed.add(bytes),
                (false, true) if after.write == Write::Local && is_made_here => effect.kept_local.add(bytes),
                (false, true) => effect.held_back.add(bytes),
                _ => {}
            }
        }
        if resident && kind == FileKind::File {
            match (before.read == Read::Pin, after.read == Read::Pin) {
                (false, true) => effect.pinned.add(bytes),
                (true, false) => effect.unpinned.add(bytes),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns what happens next to an inode: for each thing that the pool does not have, when it is flushed, and why.
    fn next_for(&self, ino: Ino) -> Result<Vec<String>> {
        let node = self.node(ino)?;
        let links = node.state.lock().record.links.clone();
        let names = links.into_iter().map(|(parent, name)| Intent::Name(parent, name));
        let is_local = self.is_local(&node);
        let mut next = Vec::new();
        for intent in names.chain([Intent::Inode(ino)]) {
            if !self.still_differs(&intent) {
                continue;
            }
            let what = if matches!(intent, Intent::Name(..)) { "its name" } else { "its content or attributes" };
            let when = match self.catalog.queued_as(&intent)? {
                _ if is_local => "never sent, not even by request".into(),
                Some(entry) => self.when_due(&entry)?,
                None => "flushed with what it depends on".into(),
            };
            next.push(format!("{what}: not in the pool; {when}; {}", self.flush_reason(&intent)));
        }
        if next.is_empty() {
            next.push("the pool has all of it".into());
        }
        if self.is_pinned_by_policy(ino) {
            next.push("it is not evicted to make room; `forebay evict` drops it".into());
        }
        Ok(next)
    }
}
