//! What a rule asks of a file. All conditions of a rule must hold.

use std::fmt;
use std::ops::Bound;
use std::time::Duration;

use forebay_backends::{FileKind, PoolPath, Result};
use globset::{Glob, GlobBuilder, GlobSet, GlobSetBuilder};

use crate::document::{PolicyFields, duration, meant, size};

/// The keys of a rule that are conditions.
pub(crate) const CONDITIONS: [&str; 10] =
    ["paths", "type", "size", "written-ago", "owner", "group", "job", "profile", "pool", "storage-pool"];

/// The kinds of files, as a rule names them.
const KINDS: [(&str, FileKind); 7] = [
    ("file", FileKind::File),
    ("directory", FileKind::Directory),
    ("symlink", FileKind::Symlink),
    ("fifo", FileKind::Fifo),
    ("socket", FileKind::Socket),
    ("char-device", FileKind::CharDevice),
    ("block-device", FileKind::BlockDevice),
];

/// What is known of a file when its policy is decided.
#[derive(Debug, Clone, Copy)]
pub struct FileFacts<'a> {
    /// Relative to the mount.
    pub path: &'a PoolPath,
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    pub uid: u32,
    pub gid: u32,
    /// `None`: the file is in no storage pool, or it is not known.
    pub storage_pool: Option<&'a str>,
    /// Time since the content changed. `None`: not known.
    pub written_ago: Option<Duration>,
    /// The running jobs that use the file.
    pub jobs: &'a [JobFacts],
}

/// A running job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFacts {
    pub name: String,
    /// The name of its profile, if it has one.
    pub profile: Option<String>,
}

impl<'a> FileFacts<'a> {
    /// Returns the facts of a regular file of which only the path is known.
    pub fn of_path(path: &'a PoolPath) -> Self {
        Self { path, kind: FileKind::File, size: 0, uid: 0, gid: 0, storage_pool: None, written_ago: None, jobs: &[] }
    }
}

/// What must be found out of a file, beside its path, before the rules can be asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NeededFacts {
    pub storage_pool: bool,
    /// Its size, or when it was written.
    pub content: bool,
    /// When it was written: this fact changes while nothing happens.
    pub age: bool,
    pub jobs: bool,
}

/// Looks up the numbers of users and groups.
pub trait Accounts {
    fn uid(&self, name: &str) -> Option<u32>;
    fn gid(&self, name: &str) -> Option<u32>;
}

/// Knows no names: rules name users and groups by number.
#[derive(Debug, Clone, Copy)]
pub struct NoAccounts;

impl Accounts for NoAccounts {
    fn uid(&self, _name: &str) -> Option<u32> {
        None
    }

    fn gid(&self, _name: &str) -> Option<u32> {
        None
    }
}

/// A range with bounds on both sides, or on one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Within<T> {
    /// Included.
    from: Option<T>,
    /// Not included.
    until: Option<T>,
}

impl<T: PartialOrd + Copy> Within<T> {
    fn parse(text: &str, read: impl Fn(&str) -> std::result::Result<T, String>) -> std::result::Result<Self, String> {
        let Some((from, until)) = text.split_once("..") else {
            return Err("must be a range, such as \"A..\", \"..B\" or \"A..B\"; B is not in it".into());
        };
        let side = |text: &str| Some(text.trim()).filter(|text| !text.is_empty()).map(&read).transpose();
        let within = Self { from: side(from)?, until: side(until)? };
        match (within.from, within.until) {
            (None, None) => Err("a range needs a bound".into()),
            (Some(from), Some(until)) if from >= until => Err("the range is empty".into()),
            _ => Ok(within),
        }
    }

    fn contains(&self, value: &T) -> bool {
        let from = self.from.as_ref().map_or(Bound::Unbounded, Bound::Included);
        let until = self.until.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        std::ops::RangeBounds::contains(&(from, until), value)
    }
}

/// The conditions of one rule, except for its paths.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conditions {
    kinds: Option<Vec<FileKind>>,
    size: Option<Within<u64>>,
    written_ago: Option<Within<Duration>>,
    owners: Option<Vec<u32>>,
    groups: Option<Vec<u32>>,
    jobs: Option<GlobSet>,
    profiles: Option<GlobSet>,
    storage_pools: Option<Vec<String>>,
    /// The rule is for other pools than the one of this mount.
    elsewhere: bool,
}

impl Conditions {
    pub fn parse(fields: &PolicyFields<'_>, context: &Context<'_>) -> Result<Self> {
        let globs = |key: &str| -> Result<Option<GlobSet>> {
            let Some(texts) = fields.texts(key)? else { return Ok(None) };
            let mut set = GlobSetBuilder::new();
            for text in texts {
                set.add(Glob::new(text).map_err(|e| fields.error(key, format!("{key}: {e}")))?);
            }
            set.build().map(Some).map_err(|e| fields.error(key, format!("{key}: {e}")))
        };
        let pool = globs("pool")?;
        Ok(Self {
            kinds: kinds(fields)?,
            size: fields.read("size", |text| Within::parse(text, size))?,
            written_ago: fields.read("written-ago", |text| Within::parse(text, duration))?,
            owners: accounts(fields, "owner", "user", |name| context.accounts.uid(name))?,
            groups: accounts(fields, "group", "group", |name| context.accounts.gid(name))?,
            jobs: globs("job")?,
            profiles: globs("profile")?,
            storage_pools: fields.texts("storage-pool")?.map(|names| names.into_iter().map(str::to_owned).collect()),
            elsewhere: pool.is_some_and(|pool| !pool.is_match(context.pool_url)),
        })
    }

    /// Returns whether all conditions hold. What is not known fulfils no condition. `storage_pool_name` returns the
    /// given name of a storage pool.
    pub fn hold<'a>(&'a self, facts: &FileFacts<'a>, storage_pool_name: impl Fn(&'a str) -> &'a str) -> bool {
        let among = |list: &Option<Vec<u32>>, id: u32| list.as_ref().is_none_or(|list| list.contains(&id));
        let is_storage_pool = |pools: &Vec<String>| {
            facts.storage_pool.is_some_and(|is| pools.iter().any(|pool| pool == is || pool == storage_pool_name(is)))
        };
        let of_job = |set: &GlobSet| facts.jobs.iter().any(|job| set.is_match(&job.name));
        let of_profile =
            |set: &GlobSet| facts.jobs.iter().any(|job| job.profile.as_ref().is_some_and(|name| set.is_match(name)));
        !self.elsewhere
            && self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&facts.kind))
            && self.size.as_ref().is_none_or(|range| range.contains(&facts.size))
            && self.written_ago.is_none_or(|range| facts.written_ago.is_some_and(|age| range.contains(&age)))
            && among(&self.owners, facts.uid)
            && among(&self.groups, facts.gid)
            && self.storage_pools.as_ref().is_none_or(is_storage_pool)
            && self.jobs.as_ref().is_none_or(of_job)
            && self.profiles.as_ref().is_none_or(of_profile)
    }

    /// Returns the owners that the rule is for, if it names any.
    pub fn owners(&self) -> Option<&[u32]> {
        self.owners.as_deref()
    }

    pub fn needed(&self) -> NeededFacts {
        NeededFacts {
            storage_pool: self.storage_pools.is_some(),
            content: self.size.is_some() || self.written_ago.is_some(),
            age: self.written_ago.is_some(),
            jobs: self.jobs.is_some() || self.profiles.is_some(),
        }
    }
}

/// What the conditions are compiled for.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The pool of the mount, as a URL.
    pub pool_url: &'a str,
    pub accounts: &'a dyn Accounts,
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("pool_url", &self.pool_url).finish_non_exhaustive()
    }
}

fn kinds(fields: &PolicyFields<'_>) -> Result<Option<Vec<FileKind>>> {
    let known = KINDS.map(|(name, _)| name);
    let kind = |text: &str| match KINDS.iter().find(|(name, _)| *name == text) {
        Some((_, kind)) => Ok(*kind),
        None => Err(fields.error("type", format!("there is no type `{text}`{}", meant(text, &known)))),
    };
    fields.texts("type")?.map(|texts| texts.into_iter().map(kind).collect()).transpose()
}

pub(crate) fn accounts(
    fields: &PolicyFields<'_>,
    key: &str,
    what: &str,
    find: impl Fn(&str) -> Option<u32>,
) -> Result<Option<Vec<u32>>> {
    let id = |text: &str| {
        let id = text.parse().ok().or_else(|| find(text));
        id.ok_or_else(|| fields.error(key, format!("{key} = \"{text}\": this node knows no {what} of this name")))
    };
    fields.texts(key)?.map(|texts| texts.into_iter().map(id).collect()).transpose()
}

/// Compiles a glob of a path. `*` and `?` do not match `/`.
pub(crate) fn path_glob(text: &str) -> std::result::Result<Glob, globset::Error> {
    GlobBuilder::new(text.trim_start_matches('/')).literal_separator(true).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_one_bound_or_two() {
        let read = |text: &str| Within::parse(text, size);
        let holds = |text: &str, value: u64| read(text).unwrap().contains(&value);
        assert!(holds("1KiB..", 1024) && !holds("1KiB..", 1023));
        assert!(holds("..1KiB", 1023) && !holds("..1KiB", 1024));
        assert!(holds("1..3", 2) && !holds("1..3", 3) && !holds("1..3", 0));
        for wrong in ["", "..", "1KiB", "3..1", "1..1", "x.."] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
