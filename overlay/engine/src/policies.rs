//! The policy in force, what it says of a file, and its exchange for another one.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use forebay_api::policy::{ExplainedSetting, PolicyEffect, PolicyExplanation};
use forebay_backends::{Error, ErrorKind, FileKind, PoolPath, Result, Side};
use forebay_catalog::Intent;
use forebay_policy::{
    DIRECTORY_POLICY_XATTR, DirectoryPolicy, FileFacts, FlushPolicy, JobFacts, PathPolicy, Policy, Read, SettingName,
    TakesEffect, Verdict, Write,
};
use forebay_system::clock::unix_now;

use super::{Caller, Inner, Ino, Overlay, blocking};
use crate::node::Node;
use crate::space::eviction::ChosenBy;

/// Directories above a file that are looked at. A path has no more (`PATH_MAX`).
const MAX_DEPTH: usize = 4096;

/// The policy in force.
#[derive(Debug)]
pub(crate) struct Policies(ArcSwap<Policy>);

impl Policies {
    pub fn new(policy: Policy) -> Self {
        Self(ArcSwap::from_pointee(policy))
    }
}

impl Inner {
    /// Makes sure that the policy of an inode can be decided. What cannot be found out now counts as absent.
    pub async fn learn_policy_facts(self: &Arc<Self>, node: &Node) {
        if self.policy().needed().storage_pool {
            self.learn_storage_pool(node).await;
        }
        if self.policy().allowed.is_empty() {
            return;
        }
        if let Err(error) = self.learn_xattrs(self.directories_above(node)).await {
            tracing::debug!(%error, ino = %node.ino, "the policies of its directories are not known");
        }
    }

    /// Returns the directories that an inode is in, and the inode itself if it is a directory; the nearest first.
    fn directories_above(&self, node: &Node) -> Vec<Ino> {
        let mut dirs = Vec::new();
        let mut at = Some(node.ino).filter(|_| node.state.lock().record.kind == FileKind::Directory);
        at = at.or_else(|| node.state.lock().record.links.first().map(|(dir, _)| *dir));
        while let Some(dir) = at.filter(|_| dirs.len() < MAX_DEPTH) {
            dirs.push(dir);
            let above = self.node(dir).ok().and_then(|node| node.state.lock().record.links.first().cloned());
            at = above.map(|(dir, _)| dir);
        }
        dirs
    }

    /// Returns the settings that directories make for an inode, the nearest directory last.
    fn directory_policies(&self, policy: &Policy, node: &Node) -> Vec<(Ino, DirectoryPolicy)> {
        if policy.allowed.is_empty() {
            return Vec::new();
        }
        let of = |dir: Ino| {
            let node = self.node(dir).ok()?;
            let state = node.state.lock();
            let mut xattrs = state.record.xattrs.iter().flatten();
            let (_, value) = xattrs.find(|(name, _)| **name == *DIRECTORY_POLICY_XATTR.as_bytes())?;
            // A value that was set past this mount may be wrong.
            policy.parse_directory(std::str::from_utf8(value).ok()?).ok().map(|settings| (dir, settings))
        };
        self.directories_above(node).into_iter().rev().filter_map(of).collect()
    }

    /// Checks the settings of a directory, before they become its extended attribute.
    ///
    /// # Errors
    /// `InvalidInput` if they are wrong or not allowed; `NotPermitted` if the caller does not own the directory.
    pub(crate) fn check_directory_policy(&self, ino: Ino, value: &[u8], caller: Caller) -> Result<()> {
        let policy = self.policy();
        let node = self.node(ino)?;
        let (kind, owner) = {
            let state = node.state.lock();
            (state.record.kind, state.record.uid)
        };
        if policy.allowed.is_empty() || kind != FileKind::Directory {
            return Ok(());
        }
        if caller.uid != 0 && caller.uid != owner {
            let what = format!("{DIRECTORY_POLICY_XATTR}: only the owner of the directory may set it");
            return Err(Error::os(libc::EPERM, Side::Application, what));
        }
        let refused = |why: &dyn std::fmt::Display| {
            tracing::warn!("{}: {why}", self.display(ino));
            Error::new(ErrorKind::InvalidInput, Side::Application, why.to_string())
        };
        let text = std::str::from_utf8(value).map_err(|_| refused(&"a policy is text"))?;
        policy.parse_directory(text).map(drop).map_err(|e| refused(&e))
    }

    pub fn policy(&self) -> Guard<Arc<Policy>> {
        self.policies.0.load()
    }

    /// Returns the settings of an inode, as they are at this moment. Locks the node.
    pub fn policy_of(&self, node: &Node) -> PathPolicy {
        let policy = self.policy();
        match policy.uniform() {
            Some(settings) => settings,
            None => self.decide(&policy, node),
        }
    }

    fn decide(&self, policy: &Policy, node: &Node) -> PathPolicy {
        let mut settings = self.with_facts(policy, node, |facts| policy.decide(facts));
        for (_, directory) in self.directory_policies(policy, node) {
            directory.apply(&mut settings);
        }
        settings
    }

    fn verdict_of(&self, node: &Node) -> Verdict {
        let policy = self.policy();
        let mut verdict = self.with_facts(&policy, node, |facts| policy.explain(facts));
        for (dir, directory) in self.directory_policies(&policy, node) {
            directory.apply_to(&mut verdict, &self.overlay_path(dir).unwrap_or_default());
        }
        verdict
    }

    /// Collects what `policy` must know of an inode.
    fn with_facts<T>(&self, policy: &Policy, node: &Node, decide: impl FnOnce(&FileFacts<'_>) -> T) -> T {
        let needed = policy.needed();
        let path = self.overlay_path(node.ino).unwrap_or_default();
        let storage_pool = needed.storage_pool.then(|| self.known_storage_pool(node)).flatten();
        let jobs: Vec<JobFacts> = if needed.jobs { self.advisor().jobs_of(node.ino) } else { Vec::new() };
        let (kind, mut size, uid, gid, mut mtime, is_dirty) = {
            let record = &node.state.lock().record;
            (record.kind, record.size, record.uid, record.gid, record.mtime, record.file.is_dirty())
        };
        if needed.content
            && is_dirty
            && let Ok(attr) = self.attr_of(node)
        {
            (size, mtime) = (attr.size, attr.mtime);
        }
        // A time in the future counts as now.
        let written_ago = u64::try_from(mtime.secs).map_or(u64::MAX, |secs| unix_now().saturating_sub(secs));
        decide(&FileFacts {
            path: &path,
            kind,
            size,
            uid,
            gid,
            storage_pool: storage_pool.as_deref(),
            written_ago: Some(Duration::from_secs(written_ago)),
            jobs: &jobs,
        })
    }

    /// Returns whether an inode never goes to the pool: it was created on this node, and its rule says `write = "local"`.
    pub fn is_local(&self, node: &Node) -> bool {
        node.ino != Ino::ROOT && !node.state.lock().record.in_pool() && self.policy_of(node).write == Write::Local
    }

    /// Drops the content of a file whose rule says `write = "around"`, if the pool has it and no program uses it.
    pub(crate) fn drop_written_around(&self, node: &Node) -> Result<()> {
        if self.policy().may_write(Write::Around) && self.policy_of(node).write == Write::Around {
            // What is not in the pool yet stays, and is dropped after its flush.
            let _ = self.evict_inode(node.ino, ChosenBy::Rule)?;
        }
        Ok(())
    }

    /// Returns whether eviction may not choose an inode, because its rule says `read = "pin"`.
    pub fn is_pinned_by_policy(&self, ino: Ino) -> bool {
        if !self.policy().may_read(Read::Pin) {
            return false;
        }
        let is_pinned = self.node(ino).is_ok_and(|node| self.policy_of(&node).read == Read::Pin);
        self.table.drop_idle(ino);
        is_pinned
    }
}

impl Overlay {
    /// Returns the policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policies.0.load_full()
    }

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
        Ok(PolicyExplanation { path: self.inner.display(ino), settings: settings.collect(), next })
    }

    /// Puts a policy into force. What waits in the queue of the flush gets its time by the new rules.
    pub fn set_policy(&self, policy: Policy) {
        self.inner.catalog.set_queue_delay(policy.shortest_idle());
        let policy = policy.with_tiers_of(&self.inner.policy());
        let must_count = self.inner.quotas.set_policy(&policy.quotas);
        self.inner.policies.0.store(Arc::new(policy));
        if let Some(count) = must_count {
            self.inner.begin_counting_quotas(count);
        }
        self.inner.policy_changed();
    }

    /// Returns what a policy would change, from the catalog alone: nothing is asked of the pool.
    pub async fn policy_effect(&self, new: Policy) -> Result<PolicyEffect> {
        let inner = self.inner.clone();
        let speed = self.inner.bandwidth.speed();
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

impl Overlay {
    /// Flushes the files that waited for the end of a job, and removes those that never go to the pool and that no other
    /// job uses, with the directories that only they were in. `used`: the files that the job used.
    ///
    /// # Errors
    /// Of the first file that could not be removed. The files after it are removed all the same.
    pub async fn job_ended(&self, used: Vec<Ino>) -> Result<()> {
        let inner = &self.inner;
        let mut outcome = Ok(());
        for ino in used {
            inner.hasten(ino);
            let Some(node) = inner.node_unless_gone(ino)? else { continue };
            let is_file = node.state.lock().record.kind != FileKind::Directory;
            if !is_file || !inner.is_local(&node) || !inner.advisor().jobs_of(ino).is_empty() {
                continue;
            }
            let links = node.state.lock().record.links.clone();
            drop(node);
            for (parent, name) in links {
                match self.unlink(parent, &name).await {
                    Ok(()) => inner.tell_kernel_name(parent, &name),
                    Err(e) if e.is(ErrorKind::NotFound) => {}
                    Err(e) => outcome = outcome.and(Err(e)),
                }
                outcome = outcome.and(self.remove_empty_local(parent).await);
            }
        }
        inner.flush_bell.notify_one();
        outcome
    }

    /// Removes a directory that never goes to the pool, if it is empty, and then those above it.
    async fn remove_empty_local(&self, mut dir: Ino) -> Result<()> {
        loop {
            let Some(node) = self.inner.node_unless_gone(dir)? else { return Ok(()) };
            let link = node.state.lock().record.links.first().cloned();
            let (true, Some((parent, name))) = (self.inner.is_local(&node), link) else { return Ok(()) };
            match self.rmdir(parent, &name).await {
                Ok(()) => self.inner.tell_kernel_name(parent, &name),
                Err(e) if matches!(e.kind(), ErrorKind::NotEmpty | ErrorKind::NotFound) => return Ok(()),
                Err(e) => return Err(e),
            }
            dir = parent;
        }
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
        let (kind, is_dirty, resident, in_pool) = {
            let state = node.state.lock();
            let record = &state.record;
            (record.kind, record.is_dirty(), !record.file.is_absent(), record.in_pool())
        };
        let attr = self.attr_of(node)?;
        let bytes = if kind == FileKind::File && resident { attr.blocks * 512 } else { 0 };
        let waits = |policy: &PathPolicy| policy.flush() == FlushPolicy::Manual;
        if is_dirty {
            match (waits(before), waits(after)) {
                (true, false) => effect.flushed.add(bytes),
                (false, true) if after.write == Write::Local && !in_pool => effect.kept_local.add(bytes),
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

    /// Returns when and why an intent is going to be flushed, for operators.
    pub(crate) fn flush_reason(&self, intent: &Intent) -> String {
        let Some(node) = self.subject_of(intent).and_then(|ino| self.node(ino).ok()) else { return String::new() };
        let verdict = self.verdict_of(&node);
        let by = |name: SettingName| {
            let origin = verdict.origins.get(name as usize).map(ToString::to_string).unwrap_or_default();
            format!("{name} = {} ({origin})", verdict.policy.value(name))
        };
        by(if verdict.policy.write == Write::Back { SettingName::Flush } else { SettingName::Write })
    }
}
