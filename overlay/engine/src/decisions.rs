//! What the policy in force says of a file.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::FileKind;
use forebay_catalog::Link;
use forebay_policy::{DirectoryPolicy, FileFacts, JobFacts, PathPolicy, Policy, Read, SettingName, Verdict, Write};
use forebay_system::clock::unix_now;

use crate::node::Node;
use crate::{Inner, Ino};

/// Directories above a file that are looked at. A path has no more (`PATH_MAX`).
const MAX_DEPTH: usize = 4096;

impl Inner {
    /// Returns the directories that an inode is in, and the inode itself if it is a directory; the nearest first. `name`:
    /// by which of its names; `None`: by the first one.
    fn directories_above(&self, node: &Node, name: Option<&Link>) -> Vec<Ino> {
        let mut dirs = Vec::new();
        let mut at = Some(node.ino).filter(|_| node.state.lock().record.kind == FileKind::Directory);
        at = at.or_else(|| name.map(|(dir, _)| *dir));
        at = at.or_else(|| node.state.lock().record.links.first().map(|(dir, _)| *dir));
        while let Some(dir) = at.filter(|_| dirs.len() < MAX_DEPTH) {
            dirs.push(dir);
            let above = self.node(dir).ok().and_then(|node| node.state.lock().record.links.first().cloned());
            at = above.map(|(dir, _)| dir);
        }
        dirs
    }

    /// Returns the directories that an inode is in by any of its names, and the inode itself if it is a directory.
    fn all_directories_above(&self, node: &Node) -> Vec<Ino> {
        let mut dirs = self.directories_above(node, None);
        let others: Vec<Link> = node.state.lock().record.links.iter().skip(1).cloned().collect();
        let mut known: HashSet<Ino> = if others.is_empty() { HashSet::new() } else { dirs.iter().copied().collect() };
        for name in others {
            dirs.extend(self.directories_above(node, Some(&name)).into_iter().filter(|dir| known.insert(*dir)));
        }
        dirs
    }

    /// Returns the directories above an inode, by any of its names, of which the catalog does not know whether their owners
    /// made settings. The pool has to be asked.
    pub(crate) fn unknown_directories_above(&self, node: &Node) -> Vec<Ino> {
        if self.policy().allowed.is_empty() || !self.pool.capabilities().objects.xattrs {
            return Vec::new();
        }
        let is_unknown = |dir: &Ino| {
            let Ok(node) = self.node(*dir) else { return false };
            let state = node.state.lock();
            (*dir == Ino::ROOT || state.record.in_pool()) && !state.knows_directory_policy()
        };
        self.all_directories_above(node).into_iter().filter(is_unknown).collect()
    }

    /// Returns whether it is known what the owners of the directories above an inode set, now or when that was last known.
    pub(crate) fn knows_directory_policies(&self, node: &Node) -> bool {
        let unknown = self.unknown_directories_above(node);
        unknown.into_iter().all(|dir| self.policies.last_known(dir).is_some())
    }

    /// Returns whether it is known, now or from earlier, what owners say of the flush of an inode.
    pub(crate) fn knows_flush_settings(&self, node: &Node) -> bool {
        !self.policy().owners_decide_flush() || self.knows_directory_policies(node)
    }

    /// Returns whether it is known, now or from earlier, whether an inode is local.
    pub(crate) fn knows_whether_local(&self, node: &Node) -> bool {
        let policy = self.policy();
        if !policy.may_write(Write::Local) || !node.state.lock().record.is_made_here() {
            return true;
        }
        (!policy.allowed.contains(&SettingName::Write) || self.knows_directory_policies(node))
            && (!policy.may_be_local_by_storage_pool() || self.is_layout_told(node))
    }

    /// Returns the settings that directories make for an inode, the nearest directory last.
    fn directory_policies(
        &self,
        policy: &Policy,
        node: &Node,
        name: Option<&Link>,
    ) -> Vec<(Ino, Arc<DirectoryPolicy>)> {
        if policy.allowed.is_empty() {
            return Vec::new();
        }
        let of = |dir: Ino| {
            let node = self.node(dir).ok()?;
            let mut state = node.state.lock();
            let last_known = match state.knows_directory_policy() {
                true => None,
                false => self.policies.last_known(dir).flatten(),
            };
            let settings = state.directory_policy(last_known.as_deref())?;
            // The site may allow less than when it was set, and a value may be set past this mount.
            policy.check_directory(&settings).is_ok().then_some((dir, settings))
        };
        self.directories_above(node, name).into_iter().rev().filter_map(of).collect()
    }

    /// Returns the settings of an inode, as they are at this moment. Locks the node.
    pub fn policy_of(&self, node: &Node) -> PathPolicy {
        let policy = self.policy();
        match policy.uniform() {
            Some(settings) => settings,
            None => self.decide(&policy, node),
        }
    }

    /// Returns the settings of an inode by another policy than the one in force, or by that one.
    ///
    /// The first name of an inode decides. But a file is local only if all of its names are: if the first one is, and another
    /// one is not, that one decides.
    pub(crate) fn decide(&self, policy: &Policy, node: &Node) -> PathPolicy {
        let settings = self.decide_by(policy, node, None);
        match settings.write {
            Write::Local => self.name_not_local(policy, node).map_or(settings, |(_, settings)| settings),
            _ => settings,
        }
    }

    /// Returns the settings of an inode that one of its names gives it; `None`: the first one.
    fn decide_by(&self, policy: &Policy, node: &Node, name: Option<&Link>) -> PathPolicy {
        let mut settings = self.with_facts(policy, node, name, |facts| policy.decide(facts));
        for (_, directory) in self.directory_policies(policy, node, name) {
            directory.apply(&mut settings);
        }
        settings
    }

    /// Returns a name of an inode, after the first one, that does not make it local, and the settings by this name.
    fn name_not_local(&self, policy: &Policy, node: &Node) -> Option<(Link, PathPolicy)> {
        let others: Vec<Link> = node.state.lock().record.links.iter().skip(1).cloned().collect();
        let mut decided = others.into_iter().map(|name| {
            let settings = self.decide_by(policy, node, Some(&name));
            (name, settings)
        });
        decided.find(|(_, settings)| settings.write != Write::Local)
    }

    pub(crate) fn verdict_of(&self, node: &Node) -> Verdict {
        let policy = self.policy();
        let verdict = self.explain_by(&policy, node, None);
        match verdict.policy.write {
            Write::Local => match self.name_not_local(&policy, node) {
                Some((name, _)) => self.explain_by(&policy, node, Some(&name)),
                None => verdict,
            },
            _ => verdict,
        }
    }

    fn explain_by(&self, policy: &Policy, node: &Node, name: Option<&Link>) -> Verdict {
        let mut verdict = self.with_facts(policy, node, name, |facts| policy.explain(facts));
        for (dir, directory) in self.directory_policies(policy, node, name) {
            directory.apply_to(&mut verdict, &self.overlay_path(dir).unwrap_or_default());
        }
        verdict
    }

    /// Collects what `policy` must know of an inode. `name`: which of its names counts; `None`: the first one.
    fn with_facts<T>(
        &self,
        policy: &Policy,
        node: &Node,
        name: Option<&Link>,
        decide: impl FnOnce(&FileFacts<'_>) -> T,
    ) -> T {
        let needed = policy.needed();
        let path = match name {
            Some((dir, name)) => self.overlay_path(*dir).map(|dir| dir.join(name)),
            None => self.overlay_path(node.ino),
        };
        let path = path.unwrap_or_default();
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

    /// Returns whether an inode never goes to the pool: it was created on this node, and the policy says `write = "local"`
    /// by each of its names.
    pub fn is_local(&self, node: &Node) -> bool {
        node.ino != Ino::ROOT && node.state.lock().record.is_made_here() && self.policy_of(node).write == Write::Local
    }

    /// Returns whether eviction may not choose an inode, because its rule says `read = "pin"`, or may say so when its
    /// storage pool is known.
    pub fn is_pinned_by_policy(&self, ino: Ino) -> bool {
        if !self.policy().may_read(Read::Pin) {
            return false;
        }
        let is_pinned =
            self.node(ino).is_ok_and(|node| self.policy_of(&node).read == Read::Pin || self.wants_storage_pool(&node));
        self.table.drop_idle(ino);
        is_pinned
    }
}
