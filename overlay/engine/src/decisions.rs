//! What the policy in force says of a file.

use std::time::Duration;

use forebay_backends::FileKind;
use forebay_policy::{
    DIRECTORY_POLICY_XATTR, DirectoryPolicy, FileFacts, JobFacts, PathPolicy, Policy, Read, Verdict, Write,
};
use forebay_system::clock::unix_now;

use crate::node::Node;
use crate::{Inner, Ino};

/// Directories above a file that are looked at. A path has no more (`PATH_MAX`).
const MAX_DEPTH: usize = 4096;

impl Inner {
    /// Returns the directories that an inode is in, and the inode itself if it is a directory; the nearest first.
    pub(crate) fn directories_above(&self, node: &Node) -> Vec<Ino> {
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

    /// Returns the settings of an inode, as they are at this moment. Locks the node.
    pub fn policy_of(&self, node: &Node) -> PathPolicy {
        let policy = self.policy();
        match policy.uniform() {
            Some(settings) => settings,
            None => self.decide(&policy, node),
        }
    }

    pub(crate) fn decide(&self, policy: &Policy, node: &Node) -> PathPolicy {
        let mut settings = self.with_facts(policy, node, |facts| policy.decide(facts));
        for (_, directory) in self.directory_policies(policy, node) {
            directory.apply(&mut settings);
        }
        settings
    }

    pub(crate) fn verdict_of(&self, node: &Node) -> Verdict {
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
