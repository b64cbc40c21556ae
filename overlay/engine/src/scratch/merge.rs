//! Where the entries of a tree go that is merged into a directory: new names, names that are replaced, and directories
//! that exist already and stay as they are.

use std::collections::HashMap;
use std::time::Duration;

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};
use forebay_cache::scratch::TreeEntry;

use super::commit::kind_of;
use crate::namespace::{GraftPoint, kinds_differ};
use crate::permission::{CHANGE, SEARCH, UserGroups};
use crate::{Inner, Ino};

/// How long the pool may take to tell what is in the directories that get parts of a tree.
const PLAN_MAX: Duration = Duration::from_secs(120);
/// For so many names of a directory at most, the directory is not listed.
const LOOKUPS: usize = 4;

/// What is there already of a tree that gets a name.
#[derive(Debug)]
pub(super) struct MergePlan {
    /// For each entry that is a directory: the directory which stays in its place.
    pub kept: Vec<Option<Ino>>,
    /// The inode that an entry replaces.
    pub replaced: HashMap<usize, Ino>,
}

impl MergePlan {
    /// A tree that as a whole gets a new name, or replaces `target`.
    pub fn whole(entries: &[TreeEntry], target: Option<Ino>) -> Self {
        Self { kept: vec![None; entries.len()], replaced: target.map(|target| (0, target)).into_iter().collect() }
    }

    /// Returns whether an entry gets its name in a directory that exists.
    pub fn is_graft(&self, number: usize, entry: &TreeEntry) -> bool {
        self.kept[number].is_none() && entry.parent.is_none_or(|parent| self.kept[parent].is_some())
    }
}

impl Inner {
    /// Finds what a tree meets in a directory of the mount. Changes nothing.
    ///
    /// # Errors
    /// `Exists` if a directory meets something else; `PermissionDenied` or `NotPermitted` if the user may not make or
    /// replace a name; `Timeout` and other errors of the pool if it does not tell the names of a directory.
    pub(super) async fn plan_merge(
        &self,
        entries: &[TreeEntry],
        at: &GraftPoint,
        into: Ino,
        user: &UserGroups,
    ) -> Result<MergePlan> {
        let planned = tokio::time::timeout(PLAN_MAX, self.plan_directories(entries, at, into, user)).await;
        planned.unwrap_or_else(|_| {
            let what = format!(
                "{}: the pool has not told within {} s what is in it: repeat the commit later",
                self.display(into),
                PLAN_MAX.as_secs()
            );
            Err(Error::new(ErrorKind::Timeout, Side::Pool, what))
        })
    }

    async fn plan_directories(
        &self,
        entries: &[TreeEntry],
        at: &GraftPoint,
        into: Ino,
        user: &UserGroups,
    ) -> Result<MergePlan> {
        let mut plan = MergePlan::whole(entries, None);
        let Some(top) = plan.kept.first_mut() else { return Ok(plan) };
        *top = Some(into);
        self.check_allowed(at.parent, user, SEARCH).await?;
        let mut number = 1;
        // The entries of a directory follow each other.
        for siblings in entries[1..].chunk_by(|a, b| a.parent == b.parent) {
            let first = number;
            number += siblings.len();
            let Some(dir) = siblings[0].parent.and_then(|parent| plan.kept[parent]) else { continue };
            self.check_allowed(dir, user, SEARCH).await?;
            let found = self.find_all(dir, siblings).await?;
            let mut changes = false;
            for ((number, entry), found) in (first..).zip(siblings).zip(found) {
                let is_dir = kind_of(entry, entries) == FileKind::Directory;
                match found {
                    Some((ino, FileKind::Directory)) if is_dir => plan.kept[number] = Some(ino),
                    Some((_, kind)) if is_dir || kind == FileKind::Directory => {
                        let path = format!("{}/{}", self.display(dir), entry.name.escape_ascii());
                        return Err(kinds_differ(&path, is_dir));
                    }
                    Some((target, _)) => {
                        self.check_replaceable_by(dir, target, user)?;
                        self.check_not_shown(dir, &entry.name, target)?;
                        plan.replaced.insert(number, target);
                        changes = true;
                    }
                    None => changes = true,
                }
            }
            if changes {
                self.check_allowed(dir, user, CHANGE).await?;
            }
        }
        Ok(plan)
    }

    /// Returns what a directory has under the names of these entries, in the pool or in the mount alone.
    async fn find_all(&self, dir: Ino, entries: &[TreeEntry]) -> Result<Vec<Option<(Ino, FileKind)>>> {
        let listed = match entries.len() > LOOKUPS {
            true => self.ensure_listed(dir).await.map(|()| true),
            false => Ok(false),
        };
        let mut all = Vec::with_capacity(entries.len());
        match listed {
            Ok(true) => {
                for entry in entries {
                    all.push(self.catalog.name(dir, &entry.name)?.here);
                }
            }
            // A pool that cannot list names can still look them up.
            Err(error) if !error.is(ErrorKind::Unsupported) => return Err(error),
            _ => {
                for entry in entries {
                    all.push(match self.find(dir, &entry.name).await? {
                        Some(ino) => Some((ino, self.node(ino)?.state.lock().record.kind)),
                        None => None,
                    });
                }
            }
        }
        Ok(all)
    }
}
